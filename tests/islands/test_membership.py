"""The first island's rules, message by message, and islands that come and go at random."""

from __future__ import annotations

import random
from typing import Any

import pytest

from dsx.islands.standing import Membership, Ready, Standing, decided

PATIENCE = 8.0


def ready(name: str = "", progress: int = 0, *, moved: bool = True, step: int = 0, **more: Any) -> Ready:
    standing = Standing(name=name, progress=progress, version=progress, **more)
    return Ready(standing=standing, moved=moved, facts={"step": step, "lr_scheduler": None}, samples=7)


def met(count: int) -> Membership:
    """Islands that have had a round."""
    rules = Membership(count, PATIENCE)
    for island in range(count):
        if island:
            rules.comes(island)
        rules.ready(island, ready(), 0.0)
    found = rules.begun(0.0)
    assert found is not None
    assert found.members == [*range(count)]
    return rules


def test_a_round_begins_with_the_last_that_is_waited_for() -> None:
    rules = met(3)
    for island in (2, 0):
        rules.ready(island, ready(), 1.0)
        assert rules.begun(1.0) is None
    rules.ready(1, ready(), 2.0)
    found = rules.begun(2.0)
    assert found is not None
    assert (found.members, found.moved, found.behind, found.source) == ([0, 1, 2], [0, 1, 2], [], 0)
    assert rules.begun(2.0) is None  # the next one has nobody yet


def test_no_round_is_without_the_first_island_which_is_called() -> None:
    rules = met(3)
    for island in (1, 2):
        rules.ready(island, ready(), 10.0)
    assert rules.begun(30.0) is None
    assert not rules.called(0, 13.9)
    assert rules.called(0, 14.0)
    rules.ready(0, ready(), 15.0)
    assert not rules.called(0, 19.0)
    assert rules.begun(15.0) is not None


def test_late_ones_are_called_and_then_left_out_until_they_are_ready() -> None:
    rules = met(3)
    rules.ready(0, ready(), 10.0)
    rules.ready(1, ready(), 10.0)
    assert (rules.called(2, 13.9), rules.called(2, 14.0), rules.called(1, 14.0)) == (False, True, False)
    assert rules.begun(17.9) is None
    found = rules.begun(18.0)
    assert found is not None
    assert found.members == [0, 1]
    rules.ready(0, ready(), 20.0)
    assert not rules.called(2, 27.0)
    rules.ready(1, ready(), 20.0)
    assert rules.begun(20.0) is not None  # at once
    rules.ready(2, ready(), 21.0)
    rules.ready(1, ready(), 22.0)
    rules.ready(0, ready(), 22.0)
    found = rules.begun(22.0)
    assert found is not None
    assert found.members == [0, 1, 2]


def test_at_the_start_all_are_waited_for_then_those_that_are_there() -> None:
    rules = Membership(4, PATIENCE)
    rules.comes(1)
    rules.ready(1, ready(), 0.0)
    rules.ready(0, ready(), 0.0)
    assert rules.begun(7.9) is None
    assert rules.begun(8.0) is not None
    rules.ready(1, ready(), 9.0)
    rules.ready(0, ready(), 9.0)
    assert rules.begun(9.0) is not None


def test_who_has_gone_is_waited_for_no_more() -> None:
    rules = met(3)
    rules.ready(0, ready(), 1.0)
    rules.ready(1, ready(), 1.0)
    rules.goes(2)
    found = rules.begun(1.0)
    assert found is not None
    assert found.members == [0, 1]
    rules.ready(0, ready(), 2.0)
    rules.goes(0)  # it ends
    assert rules.begun(20.0) is None


def test_who_holds_other_weights_takes_the_first_islands_and_adds_nothing() -> None:
    said = {0: ready("b", 6), 1: ready("a", 4), 2: ready("b", 6, moved=False, step=9), 3: ready("z", 10**6)}
    found = decided(said, fresh=False)
    assert (found.source, found.behind, found.moved) == (0, [1, 3], [0])
    assert (found.standing.name, found.facts["step"]) == ("b", 9)
    after = found.after([0])
    assert (after.name, after.version, after.progress, after.seen) == (found.name, 7, 7, {"0": 7})


def test_a_first_island_that_has_begun_anew_takes_what_most_training_is_in() -> None:
    said = {
        0: ready("", 0),
        1: ready("a", 4, seen={"0": 9}),
        2: ready("b", 6, seen={"0": 5}),
        3: ready("b", 6),
    }
    found = decided(said, fresh=True)
    assert (found.source, found.behind, found.moved) == (2, [0, 1], [2, 3])
    assert found.after([3]).seen == {"0": 5, "3": 7}
    alike = decided({0: ready("x"), 1: ready("y")}, fresh=True)
    assert (alike.source, alike.behind) == (0, [1])  # of weights to begin with, the first one's


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_and_goes_rounds_go_on_and_all_come_together(seed: int) -> None:
    chance, now, count = random.Random(seed), 0.0, 4
    rules = Membership(count, PATIENCE)
    names, progress = dict.fromkeys(range(count), ""), dict.fromkeys(range(count), 0)
    here: set[int] = set()

    def round_of(islands: set[int]) -> list[int]:
        nonlocal now
        for island in {0, *islands}:
            rules.ready(island, ready(names[island], progress[island]), now)
        began = now
        while (found := rules.begun(now)) is None:
            now += 0.5
            assert now - began <= PATIENCE
        assert set(found.members) == {0, *islands}
        lost = {island for island in found.members[1:] if chance.random() < 0.2}
        moved = [island for island in found.moved if island not in lost]
        for island in set(found.members) - lost:
            after = found.after(moved)
            names[island], progress[island] = after.name, after.progress
        now += 1.0
        return found.members

    for _ in range(60):
        for island in range(1, count):
            if chance.random() < 0.3:
                if island in here:
                    here.discard(island)
                    rules.goes(island)
                else:
                    here.add(island)
                    rules.comes(island)
        round_of({island for island in here if chance.random() < 0.8})
    for island in range(1, count):
        rules.comes(island)
    chance.random = lambda: 1.0  # type: ignore[method-assign]
    assert round_of({1, 2, 3}) == [0, 1, 2, 3]
    assert len(set(names.values())) == 1
