"""What ``dsx check`` prints."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsx.config.doctor.finding import ABSENT, Finding, dotted
from dsx.config.doctor.versions import shown
from dsx.config.wording import at

if TYPE_CHECKING:
    from dsx.config.doctor.examine import Report
    from dsx.config.run import RunConfig
    from dsx.errors import ConfigError

_WHO = {
    "deepspeed": "DeepSpeed",
    "trainer": "transformers' Trainer or Accelerate with DeepSpeed",
    "dsx": "dsx",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """One file.

    Attributes:
        path: The file.
        report: The doctor's; None for a file that could not be read.
        findings: The report's, and those of the dsx block.
        diff: What --fix or --diff changed; empty for nothing.
        run: How a right dsx config resolves, with a world size.
        mended: Number of findings that --fix has mended.
    """

    path: Path
    report: Report | None
    findings: tuple[Finding, ...]
    diff: str = ""
    run: RunConfig | None = None
    mended: int = 0


def unreadable(path: Path, error: ConfigError) -> Outcome:
    """A file that is no config."""
    why = f"{error.where.removeprefix(f'{path}, ').removeprefix(str(path))}: {error.what}".removeprefix(": ")
    finding = Finding(check="syntax", severity="error", path=(), value=ABSENT, why=why, fix=error.fix)
    return Outcome(path, None, (finding,))


def as_text(outcomes: Sequence[Outcome], around: Sequence[Finding]) -> str:
    """For people: a paragraph per finding, a line of counts per file."""
    blocks = [_file(outcome, with_name=len(outcomes) > 1) for outcome in outcomes]
    blocks += [_line(None, finding) for finding in around]
    return "\n".join(blocks)


def as_json(outcomes: Sequence[Outcome], around: Sequence[Finding]) -> str:
    """For programs."""
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


def _facts(report: Report | None, finding: Finding) -> dict[str, Any]:
    place = None if report is None else report.source.place(finding.path)
    return {
        "check": finding.check,
        "severity": finding.severity,
        "key": dotted(finding.path),
        "path": list(finding.path),
        "value": None if finding.value is ABSENT else finding.value,
        "written": finding.value is not ABSENT,
        "line": place[0] if place else None,
        "column": place[1] if place else None,
        "why": finding.why,
        "fix": finding.fix,
        "edits": [{"kind": e.kind, "path": list(e.path), "value": e.value} for e in finding.edits],
        "safe": finding.safe,
    }


def _file(outcome: Outcome, *, with_name: bool) -> str:
    lines = [f"{outcome.path}:"] if with_name else []
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
    said = f"{finding.why}. To mend: {finding.fix}." if finding.severity == "note" else ""
    said = said or f"{finding.why}. Fix: {finding.fix}."
    return f"{finding.severity:<8} {f'{where}: ' if where else ''}{said} [{finding.check}]"


def _last(outcome: Outcome) -> str:
    """The line of counts."""
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
    said += (
        f" {shown(report.version)}"
        if report.runner == "deepspeed"
        else f", DeepSpeed {shown(report.version)}"
    )
    said += ", guessed: --for says otherwise)" if report.inferred and report.runner != "dsx" else ")"
    if report.runner == "dsx" and outcome.run is None and not counts["errors"]:
        said += "\nsay --gpus N to check the layout and the batch"
    return said


def _mendable(findings: Sequence[Finding]) -> str:
    """How many of ``findings`` which --fix would mend."""
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
    degrees = f"tensor {mesh['tp']} x pipeline {mesh['pp']} x data {mesh['dp']} = {facts['world_size']} ranks"
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
