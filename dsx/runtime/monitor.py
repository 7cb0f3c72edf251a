"""One rank speaks: console, ``metrics.jsonl`` and Weights & Biases from the same figures."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from dsx.config.run import RunConfig
from dsx.report.progress import EvaluationReport, Progress, RunRates, StepReport, end_rows, start_rows
from dsx.runtime.data.corpus import Corpus
from dsx.runtime.engine import PipelineEngine
from dsx.runtime.tracking import Tracker, environment


class Monitor:
    """Follows a run. Every rank makes one and calls it alike; rank 0 writes and prints.

    Args:
        config: The resolved config.
        engine: The engine, already resumed if it is to be.
        corpus: The data, for its sizes and the bits per byte.
        run_id: W&B run to continue, as a checkpoint stored it.
    """

    def __init__(
        self, config: RunConfig, engine: PipelineEngine, corpus: Corpus, *, run_id: str | None = None
    ) -> None:
        self._config, self._engine, self._corpus = config, engine, corpus
        self._speaks = engine.groups.rank == 0
        self._progress = Progress(quiet=not self._speaks)
        self._written: dict[str, str | Path] = {}
        self._last_evaluation: EvaluationReport | None = None
        device = device_name()
        self._rates = RunRates.of(config, device_name=device)
        self._tracker = self._open_tracker(run_id) if self._speaks else None
        more = [("data", _describe(corpus))]
        if engine.global_steps:
            more.append(("resumed", f"after step {engine.global_steps}"))
        self._progress.rows("dsx", start_rows(config, device_name=device, more=more))
        self._begun = self._last_time = time.perf_counter()
        self._last_step = int(engine.global_steps)
        self._used_lr = 0.0

    @property
    def run_id(self) -> str | None:
        """W&B run id for checkpoints, on rank 0."""
        return self._tracker.run_id if self._tracker is not None else None

    def step(self, loss: torch.Tensor) -> None:
        """Report the step that has just ended, if its turn has come."""
        step, train = int(self._engine.global_steps), self._config.dsx.train
        if step % train.log_every and step != train.steps:
            return
        value = loss.item()  # waits for the device, so that the time below is the step's own
        now = time.perf_counter()
        report = StepReport(
            rates=self._rates,
            step=step,
            loss=value,
            grad_norm=self._engine.get_global_grad_norm(),
            lr=self._used_lr,
            tokens=step * self._config.tokens_per_step,
            step_seconds=(now - self._last_time) / (step - self._last_step),
            **_peak_memory(self._engine.pipeline.device),
        )
        self._last_step = step
        self._progress.step(report)
        if self._tracker is not None:
            self._tracker.log(step, report.metrics())
        self.resume_clock()

    def before_step(self) -> None:
        """Note the learning rate that the coming step uses: schedulers move it at the end of a step."""
        self._used_lr = float(self._engine.get_lr()[0])

    def evaluation(self, loss: float | None) -> None:
        """Report a held-out loss, in nats per token; None (nothing held out) is passed over."""
        if loss is None:
            return
        report = EvaluationReport(
            step=int(self._engine.global_steps),
            steps=self._config.dsx.train.steps,
            loss=loss,
            bits_per_byte=self._corpus.bits_per_byte(loss),
        )
        self._last_evaluation = report
        self._progress.evaluation(report)
        if self._tracker is not None:
            self._tracker.log(report.step, report.metrics())

    def wrote(self, label: str, path: Path) -> None:
        """Remember something that was written, for the summary."""
        self._written[label] = path

    def resume_clock(self) -> None:
        """Leave out of the next step's time what has passed since the last: evaluation, saving, printing."""
        self._last_time = time.perf_counter()

    def finish(self) -> None:
        """Print what came of the run and close its records."""
        if self._tracker is None:
            return
        written = {"metrics": self._tracker.metrics_path, **self._written}
        if self._tracker.wandb_path is not None:
            written["W&B run"] = self._tracker.wandb_path
        self._tracker.finish()
        steps = int(self._engine.global_steps)
        rows = end_rows(
            steps=steps,
            tokens=steps * self._config.tokens_per_step,
            elapsed_seconds=time.perf_counter() - self._begun,
            evaluation=self._last_evaluation,
            unigram_bits_per_byte=self._corpus.unigram_bits_per_byte if self._last_evaluation else None,
            written=written,
        )
        self._progress.rows("done", rows)

    def _open_tracker(self, run_id: str | None) -> Tracker:
        return Tracker(
            self._config.output,
            self._config.dsx.tracking.wandb,
            run_config={
                "config": self._config.resolved(),
                **self._config.summary(),
                "environment": environment(),
            },
            first_step=int(self._engine.global_steps) + 1,
            run_id=run_id,
            warn=self._progress.warning,
        )


def device_name() -> str:
    """What one rank computes on, e.g. ``NVIDIA H100 80GB HBM3`` or ``CPU``."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def _describe(corpus: Corpus) -> str:
    info = corpus.info
    return (
        f"{info.source}, tokenizer {info.tokenizer}: {info.train.tokens:,} training and "
        f"{info.held_out.tokens:,} held-out tokens"
    )


def _peak_memory(device: torch.device) -> Mapping[str, Any]:
    """Peaks of the fullest rank since the start, as StepReport's arguments; empty on a CPU. Collective."""
    if device.type == "cpu":
        return {}
    accelerator = get_accelerator()
    peaks = torch.tensor(
        [accelerator.max_memory_allocated(), accelerator.max_memory_reserved()],
        dtype=torch.float64,
        device=device,
    )
    dist.all_reduce(peaks, op=dist.ReduceOp.MAX)
    allocated, reserved = (int(value) for value in peaks.tolist())
    return {"peak_allocated_bytes": allocated, "peak_reserved_bytes": reserved}
