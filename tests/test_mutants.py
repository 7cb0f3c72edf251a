"""The mutator of the tests that spoil files: the same seed spoils alike, and few mutants are as they were."""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest
import torch
from safetensors.torch import save_file

import mutant_runs
import mutants


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good") / "files"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"layers": 3, "names": ["a", "b"], "deep": {"x": 1.5}}))
    save_file({"a": torch.ones(3), "b": torch.zeros(2, 2)}, folder / "model.safetensors")
    torch.save({"step": 3, "weights": {"a": torch.ones(3)}}, folder / "states.pt")
    return folder


def _spoilt(good, folder, seed):
    shutil.copytree(good, folder)
    told = mutants.mutate(folder, seed)
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and not p.is_symlink()}
    return told, files


def test_a_seed_gives_one_mutant_and_most_differ_from_the_original(good, tmp_path):
    original = {path.name: path.read_bytes() for path in good.iterdir()}
    told, changed = set(), 0
    for seed in range(60):
        one = _spoilt(good, tmp_path / f"{seed}", seed)
        assert one == _spoilt(good, tmp_path / f"{seed}-again", seed)
        told.add(one[0].partition(": ")[2])
        changed += one[1] != original
    assert changed >= 50
    assert len(told) >= 50


def test_what_a_mutant_does_to_its_reader_is_told(good, tmp_path):
    def attempt(folder, seed):
        if seed == 0:
            raise ValueError("expected")
        if seed == 1:
            raise KeyError("not expected")
        if seed == 2:
            return str(len(bytearray(1 << 28)))
        if seed == 3:
            bytearray(1 << 31)
        if seed == 4:
            time.sleep(60)
        if seed == 5:
            os._exit(7)
        return "fine"

    found = list(mutant_runs.outcomes(range(7), good, tmp_path, attempt, allowed=(ValueError,), seconds=1))
    assert [one.good for one in found] == [True, False, True, False, False, False, True]
    kinds = [one.kind.partition(":")[0] for one in found]
    assert kinds[:5] == ["ValueError", "KeyError", str(1 << 28), "MemoryError", "TookTooLong"]
    assert "the process ended" in kinds[5]
    assert kinds[6] == "fine"
    assert mutant_runs.counted(found)["BAD"] == 4
