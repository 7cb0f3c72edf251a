"""Two launches with one number: the later one is refused, and one that has gone may be started again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from dsx.islands.links import Connection, Header, LinkError
from dsx.islands.station import Delegate, RefusedError, Station
from dsx.parallel.islands import Islands
from islands.archipelago import reserved_port


@contextmanager
def launched(index: int, meet: Sequence[str]) -> Iterator[tuple[Delegate, Header]]:
    """The first rank of an island, and what it says of itself."""
    station = Station(Islands(count=len(meet), index=index, ranks=1, meet=(*meet,), patience_seconds=8.0), 0)
    station.start(lambda *_: None)
    about: dict[str, Any] = {
        "layout": "same",
        "name": "",
        "version": 0,
        "progress": 0,
        "samples": 0,
        "seen": {},
    }
    assert station.delegate is not None
    try:
        yield station.delegate, {**about, "island": index, "addresses": [station.address]}
    finally:
        station.close(0.0)


@pytest.fixture
def meet() -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [f"127.0.0.1:{reserved_port(stack)}" for _ in range(3)]


def test_a_second_launch_with_a_number_is_refused_where_the_first_is_known(meet: list[str]) -> None:
    elsewhere = [meet[0], meet[2]]
    with launched(0, meet[:2]) as (leader, its), launched(1, meet[:2]) as (first, about):
        leader.newest(its)
        assert first.newest(about) is not None
        with launched(1, elsewhere) as (second, same), pytest.raises(RefusedError) as refused:
            second.newest(same)
        assert refused.value.args[0]["twin"] == meet[1]
        assert first.ask({**about, "kind": "done", "attempt": "x"}, about) == {"kind": "again"}


def test_who_calls_itself_the_first_island_elsewhere_is_refused_by_it(meet: list[str]) -> None:
    with launched(0, meet[:2]) as (leader, its):
        leader.newest(its)
        # At the other site, where the second island is to listen, somebody has said island = 0.
        wrong = Delegate(Islands(count=2, index=0, ranks=1, meet=(*meet[:2],)), (*meet[:2],), meet[1])
        with launched(1, meet[:2]) as (_, about), pytest.raises(RefusedError):
            wrong.newest({**about, "island": 0})


def test_one_that_has_gone_may_be_started_elsewhere(meet: list[str]) -> None:
    with launched(0, meet[:2]) as (leader, its):
        leader.newest(its)
        with launched(1, meet[:2]) as (first, about):
            first.newest(about)
        with launched(1, [meet[0], meet[2]]) as (second, same):
            assert second.newest(same) is not None


def test_a_stranger_that_says_no_address_loses_its_connection(meet: list[str]) -> None:
    with launched(0, meet[:2]) as (leader, its):
        link = Connection.to(meet[0], patience_seconds=8.0, connect_seconds=8.0)
        link.send({**its, "kind": "hello", "island": 1, "addresses": []})
        with pytest.raises(LinkError, match="closed"):
            link.receive(within_seconds=8.0)
        leader.newest(its)
