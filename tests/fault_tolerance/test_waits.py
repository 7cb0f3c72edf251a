"""Diagnoses from what ranks say, for faults put into schedules that run by torch's own rules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise

import pytest

from dsx.fault_tolerance.waits import RankState, chain, diagnose, listed, located, messages, waits
from dsx.schedules.builders import build
from dsx.schedules.schedule import Op, Schedule, lower

HOSTS = tuple(f"node{rank}" for rank in range(8))
FIVE = ("a", "a", "b", "b", "c")
"""Machines of five ranks."""

SCHEDULES = [("1f1b", 4, 1, 6), ("interleaved", 4, 2, 8), ("gpipe", 3, 1, 4), ("zbv", 4, 2, 8)]


def state(rank: int, **more: object) -> RankState:
    return RankState(**{"rank": rank, "step": 3, "phase": "training step", "saw": {}, **more})  # type: ignore[arg-type]


def stuck_at(schedule: Schedule, frozen: int, position: int, cut: tuple[int, int] | None = None) -> list[int]:
    """Where every rank ends up when one of them stops before an action: sends do not block, receives do.

    ``cut`` instead loses all that its first rank sends to its second from there on, and perhaps the way back.
    """
    at, sent = [0] * schedule.num_ranks, set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while at[rank] < len(row) and (cut or not (rank == frozen and at[rank] == position)):
                action = row[at[rank]]
                step = {Op.RECV_F: -1, Op.RECV_B: 1}.get(action.op)
                wanted = None if step is None else (action.op, action.stage + step, action.micro_batch)
                if wanted is not None and wanted not in sent:
                    break
                receive = {Op.SEND_F: Op.RECV_F, Op.SEND_B: Op.RECV_B}.get(action.op)
                taker = (
                    schedule.rank_of(action.stage + (1 if action.op is Op.SEND_F else -1)) if receive else 0
                )
                lost = cut is not None and (rank, taker) == cut and at[rank] >= position
                if receive is not None and not lost:
                    sent.add((receive, action.stage, action.micro_batch))
                at[rank] += 1
                moved = True
    return at


def told(schedule: Schedule, at: list[int]) -> Iterator[RankState]:
    for rank, position in enumerate(at):
        says, ranks = waits(schedule, rank, position)
        awaits, sent, sending = messages(schedule, rank, position)
        done = position >= len(schedule.rows[rank])
        yield state(
            rank,
            host=f"node{rank}",
            says="" if done else says.format(located(ranks, HOSTS)),
            waits_for=() if done else ranks,
            awaits=awaits,
            sent=sent,
            sending=sending,
            runs=7,
            idle_seconds=30.0,
        )


@pytest.mark.parametrize(("name", "num_ranks", "chunks", "micro_batches"), SCHEDULES)
def test_a_rank_that_computes_for_ever_is_found(
    name: str, num_ranks: int, chunks: int, micro_batches: int
) -> None:
    """Wherever it stops: whoever waits, waits for it in the end."""
    schedule = lower(build(name, num_ranks, chunks, micro_batches))
    chance, found = random.Random(0), 0
    for _ in range(30):
        frozen = chance.randrange(num_ranks)
        row = schedule.rows[frozen]
        position = chance.choice([i for i, a in enumerate(row) if a.op in (Op.FORWARD, Op.BACKWARD)])
        states = {s.rank: s for s in told(schedule, stuck_at(schedule, frozen, position))}
        waiting = [s for s in states.values() if s.waits_for]
        if waiting:
            found += 1
            diagnosis = diagnose(states, [""] * num_ranks)
            assert diagnosis.culprits == (frozen,)
            line = chain(states, frozen)
            assert line[-1] == frozen
            assert all(b in states[a].waits_for for a, b in pairwise(line))
    assert found > 20


@pytest.mark.parametrize(("name", "num_ranks", "chunks", "micro_batches"), SCHEDULES)
def test_a_message_that_does_not_arrive_is_no_circle(
    name: str, num_ranks: int, chunks: int, micro_batches: int
) -> None:
    """One way between two ranks loses what is sent, from any action on: the first lost message is named."""
    schedule = lower(build(name, num_ranks, chunks, micro_batches))
    chance, found = random.Random(1), 0
    for _ in range(30):
        source = chance.randrange(num_ranks)
        takers = {
            schedule.rank_of(a.stage + (1 if a.op is Op.SEND_F else -1))
            for a in schedule.rows[source]
            if a.op in (Op.SEND_F, Op.SEND_B)
        }
        taker = chance.choice(sorted(takers))
        position = chance.randrange(len(schedule.rows[source]))
        states = {s.rank: s for s in told(schedule, stuck_at(schedule, source, position, (source, taker)))}
        if not states[taker].waits_for:
            continue  # all that it waits for had come before
        found += 1
        diagnosis = diagnose(states, HOSTS[:num_ranks])
        assert "circle" not in diagnosis.text
        assert taker in diagnosis.culprits
        way = f"was sent by rank {source} on node{source} and has not arrived at rank {taker} on node{taker}"
        assert f"{states[taker].awaits} {way} for 30 s: look at the network between them" in diagnosis.text
    assert found > 10


def test_a_message_may_be_of_an_earlier_or_later_run_of_the_schedule() -> None:
    waiting = state(1, waits_for=(0,), awaits="0F5", runs=2, idle_seconds=9.0)
    later = state(0, runs=3, idle_seconds=9.0)  # its sender has gone on to the next step
    assert diagnose({0: later, 1: waiting}, FIVE[:2]).text.startswith(
        "0F5 was sent by rank 0 and has not arr"
    )
    earlier = state(0, runs=1, sent=("0F5",), idle_seconds=9.0, where="x.py:1 f")
    assert diagnose({0: earlier, 1: waiting}, FIVE[:2]).culprits == (0,)
    within = state(0, runs=2, sending="0F5", waits_for=(1,), idle_seconds=9.0)
    assert diagnose({0: within, 1: waiting}, FIVE[:2]).text.startswith("0F5 is on its way from rank 0 and")


def test_a_message_that_is_only_just_awaited_is_not_lost() -> None:
    """Where a data loader hangs, the last messages of others may still be on their way."""
    states = {
        0: state(0, runs=1, where="x.py:1 f", idle_seconds=60.0, sent=("0F0",)),
        1: state(1, runs=1, waits_for=(0,), awaits="0F1", idle_seconds=59.0, sent=("1F0",)),
        2: state(2, runs=1, waits_for=(1,), awaits="1F0", idle_seconds=0.5),
    }
    assert diagnose(states, FIVE[:3]).culprits == (0,)


def test_the_sentence_names_both_actions() -> None:
    schedule = lower(build("1f1b", 4, 1, 8))
    at = next(i for i, a in enumerate(schedule.rows[3]) if str(a) == "3RECV_F7")
    assert waits(schedule, 3, at) == ("3F7 waits for 2F7 from {}", (2,))
    at = next(i for i, a in enumerate(schedule.rows[1]) if str(a) == "1RECV_B0")
    assert waits(schedule, 1, at) == ("1B0 waits for 2B0 from {}", (2,))
    divided = lower(build("zbv", 2, 2, 4))
    at = next(i for i, a in enumerate(divided.rows[0]) if a.op is Op.RECV_B)
    assert "I" in waits(divided, 0, at)[0].split()[0]


def test_missing_ranks_come_first_and_by_what_was_seen() -> None:
    states = {0: state(0, waits_for=(1,), saw={2: "is stopped"}), 1: state(1, waits_for=(2,))}
    assert diagnose(states, FIVE).culprits == (2,)
    assert diagnose(states, FIVE).text == "rank 2 on b is stopped"
    nobody_saw = {0: state(0), 4: state(4)}
    assert diagnose(nobody_saw, FIVE).text == "rank 1 on a, ranks 2, 3 on b gave no sign of life"
    two_stopped = {0: state(0, saw={1: "is stopped", 2: "is stopped"})}
    assert diagnose(two_stopped, FIVE[:3]).text == "rank 1 on a, rank 2 on b are stopped"


def test_a_collective_waits_for_those_who_are_not_in_it() -> None:
    group = {"collective": "all_reduce", "members": (0, 2, 4)}
    states = {0: state(0, **group), 2: state(2, where="x.py:1 f"), 4: state(4, **group)}
    states |= {1: state(1, waits_for=(0,)), 3: state(3, waits_for=(2,))}
    diagnosis = diagnose(states, FIVE)
    assert diagnosis.culprits == (2,)
    assert diagnosis.text.startswith(
        "all others wait for rank 2 on b. rank 2: step 3, training step (x.py:1 f)"
    )


def test_circles_and_stuck_networks() -> None:
    circle = {0: state(0, waits_for=(1,)), 1: state(1, waits_for=(2,)), 2: state(2, waits_for=(1,))}
    assert diagnose(circle, FIVE[:3]).culprits == (1, 2)
    group = {"collective": "broadcast", "members": (0, 1)}
    diagnosis = diagnose({0: state(0, **group), 1: state(1, **group)}, FIVE[:2])
    assert diagnosis.text == (
        "all of ranks 0, 1 on a are in broadcast, which does not end: look at their network"
    )
    alone = {0: state(0, idle_seconds=1.0), 1: state(1, idle_seconds=9.0)}
    assert diagnose(alone, FIVE[:2]).culprits == (1,)


def test_lists_are_short() -> None:
    assert listed([5, 1, 2, 3, 9, 8]) == "1-3, 5, 8, 9"
