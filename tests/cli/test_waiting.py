"""What a person who waits is told, in a log file and on a terminal."""

from __future__ import annotations

import io
import re
import threading

import pytest

from dsx.waiting import Waiting


class Said(io.StringIO):
    """A stream, on a terminal or not, that one can wait for."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self.terminal, self.spoken = terminal, threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        if "of 8 parts" in text:
            self.spoken.set()
        return written


def waited(*, terminal: bool, **more: object) -> str:
    """All that is said of four parts of eight."""
    stream = Said(terminal=terminal)
    with Waiting("counting", total=8, unit="parts", stream=stream, first_seconds=0.0, **more) as waiting:
        waiting.advance(3)
        waiting.reach(4)
        if not more.get("quiet"):
            assert stream.spoken.wait(60)
    return stream.getvalue()


def test_a_log_file_gets_lines_and_the_end() -> None:
    first, last = waited(terminal=False).splitlines()
    took = r"\d+(\.\d+)? (ms|s)"
    assert re.fullmatch(rf"\.\.\. counting: [034] of 8 parts, {took}(, about {took} left)?", first)
    assert re.fullmatch(rf"\.\.\. counting: done in {took}", last)


def test_what_is_left_is_not_reckoned_from_the_first_few() -> None:
    waiting = Waiting("comparing", total=888, unit="layouts")
    for count, says in (3, False), (60, True):
        waiting.reach(count)
        assert (" left" in waiting.text) is says


def test_a_terminal_gets_one_line_that_disappears(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    said = waited(terminal=True)
    assert "of 8 parts" in said
    assert "done" not in said
    assert said.rstrip().endswith(("\x1b[2K", "\x1b[?25h", "\x1b[1A\x1b[2K"))


def test_a_terminal_without_unicode_gets_a_spinner_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(Said, "encoding", "ascii")
    assert waited(terminal=True).isascii()


def test_what_is_quick_or_another_ranks_says_nothing() -> None:
    assert waited(terminal=False, quiet=True) == ""
    stream = io.StringIO()
    with Waiting("a moment", stream=stream):
        pass
    assert stream.getvalue() == ""


def test_what_is_known_to_take_long_is_said_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the thread that works: another one might have to wait until the work is over."""
    monkeypatch.setattr(threading.Thread, "start", lambda _: None)
    monkeypatch.setattr(threading.Thread, "join", lambda _: None)
    stream = io.StringIO()
    with Waiting("proving", stream=stream, at_once=True) as waiting:
        assert stream.getvalue() == "... proving\n"
        with waiting.instead("compiling"):
            assert stream.getvalue() == "... proving\n... compiling\n"
            assert waiting.text.startswith("... compiling: ")
        assert waiting.text.startswith("... proving: ")


def test_sizes_are_shown_with_their_unit() -> None:
    with Waiting("reading", total=3 << 30, unit="bytes", quiet=True) as waiting:
        waiting.advance(5 << 20)
        assert waiting.text.startswith("... reading: 5.00 MiB of 3.00 GiB, ")
