"""``dsx check``, and what it prints."""

from __future__ import annotations

import copy
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dsx.cli.options import CONFIGS, FORMAT, GPU_MEMORY, GPUS, SET, STDIN
from dsx.cli.output import BAD, BAD_INPUT, say, say_styled, tell
from dsx.config.document import Source, UnopenedError, decoded, from_text, read_text, refuse_unusable
from dsx.config.keys import shown
from dsx.config.refusals import ABSENT, Finding
from dsx.config.wording import at, dotted, name_of, without_secrets
from dsx.errors import ConfigError
from dsx.parallel.mesh import Mesh

if TYPE_CHECKING:
    from dsx.config.run import RunConfig
    from dsx.doctor.examine import Report


_WHO = {
    "deepspeed": "DeepSpeed",
    "trainer": "transformers' Trainer or Accelerate with DeepSpeed",
    "dsx": "dsx",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of checking one file.

    Attributes:
        report: The doctor's report; None for a file that could not be read.
        findings: The report's findings, and those of the dsx block.
        diff: What --fix or --diff changed; empty if nothing.
        run: How a correct dsx config resolves, if a world size is given.
        mended: Number of findings that --fix has mended.
    """

    path: Path
    report: Report | None
    findings: tuple[Finding, ...]
    diff: str = ""
    run: RunConfig | None = None
    mended: int = 0


def shown_path(path: Path) -> str:
    """The name of a file that is checked."""
    return "standard input" if path == STDIN else str(path)


def as_text(outcomes: Sequence[Outcome], around: Sequence[Finding], *, with_names: bool) -> str:
    """The outcomes for people: a paragraph per finding, a line of counts per file."""
    blocks = [_file(outcome, with_name=with_names) for outcome in outcomes]
    blocks += [_line(None, finding) for finding in around]
    return "\n".join(blocks)


def as_json(outcomes: Sequence[Outcome], around: Sequence[Finding]) -> str:
    """The outcomes for programs."""
    found = [finding for outcome in outcomes for finding in outcome.findings] + list(around)
    content = {
        "files": [_file_facts(outcome) for outcome in outcomes],
        "machine": [_facts(None, finding) for finding in around],
        "counts": _counts(found),
    }
    return json.dumps(content, indent=2)


def _counts(findings: Sequence[Finding]) -> dict[str, int]:
    counted = Counter(finding.severity for finding in findings)
    return {"errors": counted["error"], "warnings": counted["warning"], "notes": counted["note"]}


def _file_facts(outcome: Outcome) -> dict[str, Any]:
    report = outcome.report
    return {
        "file": str(outcome.path),
        "for": None if report is None else report.runner,
        "inferred": None if report is None else report.inferred,
        "deepspeed_version": None if report is None else shown(report.version),
        "findings": [_facts(report, finding) for finding in outcome.findings],
        "counts": _counts(outcome.findings),
        "mended": outcome.mended,
        "diff": outcome.diff,
        "resolved": None if outcome.run is None else outcome.run.summary(),
    }


def _for_json(value: Any, path: Sequence[str | int]) -> Any:
    """A value as other readers of JSON take it: no secrets, and NaN and Infinity as their words."""
    text = json.dumps(without_secrets(value, name_of(path)), default=str)
    return json.loads(text, parse_constant=str)


def _facts(report: Report | None, finding: Finding) -> dict[str, Any]:
    place = None if report is None else report.source.place(finding.path)
    return {
        "check": finding.check,
        "severity": finding.severity,
        "key": dotted(finding.path),
        "path": list(finding.path),
        "value": None if finding.value is ABSENT else _for_json(finding.value, finding.path),
        "written": finding.value is not ABSENT,
        "line": place[0] if place else None,
        "column": place[1] if place else None,
        "why": finding.why,
        "fix": finding.fix,
        "edits": [
            {"kind": e.kind, "path": list(e.path), "value": _for_json(e.value, e.path)} for e in finding.edits
        ],
        "safe": finding.safe,
    }


def _file(outcome: Outcome, *, with_name: bool) -> str:
    lines = [f"{shown_path(outcome.path)}:"] if with_name else []
    lines += [_line(outcome.report, finding) for finding in outcome.findings]
    if outcome.run is not None:
        lines.append(summary(outcome.run.summary()))
    if outcome.diff:
        lines.append(outcome.diff.rstrip("\n"))
    lines.append(_last(outcome))
    return "\n".join(lines)


def _line(report: Report | None, finding: Finding) -> str:
    place = None if report is None else report.source.place(finding.path)
    where = dotted(finding.path) if finding.value is ABSENT else at(dotted(finding.path), finding.value)
    where += f" (line {place[0]})" if place and where else f"line {place[0]}" if place else ""
    where += " (--set)" if report is not None and where and report.source.is_put(finding.path) else ""
    said = f"{finding.why}. Fix: {finding.fix}. [{finding.check}]"
    return f"{finding.severity:<8} {f'{where}: ' if where else ''}{said}"


def _last(outcome: Outcome) -> str:
    counts = _counts(outcome.findings)
    words = [f"{n} {name[:-1] if n == 1 else name}" for name, n in counts.items() if n]
    said = ", ".join(words) or "nothing to mend"
    if outcome.mended:
        said += f"; {outcome.mended} mended"
    report = outcome.report
    if report is None:
        return said
    said += _mendable(outcome.findings) if not outcome.diff else ""
    said += f" (for {_WHO[report.runner]}"
    said += " " if report.runner == "deepspeed" else ", DeepSpeed "
    said += shown(report.version)
    said += ", guessed: --for says otherwise)" if report.inferred and report.runner != "dsx" else ")"
    if report.runner == "dsx" and outcome.run is None and not counts["errors"]:
        said += "\nsay --gpus N to check the layout and the batch"
    return said


def _mendable(findings: Sequence[Finding]) -> str:
    """How many of ``findings`` --fix would mend."""
    certain = sum(finding.safe for finding in findings)
    likely = sum(bool(finding.edits) for finding in findings) - certain
    said = f"; --fix mends {certain}" if certain else ""
    return said + (
        f"{',' if said else ';'} --fix=unsafe {'mends ' * (not said)}{likely}{' more' * bool(said)}"
        if likely
        else ""
    )


def summary(facts: dict[str, Any]) -> str:
    """How a run resolves."""
    mesh, batch, model = facts["mesh"], facts["batch"], facts["model"]
    degrees = f"{Mesh.of(**mesh).words} = {facts['world_size']} ranks"
    factors = (
        f"micro-batch {batch['micro_batch_size']}",
        f"{batch['micro_batches_per_step']} micro-batches",
        f"data {mesh['dp']}",
    )
    size = f"{batch['global_batch_size']} sequences of {batch['sequence_length']} tokens per step"
    lines = [
        f"model      {model['family']}, {model['parameters']:,} parameters",
        f"mesh       {degrees}{', sequence parallel' if facts['sequence_parallel'] else ''}",
        f"schedule   {facts['schedule']}, chunks per pipeline rank: {facts['chunks']}",
        f"memory     ZeRO-{facts['zero_stage']}, {facts['precision']}, recompute {facts['recompute']}",
        f"batch      {size} = {' x '.join(factors)}",
    ]
    if facts["islands"] is not None:
        count, ranks = facts["islands"]["count"], facts["islands"]["ranks"]
        tokens = f"{batch['tokens_per_step'] * count:,} tokens per step of all"
        lines.append(
            f"islands    {count} of {ranks} rank{'' if ranks == 1 else 's'} each, {tokens}; the above is one"
        )
    for stage in facts["stages"]:
        chunks = " | ".join(_layers(layers) for layers in stage["chunks"])
        size = f"{stage['parameters_per_rank']:,} parameters per rank"
        lines.append(f"stage {stage['pipeline_rank']:<4} {chunks}  ({size})")
    lines += [f"note       {note}" for note in facts["notes"]]
    return "\n".join(lines)


def _layers(layers: list[str]) -> str:
    """``["0 WordEmbedding", "1 Block", "2 Block"]`` as ``0 WordEmbedding, 1-2 Block``."""
    words = []
    for kind, group in groupby((layer.split(" ", 1) for layer in layers), key=lambda layer: layer[1]):
        numbers = [number for number, _ in group]
        words.append(f"{numbers[0]}{f'-{numbers[-1]}' if len(numbers) > 1 else ''} {kind}")
    return ", ".join(words)


# First characters of a line -> its style: what a finding is, and the lines of a diff.
_STYLES = {
    "error ": "bold red", "warning ": "bold yellow", "note ": "bold cyan",
    "+": "green", "-": "red", "@@": "cyan",
}  # fmt: skip


def _styled(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines(keepends=True):
        start = next((start for start in _STYLES if line.startswith(start)), "")
        end = len(start) if start.endswith(" ") else len(line)
        yield line[:end], _STYLES.get(start, "")
        yield line[end:], ""


_Runner = Literal["deepspeed", "trainer", "dsx"]
_Mode = Literal["safe", "unsafe"]


def check(
    configs: Annotated[list[Path] | None, CONFIGS] = None,
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

    An error fails, or silently does something else than what is written; a warning is a likely mistake. With
    --gpus the batch is checked too, and, if there is a dsx block, the layout and the memory; how a correct
    config resolves is printed. Exit code 1 if there are errors.
    """
    if explain is not None:
        from dsx.doctor.explain import explain as explained
        from dsx.doctor.explain import explain_json

        say(json.dumps(explain_json(explain), indent=2) if style == "json" else explained(explain))
        return
    _check_arguments(configs, overrides, fix, diff, gpus, gpu_memory)
    from dsx.doctor.examine import examine

    look = partial(
        examine,
        world_size=gpus,
        runner=runner,
        version=deepspeed_version,
        from_version=from_version,
        pipeline=pipeline,
        client_optimizer=client_optimizer,
    )
    outcomes: list[Outcome] = []
    unseen: list[ConfigError] = []
    for path in configs or []:
        try:
            outcomes.append(_one(path, look, gpus, gpu_memory, overrides or [], fix or diff, fix is not None))
        except ConfigError as error:
            unseen.append(error)
    around = _machine() if machine else []
    found = [finding for outcome in outcomes for finding in outcome.findings] + around
    if outcomes and style == "json":
        say(as_json(outcomes, around))
    elif outcomes:
        said = as_text(outcomes, around, with_names=len(configs or []) > 1)
        say_styled(_styled(said), plain=said)
    for each in unseen:
        tell(each)
    bad = {"error", "warning"} if strict else {"error"}
    if unseen:
        raise typer.Exit(BAD_INPUT)
    if any(finding.severity in bad for finding in found):
        raise typer.Exit(BAD)


def _check_arguments(
    configs: list[Path] | None,
    overrides: list[str] | None,
    fix: _Mode | None,
    diff: _Mode | None,
    gpus: int | None,
    gpu_memory: float | None,
) -> None:
    if not configs:
        raise typer.BadParameter("name a config, or --explain KEY", param_hint="CONFIG")
    if fix is not None and STDIN in configs:
        raise typer.BadParameter("standard input cannot be written to; --diff shows it", param_hint="--fix")
    if gpu_memory is not None and gpus is None:
        raise typer.BadParameter("it needs --gpus, the number of ranks", param_hint="--gpu-memory")
    if overrides and (fix or diff):
        raise typer.BadParameter("--fix and --diff are about the file itself", param_hint="--set")


def _one(
    path: Path,
    look: Callable[[Source], Report],
    world_size: int | None,
    gpu_memory: float | None,
    overrides: list[str],
    edits: _Mode | None,
    writes: bool,
) -> Outcome:
    """Check one file, and mend it if asked to. Raises ConfigError if it cannot be looked at."""
    from dsx.doctor.mend import settle, write

    try:
        text = decoded(sys.stdin.buffer, shown_path(path)) if path == STDIN else read_text(path)
        source = from_text(text, name="")
    except UnopenedError:
        raise
    except ConfigError as error:
        why = f"{error.where or shown_path(path)}: {error.what}"
        finding = Finding(check="syntax", severity="error", path=(), value=ABSENT, why=why, fix=error.fix)
        return Outcome(path, None, (finding,))
    report = look(_overridden(source, overrides))
    if gpu_memory is not None and report.runner != "dsx":
        raise ConfigError(
            f"--gpu-memory {gpu_memory:g}",
            f"{path} has no dsx block, which would name the model",
            f"use dsx estimate {path} --model MODEL --gpu-memory {gpu_memory:g}",
        )
    shown, mended = "", 0
    if edits is not None:
        changed = settle(source.text, lambda text: look(from_text(text)).findings, unsafe=edits == "unsafe")
        shown = changed.diff(shown_path(path))
        if writes and shown:
            write(path, changed.after)
            mended, report = len(changed.findings), look(from_text(changed.after))
    run = None
    more: list[Finding] = []
    if report.runner == "dsx" and not report.errors:
        from dsx.doctor.run import resolve_run

        run, more = resolve_run(report.source.config, world_size, gpu_memory)
        more += [] if more else _tokenizer(report.source.config["dsx"])
    elif report.runner == "trainer" and "dsx" in report.source.config:
        from dsx.doctor.run import trainer_block

        more = trainer_block(report.source.config)
    return Outcome(path, report, (*report.findings, *more), shown, run, mended)


def _overridden(source: Source, overrides: list[str]) -> Source:
    """``source`` with ``--set`` values put over it."""
    if not overrides:
        return source
    from dsx.config.load import override

    config = copy.deepcopy(source.config)
    put = tuple(override(config, item) for item in overrides)
    changed = replace(source, config=config, put=put)
    refuse_unusable(changed)
    return changed


def _tokenizer(block: dict[str, Any]) -> list[Finding]:
    """The tokenizer of a correct ``dsx`` block, if it is one of the hub's: whether it can be had."""
    from dsx.config.sources import is_hub_name

    name = block["data"].get("tokenizer", "auto")
    if name in ("auto", "bytes", "none") or Path(name).expanduser().exists() or not is_hub_name(name):
        return []
    from dsx.data.files import tokenizer_problem

    (why, unsure), path = tokenizer_problem(name), ("dsx", "data", "tokenizer")
    fix = 'name a folder that holds tokenizer.json, a hub tokenizer, or "bytes"'
    severity: Literal["warning", "error"] = "warning" if unsure else "error"
    return [Finding(check="dsx", severity=severity, path=path, value=name, why=why, fix=fix)] if why else []


def _machine() -> list[Finding]:
    from dsx.doctor.run import check_locks
    from dsx.launch.extension_locks import extensions_folder

    return list(check_locks(extensions_folder()))
