"""The check before a run, and the counted peak of a CPU run against torch's own allocation events."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from dsx.memory import job
from dsx.memory import watch as module
from dsx.memory.estimate import estimate_run
from dsx.memory.job import job_of
from dsx.memory.watch import COUNTED_STEP, PeakMemory, beside, check_memory, describe

CONFIG = Path(__file__).parents[2] / "configs" / "zero1.json"


def resolved(*items):
    return resolve(CONFIG, world_size=2, overrides=items)


def test_a_run_that_does_not_fit_is_refused_or_warned_of(monkeypatch, capsys):
    monkeypatch.setattr(module, "capacity_bytes", lambda: 1 << 20)
    with pytest.raises(ConfigError, match=r"memory of pipeline rank 0: its peak .* a rank has 1\.00 MiB"):
        check_memory(resolved("dsx.memory_check=refuse"))
    check_memory(resolved())
    assert capsys.readouterr().err.startswith("warning: memory of pipeline rank 0: ")
    check_memory(resolved("dsx.memory_check=off"))
    assert capsys.readouterr().err == ""


def test_a_run_that_fits_is_not_talked_about(capsys):
    check_memory(resolved("zero_optimization.reduce_bucket_size=1000"))
    assert capsys.readouterr().err == ""


def work(weight, x):
    hidden = torch.relu(x @ weight)
    (hidden * hidden).sum().backward()
    weight.grad = None


def test_the_counted_peak_is_what_torch_allocated():
    torch.manual_seed(0)
    weight, x = torch.randn(256, 512, requires_grad=True), torch.randn(128, 256)
    work(weight, x)
    watch = PeakMemory(torch.device("cpu"))
    for _ in range(COUNTED_STEP - 1):
        watch.before_step()
        work(weight, x)
        watch.after_step()
    assert watch.peaks() == {}
    watch.before_step()
    before = watch._meter.current_bytes
    work(weight, x)
    watch.after_step()
    counted = watch.peaks()["peak_allocated_bytes"] - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        work(weight, x)
    held = highest = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            highest = max(highest, held)
    assert before >= weight.nbytes + x.nbytes
    assert counted == pytest.approx(highest, rel=0.001)


def test_later_steps_are_not_counted_again():
    watch = PeakMemory(torch.device("cpu"))
    for step in range(1, 5):
        watch.before_step(counts=step != COUNTED_STEP)
        assert (watch._meter is not None) == (step == COUNTED_STEP + 1)
        held = torch.zeros(1000)
        del held
        watch.after_step()


def test_the_peak_stands_beside_its_estimate():
    memory = estimate_run(job_of(resolved()))
    peaks = {"peak_allocated_bytes": memory.peak_bytes * 2, "peak_reserved_bytes": memory.peak_bytes * 3}
    assert beside({}, memory) is None
    assert beside(peaks, memory).endswith("(-50.0%)")
    assert " reserved; estimated " in beside(peaks, memory)


def test_rounds_between_islands_are_not_counted_on_a_cpu():
    """An estimate whose peak they are is not held against a peak without them; a GPU has them."""
    config = resolved("dsx.outer.islands=2", "dsx.data.sequence_length=32")
    memory = estimate_run(job_of(config, device="cpu"))
    assert memory.highest.estimate.peak.name == "outer step"
    peaks = {"peak_allocated_bytes": 1 << 20}
    assert beside(peaks, memory).startswith("peak 1.00 MiB without rounds between islands; estimated ")
    assert beside(peaks | {"peak_reserved_bytes": 1 << 21}, memory).endswith("%)")


def test_a_run_whose_memory_is_not_known_goes_on(monkeypatch, capsys):
    def unknown(*_args, **_kwargs):
        raise ConfigError("zero_optimization.something", "its memory has not been learned", "leave it out")

    monkeypatch.setattr(job, "job_of", unknown)
    check_memory(resolved())
    assert capsys.readouterr().err.startswith("warning: memory is not checked: zero_optimization.something")
    assert describe(module.estimated(resolved())).startswith("not estimated: zero_optimization.something")
    with pytest.raises(ConfigError):
        check_memory(resolved("dsx.memory_check=refuse"))
