"""A resumed run is the uninterrupted run, bit for bit, random states included; in any other layout, too."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from all_families.tiny import tiny_config

import ranks
from dsx.checkpoint.catalog import model_fact
from dsx.checkpoint.run.state import _numbers, _require_same_numbers
from dsx.errors import CheckpointError
from dsx.hub.read import hub_model
from often import often
from parity import dsx_run
from parity.dsx_run import Case

CASES = [
    # NAdam keeps a product of its momenta, one number for each tensor.
    Case(dp=2, zero=0, extra=(("optimizer", {"type": "NAdam", "params": {"lr": 1e-3}}),)),
    Case(family="gpt2", pp=2, zero=1, accumulation=2),
    Case(family="gpt2", tp=2, dp=2, zero=2),
    Case(pp=2, chunks=2, dp=2, zero=3, accumulation=2),
    Case(tp=2, pp=2, chunks=2, dp=2, zero=3, accumulation=2),
    Case(family="gpt2", pp=2, dp=2, zero=1, bf16=True),
    Case(pp=2, zero=0, bf16=True),
    Case(
        pp=2,
        chunks=2,
        zero=2,
        zero_keys=(("offload_optimizer", {"device": "cpu"}),),
        extra=(("zero_force_ds_cpu_optimizer", False),),
    ),
]
SCHEDULER = (
    "scheduler",
    {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 3e-3, "warmup_num_steps": 3, "total_num_steps": 8}},
)


def steps(engine, case: Case, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        losses.append(engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank)).item())
        losses.extend([engine.get_global_grad_norm(), engine.get_lr()[0], torch.rand(()).item()])
    return losses


def save_and_go_on(rank: int, world_size: int, case: Case, folder: str) -> list[float]:
    engine, _ = dsx_run.build(case, None)
    steps(engine, case, 0, 3)
    engine.save_checkpoint(folder, client_state={"data_cursor": 3 * case.rows})
    return steps(engine, case, 3, 3)


def load_and_go_on(rank: int, world_size: int, case: Case, folder: str) -> list[float]:
    engine, _ = dsx_run.build(case, None)
    path, client_state = engine.load_checkpoint(folder)
    assert path.name == "global_step3"
    for same in (path, os.path.relpath(path), path.parent.parent):  # itself, and a run's folder of them
        assert engine.load_checkpoint(same) == (path, client_state)
    assert client_state == {"data_cursor": 3 * case.rows}
    assert (engine.global_steps, engine.global_samples) == (3, 3 * case.rows)
    return steps(engine, case, 3, 3)


@pytest.mark.parametrize("case", often(CASES, 3), ids=str)
def test_resume_is_bit_equal(case: Case, tmp_path: Path) -> None:
    case = Case(
        **{**{f: getattr(case, f) for f in Case.__dataclass_fields__}, "extra": (*case.extra, SCHEDULER)}
    )
    going_on = ranks.run(save_and_go_on, case.world_size, case, str(tmp_path / "checkpoints"))
    resumed = ranks.run(load_and_go_on, case.world_size, case, str(tmp_path / "checkpoints"))
    assert resumed == going_on
    assert len({row[0] for row in going_on}) == 1, "every rank gets the same loss"


def _same_shapes(rank: int, world_size: int, folder: str) -> tuple[list[str], dict[str, list[object]]]:
    """What is said of models that compute otherwise with the same tensors, and of other settings."""
    import dsx
    from dsx.checkpoint.run.state import optimizer_settings
    from dsx.parallel.groups import make_groups
    from dsx.train.recipe import build_engine

    def made(model: dict[str, object], optimizer: dict[str, object]):
        config = dsx_run.config(Case(accumulation=1), None)
        config["dsx"]["model"]["config"] = config["dsx"]["model"]["config"] | model
        config["optimizer"] = {**config["optimizer"], **optimizer}
        resolved = dsx.load_config(config, world_size=1)
        return build_engine(resolved, make_groups(resolved.mesh))

    first = made({}, {})
    steps(first, Case(accumulation=1), 0, 1)
    first.save_checkpoint(folder)
    shape = first.run_config.model
    said = []
    for change in (
        {"num_attention_heads": 2 * shape.num_heads, "num_key_value_heads": 2 * shape.num_kv_heads}
        | {"head_dim": shape.head_dim // 2},
        {"rope_theta": 50.0},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 0.25},
    ):
        with pytest.raises(CheckpointError) as caught:
            made(change, {}).load_checkpoint(folder)
        said.append(str(caught.value))
    made({"attention_dropout": 0.5}, {}).load_checkpoint(folder)
    plain = made({}, {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.5, 0.5], "torch_adam": True}})
    before = optimizer_settings(plain)
    plain.load_checkpoint(folder)
    after = optimizer_settings(plain)
    return said, {key: [before[key], after[key]] for key in before if before[key] != after[key]}


def test_another_model_of_the_same_shapes_is_refused_and_other_settings_are_told(tmp_path: Path) -> None:
    ((heads, theta, activation, epsilon), settings) = ranks.run(_same_shapes, 1, str(tmp_path))[0]
    for said, word in (
        (heads, "num_heads"),
        (theta, "rope"),
        (activation, "activation"),
        (epsilon, "norm_epsilon"),
    ):
        assert f"of another model: its {word} is " in said
    assert settings["betas"] == [[0.5, 0.5], list(dsx_run.ADAMW["betas"])]
    assert "lr" in settings


def test_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    saved = Case(pp=2, zero=1, accumulation=2)
    ranks.run(save_and_go_on, 2, saved, str(tmp_path))
    other = ("optimizer", {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}})
    allowed = ("zero_allow_untested_optimizer", True)
    for case, words in (
        (Case(family="gpt2", pp=2, zero=1, accumulation=2), "another model"),
        (Case(dp=2, zero=1, accumulation=2, extra=(other, allowed)), "whose states are others"),
    ):
        with pytest.raises(ranks.RankError) as raised:
            ranks.run(load_and_go_on, 2, case, str(tmp_path))
        assert isinstance(raised.value.error, CheckpointError)
        assert words in str(raised.value.error)


STEPS = 2  # in each layout
CHAINS = {
    "llama": [
        Case(accumulation=4),
        Case(tp=2, pp=2, chunks=2, dp=2, zero=3, accumulation=2),
        Case(dp=4, zero=1, accumulation=1),
        Case(tp=2, dp=2, zero=2, accumulation=2, zero_keys=(("round_robin_gradients", True),)),
        Case(pp=2, dp=2, zero=3, accumulation=2, zero_keys=(("sub_group_size", 3000),)),
        Case(pp=3, zero=0, accumulation=4),
    ],
    "gpt2": [
        Case(family="gpt2", pp=2, dp=2, zero=1, accumulation=2),
        Case(family="gpt2", tp=2, zero=3, accumulation=4),
        Case(family="gpt2", pp=2, chunks=2, tp=2, zero=2, accumulation=4, schedule="zbv"),
        Case(family="gpt2", dp=4, zero=3, accumulation=1),
        Case(family="gpt2", accumulation=4),
    ],
}


def train(engine: Any, case: Case, first: int, count: int) -> list[float]:
    found = []
    for step in range(first, first + count):
        found.append(engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank)).item())
        found.append(engine.get_global_grad_norm())
    return found


def uninterrupted(rank: int, world_size: int, case: Case, steps: int) -> list[float]:
    engine, _ = dsx_run.build(case, None)
    return train(engine, case, 0, steps)


def link(rank: int, world_size: int, case: Case, place: int, folder: str) -> tuple[list[float], float]:
    """One layout's part: load what the one before saved, train, save. Also bytes read over bytes held."""
    from dsx.checkpoint.formats.native import read_manifest
    from dsx.checkpoint.run.stored import load_stored, stored_here

    engine, _ = dsx_run.build(case, None)
    share = 1.0
    if place:
        path, state = engine.load_checkpoint(folder)
        assert (path.name, state, engine.global_steps) == (f"at{place}", {"place": place}, place * STEPS)
        read = load_stored(engine, read_manifest(path / "dsx.json"))
        held = sum(
            prod(part.shape) * block.values.element_size()
            for block in stored_here(engine, everything=True)
            for part in block.parts
        )
        share = read / held
    losses = train(engine, case, place * STEPS, STEPS)
    engine.save_checkpoint(folder, tag=f"at{place + 1}", client_state={"place": place + 1})
    return losses, share


@pytest.mark.parametrize("family", often(CHAINS, 2))
def test_a_run_changes_its_layout_again_and_again(family: str, tmp_path: Path) -> None:
    chain = CHAINS[family]
    whole = chain[0] if chain[0].world_size == 1 else chain[-1]
    expected = ranks.run(uninterrupted, whole.world_size, whole, STEPS * len(chain))[0]
    found: list[float] = []
    for place, case in enumerate(chain):
        results = ranks.run(link, case.world_size, case, place, str(tmp_path))
        found += results[0][0]
        assert max(share for _, share in results) == pytest.approx(1.0)
    assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize(
    ("family", "other", "same"),
    [
        ("gpt_neox", {"use_parallel_residual": False}, {"classifier_dropout": 0.3}),
        ("gpt_neox", {"hidden_act": "relu"}, {"use_parallel_residual": True}),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, {"summary_first_dropout": 0.2, "n_ctx": 64}),
        ("gpt2", {"activation_function": "relu"}, {"n_inner": 4 * tiny_config("gpt2").n_embd}),
        ("gemma2", {"query_pre_attn_scalar": 3}, {"task_specific_params": {"a": 1}, "embd_pdrop": 0.5}),
    ],
)
def test_what_a_config_leaves_to_defaults_is_of_the_model(family: str, other: Any, same: Any) -> None:
    """Of transformers' modules, in whichever of the two configs it is said."""
    unsaid = {key: value for key, value in tiny_config(family).to_diff_dict().items() if key not in other}
    for one, two in ((unsaid, unsaid | other), (unsaid | other, unsaid)):
        saved = SimpleNamespace(facts={"model": model_fact(hub_model(one)), "hf_config": one}, root="saved")
        _require_same_numbers(saved, _numbers(model_fact(hub_model(one | same)), one | same))
        with pytest.raises(CheckpointError, match=f"another model: its {next(iter(other))} is "):
            _require_same_numbers(saved, _numbers(model_fact(hub_model(two)), two))
