"""The schedule benchmark runs, and its table has what each engine's schedule takes on paper."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsx.schedules.builders import Options, build
from dsx.schedules.simulate import Costs, simulate

pytestmark = pytest.mark.slow

TOOL = Path(__file__).parents[2] / "tools" / "bench_schedules.py"
FORWARD_MS = 1.0
OURS = {f"dsx {name}" for name in ("gpipe", "1f1b", "looped_bfs", "interleaved", "interleaved_zb")} | {
    f"dsx {name}" for name in ("zb_h1", "zbv", "v_half", "v_min", "dualpipev")
}
TORCH = {f"torch {name}" for name in ("gpipe", "1f1b", "looped_bfs", "interleaved", "interleaved_zb", "zbv")}


def run(folder: Path, *arguments: str) -> tuple[dict, str]:
    file = folder / "figures.json"
    command = [sys.executable, str(TOOL), *arguments, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(file.read_text()), done.stdout


@pytest.fixture(scope="module")
def virtual(tmp_path_factory) -> tuple[dict, str]:
    sizes = ("--ranks", "2", "--micro-batches", "p,2p", "--forward-ms", str(FORWARD_MS), "--wire", "0.25")
    return run(tmp_path_factory.mktemp("virtual"), *sizes, "--rounds", "1")


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> tuple[dict, str]:
    sizes = ("--real", "--micro-batches", "2", "--hidden", "16", "--sequence-length", "8", "--rounds", "1")
    return run(tmp_path_factory.mktemp("real"), *sizes, "--only", "1f1b,zbv")


def test_every_engine_runs_every_size_it_can(virtual):
    few, many = ({row["engine"] for row in table["rows"]} for table in virtual[0]["tables"])
    wide = {f"dsx {name} wide" for name in ("interleaved", "interleaved_zb", "zbv")}
    assert few == {"deepspeed 1f1b"} | TORCH | OURS | wide
    assert many == few | {"deepspeed dualpipev", "torch dualpipev"}  # these want m >= 2p
    for table in virtual[0]["tables"]:
        assert all(f"\n{row['engine']:<24} " in virtual[1] for row in table["rows"])


def test_simulations_are_the_theory(virtual):
    """arXiv:2104.04473 section 2.2 and arXiv:2401.10241, of a step of 3 F per micro-batch, p = 2."""
    for table in virtual[0]["tables"]:
        rows = {row["engine"]: row for row in table["rows"]}
        m, ideal = table["micro_batches"], 3 * FORWARD_MS / 1000 * table["micro_batches"]
        bubbles = {"gpipe": 1 / m, "1f1b": 1 / m, "looped_bfs": 1 / (2 * m), "interleaved": 1 / (2 * m)}
        for name, bubble in bubbles.items():
            for whose in ("torch", "dsx"):
                row = rows[f"{whose} {name}"]
                assert row["theory_seconds"] == pytest.approx(ideal * (1 + bubble))
                assert row["simulated_seconds"] == pytest.approx(ideal * (1 + bubble))
        for name, bubble in {"zb_h1": 1 / (3 * m), "interleaved_zb": 1 / (6 * m), "zbv": 1 / (6 * m)}.items():
            assert rows[f"dsx {name}"]["theory_seconds"] == pytest.approx(ideal * (1 + bubble))
            assert rows[f"dsx {name}"]["simulated_seconds"] == pytest.approx(ideal * (1 + bubble))


def test_wide_schedules_hide_wires_on_paper(virtual):
    few = {row["engine"]: row["wire"] for row in virtual[0]["tables"][1]["rows"]}
    for name in ("interleaved_zb", "zbv"):
        wide, plain = (few[f"dsx {name}{end}"]["simulated_wires_per_micro_batch"] for end in (" wide", ""))
        assert wide < plain


def test_figures_belong_together(virtual):
    for table in virtual[0]["tables"]:
        rows = {row["engine"]: row for row in table["rows"]}
        stock = rows["deepspeed 1f1b"]
        m, ideal = table["micro_batches"], 3 * FORWARD_MS / 1000 * table["micro_batches"]
        for row in rows.values():
            assert row["median_seconds"] > row["simulated_seconds"] >= ideal
            assert row["excess"] == pytest.approx(row["median_seconds"] / row["simulated_seconds"] - 1)
            assert row["bubble"] == pytest.approx(row["median_seconds"] / ideal - 1)
            assert row["speed"] == pytest.approx(stock["median_seconds"] / row["median_seconds"])
            wire = row["wire"]
            grown = wire["median_seconds"] - row["median_seconds"]
            assert wire["wires_per_micro_batch"] == pytest.approx(grown / (m * 0.25 * FORWARD_MS / 1000))
            assert wire["simulated_wires_per_micro_batch"] > 0


def test_engines_send_what_their_schedule_does(virtual):
    """An activation and a gradient over every boundary between ranks; the rest is a few of the first step."""
    boundaries = {"1f1b": 1, "gpipe": 1, "zb_h1": 1, "interleaved": 3, "looped_bfs": 3, "interleaved_zb": 3}
    boundaries |= {"zbv": 2, "v_half": 2, "v_min": 2, "dualpipev": 2}  # the V's turn is within a rank
    for table in virtual[0]["tables"]:
        for row in table["rows"]:
            name = row["engine"].split(" ")[1]
            assert row["wire"]["sent_per_micro_batch"] == 2 * boundaries[name], row["engine"]


def test_a_schedule_from_a_file_runs_where_stages_differ(tmp_path):
    """Stages of 1 : 3, twice; the file holds ZB-V, placed for equal stages."""
    schedule, part = build("zbv", 2, 2, 4), FORWARD_MS / 1000 / 4
    file = tmp_path / "mine.csv"
    file.write_text(schedule.to_csv())
    sizes = ("--ranks", "2", "--micro-batches", "4", "--forward-ms", str(FORWARD_MS), "--rounds", "1")
    equal = tmp_path / "equal.csv"
    equal.write_text(schedule.to_csv())
    files = ("--files", f"{file},{equal}@2:2:2:2")
    (table,) = run(tmp_path, *sizes, "--parts", "1,3,1,3", *files, "--only", "dsx zbv")[0]["tables"]
    rows = {row["engine"]: row for row in table["rows"]}
    assert [*rows] == ["deepspeed 1f1b", "dsx zbv", f"dsx {file}", f"dsx {equal}"]
    even = (2 * part,) * 4
    costs = Costs(forward_seconds=even, backward_input_seconds=even, backward_weight_seconds=even)
    assert rows[f"dsx {equal}"]["simulated_seconds"] == pytest.approx(simulate(schedule, costs).seconds)
    lengths = (part, 3 * part, part, 3 * part)
    costs = Costs(forward_seconds=lengths, backward_input_seconds=lengths, backward_weight_seconds=lengths)
    assert rows[f"dsx {file}"]["simulated_seconds"] == pytest.approx(simulate(schedule, costs).seconds)
    placed = build("zbv", 2, 2, 4, Options(costs=costs))
    assert rows["dsx zbv"]["simulated_seconds"] == pytest.approx(simulate(placed, costs).seconds)


def test_the_real_run_trains_one_model_everywhere(real):
    (table,) = real[0]["tables"]
    names = [row["engine"] for row in table["rows"]]
    assert names == ["deepspeed 1f1b", "torch 1f1b", "torch zbv", "dsx 1f1b", "dsx zbv"]
    assert len({row["parameters"] for row in table["rows"]}) == 1
    hidden, blocks, vocabulary, length = 16, 8, 256, 8
    block = 12 * hidden**2 + 13 * hidden  # GPT-2's, with biases and norms
    assert table["rows"][0]["parameters"] == 2 * vocabulary * hidden + length * hidden + blocks * block + (
        2 * hidden
    )
    assert all(row["median_seconds"] > 0 and row["excess"] is None for row in table["rows"])
    assert table["alone_seconds"] > 0


def test_impossible_sizes_are_refused():
    for arguments, why in (
        (["--micro-batches", "2q"], "multiple of p"),
        (["--real", "--wire", "1"], "--wire"),
    ):
        done = subprocess.run(
            [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert why in done.stderr
