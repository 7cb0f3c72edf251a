"""dsx plot, as a shell sees it."""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree as ET

import pytest

from dsx.cli.plot import as_file, picture_of
from dsx.schedules.builders import build
from dsx.schedules.simulate import Costs, simulate
from dsx.schedules.timeline import page, svg
from dsx.terminal import printable
from dsx.train.curves import STEP, Run, Series, choose, draw, draw_experts, read_runs

COMMAND = ("plot",)


@pytest.fixture
def folders(tmp_path):
    for name in ("one", "two"):
        records = [
            {"train/step": step, "train/loss": 5.0 / step, "train/lr": 0.1, "eval/loss": 4.0}
            for step in range(1, 30)
        ]
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return tmp_path / "one", tmp_path / "two"


def test_a_picture_beside_the_metrics(dsx, folders):
    image = pytest.importorskip("PIL.Image")
    code, out, err = dsx(folders[0])
    assert (code, out, err) == (0, f"wrote {folders[0] / 'loss.png'}\n", "")
    with image.open(folders[0] / "loss.png") as picture:
        assert picture.width == 1200
        assert len(picture.convert("RGB").getcolors(1 << 16)) > 20  # lines and text, not a blank page


def test_svg_of_chosen_metrics_of_two_runs(dsx, folders, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "both.svg"
    code, out, err = dsx(*folders, "--metric", "train/lr", "--metric", "train/loss", "--output", picture)
    assert (code, out, err) == (0, f"wrote {picture}\n", "")
    names = {element.get("id") for element in ET.parse(picture).iter() if element.get("id")}
    assert {"axes_1", "axes_2"} <= names
    assert "axes_3" not in names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--metric", "loss"], ["--metric loss", "train/loss"]),
        (["--output", "curves.gif"], ["curves.gif", ".png, .svg or .pdf"]),
        (["--output", "curves"], ["curves", ".png, .svg or .pdf"]),
        (["--output", "absent/curves.png"], ["absent/curves.png", "cannot be written"]),
    ],
)
def test_what_cannot_be_drawn_is_one_message_and_exit_code_2(
    dsx, folders, monkeypatch, tmp_path, arguments, words
):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    code, out, err = dsx(folders[0], *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dsx: ")
    assert err.count("\n") == 1
    assert all(word in err for word in words)


def test_a_folder_without_metrics(dsx, tmp_path):
    code, _, err = dsx(tmp_path)
    assert code == 2
    assert "metrics.jsonl: there is no such file" in err
    assert dsx(tmp_path / "absent")[0] == 2


def test_without_matplotlib_the_message_says_how_to_get_it(dsx, folders, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # what import sees when a package is not there
    code, out, err = dsx(folders[0])
    assert (code, out) == (2, "")
    assert "pip install 'matplotlib>=3.9'" in err
    assert not (folders[0] / "loss.png").exists()


def test_curves_of_one_step_of_none_and_of_values_that_are_not_finite():
    """Steps are whole numbers, the highest value is inside, and what cannot be drawn is said."""
    pytest.importorskip("matplotlib")
    speed = "perf/tokens_per_second_global"
    nan, inf = float("nan"), float("inf")
    for steps, losses, said in (
        ((1,), (2.0,), ""),
        ((1, 2, 3), (0.0, 0.0, 0.0), ""),
        ((3, 4, 5), (2.0, nan, inf), " (2 values not finite)"),
        ((1, 2), (nan, nan), " (2 values not finite)"),
    ):
        series = {"train/loss": Series(steps, losses), speed: Series(steps, tuple(map(float, steps)))}
        runs = [Run(f"run {number}", series) for number in range(9)]
        figure = draw(runs, choose(runs, []))
        loss, tokens = figure.axes
        assert loss.get_title(loc="left") == "loss, nats per token" + said.replace("2", "18")
        low, high = tokens.get_xlim()
        ticks = [tick for tick in tokens.get_xticks() if low <= tick <= high]
        assert ticks
        assert all(tick == int(tick) for tick in ticks)
        assert low < steps[0] <= steps[-1] < high
        assert tokens.get_ylim()[0] == 0
        assert tokens.get_ylim()[1] > steps[-1]
        looks = {(line.get_color(), line.get_linestyle()) for line in tokens.lines}
        assert len(looks) == len(runs)  # though there are seven colours


ODD = "a\x1b\x00\x85\udc80\ufffe<$b^$_${.}"


@pytest.mark.parametrize("style", ["svg", "html", "png", "pdf"])
def test_names_of_files_may_hold_anything(style):
    pytest.importorskip("matplotlib")
    series = {"train/loss": Series((1, 2), (2.0, 1.0))}
    for names in ([ODD], [ODD, "other"]):
        runs = [Run(name, series) for name in names]
        picture = as_file(draw(runs, choose(runs, [])), style, title=ODD)
        if isinstance(picture, str):
            picture.encode()
            ET.fromstring(picture[picture.index("<svg") : picture.index("</svg>") + 6])
            assert printable(ODD).replace("<", "&lt;") in picture


def test_a_timelines_title_may_hold_anything():
    schedule = build("1f1b", 2, 1, 2)
    timeline = simulate(schedule, Costs())
    drawn = svg(schedule, timeline, title=ODD)
    assert printable(ODD) in {element.text for element in ET.fromstring(drawn).iter()}
    assert picture_of(drawn, "png")[:4] == b"\x89PNG"
    assert printable(ODD).replace("<", "&lt;") in page(ODD, drawn)


def test_a_heat_map_of_experts(dsx, tmp_path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    rows = [
        {STEP: step, "train/loss": 1.0, **{f"moe/imbalance/layer{n}": 1 + n / step for n in range(1, 12)}}
        for step in (1, 2, 5)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = read_runs([tmp_path])
    axes = draw_experts(runs).axes[0]
    mesh = axes.collections[0]
    assert mesh.get_array().reshape(11, 3).tolist() == [[1 + n / s for s in (1, 2, 5)] for n in range(1, 12)]
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"layer{n}" for n in range(1, 12)]
    assert dsx(tmp_path, "--experts")[:2] == (0, f"wrote {tmp_path / 'experts.png'}\n")
    with image.open(tmp_path / "experts.png") as picture:
        assert len(picture.convert("RGB").getcolors(1 << 16)) > 20


def test_no_heat_map_without_experts_or_beside_curves(dsx, folders):
    code, _, err = dsx(folders[0], "--experts")
    assert (code, "no run has a metric moe/imbalance/*" in err) == (2, True)
    code, _, err = dsx(folders[0], "--experts", "--metric", "train/loss")
    assert (code, "leave one of them out" in err) == (2, True)
