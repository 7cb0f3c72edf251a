"""What users do beside training when several ranks hold the experts together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dsx
import ranks
from dsx.errors import ConfigError
from float32_families import FAMILIES
from parity import dsx_run, oracle
from parity.dsx_run import Case

STEPS, ROWS, LENGTH = 3, 2, 12


@pytest.mark.parametrize(
    ("key", "value"), [("zero_hpz_partition_size", 2), ("zero_quantized_gradients", True)]
)
def test_groups_of_ranks_with_other_experts_are_refused(key: str, value: Any) -> None:
    case = Case(family="qwen2_moe", dp=4, ep=2, zero=3, zero_keys=((key, value),))
    with pytest.raises(ConfigError, match=rf"{key}.*hold other experts"):
        dsx.load_config(dsx_run.config(case, None), world_size=4)


def states(rank: int, world_size: int, case: Case, folder: Path) -> dict[str, tuple[int, ...]]:
    from deepspeed.utils import safe_get_full_optimizer_state

    engine, _ = dsx_run.build(case, folder)
    dsx_run.losses_of(engine, case, [0])
    named = engine.module.named_parameters()
    found = {name: safe_get_full_optimizer_state(each, "exp_avg") for name, each in named}
    assert all(bool(each.abs().sum()) for each in found.values())
    return {name: tuple(each.shape) for name, each in found.items()}


@pytest.mark.parametrize("zero", [1, 3])
def test_states_of_experts_are_found(zero: int, tmp_path: Path) -> None:
    folder = oracle.save_model("qwen2_moe", tmp_path / "model")
    case = Case(family="qwen2_moe", dp=2, ep=2, zero=zero)
    found = ranks.run(states, 2, case, folder)[1]
    assert found["1.block.mlp.experts.down_proj"] == (2, 24, 16)


def alike(step: int) -> torch.Tensor:
    """Ids, or labels, of one row: every token goes to the same experts."""
    return torch.full((LENGTH,), 7 + 31 * step)


def trained_alike(
    rank: int, world_size: int, case: Case, folder: Path
) -> tuple[list[float], list[float], bool]:
    """Losses, norms, and whether a layer had no row on some rank."""
    from dsx.nn.experts import ExpertParallel

    without, exchange = [], ExpertParallel.exchange

    def noted(self: Any, rows: Any, sent: Any, received: Any, split: Any = None) -> Any:
        without.append(not sum(received))
        return exchange(self, rows, sent, received, split)

    engine, _ = dsx_run.build(case, folder)
    losses, norms = [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertParallel, "exchange", noted)
        for step in range(STEPS):
            rows = alike(step).expand(ROWS, -1)
            losses.append(float(engine.train_batch(iter([(rows, rows)] * case.accumulation))))
            norms.append(engine.get_global_grad_norm())
    return losses, norms, any(without)


@pytest.mark.parametrize(
    "case", [Case(zero=3, dp=2, ep=2), Case(zero=1, dp=2, ep=2, recompute="full")], ids=str
)
def test_a_rank_to_which_no_token_comes_trains_like_one_process(case: Case, tmp_path: Path) -> None:
    case = replace(case, implementation="transformers", accumulation=2)
    torch.manual_seed(0)
    sizes = FAMILIES["ernie4_5_moe"] | {"vocab_size": 304}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("ernie4_5_moe", **sizes))
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), **oracle.ADAMW)
    expected, _ = oracle.apart(model, optimizer, STEPS, 1, lambda step, _: [(alike(step), alike(step))])
    results = ranks.run(trained_alike, 2, case, folder)
    assert any(empty for *_, empty in results)
    for losses, norms, _ in results:
        assert losses == pytest.approx(expected.losses, rel=1e-5)
        assert norms == pytest.approx(expected.norms, rel=1e-5)
