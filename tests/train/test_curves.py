"""Curves from metrics.jsonl: what is read, what is chosen, what matplotlib is given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from dsx.config.schema import WandbConfig
from dsx.errors import ConfigError, DataError
from dsx.train import curves
from dsx.train.tracking import Tracker


@pytest.fixture
def run_folder(tmp_path):
    """Make a folder with a metrics.jsonl of these (step, metrics) records, as training writes it."""

    def make(name, *records):
        with Tracker(tmp_path / name, WandbConfig(), run_config={}) as tracker:
            for step, metrics in records:
                tracker.log(step, metrics)
        return tmp_path / name

    return make


def training(step, loss):
    return step, {"train/loss": loss, "train/grad_norm_preclip": 0.5, "perf/tokens_per_second_global": 1e4}


def test_reads_what_the_tracker_writes(run_folder):
    folder = run_folder(
        "a", training(1, 5.5), (2, {"train/loss": math.nan}), (2, {"eval/loss": 5.25}), training(3, math.inf)
    )
    (run,) = curves.read_runs([folder])
    assert run.name == "a"
    assert run.series["eval/loss"] == curves.Series((2,), (5.25,))
    loss = run.series["train/loss"]
    assert loss.steps == (1, 2, 3)
    assert loss.values[0] == 5.5
    assert math.isnan(loss.values[1])
    assert loss.values[2] == math.inf
    assert curves.STEP not in run.series


def test_names_tell_runs_apart(run_folder):
    folders = [run_folder(name, training(1, 5.0)) for name in ("x/run", "y/run", "y/other")]
    assert [run.name for run in curves.read_runs(folders)] == ["x/run", "y/run", "y/other"]
    assert [run.name for run in curves.read_runs(folders[1:])] == ["run", "other"]
    metrics_file = folders[0] / "metrics.jsonl"
    assert curves.read_runs([metrics_file])[0].series == curves.read_runs(folders[:1])[0].series


def test_a_torn_last_line_is_passed_over(run_folder):
    folder = run_folder("a", training(1, 5.5), training(2, 5.0))
    file = folder / "metrics.jsonl"
    file.write_text(file.read_text()[:-20])
    assert curves.read_series(file)["train/loss"].steps == (1,)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (None, "no such file"),
        ("", "no records yet"),
        ('{"train/step": 1, "train/lo', "no records yet"),
        ('{"train/lo\n{"train/step": 2, "train/loss": 1.0}\n', "line 1: not a record"),
        ('{"train/loss": 1.0}\n{"train/step": 2, "train/loss": 1.0}\n', "line 1: not a record"),
        ('{"train/step": 1, "train/loss": "low"}\n{"train/step": 2}\n', "line 1: not a record"),
    ],
)
def test_bad_files_are_refused(tmp_path, content, what):
    file = tmp_path / "metrics.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(DataError, match=what) as refused:
        curves.read_runs([tmp_path])
    assert str(file) in str(refused.value)


def test_a_folder_of_runs_is_refused_with_their_names(run_folder):
    folder = run_folder("a", training(1, 5.0))
    with pytest.raises(DataError) as refused:
        curves.read_runs([folder.parent])
    assert str(folder) in refused.value.fix


def test_usual_panels_are_those_that_a_run_has(run_folder):
    runs = curves.read_runs([run_folder("a", (1, {"train/loss": 5.0, "train/lr": 0.1}))])
    assert [panel.metric for panel in curves.choose(runs, [])] == ["train/loss"]
    assert [panel.metric for panel in curves.choose(runs, ["train/lr", "train/loss", "train/lr"])] == [
        "train/lr",
        "train/loss",
    ]
    with pytest.raises(ConfigError, match=r"use one of: train/loss, train/lr\.") as refused:
        curves.choose(runs, ["loss"])
    assert refused.value.where == "--metric loss"


def test_usual_panels_have_the_names_that_training_reports():
    """A panel whose metric was renamed would silently never be drawn."""
    from dsx.train.progress import EvaluationReport, RunRates, StepReport

    rates = RunRates(steps=1, world_size=1, tokens_per_step=1, flops_per_token=1.0)
    step = StepReport(rates=rates, step=1, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, step_seconds=1.0)
    reported = {*step.metrics(), *EvaluationReport(step=1, steps=1, loss=1.0).metrics()}
    drawn = {name for panel in curves.PANELS for name in (panel.metric, panel.points) if name}
    assert drawn <= reported


def test_the_figure_holds_the_numbers(run_folder):
    pytest.importorskip("matplotlib")
    one = run_folder("one", training(1, 5.5), training(2, 4.5), (2, {"eval/loss": 4.0}))
    two = run_folder("two", training(1, 5.5), training(2, math.nan), training(3, 4.25))
    runs = curves.read_runs([one, two])
    figure = curves.draw(runs, curves.choose(runs, []))
    loss, norm, rate = figure.axes
    titles = [panel.title for panel in curves.PANELS]
    titles[0] += " (1 value not finite)"
    assert [axes.get_title(loc="left") for axes in figure.axes] == titles
    first, held_out, second = ((list(line.get_xdata()), list(line.get_ydata())) for line in loss.lines)
    assert first == ([1, 2], [5.5, 4.5])
    assert held_out == ([2], [4.0])
    assert second[0] == [1, 2, 3]
    assert math.isnan(second[1][1])
    assert loss.lines[0].get_color() == loss.lines[1].get_color() != loss.lines[2].get_color()
    assert loss.lines[0].get_linewidth() > loss.lines[2].get_linewidth()  # shows where the second covers it
    assert [line.get_color() for line in norm.lines] == [loss.lines[0].get_color(), loss.lines[2].get_color()]
    assert rate.get_ylim()[0] == 0
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]
    assert [text.get_text() for text in loss.get_legend().get_texts()] == ["train", "held out"]


@pytest.mark.parametrize(("smallest", "scale"), [(0.1, "log"), (1.0, "linear"), (-0.1, "linear")])
def test_wide_ranges_are_logarithmic(run_folder, smallest, scale):
    pytest.importorskip("matplotlib")
    runs = curves.read_runs([run_folder("a", (1, {"norm": 10.0}), (2, {"norm": smallest}))])
    (axes,) = curves.draw(runs, curves.choose(runs, ["norm"])).axes
    assert axes.get_yscale() == scale


def test_a_metric_without_a_finite_value_is_drawn_empty(run_folder, tmp_path):
    pytest.importorskip("matplotlib")
    runs = curves.read_runs([run_folder("a", (1, {"train/loss": math.nan}))])
    curves.draw(runs, curves.choose(runs, [])).savefig(tmp_path / "empty.png")
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_records_of_other_programs_are_no_surprise(tmp_path):
    """Only train/step is required; anything numeric is a metric."""
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"train/step": 7, "mine": 1, "flag": True}) + "\n")
    (run,) = curves.read_runs([Path(tmp_path)])
    assert run.series == {"mine": curves.Series((7,), (1.0,)), "flag": curves.Series((7,), (1.0,))}
    assert [panel.metric for panel in curves.choose([run], [])] == ["flag", "mine"]
