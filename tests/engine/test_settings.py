"""What becomes of a DeepSpeed config on its way to the engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config

from dsx.config.deepspeed import precision
from dsx.engine.settings import settings_of
from dsx.errors import ConfigError
from dsx.parallel.mesh import Mesh

PIPELINE = Mesh.of(pp=2, dp=2)


def test_the_users_config_is_left_alone() -> None:
    config = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "gradient_clipping": 2}
    kept = {"zero_optimization": {"stage": 1, "overlap_comm": True}, "gradient_clipping": 2}
    settings = settings_of(config, None, PIPELINE)
    assert config == kept
    assert (settings.zero_stage, settings.clipping) == (1, 2.0)
    assert settings.deepspeed["zero_optimization"]["overlap_comm"] is False
    assert settings.deepspeed["timers"]["throughput"]["enabled"] is False


@pytest.mark.parametrize(
    ("config", "inner", "clipping"),
    [
        ({"gradient_clipping": 3}, 0.0, 3.0),  # plain fp32: dsx clips
        ({}, 0.0, 1.0),
        ({"bf16": {"enabled": True}, "gradient_clipping": 3}, 3, 3.0),
        ({"bfloat16": {"enabled": True}, "gradient_clipping": 3}, 3, 3.0),  # DeepSpeed's old name for it
        ({"zero_optimization": {"stage": 2}, "gradient_clipping": 3}, 3, 3.0),
    ],
)
def test_one_side_clips(config: dict[str, Any], inner: float, clipping: float) -> None:
    settings = settings_of(config, None, PIPELINE)
    assert settings.deepspeed["gradient_clipping"] == inner
    assert settings.clipping == clipping


def test_accumulation_is_managed_but_for_offload() -> None:
    def managed(zero: dict[str, Any]) -> bool:
        config = {"zero_optimization": zero, "managed_gradient_accumulation": False}
        return settings_of(config, None, PIPELINE).deepspeed["managed_gradient_accumulation"]

    assert managed({"stage": 3, "offload_param": {"device": "cpu"}})
    assert managed({"stage": 2, "offload_optimizer": {"device": "none"}})
    assert managed({"stage": 2, "offload_optimizer": None})
    assert not managed({"stage": 2, "offload_optimizer": {"device": "cpu"}})


def test_args_give_the_config() -> None:
    args = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": 3}})
    assert settings_of(None, args, PIPELINE).zero_stage == 3
    assert settings_of({}, args, PIPELINE).zero_stage == 0


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, ["there is no config"]),
        ({"dsx": {}}, ["dsx.load_config"]),
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ["fp16.enabled = true", "keep bf16"]),
        ({"fp16": {"enabled": True, "loss_scale_window": 0}}, ["fp16.loss_scale_window = 0", "1 or more"]),
        ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ['torch_autocast.dtype = "float16"']),
        ({"zero_optimization": True}, ["zero_optimization = true", "object"]),
        ({"gradient_clipping": "auto"}, ['gradient_clipping = "auto"']),
        ({"gradient_clipping": -1}, ["gradient_clipping = -1"]),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
            ["offload_optimizer.device", '"cpu"'],
        ),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, ["zero_hpz_partition_size = 2"]),
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
            ["zero_quantized_gradients = true"],
        ),
    ],
)
def test_what_a_pipeline_cannot_do_is_refused(config: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(config, None, PIPELINE)
    for word in words:
        assert word in str(caught.value)


def test_zero_plus_plus_is_fine_without_other_axes() -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "zero_quantized_gradients": True}
    assert settings_of({"zero_optimization": zero}, None, Mesh.of(dp=4)).zero_stage == 3


@pytest.mark.parametrize("value", [True, 1, "true", "ON", "y", False, 0, "false", "auto"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_the_precision_is_what_deepspeed_reads(name: str, value: object) -> None:
    kind = DeepSpeedFP16Config if name == "fp16" else DeepSpeedBF16Config
    enabled = kind(enabled=value).enabled
    assert precision({name: {"enabled": value}}) == (name if enabled else "fp32")
    config = {name: {"enabled": value}, "gradient_clipping": 0.5}
    # Plain fp32 alone is clipped by dsx.
    assert settings_of(config, None, Mesh.of()).deepspeed["gradient_clipping"] == (0.5 if enabled else 0.0)


def test_without_zero_gradients_are_added_up_in_the_models_dtype() -> None:
    config = {"fp16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    with pytest.raises(ConfigError, match=r"data_types\.grad_accum_dtype"):
        settings_of(config, None, PIPELINE)
    assert settings_of({**config, "zero_optimization": {"stage": 1}}, None, PIPELINE).zero_stage == 1
