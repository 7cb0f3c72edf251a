"""Resolving: degrees, chunks, schedule, batch, notes, and that a resolved config resolves to itself."""

from __future__ import annotations

import importlib
import itertools
import json
from math import gcd, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_config import BASE, REMOVE, changed

import dsx
from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from dsx.parallel.limits import row_multiple
from dsx.train.progress import start_rows


def degrees(edits: dict, world_size: int) -> tuple[int, int, int, int]:
    """(tp, pp, chunks, dp)"""
    run = resolve(changed(edits), world_size=world_size)
    return run.mesh.tp, run.mesh.pp, run.chunks, run.mesh.dp


@pytest.mark.parametrize(
    ("world_size", "edits", "wanted"),
    [
        (1, {}, (1, 1, 1, 1)),
        (2, {}, (1, 1, 1, 2)),
        (4, {}, (1, 2, 2, 2)),
        (8, {}, (2, 2, 2, 2)),
        (16, {}, (2, 2, 2, 4)),
        # Blocks and heads run out: 4 blocks, 4 key/value heads; the rest is data parallel.
        (64, {}, (4, 4, 1, 4)),
        (1024, {}, (4, 4, 1, 64)),
        # Largest prime first: 12 = 3 x 2 x 2, 6 = 3 x 2.
        (12, {}, (2, 2, 2, 3)),
        (6, {}, (1, 2, 2, 3)),
        (3, {}, (1, 1, 1, 3)),
        # Fixed degrees leave the rest to the others.
        (8, {"dsx.parallel.tensor": 4}, (4, 1, 1, 2)),
        (8, {"dsx.parallel.tensor": 1}, (1, 2, 2, 4)),
        (8, {"dsx.parallel.pipeline": 4}, (1, 4, 1, 2)),
        (8, {"dsx.parallel.pipeline": 1}, (2, 1, 1, 4)),
        (8, {"dsx.parallel.pipeline": 2, "dsx.parallel.tensor": 2}, (2, 2, 2, 2)),
        (8, {"dsx.parallel.pipeline": 2, "dsx.parallel.tensor": 4}, (4, 2, 2, 1)),
        # Chunks narrow the pipeline: 4 blocks hold 2 x 2 stages, not 4 x 2.
        (64, {"dsx.parallel.chunks": 2}, (4, 2, 2, 8)),
        (64, {"dsx.schedule.name": "interleaved"}, (4, 2, 2, 8)),
        (4, {"dsx.schedule.name": "1f1b"}, (1, 2, 1, 2)),
        (4, {"dsx.parallel.chunks": 1}, (1, 2, 1, 2)),
        (2, {"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 3}, (1, 2, 3, 1)),
        # No pipeline: chunks and interleaving are moot.
        (2, {"dsx.parallel.chunks": 4}, (1, 1, 1, 2)),
        (2, {"dsx.schedule.name": "interleaved"}, (1, 1, 1, 2)),
        # An explicit partition says how many stages there are.
        (2, {"dsx.parallel.pipeline": 2, "dsx.partition.method": [2, 1, 1, 3]}, (1, 2, 2, 1)),
        (2, {"dsx.parallel.pipeline": 2, "dsx.partition.method": [3, 4]}, (1, 2, 1, 1)),
        # A sequence that tensor parallelism cannot shard.
        (8, {"dsx.data.sequence_length": 255}, (1, 2, 2, 4)),
        (8, {"dsx.data.sequence_length": 255, "dsx.parallel.sequence_parallel": False}, (2, 2, 2, 2)),
    ],
)
def test_degrees(world_size, edits, wanted):
    assert degrees(edits, world_size) == wanted


CONTEXT = {"dsx.parallel.context": 2}


def test_context_takes_its_ranks_before_auto_shares_out_the_rest():
    run = resolve(changed(CONTEXT), world_size=16)
    assert dict(run.mesh.axes) == {"pp": 2, "dp": 2, "cp": 2, "tp": 2}
    assert run.global_batch_size == run.micro_batch_size * run.accumulation * run.mesh.dp
    assert run.resolved()["dsx"]["parallel"]["context_method"] == "all_gather"
    assert "dsx.parallel.context_method: auto -> all_gather" in run.notes
    assert "rows shared by all_gather" in dict(start_rows(run, device_name="CPU"))["layout"]
    assert not any("context" in note for note in resolve(changed({}), world_size=16).notes)
    assert run.tokens_of_rank == run.micro_batch_size * run.sequence_length // 2
    # Heads that tensor ranks have left are too few for Ulysses, and auto gives tensor fewer ranks.
    alone = changed(CONTEXT | {"dsx.parallel.context_method": "ulysses", "dsx.parallel.pipeline": 1})
    assert resolve(alone, world_size=1024).mesh.tp == 4
    alone["dsx"]["parallel"]["context"] = 4
    assert resolve(alone, world_size=1024).mesh.tp == 2


@pytest.mark.parametrize(("context", "tensor"), [*itertools.product((1, 2, 3), (1, 2, 3, 4))])
def test_rows_are_no_longer_than_it_takes_to_cut_them(context, tensor):
    def cuts(length):
        chunks = 2 * context if context > 1 else 1
        return length % chunks == 0 and length // context % tensor == 0

    assert row_multiple(context, tensor) == next(filter(cuts, itertools.count(1)))


@pytest.mark.parametrize(
    ("edits", "world_size", "words"),
    [
        ({}, 3, ("context = 2", "world size 3", "use 1")),
        ({"dsx.data.sequence_length": 254}, 2, ("context = 2", "254", "not divisible by 4", "use 1")),
        (
            {"dsx.data.sequence_length": 252, "dsx.parallel.tensor": 4},
            8,
            ("tensor = 4", "2 chunks", "use 1 or 2"),
        ),
        (
            {"dsx.parallel.tensor": 2, "dsx.parallel.pipeline": 2},
            4,
            ("x context 2", "or dsx.parallel.context"),
        ),
        (
            {"dsx.parallel.context_method": "ulysses", "dsx.parallel.context": 16},
            16,
            ("context_method", "8 attention heads", "all_gather"),
        ),
        ({"dsx.parallel.context_method": "rings"}, 2, ("context_method", "rings", "all_gather", "ring")),
        (
            {"dsx.parallel.context_method": "ring", "dsx.model.overrides": {"attention_dropout": 0.1}},
            2,
            ("context_method", "ring", "drops scores of attention (0.1)", "all_gather"),
        ),
        ({"dsx.parallel.context": "auto"}, 2, ("dsx.parallel.context", "auto")),
        ({"dsx.profile": "measure"}, 4, ("dsx.profile", "whole sequences", "context 1")),
    ],
)
def test_a_context_that_cannot_be_is_refused_by_name(edits, world_size, words):
    with pytest.raises(ConfigError) as caught:
        resolve(changed(CONTEXT | edits), world_size=world_size)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@given(
    world_size=st.integers(1, 512),
    heads=st.sampled_from([2, 6, 12, 40]),
    blocks=st.integers(1, 30),
    schedule=st.sampled_from(["auto", "1f1b", "gpipe"]),
)
def test_auto_is_always_legal_and_uses_every_rank(world_size, heads, blocks, schedule):
    model = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_key_value_heads": heads}
    model |= {"intermediate_size": 32 * heads, "num_hidden_layers": blocks}
    run = resolve(
        changed(
            {
                "dsx.model": {"family": "llama", "preset": "tiny", "overrides": model},
                "dsx.schedule.name": schedule,
            }
        ),
        world_size=world_size,
    )
    tp, pp, dp = run.mesh.tp, run.mesh.pp, run.mesh.dp
    assert tp * pp * dp == world_size
    assert gcd(heads, 4 * 8 * heads, 256) % tp == 0
    assert tp <= 8
    assert pp * run.chunks <= blocks or (pp == 1 and run.chunks == 1)
    assert run.stage_map.num_stages == pp * run.chunks
    assert run.schedule_name == (schedule if schedule != "auto" else ("1f1b", "interleaved")[run.chunks > 1])


def test_every_stage_of_the_3d_run_holds_a_block():
    run = resolve(BASE, world_size=8)
    # 0 embedding, 1-4 blocks, 5 norm, 6 head.
    assert [list(run.stage_map.layers(stage)) for stage in range(4)] == [[0, 1], [2], [3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("edits", "world_size", "wanted"),
    [
        ({}, 1, (8, 2, 4)),
        ({}, 2, (16, 2, 4)),
        ({}, 8, (16, 2, 4)),  # dp is 2
        ({"gradient_accumulation_steps": REMOVE}, 2, (4, 2, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": REMOVE}, 2, (32, 2, 8)),
        ({"train_batch_size": 32, "train_micro_batch_size_per_gpu": REMOVE}, 2, (32, 4, 4)),
        ({"train_batch_size": 16}, 2, (16, 2, 4)),
    ],
)
def test_batch(edits, world_size, wanted):
    run = resolve(changed(edits), world_size=world_size)
    assert (run.global_batch_size, run.micro_batch_size, run.accumulation) == wanted
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert tuple(run.deepspeed[name] for name in names) == wanted
    assert run.global_batch_size == run.micro_batch_size * run.accumulation * run.mesh.dp
    assert run.tokens_per_step == run.global_batch_size * 256


def test_train_batch_size_alone_follows_data_parallelism():
    edits = {
        "train_batch_size": 32,
        "train_micro_batch_size_per_gpu": REMOVE,
        "gradient_accumulation_steps": REMOVE,
    }
    run = resolve(changed(edits), world_size=2)
    assert (run.micro_batch_size, run.accumulation) == (16, 1)


def test_precision_zero_and_clipping():
    run = resolve(BASE, world_size=1)
    assert (run.precision, run.zero_stage, run.gradient_clipping) == ("fp32", 1, 1.0)
    edits = {"bf16": {"enabled": True}, "zero_optimization": REMOVE, "gradient_clipping": 0}
    run = resolve(changed(edits), world_size=1)
    assert (run.precision, run.zero_stage, run.gradient_clipping) == ("bf16", 0, 0.0)
    assert resolve(changed({"bfloat16": {"enabled": True}}), world_size=1).precision == "bf16"
    assert resolve(changed({"bf16": {"enabled": False}}), world_size=1).precision == "fp32"


def test_deepspeed_keys_pass_through_untouched():
    extra = {
        "wall_clock_breakdown": True,
        "steps_per_print": 10,
        "communication_data_type": "fp32",
        "csv_monitor": {"enabled": True, "output_path": "auto"},
        "comms_logger": {"enabled": False},
    }
    run = resolve(changed(extra), world_size=1)
    assert {key: run.deepspeed[key] for key in extra} == extra
    assert "dsx" not in run.deepspeed
    assert "steps_per_print" not in resolve(BASE, world_size=1).deepspeed


def notes(edits: dict, world_size: int = 1, config=None) -> str:
    return "\n".join(resolve(config or changed(edits), world_size=world_size).notes)


def test_notes_say_what_auto_became():
    said = notes({}, 8)
    for word in ("parallel.tensor: auto -> 2", "pipeline: auto -> 2", "chunks: auto -> 2"):
        assert word in said
    assert "schedule.name: auto -> interleaved" in said


def test_notes_on_defaults_and_costs():
    assert "gradient_clipping" not in notes({})
    assert "gradient_clipping: 1.0" in notes({"gradient_clipping": REMOVE})
    assert "torch_adam" in notes({"optimizer.params": {"lr": 1e-3}})
    assert "torch_adam" not in notes({})
    assert "chunks: 3 -> 1" in notes({"dsx.parallel.chunks": 3})
    assert "2 x 4 times a step" in notes({"zero_optimization.stage": 3}, 4)
    assert "feeds a pipeline of 4" in notes({"gradient_accumulation_steps": 2, "dsx.parallel.pipeline": 4}, 4)
    scheduler = {"type": "WarmupDecayLR", "params": {"total_num_steps": 5}}
    assert "total_num_steps = 5" in notes({"scheduler": scheduler})
    assert "some stages hold none" in notes({"dsx.parallel.pipeline": 2, "dsx.parallel.chunks": 3}, 2)


def test_bytes_set_the_vocabulary_of_a_preset_only():
    real = {"family": "gpt2", "preset": "gpt2"}
    run = resolve(changed({"dsx.model": real}), world_size=1)
    assert run.model.vocab_size == run.hf_config["vocab_size"] == 257
    assert "vocabulary 257" in "\n".join(run.notes)
    named = resolve(changed({"dsx.model": real, "dsx.data.tokenizer": "gpt2"}), world_size=1)
    assert named.model.vocab_size == 50257
    own = resolve(changed({"dsx.model": real | {"overrides": {"vocab_size": 512}}}), world_size=1)
    assert own.model.vocab_size == 512
    inline = {"config": {"model_type": "gpt2", "vocab_size": 300}}
    assert resolve(changed({"dsx.model": inline}), world_size=1).model.vocab_size == 300


def test_model_folder(tmp_path):
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    edits = {"dsx.model": {"path": str(tmp_path)}}
    run = resolve(changed(edits), world_size=1)
    assert run.weights is None
    assert run.hf_config == config
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "tokenizer.json").write_bytes(b"")
    assert resolve(changed(edits), world_size=1).weights == tmp_path
    edits["dsx.model"]["weights"] = "random"
    assert resolve(changed(edits), world_size=1).weights is None


@pytest.mark.parametrize("world_size", [1, 2, 4, 6, 8, 16])
@pytest.mark.parametrize("schedule", ["auto", "interleaved"])
def test_resolved_config_resolves_to_itself(world_size, schedule):
    run = resolve(changed({"dsx.schedule.name": schedule}), world_size=world_size)
    resolved = json.loads(json.dumps(run.resolved()))
    assert "auto" not in json.dumps(resolved["dsx"]["parallel"] | resolved["dsx"]["schedule"])
    again = resolve(resolved, world_size=world_size)
    assert again.resolved() == resolved
    same = ("mesh", "chunks", "schedule_name", "stage_map", "param_specs", "model", "global_batch_size")
    assert all(getattr(again, name) == getattr(run, name) for name in same)
    with pytest.raises(ConfigError):
        resolve(resolved, world_size=5 * world_size + 1 if world_size > 1 else 0)


def test_auto_tokenizer(tmp_path):
    def tokenizer(edits):
        return resolve(changed(edits), world_size=1).dsx.data.tokenizer

    assert tokenizer({}) == "bytes"
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 300}
    (tmp_path / "config.json").write_text(json.dumps(config))
    folder = {"dsx.model": {"path": str(tmp_path)}}
    assert tokenizer(folder) == "bytes"  # a new model of that shape: any tokenizer will do
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"has weights but no tokenizer") as error:
        tokenizer(folder)
    assert 'dsx.data.tokenizer = "auto"' in str(error.value)
    assert tokenizer(folder | {"dsx.model.weights": "random"}) == "bytes"
    assert tokenizer(folder | {"dsx.data.tokenizer": "bytes"}) == "bytes"
    (tmp_path / "tokenizer.json").write_bytes(b"")
    assert tokenizer(folder) == str(tmp_path)
    assert resolve(changed(folder), world_size=1).resolved()["dsx"]["data"]["tokenizer"] == str(tmp_path)


def test_local_parameters():
    """Against the model's own count: both ends of a pipeline hold the tied table."""
    gpt2 = {"family": "gpt2", "preset": "tiny", "vocab_multiple": 1}
    one = resolve(changed({"dsx.model": gpt2}), world_size=1)
    assert one.layout.local_parameters(0) == one.num_parameters
    two = resolve(changed({"dsx.model": gpt2, "dsx.parallel.pipeline": 2}), world_size=2)
    table = prod(one.param_specs[0].shape)
    assert two.layout.local_parameters(0) + two.layout.local_parameters(1) == one.num_parameters + table


def test_public_names():
    assert set(dsx._HOMES) | {"__version__"} == set(dsx.__all__)
    for name, (home, there) in dsx._HOMES.items():
        module = importlib.import_module(home)
        assert getattr(dsx, name) is (getattr(module, there) if there else module)
    assert dsx.load_config is resolve
    assert dsx.ConfigError is ConfigError
    with pytest.raises(AttributeError, match="no attribute 'engine_room'"):
        _ = dsx.engine_room


def test_what_fine_tuning_can_do_by_mistake_is_noted():
    content = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "dsx": {
            "model": {"family": "llama", "preset": "tiny"},
            "data": {"source": "chats.jsonl", "format": "chat", "sequence_length": 32},
            "train": {"steps": 1, "output": "unused"},
        },
    }

    def noted(**block):
        return " ".join(resolve({**content, "dsx": {**content["dsx"], **block}}, world_size=1).notes)

    joined = content["dsx"]["data"] | {"documents": "joined"}
    assert "what it adapts is random" in noted(adapter={})
    assert "what it adapts is random" not in noted()
    assert "chats are cut anywhere" in noted(data=joined)
    assert "chats are cut anywhere" not in noted()
