"""What a run adds to its config, as findings: the ``dsx`` block, how all of it resolves, and the machine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from functools import reduce
from pathlib import Path as File
from typing import TYPE_CHECKING, Any

from dsx.config.refusals import ABSENT, Finding, step
from dsx.config.wording import Path, at
from dsx.errors import ConfigError, DsxError
from dsx.launch.extension_locks import extension_locks
from dsx.terminal import amount

if TYPE_CHECKING:
    from dsx.config.run import RunConfig


def resolve_run(
    config: Mapping[str, Any], world_size: int | None, gpu_memory_gib: float | None = None
) -> tuple[RunConfig | None, list[Finding]]:
    """The run of ``config``, or what is wrong with it; without a world size the ``dsx`` block alone is read.

    ``gpu_memory_gib`` is all memory of a GPU, which each rank must fit into; None leaves that open.
    """
    from dsx.config.load import SeveralProblemsError, load, raise_all
    from dsx.config.resolve import left_to_plans, resolve
    from dsx.config.sources import missing

    try:
        _, block = load(config)
        left = [left_to_plans(key) for key in ("context", "expert") if getattr(block.parallel, key) == "auto"]
        raise_all("dsx", [*missing(block.data), *_output(block.train.output), *left])
        if world_size is None:
            return None, []
        run = resolve(config, world_size=world_size)
    except DsxError as error:
        problems = error.problems if isinstance(error, SeveralProblemsError) else (error,)
        return None, [as_finding(problem, config) for problem in problems]
    return run, [*_buckets(run, config), *([] if gpu_memory_gib is None else _memory(run, gpu_memory_gib))]


def trainer_block(config: Mapping[str, Any]) -> list[Finding]:
    """What is wrong with the ``dsx`` block of a config that dsx.Trainer reads."""
    from dsx.config.ordinary import problems

    return [as_finding(problem, config) for problem in problems(config)]


def _output(output: str) -> Iterator[ConfigError]:
    """Find a folder for the run that nobody can make or write to; nothing is left in it.

    Where not even the folder around it is there, the config is another machine's, and only a file on the way
    is wrong wherever it is.
    """
    folder = there = File(output).absolute()
    try:
        there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if there.is_dir() and there not in (folder, folder.parent):
            return
        with tempfile.TemporaryFile(dir=there):
            return
    except (OSError, ValueError) as error:
        what = f"{there} cannot be written to ({getattr(error, 'strerror', None) or error})"
    yield ConfigError(at("dsx.train.output", output), what, "name a folder that can be made and written to")


def _buckets(run: RunConfig, config: Mapping[str, Any]) -> list[Finding]:
    """Find a bucket larger than the whole model, which DeepSpeed allocates all the same."""
    parameters = run.summary()["model"]["parameters"]
    path: Path = ("zero_optimization", "reduce_bucket_size")
    size: Any = reduce(step, path, config)
    if not isinstance(size, int | float) or size <= parameters:
        return []
    why = f"the model has {parameters:,} parameters: the bucket never fills, and its memory is taken"
    fix = f"use {parameters} or less"
    return [Finding(check="bucket-size", severity="note", path=path, value=size, why=why, fix=fix)]


def _memory(run: RunConfig, gpu_memory_gib: float) -> list[Finding]:
    from dsx.memory.estimate import estimate_run
    from dsx.memory.job import job_of
    from dsx.planner.cluster import gpu_memory

    room = gpu_memory(gpu_memory_gib)
    peak_bytes = estimate_run(job_of(run, capacity_bytes=room.usable_bytes)).peak_bytes
    if peak_bytes <= room.usable_bytes:
        return []
    why = f"a rank needs {amount(peak_bytes)}, and a GPU has {room}"
    fix = f"see `dsx estimate --gpu-memory {gpu_memory_gib:g}` for changes that fit"
    return [
        Finding(check="memory", severity="error", path=("dsx", "parallel"), value=ABSENT, why=why, fix=fix)
    ]


def as_finding(error: DsxError, config: Mapping[str, Any]) -> Finding:
    """An error of dsx's as a finding about its key in ``config``."""
    value = reduce(step, error.path, config) if error.path else ABSENT
    why = error.what if error.path else f"{error.where}: {error.what}"
    return Finding(check="dsx", severity="error", path=error.path, value=value, why=why, fix=error.fix)


def check_locks(folder: File, now_seconds: float | None = None) -> Iterator[Finding]:
    """Find locks of builds, for which later runs wait for ever in silence if the build was killed."""
    for lock in extension_locks(folder, now_seconds):
        yield Finding(
            check="extensions-lock",
            severity="note" if lock.builder else "warning",
            path=(),
            value=ABSENT,
            why=lock.why,
            fix=lock.fix,
        )
