"""The gradient norm over a whole 3D model, each logical element counted once, and what it says of a step.

In fp16 that is the loss scale: where it enters, which steps it skips, when it changes.

DeepSpeed's optimizers of ZeRO have a scaler (deepspeed/runtime/fp16/loss_scaler.py) and divide it out of the
gradients that they step with. They look for overflow in every gradient, then over two groups of ranks. Here
the norm of the whole model tells it, which every rank learns from one all-reduce: of fp16's numbers, no sum
of squares in fp32 is infinite unless a number is.

Without ZeRO, DeepSpeed's two wrappers have rules of their own, without hysteresis, and nobody multiplies the
loss (deepspeed/runtime/engine.py, backward, asks optimizers of ZeRO alone). Here they get the same scaler.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from torch import nn

from dsx.config.deepspeed import precision
from dsx.engine.zero.replica_check import Parts, ReplicaGradients, sum_of_squares
from dsx.errors import ConfigError, RunError
from dsx.launch.entry import AGREED
from dsx.parallel.groups import Groups

Refuses = Callable[[torch.Tensor], bool]
"""Whether a step with this gradient norm must not be applied; the same on every rank."""


class NormScope:
    """Which local gradients count, and over which ranks their squares are summed.

    Of experts every rank has its own, of which replicas count once. A tensor that tensor-parallel ranks hold
    whole counts on the first of them; a tied copy on a later pipeline rank not at all. DeepSpeed's own norm
    sums per parameter group, one collective each, and so hangs when pipeline ranks have different numbers of
    groups (a tied group on the first and last only, or ZeRO-3's sub-groups of unequal stages): here every
    rank takes part in exactly one all-reduce.

    Args:
        replicas: Parameters of layers that are not dsx's families and that every tensor-parallel rank holds
            whole, with their names. Their gradients are compared from time to time: a layer that sees only
            its rank's part of the sequence, or other data, would train each replica on its own.
    """

    def __init__(self, groups: Groups, replicas: Mapping[nn.Parameter, str]) -> None:
        self.groups, self.replicas = groups, ReplicaGradients(groups, replicas)

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's gradient of ``parameter`` enters the norm."""
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return bool(getattr(parameter, "tensor_model_parallel", False)) or self.groups.speaks

    def norm(
        self,
        parts: Parts,
        *,
        partitioned: bool,
        device: torch.device,
    ) -> torch.Tensor:
        """2-norm over all ranks, float32 scalar on ``device``.

        ``partitioned``: data-parallel ranks hold different parts (ZeRO), and not the same gradients.

        Raises:
            ModelError: The gradient of a replica is not the same on all tensor-parallel ranks, in a step in
                which it is compared. On every rank.
        """
        parts = list(parts)
        counted = [part for part in parts if part.gradient.numel() and self.counts(part.parameter)]
        if not partitioned and self.groups.mesh.ep > 1:  # all ranks take part, and one replica is enough
            counted = [part for part in counted if self.groups.is_first_of(part.parameter)]
        total = sum_of_squares([part.gradient for part in counted], device)
        among = dist.group.WORLD if partitioned or self.groups.mesh.ep > 1 else self.groups.model
        if not self.replicas.begin():
            dist.all_reduce(total, group=among)
            return total.sqrt()
        both = torch.stack((total, self.replicas.asks(parts, device)))
        dist.all_reduce(both, group=among)
        squared, asked = both.tolist()
        if math.isfinite(squared):
            self.replicas.answer(asked > 0, parts, among=among, partitioned=partitioned, device=device)
        return both[0].sqrt()


def scaler_of(engine: Any) -> Any:
    """DeepSpeed's scaler of an engine that trains in fp16; None for another precision."""
    return engine.optimizer.loss_scaler if engine.fp16_enabled() else None


class LossScale:
    """What becomes of a step: applied, refused by the control, or skipped as fp16's gradients overflowed.

    Args:
        engine: The DeepSpeedEngine, of any precision; without fp16 the scale is 1 and nothing overflows.

    Attributes:
        refused: Whether the step control refuses the step, which then says nothing of the scale.
        overflowed: Whether the last step was skipped because its gradients were not finite in fp16.
    """

    def __init__(self, engine: Any) -> None:
        self._optimizer = optimizer = engine.optimizer
        self._applies = bool(engine.fp16_enabled())
        self.refused = self.overflowed = False
        self._multiplies = getattr(optimizer, "scale_if_loss", None)
        if hasattr(optimizer, "_update_scale"):
            self._change = optimizer._update_scale  # noqa: SLF001
            optimizer._update_scale = self._update  # noqa: SLF001
        if self._applies and engine.zero_optimization_stage() == 0:
            scaler = CreateLossScaler(
                torch.float16,
                engine.loss_scale(),
                engine.dynamic_loss_scale(),
                engine.dynamic_loss_scale_args(),
            )
            self._change = scaler.update_scale
            # What the wrapper asks of its own scale.
            scaler.use_grad_scaling, scaler.dynamic_loss_scale = True, scaler.dynamic
            optimizer.loss_scaler = optimizer.loss_scale_config = scaler
        elif self._applies and getattr(optimizer, "compute_grad_norm", True):
            optimizer.check_overflow = lambda *_, **__: None  # the norm tells

    @property
    def value(self) -> float:
        """The scale of the step to come, or under way."""
        return float(self._optimizer.loss_scale) if self._applies else 1.0

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss whose backward is to run."""
        if self._multiplies is not None:
            multiplied: torch.Tensor = self._multiplies(loss)
            return multiplied
        return self.scaled_without_zero(loss)

    def scaled_without_zero(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as ``engine.backward`` has to be given it, which multiplies it under ZeRO alone."""
        return loss.float() * self.value if self._applies and self._multiplies is None else loss

    def judge(self, scaled: torch.Tensor, refuses: Refuses | None) -> torch.Tensor:
        """Decide about the step, alike on every rank.

        Args:
            scaled: 2-norm of the whole model's gradients as they are, a scalar.
            refuses: Asked with the true norm, unless it is an overflow, which skips the step anyway.

        Returns:
            The true norm; infinite after an overflow.
        """
        if not self._applies:
            self.refused = refuses is not None and refuses(scaled)
            return scaled
        finite = math.isfinite(scaled)
        norm = scaled / self.value if finite else torch.full_like(scaled, torch.inf)
        self.refused = finite and refuses is not None and refuses(norm)
        return norm

    def _update(self, has_overflow: bool = False) -> None:
        """Stands in for the wrapper's ``_update_scale``.

        Raises:
            RunError: The scale is to shrink, and is as small as the config allows. On every rank.
        """
        self.overflowed = self._applies and bool(has_overflow) and not self.refused
        if self.refused:
            return
        if self.overflowed:
            self._require_room()
        self._change(has_overflow)

    def _require_room(self) -> None:
        scaler = self._optimizer.loss_scaler
        if not scaler.dynamic or 1 not in (scaler.delayed_shift, scaler.cur_hysteresis):
            return
        if scaler.cur_scale <= scaler.min_scale:
            error = RunError(
                f"the loss scale {scaler.cur_scale:g}",
                "gradients overflow in fp16, and it is at fp16.min_loss_scale already",
                "look for a loss or gradients that are no numbers (bad data, too high a learning rate), or "
                "train in bf16",
            )
            error.add_note(AGREED)
            raise error


def require_precision(config: Mapping[str, Any]) -> None:
    """Have DeepSpeed make an engine of a config's precision in this process.

    On a CPU it refuses fp16 where oneDNN has no kernels for it (accelerator/cpu_accelerator.py). torch takes
    its own there, which are slower.

    Raises:
        ConfigError: The config wants fp16, and the accelerator has none.
    """
    accelerator: Any = get_accelerator()
    if precision(config) != "fp16":
        return
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True
    elif not accelerator.is_fp16_supported():
        raise ConfigError(
            "fp16.enabled = true",
            f"DeepSpeed has no fp16 on this accelerator ({accelerator.device_name()})",
            'remove fp16 and write "bf16": {"enabled": true}',
        )
