"""ZeRO-Offload's blocks of a config as :mod:`dsx.plan.memory` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.config.problems import at
from dsx.errors import ConfigError
from dsx.plan.memory.offload import Offload

KERNEL_STATE_BYTES = {"adam": 8, "adamw": 8, "lion": 8, "adagrad": 4}
"""What DeepSpeed's own updates for CPUs keep for each element; Lion's a second moment too, which it does not use
(ops/lion/cpu_lion.py, step)."""

TORCH_STEP_BYTES = {"adam": 8, "adamw": 8}
"""What torch's update takes for each fp32 element on a CPU, where it goes tensor by tensor: the second moment's
root, and that divided (torch/optim/adam.py, _single_tensor_adam)."""


def offload_of(zero: Mapping[str, Any], kind: str, *, torch_optimizer: bool, decays: bool) -> Offload | None:
    """``offload_optimizer`` and ``offload_param``; None if nothing is offloaded.

    Args:
        zero: ``zero_optimization``.
        kind: ``optimizer.type`` in small letters.
        torch_optimizer: Whether it is torch's, not DeepSpeed's CPU kernel.
        decays: Whether weight decay is added to the gradient, in a copy of it.

    Raises:
        ConfigError: NVMe, or another kind of offload whose memory dsx does not know.
    """
    for name in ("cpu_offload", "cpu_offload_param"):
        if zero.get(name):
            fix = "offload_param" if name.endswith("param") else "offload_optimizer"
            raise ConfigError(
                at(f"zero_optimization.{name}", zero[name]),
                "a deprecated key, which the estimate does not read",
                f'write "{fix}": {{"device": "cpu"}}',
            )
    optimizer, parameters = _block(zero, "offload_optimizer"), _block(zero, "offload_param")
    if optimizer is None and parameters is None:
        return None
    if optimizer is not None and optimizer.get("super_offload"):
        raise ConfigError(
            at("zero_optimization.offload_optimizer.super_offload", True),
            "dsx has not learned what memory it takes",
            "remove it for the estimate",
        )
    taken = TORCH_STEP_BYTES.get(kind, 0) + 4 * decays if torch_optimizer else 0
    return Offload(
        optimizer=optimizer is not None,
        parameters=parameters is not None,
        pinned=bool((optimizer or {}).get("pin_memory", True)),
        pinned_parameters=bool((parameters or {}).get("pin_memory", True)),
        ratio=float((optimizer or {}).get("ratio", 1.0)),
        state_bytes=None if torch_optimizer else KERNEL_STATE_BYTES.get(kind),
        step_bytes=taken,
    )


def _block(zero: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    block: Mapping[str, Any] = zero.get(name) or {}
    device = block.get("device") or "none"
    if device == "nvme":
        raise ConfigError(
            at(f"zero_optimization.{name}.device", device),
            "dsx has not learned what memory NVMe's buffers take",
            'use "cpu" for the estimate',
        )
    return None if device == "none" else block
