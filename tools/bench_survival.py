"""A run with failures and changes of layout, beside the same run undisturbed.

    python tools/bench_survival.py --steps 2000 --kills 2
    python tools/bench_survival.py --steps 120 --kills 5 --save-every 5 --tolerance 1e-5 \
        --layouts tp2,pp2,dp2 pp2,dp2 tp2,dp3 dp2

The run is divided into as many parts as there are layouts. At the end of a part torchrun gets SIGTERM, as at
a preemption: the run saves and ends, and the next part continues in its own layout. At random steps in
between, SIGKILL goes to a random rank, and torchrun starts the ranks again. Printed are, for each part, what
was lost to kills, and resident memory and open files of the ranks, early and late in their lives; then how
far the losses are from those of one process that nobody disturbed. Exit code 1 if a loss is further off than
--tolerance, if more steps are lost than lie between two checkpoints, if a process or a half-written
checkpoint is left, or if a part ends with another code than it should.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from survival_bench.launches import Hurt, Launch, attend, command, last_step, losses

_MIB = 1 << 20
_YOUNG = 0.25  # of a life: compiled code, caches and the first checkpoint are still to come


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What came of one layout."""

    layout: str
    first: int
    last: int
    code: int
    seconds: float
    lost_steps: list[int]
    rss_mib: tuple[float, float] | None
    handles: tuple[float, float] | None
    left_over: int


def settings(steps: int, save_every: int, output: Path, rate: float) -> dict[str, Any]:
    """A small model and batch that divides over 1, 2 and 3 data-parallel ranks."""
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
    return {
        "dsx.model.overrides": size,
        "train_batch_size": 12,
        "train_micro_batch_size_per_gpu": 1,
        "optimizer.params.lr": rate,
        "scheduler.params.total_num_steps": steps,
        "dsx.data.sequence_length": 32,
        "dsx.data.max_bytes": 1_000_000,
        "dsx.train.steps": steps,
        "dsx.train.save_every": save_every,
        "dsx.train.save_in_background": True,
        "dsx.train.keep_checkpoints": 3,
        "dsx.train.eval_every": max(1, steps // 10),
        "dsx.train.eval_tokens": 4096,
        "dsx.train.output": output,
        "dsx.tracking.wandb.mode": "disabled",
    }


def degrees(layout: str) -> dict[str, int]:
    """``tp2,dp3`` as numbers, 1 where nothing is said."""
    found = dict.fromkeys(("tp", "pp", "dp"), 1)
    for word in layout.split(","):
        match = re.fullmatch(r"(tp|pp|dp)(\d+)", word)
        if match is None:
            raise SystemExit(f"layout {layout!r}: write for example tp2,pp2,dp2")
        found[match[1]] = int(match[2])
    return found


def disturbed(
    folder: Path, layouts: Sequence[str], steps: int, kills: int, base: dict[str, Any], seed: int
) -> list[Part]:
    """The run, part by part."""
    chance = random.Random(seed)  # noqa: S311
    ends = [steps * (i + 1) // len(layouts) for i in range(len(layouts))]
    planned = sorted(chance.sample(range(5, steps - 5), kills))
    parts, metrics = [], folder / "run" / "metrics.jsonl"
    for layout, end in zip(layouts, ends, strict=True):
        first, size = last_step(metrics) + 1, degrees(layout)
        hurts = [Hurt(step, signal.SIGKILL) for step in planned if first <= step < end]
        if end != steps:
            hurts.append(Hurt(end, signal.SIGTERM))
        own = base | {"dsx.parallel.tensor": size["tp"], "dsx.parallel.pipeline": size["pp"]}
        ranks = size["tp"] * size["pp"] * size["dp"]
        began = time.monotonic()
        log = folder / f"part{len(parts) + 1}.log"
        launch = Launch(command(ranks, own, restarts=len(hurts) + 1), log)
        sent = attend(launch, metrics, hurts, chance)
        left = len(launch.left_over())
        launch.kill_all()
        parts.append(
            Part(
                layout=layout,
                first=first,
                last=last_step(metrics),
                code=launch.process.returncode,
                seconds=time.monotonic() - began,
                lost_steps=_lost(log.read_text(), sent, hurts),
                rss_mib=_early_and_late([life.rss_bytes for life in launch.lifetimes.values()], _MIB),
                handles=_early_and_late([life.handles for life in launch.lifetimes.values()], 1),
                left_over=left,
            )
        )
        print(_row(parts[-1]), flush=True)
    return parts


def _lost(text: str, sent: Sequence[int], hurts: Sequence[Hurt]) -> list[int]:
    """Steps that each kill has cost: those that were logged behind the checkpoint that is taken up."""
    starts = [int(step) for step in re.findall(r"^  resumed +after step (\d+)", text, re.MULTILINE)]
    killed = [step for step, hurt in zip(sent, hurts, strict=False) if hurt.signal == signal.SIGKILL]
    after = starts[len(starts) - len(killed) :]
    return [step - resumed for step, resumed in zip(killed, after, strict=False)]


def _early_and_late(lives: Sequence[Sequence[int]], unit: int) -> tuple[float, float] | None:
    """Medians of the second and the last quarter of the longest lives; None if all were short."""
    longest = max((len(life) for life in lives), default=0)
    if longest < 12:
        return None
    early, late = [], []
    for life in lives:
        if len(life) >= longest // 2:
            quarter = max(1, int(len(life) * _YOUNG))
            early.append(statistics.median(life[quarter : 2 * quarter]))
            late.append(statistics.median(life[-quarter - 1 : -1]))
    return max(early) / unit, max(late) / unit


def _row(part: Part) -> str:
    memory = "short" if part.rss_mib is None else f"{part.rss_mib[0]:7.1f} -> {part.rss_mib[1]:7.1f}"
    handles = "" if part.handles is None else f"{part.handles[0]:4.0f} -> {part.handles[1]:4.0f}"
    return (
        f"{part.layout:14} steps {part.first:5}-{part.last:5}  code {part.code:3}  {part.seconds:6.1f} s  "
        f"lost {part.lost_steps!s:14} RSS MiB {memory}  files {handles}  left over {part.left_over}"
    )


def faults(
    parts: Sequence[Part], save_every: int, folder: Path, worst: float, tolerance: float, steps: int
) -> list[str]:
    """What should not be."""
    found = []
    for i, part in enumerate(parts):
        # A launcher that was asked to stop reports a failure.
        if (part.code == 0) != (i == len(parts) - 1):
            found.append(f"part {i + 1} ended with code {part.code}")
        # In the background a checkpoint becomes visible a little after its step.
        if any(lost > 2 * save_every for lost in part.lost_steps):
            found.append(f"part {i + 1} lost {part.lost_steps} steps; every {save_every} were saved")
        if part.left_over:
            found.append(f"part {i + 1} left {part.left_over} processes")
    partial = [str(path) for path in (folder / "run").rglob("*") if ".partial" in path.name]
    found += [f"half-written: {path}" for path in partial]
    if parts[-1].last != steps:
        found.append(f"the run ended at step {parts[-1].last} of {steps}")
    if worst > tolerance:
        found.append(f"a loss is {worst:.1e} off, above {tolerance:.0e}")
    return found


def main() -> None:
    """Run both, compare, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", default=["tp2,pp2,dp2", "pp2,dp2", "tp2,dp3"])
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="relative, of the loss at each step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dsx-survival-") as name:
        folder = Path(name)
        alone = settings(asked.steps, 0, folder / "alone", asked.rate)
        began = time.monotonic()
        launch = Launch(command(1, alone), folder / "alone.log")
        if launch.process.wait():
            raise SystemExit((folder / "alone.log").read_text())
        print(
            f"undisturbed, one process: {asked.steps} steps in {time.monotonic() - began:.1f} s", flush=True
        )
        base = settings(asked.steps, asked.save_every, folder / "run", asked.rate)
        parts = disturbed(folder, asked.layouts, asked.steps, asked.kills, base, asked.seed)
        expected = losses(folder / "alone" / "metrics.jsonl")
        got = losses(folder / "run" / "metrics.jsonl")
        off = {step: abs(got[step] / expected[step] - 1) for step in expected if step in got}
        worst = max(off, key=off.__getitem__, default=0)
        missing = sorted(set(expected) - set(got))
        kills = sum(len(part.lost_steps) for part in parts)
        print(
            f"{len(off)} common steps, {kills} kills, {len(parts) - 1} changes of layout: losses at most "
            f"{off.get(worst, 0):.1e} apart (step {worst}); {expected[1]:.4f} -> {expected[asked.steps]:.4f}"
        )
        wrong = faults(parts, asked.save_every, folder, off.get(worst, 0), asked.tolerance, asked.steps)
        if missing:
            wrong.append(f"{len(missing)} steps were never logged, the first is {missing[0]}")
        for line in wrong:
            print(f"WRONG: {line}")
        if wrong:
            for log in sorted(folder.glob("part*.log")):
                print(f"--- {log.name}\n{log.read_text()[-3000:]}")
        if asked.json:
            rows = [{key: getattr(part, key) for key in Part.__slots__} for part in parts]
            asked.json.write_text(json.dumps({"parts": rows, "losses_apart": off.get(worst, 0)}, indent=2))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
