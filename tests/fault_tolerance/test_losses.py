"""Which of several lost ranks a run ends for, and how that is said on each machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dsx.fault_tolerance.waits import Notice, better, first, sentence

HOSTS = ("node1", "node1", "node2", "node2", "node3", "node3")


def gone(*ranks: int, by: int = 0, at: float = 0.0) -> dict[int, Notice]:
    return {rank: Notice(rank=rank, by=by, since=at) for rank in ranks}


def silent(*ranks: int, by: int = 0, at: float = 0.0) -> dict[int, Notice]:
    return {rank: Notice(rank=rank, by=by, since=at, silent=True) for rank in ranks}


def said(notices: dict[int, Notice], here: str = "node1", hosts: tuple[str, ...] = HOSTS) -> str:
    return re.sub(r"\d\d:\d\d:\d\d", "TIME", sentence(notices, hosts, here))


def test_the_first_is_named_and_those_that_went_with_it() -> None:
    assert said(gone(3)) == (
        "rank 3 on node2 is gone since TIME: its process has ended without a word (killed?)"
    )
    both = gone(4, at=1.0) | gone(1, at=0.5)
    assert said(both).startswith("rank 1 on node1 is gone since")
    assert said(both).endswith("; with it rank 4 on node3")
    later = gone(1) | gone(4, at=60.0)  # by then launchers end what is left
    assert "rank 4" not in said(later)


def test_a_machine_is_named_as_a_whole_when_all_of_it_is_lost() -> None:
    assert said(gone(2, 3)) == (
        "node2 (ranks 2, 3) is lost since TIME: all processes there have ended without a word"
    )
    assert said(gone(2, 3, 5)).endswith("; with it rank 5 on node3")
    assert said(gone(1), hosts=("node1", "node2")).startswith("rank 1 on node2 is gone")


def test_a_machine_that_does_not_answer_is_named_with_all_its_ranks() -> None:
    """Though the connection of one of them alone may have been noticed so far."""
    assert said(silent(4)) == "node3 (ranks 4, 5) has not answered since TIME: it is down, or its network is"
    two = ("node1", "node1", "node2", "node2")
    assert said(silent(2), hosts=two) == (
        "node2 (ranks 2, 3) has not answered since TIME: it is down, or the network between it and this "
        "machine, node1"
    )
    assert said(silent(2, 6), hosts=(*HOSTS, "node4")).startswith(
        "node2 (ranks 2, 3), node4 (rank 6) have not"
    )


def test_a_machine_that_is_cut_off_says_so_itself() -> None:
    """It hears nobody any more; all the others hear each other, and not it."""
    assert said(silent(0, 2, by=4), here="node3") == (
        "this machine, node3 (ranks 4, 5), has heard nothing from any other since TIME (node1 (ranks 0, 1), "
        "node2 (ranks 2, 3)): its own network is cut"
    )
    # One way between two machines is broken, and the news comes by the third.
    assert said(silent(4, by=0), here="node3") == (
        "node1 has heard nothing from this machine, node3, since TIME: see its network"
    )


def test_what_a_rank_says_of_itself_counts_most() -> None:
    own = Notice(rank=3, by=3, since=2.0, text="failed: ValueError: on fire\nTraceback")
    neighbour, stranger = Notice(rank=3, by=2, since=1.0), Notice(rank=3, by=0, since=0.5)
    assert better(own, neighbour, HOSTS)
    assert better(neighbour, stranger, HOSTS)
    assert not better(stranger, neighbour, HOSTS)
    assert not better(own, own, HOSTS)
    assert said({3: own}) == "rank 3 on node2 failed: ValueError: on fire (at TIME)"


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_the_run_ends_for_the_first_whatever_is_heard_first(order: tuple[int, int]) -> None:
    found = {
        1: Notice(rank=1, by=0, since=7.0),
        2: Notice(rank=2, by=2, since=7.2, text="failed: RuntimeError"),
    }
    assert first([found[rank] for rank in order]).rank == 1


def test_the_lines_of_the_guide_are_these() -> None:
    """Three machines of four ranks each, in the order of the guide."""
    guide = (Path(__file__).parents[2] / "docs/guides/faults.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\[rank \d on (\w+)\] ended because (.*)$", guide, flags=re.MULTILINE)
    fire = Notice(rank=5, by=5, since=0.0, text="failed: ValueError: the disk is on fire")
    lost = [gone(5), gone(4, 5, 6, 7), silent(4), silent(0, 8, by=4), {5: fire}]
    assert len(shown) == len(lost)
    hosts = tuple(f"node{1 + rank // 4}" for rank in range(12))
    for (here, line), notices in zip(shown, lost, strict=True):
        assert said(notices, here=here, hosts=hosts) == re.sub(r"\d\d:\d\d:\d\d", "TIME", line)
