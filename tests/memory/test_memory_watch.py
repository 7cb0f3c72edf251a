"""The check before a run, and the counted peak of a CPU run against torch's own allocation events."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from dsx.memory import job
from dsx.memory import watch as module
from dsx.memory.estimate import Phase, Role, RunMemory, estimate_run
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


def test_what_a_vmap_leaves_has_no_memory():
    left = []
    torch.vmap(lambda each: left.append(each) or each)(torch.ones(2, 3))
    memory = PeakMemory(torch.device("cpu"))
    for _ in range(COUNTED_STEP):
        memory.before_step()
        memory.after_step()
    assert memory.peaks()["peak_allocated_bytes"] > 0
    assert left


def test_the_peak_stands_beside_its_estimate():
    memory = estimate_run(job_of(resolved()))
    peaks = {"peak_allocated_bytes": memory.peak_bytes * 2, "peak_reserved_bytes": memory.peak_bytes * 3}
    assert beside({}, memory) is None
    assert beside(peaks, memory).endswith("(-50.0%)")
    assert " reserved; estimated " in beside(peaks, memory)


def of_ranks(peaks):
    """An estimate of pipeline ranks with these peaks."""
    phases = [Phase(name="step 2", peak_bytes=size, lines=(), place="") for size in peaks]
    built = Phase(name="engine", peak_bytes=1 << 40, lines=(), place="")  # of which a CPU sees nothing
    estimates = [SimpleNamespace(peak=phase, phases=(built, phase)) for phase in phases]
    roles = [Role(pp_rank=at, ranks=(at,), estimate=each) for at, each in enumerate(estimates)]
    return RunMemory(roles=tuple(roles))


def test_each_pipeline_rank_is_named_while_they_are_few():
    mib = 1 << 20
    told = beside({"peak_allocated_bytes": 100 * mib}, of_ranks([99 * mib, 40 * mib]), [100 * mib, 50 * mib])
    assert told == (
        "peak on pipeline rank 0: 100.00 MiB (estimated 99.00 MiB, -1.0%), "
        "1: 50.00 MiB (estimated 40.00 MiB, -20.0%)"
    )
    peaks = {"peak_allocated_bytes": 100 * mib, "peak_reserved_bytes": 120 * mib}
    assert beside(peaks, of_ranks([99 * mib] * 2), [mib, mib]).endswith("); 120.00 MiB reserved at most")


def test_of_many_those_are_named_that_are_further_off_than_usual():
    estimated, reached = [100 << 20] * 16, [100 << 20] * 16
    peaks = {"peak_allocated_bytes": 101 << 20}
    reached[3] = 101 << 20
    told = beside(peaks, of_ranks(estimated), reached)
    assert told.startswith("peak 100.00 MiB to 101.00 MiB on 16 pipeline ranks; estimates -1.0% to +0.0%; ")
    assert told.endswith("fullest 3: 101.00 MiB (estimated 100.00 MiB, -1.0%)")
    reached[5] = 80 << 20
    for place in (8, 9, 10, 11, 12):
        reached[place] = (110 + place) << 20
    told = beside({"peak_allocated_bytes": 122 << 20}, of_ranks(estimated), reached)
    far = told.partition("further off than 2%: ")[2]
    assert far.startswith("12: 122.00 MiB (estimated 100.00 MiB, -18.0%), 11: ")
    assert far.endswith(" and 2 more")


def test_rounds_between_islands_are_not_counted_on_a_cpu():
    """An estimate whose peak they are is not held against a peak without them; a GPU has them."""
    config = resolved("dsx.outer.islands=2", "dsx.data.sequence_length=32")
    memory = estimate_run(job_of(config, device="cpu"))
    assert memory.highest.estimate.peak.name == "outer step"
    peaks = {"peak_allocated_bytes": 1 << 20}
    assert beside(peaks, memory).startswith("peak 1.00 MiB without rounds between islands; estimated ")
    assert beside(peaks | {"peak_reserved_bytes": 1 << 21}, memory).endswith("%)")


def test_what_onednn_keeps_in_bf16_is_said():
    """Of each shape of a product its compiled kernel, whose size hangs on the processor alone."""
    memory, said = (
        estimate_run(job_of(resolved())),
        "oneDNN's kernels, about 0.5 MiB for each shape of a bf16 product",
    )
    assert said not in describe(memory)
    assert said in describe(memory, "bf16")
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported() or not hasattr(ctypes.CDLL(None), "mallinfo2"):
        pytest.skip("torch's own kernels compute these products here, or nobody says what is in use")
    factor = torch.randn(64, 64).bfloat16()
    taken = []
    for rows in range(100, 156, 7):
        x, before = torch.randn(rows, 64).bfloat16(), in_use()
        y = x @ factor
        taken.append(in_use() - before - y.nbytes)
    assert 1 << 17 < sum(taken) / len(taken) < 1 << 21


def in_use():
    """Bytes that the process has of its allocator."""
    figures = (ctypes.c_size_t * 10)()
    call = ctypes.CDLL(None).mallinfo2
    call.restype = type("Figures", (ctypes.Structure,), {"_fields_": [("of", type(figures))]})
    of = call().of
    return of[7] + of[4]


def test_a_run_whose_memory_is_not_known_goes_on(monkeypatch, capsys):
    def unknown(*_args, **_kwargs):
        raise ConfigError("zero_optimization.something", "its memory has not been learned", "leave it out")

    monkeypatch.setattr(job, "job_of", unknown)
    check_memory(resolved())
    assert capsys.readouterr().err.startswith("warning: memory is not checked: zero_optimization.something")
    assert describe(module.estimated(resolved())).startswith("not estimated: zero_optimization.something")
    with pytest.raises(ConfigError):
        check_memory(resolved("dsx.memory_check=refuse"))
