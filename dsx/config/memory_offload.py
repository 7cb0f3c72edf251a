"""ZeRO-Offload's blocks of a config as :mod:`dsx.plan.memory` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.config.memory_optimizer import optimizer_of
from dsx.config.problems import at
from dsx.errors import ConfigError
from dsx.plan.memory.offload import Offload
from dsx.plan.memory.ops import DeviceKind

LION_STATE_BYTES = 8
"""DeepSpeed's Lion for CPUs also makes a second moment, which it does not use (ops/lion/cpu_lion.py)."""


def offload_of(
    zero: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    declared_bytes: int | None,
    device: DeviceKind = "cuda",
) -> Offload | None:
    """``offload_optimizer`` and ``offload_param``; None if nothing is offloaded.

    Args:
        zero: ``zero_optimization``.
        optimizer: The ``optimizer`` block.
        declared_bytes: ``dsx.optimizer_bytes``.
        device: What the run is on; on CPUs the host is the device.

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
    moved, parameters = _block(zero, "offload_optimizer"), _block(zero, "offload_param")
    if moved is None and parameters is None:
        return None
    moved = moved or {}
    if moved.get("super_offload"):
        raise ConfigError(
            at("zero_optimization.offload_optimizer.super_offload", True),
            "dsx has not learned what memory it takes",
            "remove it for the estimate",
        )
    if zero.get("stage") in (1, 2):
        _require_usual_reduction(zero)
    chosen = optimizer_of(optimizer, "cpu", declared_bytes)
    kernel = chosen.kind == "lion" and declared_bytes is None
    return Offload(
        optimizer=bool(moved),
        parameters=parameters is not None,
        pinned=bool(moved.get("pin_memory", True)),
        pinned_parameters=bool((parameters or {}).get("pin_memory", True)),
        ratio=float(moved.get("ratio", 1.0)),
        state_bytes=LION_STATE_BYTES if kernel else chosen.rule.state_bytes,
        step_bytes=chosen.rule.step_bytes,
        unified=device == "cpu",
    )


def _require_usual_reduction(zero: Mapping[str, Any]) -> None:
    """At ZeRO-1 and 2 DeepSpeed itself reduces what goes to the host."""
    for key in ("reduce_scatter", "use_multi_rank_bucket_allreduce"):
        if zero.get(key, True) is False:
            raise ConfigError(
                at(f"zero_optimization.{key}", False),
                "dsx has not learned what memory it takes with offload",
                "remove it for the estimate",
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
