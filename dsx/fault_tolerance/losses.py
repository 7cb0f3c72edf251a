"""Ranks that were lost: which was the first, and a sentence about it with ranks, machines and time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dsx.fault_tolerance.waits import listed, located

ENDED = "its process has ended without a word (killed?)"
_TOGETHER_SECONDS = 1.5
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """That a rank is lost to the run.

    Attributes:
        rank: Which.
        by: The rank that says so; ``rank`` itself if it could still speak.
        since: When it was noticed, by this machine's clock, in seconds since the epoch.
        text: What the rank says of itself, or what was seen of it; empty if its process ended without a word.
        silent: Whether its machine no longer answers, rather than that its process has ended.
        code: What the ranks that end because of it exit with.
        shared: Whether every rank fails of this by itself, so that one report is enough.
    """

    rank: int
    by: int
    since: float
    text: str = ""
    silent: bool = False
    code: int = 1
    shared: bool = False

    def __str__(self) -> str:
        return self.text or f"is gone: {ENDED}"


def better(new: Notice, old: Notice | None, hosts: Sequence[str]) -> bool:
    """Whether ``new`` says more of a rank than ``old``: its own word most, then that of its own machine."""

    def weight(notice: Notice) -> tuple[bool, bool]:
        return notice.by == notice.rank, hosts[notice.by] == hosts[notice.rank]

    return old is None or weight(new) > weight(old)


def first(notices: Iterable[Notice]) -> Notice:
    """The one that the run ends for: what a later one says may only have followed from it."""
    return min(notices, key=lambda notice: (notice.since, notice.rank))


def sentence(notices: Mapping[int, Notice], hosts: Sequence[str], here: str) -> str:
    """What the run ends for, with machines and since when, as told on the machine ``here``.

    A machine is named as a whole when all that ran on it is lost, and the others when it is this machine that
    no longer hears any of them.

    >>> gone = Notice(rank=1, by=0, since=0.0)
    >>> sentence({1: gone}, ("node1", "node2"), "node1").split(" since ")[0]
    'rank 1 on node2 is gone'
    """
    cause = first(notices.values())
    when = clock(cause.since)
    together = [n for n in notices.values() if n.since - cause.since <= _TOGETHER_SECONDS]
    if cause.silent:
        return _silence(cause, [n for n in together if n.silent], hosts, here)
    on_it = _ranks_of(hosts, hosts[cause.rank])
    dead = [notice.rank for notice in together if not notice.silent and not notice.text]
    whole = len(on_it) > 1 and set(on_it) <= set(dead)
    if whole:
        said = (
            f"{_host_with(hosts, hosts[cause.rank])} is lost since {when}: all processes there have ended "
            "without a word"
        )
    elif not cause.text:
        said = f"rank {cause.rank} on {hosts[cause.rank]} is gone since {when}: {ENDED}"
    else:
        said = f"rank {cause.rank} on {hosts[cause.rank]} {cause.text.splitlines()[0]} (at {when})"
    rest = [rank for rank in dead if rank != cause.rank and not (whole and rank in on_it)]
    return f"{said}; with it {_short(rest, hosts)}" if rest else said


def _silence(cause: Notice, silent: list[Notice], hosts: Sequence[str], here: str) -> str:
    when = clock(cause.since)
    lost = dict.fromkeys(hosts[n.rank] for n in sorted(silent, key=lambda n: (n.since, n.rank)))
    others = {host for host in hosts if host != here}
    if here in lost:
        return f"{hosts[cause.by]} has heard nothing from this machine, {here}, since {when}: see its network"
    named = ", ".join(_host_with(hosts, host) for host in lost)
    if len(others) > 1 and set(lost) >= others:
        return (
            f"this machine, {_host_with(hosts, here)}, has heard nothing from any other since {when} "
            f"({named}): its own network is cut"
        )
    if len(others) == 1:
        return (
            f"{named} has not answered since {when}: it is down, or the network between it and this machine, "
            f"{here}"
        )
    if len(lost) == 1:
        return f"{named} has not answered since {when}: it is down, or its network is"
    return f"{named} have not answered since {when}: they are down, or the network to them is"


def _host_with(hosts: Sequence[str], host: str) -> str:
    ranks = _ranks_of(hosts, host)
    return f"{host} (rank{'s' if len(ranks) > 1 else ''} {listed(ranks)})"


def _ranks_of(hosts: Sequence[str], host: str) -> list[int]:
    return [rank for rank, other in enumerate(hosts) if other == host]


def _short(ranks: list[int], hosts: Sequence[str]) -> str:
    shown = located(ranks[:_SHOWN], hosts)
    return shown if len(ranks) <= _SHOWN else f"{shown} and {len(ranks) - _SHOWN} more"


def clock(since: float) -> str:
    """A moment in seconds since the epoch, as this machine's clock shows it."""
    return time.strftime("%H:%M:%S", time.localtime(since))
