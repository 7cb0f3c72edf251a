"""Progress of what takes long: nothing for a moment, then what is being done and how far it is."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self, TextIO, TypeVar

from rich.console import Console
from rich.text import Text

from dsx.terminal import amount, printable, seconds
from dsx.train.progress import Lines

T = TypeVar("T")

FIRST_SECONDS = 1.5
"""What takes less time is done before anybody wonders."""

_LEAST_PAUSE_SECONDS, _MOST_PAUSE_SECONDS = 4.0, 60.0
"""In a log file, between two lines: half of the time that it has taken so far, within these."""


class Waiting:
    """Says on standard error what takes long; on a terminal, in one line that is rewritten and disappears.

    Use it as a context manager. A thread writes the lines, so that a single blocking call is reported as
    well.

    Args:
        what: What is being done: ``tokenising my.jsonl``.
        total: How many units there are; None if nobody knows.
        unit: What is counted, in the plural; ``bytes`` are shown with their prefix. Empty counts nothing.
        stream: Where to write; None for standard error.
        quiet: Write nothing, as all ranks but one should.
        first_seconds: How long to be silent.
        at_once: Say what is being done before it begins: it is known to take long.
    """

    def __init__(
        self,
        what: str,
        *,
        total: int | None = None,
        unit: str = "",
        stream: TextIO | None = None,
        quiet: bool = False,
        first_seconds: float = FIRST_SECONDS,
        at_once: bool = False,
    ) -> None:
        self._what, self._total, self._unit = printable(what), total, unit
        self._stream, self._quiet, self._at_once = stream or sys.stderr, quiet, at_once
        self._first_seconds = first_seconds
        self._count, self._began = 0, 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._speak, name="dsx-waiting", daemon=True)

    def __enter__(self) -> Self:
        self._began = time.monotonic()
        if not self._quiet:
            if self._at_once:
                self._say_at_once()
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if not self._quiet:
            self._thread.join()

    @contextmanager
    def instead(self, what: str) -> Iterator[None]:
        """Within the block, something else is done, which is said before it begins."""
        before, self._what, self._began = self._what, printable(what), time.monotonic()
        if not self._quiet:
            self._say_at_once()
        try:
            yield
        finally:
            self._what = before

    def _say_at_once(self) -> None:
        """Write the first line from here, as the thread may have to wait until the work is over."""
        if not Console(file=self._stream).is_terminal:
            with suppress(OSError):
                self._stream.write(f"... {self._what}\n")
                self._stream.flush()

    def advance(self, units: int = 1) -> None:
        """Count so many more units as done."""
        self._count += units

    def reach(self, units: int) -> None:
        """Count so many units as done in all."""
        self._count = units

    def stands(self, what: str, units: int, total: int | None) -> None:
        """From now on it is something else, of which so much is done; None: nobody knows of how much."""
        self._what, self._count, self._total = printable(what), units, total

    def counts(self, units: Iterable[T]) -> Iterator[T]:
        """``units`` as they are, each counted as done when the next one is asked for."""
        for unit in units:
            yield unit
            self.advance()

    @property
    def text(self) -> str:
        elapsed = time.monotonic() - self._began
        parts = [self._counted()] if self._unit else []
        parts.append(seconds(elapsed))
        if self._total and self._total <= 20 * self._count < 20 * self._total:  # the first take longer
            parts.append(f"about {seconds(elapsed * (self._total - self._count) / self._count)} left")
        return f"... {self._what}: {', '.join(parts)}"

    def _counted(self) -> str:
        if self._unit == "bytes":
            return amount(self._count) + (f" of {amount(self._total)}" if self._total else "")
        return f"{self._count:,}{f' of {self._total:,}' if self._total else ''} {self._unit}"

    def _speak(self) -> None:
        with suppress(OSError):  # nobody reads it: the work goes on
            self._write(Lines(file=self._stream, highlight=False))

    def _write(self, console: Console) -> None:
        silent = self._first_seconds
        if self._at_once:
            silent = 0.0 if console.is_terminal else _LEAST_PAUSE_SECONDS
        if self._ended.wait(silent):
            return
        if console.is_terminal:
            spinner = "dots" if console.encoding.startswith("utf") else "line"
            with console.status(Text(self.text), spinner=spinner) as status:
                while not self._ended.wait(0.5):
                    status.update(Text(self.text))
            return
        while True:
            console.print(self.text, soft_wrap=True, markup=False)
            elapsed = time.monotonic() - self._began
            if self._ended.wait(min(max(elapsed / 2, _LEAST_PAUSE_SECONDS), _MOST_PAUSE_SECONDS)):
                took = seconds(time.monotonic() - self._began)
                console.print(f"... {self._what}: done in {took}", soft_wrap=True, markup=False)
                return
