"""Tiny models of any family in any layout, and steps of plain descent, which show gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

ROWS, MICRO_BATCHES, VOCABULARY = 2, 4, 89

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}


def settings(
    model: tuple[str, Mapping[str, Any]],
    layout: Mapping[str, Any],
    *,
    tokens: int,
    rate: float,
    told: Mapping[str, Any],
) -> dict[str, Any]:
    """The JSON of a run.

    Args:
        model: Whose modules, and what of its config is not as in SIZES ("none": that it lacks the key).
        layout: Blocks of ``dsx``, ``parallel`` changed and not replaced, and the ZeRO stage.
        tokens: Of a row.
        rate: Of learning.
        told: Further blocks of ``dsx``, and what is frozen.
    """
    implementation, changed = model
    block = {"schedule": {"name": "auto"}} | dict(layout)
    zero = block.pop("zero", 0)
    degrees = {"tensor": 1, "pipeline": 1, "chunks": "auto"} | block.pop("parallel", {})
    config = {key: value for key, value in (SIZES | dict(changed)).items() if value != "none"}
    freeze = {key: value for key, value in told.items() if key == "freeze"}
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": zero},
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "SGD", "params": {"lr": rate}},
        "dsx": {
            "model": {"config": config, "implementation": implementation},
            "parallel": degrees,
            "data": {"source": "own", "sequence_length": tokens},
            "train": {"steps": 2, "output": "unused"} | freeze,
            **{key: value for key, value in told.items() if key != "freeze"},
            **block,
        },
    }


def engine_of(config: Any) -> Any:
    import dsx
    from dsx.parallel.groups import make_groups

    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    return dsx.initialize(model=dsx.recipe.build_model(config, groups), config=config)[0]


def two_steps(engine: Any, micro_batches: Callable[[int], Iterator[Any]], rate: float) -> list[Any]:
    """Loss, norm and this rank's gradients of a step; loss and norm of the next one."""

    def weights() -> list[Tensor]:
        return [getattr(p, "ds_tensor", p).detach().clone() for p in engine.module.parameters()]

    before = weights()
    seen: list[Any] = [engine.train_batch(micro_batches(0)), engine.get_global_grad_norm()]
    seen += [(one - other) / rate for one, other in zip(before, weights(), strict=True)]
    return [*seen, engine.train_batch(micro_batches(1)), engine.get_global_grad_norm()]


def rows(generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
    """Ids and labels of a micro-batch."""
    ids = torch.randint(1, VOCABULARY, (ROWS, tokens + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
