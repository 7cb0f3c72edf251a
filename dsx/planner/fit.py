"""Changes of a config that need less memory per rank, as ``--set`` items; the global batch stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf
from pathlib import Path
from typing import Any

from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.errors import DsxError

_OFFLOAD = "zero_optimization.offload_optimizer.device=cpu"

ENOUGH = 3
"""Suggestions that are worth a user's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySaving:
    """Something to set otherwise.

    Attributes:
        words: What it is, in a few words.
        items: ``key=value`` as ``--set`` takes them; batch keys are written by :func:`_with_batch`.
    """

    words: str
    items: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """One or two changes with which a run fits.

    Attributes:
        words: What they are.
        items: ``key=value`` as ``--set`` takes them.
        peak_bytes: Of the fullest rank, then.
        seconds: Of a step, then; None where offloading adds what is not predicted.
    """

    words: str
    items: tuple[str, ...]
    peak_bytes: int
    seconds: float | None


def what_would_fit(
    source: Path | Mapping[str, Any],
    overrides: Sequence[str],
    config: RunConfig,
    *,
    capacity_bytes: int,
    peak_bytes: Callable[[RunConfig], int],
    seconds: Callable[[RunConfig], float],
) -> tuple[Fitting, ...]:
    """The cheapest changes with which ``config`` fits: single ones if enough of those do, else pairs too.

    Args:
        source: What ``config`` was resolved from.
        overrides: With these.
        config: A run that does not fit.
        capacity_bytes: Memory of a rank.
        peak_bytes: A run's peak, of its fullest rank.
        seconds: What a step of a run takes, by which the changes are ranked.

    Returns:
        At most three, fastest step first and offloading last; fewer, or none, if no more fit.
    """
    found: list[Fitting] = []
    single = list(_changes(config))
    helps: list[MemorySaving] = []
    peak = peak_bytes(config)

    def judge(changes: Sequence[MemorySaving]) -> int | None:
        items = (*overrides, *_with_batch(changes, config))
        try:
            changed = resolve(source, world_size=config.mesh.size, overrides=items)
        except DsxError:  # not every layout can take every change
            return None
        held = peak_bytes(changed)
        if held <= capacity_bytes:
            words = " and ".join(change.words for change in changes)
            own = items[len(overrides) :]
            takes = None if _OFFLOAD in own else seconds(changed)
            found.append(Fitting(words=words, items=own, peak_bytes=held, seconds=takes))
        return held

    for change in single:
        held = judge([change])
        if held is not None and held < peak:
            helps.append(change)
    if len(found) < ENOUGH:
        fitting = {fit.words for fit in found}
        left = [change for change in helps if change.words not in fitting]
        for pair in combinations(left, 2):
            if pair[0].items[0].split("=")[0] != pair[1].items[0].split("=")[0]:
                judge(pair)
    return tuple(sorted(found, key=lambda fit: inf if fit.seconds is None else fit.seconds)[:ENOUGH])


def _changes(config: RunConfig) -> Iterator[MemorySaving]:
    """Single changes that may help."""
    mesh, zero, block = config.mesh, config.zero_stage, config.dsx
    order = ("none", "selective", "full")
    for level in order[order.index(block.recompute) + 1 :] if block.recompute in order else ():
        yield MemorySaving(words=f"recompute {level}", items=(f"dsx.recompute={level}",))
    for stage in range(zero + 1, 4) if mesh.dp > 1 else ():
        yield MemorySaving(words=f"ZeRO-{stage}", items=(f"zero_optimization.stage={stage}",))
    if config.micro_batch_size > 1:
        half = config.micro_batch_size // 2
        yield MemorySaving(
            words=f"micro-batches of {half}", items=(f"train_micro_batch_size_per_gpu={half}",)
        )
    if mesh.tp > 1 and not block.parallel.sequence_parallel:
        yield MemorySaving(words="sequence parallelism", items=("dsx.parallel.sequence_parallel=true",))
    if mesh.dp % 2 == 0:
        yield MemorySaving(words=f"tensor {mesh.tp * 2}", items=(f"dsx.parallel.tensor={mesh.tp * 2}",))
        yield MemorySaving(words=f"pipeline {mesh.pp * 2}", items=(f"dsx.parallel.pipeline={mesh.pp * 2}",))
    if mesh.pp > 1 and config.schedule_name != "1f1b" and block.schedule.file is None:
        items = ("dsx.schedule.name=1f1b", "dsx.parallel.chunks=1")
        yield MemorySaving(words="schedule 1f1b", items=items)
    if zero == 2 and block.zero.reduce == "step" and config.accumulation > 1:
        words = "gradients reduced after every micro-batch"
        yield MemorySaving(words=words, items=("dsx.zero.reduce=micro_batch",))
    if zero and not config.deepspeed["zero_optimization"].get("offload_optimizer"):
        words = "optimizer states on the host"
        yield MemorySaving(words=words, items=(_OFFLOAD,))


def _with_batch(changes: Sequence[MemorySaving], config: RunConfig) -> tuple[str, ...]:
    """The changes' items with all three batch keys, so that the global batch stays."""
    items = [item for change in changes for item in change.items]
    values = dict(item.split("=", 1) for item in items)
    mesh = config.mesh
    tensor = int(values.get("dsx.parallel.tensor", mesh.tp))
    pipeline = int(values.get("dsx.parallel.pipeline", mesh.pp))
    micro = int(values.get("train_micro_batch_size_per_gpu", config.micro_batch_size))
    dp = mesh.size // (tensor * pipeline)
    if dp == mesh.dp and micro == config.micro_batch_size:
        return tuple(items)
    accumulation, rest = divmod(config.global_batch_size, max(1, dp * micro))
    if rest or not accumulation:
        return ("train_batch_size=0",)  # no such batch: refused by resolve
    kept = [item for item in items if not item.startswith("train_micro_batch")]
    return (
        *kept,
        f"train_micro_batch_size_per_gpu={micro}",
        f"gradient_accumulation_steps={accumulation}",
        f"train_batch_size={config.global_batch_size}",
    )
