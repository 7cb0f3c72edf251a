"""What people reported: the configs of 133 GitHub threads, made minimal, and what the doctor owes each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dsx.config.wording import dotted
from dsx.doctor import examine

LINES = (Path(__file__).parent / "threads.txt").read_text().splitlines()[1:]
THREADS = {line.split(" | ", 1)[0]: line.split(" | ", 3)[1:] for line in LINES}


def test_there_are_many():
    assert len(THREADS) == len(LINES) > 130


@pytest.mark.parametrize("thread", THREADS)
def test_thread(thread):
    arguments, expected, config = THREADS[thread]
    report = examine(json.loads(config), **{"version": "0.19.8", **json.loads(arguments)})
    keys = {dotted(finding.path) for finding in (*report.errors, *report.warnings)}
    if expected == "-":
        assert not keys  # the config was right, or its mistake is none that a config shows
    else:
        assert any(key == expected or key.startswith(f"{expected}.") for key in keys), keys
