"""Where torch's optimizer takes weights by given gradients: the reference of every update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor

_TORCH = {"adam": "AdamW", "adamw": "AdamW", "adagrad": "Adagrad"}
_NOT_TORCHS = {"torch_adam", "adam_w_mode", "fused", "fp32_optimizer_states"}


class Updates:
    """torch's optimizer of the config's kind, with DeepSpeed's learning-rate schedule, in one process.

    Args:
        deepspeed: DeepSpeed's part of the config.
    """

    def __init__(self, deepspeed: Mapping[str, Any]) -> None:
        block = deepspeed["optimizer"]
        self._kind = str(block["type"])
        self._options = {k: v for k, v in block.get("params", {}).items() if k not in _NOT_TORCHS}
        if isinstance(self._options.get("betas"), list):
            self._options["betas"] = tuple(self._options["betas"])
        self._scheduler_block = deepspeed.get("scheduler") or {}
        self._decoupled = block.get("params", {}).get("adam_w_mode", True) or self._kind.lower() == "adamw"
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        self._parameters: dict[str, torch.nn.Parameter] = {}

    @property
    def is_known(self) -> bool:
        """Whether torch has this optimizer; without it, updates are not compared."""
        return self._class() is not None

    @property
    def title(self) -> str:
        """What it is, for people."""
        found = self._class()
        return "none: torch has no " + self._kind if found is None else f"torch.optim.{found.__name__}"

    def step(self, before: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The values after a step from ``before`` by ``gradients``; moments are kept from call to call."""
        if self._optimizer is None:
            self._parameters = {
                name: torch.nn.Parameter(torch.zeros_like(values)) for name, values in before.items()
            }
            made = self._class()
            assert made is not None
            self._optimizer = made(self._parameters.values(), **self._options)
            self._scheduler = self._schedule(self._optimizer)
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(before[name])
                parameter.grad = gradients[name].clone() if name in gradients else None
        self._optimizer.step()
        return {name: parameter.detach().clone() for name, parameter in self._parameters.items()}

    def advance(self) -> None:
        """After a step: the schedule's next learning rate."""
        if self._scheduler is not None:
            self._scheduler.step()

    @property
    def learning_rate(self) -> float:
        """Of the step to come."""
        return 0.0 if self._optimizer is None else float(self._optimizer.param_groups[0]["lr"])

    @property
    def weight_decay(self) -> float:
        """Of every step."""
        return (
            0.0
            if self._optimizer is None
            else float(self._optimizer.param_groups[0].get("weight_decay", 0.0))
        )

    def _class(self) -> Any:
        kind = self._kind.lower()
        if kind == "adam" and not self._decoupled:
            return torch.optim.Adam
        return getattr(torch.optim, _TORCH.get(kind, self._kind), None)

    def _schedule(self, optimizer: torch.optim.Optimizer) -> Any:
        kind, params = self._scheduler_block.get("type"), self._scheduler_block.get("params", {})
        if kind is None:
            return None
        maker = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind)
        return maker(optimizer, **params)
