"""What users do beside training when several ranks hold the experts together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import dsx
import ranks
from dsx.errors import ConfigError
from parity import dsx_run, oracle
from parity.dsx_run import Case


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


def alike(rank: int, world_size: int, case: Case, folder: Path) -> list[float]:
    """Losses of tokens that all go to the same experts, which one of the ranks may have none of."""
    engine, _ = dsx_run.build(case, folder)
    return [float(engine.train_batch(iter([(torch.full((2, 12), n),) * 2] * 2))) for n in (7, 38, 69)]


def test_a_rank_to_which_no_token_comes_keeps_no_other_waiting(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "moe_num_experts": 4}
    sizes |= {"vocab_size": 304, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4}
    torch.manual_seed(0)
    config = AutoConfig.for_model("ernie4_5_moe", **sizes, moe_k=2, moe_layer_start_index=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    case = Case(zero=3, dp=2, ep=2, accumulation=2, implementation="transformers")
    losses, same = ranks.run(alike, 2, case, tmp_path, timeout=60)
    assert losses == same
