"""What each engine's schedule would take by itself: simulated with free transfers, and in theory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed.runtime.pipe.schedule import BackwardPass, DualPipeVSchedule, ForwardPass

from dsx.parallel.stages import Placement
from dsx.schedules import program
from dsx.schedules.schedule import Action, Op, Schedule
from dsx.schedules.simulate import Costs, simulate, validate


def deepspeed_dualpipev(num_ranks: int, num_micro_batches: int) -> Schedule:
    """DualPipeV as stock DeepSpeed runs it, from its own instructions: whole backwards throughout."""
    rows = []
    for rank in range(num_ranks):
        stages = (rank, 2 * num_ranks - 1 - rank)  # by DeepSpeed's "phase"
        ops = {ForwardPass: Op.FORWARD, BackwardPass: Op.BACKWARD}
        rows.append(
            tuple(
                Action(stages[command.phase], ops[type(command)], command.buffer_id % num_micro_batches)
                for step in DualPipeVSchedule(num_micro_batches, num_ranks, rank).steps()
                for command in step
                if type(command) in ops
            )
        )
    schedule = Schedule("deepspeed dualpipev", num_ranks, 2, num_micro_batches, tuple(rows), "v")
    validate(schedule)
    return schedule


def from_torch(order: Mapping[int, Sequence[Any]], name: str, placement: Placement) -> Schedule:
    """A schedule of torch's from its ``pipeline_order``; a forward and backward that it overlaps, in turn."""
    lines = []
    for rank in sorted(order):
        actions = [action for action in order[rank] if action is not None]
        parts = [part for action in actions for part in (action.sub_actions or (action,))]
        lines.append(",".join(map(str, parts)))
    schedule = program.parse("\n".join(lines), name=f"torch {name}", placement=placement)
    validate(schedule)
    return schedule


Forward = float | tuple[float, ...]
"""Seconds of every rank's forward, or one for every part of the model in order, equally many to a stage."""


def stage_seconds(num_stages: int, num_ranks: int, forward: Forward) -> tuple[float, ...]:
    """What a forward takes each virtual stage."""
    if isinstance(forward, float):
        return (forward * num_ranks / num_stages,) * num_stages
    each = len(forward) // num_stages
    return tuple(sum(forward[each * stage : each * (stage + 1)]) for stage in range(num_stages))


def costs(num_stages: int, num_ranks: int, forward: Forward, transfer_seconds: float = 0.0) -> Costs:
    """Forwards of all stages; an input gradient and a weight gradient take as long."""
    parts = stage_seconds(num_stages, num_ranks, forward)
    return Costs(
        forward_seconds=parts,
        backward_input_seconds=parts,
        backward_weight_seconds=parts,
        transfer_seconds=transfer_seconds,
    )


def simulated_seconds(schedule: Schedule, forward: Forward, transfer_seconds: float = 0.0) -> float:
    """Length of a step on paper: transfers overlap with everything, nothing else takes time."""
    size = (schedule.num_stages, schedule.num_ranks)
    return simulate(schedule, costs(*size, forward, transfer_seconds)).seconds


def ideal_seconds(schedule: Schedule, forward_seconds: float) -> float:
    """Length of a step without any bubble: each rank's computation."""
    return 3 * forward_seconds * schedule.num_micro_batches


def bubble_in_theory(engine: str, schedule: Schedule) -> float | None:
    """Published bubble over ideal time for F = I = W and m >= p; None where there is no formula.

    arXiv:2104.04473 section 2.2 (GPipe, 1F1B, interleaved), arXiv:2211.05953 (looped BFS), arXiv:2401.10241
    (ZB-H1; the others' floor with a synchronous optimizer), dsx/schedules/builders.py (ZBV). Torch's
    zero-bubble orders delay every rank's weight gradients by a fixed count and have none.
    """
    p, v, m = schedule.num_ranks, schedule.num_chunks, schedule.num_micro_batches
    whose, name = engine.split(" ", 1)
    known = {
        "gpipe": (p - 1) / m,
        "1f1b": (p - 1) / m,
        "looped_bfs": (p - 1) / (v * m),
        "interleaved": (p - 1) / (v * m),
    }
    if whose == "dsx":
        known |= {
            "zb_h1": (p - 1) / (3 * m),
            "interleaved_zb": (p - 1) / (3 * v * m),
            "zbv": (p - 1) / (6 * m),
        }
    return known.get(name) if m >= p else None
