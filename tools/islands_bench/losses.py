"""Held-out loss of recipes/gpt_3d.py with islands, beside one job that reads the same tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from islands_bench.links import alone, inside

ROOT = Path(__file__).parents[2]
_PORT = 29700


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """What all runs have in common.

    Attributes:
        steps: Optimizer steps, those of ``start`` included.
        start: A run of one job that all go on from; None for fresh weights.
        batch: Samples of a step, of all islands together.
        length: Tokens of a sample.
        eval_tokens: Held-out tokens.
        model: Sizes in place of the preset's.
    """

    steps: int
    start: Path | None
    batch: int
    length: int
    eval_tokens: int
    model: dict[str, int]

    def settings(self, batch: int, output: Path) -> dict[str, Any]:
        """Keys of the config, for one job or one island."""
        return {
            "train_batch_size": batch,
            "train_micro_batch_size_per_gpu": min(16, batch),
            "scheduler.params.total_num_steps": self.steps,
            "scheduler.params.warmup_num_steps": max(1, self.steps // 10),
            "dsx.model.overrides": self.model,
            "dsx.data.sequence_length": self.length,
            "dsx.data.max_bytes": 16_000_000,
            "dsx.train.steps": self.steps,
            "dsx.train.resume": "auto" if self.start is None else self.start,
            "dsx.train.eval_every": 0,
            "dsx.train.eval_tokens": self.eval_tokens,
            "dsx.train.save_every": 0,
            "dsx.train.output": output,
            "dsx.tracking.wandb.mode": "disabled",
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    """How the islands of a run average."""

    islands: int
    every: int
    wire: str = "fp32"
    lr: float = 1.0
    momentum: float = 0.0


def held_out_loss(
    training: Training, outer: Outer | None, folder: Path, *, steps: int | None = None
) -> dict[str, Any]:
    """Train as islands or as one job, to the end or for so many ``steps``.

    Returns:
        loss, held-out, in nats a token; spread, the largest less the smallest of the islands; seconds.
    """
    began = time.perf_counter()
    if outer is None:
        jobs = {"run": training.settings(training.batch, folder / "run")}
    else:
        block = {
            "islands": outer.islands,
            "every": outer.every,
            "wire": outer.wire,
            "optimizer": {"lr": outer.lr, "momentum": outer.momentum},
            "meet": f"127.0.0.1:{_PORT}",
            "patience_seconds": 600,
        }
        own = training.settings(training.batch // outer.islands, folder / "run")
        jobs = {
            f"run/island{island}": own | {"dsx.outer": block | {"island": island}}
            for island in range(outer.islands)
        }
    for job in jobs.values():
        job["dsx.train.steps"] = training.steps if steps is None else steps
    logs = [folder / f"{place}.log" for place in range(len(jobs))]
    with alone(f"dsxl{os.getpid()}") as space:
        running = [_started(space, job, log) for job, log in zip(jobs.values(), logs, strict=True)]
        codes = [process.wait() for process in running]
    for code, log in zip(codes, logs, strict=True):
        if code:
            raise SystemExit(log.read_text())
    found = [_last_evaluation(folder / its / "metrics.jsonl") for its in jobs]
    return {"loss": found[0], "spread": max(found) - min(found), "seconds": time.perf_counter() - began}


def begin(training: Training, steps: int, folder: Path) -> Path:
    """Train one job for so many of the steps; the folder that others can go on from."""
    held_out_loss(training, None, folder, steps=steps)
    return folder / "run"


def _started(space: str, settings: Mapping[str, Any], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "recipes/gpt_3d.py"), str(ROOT / "configs/zero1.json")]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value) if isinstance(value, dict) else value}"]
    environ = {"PYTHONPATH": str(ROOT), **os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with log.open("w") as file:
        return subprocess.Popen(  # noqa: S603
            inside(space, "localhost", command), stdout=file, stderr=file, env=environ
        )


def _last_evaluation(metrics: Path) -> float:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float(next(line["eval/loss"] for line in reversed(lines) if "eval/loss" in line))
