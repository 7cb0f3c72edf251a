"""The planner's benchmark runs, prints the paper's tables and checks itself."""

from __future__ import annotations

import json

import bench_planner
import pytest
from planner_bench import fit
from planner_bench.fit import rows


def some_rows(generation, **kinds):
    """The first row that is fitted and the first two that are not: the others take the same way."""
    every = list(rows(generation, **kinds))
    return [row for row in every if row.is_fitted][:1] + [row for row in every if not row.is_fitted][:2]


@pytest.mark.slow
def test_prints_checks_and_writes(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(fit, "rows", some_rows)
    file = tmp_path / "figures.json"
    arguments = ["bench_planner.py", "--choices", "none", "--check", "--json", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    assert bench_planner.main() == 0
    out = capsys.readouterr().out
    assert "all thresholds are met" in out
    assert out.count("the paper: ") == 8
    found = json.loads(file.read_text())
    assert [each["held_out"] for each in found["generations"].values()] == [2, 2]
    assert "llm-foundry" in out
    assert "fp8 only" in out
    assert found["context"]["held_out"] == 1
    assert [row["published"] for row in found["table_1"]] == [
        137,
        138,
        142,
        135,
        138,
        140,
        148,
        155,
        163,
        163,
    ]
    assert sum(row["fitted"] for row in found["table_1"]) == 3
    assert len(found["table_2"]) == 12


def test_a_missed_threshold_is_exit_code_1(monkeypatch, capsys):
    monkeypatch.setattr(fit, "rows", some_rows)
    monkeypatch.setattr(bench_planner, "MOST_ERROR", 0.0001)
    for part in ("table_1", "table_2", "later", "_figures"):
        monkeypatch.setattr(bench_planner, part, list)
    monkeypatch.setattr("sys.argv", ["bench_planner.py", "--choices", "none", "--check"])
    assert bench_planner.main() == 1
    assert "missed: A100, H100" in capsys.readouterr().out
