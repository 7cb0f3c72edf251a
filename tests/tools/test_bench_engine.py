"""The engine benchmark runs, and what it times is the same training in every engine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "bench_engine.py"
SIZES = {"hidden": 16, "blocks": 4, "sequence-length": 8, "micro-batches": 3, "rounds": 2, "steps": 1}


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[dict, str]:
    file = tmp_path_factory.mktemp("bench") / "figures.json"
    sizes = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, str(TOOL), *sizes, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


def test_engines_train_alike(ran):
    """Losses of every step against stock DeepSpeed's."""
    (part,) = ran[0]["steps"]
    stock, *ours = part["engines"]
    assert stock["name"].startswith("stock DeepSpeed")
    assert len(ours) == 3
    assert all(engine["largest_relative_loss_difference"] < 1e-5 for engine in ours)


def test_figures_are_of_the_turns(ran):
    (part,) = ran[0]["steps"]
    stock = part["engines"][0]["step_seconds"]
    for engine in part["engines"]:
        turns = engine["step_seconds"]
        assert len(turns) == SIZES["rounds"]
        assert min(turns) > 0
        assert engine["median_step_seconds"] == statistics.median(turns)
        ratios = [ours / theirs for ours, theirs in zip(turns, stock, strict=True)]
        assert engine["median_ratio_to_stock"] == pytest.approx(statistics.median(ratios))
    # (p - 1) / m and (p - 1) / (v m), arXiv:2104.04473 section 2.2.
    assert [e["bubble_in_theory"] for e in part["engines"]] == pytest.approx([1 / 3, 1 / 3, 1 / 6, 1 / 3])


def test_calls_are_measured_at_every_zero_stage(ran):
    calls = ran[0]["calls"]
    assert list(calls) == ["zero0", "zero1", "zero2", "zero3"]
    for stage in calls.values():
        added = stage["dsx_ms_per_call"] - stage["deepspeed_engine_ms_per_call"]
        assert stage["added_ms_per_call"] == pytest.approx(added)
        assert 0 < stage["deepspeed_engine_ms_per_call"] < 1000


def test_the_report_prints_every_engine(ran):
    figures, text = ran
    assert all(f"\n{engine['name']} " in text for engine in figures["steps"][0]["engines"])
    assert f"deepspeed {figures['machine']['deepspeed']}" in text
