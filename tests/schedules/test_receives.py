"""Receives are posted in time, in order, and so that not even device-wide waits can close a circle."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from dsx.schedules.builders import build, forward_only
from dsx.schedules.receives import receive_plan
from dsx.schedules.schedule import Action, Op, Schedule, lower, receive_order

LAYOUTS = [
    *(("gpipe", p, 1, m) for p in (2, 4) for m in (1, 5)),
    *(("1f1b", p, 1, m) for p in (2, 3, 4, 8) for m in (1, p, 2 * p + 1)),
    *(("interleaved", p, v, m) for p in (2, 3, 4) for v in (2, 3) for m in (1, p + 1, 3 * p)),
    ("interleaved", 8, 2, 17),
    *(("zb_h1", p, 1, m) for p in (2, 4) for m in (1, 2 * p + 1)),
    *(
        (name, p, 2, m)
        for name in ("interleaved_zb", "zbv", "v_min", "looped_bfs")
        for p in (2, 4)
        for m in (2, 9)
    ),
    ("dualpipev", 2, 2, 4),
    ("dualpipev", 4, 2, 9),
    *(("forward", p, v, m) for p in (2, 4) for v in (1, 3) for m in (1, 5)),
    ("forward in a V", 3, 2, 5),
]


def schedule_of(name: str, p: int, v: int, m: int) -> Schedule:
    if name.startswith("forward"):
        return lower(forward_only(p, v, m, "v" if name.endswith("V") else "loop"))
    return lower(build(name, p, v, m))


@dataclass
class Machine:
    """All ranks with the strictest waits that a GPU can add.

    A computation waits until every receive posted on its rank has arrived and every send started there has
    been received; posting waits for the message's header, i.e. for its send to start; a send waits while two
    of its channel are under way. Whether time passes is left out: only who waits for whom.
    """

    schedule: Schedule
    posts: list[tuple[tuple[tuple[str, int], ...], ...]]
    started: set[tuple[str, tuple[int, int]]] = field(default_factory=set)
    posted: set[tuple[str, tuple[int, int]]] = field(default_factory=set)

    def run(self) -> list[Action]:
        """Actions that could not run."""
        programs = [self.program(rank) for rank in range(self.schedule.num_ranks)]
        heads = [0] * len(programs)
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(programs):
                while heads[rank] < len(program) and self.step(rank, program[: heads[rank] + 1]):
                    heads[rank] += 1
                    moved = True
        return [
            program[head][1] for program, head in zip(programs, heads, strict=True) if head < len(program)
        ]

    def program(self, rank: int) -> list[tuple[str, Action]]:
        """The row with its posts as steps of their own."""
        counts: dict[tuple[str, int], int] = {}
        steps = []
        for position, action in enumerate(self.schedule.rows[rank]):
            for kind, source in self.posts[rank][position]:
                index = counts.get((kind, source), 0)
                counts[kind, source] = index + 1
                stage, micro_batch = receive_order(self.schedule, rank, kind, source)[index]
                op = Op.RECV_F if kind == "F" else Op.RECV_B
                steps.append(("post", Action(stage, op, micro_batch)))
            steps.append(("act", action))
        return steps

    def step(self, rank: int, past: list[tuple[str, Action]]) -> bool:
        what, action = past[-1]
        kind = "F" if action.op in (Op.RECV_F, Op.SEND_F) else "B"
        if action.op in (Op.RECV_F, Op.RECV_B):
            message = (kind, (action.stage, action.micro_batch))
            if message not in self.started:
                return False
            if what == "post":
                self.posted.add(message)
            return message in self.posted
        sends = [sent(a) for w, a in past[:-1] if w == "act" and a.op in (Op.SEND_F, Op.SEND_B)]
        if action.op in (Op.SEND_F, Op.SEND_B):
            mine = [m for m in sends if m[0] == kind]
            if len(mine) >= 2 and mine[-2] not in self.posted:
                return False
            self.started.add(sent(action))
            return True
        posts = [
            ("F" if a.op is Op.RECV_F else "B", (a.stage, a.micro_batch)) for w, a in past if w == "post"
        ]
        return all(m in self.started for m in posts) and all(m in self.posted for m in sends)


def sent(action: Action) -> tuple[str, tuple[int, int]]:
    step = 1 if action.op is Op.SEND_F else -1
    return ("F" if step == 1 else "B", (action.stage + step, action.micro_batch))


@pytest.mark.parametrize(("name", "p", "v", "m"), LAYOUTS)
def test_no_circle_even_if_every_computation_waits_for_its_device(name: str, p: int, v: int, m: int) -> None:
    schedule = schedule_of(name, p, v, m)
    plans = [receive_plan(schedule, rank) for rank in range(p)]
    assert Machine(schedule, [plan.posts for plan in plans]).run() == []


@pytest.mark.parametrize(("name", "p", "v", "m"), LAYOUTS)
def test_each_receive_is_posted_once_in_order_before_its_use(name: str, p: int, v: int, m: int) -> None:
    schedule = schedule_of(name, p, v, m)
    for rank in range(p):
        plan = receive_plan(schedule, rank)
        due = {channel: list(messages) for channel, messages in plan.messages.items()}
        for action, channels in zip(schedule.rows[rank], plan.posts, strict=True):
            posted = [due[channel].pop(0) for channel in channels]
            assert len(posted) == len(channels)
            if action.op in (Op.RECV_F, Op.RECV_B):
                kind = "F" if action.op is Op.RECV_F else "B"
                assert all(
                    (action.stage, action.micro_batch) not in rest
                    for channel, rest in due.items()
                    if channel[0] == kind
                )
        assert not any(due.values())
        receives = sum(a.op in (Op.RECV_F, Op.RECV_B) for a in schedule.rows[rank])
        assert sum(map(len, plan.posts)) == receives


def test_one_ahead_of_need_would_hang_on_a_device_wide_wait() -> None:
    """Why there is a rule at all: the usual "post the next one at each receive" closes a circle in 1F1B."""
    schedule = schedule_of("1f1b", 2, 1, 4)
    posts = []
    for row in schedule.rows:
        receives = [i for i, a in enumerate(row) if a.op in (Op.RECV_F, Op.RECV_B)]
        kind = "F" if row[receives[0]].op is Op.RECV_F else "B"
        source = 0 if kind == "F" else 1
        # At each receive one post; at the first also the one after it, which stays one ahead.
        at = {receives[0]: 2} | dict.fromkeys(receives[1:-1], 1)
        posts.append(tuple(((kind, source),) * at.get(i, 0) for i in range(len(row))))
    assert Machine(schedule, posts).run() != []


def test_interleaving_hides_transfers_behind_computation() -> None:
    """Many receives of an interleaved schedule are posted a whole computation before their use."""
    schedule = schedule_of("interleaved", 4, 2, 16)
    plan = receive_plan(schedule, 1)
    row = schedule.rows[1]
    ahead = 0
    counts: dict[tuple[str, int], int] = {}
    for position, channels in enumerate(plan.posts):
        for channel in channels:
            message = plan.messages[channel][counts.get(channel, 0)]
            counts[channel] = counts.get(channel, 0) + 1
            op = Op.RECV_F if channel[0] == "F" else Op.RECV_B
            use = row.index(Action(message[0], op, message[1]))
            between = sum(a.op in (Op.FORWARD, Op.BACKWARD) for a in row[position:use])
            ahead += between > 0
    assert ahead > sum(counts.values()) / 3
