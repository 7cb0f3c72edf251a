"""A training run as people follow it: what starts, one line per logged step, what came of it.

``StepReport.metrics`` has the same figures under the names that ``metrics.jsonl`` and W&B use.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self, TextIO

from rich.console import Console
from rich.text import Text

from dsx.config.run import RunConfig
from dsx.islands.standing import OuterReport
from dsx.models.flops import flops_per_token, peak_flops
from dsx.terminal import amount, complain, lost_output, printable, seconds

Rows = Iterable[tuple[str, str]]

_GIB = 1 << 30

SAVE_SECONDS = "perf/save_seconds"
"""The metric of what a save takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRates:
    """What turns a step's time into throughput.

    Args:
        world_size: Ranks, one accelerator each.
        tokens_per_step: Tokens of one optimizer step over all ranks.
        flops_per_token: Model FLOPs of a token's forward and backward (see :mod:`dsx.models.flops`).
        peak_flops: Peak FLOP/s of one accelerator in the compute dtype; None if unknown.
    """

    steps: int
    world_size: int
    tokens_per_step: int
    flops_per_token: float
    peak_flops: float | None = None

    @classmethod
    def of(cls, run: RunConfig, *, device_name: str) -> Self:
        """The rates of a resolved run on accelerators called ``device_name``, as torch.cuda names them."""
        return cls(
            steps=run.dsx.train.steps,
            world_size=run.mesh.size,
            tokens_per_step=run.tokens_per_step,
            flops_per_token=flops_per_token(run.model, run.sequence_length),
            peak_flops=peak_flops(device_name, run.precision),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The figures of one optimizer step.

    Args:
        step: Steps done, from 1.
        loss: Mean cross-entropy per token of the step's global batch, in nats.
        grad_norm: Global gradient norm before clipping; None if unknown.
        lr: Learning rate that the step used.
        tokens: Tokens read since the run began, resumed parts included.
        trained_share: Share of the step's tokens that have a label; None if nobody counts them.
        step_seconds: Wall time of a step; the mean since the last report if steps lie between.
        save_seconds: Time that training stood still for the save before this step; None if there was none.
        data_share: Share of that time that the rank which reports waited for data; None if unknown.
        bubble: Idle over ideal time of the pipeline ranks, measured; None for a step that is not traced.
        simulated_bubble: The same of the schedule, simulated with that step's own times.
        elapsed_seconds: Since this process began to train; None if unknown.
        loss_scale: fp16's, which the step used; None in another precision.
        skipped_steps: Steps so far that were not applied; None where nobody counts them.
        left_seconds: Until the last step, at the pace so far; None if unknown.
        peak_allocated_bytes: Largest memory in use on the fullest rank; None on a CPU until it is counted.
        peak_reserved_bytes: Largest memory held by the allocator on the fullest rank; None on a CPU.
        estimated_bytes: What the estimator predicted for the fullest rank.
        rounds: Rounds between islands since the last line, the latest last; for the line alone.
        experts: Metrics of how busy experts are (:mod:`dsx.engine.expert_load`); empty without experts.
    """

    rates: RunRates
    step: int
    loss: float
    grad_norm: float | None
    lr: float
    tokens: int
    step_seconds: float
    trained_share: float | None = None
    data_share: float | None = None
    save_seconds: float | None = None
    bubble: float | None = None
    simulated_bubble: float | None = None
    elapsed_seconds: float | None = None
    loss_scale: float | None = None
    skipped_steps: int | None = None
    left_seconds: float | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    estimated_bytes: int | None = None
    rounds: tuple[OuterReport, ...] = ()
    experts: Mapping[str, float | int] = field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.rates.tokens_per_step / self.step_seconds

    @property
    def flops_per_gpu(self) -> float:
        """Model FLOP/s of one rank."""
        return self.tokens_per_second * self.rates.flops_per_token / self.rates.world_size

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilisation, 0 to 1; None where the accelerator's peak is unknown."""
        peak = self.rates.peak_flops
        return None if peak is None else self.flops_per_gpu / peak

    def metrics(self) -> dict[str, float | int]:
        """Metrics by name, units in the names; what is unknown is left out."""
        values: dict[str, float | int | None] = {
            "train/loss": self.loss,
            "train/grad_norm_preclip": self.grad_norm,
            "train/lr": self.lr,
            "train/tokens": self.tokens,
            "train/trained_tokens_percent": _scaled(self.trained_share, 100),
            "train/loss_scale": self.loss_scale,
            "train/skipped_steps": self.skipped_steps,
            "perf/tokens_per_second_global": self.tokens_per_second,
            "perf/tokens_per_second_per_gpu": self.tokens_per_second / self.rates.world_size,
            "perf/tflops_per_gpu": self.flops_per_gpu / 1e12,
            "perf/mfu_percent": _scaled(self.mfu, 100),
            "perf/step_seconds": self.step_seconds,
            SAVE_SECONDS: self.save_seconds,
            "perf/data_percent": _scaled(self.data_share, 100),
            "perf/bubble_percent": _scaled(self.bubble, 100),
            "perf/bubble_simulated_percent": _scaled(self.simulated_bubble, 100),
            "memory/peak_allocated_gib": _scaled(self.peak_allocated_bytes, 1 / _GIB),
            "memory/peak_reserved_gib": _scaled(self.peak_reserved_bytes, 1 / _GIB),
            "memory/estimated_gib": _scaled(self.estimated_bytes, 1 / _GIB),
        }
        return {name: value for name, value in values.items() if value is not None} | dict(self.experts)

    def line(self) -> str:
        """One console line; lines of a run are aligned."""
        parts = [
            _count(self.step, self.rates.steps, "step"),
            f"loss {self.loss:7.4f}",
            f"grad norm {'-' if self.grad_norm is None else format(self.grad_norm, '.3g'):>7}",
            f"lr {self.lr:.2e}",
        ]
        if self.loss_scale is not None:
            parts.append(f"scale {power_of_two(self.loss_scale):>4}, {self.skipped_steps} skipped")
        parts += [f"{compact(self.tokens_per_second):>6} tok/s", f"{seconds(self.step_seconds):>7}/step"]
        if self.mfu is not None:
            parts.append(f"MFU {100 * self.mfu:4.1f}%")
        if self.experts:
            idle = f", {self.experts['moe/idle']} idle" if self.experts["moe/idle"] else ""
            parts.append(f"experts {self.experts['moe/imbalance']:.2f}x{idle}")
        if self.peak_allocated_bytes is not None:
            parts.append(amount(self.peak_allocated_bytes))
        if self.elapsed_seconds is not None:
            left = f", {seconds(self.left_seconds)} left" if self.left_seconds else ""
            parts.append(f"{seconds(self.elapsed_seconds)}{left}")
        if self.rounds:
            parts.append(rounds_told(self.rounds))
        return " | ".join(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """The figures of one evaluation on the held-out text.

    Args:
        loss: Mean cross-entropy per token, in nats.
        bits_per_byte: The same per byte of text; None for data without bytes.
        by_source: The loss of each source of a mixture, by its name.
    """

    step: int
    steps: int
    loss: float
    bits_per_byte: float | None = None
    by_source: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def metrics(self) -> dict[str, float | int]:
        """Metrics by name; what is unknown is left out."""
        values = {
            "eval/loss": self.loss,
            "eval/perplexity": self.perplexity,
            "eval/bits_per_byte": self.bits_per_byte,
            **{f"eval/loss/{name}": loss for name, loss in self.by_source.items()},
        }
        return {name: value for name, value in values.items() if value is not None}

    def line(self) -> str:
        """One console line, aligned with the steps' lines."""
        parts = [
            _count(self.step, self.steps, "eval"),
            f"loss {self.loss:7.4f}",
            f"perplexity {self.perplexity:.4g}",
        ]
        if self.bits_per_byte is not None:
            parts.append(f"{self.bits_per_byte:.3f} bits/byte")
        parts += [f"{name} {loss:.4f}" for name, loss in self.by_source.items()]
        return " | ".join(parts)


class Lines(Console):
    """A console that raises where nobody reads any more: rich would end the process."""

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error, which stays one."""
        raise  # noqa: PLE0704


class Progress:
    """Prints a run: in colour on a terminal, as plain lines elsewhere.

    Args:
        stream: Where to print; None for standard output.
        quiet: Print nothing, as all ranks but one should.
        warns_as: Whose warnings they are that are printed even then; None for nobody's.
    """

    def __init__(
        self, stream: TextIO | None = None, *, quiet: bool = False, warns_as: str | None = None
    ) -> None:
        self._console = Lines(file=stream or sys.stdout, highlight=False)
        self._quiet, self._warns_as = quiet, warns_as

    def rows(self, title: str, rows: Rows) -> None:
        """Print a title and label-and-value rows, such as :func:`start_rows` gives."""
        listed = list(rows)
        width = max((len(label) for label, _ in listed), default=0)
        self._print((title, "bold"))
        for label, value in listed:
            self._print((f"  {label:<{width}}  ", "cyan"), (value, ""))

    def step(self, report: StepReport) -> None:
        """Print a step's line; a loss that is not finite in red."""
        count, loss, *rest = report.line().split(" | ")
        style = "bold" if math.isfinite(report.loss) else "bold red"
        self._print((f"{count} | ", "dim"), (loss, style), (f" | {' | '.join(rest)}", ""))

    def evaluation(self, report: EvaluationReport) -> None:
        self._print((report.line(), "green"))

    def note(self, text: str) -> None:
        self._print((text, "dim"))

    def warning(self, text: str) -> None:
        who = "" if self._warns_as is None else f"{self._warns_as}: "
        loud = self._warns_as is not None
        self._print(("warning: ", "bold yellow"), (f"{who}{text}", "yellow"), loud=loud)

    def _print(self, *parts: tuple[str, str], loud: bool = False) -> None:
        if self._quiet and not loud:
            return
        # soft_wrap: a line stays one line, in a log file and in a narrow terminal.
        shown = Text.assemble(*((printable(text), style) for text, style in parts))
        try:
            self._console.print(shown, soft_wrap=True)
        except OSError as error:
            if not lost_output(error):
                raise
            # Days of training are not lost for a full disk of logs, or for a viewer that has ended.
            self._quiet = True
            what = f"standard output takes no more ({error.strerror})"
            complain(f"warning: {what}; the run goes on, with its figures in metrics.jsonl alone")


def start_rows(
    run: RunConfig, *, device_name: str, resumed: bool = False, more: Rows = ()
) -> list[tuple[str, str]]:
    """Rows about the run to come: model, layout, batch, and what "auto" became."""
    mesh, model = run.mesh, run.model
    layout = f"{mesh.size} x {device_name}: " + " x ".join(
        f"{axis.title} {mesh.degree(axis.name)}" for axis in mesh.named
    )
    if run.chunks > 1:
        layout += f", {run.chunks} chunks"
    if mesh.tp > 1 and run.dsx.parallel.sequence_parallel:
        layout += ", sequence parallel"
    layout += f", rows shared by {run.dsx.parallel.method}" * (mesh.cp > 1)
    training = f"ZeRO-{run.zero_stage}, {run.precision}"
    if mesh.pp > 1:
        training = f"{run.schedule_name}, {training}"
    if run.dsx.recompute != "none":
        training += f", recompute {run.dsx.recompute}"
    if run.dsx.compile != "none":
        training += ", compiled blocks"
    batch = (
        f"{run.global_batch_size} sequences x {run.sequence_length} = {compact(run.tokens_per_step)} tokens "
        f"a step (micro-batch {run.micro_batch_size} x {run.accumulation} x data {mesh.num_shares})"
    )
    weights = ", fresh weights" if run.weights is None else f", weights from {run.weights}"
    described = f"{model.family}, {compact(run.num_parameters)} parameters"
    if run.num_trained < run.num_parameters:
        kind = "" if model.adapter is None else f" ({model.adapter.type}, rank {model.adapter.rank})"
        described += f", {compact(run.num_trained)} of them trained{kind}"
    described += "" if resumed else weights
    rows = [
        ("model", described),
        ("layout", layout),
        ("training", training),
        ("batch", batch),
    ]
    if mesh.pp * run.chunks > 1:
        spans = []
        for rank in range(run.mesh.pp):
            layers = (run.stage_map.layers(stage) for stage in run.stage_map.stages_of(rank))
            held = (f"{span[0]}-{span[-1]}" if len(span) > 1 else str(span[0]) for span in layers)
            spans.append(f"{rank}: {', '.join(held)}")
        rows.append(("stages", f"pipeline rank {' · '.join(spans)}".replace(": ", ": layers ", 1)))
    if run.islands is not None:
        rows.append(("islands", _islands(run)))
    return [*rows, *more, *(("note", note) for note in run.notes)]


def end_rows(
    *,
    steps: int,
    tokens: int,
    elapsed_seconds: float,
    resumed_after: int = 0,
    evaluation: EvaluationReport | None,
    unigram_bits_per_byte: float | None = None,
    memory: str | None = None,
    islands: str | None = None,
    written: Mapping[str, str | Path],
) -> list[tuple[str, str]]:
    """Rows about what came of a run.

    ``unigram_bits_per_byte`` is the entropy of the held-out bytes' own frequencies, the bar to clear;
    ``memory`` the peak beside its estimate; ``written`` has the paths of all that was written, by label.
    """
    took = seconds(elapsed_seconds)
    if resumed_after:
        took = f"those after {resumed_after} in {took}"
    rows = [("trained", f"{steps} step{'s' * (steps != 1)}, {compact(tokens)} tokens, {took}")]
    if memory is not None:
        rows.append(("memory", memory))
    if islands is not None:
        rows.append(("islands", islands))
    if evaluation is not None:
        rows.append(
            ("held-out loss", f"{evaluation.loss:.4f} nats/token, perplexity {evaluation.perplexity:.4g}")
        )
        if evaluation.bits_per_byte is not None:
            text = f"{evaluation.bits_per_byte:.3f} bits/byte"
            if unigram_bits_per_byte is not None:
                text += f" (the bytes' own frequencies: {unigram_bits_per_byte:.3f})"
            rows.append(("held-out text", text))
    return [*rows, *((label, str(path)) for label, path in written.items())]


def rounds_told(rounds: Sequence[OuterReport]) -> str:
    """A few words about rounds between islands that have come to their end one after the other.

    >>> report = OuterReport(
    ...     step=50, share=0, islands=(0, 1), moved=(0, 1), version=3, sent_bytes=3 << 20,
    ...     seconds=2.0, waited_seconds=0.5, drift=0.82,
    ... )
    >>> rounds_told([report])
    'round 3: 2 islands, drift 0.82, 3.00 MiB sent, 2.00 s (75% hidden)'
    """
    last = rounds[-1]
    first = min(report.version for report in rounds)
    name = f"round {last.version}" if first == last.version else f"rounds {first} to {last.version}"
    if not last.islands:
        return f"left out of the round after step {last.step}"
    parts = [f"{len(last.islands)} islands" if len(last.islands) > 1 else "no other island"]
    if last.caught_up:
        parts.append("caught up")
    if last.drift is not None and len(last.moved) > 1:
        parts.append(f"drift {last.drift:.2f}")
    parts.append(f"{amount(sum(report.sent_bytes for report in rounds))} sent")
    took, waited = (sum(getattr(r, key) for r in rounds) for key in ("seconds", "waited_seconds"))
    hidden = f" ({100 * (1 - waited / took):.0f}% hidden)" if took > 1.01 * waited else ""
    return f"{name}: {', '.join(parts)}, {seconds(took)}{hidden}"


@dataclass(slots=True)
class RoundsTotal:
    """What the rounds of a run come to.

    Attributes:
        counted: Those that this island took part in.
        missed: Those that went on without it.
        sent_bytes: Sent to other islands.
        seconds: Time in rounds.
        waited_seconds: Of these, the time in which training stood still.
        drift: The last that is known.
    """

    counted: int = 0
    missed: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    waited_seconds: float = 0.0
    drift: float | None = None

    def add(self, report: OuterReport) -> None:
        self.counted += bool(report.islands)
        self.missed += not report.islands
        self.sent_bytes += report.sent_bytes
        self.seconds += report.seconds
        self.waited_seconds += report.waited_seconds
        self.drift = self.drift if report.drift is None else report.drift

    def told(self) -> str:
        """One line.

        >>> RoundsTotal(counted=12, sent_bytes=3 << 30, seconds=80.0, waited_seconds=20.0, drift=0.5).told()
        '12 rounds, 3.00 GiB sent, 20.0 s of waiting in 1 min 20 s of rounds, drift 0.50 in the last'
        """
        parts = [f"{self.counted} round{'' if self.counted == 1 else 's'}"]
        if self.missed:
            parts.append(f"left out of {self.missed}")
        parts.append(f"{amount(self.sent_bytes)} sent")
        parts.append(f"{seconds(self.waited_seconds)} of waiting in {seconds(self.seconds)} of rounds")
        if self.drift is not None:
            parts.append(f"drift {self.drift:.2f} in the last")
        return ", ".join(parts)


def compact(number: float) -> str:
    """Three significant digits and a power-of-1000 suffix.

    >>> [compact(n) for n in (7, 12345, 999_950, 1.24e9, 0.5)]
    ['7', '12.3k', '1M', '1.24B', '0.5']
    """
    if not math.isfinite(number):
        return str(number)
    for suffix in ("", "k", "M", "B", "T"):
        rounded = float(f"{number:.3g}")
        if abs(rounded) < 1000 or suffix == "T":
            return f"{rounded:g}{suffix}"
        number /= 1000
    raise AssertionError


def power_of_two(scale: float) -> str:
    """A loss scale, which dynamic scaling only halves and doubles.

    >>> [power_of_two(scale) for scale in (65536.0, 1, 0.25, 1000)]
    ['2^16', '2^0', '2^-2', '1000']
    """
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if fraction == 0.5 else f"{scale:g}"


def _islands(run: RunConfig) -> str:
    """Which island this is, and how the islands average."""
    islands, outer = run.islands, run.dsx.outer
    assert islands is not None, "asked about islands"
    assert outer is not None, "asked about islands"
    tokens = compact(run.tokens_per_step * islands.count)
    told = [f"this is island {islands.index} of {islands.count}", f"{tokens} tokens a step of all"]
    told.append(f"a round every {outer.every} steps" if outer.every > 1 else "a round after every step")
    told.append(f"sent as {outer.wire}")
    if outer.shares > 1:
        told.append(f"in {outer.shares} shares")
    if outer.delay:
        told.append(f"while {outer.delay} step{'s go' if outer.delay > 1 else ' goes'} on")
    return ", ".join(told)


def _count(step: int, steps: int, word: str) -> str:
    return f"{word} {step:>{len(str(steps))}}/{steps}"


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
