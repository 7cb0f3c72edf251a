"""Changes of a config that need less memory per rank, as ``--set`` items; the global batch stays."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice
from math import inf
from pathlib import Path
from typing import Any, get_args

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.errors import DsxError, LayoutError
from dsx.hub.allowed import has_tiles
from dsx.models.spec import Recompute
from dsx.parallel.limits import LayoutRequest, violations
from dsx.parallel.mesh import AXES, Mesh
from dsx.planner.best_first import best_first
from dsx.planner.layout import LONG
from dsx.planner.predicted import LayoutScorer, layout_of

ENOUGH = 3
"""Suggestions that are worth a user's time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """One or two changes.

    Attributes:
        words: The changes in a few words.
        fields: Of the :class:`~dsx.planner.layout.Candidate`, with their new values.
        degrees: New degrees, by axis.
        more: Further settings of the config.
    """

    words: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    degrees: Mapping[str, int] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)

    def __and__(self, other: Saving) -> Saving:
        return Saving(
            words=f"{self.words} and {other.words}",
            fields={**self.fields, **other.fields},
            degrees={**self.degrees, **other.degrees},
            more={**self.more, **other.more},
        )

    @property
    def keys(self) -> set[str]:
        return {*self.fields, *self.degrees, *self.more}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitting:
    """A run with something changed so that it fits, or may fit.

    Attributes:
        items: ``key=value`` as ``--set`` takes them.
        seconds: Time of a step; None where offloading adds what is not predicted.
        peak_bytes: Peak of the fullest rank; 0 before it is estimated.
    """

    saving: Saving
    items: tuple[str, ...]
    run: RunConfig = field(repr=False)
    seconds: float | None
    peak_bytes: int = 0

    @property
    def cost(self) -> float:
        """Fastest step first, offloading last."""
        return inf if self.seconds is None else self.seconds


def what_would_fit(
    source: Path | Mapping[str, Any], overrides: Sequence[str], config: RunConfig, scorer: LayoutScorer
) -> tuple[Fitting, ...]:
    """The cheapest changes with which ``config`` fits: single ones, and pairs if too few single ones do.

    ``config`` was resolved from ``source`` and ``overrides``.

    Returns:
        At most three, fastest step first and offloading last; fewer, or none, if no more fit.
    """
    peak, helpful = scorer.peak_bytes(config), set[str]()

    def tried(savings: Iterable[Saving]) -> Iterator[Fitting]:
        for saving in savings:
            try:
                items = _items(saving, config)
                run = resolve(source, world_size=config.mesh.size, overrides=(*overrides, *items))
            except DsxError:  # not every layout can take every change
                continue
            seconds = None if saving.more else scorer.seconds(run)
            yield Fitting(saving=saving, items=items, run=run, seconds=seconds)

    def grow(fitting: Fitting) -> list[Fitting] | None:
        if fitting.peak_bytes:
            return None
        held = scorer.peak_bytes(fitting.run)
        if held <= scorer.capacity_bytes:
            return [replace(fitting, peak_bytes=held)]
        if held < peak:
            helpful.add(fitting.saving.words)
        return []

    def best(savings: Iterable[Saving]) -> list[Fitting]:
        return list(islice(best_first(tried(savings), cost=lambda fitting: fitting.cost, grow=grow), ENOUGH))

    single = list(_savings(config))
    found = best(single)
    if len(found) < ENOUGH:
        left = [saving for saving in single if saving.words in helpful]
        pairs = [one & other for one, other in combinations(left, 2) if not one.keys & other.keys]
        found = sorted([*found, *best(pairs)], key=lambda fitting: fitting.cost)
    return tuple(found[:ENOUGH])


def _savings(config: RunConfig) -> Iterator[Saving]:
    mesh, zero, block = config.mesh, config.zero_stage, config.dsx
    yield from _computed_again(config)
    for stage in range(zero + 1, 4) if mesh.num_replicas > 1 else ():
        yield Saving(words=f"ZeRO-{stage}", fields={"zero_stage": stage})
    if config.micro_batch_size > 1:
        half = config.micro_batch_size // 2
        yield Saving(words=f"micro-batches of {half}", fields={"micro_batch": half})
    if mesh.tp > 1 and not block.parallel.sequence_parallel:
        yield Saving(words="sequence parallelism", fields={"sequence_parallel": True})
    for axis in reversed(AXES) if mesh.num_shares % 2 == 0 else ():
        shares_rows = axis.divides == "sequence" and (mesh.cp > 1 or config.sequence_length >= LONG)
        if not axis.replicates or shares_rows:
            twice = 2 * mesh.degree(axis.name)
            yield Saving(words=f"{axis.title} {twice}", degrees={axis.name: twice})
    if mesh.pp > 1 and config.schedule_name != "1f1b" and block.schedule.file is None:
        yield Saving(words="schedule 1f1b", fields={"schedule": "1f1b", "chunks": 1})
    if zero == 2 and not config.reduces_micro_batches and config.accumulation > 1:
        words = "gradients reduced after every micro-batch"
        yield Saving(words=words, fields={"reduces_micro_batches": True})
    if zero and not config.deepspeed["zero_optimization"].get("offload_optimizer"):
        more = {"zero_optimization.offload_optimizer.device": "cpu"}
        yield Saving(words="optimizer states on the host", more=more)


def _computed_again(config: RunConfig) -> Iterator[Saving]:
    """What backward may compute again in place of keeping it."""
    block, order = config.dsx, get_args(Recompute)
    for level in order[order.index(block.recompute) + 1 :] if block.recompute in order else ():
        yield Saving(words=f"recompute {level}", fields={"recompute": level})
    if block.mlp_tiles == 1 and config.sequence_length >= LONG and has_tiles(config.model):
        yield Saving(words="feed-forwards in tiles", fields={"mlp_tiles": "auto"})


def _items(saving: Saving, config: RunConfig) -> tuple[str, ...]:
    """As ``--set`` takes them, with all three batch keys where they change."""
    now, batch = layout_of(config), config.global_batch_size
    kept = {axis.name: now.mesh.degree(axis.name) for axis in AXES if axis.divides != "samples"}
    mesh = Mesh.over(config.mesh.size, **kept | dict(saving.degrees))
    new, old = replace(now, mesh=mesh, **saving.fields), now.settings
    settings = {key: value for key, value in new.settings.items() if value != old.get(key)}
    settings |= dict(saving.more)
    if (new.data, new.micro_batch) != (now.data, now.micro_batch):
        asked = LayoutRequest(global_batch=batch, data=new.data, micro_batch=new.micro_batch)
        for each in violations(asked):
            raise LayoutError(new.label, each.why, each.fix)
        settings |= {MICRO: new.micro_batch, ACCUMULATION: new.micro_batches(batch), TRAIN: batch}
    return tuple(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()
    )
