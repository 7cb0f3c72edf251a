"""The planner's benchmark runs, prints the paper's tables and checks itself."""

from __future__ import annotations

import json

import bench_planner


def test_prints_checks_and_writes(monkeypatch, capsys, tmp_path):
    file = tmp_path / "figures.json"
    arguments = ["bench_planner.py", "--choices", "none", "--check", "--json", str(file)]
    monkeypatch.setattr("sys.argv", arguments)
    assert bench_planner.main() == 0
    out = capsys.readouterr().out
    assert "all thresholds are met" in out
    assert out.count("the paper: ") == 8
    found = json.loads(file.read_text())
    assert found["mean_error"] <= 0.10
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
    monkeypatch.setattr(bench_planner, "MOST_ERROR", 0.001)
    for part in ("table_2", "later", "_figures"):
        monkeypatch.setattr(bench_planner, part, list)
    monkeypatch.setattr("sys.argv", ["bench_planner.py", "--choices", "none", "--check"])
    assert bench_planner.main() == 1
    assert "missed: mean error of the seven rows" in capsys.readouterr().out
