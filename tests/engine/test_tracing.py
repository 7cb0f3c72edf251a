"""Recorded steps on real ranks: every action once, in the order that the schedule forces, by one clock."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import toy_pipeline
from deepspeed.pipe import LayerSpec
from toy_pipeline import Case

import ranks
from dsx.checkpoint import store
from dsx.engine import step_tracer as module
from dsx.engine.step_tracer import HostClock, Recorder, StreamClock, Tracer, time_rounds, write
from dsx.errors import CheckpointError, ConfigError
from dsx.schedules.schedule import Action, Op
from dsx.schedules.simulate import Dependencies
from dsx.schedules.trace import Trace, compare
from traced import by_hand

SLOW_SECONDS = 0.02


class Slow(toy_pipeline.Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_SECONDS)
        return super().forward(x)


def _batches(case: Case, step: int, engine) -> object:
    return toy_pipeline.batches(step, case.micro_batches, engine.groups.mesh.dp, engine.groups.dp_rank)


def _forbidden(*_args: object, **_keywords: object) -> None:
    raise AssertionError("this step is not traced")


def _traced(rank, world_size, case, steps):
    """Losses with and without tracing, and what the traced engine gave."""
    toy_pipeline.layers = _with_a_slow_layer(toy_pipeline.layers)
    plain = toy_pipeline.train(case)
    engine = toy_pipeline.engine(case)
    traces = engine.trace(steps)
    recorder, rounds = module.Recorder, module.time_rounds
    losses = []
    for step in range(case.steps):
        wanted = step + 1 in steps
        module.Recorder = recorder if wanted else _forbidden
        module.time_rounds = rounds if wanted else _forbidden
        loss = engine.train_batch(_batches(case, step, engine))
        losses.append((loss.item(), engine.get_global_grad_norm()))
    schedule, _ = engine.programs.step(case.micro_batches, training=True)
    return plain == losses, traces, schedule


def _with_a_slow_layer(layers):
    """The list's second layer takes long."""

    def made(name):
        specs = layers(name)
        return [specs[0], LayerSpec(Slow), *specs[2:]]

    return made


@pytest.mark.parametrize(
    ("case", "dp"),
    [
        (Case(pp=2, micro_batches=3, module={"schedule": "1f1b"}), 1),
        (Case(pp=2, chunks=2, micro_batches=2, zero=2, module={"schedule": "zbv"}), 2),
    ],
    ids=["1f1b", "zbv-dp2"],
)
def test_every_action_once_in_the_order_that_the_schedule_forces(case, dp):
    results = ranks.run(_traced, case.pp * dp, case, [2, 3])
    assert all(same for same, _, _ in results)  # tracing changes no number
    assert [len(traces) for _, traces, _ in results] == [2] + [0] * (len(results) - 1)
    _, traces, schedule = results[0]
    slow_stage = 1 // (4 // schedule.num_stages)  # holds the second of four layers
    for step, trace in zip((2, 3), traces, strict=True):
        assert (trace.step, trace.device, trace.schedule) == (step, "CPU", schedule)
        _in_order(trace, slack_seconds=0.0)
        assert trace.clock_error_seconds == (0.0,) * case.pp  # one Linux machine
        forwards = [span for row in trace.spans for span in row if span[0].op is Op.FORWARD]
        slow = [end - start for action, start, end in forwards if action.stage == slow_stage]
        assert len(slow) == case.micro_batches
        assert min(slow) > 0.9 * SLOW_SECONDS
        assert Trace.from_json(trace.to_json(), where="x").schedule == schedule
        assert compare(trace).costs.forward_seconds[slow_stage] > 0.9 * SLOW_SECONDS


def _in_order(trace: Trace, slack_seconds: float) -> None:
    """Each action is there once, within the step, and after what it needs."""
    depends = Dependencies(trace.schedule)
    every = Counter(action for row in trace.spans for action, _, _ in row)
    assert every == Counter(action for row in trace.schedule.rows for action in row)
    assert set(every.values()) == {1}
    spans = {action: (start, end) for row in trace.spans for action, start, end in row}
    assert min(start for start, _ in spans.values()) >= 0.0
    last = max(row[-1][2] + tail for row, tail in zip(trace.spans, trace.tail_seconds, strict=True))
    assert min(trace.tail_seconds) > 0.0
    for action, (start, end) in spans.items():
        assert start <= end <= last + slack_seconds
        need = depends.on(action)
        if need is None:
            continue
        if action.op in (Op.RECV_F, Op.RECV_B):
            assert end >= spans[need][0] - slack_seconds  # it cannot be there before it is sent
        else:
            assert start >= spans[need][1] - slack_seconds


def _apart(rank, world_size, case):
    """Ranks of two machines, so to say: their clocks are a thousand seconds apart."""
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() - 1000.0 * rank)
    module.time, module.boot_id = clock, str
    engine = toy_pipeline.engine(case)
    engine.train_batch(_batches(case, 0, engine))
    traces = engine.trace()
    engine.train_batch(_batches(case, 1, engine))
    return traces


def test_clocks_that_are_apart_are_brought_together_within_the_bound():
    case = Case(pp=2, micro_batches=2, module={"schedule": "1f1b"})
    (trace,), nothing = ranks.run(_apart, 2, case)
    assert nothing == []
    first, second = trace.clock_error_seconds
    assert first == 0.0
    assert 0.0 < second < 1.0
    assert trace.step == 2
    _in_order(trace, slack_seconds=second)


def _rounds(rank, world_size):
    return time_rounds(dist.group.WORLD, torch.device("cpu"))


def test_nobody_leaves_a_round_before_everybody_is_in_it():
    first, second = ranks.run(_rounds, 2)
    assert len(first) == len(second) > 1
    for (here_in, here_out), (there_in, there_out) in zip(first, second, strict=True):
        assert max(here_in, there_in) <= min(here_out, there_out)


def _tracer() -> Tracer:
    return Tracer(SimpleNamespace(pipe=None), torch.device("cpu"))


@pytest.mark.parametrize("steps", [0, [], [4], [9, 2]])
def test_steps_that_are_over_or_none_are_refused(steps):
    with pytest.raises(ConfigError, match="give a number of steps, or steps from 5 on"):
        _tracer().expect(steps, done=4)


def test_an_untraced_step_looks_at_nothing(monkeypatch):
    monkeypatch.setattr(module, "Recorder", _forbidden)
    monkeypatch.setattr(module, "time_rounds", _forbidden)
    tracer = _tracer()
    assert tracer.expect([3], done=0) == []
    for done in (0, 1, 3):
        with tracer.step(done + 1, None) as around:
            assert around is None
    with pytest.raises(AssertionError, match="not traced"), tracer.step(3, None):
        pass


class Accelerator:
    """Events of a device whose work lags behind the host: each is reached a second after it is recorded."""

    def __init__(self, host) -> None:
        self.host, self.waits = host, 0

    def synchronize(self) -> None:
        self.waits += 1

    def Event(self, *, enable_timing):  # noqa: N802
        assert enable_timing
        return _Event(self)


class _Event:
    def __init__(self, device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = self.device.host.now + 1.0

    def synchronize(self) -> None:
        self.device.waits += 1
        self.device.host.now = max(self.device.host.now, self.at)

    def elapsed_time(self, end) -> float:
        return 1000.0 * (end.at - self.at)


def test_events_on_a_device_are_read_after_the_step(monkeypatch):
    host = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: host.now))
    device = Accelerator(host)
    clock = StreamClock(device)  # the origin: asked for at 100, reached at 101
    assert clock.error_seconds == 0.5
    recorder, waits = Recorder(clock), device.waits
    actions = [Action(0, Op.FORWARD, 0), Action(0, Op.BACKWARD, 0)]
    for action, seconds in zip(actions, (2.0, 3.0), strict=True):
        with recorder.around(action):
            host.now += seconds
    assert device.waits == waits  # nothing inside the step waited for the device
    host.now += 0.25
    record = recorder.finish(((0.0, 1.0),))
    # Distances between events are exact; where they lie on the host's clock is off by up to half a second.
    assert [action for action, _, _ in record.spans] == actions
    times = [(start, end) for _, start, end in record.spans]
    assert times == [(101.5, 103.5), (103.5, 106.5)]
    assert record.end == pytest.approx(106.75)
    assert record.error_seconds == 0.5


def test_the_hosts_clock_is_its_own_scale():
    clock = HostClock()
    marks = [clock.mark(), clock.mark()]
    assert clock.seconds(marks) == marks
    assert marks[0] <= marks[1]
    assert clock.error_seconds == 0.0


def test_files_appear_whole_or_not_at_all(tmp_path: Path, monkeypatch):
    comparison = compare(by_hand())
    folder = tmp_path / "run" / "trace"
    assert write(comparison, folder) == folder / "step7.html"
    names = {"step7.json", "step7.html", "step7.perfetto.json"}
    assert {path.name for path in folder.iterdir()} == names
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert Trace.from_json((folder / "step7.json").read_text(), where="x") == comparison.trace

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store.os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write(comparison, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
