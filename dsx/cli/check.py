"""``dsx check``."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli import check_report
from dsx.cli.options import CONFIG, FORMAT, GPU_MEMORY, GPUS, SET
from dsx.cli.output import BAD, say

if TYPE_CHECKING:
    from dsx.config.doctor.finding import Finding
    from dsx.config.doctor.source import Source

_Runner = Literal["deepspeed", "trainer", "dsx"]
_Mode = Literal["safe", "unsafe"]


def check(
    configs: Annotated[list[Path] | None, CONFIG] = None,
    *,
    gpus: Annotated[int | None, GPUS] = None,
    pipeline: Annotated[
        int | None, typer.Option(help="Stages of the model's PipelineModule without dsx; 1 for none.", min=1)
    ] = None,
    client_optimizer: Annotated[
        bool, typer.Option("--client-optimizer", help="The script passes deepspeed.initialize an optimizer.")
    ] = False,
    runner: Annotated[
        _Runner | None,
        typer.Option(
            "--for",
            help="Who runs it: DeepSpeed alone, transformers' Trainer (or Accelerate), dsx. Default: guess.",
        ),
    ] = None,
    gpu_memory: Annotated[float | None, GPU_MEMORY] = None,
    deepspeed_version: Annotated[
        str | None, typer.Option(metavar="X.Y.Z", help="DeepSpeed to check for. Default: the installed one.")
    ] = None,
    from_version: Annotated[
        str | None,
        typer.Option(metavar="X.Y.Z", help="Also tell what changes for this config since that DeepSpeed."),
    ] = None,
    fix: Annotated[
        _Mode | None,
        typer.Option(
            "--fix",
            help="Write corrections into the file; keep the old one as CONFIG.orig. --fix alone (safe) "
            "changes nothing that a run does; --fix=unsafe also makes the likely ones.",
        ),
    ] = None,
    diff: Annotated[
        _Mode | None, typer.Option("--diff", help="Show what --fix, or --fix=unsafe, would write.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 for warnings, too.")] = False,
    machine: Annotated[
        bool, typer.Option("--machine/--no-machine", help="Look for stale locks in torch's extension cache.")
    ] = True,
    explain: Annotated[
        str | None, typer.Option(metavar="KEY", help="Tell what a key of DeepSpeed's does, and exit.")
    ] = None,
    overrides: Annotated[list[str] | None, SET] = None,
    style: Annotated[Literal["table", "json"], FORMAT] = "table",
) -> None:
    """Find what is wrong with a DeepSpeed config, before a run.

    An error fails, or silently does something else than written; a warning is a likely mistake. With --gpus
    the batch is checked, too, and with a dsx block the layout and the memory; a right config's resolution is
    printed. Exit code 1 if there are errors.
    """
    if explain is not None:
        _explain(explain, style)
        return
    _check_arguments(configs, overrides, fix is not None or diff is not None, gpus, gpu_memory)
    outcomes = [
        _one(
            path,
            world_size=gpus,
            pipeline=pipeline,
            client_optimizer=client_optimizer,
            runner=runner,
            gpu_memory=gpu_memory,
            deepspeed_version=deepspeed_version,
            from_version=from_version,
            overrides=overrides or [],
            edits=fix or diff,
            writes=fix is not None,
        )
        for path in configs or []
    ]
    around = _machine() if machine else []
    found = [finding for outcome in outcomes for finding in outcome.findings] + around
    report = check_report.as_json if style == "json" else check_report.as_text
    say(report(outcomes, around))
    bad = {"error", "warning"} if strict else {"error"}
    if any(finding.severity in bad for finding in found):
        raise typer.Exit(BAD)


def _explain(key: str, style: str) -> None:
    from dsx.config.doctor.reference import explain, explain_json

    say(json.dumps(explain_json(key), indent=2) if style == "json" else explain(key))


def _check_arguments(
    configs: list[Path] | None,
    overrides: list[str] | None,
    edits: bool,
    gpus: int | None,
    gpu_memory: float | None,
) -> None:
    if not configs:
        raise typer.BadParameter("name a config, or --explain KEY", param_hint="CONFIG")
    if gpu_memory is not None and gpus is None:
        raise typer.BadParameter("it needs --gpus, the number of ranks", param_hint="--gpu-memory")
    if overrides and edits:
        raise typer.BadParameter("--fix and --diff are about the file itself", param_hint="--set")


def _one(
    path: Path,
    *,
    world_size: int | None,
    pipeline: int | None,
    client_optimizer: bool,
    runner: _Runner | None,
    gpu_memory: float | None,
    deepspeed_version: str | None,
    from_version: str | None,
    overrides: list[str],
    edits: _Mode | None,
    writes: bool,
) -> check_report.Outcome:
    """Check one file, and mend it if asked to."""
    from dsx.config.doctor.examine import Report, examine, read
    from dsx.config.doctor.mend import settle, write
    from dsx.config.doctor.source import from_text
    from dsx.errors import ConfigError

    def look(source: Source) -> Report:
        return examine(
            source,
            world_size=world_size,
            runner=runner,
            version=deepspeed_version,
            from_version=from_version,
            pipeline=pipeline,
            client_optimizer=client_optimizer,
        )

    try:
        source = read(path)
    except ConfigError as error:
        return check_report.unreadable(path, error)
    report = look(_overridden(source, overrides))
    if gpu_memory is not None and report.runner != "dsx":
        raise ConfigError(
            f"--gpu-memory {gpu_memory:g}",
            f"{path} has no dsx block, which would name the model",
            f"use dsx estimate {path} --model MODEL --gpu-memory {gpu_memory:g}",
        )
    shown, mended = "", 0
    if edits is not None:
        changed = settle(
            source.text,
            lambda text: look(from_text(text, str(path))).findings,
            unsafe=edits == "unsafe",
        )
        shown = changed.diff(str(path))
        if writes and shown:
            write(path, changed.after)
            mended, report = len(changed.findings), look(read(path))
    run = None
    more: list[Finding] = []
    if report.runner == "dsx" and not report.errors:
        from dsx.config.doctor.dsx_block import resolve_run

        run, more = resolve_run(report.source.config, world_size, gpu_memory)
        more += [] if more else _tokenizer(report.source.config["dsx"])
    return check_report.Outcome(path, report, (*report.findings, *more), shown, run, mended)


def _overridden(source: Source, overrides: list[str]) -> Source:
    """``source`` with ``--set`` values put over it."""
    if not overrides:
        return source
    from dsx.config.load import override

    config = copy.deepcopy(source.config)
    for item in overrides:
        override(config, item)
    return replace(source, config=config)


def _tokenizer(block: dict[str, Any]) -> list[Finding]:
    """The tokenizer of a right ``dsx`` block, if it is the hub's: whether it can be had."""
    from dsx.config.places import is_hub_name

    name = block["data"].get("tokenizer", "auto")
    if name in ("auto", "bytes", "none") or Path(name).expanduser().exists() or not is_hub_name(name):
        return []
    from dsx.config.doctor.finding import Finding
    from dsx.runtime.data.hub import tokenizer_problem

    (why, unsure), path = tokenizer_problem(name), ("dsx", "data", "tokenizer")
    fix = 'name a folder that holds tokenizer.json, a hub tokenizer, or "bytes"'
    severity: Literal["warning", "error"] = "warning" if unsure else "error"
    return [Finding(check="dsx", severity=severity, path=path, value=name, why=why, fix=fix)] if why else []


def _machine() -> list[Finding]:
    from dsx.config.doctor.machine import check_locks
    from dsx.config.extension_locks import extensions_folder

    return list(check_locks(extensions_folder()))
