"""The parts of the schedule benchmark: sleeping layers, late messages, peers' schedules, thresholds."""

from __future__ import annotations

import time
from pathlib import Path

import bench_schedules
import pytest
import torch
import torch.distributed as dist
from schedule_bench import schedules, thresholds, virtual
from schedule_bench.wire import Wire
from torch.distributed.pipelining._backward import (
    stage_backward,
    stage_backward_input,
    stage_backward_weight,
)

import ranks
from dsx.nn.split import WeightGradients
from dsx.schedules.simulate import peak_activations, simulate


def _layers(split: WeightGradients | None = None) -> tuple[torch.nn.Sequential, virtual.Sleeper]:
    sleeper = virtual.Sleeper()
    return torch.nn.Sequential(*(virtual.SleepLayer(0.0, sleeper, split) for _ in range(2))), sleeper


def _input() -> torch.Tensor:
    return torch.ones(1, virtual.WIDTH, requires_grad=True)


def test_torch_divides_a_sleeping_layer():
    """Its machinery walks the graph; each of two layers sleeps once per part, and the gradients are whole."""
    net, sleeper = _layers()
    x = _input()
    y = net(x)
    assert sleeper.naps == 2
    _, groups = stage_backward_input([y], [torch.ones_like(y)], [x], net.parameters())
    assert sleeper.naps == 4
    assert all(p.grad is None for p in net.parameters())
    stage_backward_weight(net.parameters(), groups)
    assert sleeper.naps == 6
    assert all(p.grad.tolist() == [1.0] * virtual.WIDTH for p in net.parameters())
    assert x.grad.tolist() == [[1.0] * virtual.WIDTH]


def test_a_whole_backward_sleeps_twice_per_layer():
    net, sleeper = _layers()
    x = _input()
    y = net(x)
    stage_backward((y,), (torch.ones_like(y),), [x])
    assert sleeper.naps == 6


def test_dsx_divides_a_sleeping_layer():
    split = WeightGradients()
    net, sleeper = _layers(split)
    y = net(_input())
    with split.deferring((0, 0)):
        y.sum().backward()
    assert sleeper.naps == 4
    with split.delivering((0, 0)) as scalar:
        scalar.backward()
    assert sleeper.naps == 6
    assert all(p.grad.tolist() == [1.0] * virtual.WIDTH for p in net.parameters())


def test_deepspeeds_dualpipev_keeps_weight_gradients_in_its_backward():
    """Bubble and peak of DeepSpeed 0.19.8's own instructions at p = 4, m = 8 (DESIGN, section 9)."""
    schedule = schedules.deepspeed_dualpipev(4, 8)
    assert simulate(schedule, schedules.costs(8, 4, 1.0)).bubble == pytest.approx(0.229, abs=5e-4)
    assert max(peak_activations(schedule)) / 2 == 4.5


DELAY = 0.3


def _send(way: str, message: torch.Tensor) -> None:
    if way == "send":
        dist.send(message, 1)
    elif way == "batch":
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, message, 1)]):
            work.wait()
    else:
        dist.isend(message, 1).wait()


def _receive(way: str, box: torch.Tensor) -> float:
    """When waiting began."""
    begun = time.monotonic()
    if way == "send":
        dist.recv(box, 0)
    elif way == "batch":
        for work in dist.batch_isend_irecv([dist.P2POp(dist.irecv, box, 0)]):
            work.wait()
    else:
        work = dist.irecv(box, 0)
        while way == "busy" and time.monotonic() < begun + 2 * DELAY:
            pass
        begun = time.monotonic()
        work.wait()
    return begun


def _late_messages(rank: int, world_size: int, folder: str) -> list[tuple[float, float]]:
    """Rank 0 sends in each of four ways, rank 1 receives; from when to when each was held up."""
    del world_size
    wire = Wire(Path(folder), virtual.Sleeper(), delay_seconds=DELAY)
    waited = []
    with wire.installed():
        for way in ("send", "isend", "batch", "busy"):
            message = torch.full((4,), 7.0 * (rank == 0))
            dist.barrier()
            begun = time.monotonic()
            if rank == 0:
                _send(way, message)
            else:
                begun = _receive(way, message)
            waited.append((begun, time.monotonic()))
            assert message.tolist() == [7.0] * 4
    plain = torch.zeros(1)
    (dist.send if rank == 0 else dist.recv)(plain, 1 - rank)
    assert wire.sent == (4 if rank == 0 else 0), "taken off again"
    return waited


def test_messages_are_late_for_who_waits(tmp_path):
    sender, receiver = ranks.run(_late_messages, 2, str(tmp_path))
    assert all(end - begun < DELAY for begun, end in sender)
    for (sent, _), (_, came) in zip(sender[:3], receiver[:3], strict=True):
        assert came - sent >= DELAY
    begun, end = receiver[3]
    assert end - begun < DELAY, "what was computed meanwhile hides the delay"


def _row(engine: str, seconds: float, **figures) -> dict:
    return {"engine": engine, "median_seconds": seconds, "wire": {"median_seconds": seconds}, **figures}


def _table(ranks: int, micro_batches: int, *rows: dict, alone: float | None = None) -> dict:
    return {"ranks": ranks, "micro_batches": micro_batches, "alone_seconds": alone, "rows": list(rows)}


def test_thresholds_of_a_size():
    ours = _row("dsx zbv", 1.0, excess=0.051, speed=1.3)
    found = thresholds.outcomes(_table(4, 8, _row("torch zbv", 1.1), ours), 0.0)
    assert [(o.met, o.measured, o.bound) for o in found] == [(False, 0.051, 0.05), (True, 1.1, 0.995)]
    assert "excess of dsx zbv" in str(found[0])
    assert str(found[0]).startswith("MISSED p=4 m=8")
    assert thresholds.outcomes(_table(4, 16, ours), 0.0) == []
    (at_eight,) = thresholds.outcomes(_table(8, 16, ours), 0.0)
    assert (at_eight.met, at_eight.bound) == (True, 0.06)
    fast = _row("dsx interleaved", 1.0, excess=0.01, speed=1.26)
    (speed,) = thresholds.outcomes(_table(4, 4, fast), 0.0)
    assert (speed.met, speed.bound) == (True, 1.25)


def test_a_slower_schedule_than_the_peers_is_missed():
    rows = _row("torch gpipe", 1.0), _row("dsx gpipe", 1.004), _row("dsx zb_h1", 9.0)
    (tie,) = thresholds.outcomes(_table(2, 2, *rows), 0.0)
    assert tie.met
    (missed,) = thresholds.outcomes(_table(2, 2, _row("torch gpipe", 1.0), _row("dsx gpipe", 1.01)), 0.0)
    assert not missed.met


def test_thresholds_of_wires():
    peer, ours = _row("torch interleaved", 1.0), _row("dsx interleaved wide", 1.0, excess=0, speed=1)
    peer["wire"] |= {"wires_per_micro_batch": 0.6}
    ours["wire"] |= {"wires_per_micro_batch": 0.7, "speed": 1.25}
    found = thresholds.outcomes(_table(4, 16, peer, ours), 0.25)
    assert [o.met for o in found] == [False, True]
    assert [o.bound for o in found] == [0.6, 1.24]


def test_thresholds_of_real_compute():
    rows = _row("dsx 1f1b", 1.0, speed=1.0), _row("dsx zbv", 0.8, speed=1.16)
    plain = _row("torch zbv", 0.7)  # other layers: not held against ours
    (found,) = thresholds.outcomes(_table(2, 2, *rows, plain, alone=0.07), 0.0)
    assert (found.met, found.measured, found.bound) == (True, 1.16, 1.15)


def test_check_fails_the_run(monkeypatch, capsys):
    monkeypatch.setattr("schedule_bench.table.as_text", lambda table, arguments: "table")
    options = {"rounds": 1, "forward_ms": 1.0, "wire": 0.0}
    report = dict.fromkeys(("date", "cores", "load_average_before", "torch"), 0)
    for excess, code in ((0.02, 0), (0.04, 1)):
        report["tables"] = [_table(4, 8, _row("dsx 1f1b", 1.0, excess=excess, speed=1.0))]
        assert bench_schedules._print(report, options, check=True) == code
        assert ("MISSED p=4 m=8: excess of dsx 1f1b" in capsys.readouterr().out) == bool(code)
        assert bench_schedules._print(report, options, check=False) == 0
