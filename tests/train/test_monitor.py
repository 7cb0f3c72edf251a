"""What a run's monitor times, remembers and leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dsx.config.resolve import resolve
from dsx.data.text import Text, prepare_text
from dsx.schedules.trace import Trace
from dsx.train import monitor as module
from dsx.train.monitor import Monitor
from traced import by_hand

CONFIG = Path(__file__).parents[2] / "configs" / "zero1.json"


class Clock:
    """Time that passes when told to, and what is to be done when it ends."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.end = ExitStack()

    def perf_counter(self) -> float:
        return self.now


class Run:
    """A monitor over an engine that does nothing, on one rank."""

    def __init__(self, folder: Path, clock: Clock, *settings: str, done: int = 0, state: Any = None) -> None:
        text = folder / "text.txt"
        text.write_text("\n".join(f"some line {number}\n" for number in range(2000)))
        self.config = resolve(
            CONFIG,
            world_size=1,
            overrides=[
                f"dsx.train.output={folder / 'out'}",
                f"dsx.data.source={text}",
                "dsx.data.sequence_length=32",
                "dsx.tracking.wandb.mode=disabled",
                *settings,
            ],
        )
        data = self.config.dsx.data
        corpus = Text.open(prepare_text(data, folder / "data", held_out_tokens=999), data)
        self.engine = SimpleNamespace(
            groups=SimpleNamespace(rank=0, pp_rank=0, mesh=SimpleNamespace(pp=1)),
            global_steps=done,
            get_lr=lambda: [0.5],
            get_global_grad_norm=lambda: 2.0,
            wait_for_checkpoint=lambda: None,
            pipeline=SimpleNamespace(device=torch.device("cpu"), proof=None),
            trace=self.trace,
            batch_source=SimpleNamespace(seconds=0.0),
            expert_load=SimpleNamespace(of_all=lambda: {1: [6, 2, 0, 0]}),
            step_control=SimpleNamespace(sums=torch.ones(3)),
            trained_tokens=512,
            current_loss_scale=None,
            overflowed=False,
            outer=None,
        )
        self.clock = clock
        self.traced: list[int] = []
        self.traces: list[Trace] = []
        self.monitor = Monitor(self.config, self.engine, corpus, state or {})
        if self.monitor._tracker is not None:  # its finish() would print
            clock.end.callback(self.monitor._tracker.finish)

    def trace(self, steps: list[int]) -> list[Trace]:
        """As PipelineEngine.trace, but for the recording: see :meth:`record`."""
        self.traced = steps
        return self.traces

    def record(self, trace: Trace) -> None:
        """The next step that ends is ``trace``'s."""
        self.traces.append(trace)

    def step(self, seconds: float) -> None:
        self.monitor.before_step()
        self.clock.now += seconds
        self.engine.global_steps += 1
        self.monitor.step(torch.tensor(3.0))

    def rows(self) -> list[dict[str, Any]]:
        file = self.config.output / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    with clock.end:
        yield clock


def test_evaluation_and_saving_are_no_steps_time(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path, clock)
    clock.now += 60.0  # before the first
    run.step(2.0)
    run.step(3.0)
    clock.now += 100.0
    run.step(4.0)
    assert [row["perf/step_seconds"] for row in run.rows()] == [2.0, 3.0, 4.0]


def test_unlogged_steps_count(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path, clock, "dsx.train.log_every=2", "dsx.train.steps=5")
    for seconds in (1.0, 2.0, 3.0, 6.0, 7.0):
        run.step(seconds)
        clock.now += 50.0
    rows = run.rows()
    assert [row["train/step"] for row in rows] == [2, 4, 5]  # the last is always told
    assert [row["perf/step_seconds"] for row in rows] == [1.5, 4.5, 7.0]


def test_steps_that_a_roll_back_takes_away_are_recorded_once(tmp_path: Path, clock: Clock) -> None:
    run = Run(tmp_path, clock)
    for seconds in (1.0, 2.0, 3.0):
        run.step(seconds)
    run.engine.global_steps = 1
    run.monitor.went_back()
    run.step(4.0)
    rows = run.rows()
    assert [(row["train/step"], row["perf/step_seconds"]) for row in rows] == [(1, 1.0), (2, 4.0)]


def test_a_fresh_start_drops_the_records_before(tmp_path: Path, clock: Clock) -> None:
    first = Run(tmp_path, clock)
    first.monitor.evaluation(5.0)
    first.step(1.0)
    assert [row["train/step"] for row in first.rows()] == [0, 1]
    assert Run(tmp_path, clock).rows() == []


def test_loss_before_training_survives_a_resume(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Run(tmp_path, clock, "dsx.train.steps=2")
    first.monitor.evaluation(5.25)
    first.step(1.0)
    capsys.readouterr()
    second = Run(tmp_path, clock, "dsx.train.steps=2", done=1, state=first.monitor.state)
    second.step(1.0)
    second.monitor.evaluation(4.0)
    second.monitor.finish()
    assert [row["train/step"] for row in second.rows()] == [0, 1, 2, 2]
    out = " ".join(capsys.readouterr().out.split())
    assert "resumed after step 1" in out
    assert "loss before 5.2500 nats/token" in out
    assert "held-out loss 4.0000 nats/token" in out


def test_a_complete_run_is_left_alone(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    first = Run(tmp_path, clock, "dsx.train.steps=2")
    first.step(1.0)
    first.step(1.0)
    before = first.rows()
    capsys.readouterr()
    again = Run(tmp_path, clock, "dsx.train.steps=2", done=2)
    again.monitor.finish()
    assert again.rows() == before
    out = capsys.readouterr().out
    assert "step 2 of dsx.train.steps = 2 is done" in out
    assert "done\n" not in out


def test_a_run_that_begins_from_a_complete_one_says_which(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing has been done in its own output folder."""
    (tmp_path / "whole").mkdir()
    Run(tmp_path, clock, "dsx.train.steps=2", f"dsx.train.resume={tmp_path / 'whole'}", done=2)
    said = f"is done in {tmp_path / 'whole'}, which this run begins from: raise steps to train on\n"
    assert said in capsys.readouterr().out


TRACED = ("dsx.train.trace_steps=[2, 7]", "dsx.train.log_every=3", "dsx.train.steps=9")


def test_traced_steps_are_logged_and_written(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, clock, *TRACED)
    assert run.traced == [2, 7]
    run.step(1.0)
    run.record(by_hand(step=2))
    run.step(1.0)
    run.step(1.0)
    rows = run.rows()
    assert [row["train/step"] for row in rows] == [2, 3]  # also those that log_every leaves out
    assert [row.get("perf/bubble_percent") for row in rows] == [pytest.approx(60.0), None]
    folder = run.config.output / "trace"
    assert {path.name for path in folder.iterdir()} == {"step2.json", "step2.html", "step2.perfetto.json"}
    assert Trace.from_json((folder / "step2.json").read_text(), where="x") == by_hand(step=2)
    run.monitor.finish()
    out = " ".join(capsys.readouterr().out.split())
    assert "trace of step 2 step 100.0 ms, simulated 97.00 ms (+3.1%)" in out
    assert f"trace of step 2 {folder / 'step2.html'}" in out


def test_a_resumed_run_traces_what_is_left(tmp_path: Path, clock: Clock) -> None:
    for settings, done, traced in ((TRACED, 2, [7]), (TRACED, 7, []), ((), 0, [])):
        run = Run(tmp_path, clock, *settings, done=done)
        assert run.traced == traced
        run.monitor.finish()


def test_a_trace_that_cannot_be_written_ends_no_run(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, clock, *TRACED)
    (run.config.output / "trace").write_text("in the way")
    run.step(1.0)
    run.record(by_hand(step=2))
    run.step(1.0)
    assert run.rows()[-1]["perf/bubble_percent"] == pytest.approx(60.0)
    assert "warning: trace of step 2 is lost" in " ".join(capsys.readouterr().out.split())


def test_wandb_hears_of_checkpoints_that_are_complete(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[Any, ...]] = []
    run = Run(tmp_path, clock)
    monkeypatch.setattr(
        run.monitor._tracker,
        "refer_to",
        lambda kind, folder, *, step, about: told.append((kind, folder, step)),
    )
    run.step(1.0)
    run.monitor.saved(Path("a"), seconds=1.0, background=False)
    assert told == [("checkpoint", Path("a"), 1)]
    run.step(1.0)
    run.monitor.saved(Path("b"), seconds=2.0, background=True)
    run.step(1.0)
    assert [row.get("perf/save_seconds") for row in run.rows()] == [None, 1.0, 2.0]  # of the save before
    assert told[1:] == []
    run.monitor.saved(Path("c"), seconds=1.0, background=True)  # the engine has waited for b
    assert told[1:] == [("checkpoint", Path("b"), 2)]
    run.monitor.exported(Path("d"))
    run.monitor.finish()
    assert told[2:] == [("model", Path("d"), 3), ("checkpoint", Path("c"), 3)]


def test_how_busy_experts_were_is_recorded_and_told(
    tmp_path: Path, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, clock)
    run.step(1.0)
    row = run.rows()[0]
    assert [row[f"moe/{name}"] for name in ("load", "imbalance/layer1", "idle")] == [0.75, 3.0, 2]
    assert " | experts 3.00x, 2 idle | " in capsys.readouterr().out
