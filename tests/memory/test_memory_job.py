"""What a config says about memory: known optimizers, declared ones, and what is refused."""

from __future__ import annotations

import pytest

from dsx.config.resolve import resolve
from dsx.errors import ConfigError
from dsx.memory.job import job_of

CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "dsx": {
        "model": {"family": "llama", "preset": "tiny"},
        "data": {"sequence_length": 64},
        "train": {"steps": 2, "output": "runs/job"},
    },
}


def rule(*sets, device="cuda"):
    """(state, step) bytes for each parameter, and whether one tensor at a time."""
    optimizer = job_of(resolve(CONFIG, world_size=1, overrides=sets), device=device).states.optimizer
    return optimizer.state_bytes, optimizer.step_bytes, optimizer.one_by_one


def test_known_optimizers():
    """torch/optim/adam.py, sgd.py; DeepSpeed's own take nothing besides."""
    assert rule() == (8, 0, False)
    assert rule("optimizer.params.torch_adam=true") == (8, 4, False)
    assert rule("optimizer.params.torch_adam=true", device="cpu") == (8, 8, True)
    decayed = [
        "optimizer.type=Adam",
        'optimizer.params={"adam_w_mode":false,"torch_adam":true,"weight_decay":0.1}',
    ]
    assert rule(*decayed) == (8, 8, False)
    assert rule('optimizer.params={"torch_adam":true,"amsgrad":true}') == (12, 4, False)
    assert rule("optimizer.type=Lion") == (4, 0, False)
    assert rule("optimizer.type=SGD") == (0, 0, False)
    assert rule("optimizer.type=SGD", 'optimizer.params={"lr":1,"momentum":0.9,"weight_decay":1}') == (
        4,
        4,
        False,
    )


def test_an_unknown_optimizer_is_declared():
    assert rule("optimizer.type=RMSprop", "dsx.optimizer_bytes=4") == (4, 8, False)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["optimizer.type=RMSprop"], r'optimizer.type = "RMSprop".*dsx": {"optimizer_bytes": 8}'),
        (["dsx.optimizer_bytes=-1", "optimizer.type=RMSprop"], "optimizer_bytes"),
        (
            ["zero_optimization.round_robin_gradients=true"],
            "round_robin_gradients = true: dsx has not learned",
        ),
        (
            ["dsx.zero.reduce=micro_batch", "zero_optimization.overlap_comm=true"],
            "overlap_comm = true: dsx has",
        ),
        (
            [
                'zero_optimization.offload_optimizer={"device":"cpu"}',
                "zero_optimization.reduce_scatter=false",
            ],
            "reduce_scatter = false: dsx has not",
        ),
        (["bf16.enabled=true", "bf16.check_grad_overflow=true"], "check_grad_overflow = true: dsx has not"),
    ],
)
def test_what_is_not_known_is_refused(sets, words):
    with pytest.raises(ConfigError, match=words):
        rule("zero_optimization.stage=2", "zero_allow_untested_optimizer=true", *sets)
