"""One rank of a run: build the engines of a size, let them take turns, note how long each step took."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from schedule_bench import engines, real, virtual
from schedule_bench.engines import Engine
from schedule_bench.schedules import Forward, bubble_in_theory, costs, ideal_seconds, simulated_seconds
from schedule_bench.wire import Wire
from schedule_bench.workload import Workload

import dsx
from dsx.schedules.simulate import Costs

WARM_UP = 2
"""Rounds that are not counted: the first makes connections and buffers, the second is checked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one launch of ranks is to do.

    Attributes:
        ranks: Pipeline degree, the number of processes.
        micro_batches: Sizes of a step.
        forward_seconds: A rank's forward of a micro-batch (virtual compute), the mean of all ranks.
        parts: Where stages differ, how long parts of the model take beside each other, equally many to every
            virtual stage.
        files: Schedules from CSV files, as engines of their own, each with its own parts; empty: ``parts``.
        wire_share: Delay of a message over ``forward_seconds``; 0 has no wires at all.
        rounds: Turns of every engine that count.
        only: Words that select engines.
        real: Sizes of a model that computes; None sleeps.
    """

    ranks: int
    micro_batches: tuple[int, ...]
    forward_seconds: float
    wire_share: float
    rounds: int
    only: tuple[str, ...]
    real: real.Sizes | None = None
    parts: tuple[float, ...] = ()
    files: tuple[tuple[str, tuple[float, ...]], ...] = ()

    def forward(self, engine: str) -> Forward:
        """Seconds, as the simulations and the layers of an engine want them."""
        parts = {f"dsx {file}": parts for file, parts in self.files}.get(engine) or self.parts
        if not parts:
            return self.forward_seconds
        whole = self.forward_seconds * self.ranks / sum(parts)
        return tuple(part * whole for part in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One engine's figures; all times in seconds, bubbles and shares as fractions.

    Attributes:
        engine: As in "torch zbv".
        chunks: Virtual stages per rank.
        median_seconds: Of a step, until the last rank is done.
        spread_seconds: Slowest less fastest counted step.
        cpu_seconds: Processor time of all ranks for a step, the lower quartile of the counted steps, which a
            busy machine disturbs least; ranks that wait take none.
        theory_seconds: By the published formula; None without one.
        simulated_seconds: The engine's own order with free transfers and nominal times; in a real-compute run
            None, for there are no nominal times.
        excess: Median over simulated, less 1; None likewise.
        bubble: Measured, over ideal; None likewise.
        theory_bubble: By the published formula.
        simulated_bubble: Over ideal, with three equal parts.
        speed: Stock 1F1B's median over this one's.
        simulated_speed: The same of the simulations.
        wire: With delayed messages; None without.
        parameters: Of the whole model.
    """

    engine: str
    chunks: int
    median_seconds: float
    spread_seconds: float
    cpu_seconds: float
    theory_seconds: float | None
    simulated_seconds: float | None
    excess: float | None
    bubble: float | None
    theory_bubble: float | None
    simulated_bubble: float
    speed: float
    simulated_speed: float
    wire: WireRow | None
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WireRow:
    """The same engine with delayed messages.

    Attributes:
        median_seconds: Of a step.
        spread_seconds: Slowest less fastest.
        wires_per_micro_batch: What the step grew by, in delays, over the number of micro-batches.
        simulated_wires_per_micro_batch: The same on paper.
        speed: Stock 1F1B's median over this one's, both with the delay.
        sent_per_micro_batch: Messages of all ranks.
    """

    median_seconds: float
    spread_seconds: float
    wires_per_micro_batch: float
    simulated_wires_per_micro_batch: float
    speed: float
    sent_per_micro_batch: float


@dataclass(slots=True)
class _Times:
    """Counted steps of one engine in seconds, with free and with delayed messages; messages per step."""

    free: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    wired: list[float] = field(default_factory=list)
    sent: int = 0


def work(job: Job, folder: Path) -> list[dict[str, Any]]:
    """One table per size, as JSON data. Called on every rank; the same on every rank."""
    torch.set_num_threads(1)
    with dsx.distributed(dsx.Mesh.of(pp=job.ranks)) as groups:
        sleeper = virtual.Sleeper()
        wire = Wire(folder, sleeper) if job.wire_share else None
        with wire.installed() if wire else nullcontext():
            return [_table(job, count, groups, sleeper, wire) for count in job.micro_batches]


def _table(
    job: Job, micro_batches: int, groups: dsx.Groups, sleeper: virtual.Sleeper, wire: Wire | None
) -> dict[str, Any]:
    delay = job.wire_share * job.forward_seconds

    def made(name: str) -> Engine:
        def costs_of(chunks: int) -> Costs:
            return costs(job.ranks * chunks, job.ranks, job.forward(name), delay)

        load = _workload(job, micro_batches, name, sleeper)
        return engines.make(name, load, groups, costs_of, uneven=bool(job.parts))

    names = engines.names(job.ranks, micro_batches, job.only, wires=wire is not None)
    built = [made(name) for name in (*names, *(f"dsx {file}" for file, _ in job.files))]
    gc.collect()
    gc.freeze()  # else whoever's turn it is pays for collecting what all engines together made
    dist.barrier()
    sleeper.calibrate(job.forward_seconds / 2)
    times = {engine.name: _Times() for engine in built}
    for number in range(WARM_UP + job.rounds):
        first = number % len(built)
        for engine in built[first:] + built[:first]:
            before, naps = wire.sent if wire else 0, sleeper.naps
            seconds, cpu_seconds = _timed(engine)
            if number == WARM_UP - 1 and job.real is None:
                _require_naps(engine, sleeper.naps - naps)
            if number >= WARM_UP:
                times[engine.name].free.append(seconds)
                times[engine.name].cpu.append(cpu_seconds)
            if wire:
                times[engine.name].sent = wire.sent - before
                _wired(engine, wire, job, times[engine.name], counts=number >= WARM_UP)
    total = _summed([times[e.name].sent for e in built] + [e.num_parameters for e in built])
    sent, parameters = total[: len(built)], total[len(built) :]
    gc.unfreeze()
    rows = [
        _row(engine, times, job, sent[i] / micro_batches, parameters[i], built[0])
        for i, engine in enumerate(built)
    ]
    return {
        "ranks": job.ranks,
        "micro_batches": micro_batches,
        "sleeps_overshoot_seconds": sleeper.overshoot_seconds,
        "alone_seconds": real.alone_seconds(job.real, micro_batches) if job.real else None,
        "rows": [asdict(row) for row in rows],
    }


def _workload(job: Job, micro_batches: int, engine: str, sleeper: virtual.Sleeper) -> Workload:
    if job.real is not None:
        return real.workload(job.real, micro_batches)
    return virtual.workload(job.ranks, micro_batches, job.forward(engine), sleeper)


def _timed(engine: Engine) -> tuple[float, float]:
    """Seconds from when every rank is ready until the last one is done; processor time of all ranks."""
    dist.barrier()
    begun, busy = time.perf_counter(), time.process_time()
    engine.step()
    cpu = torch.tensor(time.process_time() - busy, dtype=torch.float64)
    spent = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return float(spent), float(cpu)


def _wired(engine: Engine, wire: Wire, job: Job, times: _Times, *, counts: bool) -> None:
    dist.barrier()
    wire.delay_seconds = job.wire_share * job.forward_seconds
    seconds, _ = _timed(engine)
    wire.delay_seconds = 0.0
    if counts:
        times.wired.append(seconds)


def _require_naps(engine: Engine, naps: int) -> None:
    """A forward, an input gradient and a weight gradient per chunk and micro-batch, each exactly once."""
    expected = 3 * engine.schedule.num_chunks * engine.schedule.num_micro_batches
    if naps != expected:
        raise SystemExit(f"{engine.name} slept {naps} times on rank {dist.get_rank()}, not {expected} times")


def _summed(values: Sequence[int]) -> list[int]:
    total = torch.tensor(values, dtype=torch.int64)
    dist.all_reduce(total)
    return [int(value) for value in total]


def _row(
    engine: Engine, times: dict[str, _Times], job: Job, sent: float, parameters: int, stock: Engine
) -> Row:
    schedule, forward = engine.schedule, job.forward_seconds
    mine, theirs = times[engine.name], times[stock.name]
    median, ideal = statistics.median(mine.free), ideal_seconds(schedule, forward)
    simulated = simulated_seconds(schedule, job.forward(engine.name))
    bubble = None if job.parts else bubble_in_theory(engine.name, schedule)
    nominal = job.real is None
    wire = None
    if mine.wired:
        delay = job.wire_share * forward
        wired, delays = statistics.median(mine.wired), delay * schedule.num_micro_batches
        late = simulated_seconds(schedule, job.forward(engine.name), delay)
        wire = WireRow(
            median_seconds=wired,
            spread_seconds=max(mine.wired) - min(mine.wired),
            wires_per_micro_batch=(wired - median) / delays,
            simulated_wires_per_micro_batch=(late - simulated) / delays,
            speed=statistics.median(theirs.wired) / wired,
            sent_per_micro_batch=sent,
        )
    return Row(
        engine=engine.name,
        chunks=schedule.num_chunks,
        median_seconds=median,
        spread_seconds=max(mine.free) - min(mine.free),
        cpu_seconds=sorted(mine.cpu)[len(mine.cpu) // 4],
        theory_seconds=ideal * (1 + bubble) if bubble is not None and nominal else None,
        simulated_seconds=simulated if nominal else None,
        excess=median / simulated - 1 if nominal else None,
        bubble=median / ideal - 1 if nominal else None,
        theory_bubble=bubble,
        simulated_bubble=simulated / ideal - 1,
        speed=statistics.median(theirs.free) / median,
        simulated_speed=simulated_seconds(stock.schedule, job.forward(stock.name)) / simulated,
        wire=wire,
        parameters=parameters,
    )
