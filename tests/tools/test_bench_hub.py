"""The hub benchmark runs, and all engines of a table train alike."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "bench_hub.py"
SIZES = {"hidden": 32, "blocks": 4, "length": 16, "rounds": 2, "steps": 1}


@pytest.mark.parametrize(
    ("part", "family", "tables"), [("implementations", "llama", 4), ("autotp", "qwen3", 1)]
)
def test_engines_train_alike(part, family, tables, tmp_path):
    """Losses of every step, and a figure for every turn but the first."""
    file = tmp_path / "figures.json"
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(TOOL), "--part", part, "--family", family, *sizes, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_text())["tables"]
    assert len(found) == tables
    for table in found:
        assert table["refused"] == {}
        assert len(table["engines"]) == 2
        for engine in table["engines"]:
            assert engine["largest_relative_loss_difference"] < 1e-5
            assert len(engine["step_seconds"]) == SIZES["rounds"]
            assert engine["peak_bytes"] > 0


def test_what_deepspeed_does_not_take_is_told(tmp_path):
    """Its plan for experts has styles that AutoTP refuses; dsx's figures stand alone."""
    file = tmp_path / "figures.json"
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(TOOL), "--family", "mixtral", *sizes, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (table,) = json.loads(file.read_text())["tables"]
    assert "moe_tp_experts" in table["refused"]["DeepSpeed AutoTP"]
    assert [engine["engine"] for engine in table["engines"]] == ["transformers"]
