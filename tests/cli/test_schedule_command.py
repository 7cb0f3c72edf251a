"""dsx schedule: every name, every format, options, files."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from dsx.schedules.builders import NAMES, build, default_chunks, divides_backward
from dsx.schedules.program import load

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
