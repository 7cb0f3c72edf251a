"""What a run that hangs says of itself, from what its ranks have told."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from dsx.plan.losses import clock
from dsx.plan.waits import RankState, chain, diagnose, located
from dsx.runtime.board import Board

_SHOWN_RANKS = 16
_LAST_STEPS = 5
_WATCH = "watch.py"
"""In the stack of the thread that looks, and is not looked at."""


def report_of(told: Mapping[int, RankState], speaker: int, hosts: Sequence[str], board: Board) -> str:
    """Who holds the run up, since when, where the ranks are, and stacks.

    Args:
        told: What each rank says of itself, of those that could.
        speaker: The rank that reports; one of them.
        hosts: Machine of each rank of the run.
        board: Where the ranks have put their stacks.
    """
    found = diagnose(told, hosts)
    since = clock(time.time() - max(state.idle_seconds for state in told.values()))
    lines = [f"error: the run does not go on since {since}: {found.text}"]
    culprits = [rank for rank in found.culprits if rank in told]
    path = chain(told, found.culprits[0])
    first = dict.fromkeys((*path, *culprits, *told))
    lines += [f"  {told[rank]}" for rank in [*first][:_SHOWN_RANKS] if rank in told]
    if len(told) > _SHOWN_RANKS:
        lines.append(f"  and {len(told) - _SHOWN_RANKS} more ranks")
    own = told[speaker]
    if own.step_seconds:
        times = ", ".join(f"{seconds:.3g}" for seconds in own.step_seconds[-_LAST_STEPS:])
        lines.append(f"  last steps of {own.name} took {times} s")
    shown = culprits[0] if culprits else path[0] if path[0] in told else speaker
    stacks = board.text(f"stacks-{shown}.txt")
    if not stacks:
        return "\n".join([*lines, f"  {board.folder} cannot be written: no stacks, no other ranks"])
    lines.append(f"  stacks of {located([shown], hosts)}:")
    threads = [thread for thread in stacks.split("\n\n") if _WATCH not in thread]
    lines += [f"    {line}" for thread in threads for line in thread.splitlines()]
    lines.append(f"  stacks of {located(told, hosts)} are in {board.folder}")
    return "\n".join(lines)
