"""What an action must wait for, and an order in which all ranks together can run a schedule."""

from __future__ import annotations

from collections.abc import Iterator

from dsx.errors import ScheduleError
from dsx.plan.transfers import has_transfers
from dsx.spec.schedule import Action, Op, Schedule


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action, Action | None]]:
    """Every action as ``(rank, action, what it waited for)``, each after what it needs.

    Ranks run their rows in order; receives block, sends never do. The schedule may be lowered or not: without
    transfers an action waits for its producer on the other rank directly.

    Raises:
        ScheduleError: A deadlock: after the last action that can run, with every waiting rank's place.
    """
    lowered = has_transfers(schedule)
    heads = [0] * schedule.num_ranks
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = list(range(schedule.num_ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        row = schedule.rows[rank]
        while heads[rank] < len(row):
            action = row[heads[rank]]
            need = needs(schedule, action, lowered=lowered)
            if need is not None and need not in done:
                waiting.setdefault(need, []).append(rank)
                break
            yield rank, action, need
            heads[rank] += 1
            done.add(action)
            ready += waiting.pop(action, ())
    if waiting:
        raise _deadlock(schedule, heads, waiting)


def needs(schedule: Schedule, action: Action, *, lowered: bool) -> Action | None:
    """The one action that must have ended before ``action`` starts, besides those before it in its row."""
    stage, micro_batch, last = action.stage, action.micro_batch, schedule.num_stages - 1
    remote = lowered and schedule.num_ranks > 1
    match action.op:
        case Op.FORWARD if stage == 0:
            return None
        case Op.FORWARD:
            return (
                Action(stage, Op.RECV_F, micro_batch)
                if remote
                else Action(stage - 1, Op.FORWARD, micro_batch)
            )
        case Op.BACKWARD if stage == last:
            return Action(stage, Op.FORWARD, micro_batch)
        case Op.BACKWARD:
            return (
                Action(stage, Op.RECV_B, micro_batch)
                if remote
                else Action(stage + 1, Op.BACKWARD, micro_batch)
            )
        case Op.SEND_F:
            return Action(stage, Op.FORWARD, micro_batch)
        case Op.SEND_B:
            return Action(stage, Op.BACKWARD, micro_batch)
        case Op.RECV_F:
            return Action(stage - 1, Op.SEND_F, micro_batch)
        case Op.RECV_B:
            return Action(stage + 1, Op.SEND_B, micro_batch)


def _deadlock(schedule: Schedule, heads: list[int], waiting: dict[Action, list[int]]) -> ScheduleError:
    stuck = sorted((rank, need) for need, ranks in waiting.items() for rank in ranks)
    places = [f"rank {rank} at {schedule.rows[rank][heads[rank]]} for {need}" for rank, need in stuck]
    more = f" and {len(places) - 8} more" if len(places) > 8 else ""
    return ScheduleError(
        f"schedule {schedule.name}",
        f"it deadlocks; waiting: {'; '.join(places[:8])}{more}",
        "reorder its rows, or use a builder of dsx.plan.builders",
    )
