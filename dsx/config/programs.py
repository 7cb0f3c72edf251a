"""The ``schedule`` block as a :class:`~dsx.plan.program.Program`: a builder with options, or a file."""

from __future__ import annotations

from pathlib import Path

from dsx.config.measured import is_wanted
from dsx.config.problems import at
from dsx.config.schema import DsxConfig
from dsx.errors import ConfigError, ScheduleError
from dsx.plan.builders import Options
from dsx.plan.program import Program
from dsx.spec.schedule import Schedule


def read_file(dsx: DsxConfig) -> tuple[DsxConfig, Program | None]:
    """The schedule in ``dsx.schedule.file``, and the config with the degrees that it is written for.

    Raises:
        ConfigError: The file cannot be read or run, or the config's degrees are others.
    """
    if dsx.schedule.file is None:
        return dsx, None
    key = at("dsx.schedule.file", dsx.schedule.file)
    try:
        text = Path(dsx.schedule.file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(key, f"it cannot be read ({reason})", "give a CSV file, one row per rank") from None
    try:
        program = Program.read(text, name=Path(dsx.schedule.file).name)
    except ScheduleError as error:
        raise ConfigError(key, f"{error.where}: {error.what}", error.fix) from None
    assert program.rows is not None
    return _with_degrees(dsx, program.rows), program


def choose(dsx: DsxConfig, name: str, *, pp: int, chunks: int, accumulation: int) -> Program:
    """The builder ``name`` with the config's options; without, if measuring is still to find the name.

    Raises:
        ConfigError: It has no such option, or not for this size.
    """
    block = dsx.schedule
    given = {
        key: value
        for key, value in (
            ("group_size", block.group_size),
            ("warmup", block.warmup),
            ("most_live", block.most_live),
        )
        if value is not None
    }
    to_be_measured = block.name == "auto" and is_wanted(dsx, pp)
    if not given or pp == 1 or to_be_measured:
        return Program(name=name)
    options = Options(group_size=block.group_size, warmup_per_rank=block.warmup, most_live=block.most_live)
    program = Program(name=name, options=options)
    try:
        program.build(pp, chunks, accumulation)
    except ScheduleError as error:
        # The builders' word for it.
        where, what, fix = (
            text.replace("warmup_per_rank", "warmup") for text in (error.where, error.what, error.fix)
        )
        raise ConfigError(at("dsx.schedule", given), f"{where}: {what}", fix) from None
    return program


def check_file(dsx: DsxConfig, program: Program, *, pp: int, chunks: int, accumulation: int) -> None:
    """Raise ConfigError unless the file is written for this size."""
    try:
        program.build(pp, chunks, accumulation)
    except ScheduleError as error:
        raise ConfigError(
            at("dsx.schedule.file", dsx.schedule.file),
            error.what,
            "set the batch keys and degrees to the file's, or use dsx.schedule.name",
        ) from None


def _with_degrees(dsx: DsxConfig, rows: Schedule) -> DsxConfig:
    degrees = {"pipeline": rows.num_ranks, "chunks": rows.num_chunks}
    for axis, count in degrees.items():
        wanted = getattr(dsx.parallel, axis)
        if wanted not in ("auto", count):
            raise ConfigError(
                at(f"dsx.parallel.{axis}", wanted),
                f"dsx.schedule.file {dsx.schedule.file} is written for {count}",
                f'use {count} or "auto", or another file',
            )
    return dsx.model_copy(update={"parallel": dsx.parallel.model_copy(update=degrees)})
