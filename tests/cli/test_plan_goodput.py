"""``dsx plan --goodput`` from end to end: what it rests on, what it compares, and what it refuses."""

import json
from dataclasses import replace
from math import nan
from pathlib import Path

import pytest

from dsx.config.resolve import resolve
from dsx.planner.cluster import preset
from dsx.planner.goodput import daly, young
from dsx.planner.what_is_left import draw

COMMAND = ("plan", "--model", "llama/tiny", "--sequence-length", "128", "--top", "1")
CONFIG = Path(__file__).parents[2] / "configs/zero1.json"
SIZES = ("--gpus", 4, "--global-batch", 12)


@pytest.fixture
def plan(dsx, tmp_path):
    def run(*more, failures=None, **cluster):
        file = tmp_path / "cluster.json"
        file.write_text(json.dumps({"gpu": "CPU", "gpus_per_node": 1, "failures": failures} | cluster))
        code, out, err = dsx("--cluster", file, *SIZES, "--format", "json", *more)
        assert (code, err) == (0, "")
        return json.loads(out)

    return run


def test_only_where_it_is_asked_for(plan):
    assert "goodput" not in plan()
    assert plan("--goodput")["goodput"] == plan(failures={})["goodput"]


def test_rests_on_what_is_given_and_says_so(plan):
    given = {"per_thousand_gpu_days": 0, "per_thousand_node_days": 250, "save_seconds": 5, "days": 10}
    given |= {"spare_nodes": 2, "start_seconds": 60, "notice_seconds": 30}
    found = plan(failures=given)["goodput"]
    assert (mttf := found["mean_seconds_to_failure"]) == pytest.approx(86_400)
    rules = (found["young_seconds"], found["daly_seconds"])
    assert rules == pytest.approx((young(mttf, 5), daly(mttf, 5)))
    assert found["down_seconds"] == pytest.approx(90, abs=1)
    assert (found["pause_seconds"], found["spare_nodes"]) == (5, 2)
    assert found["as_good_steps"][0] <= found["save_every_steps"] <= found["as_good_steps"][1]
    sources = {key: each["source"] for key, each in found["figures"].items()}
    assert {key for key in sources if sources[key] == "given"} == set(given)
    assert sources["repair_hours"] == "assumed"
    assert "arXiv:2407.21783" in plan("--goodput")["goodput"]["figures"]["per_thousand_gpu_days"]["source"]
    # fp32 weights and Adam's two moments, of each parameter once.
    assert found["checkpoint_bytes"] == pytest.approx(12 * 804e3, rel=0.03)
    assert found["ways"]["wait for the repair"]["waiting"] > found["ways"]["spare nodes"]["waiting"]


KEPT = [("SGD", {"momentum": 0.9}, None, 8), ("SGD", {}, None, 4), ("Adagrad", {}, 6, 10)]


@pytest.mark.parametrize(("kind", "params", "declared", "num_bytes"), KEPT)
def test_a_save_has_what_the_optimizer_keeps(plan, kind, params, declared, num_bytes):
    changes = {"optimizer": {"type": kind, "params": params}, "dsx.optimizer_bytes": declared}
    more = [item for key, value in changes.items() for item in ("--set", f"{key}={json.dumps(value)}")]
    found = plan(CONFIG, "--goodput", "--tensor", 1, "--pipeline", 1, *more)["goodput"]
    assert found["checkpoint_bytes"] == pytest.approx(num_bytes * 804e3, rel=0.03)


def test_a_smaller_layout_is_what_elastic_takes(plan):
    found = plan("--tensor", 1, "--pipeline", 1, "--goodput")
    content = found["config"]
    content["dsx"] |= {"elastic": {}, "train": {"steps": 9, "output": "runs/one"}}
    rungs = found["goodput"]["smaller_layouts"]
    assert [rung["nodes"] for rung in rungs] == [3, 2]
    for rung in rungs:
        assert resolve(content, world_size=rung["nodes"]).mesh.dp == rung["nodes"]
        assert rung["nodes"] / 4 - 0.1 < rung["speed"] < 1


def test_a_rack_of_several_hosts_loses_one_of_them(dsx):
    more = ("--cluster", "GB200", "--gpus", 128, "--global-batch", 128, "--goodput", "--format", "json")
    code, out, err = dsx(*more, "--tensor", 1, "--pipeline", 1, "--zero", 1)
    assert (code, err, json.loads(out)["goodput"]["nodes"]) == (0, "", 32)
    two = replace(preset("GB200"), sites=2, across=preset("GB200").between)
    assert [each.gpus_per_node for each in (two.holding(216), two.site(160), two.joined(160))] == [72, 40, 40]


def test_text_says_where_failures_leave_nothing_and_where_nothing_fails(dsx, tmp_path):
    file, words = tmp_path / "cluster.json", []
    for rate in (0, 1e-310, 1e9):
        failures = {"per_thousand_gpu_days": rate, "per_thousand_node_days": 0}
        file.write_text(json.dumps({"gpu": "CPU", "failures": failures}))
        words.append(" ".join(dsx("--cluster", file, *SIZES)[1].split()))
    said = (
        "nothing fails, so that a save at the end is enough",
        "nothing fails, so that a save at the end is enough",
        "failures come faster than a start after one",
    )
    assert [each in text for each, text in zip(said, words, strict=True)] == [True, True, True]


def test_islands_stop_one_by_one(plan, dsx, tmp_path):
    slow = {"gigabytes_per_second": 0.0125, "latency_microseconds": 25_000}
    whole = plan(failures={"per_thousand_node_days": 500}, sites=2, nodes=2, across=slow)
    found, sites = whole["goodput"], whole["sites"]
    one = found["one_job"]
    assert found["mean_seconds_to_failure"] == pytest.approx(2 * one["mean_seconds_to_failure"])
    assert one["spare_nodes"] == 2 * found["spare_nodes"] > 0
    for each, speed in ((found, sites["islands"]), (one, sites["one_job"])):
        share = each["ways"][each["best"]]["goodput"]
        assert each["tokens_per_second"] == pytest.approx(share * speed["tokens_per_second"])
    assert "one job, which stops at every failure: " in dsx("--cluster", tmp_path / "cluster.json", *SIZES)[1]


ACROSS = {"gigabytes_per_second": 0.0125, "latency_microseconds": 25_000}


@pytest.mark.parametrize("more", [{}, {"sites": 2, "nodes": 2, "across": ACROSS}], ids=["job", "islands"])
def test_the_picture_shows_what_the_answer_says(plan, more):
    found = plan(failures={"per_thousand_node_days": 500, "spare_nodes": 1}, **more)["goodput"]
    figure = draw(found, "run")
    *first, bars = figure.axes
    assert len(first) == (not more)
    names = [each.get_text() for each in bars.get_xticklabels()]
    useful = dict(zip(names, (each.get_height() for each in bars.containers[0]), strict=True))
    shown = {"wait for the repair": "0", "spare nodes": "1", "shrink (dsx.elastic)": "shrink"}
    for way, parts in found["ways"].items():
        assert useful[shown[way]] == pytest.approx(100 * parts["of_all_nodes"], abs=0.01)
    for axes in first:
        useful = axes.collections[0].get_paths()[0].vertices  # its lower side is 0
        middle = min(useful, key=lambda at: (abs(at[0] - found["interval_seconds"]), -at[1]))
        assert middle[1] == pytest.approx(100 * found["ways"][found["best"]]["of_all_nodes"], abs=0.05)
        assert [line.get_xdata()[0] for line in axes.lines] == [found["young_seconds"], found["daly_seconds"]]


def test_a_picture_is_written_or_refused(dsx, tmp_path):
    file, picture = tmp_path / "cluster.json", tmp_path / "left.svg"
    for failures, more, words in (
        ({"per_thousand_gpu_days": 0, "per_thousand_node_days": 0}, (), "nothing fails"),
        (None, ("--goodput",), ""),
    ):
        file.write_text(json.dumps({"gpu": "CPU", "gpus_per_node": 1, "failures": failures}))
        code, _, err = dsx("--cluster", file, *SIZES, "--output", picture, *more)
        assert (code, words in err, picture.exists()) == (2 * bool(words), True, not words), err
    assert "<svg" in picture.read_text()


def test_no_interval_is_longer_than_the_run(plan, dsx, tmp_path):
    found = plan(failures={"days": 0.001})
    step, found = found["best"][0]["step_seconds"], found["goodput"]
    assert (found["save_every_steps"], found["only_at_the_end"]) == (int(86.4 / step), True)
    assert "save at the end: " in dsx("--cluster", tmp_path / "cluster.json", *SIZES)[1]


def test_a_runs_own_saves(plan, tmp_path):
    for times, mean, words in (((3, 4, nan), 3.5, "mean of 2 saves of "), ((3,), 3, "mean of 1 save of ")):
        rows = [{"train/step": step, "perf/save_seconds": each} for step, each in enumerate(times)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = plan("--saves-of", tmp_path)["goodput"]
        assert found["pause_seconds"] == mean
        assert words in found["figures"]["save_seconds"]["source"]


@pytest.mark.parametrize(
    ("failures", "more", "words"),
    [
        (
            {"lost_share": 2},
            (),
            "failures.lost_share = 2: not a value for this key. Fix: use a number from 0",
        ),
        ({"spare_nodes": 1 << 21}, (), "a whole number from 0 to 1048576"),
        ({"repair_hour": 1}, (), 'write "repair_hours"'),
        ({"gpu_mtbf": 1}, (), 'write "per_thousand_gpu_days"'),
        ({"mttf": 1}, (), "24,000 / the mean hours of a node"),
        ({}, ("--saves-of", "nowhere"), "there is no such file"),
        ({}, ("--saves-of", "{}"), "it has no perf/save_seconds that could be"),
        ({}, (CONFIG, "--goodput", "--set", "dsx.faults.hang_seconds=0"), "dsx.faults.hang_seconds = 0"),
    ],
)
def test_is_refused_before_anything_is_planned(dsx, tmp_path, monkeypatch, failures, more, words):
    monkeypatch.setattr("dsx.planner.inputs.plan_search", lambda *_, **__: pytest.fail("it planned"))
    (tmp_path / "metrics.jsonl").write_text('{"train/step": 1, "train/loss": 1.0}\n')
    file = tmp_path / "cluster.json"
    file.write_text(json.dumps({"gpu": "CPU", "failures": failures}))
    code, _, err = dsx("--cluster", file, *SIZES, *(str(each).format(tmp_path) for each in more))
    assert (code, words in err) == (2, True), err
