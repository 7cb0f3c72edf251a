"""What a GPU day compares: dsx's engine, and Hugging Face's model in DeepSpeed's engine, from one JSON."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_sections.worker import Json, Place

Batch = tuple[Any, Any]
STOCK = "Hugging Face + DeepSpeed"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """An engine of either kind.

    Attributes:
        step: One optimizer step; the mean loss, a scalar tensor.
        norm: Gradient norm of the last step, before clipping.
        scale: Loss scale of the last step; None without.
        skipped: Steps that overflowed.
        parameters: Number of them.
        run: The resolved config of dsx; None for the other.
    """

    step: Callable[[Sequence[Batch]], Any]
    norm: Callable[[], float]
    scale: Callable[[], float | None]
    skipped: Callable[[], int]
    parameters: int
    run: Any = None


def llama(hidden: int, layers: int, heads: int, **others: Any) -> Json:
    """A Llama's config.json."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": others.pop("intermediate_size", hidden * 7 // 2),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": others.pop("num_key_value_heads", max(heads // 4, 1)),
        "vocab_size": others.pop("vocab_size", 128_256),
        "max_position_embeddings": 131_072,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": others.pop("tie_word_embeddings", False),
        "attention_bias": False,
        "mlp_bias": False,
        **others,
    }


def settings(
    model: Mapping[str, Any] | Path,
    *,
    length: int,
    micro_batch: int,
    accumulation: int = 1,
    zero: int = 1,
    precision: str = "bf16",
    recompute: str = "none",
    optimizer: Mapping[str, Any] | None = None,
    implementation: str = "dsx",
    compiles: bool = False,
    adapter: Mapping[str, Any] | None = None,
    **more: Any,
) -> Json:
    """The JSON that a user would write; ``more`` goes to its top level, ``offload`` to its ZeRO block."""
    zero_block: Json = {"stage": zero, "reduce_bucket_size": 50_000_000, "allgather_bucket_size": 50_000_000}
    if more.pop("offload", False):
        zero_block["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        more["zero_force_ds_cpu_optimizer"] = False
    source = {"path": str(model)} if isinstance(model, Path) else {"config": dict(model)}
    adam = {"lr": 1e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1, "torch_adam": True}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": zero_block,
        "zero_allow_untested_optimizer": True,
        "optimizer": {"type": "AdamW", "params": dict(optimizer or adam)},
        **({} if precision == "fp32" else {precision: {"enabled": True, **more.pop("half", {})}}),
        **more,
        "dsx": {
            "model": {**source, "implementation": implementation},
            "recompute": recompute,
            "data": {"source": "own", "sequence_length": length},
            "train": {"steps": 100, "output": "unused"},
            "memory_check": "off",
            **({"compile": "blocks"} if compiles else {}),
            **({"adapter": dict(adapter)} if adapter else {}),
        },
    }


def batches(content: Mapping[str, Any], vocabulary: int, place: Place, seed: int = 1) -> list[Batch]:
    """The micro-batches of a step on this rank's device: inputs and labels, int64 [micro-batch, length]."""
    import torch

    shape = (
        content["train_micro_batch_size_per_gpu"],
        content["dsx"]["data"]["sequence_length"] + 1,
    )
    generator = torch.Generator().manual_seed(seed)
    count = content["gradient_accumulation_steps"]
    ids = [torch.randint(vocabulary, shape, generator=generator).to(place.device) for _ in range(count)]
    return [(each[:, :-1].contiguous(), each[:, 1:].contiguous()) for each in ids]


def resolved(content: Mapping[str, Any]) -> Any:
    """The config as dsx reads it."""
    import dsx

    return dsx.load_config(dict(content), world_size=int(os.environ["WORLD_SIZE"]))


def ours(content: Mapping[str, Any]) -> Engine:
    """Dsx's engine."""
    import dsx
    from dsx.launch.processes import seed_generators
    from dsx.parallel.groups import make_groups

    run = resolved(content)
    groups = make_groups(run.mesh, sequence_parallel=run.dsx.parallel.sequence_parallel)
    seed_generators(groups, run.dsx.train.seed)
    engine = dsx.recipe.build_engine(run, groups)
    return Engine(
        step=lambda items: engine.train_batch(iter(items)),
        norm=lambda: float(engine.get_global_grad_norm()),
        scale=lambda: engine.current_loss_scale,
        skipped=lambda: int(engine.deepspeed_engine.skipped_steps),
        parameters=run.num_parameters,
        run=run,
    )


def stock(content: Mapping[str, Any], place: Place) -> Engine:
    """Transformers' model in DeepSpeed's engine, as DeepSpeed's users do it."""
    import deepspeed
    import torch
    import torch.nn.functional as F

    block = content["dsx"]
    model = _transformers_model(content, place)
    if block["recompute"] == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    if "compile" in block:
        for layer in model.base_model.layers:
            layer.compile()
    config = {key: value for key, value in content.items() if key != "dsx"}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step(items: Sequence[Batch]) -> Any:
        total = torch.zeros((), device=place.device)
        for inputs, labels in items:
            logits = engine(input_ids=inputs, use_cache=False).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(items)
        return total

    return Engine(
        step=step,
        norm=lambda: float(engine.get_global_grad_norm()),
        scale=lambda: float(engine.optimizer.cur_scale) if engine.fp16_enabled() else None,
        skipped=lambda: int(engine.skipped_steps),
        parameters=sum(getattr(each, "ds_numel", each.numel()) for each in model.parameters()),
    )


def _transformers_model(content: Mapping[str, Any], place: Place) -> Any:
    """The model of the JSON's folder or config, on the device in the dtype that it trains in."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((dtypes[key] for key in dtypes if content.get(key, {}).get("enabled")), torch.float32)
    source = content["dsx"]["model"]
    if "path" in source:
        return AutoModelForCausalLM.from_pretrained(
            source["path"], dtype=dtype, attn_implementation="sdpa"
        ).to(place.device)
    fields = {key: value for key, value in source["config"].items() if key != "model_type"}
    config = AutoConfig.for_model(source["config"]["model_type"], **fields)
    torch.manual_seed(1)
    with torch.device(place.device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")


def step_seconds(
    engine: Engine, items: Sequence[Batch], place: Place, *, warm_up: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds of each step after ``warm_up`` of them, and the loss of every step."""
    seconds, losses = [], []
    for index in range(warm_up + steps):
        place.wait()
        began = time.perf_counter()
        loss = engine.step(items)
        place.wait()
        if index >= warm_up:
            seconds.append(time.perf_counter() - began)
        losses.append(float(loss))
    return seconds, losses
