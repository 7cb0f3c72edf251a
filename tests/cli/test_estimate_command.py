"""dsx estimate: every format and source, what would make a run fit, what is on the host, and nonsense."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from dsx.memory.watch import estimated
from dsx.planner.cluster import preset, read_cluster
from dsx.planner.inputs import PinnedChoices, plan_inputs, plan_search
from loaded import DSX, HEAVY, loaded_by

CONFIGS = Path(__file__).parents[2] / "configs"
COMMAND = ("estimate",)

LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 1408,
    "vocab_size": 1000,
    "max_position_embeddings": 1024,
}


def test_the_table_has_a_row_for_every_pipeline_rank(dsx, monkeypatch):
    _, narrow, _ = dsx(CONFIGS / "zero3.json", "--gpus", 4)
    parts = narrow.split("\n\n")[1:-1]  # not the headline and the note, which are no tables
    assert max(len(line) for part in parts for line in part.splitlines()) <= 80
    monkeypatch.setenv("COLUMNS", "160")
    code, out, err = dsx(CONFIGS / "zero3.json", "--gpus", 4)
    assert (code, err) == (0, "")
    assert "tensor 1 x pipeline 2 x data 2, ZeRO-3" in out
    rows = [line for line in out.splitlines() if line.startswith(("0 (ranks 0-1)", "1 (ranks 2-3)"))]
    assert len(rows) == 2


def test_json_has_every_line_of_every_peak(dsx):
    code, out, _ = dsx(CONFIGS / "llama3_8b_8gpu.json", "--gpus", 8, "--format", "json")
    facts = json.loads(out)
    assert code == 0
    assert (facts["capacity_bytes"], facts["fits"]) == (None, None)
    for role in facts["pipeline_ranks"]:
        assert role["peak_bytes"] == max(phase["peak_bytes"] for phase in role["phases"])
        for phase in role["phases"]:
            assert sum(line["bytes"] for line in phase["lines"]) == phase["peak_bytes"]
            assert all(line["category"] and line["name"] for line in phase["lines"])
            made = [
                each for each in phase["lines"] if each["category"] in ("activations", "logits", "transfers")
            ]
            assert all(line["formula"] and line["source"] for line in made)


def test_on_cpus_it_is_what_a_run_there_says(dsx):
    run = resolve(CONFIGS / "zero3.json", world_size=4)
    code, out, _ = dsx(CONFIGS / "zero3.json", "--gpus", 4, "--cluster", "CPU", "--format", "json")
    assert code == 0
    assert json.loads(out)["peak_bytes"] == estimated(run).peak_bytes


def test_a_model_can_be_a_preset_a_file_or_a_folder(dsx, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    answers = [dsx("--model", source, "--tensor", 2, "--gpus", 2) for source in (file, tmp_path)]
    assert answers[0] == answers[1]
    assert answers[0][0] == 0
    raised = ("--set", "dsx.model.overrides.max_position_embeddings=4096")
    shared = ("--model", file, "--gpus", 4, "--context", 2, "--set", "dsx.data.sequence_length=4096")
    code, _, err = dsx(*shared)
    assert (code, "or raise max_position_embeddings" in err) == (2, True)
    code, out, _ = dsx(*shared, *raised)
    assert (code, "data 2 x context 2" in out, "of 1 x 4096 tokens" in out) == (0, True, True)
    code, out, _ = dsx("--model", file, *raised)
    assert (code, "dsx.data.sequence_length = 4096 (the model's greatest)" in out) == (0, True)
    code, out, _ = dsx("--model", "gpt2", "--gpus", 1, "--micro-batch", 4, "--zero", 0)
    assert (code, out.splitlines()[:2]) == (
        0,
        [
            "gpt2, 124M parameters on 1 rank: tensor 1 x pipeline 1 x data 1, ZeRO-0, bf16, AdamW",
            "1 micro-batch of 4 x 1024 tokens",
        ],
    )


def test_changes_that_would_fit_do_fit(dsx, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    plain = ("--model", file, "--gpus", 4, "--pipeline", 2, "--set", "gradient_accumulation_steps=8")
    small = ("--set", "zero_optimization.reduce_bucket_size=1000000")
    code, out, _ = dsx(*plain, *small, "--format", "json")
    usable = 0.85 * json.loads(out)["peak_bytes"] / (1 << 30)
    capacity = (usable + 2) * 25 / 24  # of which 2 GiB and a twenty-fifth are not for tensors
    code, out, err = dsx(*plain, *small, "--gpu-memory", capacity)
    assert code == 1
    assert "does not fit" in out
    suggestions = [line for line in err.splitlines() if line.startswith("  ")]
    assert len(suggestions) == 3
    for line in suggestions:
        items = line.split("(", 1)[1].rstrip(")").split()
        code, out, _ = dsx(*plain, *small, *items, "--gpu-memory", capacity)
        assert (code, "gaps: fits," in out) == (0, True), line


def test_where_two_changes_do_not_help_a_plan_may(dsx, tmp_path):
    """30 MiB are too little for the layout as it is with any two changes, and enough for another layout."""
    cluster = tmp_path / "small.json"
    cluster.write_text(json.dumps({"gpu": "H100", "memory_gib": 30 / 1024, "reserved_gib": 0}))
    given = ("--model", "llama/tiny", "--gpus", 8, "--cluster", cluster)
    bucket = ("--set", "zero_optimization.reduce_bucket_size=100000")
    code, _, err = dsx(*given, "--zero", 0, "--micro-batch", 8, *bucket)
    assert (code, "no one or two changes make it fit: `dsx plan` looks through" in err) == (1, True)
    inputs = plan_inputs(
        model="llama/tiny",
        config=None,
        cluster=read_cluster(str(cluster)),
        gpus=8,
        global_batch=64,
        sequence_length=1024,
    )
    assert plan_search(inputs, PinnedChoices()).run(1).best[0].fits


def test_charts_are_drawn(dsx, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "memory.svg"
    arguments = (CONFIGS / "zero3.json", "--gpus", 4, "--format", "svg", "--output", picture)
    assert dsx(*arguments, "--gpu-memory", 80) == (0, f"wrote {picture}\n", "")
    assert ET.fromstring(picture.read_text()).tag.endswith("svg")
    many = tmp_path / "many.png"
    wide = ("--model", "gpt2", "--gpus", 12, "--pipeline", 12, "--set", "gradient_accumulation_steps=12")
    assert dsx(*wide, "--format", "png", "--output", many)[0] == 0
    assert many.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "give CONFIG, or --model, or both"),
        (("--model", "gpt3"), 2, "there is no such preset, file or folder"),
        (("--model", "gpt3"), 2, 'write "gpt2", if that is meant'),
        (("--model", "nonsense"), 2, "name one, or the path of a config.json"),
        (("--model", "tiny"), 2, "gpt2/tiny"),
        (("--model", "absent.json"), 2, "there is no such file"),
        (("--model", "mixtral/tiny"), 2, "no such family of presets"),
        (("--model", "FOLDER"), 2, "the folder has no config.json"),
        (("--model", "gpt2", "--gpus", -4), 2, "greater than or equal to 1"),
        (("--model", "gpt2", "--gpu-memory", -80), 2, "it is the GiB of one GPU"),
        (("--model", "gpt2", "--gpu-memory", 2), 2, "take 2.08 GiB, and nothing is left"),
        (("--model", "gpt2", "--gpu-memory", "nan"), 2, "it is the GiB of one GPU"),
        (("--model", "gpt2", "--tensor", 24, "--gpus", 24), 2, "attention heads = 12"),
        (("--model", "gpt2", "--micro-batch", 0), 2, "greater than or equal to 1"),
        (("--model", "gpt2", "--set", "dsx.data.sequence_length=-5"), 2, "sequence_length"),
        (("--model", "gpt2", "--set", "optimizer.type=Shampoo"), 2, "Shampoo"),
        (("--model", "gpt2", "--format", "png"), 2, "it needs a file"),
        (("--model", "gpt2", "--output", "m.csv"), 2, "end it in .txt, .json, .svg, .html, .png or .pdf"),
        (("--model", "gpt2", "--format", "svg", "--output", "m.png"), 2, "ends in .svg"),
    ],
)
def test_nonsense_is_one_message(dsx, tmp_path, arguments, code, words):
    given = [str(tmp_path) if argument == "FOLDER" else argument for argument in arguments]
    ended, out, err = dsx(*given)
    assert (ended, out) == (code, "")
    assert words in " ".join(err.split())


@pytest.mark.parametrize("cluster", ["A100-80", "MI300X", "CPU"])
def test_memory_and_the_cluster_that_has_it_are_one_answer(dsx, cluster):
    run = ("--model", "gpt2", "--gpus", 4, "--zero", 1)
    gib = preset(cluster).memory_bytes >> 30
    named, out = dsx(*run, "--cluster", cluster), f"{gib} GiB"
    assert out in named[1]
    assert dsx(*run, "--cluster", cluster, "--gpu-memory", gib) == named
    assert ("NCCL" in named[1], "oneDNN's kernels" in " ".join(named[1].split())) == (
        cluster != "CPU",
        cluster == "CPU",
    )
    if cluster != "CPU":
        assert dsx(*run, "--gpu-memory", gib)[:2] == named[:2]
        assert f"{gib} GiB less {2 + gib / 25:.2f} for the device's context, libraries and gaps: " in named[1]


def test_a_reserve_of_the_clusters_own_stays(dsx, tmp_path):
    cluster = tmp_path / "ours.json"
    cluster.write_text(json.dumps({"gpu": "H100", "reserved_gib": 1}))
    out = dsx("--model", "gpt2/tiny", "--cluster", cluster, "--gpu-memory", 40)[1]
    assert "40 GiB less 1.00 for the device's context, libraries and gaps: fits" in out


@pytest.mark.parametrize(
    ("content", "gpus", "words"),
    [
        ({"gpu": "H100", "nodes": 1}, 64, "--gpus 64: ours has 1 node of 8. Fix: use at most 8"),
        ({"gpu": "H100"}, 12, "--gpus 12: nodes of ours have 8 GPUs each. Fix: use whole nodes: 8 or 16"),
        (
            {"gpu": "CPU", "gpus_per_node": 4, "nodes": 2},
            12,
            "--gpus 12: ours has 2 nodes of 4. Fix: use at most 8",
        ),
    ],
)
def test_gpus_that_the_cluster_has_not_are_refused_as_by_plan(tmp_path, dsx, content, gpus, words):
    cluster = tmp_path / "ours.json"
    cluster.write_text(json.dumps(content))
    code, out, err = dsx("--model", "gpt2/tiny", "--gpus", gpus, "--cluster", cluster)
    assert (code, out) == (2, "")
    assert words in " ".join(err.split())
    inputs = {"config": None, "global_batch": 96, "sequence_length": 64}
    with pytest.raises(ConfigError) as refused:
        plan_inputs(model="gpt2/tiny", cluster=read_cluster(str(cluster)), gpus=gpus, **inputs)
    assert str(refused.value) in " ".join(err.split())


def test_an_ordinary_json_with_a_model(dsx, tmp_path):
    """The Trainer's, with every batch key "auto": what was assumed is said, and is what was counted."""
    file = tmp_path / "ds_config.json"
    auto = dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto")
    file.write_text(json.dumps(auto | {"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 3}}))
    code, out, err = dsx(file, "--model", "gpt2/tiny", "--gpus", 2)
    assert (code, err) == (0, "")
    assert "ZeRO-3, bf16, AdamW" in out.splitlines()[0]
    assert "  train_micro_batch_size_per_gpu = 8 (the Trainer's default)\n" in out
    assert "  dsx.data.sequence_length = 512 (the model's greatest)\n" in out
    facts = json.loads(dsx(file, "--model", "gpt2/tiny", "--gpus", 2, "--format", "json")[1])
    assert facts["assumed"]["train_micro_batch_size_per_gpu"] == 8
    assert facts["run"]["batch"]["micro_batch_size"] == 8
    said = ("--set", "train_micro_batch_size_per_gpu=8", "--set", "dsx.data.sequence_length=512")
    again = json.loads(dsx(file, "--model", "gpt2/tiny", "--gpus", 2, *said, "--format", "json")[1])
    assert again["peak_bytes"] == facts["peak_bytes"]
    assert not again["assumed"].keys() & {"train_micro_batch_size_per_gpu", "dsx.data.sequence_length"}
    code, _, err = dsx(file, "--gpus", 2)
    assert (code, "give --model" in err) == (2, True)


def test_what_a_model_alone_assumes_is_said(dsx):
    out = dsx("--model", "gpt2")[1]
    assert "  train_micro_batch_size_per_gpu = 1 (nothing says it)\n" in out
    assert "  dsx.data.sequence_length = 1024 (the model's greatest)\n" in out
    assert "  bf16.enabled = true (nothing says it)\n" in out
    assert "train_micro" not in dsx("--model", "gpt2", "--micro-batch", 4)[1]


def test_no_torch_is_needed_once_the_layers_are_recorded(dsx):
    words = ("--model", "llama-3-8b", "--gpus", 8, "--zero", 3)
    assert dsx(*words)[0] == 0
    printed, loaded = loaded_by(DSX, "estimate", *words)
    assert "ZeRO-3" in printed
    assert not loaded & HEAVY


CONFIG = Path(__file__).parents[2] / "configs" / "zero3_offload.json"


def test_the_hosts_lines_add_up(dsx):
    code, out, err = dsx(CONFIG, "--gpus", 4, "--format", "json")
    assert (code, err) == (0, "")
    for role in json.loads(out)["pipeline_ranks"]:
        held = {line["name"]: line["bytes"] for line in role["host_lines"]}
        assert sum(held.values()) == role["host_bytes"] > 0
        assert held["moments"] == 2 * held["master weights"]
        names = {line["name"] for phase in role["phases"] for line in phase["lines"]}
        assert not names & {"moments", "master weights", "gradient partitions"}


def test_the_table_says_it_in_a_line(dsx):
    _, out, _ = dsx(CONFIG, "--gpus", 4)
    (line,) = [line for line in out.splitlines() if line.startswith("on the host, a rank: up to ")]
    assert "moments" in line


def test_8_billion_parameters_fit_a_gpu_that_holds_no_two_copies_of_them(dsx):
    """ZeRO-2 flattens them on the host then: 16 GB of weights, 24 GiB of memory."""
    sizes = ("--set", "dsx.data.sequence_length=512", "--set", "dsx.recompute=full")
    offload = ("--set", "zero_optimization.offload_optimizer.device=cpu")
    bucket = ("--set", "zero_optimization.reduce_bucket_size=50000000")
    run = ("--model", "llama-3-8b", "--gpus", 8, "--zero", 2, *sizes, *offload, *bucket)
    code, out, _ = dsx(*run, "--gpu-memory", 24)
    assert code == 0
    assert "24 GiB less 2.96 for the device's context, libraries and gaps: fits" in out
    assert "parameters on their way 14.96" in " ".join(out.split())
    engine = []
    for gib in (24, 80):
        _, out, _ = dsx(*run, "--gpu-memory", gib, "--format", "json")
        phases = json.loads(out)["pipeline_ranks"][0]["phases"]
        engine += [phase["peak_bytes"] for phase in phases if phase["name"] == "engine"]
    assert engine[0] < 20 * 2**30 < 29 * 2**30 < engine[1]
