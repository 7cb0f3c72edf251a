"""The dsx command, as a shell sees it: output, exit code, one message and no traceback."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path

import pytest

from dsx import __version__
from loaded import DSX, HEAVY, loaded_by

CONFIGS = Path(__file__).parents[2] / "configs"
ZERO3 = str(CONFIGS / "zero3.json")


def test_help_names_every_command(dsx):
    code, out, _ = dsx("--help")
    assert code == 0
    for command in ("check", "schedule", "plot", "presets", "schema"):
        assert re.search(rf"^  {command} +\S", out, re.MULTILINE)


def test_no_arguments_is_bad_usage(dsx):
    code, out, err = dsx()
    assert code == 2
    assert "Usage: dsx" in out + err


def test_version(dsx):
    assert dsx("--version") == (0, f"dsx {__version__}\n", "")


def test_version_is_the_packages():
    import tomllib

    project = tomllib.loads((CONFIGS.parent / "pyproject.toml").read_text())
    declared = project["project"].get("version")
    attribute = project["tool"]["setuptools"].get("dynamic", {}).get("version", {}).get("attr")
    assert declared == __version__ or attribute == "dsx.__version__"


def target(schema: dict, part: dict) -> dict:
    """What a part of a JSON Schema refers to, also where null would do."""
    reference = next((option["$ref"] for option in (part, *part.get("anyOf", ())) if "$ref" in option), None)
    return schema["$defs"][reference.rsplit("/", 1)[1]] if reference else part


def test_schema_describes_every_key_that_the_shipped_configs_use(dsx):
    code, out, _ = dsx("schema")
    assert code == 0
    schema = json.loads(out)
    assert set(schema["required"]) == {"model", "data", "train"}
    used = 0
    for path in CONFIGS.glob("*.json"):
        for name, content in json.loads(path.read_text())["dsx"].items():
            block = target(schema, schema["properties"][name])
            assert block["description"]
            if not isinstance(content, dict):
                continue
            assert block["additionalProperties"] is False
            for key in content:
                assert target(schema, block["properties"][key])["description"]
                used += 1
    assert used > 100


def test_presets(dsx):
    code, out, _ = dsx("presets")
    assert code == 0
    assert re.search(r"llama +llama-3-8b +8,030,261,248 +32 +4096 +32 +8\b", out)
    assert max(map(len, out.splitlines())) <= 80
    assert re.search(r"llama +llama-3-8b +hub: meta-llama/Meta-Llama-3-8B", out)
    code, out, _ = dsx("presets", "--format", "json")
    rows = {(row["family"], row["preset"]): row for row in json.loads(out)}
    assert rows["gpt2", "gpt2"]["parameters"] == 124_439_808
    assert rows["gpt2", "gpt2"]["config"]["n_embd"] == 768


def test_check_prints_the_resolution(dsx):
    code, out, err = dsx("check", ZERO3, "--gpus", 8)
    assert (code, err) == (0, "")
    assert "tensor 2 x pipeline 2 x data 2 = 8 ranks, sequence parallel" in out
    assert "interleaved, chunks per pipeline rank: 2" in out
    assert "ZeRO-3, fp32" in out
    assert "16 sequences of 256 tokens per step = micro-batch 2 x 4 micro-batches x data 2" in out
    assert re.search(r"^stage 0 +0 WordEmbedding, 1 Block \| 3 Block +\(", out, re.MULTILINE)
    assert re.search(r"^stage 1 +2 Block \| 4 Block, 5 FinalNorm, 6 Head +\(", out, re.MULTILINE)
    assert "dsx.parallel.tensor: auto -> 2" in out


def test_check_json_and_set(dsx):
    overrides = ("--set", "dsx.parallel.tensor=4", "--set", "zero_optimization.stage=1")
    code, out, _ = dsx("check", ZERO3, "--gpus", 8, "--format", "json", *overrides)
    found = json.loads(out)["files"][0]["resolved"]
    assert code == 0
    assert found["mesh"] == {"pp": 1, "dp": 2, "tp": 4}
    assert found["zero_stage"] == 1
    assert found["batch"]["tokens_per_step"] == 16 * 256
    held = [layer for stage in found["stages"] for chunk in stage["chunks"] for layer in chunk]
    assert len(held) == 7


def test_bad_config_is_one_finding_and_exit_code_1(dsx):
    code, out, err = dsx("check", ZERO3, "--gpus", 8, "--set", "dsx.parallel.tensor=3")
    assert (code, err) == (1, "")
    assert re.match(r"error +dsx\.parallel\.tensor = 3 \(--set\): ", out)
    assert "Fix: use 1, 2, 4 or 8" in out
    assert out.count("[dsx]") == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["check"], "CONFIG"),
        (["check", ZERO3, "--fix", "--set", "dsx.train.steps=3"], "--set"),
        (["check", ZERO3, "--gpus", "0"], "--gpus"),
        (["check", ZERO3, "--gpus", "2", "--set", "dsx.train.steps"], "dsx.train.steps"),
        (["schedule", "dualpipe", "--stages", "2", "--micro-batches", "2"], "dualpipe"),
        (["schedule", "1f1b", "--stages", "2"], "micro-batches"),
        (["schedule", "1f1b", "--stages", "0", "--micro-batches", "2"], "stages"),
        (["schedule", "1f1b", "--stages", "2", "--micro-batches", "2", "--format", "png"], "png"),
        (["train"], "CONFIG"),
    ],
)
def test_bad_usage_is_exit_code_2(dsx, arguments, word):
    code, out, err = dsx(*arguments)
    assert code == 2
    assert out == ""
    assert word in err
    assert "Traceback" not in err


def test_schedule_csv_is_torchs(dsx):
    from torch.distributed.pipelining.schedules import _Action

    code, out, _ = dsx(
        "schedule", "interleaved", "--stages", 2, "--chunks", 2, "--micro-batches", 4, "--format", "csv"
    )
    assert code == 0
    rows = [[_Action.from_str(token) for token in line.split(",")] for line in out.splitlines()]
    assert [len(row) for row in rows] == [16, 16]


def test_schedule_json(dsx):
    """1F1B: bubble (p - 1) / m, arXiv:2104.04473 section 2.2; rank r keeps p - r micro-batches."""
    code, out, _ = dsx("schedule", "1f1b", "--stages", 4, "--micro-batches", 8, "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert found["bubble_over_ideal"] == pytest.approx(3 / 8)
    assert found["peak_activations"] == [4, 3, 2, 1]
    assert found["rows"][3][:4] == ["3F0", "3B0", "3F1", "3B1"]


def test_schedule_table(dsx):
    code, out, _ = dsx("schedule", "interleaved", "--stages", 4, "--chunks", 2, "--micro-batches", 8)
    assert code == 0
    assert "bubble: 18.8% of the ideal time" in out
    assert max(map(len, out.splitlines())) <= 80
    peaks = "peak activations per rank, in micro-batches, each of 1/2 of a rank's layers: 11, 9, 7, 5"
    assert peaks in " ".join(out.split())


def test_impossible_schedule_is_exit_code_1(dsx):
    code, out, err = dsx("schedule", "1f1b", "--stages", 2, "--chunks", 2, "--micro-batches", 2)
    assert (code, out) == (1, "")
    assert "chunks = 2" in err
    assert "interleaved" in err


def test_starts_fast_and_without_torch():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert not loaded_by(DSX, "check", ZERO3, "--gpus", 8)[1] & HEAVY
    # Half a second of a processor, which a busy machine takes longer to give; torch alone would take two.
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.5
