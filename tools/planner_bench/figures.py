"""Figures 11 to 18 of arXiv:2104.04473 as tables, with the paper's claims and whether ours shows them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from dsx.planner.cluster import preset
from dsx.planner.costs import MEGATRON_2021, Efficiency
from planner_bench.published import SEQUENCE_LENGTH, Run

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure.

    Attributes:
        name: Its number and subject.
        claim: What the paper says of it.
        header: Titles of the columns.
        rows: First what varies, then figures.
        shows: Parts of the claim -> whether ours shows them.
    """

    name: str
    claim: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shows: dict[str, bool]


def figures(efficiency: Efficiency) -> Iterator[Figure]:
    """All of them."""
    for make in (_eleven, _twelve, _thirteen, _fourteen, _fifteen, _sixteen, _seventeen, _eighteen):
        yield make(efficiency)


def _rate(run: Run, efficiency: Efficiency) -> float:
    return run.teraflops(run.predict(efficiency))


def _run(layers: int, hidden: int, heads: int, tensor: int, pipeline: int, gpus: int, batch: int) -> Run:
    return Run(
        name="",
        layers=layers,
        hidden=hidden,
        heads=heads,
        tensor=tensor,
        pipeline=pipeline,
        gpus=gpus,
        batch=batch,
    )


def _table(rates: dict[tuple[int, int], float]) -> tuple[tuple[str, ...], ...]:
    """``{(row, column): figure}`` as rows of text."""
    columns = list(dict.fromkeys(column for _, column in rates))
    return tuple(
        (str(row), *(f"{rates[row, column]:.0f}" for column in columns))
        for row in dict.fromkeys(row for row, _ in rates)
    )


def _eleven(efficiency: Efficiency) -> Figure:
    """Three layers per GPU whatever the pipeline."""
    rates = {
        (p, batch): _rate(_run(3 * p, 20480, 128, 8, p, 8 * p, batch), efficiency)
        for p in (1, 2, 4, 8)
        for batch in (8, 128)
    }
    return Figure(
        name="11: pipeline degree, weak scaling (TFLOP/s per GPU)",
        claim="the higher batch scales better, since the bubble is shared by more micro-batches",
        header=("pipeline", "batch 8", "batch 128"),
        rows=_table(rates),
        shows={
            "throughput falls with the pipeline degree at batch 8": rates[8, 8] < rates[4, 8] < rates[2, 8],
            "batch 128 loses less": rates[8, 128] / rates[1, 128] > rates[8, 8] / rates[1, 8],
        },
    )


def _twelve(efficiency: Efficiency) -> Figure:
    batches = (12, 24, 36, 48, 60)
    plain = {b: _rate(_run(96, 12288, 96, 8, 12, 96, b), efficiency) for b in batches}
    looped = {b: _rate(replace(_run(96, 12288, 96, 8, 12, 96, b), chunks=4), efficiency) for b in batches}
    gains = [looped[b] / plain[b] - 1 for b in batches]
    return Figure(
        name="12: interleaved schedule, 175B on 96 GPUs (TFLOP/s per GPU)",
        claim="interleaving gains 10 % and more, and less as the batch grows",
        header=("batch", "1F1B", "interleaved", "gain"),
        rows=tuple(
            (str(b), f"{plain[b]:.0f}", f"{looped[b]:.0f}", f"{gain:+.1%}")
            for b, gain in zip(batches, gains, strict=True)
        ),
        shows={
            "it gains 10 % and more at the smaller batches": gains[0] >= 0.1 and gains[1] >= 0.1,
            "the gain shrinks as the batch grows": all(a > b for a, b in pairwise(gains)),
        },
    )


def _thirteen(efficiency: Efficiency) -> Figure:
    degrees = (2, 4, 8, 16, 32)
    rates = {
        (64 // p, batch): _rate(_run(32, 20480, 128, 64 // p, p, 64, batch), efficiency)
        for p in degrees
        for batch in (32, 128)
    }
    best = {batch: max((rates[t, batch], t) for t, b in rates if b == batch)[1] for batch in (32, 128)}
    return Figure(
        name="13: tensor against pipeline degree, 162.2B on 64 GPUs (TFLOP/s per GPU)",
        claim="best is the tensor degree of a node, 8",
        header=("tensor", "batch 32", "batch 128"),
        rows=_table(rates),
        shows={f"8 is best at batch {batch}": degree == 8 for batch, degree in best.items()},
    )


def _fourteen(efficiency: Efficiency) -> Figure:
    rates = {
        (p, batch): _rate(_run(32, 3840, 32, 1, p, 64, batch), efficiency)
        for p in (2, 4, 8, 16, 32)
        for batch in (32, 128, 512)
    }
    degrees = (2, 4, 8, 16, 32)
    return Figure(
        name="14: data against pipeline degree, 5.9B on 64 GPUs (TFLOP/s per GPU)",
        claim="throughput falls as the pipeline degree grows",
        header=("pipeline", "batch 32", "batch 128", "batch 512"),
        rows=_table(rates),
        shows={
            f"it falls at batch {b}": all(rates[x, b] > rates[y, b] for x, y in pairwise(degrees))
            for b in (32, 128, 512)
        },
    )


def _fifteen(efficiency: Efficiency) -> Figure:
    degrees = (2, 4, 8, 16, 32)
    rates = {
        (t, batch): _rate(_run(32, 3840, 32, t, 1, 64, batch), efficiency)
        for t in degrees
        for batch in (32, 128, 512)
    }
    return Figure(
        name="15: data against tensor degree, 5.9B on 64 GPUs (TFLOP/s per GPU)",
        claim="throughput falls as the tensor degree grows: all-reduces every micro-batch, smaller matrices",
        header=("tensor", "batch 32", "batch 128", "batch 512"),
        rows=_table(rates),
        shows={
            f"it falls at batch {b}": all(rates[x, b] > rates[y, b] for x, y in pairwise(degrees))
            for b in (128, 512)
        }
        | {"most across nodes (8 to 16)": rates[16, 512] / rates[8, 512] < rates[8, 512] / rates[4, 512]},
    )


def _sixteen(efficiency: Efficiency) -> Figure:
    rates = {
        (size, batch): _rate(replace(_run(32, 15360, 128, 8, 8, 64, batch), micro_batch=size), efficiency)
        for size in (1, 2, 4, 8)
        for batch in (128, 512)
    }
    best = max((rates[size, 128], size) for size in (1, 2, 4, 8))[1]
    return Figure(
        name="16: micro-batch, 91B on 64 GPUs (TFLOP/s per GPU)",
        claim="best is a micro-batch of 2",
        header=("micro-batch", "batch 128", "batch 512"),
        rows=_table(rates),
        shows={
            "2 is best at batch 128": best == 2,
            "2 is best at batch 512": max((rates[s, 512], s) for s in (1, 2, 4, 8))[1] == 2,
            "neither the smallest nor the largest is best at batch 128": best not in (1, 8),
        },
    )


def _seventeen(efficiency: Efficiency) -> Figure:
    batches = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    speed, memory = {}, {}
    for batch in batches:
        for mode in ("full", "none"):
            run = replace(_run(80, 12288, 96, 8, 16, 128, batch), recompute=mode)  # type: ignore[arg-type]
            speed[batch, mode] = batch / run.predict(efficiency).seconds
            memory[batch, mode] = _memory_gib(run)
    usable = preset("A100-80").usable_bytes / _GIB
    fitting = [batch for batch in batches if memory[batch, "none"] <= usable]
    costs = 1 - speed[1, "full"] / speed[1, "none"]
    return Figure(
        name="17: recomputation, 145B on 128 GPUs (sequences per second)",
        claim="recomputation costs up to 33 % at small batches; large ones need it for their memory, and it "
        "gives up to twice the best throughput without it",
        header=("batch", "recompute", "none", "memory with", "without"),
        rows=tuple(
            (
                str(b),
                f"{speed[b, 'full']:.2f}",
                f"{speed[b, 'none']:.2f}",
                f"{memory[b, 'full']:.0f} GiB",
                f"{memory[b, 'none']:.0f} GiB",
            )
            for b in batches
        ),
        shows={
            f"it costs 20 to 35 % at batch 1 ({costs:.0%})": 0.2 <= costs <= 0.35,
            f"without it large batches do not fit in {usable:.0f} GiB": fitting != list(batches),
            "with it, batch 256 is faster than whatever fits without": speed[256, "full"]
            > max(speed[b, "none"] for b in fitting),
        },
    )


def _memory_gib(run: Run) -> float:
    """Of the first pipeline rank, by arXiv:2205.05198, table 2, and 18 bytes per parameter.

    (16-bit parameters, fp32 gradients, fp32 parameters and two moments: 2 + 4 + 12.)
    """
    s, h, t = SEQUENCE_LENGTH, run.hidden, run.tensor
    layers = run.layers // run.pipeline
    parameters = layers * 12 * h * h / t
    live = min(run.batch, run.pipeline)
    each = s * h * (2 if run.recompute == "full" else 10 + 24 / t + 5 * run.heads * s / (h * t))
    return (18 * parameters + live * layers * each) / _GIB


def _eighteen(efficiency: Efficiency) -> Figure:
    batches = (12, 24, 36, 48, 60)
    whole = replace(MEGATRON_2021, shards_transfers=False)
    rates = {}
    for b in batches:
        run = replace(_run(96, 12288, 96, 8, 12, 96, b), chunks=4)
        rates[b] = _rate(run, efficiency), run.teraflops(run.predict(efficiency, whole))
    gains = [scattered / plain - 1 for scattered, plain in rates.values()]
    return Figure(
        name="18: scatter/gather of transfers, 175B on 96 GPUs, interleaved (TFLOP/s per GPU)",
        claim="it gains up to 11 %",
        header=("batch", "whole", "scattered", "gain"),
        rows=tuple(
            (str(b), f"{plain:.0f}", f"{scattered:.0f}", f"{gain:+.1%}")
            for (b, (scattered, plain)), gain in zip(rates.items(), gains, strict=True)
        ),
        shows={"it gains 4 to 14 % at some batch": any(0.04 <= gain <= 0.14 for gain in gains)},
    )
