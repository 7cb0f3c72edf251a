"""What an island keeps and takes for rounds, against the tensors of real ranks, counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

import dsx
import ranks
from dsx.config.resolve import resolve
from dsx.memory.estimate import estimate
from dsx.memory.job import job_of
from dsx.memory.meter import StorageMeter
from meta_engine.run import announce, batch, signatures
from often import often

WORLD = 4

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 20000},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "dsx": {
        "model": {"family": "gpt2", "preset": "tiny"},
        "parallel": {"pipeline": 1, "tensor": 1},
        "data": {"sequence_length": 32},
        "train": {"steps": 100, "output": "runs/islands"},
        "outer": {"islands": 2, "every": 2},
        "memory_check": "off",
    },
}

CASES = {
    "replicas, ZeRO-0": ["zero_optimization.stage=0"],
    "replicas, ZeRO-1": [],
    "replicas, ZeRO-3": ["zero_optimization.stage=3"],
    "pipeline, int8": ["dsx.parallel.pipeline=2", "dsx.outer.wire=int8"],
    "shares": ["dsx.parallel.tensor=2", "dsx.outer.shares=2"],
}


def counted(rank, world_size, sets):
    """Of this rank: its peak in a step with a round, bytes held after them, and bytes that it sent."""
    config = dsx.load_config(CONFIG, world_size=world_size, rank=rank, overrides=sets)
    from torch.autograd import set_multithreading_enabled

    set_multithreading_enabled(False)  # else backwards escape the meter
    with dsx.distributed(config.mesh, seed=3, islands=config.islands) as groups:
        meter = StorageMeter("cpu")
        with meter:
            engine = dsx.initialize(model=dsx.recipe.build_model(config, groups), config=config)[0]
            announce(signatures(config), engine)
            talk = engine.outer._protocol
            go_through = talk.go_through

            def metered(*arguments):
                with meter:  # a mode is of one thread
                    return go_through(*arguments)

            talk.go_through = metered
            one = batch(config)
            for step in (1, 2):
                with meter.phase(f"step {step}"):
                    engine.train_batch(iter([one] * config.accumulation))
        sent = sum(report.sent_bytes for report in engine.outer.reports[-1:])
        return meter.peak_bytes["step 2"], meter.current_bytes, sent


@pytest.mark.parametrize("name", often(CASES, 3))
def test_a_round_holds_what_is_estimated(name):
    sets = CASES[name]
    config = resolve(CONFIG, world_size=WORLD, overrides=sets)
    job = job_of(config, device="cpu")
    counts = ranks.run(counted, WORLD, sets)[: config.mesh.size]
    for rank, (peak, steady, _) in enumerate(counts):
        found = estimate(job, rank)
        phases = {phase.name: phase.peak_bytes for phase in found.phases}
        # Left out: token ids, and scalars.
        assert max(phases["outer step"], phases["step 2"]) == pytest.approx(peak, abs=1000)
        assert found.steady_bytes == pytest.approx(steady, abs=1000)
        assert phases["outer step"] > 0.99 * phases["step 2"]
    elements = sum(elements_of(job, rank) for rank in range(config.mesh.size))
    elements //= config.mesh.num_replicas if config.zero_stage == 0 else 1
    shares, width = job.islands.shares, {"fp32": 4, "int8": 1}[job.islands.wire]
    assert counts[0][2] == pytest.approx(elements * width / shares, rel=0.1)


def elements_of(job, rank):
    """Elements of masters that a rank holds."""
    at = job.layout.mesh.coords(rank)
    return sum(buffer.numel for buffer in job.layout.zero_plan(at["pp"]).buffers(at["dp"]))


@pytest.mark.parametrize(("wire", "kept"), [("fp32", 8), ("int8", 12)])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_on_a_gpu_it_lies_on_the_host(stage, wire, kept):
    sets = [f"zero_optimization.stage={stage}", f"dsx.outer.wire={wire}"]
    job = job_of(resolve(CONFIG, world_size=WORLD, overrides=sets))
    alone, found = estimate(replace(job, islands=None), 1), estimate(job, 1)
    held = elements_of(job, 1)
    lasting = sum(size for label, size in found.host_lines if label.category == "optimizer")
    assert alone.host_bytes < kept * held
    assert lasting == kept * held
    # The masters on their way to the host, in one tensor, are all that the device holds besides.
    assert found.steady_bytes == alone.steady_bytes
    assert [p.peak_bytes for p in found.phases[3:4]] == [p.peak_bytes for p in alone.phases[3:]]
    assert found.phases[-1].peak_bytes - found.steady_bytes == pytest.approx(4 * held, abs=2048)


def test_shares_and_delay():
    """A share's round takes a share's bytes; one that is under way counts in the steps that go on."""
    sets = {"whole": [], "shares": ["dsx.outer.shares=2"], "delay": ["dsx.outer.delay=1"]}
    found = {}
    for name, items in sets.items():
        job = job_of(resolve(CONFIG, world_size=WORLD, overrides=items), device="cpu")
        found[name] = {phase.name: phase.peak_bytes for phase in estimate(job, 0).phases}
    held = elements_of(job, 0)
    assert found["whole"]["outer step"] - found["shares"]["outer step"] == pytest.approx(
        24 * held / 2, rel=0.01
    )
    assert found["delay"]["outer step"] == found["whole"]["outer step"]
    in_flight = found["delay"]["step 2"] - found["whole"]["step 2"]
    assert 8 * held < in_flight <= 20 * held
