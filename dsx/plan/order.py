"""What an action must wait for, and an order in which all ranks together can run a schedule."""

from __future__ import annotations

from collections.abc import Iterator

from dsx.errors import ScheduleError
from dsx.plan.transfers import crosses, has_transfers
from dsx.spec.schedule import Action, Op, Schedule


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action, Action | None]]:
    """Every action as ``(rank, action, what it waited for)``, each after what it needs.

    Ranks run their rows in order; receives block, sends never do. The schedule may be lowered or not: without
    transfers an action waits for its producer on the other rank directly.

    Raises:
        ScheduleError: A deadlock: after the last action that can run, with every waiting rank's place.
    """
    depends = Dependencies(schedule)
    heads = [0] * schedule.num_ranks
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = list(range(schedule.num_ranks - 1, -1, -1))
    while ready:
        rank = ready.pop()
        row = schedule.rows[rank]
        while heads[rank] < len(row):
            action = row[heads[rank]]
            need = depends.on(action)
            if need is not None and need not in done:
                waiting.setdefault(need, []).append(rank)
                break
            yield rank, action, need
            heads[rank] += 1
            done.add(action)
            ready += waiting.pop(action, ())
    if waiting:
        raise _deadlock(schedule, heads, waiting)


class Dependencies:
    """What each action of one schedule, lowered or not, waits for."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._lowered = has_transfers(schedule)
        self._last = schedule.num_stages - 1
        self._divided = {
            (a.stage, a.micro_batch) for row in schedule.rows for a in row if a.op is Op.BACKWARD_INPUT
        }

    def on(self, action: Action) -> Action | None:
        """The one action that must have ended before ``action``, besides those before it in its row."""
        stage, micro_batch = action.stage, action.micro_batch
        match action.op:
            case Op.FORWARD:
                return self._input(stage, micro_batch)
            case Op.BACKWARD | Op.BACKWARD_INPUT:
                return self._output_gradient(stage, micro_batch)
            case Op.BACKWARD_WEIGHT:
                return Action(stage, Op.BACKWARD_INPUT, micro_batch)
            case Op.SEND_F:
                return Action(stage, Op.FORWARD, micro_batch)
            case Op.SEND_B:
                return self._backward(stage, micro_batch)
            case Op.RECV_F:
                return Action(stage - 1, Op.SEND_F, micro_batch)
            case Op.RECV_B:
                return Action(stage + 1, Op.SEND_B, micro_batch)

    def _input(self, stage: int, micro_batch: int) -> Action | None:
        if stage == 0:
            return None
        if self._lowered and crosses(self._schedule, stage - 1):
            return Action(stage, Op.RECV_F, micro_batch)
        return Action(stage - 1, Op.FORWARD, micro_batch)

    def _output_gradient(self, stage: int, micro_batch: int) -> Action:
        if stage == self._last:
            return Action(stage, Op.FORWARD, micro_batch)
        if self._lowered and crosses(self._schedule, stage):
            return Action(stage, Op.RECV_B, micro_batch)
        return self._backward(stage + 1, micro_batch)

    def _backward(self, stage: int, micro_batch: int) -> Action:
        """What yields the gradient of the stage's input."""
        divided = (stage, micro_batch) in self._divided
        return Action(stage, Op.BACKWARD_INPUT if divided else Op.BACKWARD, micro_batch)


def _deadlock(schedule: Schedule, heads: list[int], waiting: dict[Action, list[int]]) -> ScheduleError:
    stuck = sorted((rank, need) for need, ranks in waiting.items() for rank in ranks)
    places = []
    for rank, need in stuck:
        row = schedule.rows[rank]
        where = ", misordered: that comes later in this row" if need in row[heads[rank] :] else ""
        places.append(f"rank {rank} at {row[heads[rank]]} for {need}{where}")
    more = f" and {len(places) - 8} more" if len(places) > 8 else ""
    return ScheduleError(
        f"schedule {schedule.name}",
        f"it deadlocks; waiting: {'; '.join(places[:8])}{more}",
        "reorder its rows, or use a builder of dsx.plan.builders",
    )
