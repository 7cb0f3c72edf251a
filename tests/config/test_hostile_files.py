"""Files that commands and runs read beside checkpoints, spoilt: a good end or one clear error, always."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest

import mutant_runs
from dsx.config.ordinary import starter
from dsx.config.resolve import resolve
from dsx.config.schema import DataConfig
from dsx.data.corpus import Corpus, prepare
from dsx.errors import DsxError
from dsx.hub.model_structure import hf_config_of
from dsx.models.config_values import MOST_LAYERS
from dsx.planner.cluster import read_cluster
from dsx.planner.profile import Profile
from dsx.schedules.trace import Trace
from dsx.train.curves import read_series
from dsx.train.tracking import MetricsFile
from often import often
from planner.profiles import profile, random_layers
from traced import by_hand

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "rms_norm_eps": 1e-5,
}
QWEN = LLAMA | {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
}
CLUSTER = {
    "gpus_per_node": 8,
    "nodes": 2,
    "memory_gib": 40,
    "memory_gigabytes_per_second": 1000,
    "teraflops": {"bf16": 100.0, "fp32": 20},
    "inside": {"gigabytes_per_second": 100, "latency_microseconds": 3},
    "between": {"gigabytes_per_second": 10},
}


def run_config(model: dict) -> dict:
    return {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 1},
        "dsx": {
            "model": model,
            "data": {"tokenizer": "bytes", "sequence_length": 32},
            "train": {"steps": 1, "output": "runs/a"},
        },
    }


def config_json(folder: Path) -> None:
    """As ``dsx.model.path`` and as ``--model``."""
    resolve(run_config({"path": str(folder), "weights": "random"}), world_size=2)
    starter(model=str(folder), gpus=2)


def ds_config(folder: Path) -> None:
    resolve(folder / "ds.json", world_size=2)


def cluster(folder: Path) -> None:
    read_cluster(str(folder / "cluster.json"))


def text_of(file: Path) -> str:
    """As those who call these readers get it: an error of the file's own is theirs."""
    if not file.is_file():
        raise DsxError(str(file), "it is no file", "give another")
    return file.read_text(errors="replace")


def a_profile(folder: Path) -> None:
    Profile.from_json(text_of(folder / "profile.json")).transfer_seconds("none")


def a_trace(folder: Path) -> None:
    Trace.from_json(text_of(folder / "step1.json"), where="step1.json")


def corpus(folder: Path) -> None:
    text = Corpus.open(folder / "corpus", sequence_length=16, vocab_size=300)
    assert len(text.train)
    if text.info.held_out.documents and text.info.held_out.tokens:
        text.bits_per_byte(1.0)


def data_config(source: Path, **more: object) -> DataConfig:
    return DataConfig(source=str(source), tokenizer="bytes", sequence_length=16, **more)


def lines(folder: Path) -> None:
    prepare(data_config(folder / "texts.jsonl"), folder / "cache")


TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chats(folder: Path) -> None:
    data = data_config(folder / "chats.jsonl", format="chat", chat_template=TEMPLATE, held_out=0)
    prepare(data, folder / "cache")


def pairs(folder: Path) -> None:
    data = data_config(folder / "pairs.jsonl", format="completion", chat_template=TEMPLATE, held_out=0)
    prepare(data, folder / "cache")


def metrics(folder: Path) -> None:
    """As ``dsx plot`` reads it, and as a run that goes on."""
    MetricsFile(folder / "metrics.jsonl", first_step=3).close()
    read_series(folder / "metrics.jsonl")


READERS = {
    "config.json": config_json,
    "ds.json": ds_config,
    "cluster.json": cluster,
    "profile.json": a_profile,
    "step1.json": a_trace,
    "corpus/corpus.json": corpus,
    "metrics.json": metrics,
    "texts.json": lines,
    "chats.json": chats,
    "pairs.json": pairs,
}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
CHAT = [
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": "So.", "weight": 1, "tool_calls": [CALL]},
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "files"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "ds.json").write_text(json.dumps(run_config({"config": QWEN})))
    (folder / "cluster.json").write_text(json.dumps(CLUSTER))
    (folder / "profile.json").write_text(profile(random_layers(5, 1)).to_json())
    (folder / "step1.json").write_text(by_hand().to_json())
    # One record and one text each, which the mutator spoils as JSON; their readers get lines of them.
    (folder / "metrics.json").write_text(json.dumps({"train/step": 1, "train/loss": 2.5, "lr": 1e-3}))
    (folder / "texts.json").write_text(json.dumps({"text": "some text\n" * 9, "id": 3}))
    (folder / "chats.json").write_text(json.dumps({"messages": CHAT, "tools": [{"type": "function"}]}))
    (folder / "pairs.json").write_text(json.dumps({"prompt": CHAT[:1], "completion": CHAT[1:]}))
    (folder / "all.txt").write_text("".join(f"line {n} of a text\n\n" for n in range(2000)))
    made = prepare(data_config(folder / "all.txt", held_out=0.4), folder / "c")
    shutil.move(made, folder / "corpus")
    return folder


def read_all(folder: Path, seed: int) -> str:
    """The file that is another than before, by its reader."""
    for name in ("metrics", "texts", "chats", "pairs"):
        path = folder / f"{name}.json"
        line = path.read_bytes().replace(b"\n", b" ") if path.is_file() else b""
        others = {"text": "more text " * 20, "messages": CHAT, "prompt": "a", "completion": "b"}
        other = json.dumps({"train/step": 2, "train/loss": 2.0, **others}).encode()
        (folder / f"{name}.jsonl").write_bytes(other + b"\n" + line + b"\n" + other + b"\n")
    name = sorted(READERS)[seed % len(READERS)]
    READERS[name](folder)
    return name


@pytest.mark.parametrize("block", often(range(0, 8000, 80), 100))
def test_a_good_end_or_one_error(good: Path, tmp_path: Path, block: int) -> None:
    names = sorted(READERS)
    found: list[mutant_runs.Outcome] = []
    for at, name in enumerate(names):
        seeds = range(block + at, block + 80, len(names))
        found += mutant_runs.outcomes(seeds, good, tmp_path, read_all, allowed=(DsxError,), files=[name])
    assert [one for one in found if not one.good] == []
    assert len(found) == 80
    assert len(mutant_runs.counted(found)) > 2


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 3_000_000, f"dsx takes at most {MOST_LAYERS:,}"),
        ("num_hidden_layers", 10**9, f"dsx takes at most {MOST_LAYERS:,}"),
        ("hidden_size", 10**15, "dsx takes at most 2,147,483,647"),
        ("hidden_size", 1_000_000_007, "does not divide by it"),
        ("vocab_size", -1, "not a whole number of at least 1"),
        ("rms_norm_eps", 10**400, "beyond 1e308"),
        ("architectures", [[1]], "dsx builds llama language models"),
        ("model_type", "\x1b[2J", r"model_type = '\\x1b[2J'"),
        ("num_attention_headz\x1b", 4, "num_attention_headz\\u001b = 4"),
        ("hidden_act", "x" * 10**6, "(1,000,002 characters)"),
    ],
)
def test_sizes_have_a_most_and_values_are_quoted_in_part(tmp_path: Path, key: str, value, words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {key: value}))
    for model in ({"path": str(tmp_path), "weights": "random"}, {"config": LLAMA | {key: value}}):
        with pytest.raises(DsxError) as error:
            resolve(run_config(model), world_size=2)
        said = str(error.value)
        assert words.replace("\\\\", "\\") in said or "beyond 1e308" in said
        assert said.isprintable()
        assert len(said) < 1500


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": NaN}', "it has no model_type|model_type|NaN"),
        ('{"model_type": "llama", "hidden_size": 1e999}', "beyond 1e308"),
        ('{"model_type": "llama", "x": "\\ud800"}', "half of a character"),
        ('{"model_type": "llama", "hidden_size": 8, "hidden_size": 16}', "written twice"),
        ("", "empty"),
        ("[1]", "not an object"),
    ],
)
def test_a_config_json_is_read_like_every_config(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(DsxError, match=words):
        config_json(tmp_path)


def test_a_config_json_may_hold_infinities(tmp_path: Path) -> None:
    """As published ones of Mamba2 do, which Python's json wrote: in a folder, a file, and written out."""
    from transformers import Mamba2Config

    sizes = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "n_groups": 1}
    content = {"model_type": "mamba2", **sizes, "head_dim": 8, "num_heads": 8, "expand": 2, "chunk_size": 16}
    wanted = Mamba2Config.from_dict(content | {"time_step_limit": [0.25, float("inf")]})
    file = tmp_path / "config.json"
    file.write_text(json.dumps(wanted.to_dict()))
    assert "Infinity]" in file.read_text()
    models = [
        {"path": str(tmp_path), "weights": "random"},
        {"config": json.loads(file.read_text())},
        {"config": content, "overrides": {"time_step_limit": [0.25, math.inf]}},
    ]
    runs = [starter(model=str(name), gpus=1).run for name in (tmp_path, file)]
    (tmp_path / "ds.json").write_text(json.dumps(run_config(models[1])))
    sources = (*map(run_config, models), tmp_path / "ds.json")
    runs += [resolve(source, world_size=1) for source in sources]
    for run in runs:
        json.dumps(run.hf_config, allow_nan=False)
        assert hf_config_of(run.hf_config).time_step_limit == wanted.time_step_limit
