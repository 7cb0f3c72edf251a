"""Journals: torn, of another conversion, locked, and after the machine went down."""

from __future__ import annotations

import pytest

from dsx.checkpoint.staging import Journal
from dsx.errors import CheckpointError


def records(path, boot="b1", about=None):
    with Journal(path, about or {"the source": "x"}, boot) as journal:
        return [record["unit"] for record in journal.records]


def write(path, units, sealed=None, boot="b1"):
    with Journal(path, {"the source": "x"}, boot) as journal:
        for at, unit in enumerate(units):
            journal.append({"unit": unit})
            if sealed == at + 1:
                journal.seal(sealed)


def test_a_killed_process_loses_nothing_and_a_machine_that_went_down_what_was_not_flushed(tmp_path):
    path = tmp_path / "j"
    write(path, range(5), sealed=3)
    assert records(path) == [0, 1, 2, 3, 4]
    assert records(path, boot="b2") == [0, 1, 2]
    assert records(path, boot="b2") == [0, 1, 2]
    write(path, [7, 8], boot="b2")
    assert records(path, boot="b2") == [0, 1, 2, 7, 8]
    assert records(path, boot="") == [0, 1, 2]  # where starts of a machine cannot be told apart


def test_at_every_cut_what_is_whole_counts(tmp_path):
    path = tmp_path / "j"
    write(path, range(4), sealed=2)
    data = path.read_bytes()
    for length in range(0, len(data) + 1, 5):
        path.write_bytes(data[:length])
        found = records(path)
        assert found == list(range(len(found)))
        whole = data[:length].split(b"\n")[:-1]
        assert len(found) == sum(b'"unit"' in line for line in whole)
        write(path, [9])
        assert records(path) == [*found, 9]


def test_another_conversion_is_refused_by_what_differs(tmp_path):
    path = tmp_path / "j"
    write(path, [0])
    with pytest.raises(CheckpointError, match="the source has changed since"):
        records(path, about={"the source": "y"})


def test_two_conversions_at_once_are_refused(tmp_path):
    with (
        Journal(tmp_path / "j", {}, "b"),
        pytest.raises(CheckpointError, match="another process is writing"),
    ):
        Journal(tmp_path / "j", {}, "b")
    Journal(tmp_path / "j", {}, "b").close()
