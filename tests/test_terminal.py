"""Nothing that somebody else wrote into a file is obeyed by the terminal that it is shown on."""

from __future__ import annotations

import json
import logging
import unicodedata

import pytest

from dsx.errors import ConfigError
from dsx.launch import entry
from dsx.terminal import printable
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
    assert printable("over\rwritten") == "over\\u000dwritten"


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
