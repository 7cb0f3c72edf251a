"""Nothing that somebody else wrote into a file is obeyed by the terminal that it is shown on."""

from __future__ import annotations

import json
import logging
import os
import random
import sys
import unicodedata
from collections import Counter

import pytest

from dsx.errors import ConfigError
from dsx.launch import entry
from dsx.terminal import aligned, complain, printable, wrapped
from dsx.train.progress import Progress


def test_every_control_character_is_escaped_and_nothing_else():
    for code in range(0x3000):
        character = chr(code)
        obeyed = unicodedata.category(character) == "Cc" or unicodedata.bidirectional(character) in (
            "LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI",
        )  # fmt: skip
        obeyed |= character in "\u061c\u200e\u200f\u2028\u2029"
        if character in "\n\t":
            obeyed = False
        assert (printable(character) != character) is obeyed, hex(code)
    assert printable("tab\tline\nwindows\r\nnaïve 数 👩‍🚀") == "tab\tline\nwindows\r\nnaïve 数 👩‍🚀"
    assert printable("\ud800\uffff\ufffe") == "\\ud800\\uffff\\ufffe"  # which no XML may hold
    assert printable("over\rwritten") == "over\\u000dwritten"


def test_tables_fit_and_lose_no_word():
    draw = random.Random(0)
    for _ in range(400):
        columns, names, width = draw.randint(1, 7), draw.randint(1, 2), draw.randint(50, 110)
        left = [index for index in range(columns) if draw.random() < 0.5]
        rows = [
            [
                " ".join("x" * draw.randint(1, 9) for _ in range(draw.randint(0, 12 if index in left else 1)))
                for index in range(columns)
            ]
            for _ in range(draw.randint(1, 4))
        ]
        lines = aligned(rows, left, width=width, names=names)
        assert max(map(len, lines)) <= width
        words = Counter(word for row in rows for cell in row for word in cell.split())
        assert not words - Counter(word for line in lines for word in line.split())  # names come again
        if max(map(len, aligned(rows, left))) <= width:
            assert lines == aligned(rows, left)
    long = "a line of some words\n  and  another one"
    assert wrapped(long, 12, indent="> ") == "a line of\n> some words\n  and\n> another\n> one"
    assert wrapped(long, 80) == long


def test_json_stays_the_same_json():
    value = {"\x1b[2J\x7f\u202e": ["\x9b31m", "\ud800"]}
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        shown = printable(text)
        assert json.loads(shown) == value
        shown.encode()
        assert shown.isprintable()


def test_errors_escape_what_they_quote_and_cut_what_is_endless():
    error = ConfigError("layer\x1b]52;c;AAAA\x07", "x" * 10**6, "\x1b[1A\x1b[2Kdsx: all is well")
    assert "\x1b" not in str(error) + error.where + error.what + error.fix
    assert str(error).startswith("layer\\u001b]52;c;AAAA\\u0007: xxxx")
    assert len(str(error)) < 70_000
    assert "1,000,000 characters" in str(error)


def test_a_run_prints_no_escapes_of_others(capsys: pytest.CaptureFixture[str]):
    progress = Progress()
    progress.rows("title\x1b[2J", [("model", "\x1b]0;owned\x07")])
    progress.note("\x9b2J")
    out = capsys.readouterr().out
    assert "\\u001b[2J" in out
    assert not {"\x1b", "\x07", "\x9b"} & set(out)


def test_what_other_packages_log_is_escaped(caplog: pytest.LogCaptureFixture):
    before = logging.getLogRecordFactory()
    try:
        entry.quiet()
        logging.getLogger("datasets.packaged_modules.json.json").error("Column(%s) changed", "\x1b[2J")
    finally:
        logging.setLogRecordFactory(before)
    assert "Column(\\u001b[2J) changed" in caplog.text
    assert "\x1b" not in caplog.text


@pytest.mark.parametrize("raw", [True, False])
def test_complaints_are_heard_again_when_there_is_room(monkeypatch, raw):
    """A pipe that is full for a moment, as a launcher's, and a name that is no Unicode."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with os.fdopen(reader, "rb") as heard, os.fdopen(writer, "w", errors="backslashreplace") as said:
        monkeypatch.setattr(sys, "stderr", said)
        full = os.write(writer, b"x" * (1 << 20))
        complain("lost", raw=raw)
        assert heard.read(full) == b"x" * full
        complain("no \udcff", raw=raw)
        said.close()
        assert heard.read().endswith(b"no \\udcff\n")
