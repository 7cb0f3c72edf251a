"""The one search, against trying everything."""

from __future__ import annotations

import random

import pytest

from dsx.planner.best_first import best_first


@pytest.mark.parametrize("seed", range(5))
def test_it_finds_all_in_order_and_the_first_with_little_work(seed):
    """Numbers are found digit by digit; a number with digits open is bounded by its smallest completion."""
    draw = random.Random(seed)
    wanted = sorted(draw.sample(range(10**6), 40))
    grown = []

    def bound(digits: str) -> int:
        return int(digits.ljust(6, "0"))

    def grow(digits: str) -> list[str] | None:
        if len(digits) == 6:
            return None
        grown.append(digits)
        return [digits + d for d in "9876543210" if any(f"{n:06}".startswith(digits + d) for n in wanted)]

    assert int(next(best_first([""], cost=bound, grow=grow))) == wanted[0]
    assert len(grown) <= 12  # six down to the first, and what is bounded below it
    assert [int(digits) for digits in best_first([""], cost=bound, grow=grow)] == wanted


def test_of_equals_the_first_comes_first_and_nothing_is_no_error():
    names = ["b", "a", "c"]
    assert list(best_first(names, cost=lambda _: 0, grow=lambda _: None)) == names
    assert list(best_first(names, cost=lambda _: 0, grow=lambda name: [] if name != "a" else None)) == ["a"]
    assert list(best_first([], cost=lambda _: 0, grow=lambda _: None)) == []
