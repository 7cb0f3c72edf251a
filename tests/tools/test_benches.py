"""Benchmarks run as programs; what they time is the same training, or conversion, in every engine."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def bench(folder: Path, tool: str, *words: str, **sizes: float) -> tuple[Any, str]:
    """What ``tools/bench_TOOL.py`` writes as JSON, and what it prints."""
    file = folder / "figures.json"
    command = [sys.executable, str(TOOLS / f"bench_{tool}.py"), f"--json={file}", *words]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--zero=0,3", "--plain"], ["--zero=1"]])
def test_tokens_engines_train_alike(tmp_path: Path, options: list[str]) -> None:
    sizes = {"sequence_length": 16, "ranks": 2, "rounds": 2}
    found, said = bench(tmp_path, "tokens", "--size=tiny", *options, **sizes)
    for run in found:
        first = run["losses"]["dsx"]
        assert len(run["losses"]) == (6 if "--plain" not in options else 3)
        for name, losses in run["losses"].items():
            assert losses == pytest.approx(first, rel=1e-5), name
            assert len(run["wall"][name]) == len(run["cpu"][name]) == 2
            assert name in said


@pytest.mark.slow
def test_context_axes_train_alike(tmp_path: Path) -> None:
    """With grouped queries; what torch's axis has no kernel for is named with its error."""
    (run,), said = bench(tmp_path, "context", lengths=64, kv_heads=2, rounds=2)
    first = run["losses"]["transformers, one process"]
    assert len(run["losses"]) == 9
    for name, losses in run["losses"].items():
        assert losses == pytest.approx(first, rel=1e-5), name
    assert {*run["stopped"]} == {"torch, allgather", "torch, alltoall"}
    assert "does not have a sharding strategy" in said


@pytest.mark.slow
def test_every_contender_converts_the_same_checkpoint(tmp_path: Path) -> None:
    """What dsx made in it is what DeepSpeed saved."""
    report, said = bench(tmp_path, "reshard", f"--folder={tmp_path}", parameters=1e5, width=64, runs=1)
    rows = {name: row[0] for name, row in report["rounds"].items()}
    parameters = 2 * 64 * 256 * 3  # three pairs of layers come closest to 1e5
    assert rows["dsx"]["ideal_write_bytes"] >= rows["dsx"]["ideal_read_bytes"] == 14 * parameters
    assert rows["dsx"]["checks"] > 0
    assert rows["copy"]["output_bytes"] == report["source_bytes"]
    assert rows["ds_to_universal"]["output_bytes"] > 12 * parameters
    assert "dsx " in said
    assert not list(tmp_path.glob("bench-reshard-*"))


@pytest.mark.slow
def test_starts_are_measured_beside_stock(tmp_path: Path) -> None:
    found, _ = bench(tmp_path, "startup", "--ranks=1", rounds=1)
    assert {row["program"] for row in found["starts"]} == {"dsx", "stock DeepSpeed"}
    for row in found["starts"]:
        assert row["wall_seconds"] > 0
        assert row["cpu_seconds"] > 1  # three processes import torch


@pytest.mark.slow
def test_a_rank_of_many_makes_its_own_groups_alone(tmp_path: Path) -> None:
    found = bench(tmp_path, "startup", "--paper")[0]["paper"]
    layout, ranks = found["layout"], found["ranks"]
    tensor, pipeline = layout["dsx.parallel.tensor"], layout["dsx.parallel.pipeline"]
    replicas = ranks // (tensor * pipeline)
    assert found["number of groups"] == 8
    # Of each axis every group, whoever is in it: deepspeed/runtime/pipe/topology.py, PipelineParallelGrid.
    assert (
        found["number of stock groups"] == replicas + tensor * pipeline + ranks // pipeline + ranks // tensor
    )


HUB = {"hidden": 32, "blocks": 4, "length": 16, "rounds": 2, "steps": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "family", "tables"), [("implementations", "llama", 4), ("autotp", "qwen3", 1)]
)
def test_engines_of_a_family_train_alike(part: str, family: str, tables: int, tmp_path: Path) -> None:
    """Losses of every step, and a figure for every turn but the first."""
    found = bench(tmp_path, "hub", "--part", part, "--family", family, **HUB)[0]["tables"]
    assert len(found) == tables
    for table in found:
        assert table["refused"] == {}
        assert len(table["engines"]) == 2
        for engine in table["engines"]:
            assert engine["largest_relative_loss_difference"] < 1e-5
            assert len(engine["step_seconds"]) == HUB["rounds"]
            assert engine["peak_bytes"] > 0


@pytest.mark.slow
def test_what_deepspeed_does_not_take_is_told(tmp_path: Path) -> None:
    """Its plan for experts has styles that AutoTP refuses; dsx's figures stand alone."""
    (table,) = bench(tmp_path, "hub", "--family", "mixtral", **HUB)[0]["tables"]
    assert "moe_tp_experts" in table["refused"]["DeepSpeed AutoTP"]
    assert [engine["engine"] for engine in table["engines"]] == ["transformers"]


ENGINE = {"hidden": 16, "blocks": 4, "sequence_length": 8, "micro_batches": 3, "rounds": 2, "steps": 1}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return bench(tmp_path_factory.mktemp("bench"), "engine", **ENGINE)


@pytest.mark.slow
def test_engines_train_alike(ran):
    """Losses of every step against stock DeepSpeed's."""
    (part,) = ran[0]["steps"]
    stock, *ours = part["engines"]
    assert stock["name"].startswith("stock DeepSpeed")
    assert len(ours) == 3
    assert all(engine["largest_relative_loss_difference"] < 1e-5 for engine in ours)


@pytest.mark.slow
def test_figures_are_of_the_turns(ran):
    (part,) = ran[0]["steps"]
    stock = part["engines"][0]["step_seconds"]
    for engine in part["engines"]:
        turns = engine["step_seconds"]
        assert len(turns) == ENGINE["rounds"]
        assert min(turns) > 0
        assert engine["median_step_seconds"] == statistics.median(turns)
        ratios = [ours / theirs for ours, theirs in zip(turns, stock, strict=True)]
        assert engine["median_ratio_to_stock"] == pytest.approx(statistics.median(ratios))
    # (p - 1) / m and (p - 1) / (v m), arXiv:2104.04473 section 2.2.
    assert [e["bubble_in_theory"] for e in part["engines"]] == pytest.approx([1 / 3, 1 / 3, 1 / 6, 1 / 3])


@pytest.mark.slow
def test_calls_are_measured_at_every_zero_stage(ran):
    calls = ran[0]["calls"]
    assert list(calls) == ["zero0", "zero1", "zero2", "zero3"]
    for stage in calls.values():
        added = stage["dsx_ms_per_call"] - stage["deepspeed_engine_ms_per_call"]
        assert stage["added_ms_per_call"] == pytest.approx(added)
        assert 0 < stage["deepspeed_engine_ms_per_call"] < 1000


@pytest.mark.slow
def test_the_report_prints_every_engine(ran):
    figures, text = ran
    assert all(f"\n{engine['name']} " in text for engine in figures["steps"][0]["engines"])
    assert f"deepspeed {figures['machine']['deepspeed']}" in text
