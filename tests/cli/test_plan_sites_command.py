"""``dsx plan`` for a cluster of several sites, from end to end."""

import json

import pytest

from dsx.cli.app import main
from dsx.config.resolve import resolve
from dsx.errors import ConfigError

COMMAND = ("plan",)
OFFICES = {
    "gpu": "CPU",
    "name": "two offices",
    "sites": 2,
    "across": {"gigabytes_per_second": 0.0125, "latency_microseconds": 25000},
}
TINY = ("--model", "llama/tiny", "--sequence-length", 128)
FIXED = ("--micro-batch", 1, "--tensor", 1)


@pytest.fixture
def offices(tmp_path):
    def write(**changes):
        file = tmp_path / "offices.json"
        content = {key: value for key, value in (OFFICES | changes).items() if value is not None}
        file.write_text(json.dumps(content))
        return file

    return write


def test_two_sites(dsx, offices, tmp_path, monkeypatch, capsys):
    cluster, out = offices(), tmp_path / "planned.json"
    sizes = ("--gpus", 4, "--global-batch", 8)
    code, text, err = dsx(*TINY, *FIXED, *sizes, "--cluster", cluster, "--output", out)
    assert (code, err) == (0, "")
    assert text.startswith("2 sites, 100 Mbit/s and 25 ms between them\n  one job over all sites: ")
    assert "\n  an island on each: " in text
    assert "\nislands pay: " in text
    assert "llama, 804k parameters on 2 x two offices, 4 sequences of 128 tokens per step" in text

    content = json.loads(out.read_text())
    run = resolve(out, world_size=4)
    assert (run.islands.count, run.islands.ranks, run.global_batch_size) == (2, 2, 4)
    outer = run.dsx.outer
    assert f"(every {outer.every}, wire {outer.wire}; chosen)" in text
    assert run.dsx.train.steps >= 2 * outer.every

    monkeypatch.setattr("sys.argv", ["dsx", "estimate", str(out), "--gpus", "4", "--cluster", str(cluster)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    assert "one of 2 islands" in capsys.readouterr().out

    # What is written is kept: the batch of one island, and how they meet.
    content["dsx"]["outer"] = {"islands": 2, "every": 40, "shares": 2, "delay": 3}
    out.write_text(json.dumps(content))
    code, text, err = dsx(out, *FIXED, "--gpus", 4, "--cluster", cluster, "--format", "json")
    found = json.loads(text)
    assert (code, err) == (0, "")
    assert found["config"]["train_batch_size"] == 4
    assert found["config"]["dsx"]["outer"] == {"islands": 2, "every": 40, "shares": 2, "delay": 3}
    islands, one = found["sites"]["islands"], found["sites"]["one_job"]
    assert islands["given"]
    assert islands["tokens_per_second"] == pytest.approx(
        8 * 128 * islands["of_speed_without_link"] / islands["step_seconds"]
    )
    assert one["tokens_per_second"] == pytest.approx(8 * 128 / one["step_seconds"])
    assert found["sites"]["islands_pay"] == (islands["tokens_per_second"] > one["tokens_per_second"])


@pytest.mark.parametrize(
    ("changes", "gpus", "batch", "what"),
    [
        ({"sites": 0}, 4, 8, "sites"),
        ({"across": None}, 4, 8, "sites = 2"),
        ({"across": {"latency_microseconds": 20000}}, 4, 8, "sites = 2"),
        ({"sites": 1}, 4, 8, "sites = 1"),
        ({"sites": None}, 4, 8, "sites = 1"),
        ({"across": {"gigabytes_per_second": -1}}, 4, 8, "across.gigabytes_per_second = -1"),
        ({}, 5, 8, "--gpus 5: each of the 2 sites of two offices has as many, in whole nodes of 8. Fix: "),
        ({}, 24, 24, "--gpus 24"),
        ({"nodes": 1}, 32, 32, "--gpus 32: two offices has 2 sites of 1 nodes of 8. Fix: use at most 16"),
        ({}, 0, 8, "--gpus 0"),
        ({}, 4, 9, "--global-batch 9: each of the 2 sites reads as many sequences. Fix: use a multiple of 2"),
    ],
)
def test_refused(dsx, offices, changes, gpus, batch, what):
    code, out, err = dsx(
        *TINY, *FIXED, "--cluster", offices(**changes), "--gpus", gpus, "--global-batch", batch
    )
    assert (code, out) == (2, "")
    assert what in err
    assert "Fix: " in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("key", "value", "cluster", "what"),
    [
        ("outer", {"islands": 3}, {}, "dsx.outer.islands = 3: a plan has an island on each site"),
        ("outer", {"islands": 2}, {"sites": 1, "across": None}, "cluster two offices has one site"),
        # What islands cannot be combined with is refused here, not by the run.
        ("data", {"source": "here", "streaming": True, "sequence_length": 128}, {}, "dsx.data.streaming"),
    ],
)
def test_refused_configs(dsx, offices, tmp_path, key, value, cluster, what):
    file = tmp_path / "config.json"
    block = {
        "model": {"family": "llama", "preset": "tiny"},
        "data": {"source": "here.txt", "sequence_length": 128},
        "train": {"steps": 10, "output": "there"},
    }
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
    file.write_text(json.dumps({"train_batch_size": 4, "optimizer": optimizer, "dsx": block | {key: value}}))
    code, out, err = dsx(file, "--cluster", offices(**cluster), "--gpus", 4, *FIXED)
    assert (code, out) == (2, "")
    assert what in err
    assert "Fix: " in err


def test_a_layer_list_is_planned_for_one_site(dsx, offices, tmp_path):
    layers, config = tmp_path / "mine.py", tmp_path / "ds.json"
    layers.write_text("def make():\n    raise AssertionError('not asked')\n")
    config.write_text(
        json.dumps({"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}})
    )
    code, out, err = dsx(config, "--layers", f"{layers}:make", "--cluster", offices(), "--gpus", 4)
    assert (code, out) == (2, "")
    assert "cluster two offices: sites = 2: a layer list is planned for one of them. Fix: " in err


def test_an_elastic_run_is_compared_on_one_site(offices):
    content = {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "dsx": {
            "model": {"family": "llama", "preset": "tiny"},
            "data": {"source": "here.txt", "sequence_length": 128},
            "train": {"steps": 10, "output": "there"},
            "elastic": {"cluster": str(offices())},
        },
    }
    with pytest.raises(
        ConfigError, match=r"cluster two offices: sites = 2: runs are compared on one of them\. Fix"
    ):
        resolve(content, world_size=4)
