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


def costs(num_chunks: int, forward_seconds: float, transfer_seconds: float = 0.0) -> Costs:
    """A rank's forward in equal chunks; an input gradient and a weight gradient take as long."""
    part = forward_seconds / num_chunks
    return Costs(
        forward_seconds=part,
        backward_input_seconds=part,
        backward_weight_seconds=part,
        transfer_seconds=transfer_seconds,
    )


def simulated_seconds(schedule: Schedule, forward_seconds: float, transfer_seconds: float = 0.0) -> float:
    """Length of a step on paper: transfers overlap with everything, nothing else takes time."""
    return simulate(schedule, costs(schedule.num_chunks, forward_seconds, transfer_seconds)).seconds


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
