"""dsx trace: every format, without torch, and files that are none."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from loaded import DSX, loaded_by
from traced import by_hand


@pytest.fixture
def step(tmp_path):
    path = tmp_path / "step7.json"
    path.write_text(by_hand().to_json())
    return path


COMMAND = ("trace",)


def test_table_and_json_are_printed(dsx, step):
    code, out, err = dsx(step)
    assert (code, err) == (0, "")
    assert "step       100.0 ms, simulated 97.00 ms (+3.1%)" in out
    code, out, _ = dsx(step, "--format", "json")
    assert (code, json.loads(out)["step"]) == (0, 7)


def test_pictures_and_traces_go_to_files(dsx, step, tmp_path):
    for style in ("svg", "html", "perfetto"):
        path = tmp_path / style
        assert dsx(step, "--format", style, "--output", path) == (0, f"wrote {path}\n", "")
    assert ET.fromstring((tmp_path / "svg").read_text()).tag.endswith("svg")
    assert (tmp_path / "html").read_text().startswith("<!doctype html>")
    names = {e["name"] for e in json.loads((tmp_path / "perfetto").read_text())["traceEvents"]}
    assert {"0F0", "1RECV_F1", "end of step"} <= names


def test_what_is_no_trace_is_one_message(dsx, step, tmp_path):
    code, out, err = dsx(tmp_path / "absent.json")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "absent.json: No such file" in err
    step.write_bytes(b"\xff\xfe\xff")
    code, _, err = dsx(step)
    assert (code, err.count("\n")) == (2, 1)
    assert "not text" in err
    step.write_text("{}")
    code, _, err = dsx(step)
    assert (code, err.count("\n")) == (2, 1)
    assert "not a trace" in err


def test_no_torch_is_needed(step):
    printed, loaded = loaded_by(DSX, "trace", step)
    assert "was waiting for" in printed
    assert "torch" not in loaded
