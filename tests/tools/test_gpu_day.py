"""The GPU day runs on a CPU from its first case to its report, and outlives the workers that it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import gpu_day
import pytest
from gpu_sections import measured, worker
from gpu_sections.report import as_markdown

TOOL = Path(__file__).parents[2] / "tools" / "gpu_day.py"
FILES = {*(f"{name}.json" for name in gpu_day.SECTIONS), "report.md"}


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--dry", "--out", str(out), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)


@pytest.fixture(scope="module")
def day(tmp_path_factory) -> Path:
    """Everything, in two runs."""
    out = tmp_path_factory.mktemp("day")
    assert run(out, "--minutes", "0.1").returncode == 3  # no time for anything
    done = run(out)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def cases(out: Path, section: str) -> dict[str, dict]:
    return json.loads((out / f"{section}.json").read_text())["cases"]


@pytest.mark.slow
def test_every_section_has_figures_and_nothing_failed(day):
    assert {path.name for path in day.iterdir()} == FILES
    for case in gpu_day.all_cases(dry=True):
        result = cases(day, case.section)[case.name]
        assert "failed" not in result, (case.name, result)
    (training,) = [result for name, result in cases(day, "ranks").items() if name != gpu_day.EXCHANGES]
    assert training["backend"] == "gloo"
    assert training["losses"] < 1e-5
    (memory,) = cases(day, "memory").values()
    assert memory["peak"] == pytest.approx(memory["estimate"], rel=0.01)
    assert memory["stock"] > 0
    low = cases(day, "precision")["bf16, ZeRO-1"]
    assert 0 < low["loss_difference"] < 1e-2
    half = cases(day, "precision")["fp16, ZeRO-1"]
    assert half["scales"][0] == half["scales"][1]
    assert half["skipped"][0] == half["skipped"][1] > 0


def test_each_engine_of_the_speed_section_is_the_one_that_its_case_names(monkeypatch, tmp_path):
    asked = []

    def noted(who):
        def make(*_):
            asked.append(who)
            raise InterruptedError

        return make

    for who in ("ours", "stock"):
        monkeypatch.setattr(measured, who, noted(who))
    monkeypatch.setenv("WORLD_SIZE", "1")
    (config,) = (case.arguments["config"] for case in gpu_day.all_cases(dry=True) if case.name == "tiny: dsx")
    real = [case for case in gpu_day.all_cases(dry=False) if case.call.endswith("measured:speed")]
    for engine in dict.fromkeys(case.arguments["engine"] for case in real):
        place = worker.Place(dry=True, rank=0, ranks=1, backend="gloo", folder=tmp_path)
        with pytest.raises(InterruptedError):
            measured.speed(place, config=config, engine=engine, warm_up=1, steps=1)
        assert asked.pop() == ("ours" if engine.startswith("dsx") else "stock")


@pytest.mark.slow
def test_the_report_has_every_figure_beside_its_peer(day):
    text = (day / "report.md").read_text()
    mine, theirs = (cases(day, "speed")[f"tiny: {engine}"] for engine in ("dsx", "Hugging Face + DeepSpeed"))
    ratio = mine["tokens_per_second"] / theirs["tokens_per_second"]
    (row,) = [line for line in text.splitlines() if line.startswith("| tiny: dsx |")]
    assert f"| {mine['tokens_per_second']:,.0f} | {ratio:.3f} |" in row
    assert f"| {1000 * mine['predicted_seconds']:.1f} |" in row
    assert "0 of them failed, 0 are left" in text


@pytest.mark.slow
def test_what_is_done_is_not_done_again(day, tmp_path):
    """Nor from a copy, as from a machine that is gone."""
    before = {path.name: path.read_text() for path in day.glob("*.json")}
    done = run(tmp_path / "next", "--resume", str(day))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert {path.name: path.read_text() for path in (tmp_path / "next").glob("*.json")} == before


def test_a_name_is_one_case():
    for dry in (True, False):
        names = [case.name for case in gpu_day.all_cases(dry=dry)]
        assert len(set(names)) == len(names)


def crash(_place: worker.Place) -> worker.Json:
    print("the last words", flush=True)
    os.abort()


def hang(_place: worker.Place) -> worker.Json:
    time.sleep(600)
    raise AssertionError


def fail(_place: worker.Place) -> worker.Json:
    raise ValueError("not so")


def answer(place: worker.Place) -> worker.Json:
    return {"rank": place.rank}


def test_a_case_that_ends_its_worker_costs_itself_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    calls = {"well": answer, "crashes": crash, "fails": fail, "hangs": hang, "is well again": answer}
    todo = [
        worker.Case(
            section="correctness",
            name=name,
            call=f"{Path(__file__).stem}:{call.__name__}",
            arguments={},
            seconds=1.0 if call is hang else 60.0,
        )
        for name, call in calls.items()
    ]
    found = gpu_day.Day(tmp_path, tmp_path, dry=True)
    gpu_day.run_cases(found, todo, ends_at=time.time() + 120)
    results = gpu_day.Day(tmp_path, tmp_path, dry=True).sections["correctness"]
    assert list(results) == list(calls)
    assert results["well"]["rank"] == results["is well again"]["rank"] == 0
    assert results["crashes"]["failed"] == "its process died"
    assert "the last words" in results["crashes"]["trace"]
    assert results["fails"]["failed"] == "ValueError: not so"
    assert results["hangs"]["failed"] == "not done in 1 s"
    report = as_markdown(found.sections, remaining=0, seconds=1.0, command=[])
    assert "5 cases have a result, 3 of them failed" in report
    assert "- **correctness: fails**: ValueError: not so" in report
    assert found.left(todo, again=False) == []
    assert [case.name for case in found.left(todo, again=True)] == ["crashes", "fails", "hangs"]


@pytest.mark.parametrize(
    ("kept", "words"),
    [('{"dry": false, "cases": {}}', "results of a real run"), ("half a fi", "not readable")],
)
def test_what_another_run_has_written_is_not_overwritten(tmp_path, kept, words):
    (tmp_path / "speed.json").write_text(kept)
    done = run(tmp_path, "--only", "machine", "--minutes", "0.1")
    assert done.returncode == 2
    assert words in done.stdout
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("speed.json", kept)]


def test_a_folder_to_resume_from_that_is_not_there_is_refused(tmp_path):
    done = run(tmp_path / "out", "--resume", str(tmp_path / "misspelt"), "--minutes", "0.1")
    assert done.returncode == 2
    assert "misspelt" in done.stdout
    assert not (tmp_path / "out").exists()
