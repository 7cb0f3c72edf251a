"""Connections among ranks, on real sockets: who is heard, what spreads, and what is no news."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from dsx.fault_tolerance.keepalive import Keepalive, Peer, neighbours
from dsx.fault_tolerance.waits import Notice

SOON = 20.0


@contextmanager
def met(world_size: int) -> Iterator[list[Keepalive]]:
    """So many ranks, connected; each listens in a thread of its own until it is closed."""
    ranks = [Keepalive(rank, 1) for rank in range(world_size)]
    peers = [one.peer for one in ranks]
    unmet: list[tuple[int, ...]] = [()] * world_size

    def meet(rank: int) -> None:
        unmet[rank] = ranks[rank].meet(peers)

    calls = [threading.Thread(target=meet, args=(rank,)) for rank in range(world_size)]
    for call in calls:
        call.start()
    for call in calls:
        call.join(SOON)
    assert unmet == [()] * world_size
    yield ranks
    for one in ranks:
        with suppress(KeyError, RuntimeError, ValueError):
            one.close()


def hear(ranks: list[Keepalive], enough: object) -> None:
    """Let all listen until ``enough()``."""
    deadline = time.monotonic() + SOON
    while not enough():  # type: ignore[operator]
        assert time.monotonic() < deadline
        for one in ranks:
            one.wait(0.0)


def crash(rank: Keepalive) -> None:
    """What the kernel does when a process ends."""
    for line in rank._lines:
        line.socket.close()


def test_every_rank_has_some_neighbours_and_reaches_all_in_few_steps() -> None:
    for world_size in (1, 2, 3, 7, 64, 1000):
        reached, steps = {0}, 0
        while len(reached) < world_size:
            reached |= {other for rank in reached for other in neighbours(rank, world_size)}
            steps += 1
        assert steps <= max(1, world_size.bit_length() - 1)
        assert all(
            rank in neighbours(other, world_size)
            for rank in range(world_size)
            for other in neighbours(rank, world_size)
        )
        assert len(neighbours(0, world_size)) <= 2 * world_size.bit_length()


@pytest.mark.parametrize("world_size", [2, 12])
def test_an_end_without_a_word_is_known_to_all(world_size: int) -> None:
    with met(world_size) as ranks:
        victim, others = ranks[1], [ranks[0], *ranks[2:]]
        crash(victim)
        hear(others, lambda: all(1 in one.lost() for one in others))
        assert all(set(one.lost()) == {1} for one in others)
        assert not any(one.lost()[1].silent for one in others)
        assert all(abs(one.lost()[1].since - time.time()) < SOON for one in others)


def test_who_says_that_it_ends_is_not_missed() -> None:
    with met(3) as ranks:
        ranks[2].close()
        crash(ranks[1])
        hear(ranks[:1], lambda: 1 in ranks[0].lost())
        hear(ranks[:1], lambda: len(ranks[0]._lines) == 0)
        assert set(ranks[0].lost()) == {1}


def test_what_a_rank_says_last_is_heard_before_its_end() -> None:
    with met(12) as ranks:
        ranks[5].tell(Notice(rank=5, by=5, since=time.time() - 3600, text="failed: ValueError", code=2))
        crash(ranks[5])
        others = [*ranks[:5], *ranks[6:]]
        hear(others, lambda: all(5 in one.lost() and one.lost()[5].text for one in others))
        assert {one.lost()[5].code for one in others} == {2}
        # How long ago it was travels, not what a clock of another machine shows.
        assert all(abs(time.time() - 3600 - one.lost()[5].since) < SOON for one in others)


def test_warnings_and_hangs_spread_once() -> None:
    with met(12) as ranks:
        for _ in range(2):
            ranks[3].warn("rank 3 on a is stopped")
        ranks[7].tell_hung()
        hear(ranks, lambda: all(one.hung and one.warnings for one in ranks))
        hear(ranks, lambda: True)
        assert all(one.warnings == ["rank 3 on a is stopped"] for one in ranks)
        assert not any(one.lost() for one in ranks)


def test_a_stranger_is_hung_up_on_and_harms_nobody() -> None:
    ranks = [Keepalive(rank, 1) for rank in range(2)]
    peers = [one.peer for one in ranks]
    callers = [socket.create_connection(("127.0.0.1", peers[0].port)) for _ in range(4)]
    for caller, greeting in zip(
        callers,
        (b"GET / HTTP/1.1\r\n\r\n", b"[]\n", b'{"rank": 1, "secret": "x"}\n', b"x" * 5000),
        strict=True,
    ):
        caller.sendall(greeting)
    other = threading.Thread(target=ranks[1].meet, args=(peers,))
    other.start()
    assert ranks[0].meet(peers) == ()
    other.join(SOON)
    for one in ranks:
        one.close()
    for caller in callers:
        caller.close()


def test_who_cannot_be_reached_is_told() -> None:
    alone = Keepalive(0, 1)
    nobody = Peer(1, "another machine", 1, "node2", (), 0, "")
    assert alone.meet([alone.peer, nobody]) == (1,)
    alone.close()


def test_a_child_of_a_rank_does_not_keep_its_connections() -> None:
    """Else a rank that is killed would live on in its data loader's workers."""
    with met(2) as ranks:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(read, 1)
            os._exit(0)
        crash(ranks[1])
        hear(ranks[:1], lambda: 1 in ranks[0].lost())
        os.write(write, b"x")
        os.waitpid(child, 0)
