"""Clock offsets from timed collectives: the truth lies within the bound."""

from __future__ import annotations

import random

import pytest

from dsx.schedules.trace import offsets


def test_by_hand():
    # Rank 1's clock: 100 s ahead. It entered the round at 2 (102) and left at 5 (105); rank 0 at 1 and 4.
    # So it is ahead by no less than 102 - 4 = 98 and no more than 105 - 1 = 104.
    (zero, one) = offsets([((1.0, 4.0),), ((102.0, 105.0),)], ["a", "b"])
    assert (zero.seconds, zero.error_seconds) == (0.0, 0.0)
    assert (one.seconds, one.error_seconds) == (101.0, 3.0)


def test_ranks_of_one_machine_read_one_clock():
    rounds = [((1.0, 4.0),), ((2.0, 5.0),), ((52.0, 55.0),), ((51.5, 54.0),)]
    found = offsets(rounds, ["a", "a", "b", "b"])
    assert found[0] == found[1]
    assert (found[1].seconds, found[1].error_seconds) == (0.0, 0.0)
    # b's two ranks against a's two: at least 52 - 4 = 48, at most 54 - 2 = 52.
    assert found[2] == found[3]
    assert (found[2].seconds, found[2].error_seconds) == (50.0, 2.0)
    apart = offsets(rounds[:2], ["", ""])  # not known to be one machine
    assert apart[1].error_seconds > 0


@pytest.mark.parametrize("seed", range(20))
def test_the_truth_lies_within_the_bound_whatever_the_network_does(seed):
    draw = random.Random(seed)
    ahead = [0.0, *(draw.uniform(-1e5, 1e5) for _ in range(5))]
    rounds = [[] for _ in ahead]
    now = 0.0
    for _ in range(8):
        entered = [now + draw.expovariate(1000) for _ in ahead]
        everybody_in = max(entered)
        left = [everybody_in + draw.expovariate(500) for _ in ahead]
        for rank, by in enumerate(ahead):
            rounds[rank].append((entered[rank] + by, left[rank] + by))
        now = max(left)
    found = offsets([tuple(r) for r in rounds], [""] * len(ahead))
    for by, offset in zip(ahead, found, strict=True):
        assert abs(offset.seconds - by) <= offset.error_seconds + 1e-9
        # A round takes a few ms here; the best one of eight bounds better than the longest.
        assert offset.error_seconds < max(b - a for a, b in rounds[0])
