"""Asynchronous transfers between pipeline ranks.

Messages of one channel (kind, source, destination) go out in the order in which the source's schedule row
sends them, and the destination posts its receives in that very order, one ahead of need. Posting never waits,
so neither end can block the other; NCCL, which matches the transfers of a pair by order alone, is satisfied,
and the order is proved on paper by :func:`dsx.plan.transfers.channels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dsx.errors import ModelError

if TYPE_CHECKING:
    from dsx.runtime.groups import Groups

Tensors = tuple[torch.Tensor, ...]

_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_MAX_TENSORS = 8
_MAX_DIMS = 8
_FIELDS = 3 + _MAX_DIMS  # dtype, requires grad, number of dims, dims
HEADER_NUMEL = 2 + _MAX_TENSORS * _FIELDS


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype and whether a gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def empty(self, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of this kind."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class Signature:
    """What one boundary carries: a tensor, or a tuple of tensors."""

    tensors: tuple[TensorMeta, ...]
    is_tuple: bool

    @classmethod
    def of(cls, value: object, where: str) -> Signature:
        """Signature of a stage's output. Raises ModelError unless it is a tensor or a tuple of tensors."""
        tensors = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(t, torch.Tensor) for t in tensors) or not 0 < len(tensors) <= _MAX_TENSORS:
            raise ModelError(
                where,
                f"a layer at a stage boundary returned {type(value).__name__}",
                f"return a tensor or a tuple of 1 to {_MAX_TENSORS} tensors",
            )
        for tensor in tensors:
            if tensor.dtype not in _DTYPES or tensor.dim() > _MAX_DIMS:
                raise ModelError(
                    where,
                    f"cannot transfer a {tensor.dim()}-dim {tensor.dtype} tensor",
                    f"use at most {_MAX_DIMS} dims and one of {[str(d) for d in _DTYPES]}",
                )
        metas = tuple(TensorMeta(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        return cls(metas, isinstance(value, tuple))

    def encode(self) -> torch.Tensor:
        """Fixed-size int64 header, [HEADER_NUMEL]."""
        header = torch.zeros(HEADER_NUMEL, dtype=torch.int64)
        header[0], header[1] = len(self.tensors), int(self.is_tuple)
        for i, meta in enumerate(self.tensors):
            row = [_DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape), *meta.shape]
            header[2 + i * _FIELDS : 2 + i * _FIELDS + len(row)] = torch.tensor(row)
        return header

    @classmethod
    def decode(cls, header: torch.Tensor) -> Signature:
        """Inverse of :meth:`encode`."""
        values = header.tolist()
        metas = []
        for i in range(values[0]):
            dtype, grad, dims, *sizes = values[2 + i * _FIELDS : 2 + (i + 1) * _FIELDS]
            metas.append(TensorMeta(tuple(sizes[:dims]), _DTYPES[dtype], bool(grad)))
        return cls(tuple(metas), bool(values[1]))


@dataclass(slots=True)
class _Pending:
    """A posted receive: its buffers and the works that fill them."""

    signature: Signature
    tensors: Tensors
    works: list[dist.Work]


@dataclass(slots=True)
class Inbox:
    """Receives of one channel of one step, posted in the sender's order, one ahead of need.

    Args:
        messages: (virtual stage that receives, micro-batch) in the order in which the source sends.
        signature: Signature of a message if it is known before its header arrives, else None.
        learn: Called with each header that comes in.
        source: Global rank of the sender.
        group: Process group of the channel.
        device: Where buffers live.
    """

    messages: Sequence[tuple[int, int]]
    signature: Callable[[tuple[int, int]], Signature | None]
    learn: Callable[[tuple[int, int], Signature], None]
    source: int
    group: dist.ProcessGroup
    device: torch.device
    _posted: dict[tuple[int, int], _Pending] = field(default_factory=dict)
    _next: int = 0

    def post(self, *, blocking: bool) -> bool:
        """Post the next receive; False if none is left or its shape is not known yet.

        ``blocking`` waits for the header of a message of unknown shape, which is what makes it known.
        """
        if self._next >= len(self.messages):
            return False
        message = self.messages[self._next]
        signature = self.signature(message)
        if signature is None:
            if not blocking:
                return False
            header = torch.empty(HEADER_NUMEL, dtype=torch.int64, device=self.device)
            dist.recv(header, self.source, group=self.group)
            signature = Signature.decode(header)
            self.learn(message, signature)
        tensors = tuple(meta.empty(self.device) for meta in signature.tensors)
        works = [_started(dist.irecv(t, self.source, group=self.group)) for t in tensors]
        self._posted[message] = _Pending(signature, tensors, works)
        self._next += 1
        return True

    def take(self, message: tuple[int, int]) -> tuple[Signature, Tensors]:
        """Wait for ``message`` and hand its tensors over; posts the one after it first."""
        while message not in self._posted:
            if not self.post(blocking=True):
                raise AssertionError(f"message {message} is not on this channel")
        self.post(blocking=False)
        pending = self._posted.pop(message)
        for work in pending.works:
            work.wait()
        return pending.signature, pending.tensors


@dataclass(slots=True)
class Outbox:
    """Sends in flight. Each keeps its tensor alive until it has left."""

    groups: Groups
    _flying: list[tuple[dist.Work, torch.Tensor]] = field(default_factory=list)

    def send(self, tensors: Sequence[torch.Tensor], kind: str, pp_rank: int) -> None:
        """Start sending ``tensors`` to pipeline coordinate ``pp_rank``; returns at once."""
        self._flying = [(work, t) for work, t in self._flying if not work.is_completed()]
        group = self.groups.channels[channel(kind, self.groups.pp_rank, pp_rank)]
        peer = self.groups.pipe_peer(pp_rank)
        for tensor in tensors:
            out = tensor.detach().contiguous()
            self._flying.append((_started(dist.isend(out, peer, group=group)), out))

    def flush(self) -> None:
        """Wait until everything has left."""
        for work, _ in self._flying:
            work.wait()
        self._flying.clear()


def channel(kind: str, source: int, destination: int) -> str:
    """Name of the group that carries ``kind`` ("F" or "B") from one pipeline coordinate to another."""
    return f"{kind}_{'up' if destination > source else 'down'}"


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the channel's group"
    return work
