"""The gradient norm over a whole 3D model, each logical element counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from dsx.runtime.groups import Groups


Refuses = Callable[[torch.Tensor], bool]
"""Whether a step with this gradient norm must not be applied; the same on every rank."""


class NormScope:
    """Which local gradients count, and over which ranks their squares are summed.

    A tensor that is the same on every tp rank counts on tp rank 0; a tied copy on a later pipeline rank not
    at all. DeepSpeed's own norm sums per parameter group, one collective each, and so hangs when pipeline
    ranks have different numbers of groups (a tied group on the first and last only, or ZeRO-3's sub-groups
    of unequal stages): here every rank takes part in exactly one all-reduce.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's gradient of ``parameter`` enters the norm."""
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return bool(getattr(parameter, "tensor_model_parallel", False)) or self._groups.tp_rank == 0

    def norm(
        self,
        pieces: Iterable[tuple[nn.Parameter, torch.Tensor]],
        *,
        partitioned: bool,
        device: torch.device,
    ) -> torch.Tensor:
        """2-norm over all ranks, float32 scalar on ``device``.

        Args:
            pieces: (parameter, gradient or this rank's part of it).
            partitioned: Whether data-parallel ranks hold different parts (ZeRO) or the same gradients.
            device: Where the sum is reduced.
        """
        squares = [
            torch.linalg.vector_norm(gradient.float()).square().to(device)
            for parameter, gradient in pieces
            if gradient.numel() and self.counts(parameter)
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        dist.all_reduce(total, group=dist.group.WORLD if partitioned else self._groups.model)
        return total.sqrt()


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum ``tensor`` in place over ``group``, by way of ``device`` when it lives elsewhere (offload)."""
    if tensor.device.type == device.type:
        dist.all_reduce(tensor, group=group)
        return
    staged = tensor.to(device)
    dist.all_reduce(staged, group=group)
    tensor.copy_(staged)
