"""The gradient norm over a whole 3D model, each logical element counted once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from dsx.errors import ModelError
from dsx.launch.entry import AGREED

if TYPE_CHECKING:
    from dsx.parallel.groups import Groups


Refuses = Callable[[torch.Tensor], bool]
"""Whether a step with this gradient norm must not be applied; the same on every rank."""

Pieces = Iterable[tuple[nn.Parameter, torch.Tensor]]
"""(parameter, gradient or this rank's part of it)."""

_ALIKE = 1e-3
"""Relative difference up to which squared gradients are the same, rounded in another order."""
_COUNTS = 1e-8
"""Share of the largest squared gradient below which one is rounding alone."""
_SHOWN = 3


class NormScope:
    """Which local gradients count, and over which ranks their squares are summed.

    A tensor that is the same on every tp rank counts on tp rank 0; a tied copy on a later pipeline rank not
    at all. DeepSpeed's own norm sums per parameter group, one collective each, and so hangs when pipeline
    ranks have different numbers of groups (a tied group on the first and last only, or ZeRO-3's sub-groups
    of unequal stages): here every rank takes part in exactly one all-reduce.

    Args:
        groups: This rank's process groups.
        replicas: Parameters of layers that are not dsx's families and that every tensor-parallel rank holds
            whole, with their names. Their gradients are compared in the first step: a layer that sees only
            its rank's part of the sequence, or other data, would train each replica on its own.
    """

    def __init__(self, groups: Groups, replicas: Mapping[nn.Parameter, str]) -> None:
        self._groups = groups
        self._replicas = replicas
        self._compared = groups.mesh.tp == 1

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank's gradient of ``parameter`` enters the norm."""
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return bool(getattr(parameter, "tensor_model_parallel", False)) or self._groups.tp_rank == 0

    def norm(
        self,
        pieces: Pieces,
        *,
        partitioned: bool,
        device: torch.device,
    ) -> torch.Tensor:
        """2-norm over all ranks, float32 scalar on ``device``.

        Args:
            pieces: The gradients.
            partitioned: Whether data-parallel ranks hold different parts (ZeRO) or the same gradients.
            device: Where the sum is reduced.

        Raises:
            ModelError: In the first step: the gradient of a replica is not the same on all tensor-parallel
                ranks. On every rank.
        """
        if not self._compared:
            self._compared, pieces = True, list(pieces)
            self._require_alike(pieces, partitioned=partitioned, device=device)
        squares = [
            torch.linalg.vector_norm(gradient.float()).square().to(device)
            for parameter, gradient in pieces
            if gradient.numel() and self.counts(parameter)
        ]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=device)
        dist.all_reduce(total, group=dist.group.WORLD if partitioned else self._groups.model)
        return total.sqrt()

    def _require_alike(
        self, pieces: Sequence[tuple[nn.Parameter, torch.Tensor]], *, partitioned: bool, device: torch.device
    ) -> None:
        place = {parameter: at for at, parameter in enumerate(self._replicas)}
        squares = torch.zeros(len(place), device=device)
        for parameter, gradient in pieces:
            if parameter in place and gradient.numel():
                squares[place[parameter]] += torch.linalg.vector_norm(gradient.float()).square().to(device)
        found: list[str] = []
        if place:
            if partitioned:
                dist.all_reduce(squares, group=self._groups.data)
            extremes = torch.stack((squares, -squares))
            dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self._groups.tensor)
            high, low = extremes[0], -extremes[1]
            wrong = (high - low > _ALIKE * high) & (high > _COUNTS * high.max())
            found = [name for name, bad in zip(self._replicas.values(), wrong.tolist(), strict=True) if bad]
        everywhere: list[list[str]] = [[] for _ in range(self._groups.mesh.size)]
        dist.all_gather_object(everywhere, found)
        names = list(dict.fromkeys(name for names in everywhere for name in names))
        if names:
            error = ModelError(
                f"gradient of {', '.join(names[:_SHOWN])}" + (" and others" if len(names) > _SHOWN else ""),
                "it differs between tensor-parallel ranks, which all hold the parameter: they saw other "
                "data, drew other dropout masks, or under sequence parallelism only their slice of the "
                "sequence",
                "use dsx.nn.LayerNorm, RMSNorm or copy_parameters for what each rank applies to its slice; "
                "give these ranks the same batches and seeds; where the layer cuts the parameter itself, set "
                "parameter.tensor_model_parallel = True",
            )
            error.add_note(AGREED)
            raise error


def all_reduce_sum(tensor: torch.Tensor, group: dist.ProcessGroup, device: torch.device) -> None:
    """Sum ``tensor`` in place over ``group``, by way of ``device`` when it lives elsewhere (offload)."""
    if tensor.device.type == device.type:
        dist.all_reduce(tensor, group=group)
        return
    staged = tensor.to(device)
    dist.all_reduce(staged, group=group)
    tensor.copy_(staged)
