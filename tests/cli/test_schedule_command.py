"""dsx schedule: every name, every format, options, files; the ranking of measured layers; refusals."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dsx.planner.choose import choose
from dsx.planner.layout import Space
from dsx.schedules.builders import NAMES, build, default_chunks, divides_backward
from dsx.schedules.program import load
from loaded import DSX, HEAVY, loaded_by
from planner.profiles import cost, profile

COMMAND = ("schedule",)

SIZE = ("--stages", 4, "--micro-batches", 8)


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_is_printed_and_read_back(dsx, name):
    code, out, err = dsx(name, *SIZE, "--format", "csv")
    assert (code, err) == (0, "")
    assert load(out, name=name) == build(name, 4, default_chunks(name), 8)
    code, out, _ = dsx(name, *SIZE)
    assert code == 0
    assert "rank 3" in out
    assert ("W1: the weights' gradients" in " ".join(out.split())) == divides_backward(name)
    assert max(map(len, out.splitlines())) <= 80


def test_pictures_and_traces_go_to_files(dsx, tmp_path):
    for style in ("svg", "html", "perfetto", "table", "json"):
        path = tmp_path / style
        assert dsx("zbv", *SIZE, "--format", style, "--output", path) == (0, f"wrote {path}\n", "")
    assert ET.fromstring((tmp_path / "svg").read_text()).tag.endswith("svg")
    assert (tmp_path / "html").read_text().startswith("<!doctype html>")
    assert len(json.loads((tmp_path / "perfetto").read_text())["traceEvents"]) > 3 * 4 * 2 * 8
    assert json.loads((tmp_path / "json").read_text())["placement"] == "v"
    assert "bubble: 6.2% of the ideal time" in (tmp_path / "table").read_text()


def test_a_file_that_cannot_be_written_is_one_message(dsx, tmp_path):
    code, out, err = dsx("zbv", *SIZE, "--format", "svg", "--output", tmp_path / "absent" / "x.svg")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "absent/x.svg" in err


def test_group_size_warm_up_and_wire(dsx):
    def facts(*options):
        code, out, _ = dsx("interleaved", "--stages", 4, "--micro-batches", 16, "--format", "json", *options)
        assert code == 0
        return json.loads(out)

    usual, larger = facts("--wire", 0.5), facts("--wire", 0.5, "--group-size", 8, "--warmup", 3)
    assert larger["bubble_over_ideal"] < usual["bubble_over_ideal"]
    assert max(larger["peak_activations"]) > max(usual["peak_activations"])
    assert facts()["bubble_over_ideal"] < usual["bubble_over_ideal"]


def test_an_option_of_another_schedule_is_refused(dsx):
    code, out, err = dsx("1f1b", *SIZE, "--group-size", 4)
    assert (code, out) == (1, "")
    assert "group_size = 4" in err
    assert "interleaved" in err


def test_a_file_is_checked_and_drawn(dsx, tmp_path):
    path = tmp_path / "mine.csv"
    text = build("zbv", 4, 2, 8).to_csv()
    path.write_text(text)
    assert dsx(path, "--format", "csv") == (0, text, "")
    code, out, _ = dsx(path)
    assert code == 0
    assert "bubble: 6.2% of the ideal time" in out
    path.write_text(text.replace("3F2,", "", 1))
    code, out, err = dsx(path)
    assert (code, out) == (1, "")
    assert "mine.csv, rank 3: it lacks 3F2" in err
    assert "drop the other numbers" in dsx(path, "--stages", 4)[2]
    assert "absent.csv" in dsx(tmp_path / "absent.csv")[2]
    assert "--stages" in dsx("zbv", "--micro-batches", 4)[2]
    assert "--effort 1.0: it says nothing to dsx schedule zbv" in dsx("zbv", *SIZE, "--effort", 1)[2]
    assert "one of gpipe" in dsx("zbw", *SIZE)[2]


@pytest.mark.parametrize("name", [*NAMES, "auto", "search"])
def test_a_step_that_no_run_has_is_refused_at_once(dsx, name):
    code, out, err = dsx(name, "--stages", 100_000, "--micro-batches", 100_000)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("dsx: --stages 100000 --micro-batches 100000")
    assert "0,000 forwards, of which at most 1,048,576 are laid out" in err


MEASURED = profile(
    [cost(0.003, kept_bytes=12 << 20, pending_bytes=8 << 20, boundary_bytes=1000)] * 10,
    latency_seconds=1e-5,
    bytes_per_second=1e9,
)
MEASURED_SIZE = ("--stages", 2, "--micro-batches", 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved profile."""
    file = tmp_path / "profile.json"
    file.write_text(MEASURED.to_json())
    return file


def test_the_table_ranks_what_choose_ranks(dsx, path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # in 80 it goes on below itself
    code, out, _ = dsx("auto", "--profile", path, *MEASURED_SIZE)
    ranking = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space())
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == ["step", "bubble", "activations", "layers", "per", "virtual", "stage"]
    assert lines[1].startswith(ranking.chosen.label)
    assert f"{1000 * ranking.chosen.cut.step_seconds:.4g} ms" in lines[1]
    for line, other in zip(lines[2:14], ranking.next_best(12), strict=True):
        assert line.startswith(other.label)
        assert line.endswith(ranking.reason(other))
    assert lines[-1] == "measured on CPU, fp32, micro-batches of 1"


def test_json(dsx, path):
    facts = json.loads(dsx("auto", "--profile", path, *MEASURED_SIZE, "--format", "json")[1])
    ranking = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space())
    assert facts["chosen"]["step_seconds"] == ranking.chosen.cut.step_seconds
    assert facts["chosen"]["stage_bounds"] == list(ranking.chosen.cut.stage_map.bounds)
    assert len(facts["others"]) == len(ranking.others)


def test_csv_is_the_chosen_schedule(dsx, path):
    text = dsx("zbv", "--profile", path, *MEASURED_SIZE, "--format", "csv")[1]
    chosen = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space(names=("zbv",))).chosen
    assert load(text, name="zbv").rows == chosen.cut.schedule.rows


def test_svg_is_in_milliseconds(dsx, path):
    text = dsx("zbv", "--profile", path, *MEASURED_SIZE, "--format", "svg")[1]
    ET.fromstring(text)
    chosen = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space(names=("zbv",))).chosen
    assert f"step: {1000 * chosen.cut.step_seconds:.4g} ms" in text


def test_perfetto_is_in_seconds_as_ever(dsx, path):
    trace = json.loads(dsx("zbv", "--profile", path, *MEASURED_SIZE, "--format", "perfetto")[1])
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    chosen = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space(names=("zbv",))).chosen
    assert max(ends) == pytest.approx(1e6 * chosen.cut.step_seconds, rel=1e-3)  # microseconds


def test_cap(dsx, path):
    code, out, _ = dsx("auto", "--profile", path, *MEASURED_SIZE, "--activation-gib", 0.12)
    assert code == 0
    assert "> 122.88 MiB cap" in out
    code, _, err = dsx("auto", "--profile", path, *MEASURED_SIZE, "--activation-gib", 0.001)
    assert code == 1
    assert "the nearest are" in err


def test_fixed_chunks(dsx, path):
    out = dsx("auto", "--profile", path, *MEASURED_SIZE, "--chunks", 2, "--format", "json")[1]
    facts = json.loads(out)
    assert {choice["chunks"] for choice in (facts["chosen"], *facts["others"])} == {2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("auto", *MEASURED_SIZE), "give --profile"),
        (("1f1b", *MEASURED_SIZE, "--activation-gib", 2), "--activation-gib: nothing is measured"),
        (("auto", "--profile", "PATH", "--stages", 2), "--micro-batches: it is needed"),
        (("auto", "--profile", "PATH", *MEASURED_SIZE, "--wire", 0.5), "--wire 0.5: the profile says"),
        (("magic", "--profile", "PATH", *MEASURED_SIZE), "schedule 'magic': not a schedule to choose"),
        (("auto", "--profile", "nowhere.json", *MEASURED_SIZE), "--profile nowhere.json: No such file"),
    ],
)
def test_refusals(dsx, path, arguments, said):
    code, out, err = dsx(*(path if item == "PATH" else item for item in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert "Fix: " in err


def test_without_torch(path):
    """Nothing but arithmetic: it starts in no time on a machine without torch."""
    assert not loaded_by(DSX, "schedule", "auto", "--profile", path, *MEASURED_SIZE)[1] & HEAVY
