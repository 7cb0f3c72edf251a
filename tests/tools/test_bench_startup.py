"""The benchmark of starts: what it launches gets to a first step, and what it computes is of 1,024 ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "bench_startup.py"


def figures(file: Path, *words: str) -> dict:
    command = [sys.executable, str(TOOL), "--json", str(file), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text())


def test_starts_are_measured_beside_stock(tmp_path):
    rows = figures(tmp_path / "starts.json", "--ranks", "1", "--rounds", "1")["starts"]
    assert {row["program"] for row in rows} == {"dsx", "stock DeepSpeed"}
    for row in rows:
        assert row["wall_seconds"] > 0
        assert row["cpu_seconds"] > 1  # three processes import torch


def test_a_rank_of_many_makes_its_own_groups_alone(tmp_path):
    found = figures(tmp_path / "paper.json", "--paper")["paper"]
    layout, ranks = found["layout"], found["ranks"]
    tensor, pipeline = layout["dsx.parallel.tensor"], layout["dsx.parallel.pipeline"]
    replicas = ranks // (tensor * pipeline)
    assert found["number of groups"] == 8
    # Of each axis every group, whoever is in it: deepspeed/runtime/pipe/topology.py, PipelineParallelGrid.
    assert (
        found["number of stock groups"] == replicas + tensor * pipeline + ranks // pipeline + ranks // tensor
    )
