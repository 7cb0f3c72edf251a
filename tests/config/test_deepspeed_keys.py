"""The names of optimizers in the table of refusals and the batch arithmetic against DeepSpeed's own."""

from __future__ import annotations

import pytest
import torch

from dsx.config.batch import resolve_batch
from dsx.config.refusals import names, refused
from dsx.errors import ConfigError


def test_optimizers():
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    optimizers = {
        name
        for name, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
    } - {"Optimizer"}
    assert {name.lower() for name in names("deepspeed")} == set(DEEPSPEED_OPTIMIZERS)
    assert optimizers == names("torch")


def test_zero_tested_optimizers():
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    theirs = {optimizer.__name__.lower() for optimizer in ZERO_SUPPORTED_OPTIMIZERS}
    theirs = {name.removeprefix("deepspeed").removeprefix("zenflow") for name in theirs}
    theirs = {name.removeprefix("cpu").removeprefix("fused") for name in theirs}
    # Muon joins the list inside is_zero_supported_optimizer.
    assert theirs | {"muon"} == names("tested")


def test_every_other_optimizer_is_said_to_be_untested():
    (row,) = [rule for rule in refused() if rule.check == "optimizer-untested"]
    (said,) = [condition.value for condition in row.when if condition.key == "optimizer.type"]
    known = {name.lower() for name in names("deepspeed") | names("torch")}
    assert set(said) == known - names("tested")


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
