"""The ending of --output is the format, in every command that draws or writes; --format says it of stdout."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET

import pytest

from traced import by_hand

SIZES = ("--stages", "2", "--micro-batches", "2")


def _kind(content: bytes) -> str:
    """What a file holds, by what its format begins with."""
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "png"
    if content.startswith(b"%PDF-"):
        return "pdf"
    text = content.decode()
    if text.startswith("<!doctype html>"):
        assert text.count("<svg") == 1
        return "html"
    if "<svg" in text:
        assert ET.fromstring(text).tag.endswith("svg")
        return "svg"
    try:
        found = json.loads(text)
    except ValueError:
        return "csv" if text.startswith("0F0,") else "table"
    return "perfetto" if "traceEvents" in found else "json"


@pytest.fixture
def inputs(tmp_path):
    (tmp_path / "step7.json").write_text(by_hand().to_json())
    records = [json.dumps({"train/step": step, "train/loss": 5.0 / step}) for step in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(records))
    return {
        "schedule": ("schedule", "1f1b", *SIZES),
        "trace": ("trace", tmp_path / "step7.json"),
        "plot": ("plot", tmp_path / "metrics.jsonl"),
        "estimate": ("estimate", "--model", "gpt2/tiny"),
        "env": ("env",),
    }


KINDS = {
    "schedule": ("txt", "csv", "json", "svg", "html", "png", "perfetto.json"),
    "trace": ("txt", "json", "svg", "html", "png", "perfetto.json"),
    "plot": ("svg", "html", "png", "pdf"),
    "estimate": ("txt", "json", "svg", "html", "png", "pdf"),
}


@pytest.mark.parametrize("command", KINDS)
def test_the_ending_is_the_format(dsx, inputs, tmp_path, command):
    pytest.importorskip("matplotlib")
    for ending in KINDS[command]:
        path = tmp_path / f"Written.{ending.upper() if ending == 'svg' else ending}"
        code, out, err = dsx(*inputs[command], "--output", path)
        assert (code, err) == (0, ""), ending
        assert str(path) in out
        if ending == "txt":
            _, *table = path.read_text().splitlines()  # the first line may be a long title
            assert max(map(len, table)) <= 80
        assert _kind(path.read_bytes()) == {"txt": "table", "perfetto.json": "perfetto"}.get(ending, ending)
    # The same bytes again, so that pictures can be kept beside what they show.
    before = path.read_bytes()
    dsx(*inputs[command], "--output", path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("command", ["schedule", "trace", "estimate", "env"])
def test_another_ending_is_refused_before_anything_is_done(dsx, inputs, tmp_path, command):
    code, out, err = dsx(*inputs[command], "--output", tmp_path / "x.gif")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "'.gif' names no format of this command" in err
    assert not (tmp_path / "x.gif").exists()
    other = "x.csv" if command != "schedule" else "x.svg"
    code, _, err = dsx(*inputs[command], "--format", "json", "--output", tmp_path / other)
    assert (code, "a file of --format json ends in .json" in err) == (2, True)


def test_the_plan_of_a_cluster_draws_the_step_of_the_best_layout(dsx, tmp_path):
    given = ("--gpus", "2", "--cluster", "H100", "--global-batch", "8", "--sequence-length", "256")
    code, _, err = dsx("plan", "--model", "gpt2", *given, "--output", tmp_path / "best.svg")
    assert (code, err) == (0, "")
    assert ET.parse(tmp_path / "best.svg").getroot().tag.endswith("svg")


def test_png_of_a_timeline_shows_what_its_svg_says(dsx, inputs, tmp_path):
    image = pytest.importorskip("PIL.Image")
    for ending in ("svg", "png"):
        dsx(*inputs["schedule"], "--output", tmp_path / f"x.{ending}")
    root = ET.parse(tmp_path / "x.svg").getroot()
    with image.open(tmp_path / "x.png") as picture:
        pixels = picture.convert("RGB")
    assert pixels.width == pytest.approx(float(root.get("width")), abs=2)
    style = next(root.iter("{http://www.w3.org/2000/svg}style")).text
    for group in root.findall("{http://www.w3.org/2000/svg}g"):
        rect = group.find("{http://www.w3.org/2000/svg}rect")
        corner = float(rect.get("x")) + 6, float(rect.get("y")) + 6
        fill = style.split(f".{group.get('class')} rect{{fill:")[1][:7]
        assert "#{:02x}{:02x}{:02x}".format(*pixels.getpixel(tuple(map(round, corner)))) == fill
