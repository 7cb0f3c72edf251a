"""The key lists of dsx.config.deepspeed_keys against DeepSpeed's own source, models and signatures."""

from __future__ import annotations

import inspect

import pytest
import torch

from dsx.config import deepspeed_keys as keys
from dsx.config.batch import resolve_batch
from dsx.errors import ConfigError


class Recorder(dict):
    """A config that notes which of its top-level keys are asked for."""

    def __init__(self, *args, seen):
        super().__init__(*args)
        self.seen = seen

    def __copy__(self):
        return Recorder(self, seen=self.seen)

    def __contains__(self, key):
        self.seen.add(key)
        return super().__contains__(key)

    def __getitem__(self, key):
        self.seen.add(key)
        return super().__getitem__(key)

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def keys(self):
        recorder = self

        class Keys(list):
            def __contains__(self, key):
                return key in recorder

        return Keys(super().keys())


@pytest.fixture(scope="module")
def asked_for() -> set[str]:
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: set[str] = set()
    DeepSpeedConfig(Recorder({"train_batch_size": 1}, seen=seen))
    return seen


def test_every_key_that_deepspeed_asks_for_is_known(asked_for):
    assert len(asked_for) > 50
    assert asked_for - set(keys.REMOVED) <= keys.TOP_LEVEL | {"allgather_size"}


def test_every_known_key_is_asked_for(asked_for):
    # The bfloat16 alias is asked for when bf16 is absent; the other two only inside a mesh of Ulysses.
    assert keys.TOP_LEVEL - asked_for <= {"data_parallel_size", "sequence_parallel_size"}


def test_removed_keys():
    from deepspeed.runtime import config

    assert set(keys.REMOVED) == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) == keys.REMOVED_ZERO


def test_zero_keys():
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    fields = DeepSpeedZeroConfig.model_fields
    aliased = {name for name, field in fields.items() if field.alias}
    assert {field.alias or name for name, field in fields.items()} == keys.ZERO
    assert aliased == keys.ZERO_SHORT
    assert set(DeepSpeedZeroOffloadParamConfig.model_fields) == keys.OFFLOAD_PARAM
    assert set(DeepSpeedZeroOffloadOptimizerConfig.model_fields) == keys.OFFLOAD_OPTIMIZER


def test_bf16_keys():
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config

    assert set(DeepSpeedBF16Config.model_fields) == keys.BF16


def test_optimizers():
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    optimizers = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert {name.lower() for name in keys.OPTIMIZERS} == set(DEEPSPEED_OPTIMIZERS)
    assert optimizers == keys.TORCH_OPTIMIZERS


def test_zero_tested_optimizers():
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    names = {optimizer.__name__.lower() for optimizer in ZERO_SUPPORTED_OPTIMIZERS}
    names = {name.removeprefix("deepspeed").removeprefix("zenflow") for name in names}
    names = {name.removeprefix("cpu").removeprefix("fused") for name in names}
    # Muon joins the list inside is_zero_supported_optimizer.
    assert names | {"muon"} == keys.ZERO_TESTED_OPTIMIZERS


def test_schedulers():
    from deepspeed.runtime import lr_schedules

    assert set(keys.SCHEDULERS) == set(lr_schedules.VALID_LR_SCHEDULES)
    for name, known in keys.SCHEDULERS.items():
        parameters = inspect.signature(getattr(lr_schedules, name).__init__).parameters
        own = {key: p for key, p in parameters.items() if key not in ("self", "optimizer")}
        assert set(own) == known
        assert {key for key, p in own.items() if p.default is p.empty} == set(keys.SCHEDULERS_REQUIRED[name])
    assert set(torch.optim.lr_scheduler.__all__) >= keys.TORCH_SCHEDULERS


@pytest.mark.parametrize("train", [None, 8, 12, 64])
@pytest.mark.parametrize("micro", [None, 1, 3, 4])
@pytest.mark.parametrize("accumulation", [None, 1, 2, 8])
def test_batch_sizes_are_deepspeeds(train, micro, accumulation):
    """One data-parallel rank, where DeepSpeedConfig needs no process group."""
    from deepspeed.runtime.config import DeepSpeedConfig

    given = {
        "train_batch_size": train,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    given = {key: value for key, value in given.items() if value is not None}
    try:
        theirs = DeepSpeedConfig(dict(given))
    except AssertionError:
        with pytest.raises(ConfigError):
            resolve_batch(given, 1)
    else:
        ours = resolve_batch(given, 1)
        assert ours.train == theirs.train_batch_size
        assert ours.micro == theirs.train_micro_batch_size_per_gpu
        assert ours.accumulation == theirs.gradient_accumulation_steps
