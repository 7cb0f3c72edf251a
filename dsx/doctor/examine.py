"""Run all checks over a config, in the order in which their findings are told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dsx.doctor import reference
from dsx.doctor.behaviour import changes
from dsx.doctor.checks import optimizer, other, precision, ranks, together, unknown, values, zero
from dsx.doctor.context import ACCUMULATION, MICRO, TRAIN, Context, Runner, context
from dsx.doctor.finding import Finding
from dsx.doctor.key import Version, installed
from dsx.doctor.key import version as parse_version
from dsx.doctor.source import Source, from_mapping, from_text, read_text
from dsx.doctor.table import table

Check = Callable[[Context], Iterator[Finding]]

# What is wrong with single keys.
_KEYS: Final[tuple[Check, ...]] = (
    other.check_duplicates,
    other.check_syntax,
    unknown.check_unknown,
    unknown.check_removed,
    other.check_newer,
    values.check_values,
    zero.check_old_form,
    zero.check_stage,
    zero.check_deprecated,
    optimizer.check_required,
    values.check_trainer,
    values.check_switched_off,
    values.check_no_effect,
)
# What does not go together.
_TOGETHER: Final[tuple[Check, ...]] = (
    ranks.check_world,
    ranks.check_batch_missing,
    ranks.check_batch_triple,
    precision.check_both,
    precision.check_loss_scale,
    precision.check_master_weights,
    precision.check_data_types,
    precision.check_autocast,
    zero.check_offload,
    zero.check_partial_offload,
    zero.check_grad_norm,
    zero.check_reduce_scatter,
    zero.check_buckets,
    zero.check_refused_together,
    ranks.check_zero,
    ranks.check_block,
    ranks.check_autotp,
    ranks.check_autotp_off,
    ranks.check_timers,
    ranks.check_clipping,
    ranks.check_accumulation,
    optimizer.check_name,
    optimizer.check_untested,
    optimizer.check_clipping,
    optimizer.check_betas,
    optimizer.check_adam,
    optimizer.check_amsgrad,
    optimizer.check_parameters,
    optimizer.check_same_key,
    optimizer.check_zenflow,
    optimizer.check_compile,
    together.check_conflicts,
    together.check_pairs,
    together.check_nvme_buffers,
    other.check_learning_rate,
    other.check_weight_decay,
    other.check_epsilon,
    other.check_betas_order,
    other.check_counts,
    other.check_difficulties,
    optimizer.check_whole_numbers,
    optimizer.check_offload,
    optimizer.check_client,
    optimizer.check_schedule,
    optimizer.check_wrapped,
    optimizer.check_warmup,
    optimizer.check_cycle,
    other.check_clipping_default,
    other.check_activation_checkpointing,
    other.check_profiler,
)
# What dsx refuses besides.
_DSX: Final[tuple[Check, ...]] = (
    ranks.check_taken_over,
    ranks.check_precision,
    ranks.check_zenflow,
    ranks.check_optimizer,
    ranks.check_schedule_length,
)

CHECKS: Final[tuple[Check, ...]] = (*_KEYS, *_TOGETHER)
DSX_CHECKS: Final[tuple[Check, ...]] = (*CHECKS, *_DSX)


# Values that are "auto": with batch keys among them, and anyhow.
_MIN_AUTO = 2
_SURELY_AUTO = 3


@dataclass(frozen=True, slots=True)
class Report:
    """What the doctor found.

    Attributes:
        source: The config.
        runner: For whom it was checked.
        inferred: Whether that was guessed from the config.
        version: DeepSpeed's that it was checked for.
        findings: Errors first, then warnings, then notes; each in the order of the checks.
    """

    source: Source
    runner: Runner
    inferred: bool
    version: Version
    findings: tuple[Finding, ...]

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that say that it fails, or silently does something else than written."""
        return tuple(finding for finding in self.findings if finding.severity == "error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that are likely mistakes."""
        return tuple(finding for finding in self.findings if finding.severity == "warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings that are worth knowing."""
        return tuple(finding for finding in self.findings if finding.severity == "note")


def examine(
    config: str | Path | Mapping[str, Any] | Source,
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
        world_size: Ranks; without it, what needs it is not checked.
        runner: Who runs it; without it, guessed from the ``dsx`` block and "auto" values.
        version: DeepSpeed's; the installed one by default.
        from_version: An older DeepSpeed's, since which changes of behaviour are told too.
        pipeline: Pipeline stages of the model under stock DeepSpeed, 1 for none.
        client_optimizer: Whether the script passes its own optimizer to deepspeed.initialize.

    Raises:
        ConfigError: It cannot be read.
    """
    source = _source(config)
    who = runner or infer(source.config)
    number = _number(version)
    looked_at = context(
        source,
        table(reference.KEYS, reference.BLOCKS),
        runner=who,
        version=number,
        world_size=world_size,
        pipeline=pipeline,
        client_optimizer=client_optimizer,
        guessed=runner is None,
    )
    checks = DSX_CHECKS if who == "dsx" else CHECKS
    found = [finding for check in checks for finding in check(looked_at)]
    if from_version is not None:
        # Said as a change, it need not be said as a default.
        found = [finding for finding in found if finding.check != "clipping-default"]
        found += changes(looked_at, parse_version(from_version))
    return Report(source, who, runner is None, number, ordered(found))


def ordered(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Worst first; the same thing said of the same key by two checks only once."""
    rank = {"error": 0, "warning": 1, "note": 2}
    once = {(finding.path, finding.check, finding.why): finding for finding in findings}
    return tuple(sorted(once.values(), key=lambda finding: rank[finding.severity]))


def infer(config: Mapping[str, Any]) -> Runner:
    """Who runs a config: dsx if it has its block, the Trainer if its batch keys are left to it.

    One "auto" alone is no Trainer's config: there the batch keys, the optimizer's and others come together.
    """
    if "dsx" in config:
        return "dsx"
    precision = [config.get(key) for key in ("fp16", "bf16")]
    if all(isinstance(block, Mapping) and block.get("enabled") == "auto" for block in precision):
        return "trainer"
    given = [key for key in (TRAIN, MICRO, ACCUMULATION) if key in config]
    batch = [config[key] for key in given]
    if given == [MICRO] and batch == ["auto"]:
        return "trainer"  # DeepSpeedExamples/training/autotuning: nothing else says how large a batch is.
    autos = batch.count("auto")
    everywhere = _count_auto(config)
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


def _source(config: str | Path | Mapping[str, Any] | Source) -> Source:
    if isinstance(config, Source):
        return config
    if isinstance(config, Mapping):
        return from_mapping(config)
    if isinstance(config, str) and ("{" in config or "\n" in config):
        return from_text(config)
    return read(Path(config))


def read(path: Path) -> Source:
    """The config in a file. Raises ConfigError."""
    return from_text(read_text(path), str(path))
