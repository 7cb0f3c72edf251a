"""Every schedule's step time with virtual compute, beside its own simulation and stock DeepSpeed's 1F1B.

    python tools/bench_schedules.py [--ranks 4] [--micro-batches 8] [--forward-ms 16] [--rounds 5]

Layers sleep instead of computing (a micro-batch takes a rank FORWARD ms forward, as long again for the input
gradient and for the weight gradient), so that many ranks fit on few cores and what is measured is the
schedule and the engine. Each layer's sleep is shortened by what this machine's sleeps overshoot, measured
first. Engines take turns, round by round, in the same processes. Printed: the median step, the simulation of
the same schedule with free transfers, how much longer the engine took than that, and the speed relative to
stock DeepSpeed in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

import dsx
from dsx.nn.split import WeightGradients
from dsx.plan.builders import build, default_chunks, divides_backward
from dsx.plan.simulate import Costs, simulate

WIDTH = 32
SCHEDULES = ("gpipe", "1f1b", "zb_h1", "looped_bfs", "interleaved", "interleaved_zb", "zbv", "dualpipev")
STOCK = "stock 1f1b"


class _Sleep(torch.autograd.Function):
    """Sleeps forward, and in backward once for each half, or for the first half when the second is apart."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: SleepLayer) -> torch.Tensor:
        time.sleep(layer.seconds)
        ctx.layer, ctx.weight = layer, weight
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, None]:
        layer, weight = ctx.layer, ctx.weight
        time.sleep(layer.seconds)
        if layer.split is not None and layer.split.active:
            layer.split.keep(weight, weight.shape, layer.start_weight_gradient, torch.zeros_like(weight))
            return dy, None, None
        return dy, layer.start_weight_gradient(torch.zeros_like(weight))(), None


class SleepLayer(nn.Module):
    """A layer that takes ``seconds`` for a forward, an input gradient and a weight gradient each."""

    def __init__(self, seconds: float, split: WeightGradients | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))
        self.seconds, self.split = seconds, split

    def start_weight_gradient(self, gradient: torch.Tensor) -> Any:
        """The weight gradient's sleep, as WeightGradients wants it."""

        def finish() -> torch.Tensor:
            time.sleep(self.seconds)
            return gradient

        return finish

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, WIDTH] to the same."""
        y: torch.Tensor = _Sleep.apply(x, self.weight, self)
        return y


class First(SleepLayer):
    """The first layer, whose input wants no gradient: autograd must run its backward all the same."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As SleepLayer."""
        return super().forward(x.detach().requires_grad_(torch.is_grad_enabled()))


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Anything that depends on all outputs."""
    return (outputs - labels).square().mean()


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--forward-ms", type=float, default=16.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={arguments.ranks}", __file__, *sys.argv[1:], f"--worker={result}"]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})  # noqa: S603
        rows = json.loads(result.read_text())
    print(as_text(rows, arguments))
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"arguments": vars(arguments) | {"json": None}, "rows": rows}, indent=2, default=str)
        )


def work(arguments: argparse.Namespace) -> None:
    """One rank: time every engine in turns; rank 0 writes the figures."""
    from dsx.runtime.launch import distributed

    torch.set_num_threads(1)
    forward = arguments.forward_ms / 1000
    with distributed(dsx.Mesh.of(pp=arguments.ranks)) as groups:
        overshoot = _overshoot(forward / 2)
        engines = {STOCK: _stock(arguments, forward - overshoot)}
        for name in SCHEDULES:
            chunks = default_chunks(name)
            engines[name] = _ours(name, chunks, arguments, forward / chunks - overshoot, groups)
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(arguments.rounds + 1):
            for name, engine in engines.items():
                dist.barrier()
                begun = time.perf_counter()
                engine.train_batch(data_iter=_batches(arguments.micro_batches))
                spent = torch.tensor(time.perf_counter() - begun)
                dist.all_reduce(spent, op=dist.ReduceOp.MAX)
                if number:  # the first round makes connections and buffers
                    seconds[name].append(float(spent))
        if groups.rank == 0:
            arguments.worker.write_text(json.dumps(_rows(seconds, arguments, forward)))


def _overshoot(seconds: float) -> float:
    """How much longer than asked this machine sleeps, median."""
    spent = []
    for _ in range(30):
        begun = time.perf_counter()
        time.sleep(seconds)
        spent.append(time.perf_counter() - begun - seconds)
    return statistics.median(spent)


def _config(arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": arguments.micro_batches,
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }


def _stock(arguments: argparse.Namespace, seconds: float) -> Any:
    layers = [LayerSpec(First if i == 0 else SleepLayer, seconds) for i in range(arguments.ranks)]
    net = PipelineModule(layers, num_stages=arguments.ranks, loss_fn=loss_fn, partition_method="uniform")
    return deepspeed.initialize(
        model=net, model_parameters=list(net.parameters()), config=_config(arguments)
    )[0]


def _ours(name: str, chunks: int, arguments: argparse.Namespace, seconds: float, groups: dsx.Groups) -> Any:
    split = WeightGradients() if divides_backward(name) else None
    count = arguments.ranks * chunks
    layers = [LayerSpec(First if i == 0 else SleepLayer, seconds, split) for i in range(count)]
    net = dsx.PipelineModule(
        layers,
        loss_fn=loss_fn,
        partition_method="uniform",
        num_chunks=chunks,
        schedule=name,
        groups=groups,
        split=split,
    )
    return dsx.initialize(model=net, config=_config(arguments))[0]


def _batches(count: int) -> Any:
    return iter([(torch.zeros(1, WIDTH), torch.ones(1, WIDTH))] * count)


def _rows(
    seconds: dict[str, list[float]], arguments: argparse.Namespace, forward: float
) -> list[dict[str, Any]]:
    stock = statistics.median(seconds[STOCK])
    rows = []
    for name, spent in seconds.items():
        known = "1f1b" if name == STOCK else name
        chunks = default_chunks(known)
        part = forward / chunks
        costs = Costs(forward_seconds=part, backward_input_seconds=part, backward_weight_seconds=part)
        ideal = simulate(build(known, arguments.ranks, chunks, arguments.micro_batches), costs)
        median = statistics.median(spent)
        rows.append(
            {
                "engine": name,
                "chunks": chunks,
                "milliseconds": 1000 * median,
                "simulated_milliseconds": 1000 * ideal.seconds,
                "excess_percent": 100 * (median / ideal.seconds - 1),
                "simulated_bubble_percent": 100 * ideal.bubble,
                "speed_over_stock": stock / median,
            }
        )
    return rows


def as_text(rows: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """The table that is printed."""
    p, m = arguments.ranks, arguments.micro_batches
    lines = [
        f"p = {p}, m = {m}, F = I = W = {arguments.forward_ms:g} ms per rank, median of {arguments.rounds}",
        f"{'engine':<16} {'v':>2} {'ms':>8} {'simulated':>10} {'excess':>7} {'bubble':>7} {'vs stock':>9}",
    ]
    lines += [
        f"{row['engine']:<16} {row['chunks']:>2} {row['milliseconds']:>8.1f} "
        f"{row['simulated_milliseconds']:>10.1f} {row['excess_percent']:>6.1f}% "
        f"{row['simulated_bubble_percent']:>6.1f}% {row['speed_over_stock']:>8.3f}x"
        for row in rows
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
