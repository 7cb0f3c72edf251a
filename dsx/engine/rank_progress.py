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
class RankProgress:
    """Written by the rank's main thread, read by its watch's, without a lock.

    Attributes:
        device: What the rank computes on. On an accelerator the host runs ahead: see :meth:`position`.
        step: The current step, from 1; between steps, the last one.
        phase: What the rank does there.
        at: The host's position in its row of the schedule.
        moves: Grows when anything else changes.
        runs: How many schedules it has begun.
        step_seconds: Durations of the last steps.
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
        """Inside the block, the rank is in another phase. An error leaves it there."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    def enter(self, phase: str, schedule: Schedule | None = None) -> None:
        self.schedule, self.at, self.phase = schedule, 0, phase
        self.runs += schedule is not None
        self.moves += 1

    def move(self) -> None:
        """Note that something goes on within an action, such as another micro-batch that was read."""
        self.moves += 1

    def reach(self, position: int) -> None:
        """Note that the host has come to the action at ``position``."""
        if self._event is not None:
            # The event before the action at ``position``: the device reaches it after those before it.
            while len(self._marks) <= position:
                self._marks.append(self._event())
            self._marks[position].record()
        self.at = position

    @contextmanager
    def timed_step(self, step: int) -> Iterator[None]:
        began, self.step = time.monotonic(), step
        yield
        self.step_seconds.append(time.monotonic() - began)

    def position(self) -> int:
        """Position of the current action; on an accelerator, the first one that the device has not ended."""
        at = self.at
        for position, mark in enumerate(self._marks[1 : at + 1]):
            if not mark.query():
                return position
        return at
