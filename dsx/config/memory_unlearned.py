"""DeepSpeed's keys whose memory :mod:`dsx.plan.memory` has not learned: refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsx.config.problems import at
from dsx.config.run import RunConfig
from dsx.errors import ConfigError

_ANY_STAGE: Mapping[str, Any] = {
    "torch_autocast.enabled": False,
    "bf16.check_grad_overflow": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "bfloat16.check_grad_overflow": False,
    "bfloat16.bf16_master_weights_and_grads": False,
    "bfloat16.bf16_optimizer_states": False,
    "managed_gradient_accumulation": True,
    "zero_optimization.zenflow": None,
    "zero_optimization.cpu_offload_use_pin_memory": None,
}
"""Key -> what it is by default, which is what the ledger knows."""

_PARTITIONED: Mapping[str, Any] = {
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.parameter_alignment": False,
}
"""The same at ZeRO-1 and 2, whose flat tensors these lay out otherwise."""

_BUCKETED: Mapping[str, Any] = {
    "zero_optimization.overlap_comm": False,
    "zero_optimization.contiguous_gradients": True,
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.use_multi_rank_bucket_allreduce": True,
}
"""Where DeepSpeed reduces gradients in its bucket: ``dsx.zero.reduce = "micro_batch"``."""


def require_learned(config: RunConfig) -> None:
    """Raise ConfigError for the first key that the estimate would get wrong."""
    for key, usual in _concerned(config):
        value: Any = config.deepspeed
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != usual:
            raise ConfigError(
                at(key, value), "dsx has not learned what memory it takes", "remove it for the estimate"
            )


def _concerned(config: RunConfig) -> Iterator[tuple[str, Any]]:
    yield from _ANY_STAGE.items()
    if config.zero_stage in (1, 2):
        yield from _PARTITIONED.items()
    if config.dsx.zero.reduce == "micro_batch":
        yield from _BUCKETED.items()
