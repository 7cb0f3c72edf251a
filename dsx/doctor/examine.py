"""Run all checks over a config, in the order in which their findings are told.

A check is a row of ``advice.toml``, or of the table of what stops a run (:mod:`dsx.config.refusals`), or,
where it has to look further than at values, a function here in the doctor.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path as File
from typing import Any, Final

from dsx.config import refusals
from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.document import Source, from_mapping, from_text, read_text
from dsx.config.keys import Version, condition, installed, shown
from dsx.config.keys import version as parse_version
from dsx.config.refusals import Context, Edit, Finding, Rule, Runner
from dsx.doctor import unknown, values

Check = Callable[[Context], Iterator[Finding]]


@cache
def _advice() -> dict[str, Any]:
    return tomllib.loads((files("dsx.doctor") / "advice.toml").read_text(encoding="utf-8"))


@cache
def advice() -> tuple[Rule, ...]:
    """The rows of advice: what is said besides what stops a run."""
    return refusals.read_rules(_advice())


def check_advice(context: Context) -> Iterator[Finding]:
    """The findings of the rows of advice."""
    yield from refusals.apply(advice(), context)


CHECKS: Final[tuple[Check, ...]] = (
    # Checks of single keys.
    values.check_duplicates,
    values.check_syntax,
    refusals.check_hidden,
    values.check_constants,
    unknown.check_unknown,
    unknown.check_removed,
    values.check_newer,
    values.check_values,
    values.check_old_form,
    values.check_deprecated,
    refusals.check_required,
    values.check_trainer,
    values.check_switched_off,
    values.check_no_effect,
    # Checks of what does not go together.
    values.check_world,
    values.check_batch_triple,
    values.check_buckets,
    values.check_optimizer,
    values.check_clipping,
    values.check_learning_rate,
    values.check_betas_order,
    values.check_difficulties,
    values.check_whole_numbers,
    values.check_schedule,
    values.check_schedule_length,
    values.check_rounds,
    refusals.check_same_key,
    refusals.check_betas,
    refusals.check_loss_scale,
    refusals.check_rules,
    check_advice,
)


# Numbers of "auto" values that make a Trainer's config: with batch keys among them, and anyhow.
_MIN_AUTO = 2
_SURELY_AUTO = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found.

    Attributes:
        runner: For whom it was checked.
        inferred: Whether that was guessed from the config.
        version: The version of DeepSpeed that it was checked for.
        findings: Errors first, then warnings, then notes; each in the order of the checks.
    """

    source: Source
    runner: Runner
    inferred: bool
    version: Version
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings of what fails, or silently does something else than what is written."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == "note")


def examine(
    config: str | File | Mapping[str, Any] | Source,
    *,
    world_size: int | None = None,
    runner: Runner | None = None,
    version: Version | str | None = None,
    from_version: str | None = None,
    pipeline: int | None = None,
    client_optimizer: bool = False,
) -> Report:
    """Everything that is wrong with ``config``.

    Args:
        config: A path, the text of a config (a string with a brace), or its content.
        world_size: Number of ranks; without it, what depends on it is not checked.
        runner: Who runs the config; by default guessed from the ``dsx`` block and "auto" values.
        version: The version of DeepSpeed; the installed one by default.
        from_version: An older version of DeepSpeed, since which changes of behaviour are reported, too.
        pipeline: Pipeline stages of the model under stock DeepSpeed, 1 for none.
        client_optimizer: Whether the script passes its own optimizer to deepspeed.initialize.
    """
    source = _source(config)
    who = runner or infer(source.config)
    number = _number(version)
    looked_at = Context(
        source=source,
        runner=who,
        version=number,
        world_size=world_size,
        pipeline=pipeline,
        client_optimizer=client_optimizer,
        guessed=runner is None,
    )
    found = [finding for check in CHECKS for finding in check(looked_at)]
    if from_version is not None:
        # What is reported as a change is not reported as a default as well.
        found = [finding for finding in found if finding.check != "clipping-default"]
        found += _changes(looked_at, parse_version(from_version))
    return Report(source, who, runner is None, number, ordered(found))


def _changes(context: Context, old: Version) -> Iterator[Finding]:
    """A warning for each change of behaviour since ``old`` that this config sees.

    Its edit is safe in that it keeps what the config does under ``old``.
    """
    for row in sorted(_advice()["change"], key=lambda row: parse_version(row["since"])):
        seen = all(map(context.holds, map(condition, row["when"])))
        if not old < parse_version(row["since"]) <= context.version or not seen:
            continue
        path, before = tuple(row["key"].split(".")), row["old"]
        word = json.dumps(before) if isinstance(before, bool) else f"{before:g}"
        fix = f'write "{path[-1]}": {word} for the behaviour of {shown(old)}, or leave it'
        why = f"since {row['since']}: {row['what']}"
        yield context.find("behaviour", "warning", path, why, fix, Edit("set", path, before), safe=True)


def ordered(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, worst first; the same thing said of the same key by two checks counts once."""
    rank = {"error": 0, "warning": 1, "note": 2}
    once = {(finding.path, finding.check, finding.why): finding for finding in findings}
    return tuple(sorted(once.values(), key=lambda finding: rank[finding.severity]))


def infer(config: Mapping[str, Any]) -> Runner:
    """Who runs a config: dsx if it has its block, the Trainer if its batch keys are left to it.

    A single "auto" makes no Trainer's config: there, the batch keys are "auto" together with the optimizer's
    and others. Beside a block that names no model, which dsx.Trainer is given, it does. So do NaN and
    Infinity: Python's json writes and reads them, and DeepSpeed's reader does not.
    """
    block = config.get("dsx")
    if "dsx" in config:
        theirs = {key: value for key, value in config.items() if key != "dsx"}
        return (
            "trainer" if isinstance(block, dict) and "model" not in block and _count_auto(theirs) else "dsx"
        )
    precision = [config.get(key) for key in ("fp16", "bf16")]
    if all(isinstance(block, Mapping) and block.get("enabled") == "auto" for block in precision):
        return "trainer"
    given = [key for key in (TRAIN, MICRO, ACCUMULATION) if key in config]
    batch = [config[key] for key in given]
    if given == [MICRO] and batch == ["auto"]:
        return "trainer"  # DeepSpeedExamples/training/autotuning: nothing else says how large a batch is.
    autos = batch.count("auto")
    everywhere = _count_auto(config)
    if any(values.constants(config)):
        return "trainer"
    left_to_it = autos and 2 * autos >= len(batch) and everywhere >= _MIN_AUTO
    return "trainer" if left_to_it or everywhere >= _SURELY_AUTO else "deepspeed"


def _count_auto(node: object) -> int:
    if isinstance(node, Mapping):
        return sum(map(_count_auto, node.values()))
    if isinstance(node, list):
        return sum(map(_count_auto, node))
    return int(node == "auto")


def _number(given: Version | str | None) -> Version:
    if given is None:
        return installed()
    return parse_version(given) if isinstance(given, str) else given


def _source(config: str | File | Mapping[str, Any] | Source) -> Source:
    if isinstance(config, Source):
        return config
    if isinstance(config, Mapping):
        return from_mapping(config)
    if isinstance(config, str) and ("{" in config or "\n" in config):
        return from_text(config)
    return read(File(config))


def read(path: File) -> Source:
    """The config in a file. Raises ConfigError."""
    return from_text(read_text(path), str(path))
