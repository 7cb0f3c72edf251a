"""The tokens/s benchmark runs, and its engines train alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "bench_tokens.py"


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--zero=0,3", "--plain"], ["--zero=1"]])
def test_engines_train_alike(tmp_path: Path, options: list[str]) -> None:
    file = tmp_path / "figures.json"
    command = [sys.executable, str(TOOL), "--size=tiny", "--sequence-length=16", "--ranks=2", "--rounds=2"]
    done = subprocess.run(
        [*command, *options, f"--json={file}"], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    for run in json.loads(file.read_text()):
        first = run["losses"]["dsx"]
        assert len(run["losses"]) == (6 if "--plain" not in options else 3)
        for name, losses in run["losses"].items():
            assert losses == pytest.approx(first, rel=1e-5), name
            assert len(run["wall"][name]) == len(run["cpu"][name]) == 2
            assert name in done.stdout
