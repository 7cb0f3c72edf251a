"""Transfers of activations that all tensor-parallel ranks hold alike: each sends its share, and gathers.

Without sequence parallelism every tensor-parallel rank has the same activation at a stage boundary, and the
pipeline would send it once per rank. Here each rank sends 1/tp of the bytes to its peer, and the receiving
ranks put the whole together over their own, faster links (arXiv:2104.04473, section 4.1, "scatter/gather
communication optimization").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dsx.errors import LayoutError, ModelError
from dsx.nn.parallel import TensorParallel

_ALIGNMENT_BYTES = 16
"""Shares begin at multiples of this, so that kernels can move wide words."""

_ROUNDINGS = 16
"""By how many roundings of the largest value ranks may differ."""


@dataclass(frozen=True, slots=True)
class Shards:
    """How tensors are cut over the tensor-parallel ranks: as bytes, in equal contiguous shares.

    The last shares are shorter, down to nothing, when the bytes do not divide; only the buffer that they are
    gathered in is padded.
    """

    tp: TensorParallel

    @classmethod
    def over(cls, tp: TensorParallel) -> Shards | None:
        """Shards over the tensor-parallel ranks; None if there is only one.

        Raises:
            LayoutError: With sequence parallelism ranks hold different parts of the sequence already.
        """
        if tp.sequence:
            raise LayoutError(
                "shard_transfers with sequence parallelism",
                "each tensor-parallel rank has a part of its own of what crosses a stage boundary",
                "leave shard_transfers off, or sequence parallelism",
            )
        return cls(tp) if tp.size > 1 else None

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's share of a contiguous ``tensor``, uint8 [bytes], a view; empty for some small ones."""
        flat = tensor.view(-1).view(torch.uint8)
        start, length = self._span(flat.numel())
        return flat.narrow(0, start, length)

    def buffer(self, whole_bytes: int, device: torch.device) -> torch.Tensor:
        """Room for all shares of ``whole_bytes``, uint8 [tp x share]."""
        return torch.empty(self.tp.size * self._share(whole_bytes), dtype=torch.uint8, device=device)

    def slot(self, buffer: torch.Tensor, whole_bytes: int) -> torch.Tensor:
        """Where in :meth:`buffer` this rank's share is received, a view."""
        return buffer.narrow(0, *self._span(whole_bytes))

    def gather(self, buffer: torch.Tensor) -> dist.Work | None:
        """Start filling ``buffer`` from the slots of all ranks, each of which has received its own.

        Every tensor-parallel rank must call this in the same order, as they do: they walk one schedule.
        """
        if buffer.numel() == 0:
            return None
        share = buffer.numel() // self.tp.size
        mine = buffer.narrow(0, self.tp.rank * share, share)
        # torch 2.13 renamed all_gather_into_tensor and warns at the old name; 2.11 has only that one.
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work: dist.Work | None = call(buffer, mine, group=self.tp.group, async_op=True)
        return work

    def require_equal(self, tensors: Sequence[torch.Tensor], where: str) -> None:
        """Compare ``tensors`` with those of the other tensor-parallel ranks. A collective call over them.

        Floating-point values may differ by rounding.

        Raises:
            ModelError: They differ; on every tensor-parallel rank.
        """
        for tensor in tensors:
            if tensor.numel() and not self._alike(tensor.detach()):
                raise ModelError(
                    where,
                    "tensor-parallel ranks hold different values, of which each would send a part",
                    "build the PipelineModule without shard_transfers, or return what all ranks hold alike",
                )

    def _alike(self, tensor: torch.Tensor) -> bool:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        rounding = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
        values = tensor.to(torch.promote_types(tensor.dtype, torch.float32) if rounding else torch.int64)
        extremes = torch.stack((values, -values)).nan_to_num_()
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.tp.group)
        spread = (extremes[0] + extremes[1]).max()
        return bool(spread <= _ROUNDINGS * rounding * extremes.abs().max())

    def _share(self, whole_bytes: int) -> int:
        share = -(-whole_bytes // self.tp.size)
        return -(-share // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def _span(self, whole_bytes: int) -> tuple[int, int]:
        """Start and length in bytes of this rank's share."""
        share = self._share(whole_bytes)
        start = min(self.tp.rank * share, whole_bytes)
        return start, min(share, whole_bytes - start)
