"""``dsx.faults``, ``dsx.zero``, ``dsx.train.freeze``, ``trace_steps``: what they take and what is refused."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from sample_config import changed

import dsx
from dsx.config.resolve import resolve
from dsx.config.schema import FaultsConfig, ZeroConfig
from dsx.errors import ConfigError
from dsx.planner.predicted import layout_of

REDUCE, KEEP = "dsx.zero.reduce", "dsx.zero.keep_gathered_bytes"


def test_a_run_without_the_block_stops_at_nan_and_saves_at_sigterm() -> None:
    faults = resolve(changed({}), world_size=1).dsx.faults
    assert faults == FaultsConfig()
    assert (faults.nonfinite, faults.loss_spike, faults.stop_signals) == ("stop", "off", ("SIGTERM",))


def test_signals_are_a_list_of_names() -> None:
    config = changed({"dsx.faults.stop_signals": ["SIGUSR1", "SIGTERM"]})
    resolved = resolve(config, world_size=1)
    assert resolved.dsx.faults.stop_signals == ("SIGUSR1", "SIGTERM")
    assert resolve(resolved.resolved(), world_size=1).dsx.faults == resolved.dsx.faults


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dsx.faults.stop_signals", ["SIGKILL"]),
        ("dsx.faults.stop_signals", "SIGTERM"),
        ("dsx.faults.hang_seconds", -1.0),
        ("dsx.faults.grace_seconds", 0.0),
        ("dsx.faults.nonfinite", "ignore"),
        ("dsx.faults.replicas_differ", "skip"),
        ("dsx.faults.spike_window", 1),
        (KEEP, -1),
        (KEEP, "1 GiB"),
        (REDUCE, "never"),
    ],
)
def test_other_values_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key):
        resolve(changed({key: value, "zero_optimization.stage": 3}), world_size=1)


@pytest.mark.parametrize("key", ["nonfinite", "loss_spike", "grad_norm_spike", "replicas_differ"])
def test_a_roll_back_needs_checkpoints(key: str) -> None:
    edits = {f"dsx.faults.{key}": "roll_back", "dsx.faults.check_replicas_every": 1}
    with pytest.raises(ConfigError, match=f'dsx.faults.{key} = "roll_back": dsx.train.save_every = 0'):
        resolve(changed(edits), world_size=1)
    resolve(changed({**edits, "dsx.train.save_every": 5}), world_size=1)
    if key == "replicas_differ":
        resolve(changed({f"dsx.faults.{key}": "roll_back"}), world_size=1)


@pytest.mark.parametrize(("key", "value", "right"), [(REDUCE, "micro_batch", 2), (KEEP, 4096, 3)])
def test_each_setting_belongs_to_one_stage(key: str, value: str | int, right: int) -> None:
    for stage in range(4):
        config = changed({key: value, "zero_optimization.stage": stage})
        if stage == right:
            zero = resolve(config, world_size=1).dsx.zero
            assert getattr(zero, key.rpartition(".")[2]) == value
            continue
        with pytest.raises(ConfigError, match=f"ZeRO stage {right}") as caught:
            resolve(config, world_size=1)
        assert key in str(caught.value)


def test_defaults_suit_every_stage() -> None:
    for stage in range(4):
        assert resolve(changed({"zero_optimization.stage": stage}), world_size=1).dsx.zero == ZeroConfig()


@pytest.mark.parametrize("chosen", [None, "step", "micro_batch"])
def test_with_offload_each_of_several_micro_batches_is_reduced_unless_asked(
    chosen: str | None,
) -> None:
    for device, batch in product(("none", "cpu"), (2, 4)):
        edits = {REDUCE: chosen, "zero_optimization.stage": 2, "train_micro_batch_size_per_gpu": 2}
        edits |= {"train_batch_size": batch, "gradient_accumulation_steps": batch // 2}
        edits |= {"zero_optimization.offload_optimizer": {"device": device}}
        run = resolve(changed(edits), world_size=1)
        expected = chosen == "micro_batch" or (chosen is None and device == "cpu" and batch == 4)
        assert run.reduces_micro_batches == layout_of(run).reduces_micro_batches == expected


CONFIG = Path(__file__).parents[2] / "configs" / "zero1.json"


def _traced(*overrides):
    return resolve(CONFIG, world_size=1, overrides=["dsx.train.steps=6", *overrides])


def test_steps_of_the_run_are_traced():
    assert _traced().dsx.train.trace_steps == []
    assert _traced("dsx.train.trace_steps=[5,6]").dsx.train.trace_steps == [5, 6]


@pytest.mark.parametrize(
    ("steps", "says"),
    [("[5,7]", "trace_steps names step 7, and steps = 6 is the last"), ("[0]", "trace_steps"), ("5", "list")],
)
def test_other_steps_are_refused(steps, says):
    with pytest.raises(ConfigError, match=r"dsx\.train") as refused:
        _traced(f"dsx.train.trace_steps={steps}")
    assert says in str(refused.value)


def _resolved(freeze: list[str], **model: Any) -> Any:
    content = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "dsx": {
            "model": {"preset": "tiny", "family": "llama", **model},
            "data": {"sequence_length": 16},
            "train": {"steps": 2, "output": "unused", "freeze": freeze},
        },
    }
    return dsx.load_config(content, world_size=1)


def _frozen(config: Any) -> set[str]:
    return {name for spec in config.param_specs if not spec.trained for name in spec.hf}


def test_expressions_are_searched_for_in_hugging_face_names() -> None:
    block = "model.layers.1."
    found = _frozen(_resolved(["embed_tokens", r"^model\.layers\.1\."]))
    assert "model.embed_tokens.weight" in found
    assert {name for name in found if name.startswith(block)} == {
        name for spec in _resolved([]).param_specs for name in spec.hf if name.startswith(block)
    }
    assert len(found) == 10
    assert _frozen(_resolved(["self_attn.[qkv]_proj"])) > {"model.layers.0.self_attn.k_proj.weight"}
    alone = _frozen(_resolved([r"0\.self_attn\.q_proj"], implementation="transformers"))
    assert alone == {"model.layers.0.self_attn.q_proj.weight"}


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        (["embed_token$"], ("dsx.train.freeze[0]", "no parameter", 'write "embed_tokens"')),
        (["norm", "model.layer.0"], ("dsx.train.freeze[1]", 'write "model.layers.0"')),
        (["("], ("no regular expression", "'('")),
        ([""], ("leaves nothing to train",)),
        (["q_proj"], ("self_attn.q_proj.weight and not", "one tensor here", '"transformers"')),
    ],
    ids=str,
)
def test_what_is_wrong_is_said_once(freeze: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        _resolved(freeze)
    assert all(word in str(caught.value) for word in words), caught.value
