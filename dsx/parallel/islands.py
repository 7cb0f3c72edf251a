"""Which island a process is of, when islands average, and which samples each trains on. Pure data."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Literal

Wire = Literal["fp32", "bf16", "int8"]
"""How a number of a movement travels between islands."""

OUTER_STATES = OUTER_WEIGHTS, OUTER_MOMENTUM, OUTER_ERROR = "outer_weights", "outer_momentum", "outer_error"
"""What islands keep of every parameter, as checkpoints name it beside the optimizer's own states: the weights
that all had last, their momentum, and what rounding has kept back."""

BLOCK = 4096
"""Consecutive elements of a parameter that share one fp32 scale when they travel as int8."""

SEGMENT = 8 * BLOCK
"""Elements that travel in one message."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Islands:
    """The islands of a run, as one of them sees it.

    Attributes:
        count: How many they are when all are there.
        index: Which this is, from 0.
        meet: Where the first island listens, ``host:port``, if a launcher starts each by itself; empty if one
            launcher has started all.
        keys: The folder with their keys; None for links that are neither encrypted nor authenticated.
        insecure: Whether such links are wanted beyond this machine.
        patience_seconds: How long an island waits for another of which nothing comes.
    """

    count: int
    index: int
    ranks: int
    meet: str = ""
    keys: str | None = None
    insecure: bool = False
    patience_seconds: float = 60.0

    @property
    def together(self) -> bool:
        """Whether one launcher has started all of them."""
        return not self.meet

    @property
    def speaks(self) -> bool:
        """Whether this island has a console: the first one, where one launcher has started all."""
        return self.index == 0 or not self.together

    def global_sample(self, own: int, batch: int) -> int:
        """The number in the whole job of an island's own sample number ``own``.

        Step by step, islands take turns of ``batch`` samples each, so that in a step they read together what
        one job with a batch ``count`` times as large would read.

        >>> [Islands(count=2, index=1, ranks=1).global_sample(own, 3) for own in range(6)]
        [3, 4, 5, 9, 10, 11]
        """
        step, row = divmod(own, batch)
        return (step * self.count + self.index) * batch + row


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """When islands average: one round for each share of the model in every so many inner steps.

    Round number ``r`` is about share ``r % shares``. Rounds are spread evenly over the inner steps; after the
    last step there is one for each share, so that the islands end with one model.

    Attributes:
        every: Inner steps between two rounds about the same share.
        shares: Parts of the model that have rounds of their own.
        last: Number of the last inner step.

    >>> rounds = Rounds(every=4, shares=2, last=9)
    >>> {step: rounds.after(step) for step in range(10) if rounds.after(step)}
    {2: 1, 4: 1, 6: 1, 8: 1, 9: 2}
    """

    every: int
    shares: int
    last: int

    def after(self, step: int) -> int:
        """Rounds that begin after inner step number ``step``, from 1."""
        if step <= 0:
            return 0
        if step >= self.last:
            return self.shares
        return step * self.shares // self.every - (step - 1) * self.shares // self.every


def carried_over(samples: int, was: int, now: int, batch: int) -> int:
    """Samples that a job has behind it, for an island of another number of islands that goes on from it.

    No sample is read twice: of a last step that is not a whole one now, the rest is left out.

    Args:
        samples: That one of ``was`` islands has read; one job is one island.
        was: Islands of the job that was saved.
        now: Islands of the one that goes on.
        batch: Samples of an optimizer step of one of them.

    Returns:
        The samples of each of them so far.

    >>> [carried_over(48, 1, 2, batch=8), carried_over(24, 2, 1, batch=16), carried_over(40, 1, 4, batch=8)]
    [24, 48, 16]
    """
    if was == now:
        return samples
    together = samples * was
    return together if now == 1 else -(-together // (now * batch)) * batch


_ADDRESS = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[^\s:\[\]/]+)):(?P<port>[0-9]{1,5})")


def wrong_address(text: str) -> tuple[str, str] | None:
    """What is wrong with an address at which an island is to be met, and the fix; None if nothing is.

    >>> [wrong_address(text) for text in ("hostA:29700", "[fd00::5]:29700")]
    [None, None]
    >>> wrong_address("hostA")
    ('which is no host:port', 'write it as hostA:29700, 10.0.0.5:29700 or [fd00::5]:29700')
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        return "which is no host:port", "write it as hostA:29700, 10.0.0.5:29700 or [fd00::5]:29700"
    if not (found["v6"] or found["host"]).strip("0:.*"):  # one may listen at 0.0.0.0, and at ::
        fix = "give a name or an address of the first island's machine"
        return "to which no other island can connect", fix
    return None


def place_of(address: str) -> tuple[str, int]:
    """Host and port of an address with which nothing is wrong, however it is written.

    >>> place_of("HostA:09700"), place_of("[FD00::5]:29700")
    (('hosta', 9700), ('fd00::5', 29700))
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]").lower(), int(port)


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.1", "::1", "10.0.0.5", "127.example.org")]
    [True, True, True, False, False]
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def cut(start: int, stop: int, part: int, parts: int) -> tuple[int, int]:
    """Part number ``part`` of the elements from ``start`` to ``stop``, cut evenly.

    >>> [cut(10, 20, part, 3) for part in range(3)]
    [(10, 13), (13, 16), (16, 20)]
    """
    length = stop - start
    return start + length * part // parts, start + length * (part + 1) // parts


def wire_bytes(elements: int, wire: Wire) -> int:
    """Bytes of so many consecutive elements of one parameter on the wire.

    >>> [wire_bytes(5000, wire) for wire in ("fp32", "bf16", "int8")]
    [20000, 10000, 5008]
    """
    if wire == "int8":
        return elements + 4 * -(-elements // BLOCK)
    return elements * (4 if wire == "fp32" else 2)


def wrong_meeting(
    meet: str, island: int | None, islands: int, *, keys: bool, insecure: bool
) -> tuple[str, str] | None:
    """What is wrong with how a launch finds the others, and what to do; None if nothing is.

    ``meet`` is where the first island listens, empty if one launcher starts all of them; ``keys`` says
    whether there are some for the links, ``insecure`` whether none are wanted.
    """
    if keys and insecure:
        return "keys are given, and insecure is true", "leave one of them out"
    if not meet:
        if island is None:
            return None
        what = f"island = {island} is given without meet: one launcher starts all islands"
        return what, "leave it out, or say in meet where the first island listens"
    if (wrong := wrong_address(meet)) is not None:
        return f'meet = "{meet}", {wrong[0]}', wrong[1]
    if not (keys or insecure or is_loopback(place_of(meet)[0])):
        what = f'meet = "{meet}", and whoever reaches it could read the weights and change them'
        fix = "make keys with dsx islands keys FOLDER and name it as keys, or set insecure to true"
        return what, fix
    if island is None:
        what = "meet is given, and island does not say which one this launch is"
        return what, "start each island with --set dsx.outer.island=0, 1 and so on"
    if island >= islands:
        what = f"island = {island}, and islands = {islands} are numbered from 0"
        return what, f"use 0 to {islands - 1}"
    return None
