"""The gradient norm over a whole 3D model, each logical element counted once."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from dsx.engine.zero.replica_check import Parts, ReplicaGradients, sum_of_squares
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
