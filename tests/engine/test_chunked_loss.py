"""Training with the head and its loss in chunks of tokens, beside the same layout with whole logits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ranks
from engine import plain_descent
from engine.plain_descent import MICRO_BATCHES, ROWS, VOCABULARY
from often import often

TOKENS, CHUNK, RATE = 12, 7, 1.0

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, untied": ("dsx", {"model_type": "llama", "tie_word_embeddings": False}),
    "llama, tied": ("dsx", {"model_type": "llama", "tie_word_embeddings": True}),
    "gpt_neox": (
        "transformers",
        {"model_type": "gpt_neox", "num_key_value_heads": "none", "pad_token_id": "none"},
    ),
    "gemma2, caps": (
        "transformers",
        {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 2.0},
    ),
    "granite, scaled": (
        "transformers",
        {"model_type": "granite", "logits_scaling": 3.0, "embedding_multiplier": 2.0},
    ),
    "cohere, scaled, tied": ("transformers", {"model_type": "cohere", "logit_scale": 0.5}),
    "phi, bias": ("transformers", {"model_type": "phi", "num_key_value_heads": 4}),
    "qwen3_moe, routers' loss": (
        "transformers",
        {
            "model_type": "qwen3_moe",
            "head_dim": 8,
            "moe_intermediate_size": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
            "router_aux_loss_coef": 0.5,
        },
    ),
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp 2": (2, {"parallel": {"tensor": 2}}),
    "tp 2, whole sequences": (2, {"parallel": {"tensor": 2, "sequence_parallel": False}}),
    "pp 2, 2 chunks": (2, {"parallel": {"pipeline": 2, "chunks": 2}}),
    "dp 2, ZeRO-3": (2, {"zero": 3}),
    "pp 2, zero-bubble, ZeRO-2": (2, {"parallel": {"pipeline": 2}, "schedule": {"name": "zb_h1"}, "zero": 2}),
    "pp 2, GPipe, recomputed": (
        2,
        {"parallel": {"pipeline": 2}, "schedule": {"name": "gpipe"}, "recompute": "full"},
    ),
    "tp 2 x pp 2, zbv": (4, {"parallel": {"tensor": 2, "pipeline": 2}, "schedule": {"name": "zbv"}}),
    "pp 2 x dp 2, ZeRO-3": (4, {"parallel": {"pipeline": 2}, "zero": 3}),
}
CASES = [(model, layout) for layout in LAYOUTS for model in MODELS]


def micro_batches(step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The last micro-batch trains a few tokens alone, so that whole chunks have none."""
    generator = torch.Generator().manual_seed(step)
    for number in range(MICRO_BATCHES):
        ids, labels = plain_descent.rows(generator, TOKENS)
        if number == MICRO_BATCHES - 1:
            labels[:, 3:] = -100
        yield ids, labels


def settings(model: str, layout: str, chunk: int | None) -> dict[str, Any]:
    told = {"loss": {"chunk_tokens": chunk}}
    return plain_descent.settings(MODELS[model], LAYOUTS[layout][1], tokens=TOKENS, rate=RATE, told=told)


def both(_rank: int, world_size: int, model: str, layout: str) -> list[list[Tensor]]:
    return [trained(world_size, model, layout, chunk) for chunk in (None, CHUNK)]


def trained(world_size: int, model: str, layout: str, chunk: int | None) -> list[Tensor]:
    """Loss, norm and this rank's gradients, by a step of plain descent; the next step's; an evaluation's."""
    import dsx

    config = dsx.load_config(json.loads(json.dumps(settings(model, layout, chunk))), world_size=world_size)
    assert config.loss_chunk == (chunk or 0)
    engine = plain_descent.engine_of(config)
    heads: list[Any] = []
    for module in engine.module.modules():
        if type(module).__name__.endswith(("Head", "TiedUse")):
            module.register_forward_hook(lambda _, args, out: heads.append(out))

    seen = plain_descent.two_steps(engine, micro_batches, RATE)
    dims = {(out[0] if isinstance(out, tuple) else out).dim() for out in heads}
    assert dims <= ({3} if chunk is None else {0})
    seen.append(engine.eval_batch(micro_batches(9)))
    loss, logits = engine.eval_batch(micro_batches(9), return_logits=True)
    whole = [y[0] if isinstance(y, tuple) else y for y in logits or ()]
    assert all(y.shape[:2] == (ROWS, TOKENS) for y in whole)
    return [torch.as_tensor(each).detach() for each in (*seen, loss, *whole)]


@pytest.mark.parametrize(("model", "layout"), often(CASES, 37))
def test_chunks_train_as_whole_logits_do(model: str, layout: str) -> None:
    for whole, parts in ranks.run(both, LAYOUTS[layout][0], model, layout):
        largest = max(float(each.abs().max()) for each in whole[2:-4] if each.numel())
        for place, (one, other) in enumerate(zip(whole, parts, strict=True)):
            far = float((one - other).where(one.isfinite(), torch.zeros_like(one)).abs().max())
            assert far <= 2e-6 * max(largest, float(one.abs().max())), place


class Table(torch.nn.Module):
    """A head of one's own, with a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 16) / 4)

    def forward(self, x: Tensor, loss: Any = None) -> Tensor:
        return x @ self.weight.t() if loss is None else loss(x, self.weight)


def own_lists(_rank: int, _world_size: int, zero: int, tied: bool) -> list[list[float]]:
    """A layer list of one's own with the head as a table of dsx.nn's, tied, or as a module of one's own."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    import dsx
    from dsx import nn as parallel

    words = (parallel.VocabParallelEmbedding, VOCABULARY, 16, dsx.TensorParallel())
    config = settings("llama, tied", "tp 2", None) | {"zero_optimization": {"stage": zero}}
    del config["dsx"]
    found = []
    for chunk in (0, CHUNK, None):
        layers = [TiedLayerSpec("words", *words), LayerSpec(torch.nn.Linear, 16, 16)]
        end = TiedLayerSpec("words", *words, forward_fn=parallel.as_head) if tied else LayerSpec(Table)
        loss = parallel.HeadLoss(tp=dsx.TensorParallel(), vocab_size=VOCABULARY, chunk_tokens=chunk)
        model = dsx.PipelineModule(
            [*layers, end],
            num_stages=2,
            loss_fn=parallel.TokenMean(loss),
            seed_layers=True,
            partition_method="uniform",
            activation_checkpoint_interval=1,
        )
        engine = dsx.initialize(model=model, config=config)[0]
        seen = [engine.train_batch(micro_batches(step)) for step in range(3)]
        found.append([*map(float, seen), float(engine.get_global_grad_norm())])
    return found


@pytest.mark.parametrize(("zero", "tied"), [(0, False), (3, True)])
def test_lists_of_ones_own_train_alike(zero: int, tied: bool) -> None:
    for whole, *others in ranks.run(own_lists, 2, zero, tied):
        assert whole[0] != whole[2]
        for each in others:
            assert each == pytest.approx(whole, rel=2e-6)


def refusals(_rank: int, _world_size: int) -> list[str]:
    import dsx
    from dsx import nn as parallel
    from dsx.errors import DsxError
    from dsx.parallel.groups import make_groups

    found = []
    loss = parallel.HeadLoss(tp=dsx.TensorParallel(), vocab_size=VOCABULARY)
    config = dsx.load_config(settings("llama, tied", "dp 2, ZeRO-3", CHUNK), world_size=1)
    groups = make_groups(config.mesh)
    for head, loss_fn in (
        (torch.nn.Linear(16, VOCABULARY), loss),
        (torch.relu, loss),
        (Table(), torch.nn.CrossEntropyLoss()),
    ):
        try:
            layers = [torch.nn.Embedding(VOCABULARY, 16), head]
            dsx.initialize(model=dsx.PipelineModule(layers, loss_fn=loss_fn, groups=groups), config=config)
        except DsxError as error:
            found.append(str(error))
    return found


def test_a_head_that_takes_no_loss_and_a_loss_of_ones_own_are_refused_by_name() -> None:
    head, function, loss = ranks.run(refusals, 1)[0]
    assert head.startswith("layer 1 (Linear): it takes no loss=")
    assert function.startswith("layer 1 (relu): it takes no loss=")
    assert loss.startswith(f"dsx.loss.chunk_tokens = {CHUNK}: the loss_fn of the PipelineModule")
