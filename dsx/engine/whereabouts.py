"""Where this rank is in its work, kept up to date at the cost of an attribute."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from dsx.schedules.schedule import Schedule

_KEPT_STEPS = 8


@dataclass(slots=True)
class Whereabouts:
    """Written by the rank's main thread, read by its watch's, without a lock.

    Attributes:
        device: What the rank computes on. On an accelerator the host runs ahead: see :meth:`position`.
        step: The step under way, from 1; the last one between two.
        phase: What it does there.
        schedule: Of the phase; None if it has none.
        at: The host's position in its row of the schedule.
        moves: Grows when anything else changes.
        runs: How many schedules it has begun.
        step_seconds: Of the last steps.
    """

    device: torch.device
    step: int = 0
    phase: str = "start"
    schedule: Schedule | None = None
    at: int = 0
    moves: int = 0
    runs: int = 0
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    _event: Any = field(init=False, default=None)
    _marks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.device.type != "cpu":
            self._event = get_accelerator().Event  # None on a device of paper

    @contextmanager
    def doing(self, phase: str) -> Iterator[None]:
        """While the rank does something other than what it did before. An error leaves it there."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def enter(self, phase: str, schedule: Schedule | None = None) -> None:
        """From here on the rank does this."""
        self.schedule, self.at, self.phase = schedule, 0, phase
        self.runs += schedule is not None
        self.moves += 1

    def reach(self, position: int) -> None:
        """The host comes to the action at ``position``."""
        if self._event is not None:
            self._mark(position)
        self.at = position

    @contextmanager
    def timed_step(self, step: int) -> Iterator[None]:
        """Around one training step."""
        began, self.step = time.monotonic(), step
        yield
        self.step_seconds.append(time.monotonic() - began)

    def position(self) -> int:
        """The action that the rank is at: on an accelerator the first one that the device has not ended."""
        at = self.at
        for position, mark in enumerate(self._marks[1 : at + 1]):
            if not mark.query():
                return position
        return at

    def _mark(self, position: int) -> None:
        """An event before the action at ``position``, reached once the device has ended those before it."""
        while len(self._marks) <= position:
            self._marks.append(self._event())
        self._marks[position].record()
