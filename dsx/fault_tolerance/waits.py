"""Who keeps a run from going on: the ranks that all others wait for, and the ranks that were lost.

The former follow from what each rank says of itself. Of the lost ranks, it tells which was the first, in a
sentence with ranks, machines and time.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsx.schedules.schedule import Action, Op, Schedule

Sentence = tuple[str, tuple[int, ...]]
"""What is waited for, in words with ``{}`` for the ranks, and those ranks."""

_BACKWARDS = (Op.BACKWARD, Op.BACKWARD_INPUT)
_SENDS = (Op.SEND_F, Op.SEND_B)
_LOST_SHARE = 0.5
"""A message is lost if its receiver has waited for this share of the time in which nothing moved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """Where one rank is, as it says itself.

    Attributes:
        rank: Global rank.
        step: The step under way, from 1.
        phase: What it does there, e.g. ``training step``.
        action: The schedule's action that it is at; empty outside of a schedule.
        says: What it waits for, in words; empty if it waits for nobody.
        waits_for: Global ranks that it waits for, if a transfer.
        collective: Name of the collective that it is in; empty if in none.
        members: Global ranks of that collective.
        where: Its innermost place in the source, and what it does there if that is known.
        idle_seconds: How long it has been there.
        saw: Ranks on its machine that cannot speak for themselves, and what has become of them.
        runs: How many schedules it has begun since the start; ranks of a pipeline run the same ones.
        awaits: The action whose result it waits to receive, e.g. ``0F5``; empty if there is none.
        sent: Actions of the schedule under way whose results it has sent.
        sending: The action whose result it is sending or about to send.
    """

    rank: int
    step: int
    phase: str
    action: str = ""
    says: str = ""
    waits_for: tuple[int, ...] = ()
    collective: str = ""
    members: tuple[int, ...] = ()
    where: str = ""
    idle_seconds: float = 0.0
    step_seconds: tuple[float, ...] = ()
    saw: Mapping[int, str]
    host: str = ""
    runs: int = 0
    awaits: str = ""
    sent: tuple[str, ...] = ()
    sending: str = ""

    def __str__(self) -> str:
        place = f"step {self.step}, {self.phase}"
        if self.collective:
            what = f"in {self.collective} with ranks {listed(self.members)}"
            what = f"{self.action}: {what}" if self.action else what
        else:
            what = self.says or self.action
        at = f" ({self.where})" if self.where else ""
        what = f", {what}" if what else ""
        return f"{self.name}: {place}{what}{at}, for {self.idle_seconds:.0f} s"

    @property
    def name(self) -> str:
        """``rank 3 on node2``."""
        return f"rank {self.rank} on {self.host}" if self.host else f"rank {self.rank}"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Why a run does not go on.

    Attributes:
        culprits: Ranks that nobody keeps from going on, the one that most wait for first; a circle of ranks
            if each waits for another.
        text: The same in a sentence.
    """

    culprits: tuple[int, ...]
    text: str


def waits(schedule: Schedule, pp_rank: int, position: int) -> Sentence:
    """What the action at ``position`` of a lowered schedule's row waits for from other pipeline ranks.

    At the row's end it waits until its last messages are taken. An action that computes waits for nothing.

    >>> from dsx.schedules.builders import one_f_one_b
    >>> from dsx.schedules.schedule import lower
    >>> waits(lower(one_f_one_b(2, 1, 1)), 1, 0)
    ('1F0 waits for 0F0 from {}', (0,))
    """
    row = schedule.rows[pp_rank]
    if position >= len(row):
        takers = dict.fromkeys(_destination(schedule, a) for a in row if a.op in _SENDS)
        return ("the step's last messages wait for {} to take them", tuple(takers)) if takers else ("", ())
    action = row[position]
    if action.op in _SENDS:
        return f"{action} waits for {{}} to receive", (_destination(schedule, action),)
    if action.op not in (Op.RECV_F, Op.RECV_B):
        return "", ()
    source = schedule.rank_of(action.stage + _step(action))
    user = _of(row, action.stage, action.micro_batch, _ops(action))
    return f"{user} waits for {_awaited_by(schedule, action)} from {{}}", (source,)


def messages(schedule: Schedule, pp_rank: int, position: int) -> tuple[str, tuple[str, ...], str]:
    """What a rank that is at ``position`` of its row waits to receive, has sent, and is about to send.

    Each message is named by the action that made it; the name is empty where there is none.

    >>> from dsx.schedules.builders import one_f_one_b
    >>> from dsx.schedules.schedule import lower
    >>> messages(lower(one_f_one_b(2, 1, 2)), 0, 4)
    ('1B0', ('0F0', '0F1'), '')
    """
    row, own = schedule.rows[pp_rank], frozenset(schedule.rows[pp_rank])
    sent = tuple(_made(own, action) for action in row[:position] if action.op in _SENDS)
    if position >= len(row):
        return "", sent, ""
    action = row[position]
    awaited = _awaited_by(schedule, action) if action.op in (Op.RECV_F, Op.RECV_B) else ""
    return awaited, sent, _made(own, action) if action.op in _SENDS else ""


def diagnose(states: Mapping[int, RankState], hosts: Sequence[str]) -> Diagnosis:
    """Follow who waits for whom to the ranks that hold all others up.

    A rank that has said nothing counts as the culprit, because every rank that can says where it is. A rank
    in a collective waits for those of its members that are not in it. One that waits for a message that its
    sender has sent waits for the network, not for the sender.

    ``states`` is of the ranks that could say something, ``hosts`` has the machine of each rank of the run.
    """
    missing = tuple(rank for rank in range(len(hosts)) if rank not in states)
    if missing:
        seen = {rank: fate for state in states.values() for rank, fate in state.saw.items()}
        by_fate: dict[str, list[int]] = {}
        for rank in missing:
            by_fate.setdefault(seen.get(rank, "gave no sign of life"), []).append(rank)
        # What somebody has seen precedes what nobody knows.
        found = [(fate, ranks) for fate, ranks in by_fate.items() if fate in seen.values()]
        found = found or list(by_fate.items())
        text = "; ".join(f"{located(ranks, hosts)} {_of_many(fate, len(ranks))}" for fate, ranks in found)
        return Diagnosis(tuple(rank for _, ranks in found for rank in ranks), text)
    lost = _lost_messages(states)
    if lost:
        return Diagnosis(tuple(lost), "; ".join(lost.values()))
    edges = {rank: _awaited(state, states) for rank, state in states.items()}
    waiting_for = _followers(edges)
    roots = [rank for rank in states if not edges[rank] and waiting_for.get(rank)]
    roots.sort(key=lambda rank: (-len(waiting_for[rank]), rank))
    if roots:
        most = [rank for rank in roots if len(waiting_for[rank]) == len(waiting_for[roots[0]])]
        return Diagnosis(tuple(most), _held_up(states, most, waiting_for[most[0]], hosts))
    circle = _circle(edges)
    if circle:
        return Diagnosis(circle, f"{located(circle, hosts)} wait for each other in a circle")
    stuck = next((state for state in states.values() if state.collective), None)
    if stuck is not None:
        what = f"all of {located(stuck.members, hosts)} are in {stuck.collective}, which does not end"
        return Diagnosis(stuck.members, f"{what}: look at their network")
    slowest = max(states.values(), key=lambda state: (state.idle_seconds, -state.rank))
    return Diagnosis((slowest.rank,), f"nobody waits for another; {slowest}")


def chain(states: Mapping[int, RankState], culprit: int) -> tuple[int, ...]:
    """The longest line of ranks that wait, each for the next, for ``culprit``, the last of them.

    Each rank is taken at its least distance from the culprit.
    """
    edges = {rank: _awaited(state, states) for rank, state in states.items()}
    front: list[tuple[int, ...]] = [(culprit,)]
    reached = {culprit}
    for line in front:
        for rank, awaited in edges.items():
            if line[0] in awaited and rank not in reached:
                reached.add(rank)
                front.append((rank, *line))
    return front[-1]


def named(ranks: list[int] | tuple[int, ...]) -> str:
    """``rank 3``, or ``ranks 3-5, 7``.

    >>> named([3]), named([3, 4, 5, 7])
    ('rank 3', 'ranks 3-5, 7')
    """
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}"


def located(ranks: Iterable[int], hosts: Sequence[str]) -> str:
    """Ranks beside their machines.

    >>> located([3], ("a", "a", "b", "b")), located([0, 1, 3], ("a", "a", "b", "b"))
    ('rank 3 on b', 'ranks 0, 1 on a, rank 3 on b')
    """
    by_host: dict[str, list[int]] = {}
    for rank in sorted(ranks):
        by_host.setdefault(hosts[rank], []).append(rank)
    return ", ".join(f"{named(found)} on {host}" if host else named(found) for host, found in by_host.items())


def listed(ranks: list[int] | tuple[int, ...]) -> str:
    """Ranks in order, three or more consecutive ones as a range."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = ([f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run] for run in runs)
    return ", ".join(text for part in parts for text in part)


def _of_many(fate: str, count: int) -> str:
    return fate.replace("is ", "are ", 1) if count > 1 else fate


def _awaited(state: RankState, states: Mapping[int, RankState]) -> tuple[int, ...]:
    if not state.collective:
        return state.waits_for
    return tuple(
        member
        for member in state.members
        if (other := states.get(member)) is None
        or (other.collective, other.members) != (state.collective, state.members)
    )


def _followers(edges: Mapping[int, tuple[int, ...]]) -> dict[int, set[int]]:
    """Each rank -> all that wait for it, directly or not."""
    backward: dict[int, list[int]] = {}
    for rank, awaited in edges.items():
        for other in awaited:
            backward.setdefault(other, []).append(rank)
    found: dict[int, set[int]] = {}
    for rank in backward:
        reached, front = set[int](), [rank]
        while front:
            news = [other for other in backward.get(front.pop(), ()) if other not in reached]
            reached.update(news)
            front += news
        found[rank] = reached - {rank}
    return found


def _circle(edges: Mapping[int, tuple[int, ...]]) -> tuple[int, ...]:
    for start in edges:
        path, rank = [start], start
        while edges.get(rank):
            rank = edges[rank][0]
            if rank in path:
                return tuple(path[path.index(rank) :])
            path.append(rank)
    return ()


def _lost_messages(states: Mapping[int, RankState]) -> dict[int, str]:
    """Receiver -> words, for each message that was sent and has not arrived in time enough."""
    least = _LOST_SHARE * max((state.idle_seconds for state in states.values()), default=0.0)
    found = {}
    for rank, state in states.items():
        sender = states.get(state.waits_for[0]) if state.waits_for else None
        if sender is None or not state.awaits or state.collective or state.idle_seconds < least:
            continue
        way = f"from {sender.name} and has not arrived at {state.name} for {state.idle_seconds:.0f} s"
        if sender.runs > state.runs or (sender.runs == state.runs and state.awaits in sender.sent):
            found[rank] = (
                f"{state.awaits} was sent by {way.removeprefix('from ')}: look at the network between them"
            )
        elif sender.runs == state.runs and state.awaits == sender.sending:
            found[rank] = f"{state.awaits} is on its way {way}: look at the network between them"
    return found


def _held_up(
    states: Mapping[int, RankState], culprits: list[int], waiting: set[int], hosts: Sequence[str]
) -> str:
    if len(waiting) == 1:
        whole = f"{located(waiting, hosts)} waits"
    elif len(waiting) + len(culprits) >= len(states):
        whole = "all others wait"
    else:
        whole = f"{located(waiting, hosts)} wait"
    return f"{whole} for {located(culprits, hosts)}. {'; '.join(str(states[rank]) for rank in culprits)}"


def _step(receive: Action) -> int:
    """The step between stages from the one that receives to the one that sends."""
    return -1 if receive.op is Op.RECV_F else 1


def _ops(transfer: Action) -> tuple[Op, ...]:
    """The ops that make a transfer's message, and those that use it."""
    return (Op.FORWARD,) if transfer.op in (Op.RECV_F, Op.SEND_F) else _BACKWARDS


def _awaited_by(schedule: Schedule, receive: Action) -> str:
    stage = receive.stage + _step(receive)
    return str(_of(schedule.rows[schedule.rank_of(stage)], stage, receive.micro_batch, _ops(receive)))


def _made(row: Collection[Action], send: Action) -> str:
    return str(_of(row, send.stage, send.micro_batch, _ops(send)))


def _destination(schedule: Schedule, send: Action) -> int:
    return schedule.rank_of(send.stage + (1 if send.op is Op.SEND_F else -1))


def _of(row: Collection[Action], stage: int, micro_batch: int, ops: tuple[Op, ...]) -> Action:
    """The action with one of ``ops`` that a row has for a stage and micro-batch."""
    wanted: Iterator[Action] = (Action(stage, op, micro_batch) for op in ops)
    return next((action for action in wanted if action in row), Action(stage, ops[0], micro_batch))


ENDED = "its process has ended without a word (killed?)"
_TOGETHER_SECONDS = 1.5
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """The notice that a rank is lost to the run.

    Attributes:
        by: The rank that says so; ``rank`` itself if it could still speak.
        since: When it was noticed, by this machine's clock, in seconds since the epoch.
        text: What the rank says of itself, or what was seen of it; empty if its process ended without a word.
        silent: Whether its machine no longer answers, rather than that its process has ended.
        code: Exit code of the ranks that end because of it.
        shared: Whether every rank fails of the same by itself, so that one report is enough.
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
    """Whether ``new`` says more than ``old``: the rank's own word says most, then that of its own machine."""

    def weight(notice: Notice) -> tuple[bool, bool]:
        return notice.by == notice.rank, hosts[notice.by] == hosts[notice.rank]

    return old is None or weight(new) > weight(old)


def first(notices: Iterable[Notice]) -> Notice:
    """The notice that the run ends for; what later ones say may only have followed from it."""
    return min(notices, key=lambda notice: (notice.since, notice.rank))


def sentence(notices: Mapping[int, Notice], hosts: Sequence[str], here: str) -> str:
    """Why the run ends, with machines and time, as told on the machine ``here``.

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
