"""A run's console, ``metrics.jsonl`` and Weights & Biases, written by one rank from the same figures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from dsx.config.run import RunConfig
from dsx.config.schema import WandbConfig
from dsx.data.own import OwnCorpus, OwnText, as_text
from dsx.data.text import Text
from dsx.engine.engine import PipelineEngine
from dsx.engine.expert_load import metrics_of
from dsx.engine.step_tracer import write
from dsx.errors import CheckpointError
from dsx.memory.watch import PeakMemory, beside, describe, estimated
from dsx.train.progress import (
    EvaluationReport,
    Progress,
    RoundsTotal,
    RunRates,
    StepReport,
    end_rows,
    start_rows,
)
from dsx.train.run_folder import own_checkpoint, standing
from dsx.train.tracking import Tracker, environment
from dsx.waiting import Waiting

if TYPE_CHECKING:  # loaded by the runs that record a step, or look at their memory
    from dsx.islands.standing import OuterReport
    from dsx.memory.estimate import RunMemory
    from dsx.schedules.trace import Comparison, Trace

_FIRST_LINES, _MOST_LINES = 10, 200
"""For ``dsx.train.log_every`` "auto": first steps with a line each, and about how many lines in all."""


class Monitor:
    """Follows a run. Every rank makes one and calls it alike; rank 0 writes and prints.

    Args:
        engine: The engine, already resumed if it is to be.
        corpus: The data, for its sizes and the bits per byte: the text of ``dsx.data``, or a data set of
            one's own (:class:`dsx.OwnCorpus`).
        state: The :attr:`state` in the checkpoint that the run continues from; empty for a fresh start.
    """

    _save_seconds: float | None = None  # of the save since the last report

    def __init__(
        self,
        config: RunConfig,
        engine: PipelineEngine,
        corpus: Text | OwnText | OwnCorpus,
        state: Mapping[str, Any],
    ) -> None:
        self._config, self._engine = config, engine
        self._corpus = as_text(corpus, config.dsx.data)
        islands, first = config.islands, engine.groups.rank == 0
        speaks = islands is None or islands.speaks
        warns_as = f"island {islands.index}" if islands is not None and first and not speaks else None
        self._progress = Progress(quiet=not (first and speaks), warns_as=warns_as)
        self._written: dict[str, str | Path] = {}
        self._saved: tuple[Path, int] | None = None
        self._untrained_loss: float | None = state.get("untrained_loss")
        self._last_evaluation: EvaluationReport | None = None
        self._last_step, last = int(engine.global_steps), config.dsx.train.steps
        self._resumed_after = self._last_step
        device = device_name()
        more = self._rows(last)
        self._peaks: dict[str, int] = {}
        self._memory = PeakMemory(engine.pipeline.device, engine.groups)
        self._estimate: RunMemory | None = None
        if engine.groups.rank == 0:
            memory = estimated(config)
            more.append(("memory", describe(memory, config.precision)))
            self._estimate = None if isinstance(memory, Exception) else memory
        if self._last_step >= last:
            more.append(("complete", _complete(self._last_step, config)))
        elif self._last_step:
            more.append(("resumed", f"after step {self._last_step}"))
        self._rates = RunRates.of(config, device_name=device)
        self._tracker: Tracker | None = None
        if engine.groups.rank == 0 and self._last_step < last:
            self._tracker = self._open_tracker(state.get("wandb_run_id"))
        begun = bool(self._last_step)
        self._progress.rows("dsx", start_rows(config, device_name=device, resumed=begun, more=more))
        left = [step for step in config.dsx.train.trace_steps if step > self._last_step]
        self._traces: list[Trace] = engine.trace(left) if left else []
        self._begun = self._last_time = self._step_ended = time.perf_counter()
        self._used_lr = self._waited_seconds = 0.0
        self._used_scale: float | None = None
        self._mute_steps = torch.zeros((), device=engine.pipeline.device)
        self._pace: tuple[int, float] | None = None
        self._untold: list[OuterReport] = []
        self._rounds = RoundsTotal()

    def _rows(self, last: int) -> list[tuple[str, str]]:
        """Rows of the header about the proof at start, and about the data."""
        config, proof = self._config, self._engine.pipeline.proof
        rows = self._corpus.rows(last * config.global_batch_size, config.samples_per_micro_step)
        return rows if proof is None else [("proved", proof), *rows]

    @property
    def state(self) -> dict[str, Any]:
        """What a resumed run continues its records with: for the checkpoint, on rank 0."""
        run_id = self._tracker.run_id if self._tracker is not None else None
        return {"wandb_run_id": run_id, "untrained_loss": self._untrained_loss}

    def step(self, loss: torch.Tensor) -> None:
        """Report the step that has just ended, if its turn has come."""
        self._memory.after_step(updated=not self._engine.overflowed)
        self._mute_steps += self._engine.step_control.sums[2] == 0  # asked for its value at the next report
        self._take_rounds()
        step, train = int(self._engine.global_steps), self._config.dsx.train
        every = 1 if train.log_every == "auto" else train.log_every
        if is_due(step, every=every, last=train.steps) or step in train.trace_steps:
            self._report(step, loss.item())  # waits for the device, so that the time is the steps' own
        self._step_ended = time.perf_counter()

    def _report(self, step: int, loss: float) -> None:
        now = time.perf_counter()
        train = self._config.dsx.train
        comparison = self._traced()
        self._peaks = self._memory.peaks()
        trained = self._engine.trained_tokens
        before, self._waited_seconds = self._waited_seconds, self._engine.batch_source.seconds
        report = StepReport(
            rates=self._rates,
            step=step,
            loss=loss,
            grad_norm=self._engine.get_global_grad_norm(),
            lr=self._used_lr,
            tokens=self._tokens(step),
            trained_share=None if trained is None else trained / self._config.tokens_per_step,
            step_seconds=(now - self._last_time) / (step - self._last_step),
            data_share=(self._waited_seconds - before) / (now - self._last_time),
            save_seconds=self._save_seconds,
            bubble=None if comparison is None else comparison.measured.bubble,
            simulated_bubble=None if comparison is None else comparison.simulated.bubble,
            estimated_bytes=None if self._estimate is None else self._estimate.peak_bytes,
            loss_scale=self._used_scale,
            skipped_steps=None if self._used_scale is None else int(self._engine.skipped_steps),
            elapsed_seconds=now - self._begun,
            left_seconds=self._left_seconds(step, now),
            rounds=tuple(self._untold),
            experts=metrics_of(self._engine.expert_load.of_all()),
            **self._peaks,
        )
        if trained is not None and self._mute_steps > 0:
            mute, since = int(self._mute_steps), step - self._last_step
            told = f"step {step}" if since == 1 else f"{mute} of the last {since} steps"
            self._progress.warning(
                f"{told}: no token to train (every label is -100), so the gradient was zero"
            )
        self._mute_steps.zero_()
        self._last_step, self._last_time, self._save_seconds = step, now, None
        auto, done = train.log_every == "auto", step - self._resumed_after
        if not auto or done <= _FIRST_LINES or is_due(step, every=lines_apart(train.steps), last=train.steps):
            self._progress.step(report)
            self._untold.clear()
        if self._tracker is not None:
            self._tracker.log(step, report.metrics())
        for text in self._corpus.news() if isinstance(self._corpus, Text) else ():
            self._progress.note(text)
        if comparison is not None:
            from dsx.schedules.tables import summary

            title = f"trace of step {comparison.trace.step}"
            self._progress.rows(title, summary(comparison))
            try:
                self.wrote(title, write(comparison, self._config.output / "trace"))
            except CheckpointError as error:
                self._progress.warning(f"{title} is lost: {error}")

    def _take_rounds(self) -> None:
        """Record the rounds between islands that have come to their end, and say what is to be said."""
        outer = self._engine.outer
        if outer is None:
            return
        reports, news = list(outer.reports), list(outer.news)
        outer.reports.clear()
        outer.news.clear()
        for text in news:
            self._progress.note(text)
        for report in reports:
            self._rounds.add(report)
            if self._tracker is not None:
                self._tracker.log(int(self._engine.global_steps), report.metrics())
        self._untold += reports

    def _traced(self) -> Comparison | None:
        if not self._traces:
            return None
        from dsx.schedules.trace import compare

        return compare(self._traces.pop())

    def _left_seconds(self, step: int, now: float) -> float | None:
        """Time to the last step at the pace since the first report, whose own step had a warm-up."""
        if self._pace is None:
            self._pace = step, now
            return None
        first, since = self._pace
        if step == first:
            return None
        return (now - since) / (step - first) * (self._config.dsx.train.steps - step)

    def before_step(self) -> None:
        """Restart the clock, and note learning rate and loss scale, which change at the end of a step.

        The time since the last step, spent on evaluation, saving and printing, belongs to no step.
        """
        self._used_lr = float(self._engine.get_lr()[0])
        self._used_scale = self._engine.current_loss_scale
        self._last_time += time.perf_counter() - self._step_ended
        to_come = int(self._engine.global_steps) + 1
        train = self._config.dsx.train
        # On a CPU tensors are counted operator by operator, of which a compiled block shows none.
        whole = self._config.dsx.compile == "none" and to_come not in train.trace_steps
        self._memory.before_step(counts=whole and not self._engine.overflowed)

    def warn(self, text: str) -> None:
        self._progress.warning(text)

    def went_back(self) -> None:
        """The engine has loaded an older checkpoint: the steps since then will come again."""
        self._take_rounds()
        self._last_step, self._last_time = int(self._engine.global_steps), time.perf_counter()
        self._step_ended, self._pace = self._last_time, None
        if self._tracker is not None:
            self._tracker.went_back(self._last_step)

    def evaluation(self, loss: float | Mapping[str, float] | None) -> None:
        """Report a held-out loss in nats per token, or, for a mixture, one per source by name.

        None, where nothing is held out, is ignored.
        """
        if loss is None:
            return
        by_source = loss if isinstance(loss, Mapping) else {}
        loss = self._corpus.mean_loss(by_source) if isinstance(loss, Mapping) else loss
        report = EvaluationReport(
            step=int(self._engine.global_steps),
            steps=self._config.dsx.train.steps,
            loss=loss,
            bits_per_byte=self._corpus.bits_per_byte(loss),
            by_source=by_source,
        )
        if report.step == 0:
            self._untrained_loss = loss
        self._last_evaluation = report
        self._progress.evaluation(report)
        if self._tracker is not None:
            # With the tokens, so that W&B can draw it over them.
            self._tracker.log(report.step, {**report.metrics(), "train/tokens": self._tokens(report.step)})

    def wrote(self, label: str, path: Path) -> None:
        self._written[label] = path

    def saved(self, checkpoint: Path, *, seconds: float, background: bool) -> None:
        """Tell W&B of the checkpoint of this step.

        Training stood still ``seconds`` for it, which is told with the next step. Of one that is still being
        written, in the ``background``, W&B hears at the next save, which waits for it, or at the end.
        """
        self._refer_to_saved()
        self._saved, self._save_seconds = (checkpoint, int(self._engine.global_steps)), seconds
        if not background:
            self._refer_to_saved()

    def exported(self, folder: Path) -> None:
        """Tell W&B of the Hugging Face folder of this step, and remember it for the summary."""
        self.wrote("Hugging Face model", folder)
        self._refer_to("model", folder, int(self._engine.global_steps))

    def _refer_to_saved(self) -> None:
        if self._saved is not None:
            self._refer_to("checkpoint", *self._saved)
        self._saved = None

    def _refer_to(self, kind: Literal["checkpoint", "model"], folder: Path, step: int) -> None:
        if self._tracker is not None:
            about = {"tokens": self._tokens(step), "mesh": dict(self._config.mesh.axes)}
            self._tracker.refer_to(kind, folder, step=step, about=about)

    def _tokens(self, step: int) -> int:
        return step * self._config.tokens_per_step

    def finish(self) -> None:
        """Wait for a checkpoint in the background, print what came of the run and close its records."""
        self._engine.wait_for_checkpoint()
        self._take_rounds()  # of a round that was under way at the last save
        if self._tracker is None:  # another rank, or nothing was left to train
            if self._written:
                self._progress.rows("done", [(label, str(path)) for label, path in self._written.items()])
            return
        self._refer_to_saved()
        with Waiting("finishing the W&B run", quiet=self._tracker.run_id is None):
            self._tracker.finish()
        written = {"metrics": self._tracker.metrics_path, **self._written}
        if self._tracker.wandb_path is not None:
            written["W&B run"] = self._tracker.wandb_path
        steps, evaluation, guess = int(self._engine.global_steps), self._last_evaluation, self._estimate
        rows = end_rows(
            steps=steps,
            tokens=self._tokens(steps),
            elapsed_seconds=time.perf_counter() - self._begun,
            resumed_after=self._resumed_after,
            evaluation=evaluation,
            unigram_bits_per_byte=self._corpus.unigram_bits_per_byte if evaluation else None,
            memory=None if guess is None else beside(self._peaks, guess, self._memory.by_pp_rank),
            islands=None if self._engine.outer is None else self._rounds.told(),
            written=written,
        )
        if self._untrained_loss is not None:
            rows.insert(1, ("loss before", f"{self._untrained_loss:.4f} nats/token, held out"))
        ended = steps >= self._config.dsx.train.steps
        self._progress.rows("done" if ended else "stopped", rows)
        if not ended:
            self._progress.note(standing(self._config, steps))

    def _open_tracker(self, run_id: str | None) -> Tracker:
        return Tracker(
            self._config.output,
            wandb_of(self._config),
            run_config={
                "config": self._config.recorded(),
                **self._config.summary(),
                "environment": environment(),
            },
            # A fresh start drops all that an earlier run left, its evaluation before step 1 included.
            first_step=self._last_step + 1 if self._last_step else 0,
            run_id=run_id,
            warn=self._progress.warning,
        )


def wandb_of(config: RunConfig) -> WandbConfig:
    """W&B's settings of this run. Each island is a run of its own, in the group of all."""
    wandb, islands = config.dsx.tracking.wandb, config.islands
    if islands is None:
        return wandb
    whole = config.output.absolute().parent.name
    name = f"{wandb.name or whole} island {islands.index}"
    return wandb.model_copy(update={"name": name, "group": wandb.group or whole})


def is_due(step: int, *, every: int, last: int) -> bool:
    """Whether something falls due after ``step``: every so many steps (0: never), and after the last.

    >>> [step for step in range(1, 8) if is_due(step, every=3, last=7)]
    [3, 6, 7]
    """
    return step == last or (every > 0 and step % every == 0)


def lines_apart(steps: int) -> int:
    """Steps between console lines for a run of this length: 1, 2 or 5 times a power of ten.

    >>> [lines_apart(steps) for steps in (200, 300, 1000, 20_000)]
    [1, 2, 5, 100]
    """
    every = 1
    while steps > _MOST_LINES * every:
        every = every * 5 // 2 if str(every).startswith("2") else every * 2
    return every


def device_name() -> str:
    """What one rank computes on, e.g. ``NVIDIA H100 80GB HBM3`` or ``CPU``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _complete(step: int, config: RunConfig) -> str:
    resume = config.dsx.train.resume
    done = f"step {step} of dsx.train.steps = {config.dsx.train.steps} is done in"
    if resume not in ("auto", "never") and own_checkpoint(config) is None:
        return f"{done} {resume}, which this run begins from: raise steps to train on"
    return f"{done} {config.output}: raise steps to train on, or choose another dsx.train.output"
