"""``dsx plan --measure``: the planner's block takes what a real one took."""

from dataclasses import replace

import pytest
import torch

from dsx.planner import profiler as measured
from dsx.planner.cluster import preset
from dsx.planner.costs import Efficiency
from dsx.planner.inputs import PinnedChoices, plan_inputs, plan_search
from dsx.planner.profile import LayerCost


@pytest.fixture(scope="module")
def inputs():
    return plan_inputs(
        model="llama/tiny",
        config=None,
        cluster=preset("CPU"),
        gpus=2,
        global_batch=8,
        sequence_length=64,
    )


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_finds_the_share_that_explains_a_block(inputs, share):
    """Of a block whose time is known because it was predicted."""
    run, cluster = inputs.run, preset("H100")
    cluster = replace(cluster, flops={"bf16": 1e12, "fp32": 1e12})
    given = replace(Efficiency(), matmul=share, kernel_seconds=0.0)
    seconds = measured._predicted(run, cluster, given, 64).seconds
    cost = LayerCost(
        forward_seconds=seconds / 3,
        backward_seconds=2 * seconds / 3,
        backward_input_seconds=seconds / 3,
        backward_weight_seconds=seconds / 3,
    )
    found = measured._fitted(run, cluster, replace(given, matmul=0.3), 64, cost)
    assert found.matmul == pytest.approx(share, rel=1e-3)


def test_a_plan_from_measurements(inputs):
    """Rates are this machine's; the plan goes by them."""
    found = measured.measure_compute(inputs.run, inputs.cluster)
    assert found.cluster.peak("fp32") != inputs.cluster.peak("fp32")
    assert 1e9 < found.cluster.peak("fp32") < 1e14
    assert 1e8 < found.cluster.memory_bytes_per_second < 1e13
    assert 0.01 <= found.efficiency.matmul <= 1.5
    assert "measured on CPU, fp32" in found.text
    best = plan_search(inputs, PinnedChoices(), found).run(1).best[0]
    slow = replace(found, efficiency=replace(found.efficiency, matmul=found.efficiency.matmul / 4))
    slower = plan_search(inputs, PinnedChoices(), slow).run(1).best[0]
    assert slower.time.seconds > best.time.seconds


class Gpu:
    """What torch says of a GPU with so many GiB."""

    def __init__(self, gib):
        self.total_memory = int(gib * (1 << 30))


@pytest.mark.parametrize(
    ("name", "gib", "cluster", "words"),
    [
        ("NVIDIA H100 80GB HBM3", 79.1, "H100", ""),
        ("NVIDIA H200", 139.8, "H200", ""),
        ("NVIDIA H200", 139.8, "H100", "this NVIDIA H200 has 139.80 GiB"),
        ("NVIDIA A100-SXM4-80GB", 79.2, "H100", "this NVIDIA A100-SXM4-80GB has a peak of 312 TFLOP/s"),
        ("NVIDIA H100 80GB HBM3", 79.1, "CPU", "is no CPU"),
    ],
)
def test_says_when_the_gpu_is_not_the_clusters(monkeypatch, name, gib, cluster, words):
    monkeypatch.setattr(measured, "device_name", lambda: name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Gpu(gib))
    found = measured._unlike(torch.device("cuda"), preset(cluster), "bf16")
    assert words in found
    assert bool(words) == bool(found)
    assert not found or f"not a machine of {cluster}" in found


def test_says_that_a_cpu_is_no_gpu():
    cpu = torch.device("cpu")
    assert "this CPU is no GPU" in measured._unlike(cpu, preset("H100"), "bf16")
    assert not measured._unlike(cpu, preset("CPU"), "fp32")


def test_long_sequences_are_cut():
    long = plan_inputs(
        model="llama-3-8b",
        config=None,
        cluster=preset("CPU"),
        gpus=1,
        global_batch=1,
        sequence_length=8192,
    )
    length = measured._length(long.run, 1e11)
    assert 16 <= length < 8192
    assert measured._length(long.run, 1e18) == 8192
