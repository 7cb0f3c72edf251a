"""When what stages keep on the host comes back: the part of a schedule that ``dsx.recompute: offload`` adds.

Inside of a stage the blocks' inputs come back one after the other, each beside the backward of the block
behind it. What the last block kept has nothing like it. It begins to come before the computation that the
rank does ahead of that backward, and has that to hide behind. If there is none, because a backward follows
its own forward, it had better not leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dsx.schedules.schedule import TRANSFERS, Message, Op, Schedule


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What one rank's copies to and from the host follow.

    Attributes:
        stays: Virtual stages whose last block's input stays on the device: each of their backwards follows
            the forward of the same micro-batch.
        returns: Position in the rank's row -> the (virtual stage, micro-batch) pairs whose last input begins
            to come back before the action there.
    """

    stays: frozenset[int]
    returns: Mapping[int, tuple[Message, ...]]

    def leave(self, stage: int, blocks: int) -> int:
        """How many of a stage's blocks send their inputs away, the first ones."""
        return blocks - (stage in self.stays) if blocks else 0


def host_plan(schedule: Schedule, rank: int) -> HostPlan:
    """The plan of a pipeline rank.

    >>> from dsx.schedules.builders import build
    >>> one, two = (host_plan(build("1f1b", 2, 1, 3), rank) for rank in (0, 1))
    >>> sorted(one.stays), dict(one.returns), sorted(two.stays), dict(two.returns)
    ([], {1: ((0, 0),), 3: ((0, 1),), 4: ((0, 2),)}, [1], {})
    """
    computed = [(place, each) for place, each in enumerate(schedule.rows[rank]) if each.op not in TRANSFERS]
    due: dict[int, list[Message]] = {}
    at_once: dict[int, list[bool]] = {}
    for number, (place, action) in enumerate(computed):
        if action.op not in (Op.BACKWARD, Op.BACKWARD_INPUT):
            continue
        key = action.stage, action.micro_batch
        ahead, before = computed[number - 1] if number else (place, action)
        follows = (before.op, before.stage, before.micro_batch) == (Op.FORWARD, *key)
        at_once.setdefault(action.stage, []).append(follows)
        due.setdefault(place if follows else ahead, []).append(key)
    stays = frozenset(stage for stage, follow in at_once.items() if all(follow))
    away = ((at, tuple(key for key in keys if key[0] not in stays)) for at, keys in due.items())
    return HostPlan(stays, {at: keys for at, keys in away if keys})
