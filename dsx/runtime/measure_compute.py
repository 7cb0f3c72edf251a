"""What this machine's device computes and moves, measured on a block of the model to plan for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median

import torch
from deepspeed.accelerator import get_accelerator

from dsx.config.plan_search import Calibration
from dsx.config.run import RunConfig
from dsx.nn import families
from dsx.nn.parallel import TensorParallel
from dsx.nn.split import WeightGradients
from dsx.plan.cluster import Cluster
from dsx.plan.flops import layer_flops
from dsx.plan.params import layer_kinds
from dsx.plan.planner.collectives import Network
from dsx.plan.planner.efficiency import Efficiency, Software
from dsx.plan.planner.kernels import Shape
from dsx.plan.planner.layer_times import LayerTime, Machine, layer_times
from dsx.plan.profile import LayerCost
from dsx.runtime.layer_bench import Bench, Key
from dsx.runtime.monitor import device_name

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_MOST_FLOPS = {"cpu": 1e11}  # Of one block's forward and backward; longer sequences are cut.
_MOST_FLOPS_ON_DEVICES = 2e15
_SHORTEST = 16
_MATRIX = {"cpu": 1024}
_MATRIX_ON_DEVICES = 8192
_COPY_BYTES = {"cpu": 1 << 27}
_COPY_BYTES_ON_DEVICES = 1 << 31
_ROUNDS = 5
_LEAST, _MOST = 0.01, 1.5


def measure_compute(run: RunConfig, cluster: Cluster) -> Calibration:
    """Calibrate the planner's compute on this process's device.

    Measured are a large product of matrices, a copy, and a block of ``run.model`` forward and backward. The
    share of matrix multiplications is then such that the planner predicts the block's time. Links are not
    measured: one process has none. On CPUs the product and the copy replace the cluster's nominal rates,
    which are those of no machine in particular.

    Args:
        run: Resolved for one rank; its model, precision and sequence length count.
        cluster: What is planned for.
    """
    device = torch.device(get_accelerator().current_device_name())
    dtype, kind = _DTYPES[run.precision], device.type
    rate = _matmul_rate(device, dtype, _MATRIX.get(kind, _MATRIX_ON_DEVICES))
    moved = _copy_rate(device, _COPY_BYTES.get(kind, _COPY_BYTES_ON_DEVICES))
    length = _length(run, _MOST_FLOPS.get(kind, _MOST_FLOPS_ON_DEVICES))
    cost = _block(run, device, dtype, length)
    efficiency = Efficiency.of(cluster)
    if cluster.is_host:
        cluster = replace(cluster, flops=dict.fromkeys(cluster.flops, rate), memory_bytes_per_second=moved)
        efficiency = replace(efficiency, memory=1.0)
    else:
        efficiency = replace(efficiency, memory=min(1.0, moved / cluster.memory_bytes_per_second))
    efficiency = _fitted(run, cluster, efficiency, length, cost)
    block = f"a block of 1 x {length} tokens {1000 * cost.seconds:.4g} ms forward and backward"
    return Calibration(
        cluster=cluster,
        efficiency=efficiency,
        text=f"measured on {device_name()}, {run.precision}: products of matrices {rate / 1e12:.3g} TFLOP/s, "
        f"copies {moved / 1e9:.3g} GB/s, {block}; matrix multiplications reach {efficiency.matmul:.1%} of "
        f"{cluster.peak(run.precision) / 1e12:.3g} TFLOP/s",
    )


def _fitted(
    run: RunConfig, cluster: Cluster, efficiency: Efficiency, length: int, cost: LayerCost
) -> Efficiency:
    """The share of matrix multiplications with which the planner's block takes as long, by bisection."""
    low, high = _LEAST, _MOST
    for _ in range(40):
        middle = (low + high) / 2
        is_slow = _predicted(run, cluster, replace(efficiency, matmul=middle), length).seconds > cost.seconds
        low, high = (middle, high) if is_slow else (low, middle)
    return replace(efficiency, matmul=(low + high) / 2)


def _predicted(run: RunConfig, cluster: Cluster, efficiency: Efficiency, length: int) -> LayerTime:
    shape = Shape(
        model=run.model,
        tensor=1,
        sequence_parallel=False,
        micro_batch=1,
        sequence_length=length,
        width=_DTYPES[run.precision].itemsize,
    )
    machine = Machine(network=Network(cluster, efficiency), software=Software(), precision=run.precision)
    return layer_times(machine, shape, "none")[_place(run)]


def _place(run: RunConfig) -> int:
    return layer_kinds(run.model).index("Block")


def _length(run: RunConfig, most_flops: float) -> int:
    """Tokens of a sequence that takes no longer than it should."""
    length = run.sequence_length
    while length > _SHORTEST and length * layer_flops(run.model, length)[_place(run)] > most_flops:
        length //= 2
    return length


def _block(run: RunConfig, device: torch.device, dtype: torch.dtype, length: int) -> LayerCost:
    split = WeightGradients()
    layers = families.layers(run.model, TensorParallel(), dtype=dtype, device=device, split=split)
    bench = Bench(device=device, split=split, micro_batches=_ROUNDS, loss=lambda y: y.sum())
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        x = torch.randn(1, length, run.model.hidden_size, device=device, dtype=dtype)
        key = Key("Block", ((tuple(x.shape), str(dtype)),), is_last=False)
        bench.output(key, layers[_place(run)], x)
    return bench.costs[key]


def _matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _seconds(device, lambda: torch.mm(a, b))


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    a = torch.zeros(num_bytes, device=device, dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2.0 * num_bytes / _seconds(device, lambda: b.copy_(a))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median of a few rounds, each waited for, after two that do not count."""
    laps = []
    for _ in range(2 + _ROUNDS):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        laps.append(time.perf_counter() - start)
    return median(laps[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
