"""What users do beside training when several ranks hold the experts together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

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
