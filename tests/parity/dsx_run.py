"""dsx's side of parity: train a family in a layout on gloo ranks and gather what the oracle gives too."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from parity.oracle import ADAMW, CLIPPING, CONFIGS, MICRO_BATCH, Run, tokens


@dataclass(frozen=True, kw_only=True)
class Case:
    """A layout, and what else may change the arithmetic."""

    family: str = "llama"
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    context_method: str = "auto"
    zero: int = 0
    accumulation: int = 3
    sequence_parallel: bool = True
    recompute: str = "none"
    compile: str = "none"
    schedule: str = "auto"
    partition: Any = "flops"
    bf16: bool = False
    implementation: str = "auto"
    freeze: tuple[str, ...] = ()
    adapter: tuple[tuple[str, Any], ...] = ()
    zero_keys: tuple[tuple[str, Any], ...] = ()
    keep_gathered: int = 0
    extra: tuple[tuple[str, Any], ...] = ()

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def rows(self) -> int:
        return MICRO_BATCH * self.accumulation * self.dp

    def __str__(self) -> str:
        parts = [
            self.family,
            f"tp{self.tp}",
            f"pp{self.pp}",
            f"v{self.chunks}",
            f"dp{self.dp}",
            f"z{self.zero}",
        ]
        parts += [f"m{self.accumulation}"]
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        parts += [self.context_method] if self.context_method != "auto" else []
        parts += [] if self.sequence_parallel or self.tp == 1 else ["nosp"]
        parts += [self.recompute] if self.recompute != "none" else []
        parts += ["compiled"] if self.compile != "none" else []
        parts += [self.schedule] if self.schedule != "auto" else []
        parts += [f"parts{self.partition}"] if self.partition != "flops" else []
        parts += ["bf16"] if self.bf16 else []
        parts += [self.implementation] if self.implementation != "auto" else []
        parts += [f"frozen {len(self.freeze)}"] if self.freeze else []
        parts += [f"kept{self.keep_gathered}"] if self.keep_gathered else []
        parts += [f"{k}={v}" for k, v in (*self.zero_keys, *self.extra, *self.adapter)]
        return "-".join(parts)


def config(case: Case, folder: Path | None) -> dict[str, Any]:
    """The JSON that a user would write for ``case``."""
    model: dict[str, Any] = {"path": str(folder)} if folder else {"config": CONFIGS[case.family]}
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": case.accumulation,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": case.bf16},
        "zero_optimization": {"stage": case.zero, **dict(case.zero_keys)},
        "optimizer": {
            "type": "AdamW",
            "params": {**ADAMW, "betas": list(ADAMW["betas"]), "torch_adam": True},
        },
        **dict(case.extra),
        "dsx": {
            "model": {**model, "vocab_multiple": 8, "implementation": case.implementation},
            "parallel": {
                "tensor": case.tp,
                "pipeline": case.pp,
                "chunks": case.chunks,
                "sequence_parallel": case.sequence_parallel,
                "context": case.cp,
                "context_method": case.context_method,
                "expert": case.ep,
            },
            "schedule": {"name": case.schedule},
            "partition": {"method": case.partition},
            "recompute": case.recompute,
            "compile": case.compile,
            "adapter": dict(case.adapter) or None,
            "zero": {"keep_gathered_bytes": case.keep_gathered},
            "data": {"tokenizer": "bytes", "sequence_length": 12},
            "train": {"steps": 10, "output": "unused", "freeze": list(case.freeze)},
        },
    }


def batches(case: Case, step: int, dp_rank: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This replica's micro-batches of the oracle's rows."""
    rows = tokens(step, case.rows)
    for j in range(case.accumulation):
        start = (j * case.dp + dp_rank) * MICRO_BATCH
        batch = rows[start : start + MICRO_BATCH]
        yield batch[:, :-1], batch[:, 1:]


def build(case: Case, folder: Path | None) -> tuple[Any, Any]:
    """(engine, resolved config) on this rank."""
    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.train.recipe import build_engine

    resolved = dsx.load_config(config(case, folder), world_size=case.world_size)
    groups = make_groups(resolved.mesh, sequence_parallel=resolved.dsx.parallel.sequence_parallel)
    return build_engine(resolved, groups), resolved


def train(rank: int, world_size: int, case: Case, folder: Path, steps: int) -> Run | None:
    """Train ``steps`` steps; rank 0 gives the run, with weights gathered as Hugging Face tensors."""
    engine, resolved = build(case, folder)
    losses, norms, first = [], [], {}
    for step in range(steps):
        loss = engine.train_batch(batches(case, step, engine.groups.dp_rank))
        losses.append(float(loss))
        norms.append(engine.get_global_grad_norm())
        if step == 0:
            first = gather(engine, resolved, rank)
    return Run(losses, norms, first) if rank == 0 else None


def losses_of(engine: Any, case: Case, steps: Iterable[int]) -> list[float]:
    """The losses of training these steps."""
    rank = engine.groups.dp_rank
    return [float(engine.train_batch(batches(case, step, rank))) for step in steps]


def losses_and_norms(engine: Any, case: Case, steps: Iterable[int]) -> tuple[list[float], list[float]]:
    """The losses and the gradients' norms of training these steps."""
    found = [(*losses_of(engine, case, [step]), engine.get_global_grad_norm()) for step in steps]
    return [loss for loss, _ in found], [norm for _, norm in found]


def gather(engine: Any, resolved: Any, rank: int) -> dict[str, torch.Tensor]:
    """Every weight, whole, under its Hugging Face name, on rank 0."""
    import torch.distributed as dist
    from safetensors.torch import load_file

    from dsx.checkpoint.run.export import export_weights

    holder = [tempfile.mkdtemp()] if rank == 0 else [None]
    dist.broadcast_object_list(holder, src=0)
    folder = Path(holder[0]) / "export"
    export_weights(engine.pipeline, folder, resolved.hf_config)
    if rank != 0:
        return {}
    assert json.loads((folder / "config.json").read_text())["model_type"] == resolved.model.family
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
