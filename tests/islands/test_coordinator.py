"""Islands that look for the first one: it is late, it goes, and a number is somebody else's already."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from dsx.errors import RunError
from dsx.islands.standing import Ready
from islands.archipelago import reserved_port
from islands.test_strangers import STANDING, site


@pytest.fixture
def meet() -> Iterator[str]:
    with ExitStack() as stack:
        yield f"127.0.0.1:{reserved_port(stack)}"


def test_a_second_launch_with_a_number_is_refused_while_the_first_is_there(meet: str) -> None:
    with site(0, meet, None), site(1, meet, None) as one:
        assert one.protocol.newest() is not None
        refused = pytest.raises(RunError, match="another launch is this island and is there")
        with site(1, meet, None, patience=0.5) as twin, refused:
            twin.protocol.newest()
        assert one.node.client._there.is_set()  # type: ignore[union-attr]


def test_one_that_has_gone_may_be_started_again(meet: str) -> None:
    with site(0, meet, None):
        for _ in range(2):
            with site(1, meet, None) as one:
                assert one.protocol.newest() is not None


def test_an_island_with_another_layout_is_refused(meet: str) -> None:
    with site(0, meet, None):
        refused = pytest.raises(RunError, match="frozen weights, layout, batch")
        with site(1, meet, None, layout="another") as other, refused:
            other.protocol.newest()


def test_a_first_island_that_comes_late_is_found_and_one_that_goes_is_not_waited_for(meet: str) -> None:
    with site(1, meet, None) as early:
        assert early.protocol.newest() is None
        found = []
        waiting = threading.Thread(target=lambda: found.append(early.round(torch.ones(200))))
        waiting.start()
        with site(0, meet, None) as first:
            first.node.server._membership._count = 2  # type: ignore[union-attr] - island 2 is not awaited
            led = first.round(torch.zeros(200))
            waiting.join()
        assert [its.members for its in (led, *found)] == [[0, 1], [0, 1]]
        assert torch.equal(found[0].means[0], torch.full((200,), 0.5))
        while early.node.client._there.wait(0.01):  # type: ignore[union-attr] - until it has heard of that
            early.node.client._wake.set()  # type: ignore[union-attr]
        assert early.round(torch.ones(200)) is None
        assert early.protocol.news[0].startswith("the first island is not there: ")


def test_a_first_island_without_a_state_that_is_ahead_elsewhere_takes_it(meet: str) -> None:
    with site(0, meet, None) as first, site(1, meet, None) as ahead:
        first.node.server._membership._count = 2  # type: ignore[union-attr]
        old = Ready(standing=type(STANDING)(name="old"), moved=True, facts=STANDING.facts, samples=0)
        first.ready = lambda standing=None: old  # type: ignore[method-assign]
        found = []
        thread = threading.Thread(target=lambda: found.append(ahead.round(torch.ones(200))))
        thread.start()
        led = first.round(torch.ones(200))
        thread.join()
    standing, flat = led.adopted
    assert (standing, led.moved, led.standing.version) == (STANDING, [1], STANDING.version + 1)
    assert torch.equal(flat, ahead.protocol.state()[1])  # type: ignore[index]
    assert found[0].standing == led.standing
    assert found[0].adopted is None
