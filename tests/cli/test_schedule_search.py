"""dsx schedule search: a file that the engine reads, a table beside the named schedules, refusals."""

from __future__ import annotations

import json

import pytest

from dsx.config.resolve import resolve
from dsx.planner.choose import choose
from dsx.planner.layout import Space
from dsx.planner.order_search import made_up
from dsx.schedules.program import load
from dsx.schedules.simulate import peak_activations

COMMAND = ("schedule", "search")
TIMES = ",".join(["1,1.4"] * 8)
UNEVEN = ("--times", TIMES, "--stages", 8, "--micro-batches", 8, "--most-live", 6, "--chunks", 2)


def test_the_table_and_the_file(dsx, tmp_path):
    path = tmp_path / "best.csv"
    code, out, _ = dsx(*UNEVEN, "--effort", 0.4, "--output", path)
    assert code == 0
    schedule = load(path.read_text(), name="best.csv")
    assert (schedule.num_ranks, schedule.num_chunks, schedule.num_micro_batches) == (8, 2, 8)
    assert max(peak_activations(schedule)) <= 12
    lines = out.splitlines()
    assert lines[1].startswith("searched")
    assert lines[2].startswith("lower bound")
    named = choose(
        made_up([1.0, 1.4] * 8, 0.0),
        num_ranks=8,
        num_micro_batches=8,
        space=Space(chunks=(2,), most_bytes=12 << 20),
    ).chosen
    assert lines[3].startswith(named.label)
    step = float(lines[1].split()[1])
    assert named.cut.step_seconds * 1000 > 1.04 * step
    assert f"dsx.schedule.file={path}" in out
    assert "dsx.partition.method=[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]" in out


def test_what_it_writes_is_what_a_config_takes(dsx, tmp_path):
    path = tmp_path / "best.csv"
    sizes = ("--times", "6x1", "--stages", 2, "--micro-batches", 4, "--chunks", 2)
    assert dsx(*sizes, "--effort", 0.01, "--output", path)[0] == 0
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "model": {"family": "llama", "preset": "tiny"},
            "schedule": {"file": str(path)},
            "data": {"tokenizer": "bytes", "sequence_length": 16},
            "train": {"steps": 1, "output": str(tmp_path)},
        },
    }
    run = resolve(config, world_size=2)
    assert run.program.build(2, 2, 4) == load(path.read_text(), name="best.csv")


def test_json_says_when_nothing_is_gained(dsx):
    sizes = ("--times", "8x1", "--stages", 4, "--micro-batches", 4, "--most-live", 4)
    facts = json.loads(dsx(*sizes, "--format", "json", "--effort", 0.01)[1])
    assert facts["found"]["step_seconds"] == pytest.approx(facts["bound_seconds"])
    assert facts["gain"] == pytest.approx(0.0)
    assert "nothing is gained" in dsx(*sizes, "--effort", 0.01)[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--stages", 4, "--micro-batches", 4), "--times"),
        (("--times", "4xa", "--stages", 4, "--micro-batches", 4), "'4xa' is no time"),
        (("--times", "9x1,99999999999x1", "--stages", 4, "--micro-batches", 4), "more than 2,048 layers"),
        (("--times", "0x1", "--stages", 4, "--micro-batches", 4), "'0x1' is no time"),
        (("--times", "8x1"), "--stages and --micro-batches"),
        ((*UNEVEN, "--warmup", 2), "--warmup 2"),
        ((*UNEVEN, "--effort", "inf"), "--effort inf: not a finite number"),
        ((*UNEVEN, "--effort", 1e6, "--output", "none/best.csv"), "--output none/best.csv: no such folder"),
        ((*UNEVEN, "--wire", "inf"), "--wire inf: not a finite number"),
        ((*UNEVEN, "--activation-gib", 2), "both bound the same memory"),
        (("--times", "8x1", "--profile", "p.json", "--stages", 4, "--micro-batches", 4), "once"),
    ],
)
def test_refusals(dsx, arguments, words):
    code, _, err = dsx(*arguments)
    assert code == 2
    assert words in err


def test_too_little_memory_names_the_nearest(dsx):
    code, _, err = dsx("--times", "8x1", "--stages", 4, "--micro-batches", 4, "--most-live", 0.5)
    assert code == 1
    assert "the nearest are" in err
