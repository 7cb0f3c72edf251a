"""dsx schedule auto: the ranking of measured layers, in every format, and refusals."""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dsx.planner.choose import choose
from dsx.planner.layout import Space
from dsx.schedules.program import load
from planner.profiles import cost, profile

MEASURED = profile(
    [cost(0.003, kept_bytes=12 << 20, pending_bytes=8 << 20, boundary_bytes=1000)] * 10,
    latency_seconds=1e-5,
    bytes_per_second=1e9,
)
SIZE = ("--stages", 2, "--micro-batches", 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A saved profile."""
    file = tmp_path / "profile.json"
    file.write_text(MEASURED.to_json())
    return file


COMMAND = ("schedule",)


def test_the_table_ranks_what_choose_ranks(dsx, path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # in 80 it goes on below itself
    code, out, _ = dsx("auto", "--profile", path, *SIZE)
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
    facts = json.loads(dsx("auto", "--profile", path, *SIZE, "--format", "json")[1])
    ranking = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space())
    assert facts["chosen"]["step_seconds"] == ranking.chosen.cut.step_seconds
    assert facts["chosen"]["stage_bounds"] == list(ranking.chosen.cut.stage_map.bounds)
    assert len(facts["others"]) == len(ranking.others)


def test_csv_is_the_chosen_schedule(dsx, path):
    text = dsx("zbv", "--profile", path, *SIZE, "--format", "csv")[1]
    chosen = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space(names=("zbv",))).chosen
    assert load(text, name="zbv").rows == chosen.cut.schedule.rows


def test_svg_is_in_milliseconds(dsx, path):
    text = dsx("zbv", "--profile", path, *SIZE, "--format", "svg")[1]
    ET.fromstring(text)
    chosen = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space(names=("zbv",))).chosen
    assert f"step: {1000 * chosen.cut.step_seconds:.4g} ms" in text


def test_perfetto_is_in_seconds_as_ever(dsx, path):
    trace = json.loads(dsx("zbv", "--profile", path, *SIZE, "--format", "perfetto")[1])
    ends = [event["ts"] + event["dur"] for event in trace["traceEvents"] if event.get("ph") == "X"]
    chosen = choose(MEASURED, num_ranks=2, num_micro_batches=4, space=Space(names=("zbv",))).chosen
    assert max(ends) == pytest.approx(1e6 * chosen.cut.step_seconds, rel=1e-3)  # microseconds


def test_cap(dsx, path):
    code, out, _ = dsx("auto", "--profile", path, *SIZE, "--activation-gib", 0.12)
    assert code == 0
    assert "> 122.88 MiB cap" in out
    code, _, err = dsx("auto", "--profile", path, *SIZE, "--activation-gib", 0.001)
    assert code == 1
    assert "the nearest are" in err


def test_fixed_chunks(dsx, path):
    out = dsx("auto", "--profile", path, *SIZE, "--chunks", 2, "--format", "json")[1]
    facts = json.loads(out)
    assert {choice["chunks"] for choice in (facts["chosen"], *facts["others"])} == {2}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("auto", *SIZE), "give --profile"),
        (("1f1b", *SIZE, "--activation-gib", 2), "--activation-gib: nothing is measured"),
        (("auto", "--profile", "PATH", "--stages", 2), "--micro-batches: it is needed"),
        (("auto", "--profile", "PATH", *SIZE, "--wire", 0.5), "--wire 0.5: the profile says"),
        (("magic", "--profile", "PATH", *SIZE), "schedule 'magic': not a schedule to choose"),
        (("auto", "--profile", "nowhere.json", *SIZE), "--profile nowhere.json: No such file"),
    ],
)
def test_refusals(dsx, path, arguments, said):
    code, out, err = dsx(*(path if item == "PATH" else item for item in arguments))
    assert (code, out) == (2, "")
    assert said in err
    assert "Fix: " in err


def test_without_torch(path):
    """Nothing but arithmetic: it starts in no time on a machine without torch."""
    code = (
        "import sys\n"
        "from dsx.cli.app import main\n"
        f"sys.argv = ['dsx', 'schedule', 'auto', '--profile', {str(path)!r}, '--stages', '2', "
        "'--micro-batches', '4']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\n"
        "heavy = {'torch', 'deepspeed', 'numpy', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy - {'pydantic'}, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
