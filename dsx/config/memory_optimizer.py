"""The ``optimizer`` block as :mod:`dsx.plan.memory` takes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsx.config.problems import at
from dsx.errors import ConfigError
from dsx.plan.memory.ops import DeviceKind
from dsx.plan.memory.states import Optimizer

WITH_DECLARED = 8
"""Bytes that an update of unknown kind is taken to need for each parameter while it runs: two fp32
temporaries, what torch's updates of many tensors at a time take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """What DeepSpeed makes of the block (runtime/engine.py, _configure_basic_optimizer).

    Attributes:
        rule: Its memory.
        kind: ``adam`` and the like, in small letters.
        own: Whether it is torch's, not DeepSpeed's kernel.
        fused: Whether DeepSpeed's bf16 wrapper without ZeRO flattens for it: its FusedAdam alone.
        decays: Whether weight decay is added to the gradient, in a copy of it.
    """

    rule: Optimizer
    kind: str
    own: bool
    fused: bool
    decays: bool


def optimizer_of(block: Mapping[str, Any], device: DeviceKind, declared_bytes: int | None) -> Chosen:
    """The optimizer of a config.

    Args:
        block: ``optimizer``.
        device: Where it runs; on a CPU torch's updates go tensor by tensor.
        declared_bytes: ``dsx.optimizer_bytes``, which goes before what dsx knows.

    Raises:
        ConfigError: dsx does not know what it keeps, and nobody has said so.
    """
    name, params = block["type"], block.get("params", {})
    kind = name.lower()
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"
    own = kind not in ("adam", "adamw", "lion", "lamb") or bool(params.get("torch_adam", False))
    decays = kind in ("adam", "sgd") and bool(params.get("weight_decay", 0.0))
    if declared_bytes is not None:
        rule = Optimizer(state_bytes=declared_bytes, step_bytes=WITH_DECLARED)
    elif kind in ("adam", "adamw", "lion", "sgd"):
        rule = _known(kind, params, own=own, decays=decays, device=device)
    else:
        raise ConfigError(
            at("optimizer.type", name),
            "dsx does not know how many bytes it keeps for each parameter",
            'say so, e.g. "dsx": {"optimizer_bytes": 8} for two fp32 numbers',
        )
    fused = kind in ("adam", "adamw") and not own
    return Chosen(rule=rule, kind=kind, own=own, fused=fused, decays=decays)


def _known(kind: str, params: Mapping[str, Any], *, own: bool, decays: bool, device: DeviceKind) -> Optimizer:
    """torch/optim/adam.py and sgd.py; DeepSpeed's kernels take nothing besides their state.

    Of many tensors at a time (_multi_tensor_adam): roots of the second moments, and gradients with decay.
    Of one at a time (_single_tensor_adam): a root and its quotient, and the gradient with its decay.
    """
    state = {"adam": 8, "adamw": 8, "lion": 4, "sgd": 4 * bool(params.get("momentum", 0.0))}[kind]
    state += 4 * (kind in ("adam", "adamw") and bool(params.get("amsgrad")))
    if not own or params.get("fused"):
        return Optimizer(state_bytes=state, step_bytes=0)
    single = device == "cpu" or params.get("foreach") is False
    roots = 0 if kind == "sgd" else 8 if single else 4
    return Optimizer(state_bytes=state, step_bytes=roots + 4 * decays, one_by_one=single)
