"""The council's words on real connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from dsx.islands.links import Connection, Header
from dsx.islands.station import Chair
from dsx.parallel.islands import Islands
from islands.test_council import hello, ready

PATIENCE = 60.0


@pytest.fixture
def chair() -> Iterator[Chair]:
    seat = Chair(Islands(count=2, index=0, ranks=1, meet=("a:1", "b:1"), patience_seconds=PATIENCE))
    yield seat
    seat.close()


def ends() -> tuple[Connection, Connection]:
    """A connection as the council's side has it, and as the island's has it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return Connection(far, PATIENCE), Connection(near, PATIENCE)


def next_word(link: Connection) -> Header:
    """What the council says next, that it is alive aside."""
    header, _ = link.receive(within_seconds=PATIENCE / 2)
    while header["kind"] == "alive":
        header, _ = link.receive(within_seconds=PATIENCE / 2)
    return header


def test_what_was_said_on_a_connection_that_was_given_up_does_not_count(chair: Chair) -> None:
    """As when a council thaws: it finds what islands have said meanwhile, in any order."""
    (given_up, _), (held, island), (other_held, other) = ends(), ends(), ends()
    for message in (hello(1), ready(1)):
        chair.hear(held, message, bytearray())
    assert next_word(island)["kind"] == "welcome"
    chair.hear(given_up, hello(1), bytearray())
    chair.lost(given_up)
    chair.hear(other_held, ready(0), bytearray())
    assert [next_word(link)["members"] for link in (island, other)] == [[0, 1], [0, 1]]


def test_an_island_that_connects_anew_is_heard_on_its_new_connection(chair: Chair) -> None:
    (first_held, first), (held, island), (other_held, _) = ends(), ends(), ends()
    chair.hear(first_held, hello(1), bytearray())
    assert next_word(first)["kind"] == "welcome"
    chair.hear(held, hello(1), bytearray())
    chair.lost(first_held)
    chair.hear(held, ready(1), bytearray())
    chair.hear(other_held, ready(0), bytearray())
    assert [next_word(island)["kind"] for _ in range(2)] == ["welcome", "round"]
