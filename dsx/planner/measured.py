"""What "auto" becomes when the layers have been measured: schedule, chunks, recompute and cut together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dsx.config.run import PENDING, RunConfig, cut_layers
from dsx.config.schema import MEASURE, DsxConfig, PartitionConfig
from dsx.config.wording import at
from dsx.errors import ConfigError, LayoutError, ScheduleError
from dsx.hub.allowed import unselected
from dsx.models.spec import Recompute
from dsx.planner.choose import Ranking, choose
from dsx.planner.layout import Bounds, Space
from dsx.planner.profile import RECOMPUTE, Conditions, Profile, digest
from dsx.schedules.builders import NAMES

NOT_SHAPES = frozenset({"device", "dsx"})
"""Conditions of a profile that decide times alone."""

_MOST_OTHERS = 6
_GIB = 1 << 30


def recompute_modes(run: RunConfig) -> tuple[Recompute, ...]:
    """Modes to measure, without recomputation among them, which tells what recomputation holds at once."""
    mode = run.dsx.recompute
    if mode == "auto":
        return RECOMPUTE if unselected(run.model) is None else ("none", "full")
    return ("none",) if mode == "none" else ("none", mode)


def conditions_of(run: RunConfig, *, device: str = "", version: str = "") -> Conditions:
    """The conditions under which a profile of ``run`` must have been measured."""
    return Conditions(
        model=digest(
            run.model,
            vocab_multiple=run.dsx.model.vocab_multiple,
            loss_chunk=run.loss_chunk,
            mlp_tiles=run.mlp_tiles,
        ),
        micro_batch_size=run.micro_batch_size,
        sequence_length=run.sequence_length,
        tensor=run.mesh.tp,
        sequence_parallel=run.dsx.parallel.sequence_parallel and run.mesh.tp > 1,
        precision=run.precision,
        device=device,
        dsx=version,
    )


def read_saved(path: Path, key: str | None = None) -> Profile:
    """The profile in the file at ``path``, which the config's ``key`` names."""
    where = str(path) if key is None else at(key, str(path))
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(
            where, f"it cannot be read ({reason})", 'give a profile.json, or "measure"'
        ) from None
    return Profile.from_json(text, name=where)


def check_saved(run: RunConfig) -> None:
    """Raise ConfigError unless the saved profile, if one is named, fits as far as is known so early."""
    if run.dsx.profile_source in (None, MEASURE):
        return
    assert run.dsx.profile is not None
    profile, name = read_saved(Path(run.dsx.profile), "dsx.profile"), at("dsx.profile", run.dsx.profile)
    profile.require(conditions_of(run), name=name, ignore=NOT_SHAPES)
    for mode in recompute_modes(run):
        profile.require_mode(mode, name=name)


def settle(run: RunConfig, profile: Profile, path: Path) -> RunConfig:
    """``run`` with all that was open chosen by simulated step.

    The result's config names ``path``, where the profile is saved, so that loading it gives the result.
    """
    try:
        ranking = choose(
            profile, num_ranks=run.mesh.pp, num_micro_batches=run.accumulation, space=_space(run)
        )
    except (LayoutError, ScheduleError) as error:
        raise ConfigError(error.where, error.what, error.fix) from None
    cut = ranking.chosen.cut
    return replace(
        run,
        dsx=_written_out(run, ranking, path),
        chunks=cut.stage_map.num_chunks,
        program=cut.program,
        stage_map=cut.stage_map,
        notes=(*(note for note in run.notes if note != PENDING), *_explained(ranking)),
    )


def _space(run: RunConfig) -> Space:
    dsx, block, many = run.dsx, run.dsx.schedule, run.mesh.pp > 1
    method, cap = dsx.partition.method, block.activation_gib
    by_hand = run.program.rows is not None
    chunks: tuple[int, ...] | None = None
    if dsx.parallel.chunks != "auto" or isinstance(method, list) or not many:
        chunks = (run.chunks,)
    return Space(
        names=NAMES if many and block.name == "auto" else (run.program.name,),
        chunks=chunks,
        group_size=block.group_size if many else None,
        warmup_per_rank=block.warmup if many else None,
        most_live=block.most_live if many else None,
        rows=run.program if by_hand else None,
        recompute=recompute_modes(run) if dsx.recompute == "auto" else (dsx.recompute,),
        cut=None if method == "time" else partial(_cut, run),
        most_bytes=None if cap is None else int(cap * _GIB),
    )


def _cut(run: RunConfig, num_stages: int) -> Bounds:
    ranks = run.mesh.pp
    try:
        return cut_layers(
            run.dsx, run.model, run.param_specs, num_ranks=ranks, num_chunks=num_stages // ranks
        ).bounds
    except ConfigError as error:
        raise LayoutError(error.where, error.what, error.fix) from None


def _written_out(run: RunConfig, ranking: Ranking, path: Path) -> DsxConfig:
    dsx, chosen = run.dsx, ranking.chosen
    stages, options = chosen.cut.stage_map, chosen.options
    schedule: Mapping[str, Any] = {}
    if chosen.cut.program.rows is None and run.mesh.pp > 1:
        schedule = {
            "name": chosen.cut.program.name,
            "group_size": options.group_size,
            "warmup": options.warmup_per_rank,
        }
    counts = [len(stages.layers(stage)) for stage in range(stages.num_stages)]
    method = dsx.parallel.method if run.mesh.cp > 1 else "auto"
    return dsx.model_copy(
        update={
            "parallel": dsx.parallel.model_copy(
                update={"chunks": stages.num_chunks, "context_method": method}
            ),
            "schedule": dsx.schedule.model_copy(update=schedule),
            "partition": PartitionConfig(method=counts),
            "profile": str(path),
            "recompute": chosen.recompute,
        }
    )


def _explained(ranking: Ranking) -> Iterator[str]:
    chosen = ranking.chosen
    yield f"chosen by simulation: {chosen.label}: {chosen.figures}"
    for other in ranking.next_best(_MOST_OTHERS):
        yield f"not {other.label}: {ranking.reason(other)}"
