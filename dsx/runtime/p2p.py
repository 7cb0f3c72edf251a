"""Asynchronous transfers between pipeline ranks.

Messages of one channel (kind, source, destination) go out in the order in which the source's schedule row
sends them, and the destination posts its receives in that very order, at moments that
:mod:`dsx.plan.receives` has proved safe. Neither end waits for the other, except that a sender never has more
than two messages of a channel under way. NCCL matches the transfers of a pair by order alone, and so does
gloo here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dsx.errors import ModelError

if TYPE_CHECKING:
    from dsx.runtime.groups import Groups
    from dsx.runtime.headers import Headers
    from dsx.runtime.shards import Shards
    from dsx.spec.stages import StageMap

Tensors = tuple[torch.Tensor, ...]

IN_FLIGHT = 2
"""Messages of one channel that a sender lets be under way, so that a slow receiver bounds its memory."""

# What NCCL sends as it is (ProcessGroupNCCL's table of types); anything else goes as bytes.
_NATIVE = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_DTYPES = (*_NATIVE, torch.int16, torch.complex64, torch.complex128)
_MAX_TENSORS = 32
_MAX_DIMS = 8
_FIELDS = 3 + _MAX_DIMS  # dtype, requires grad, number of dims, dims
HEADER_NUMEL = 2 + _MAX_TENSORS * _FIELDS


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype and whether a gradient comes back."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    def __str__(self) -> str:
        return f"{list(self.shape)} {self.dtype}{' with gradient' if self.requires_grad else ''}"

    def empty(self, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor of this kind."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        """Size of the contents."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Signature:
    """What one boundary carries: a tensor, or a tuple of tensors."""

    tensors: tuple[TensorMeta, ...]
    is_tuple: bool

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.tensors))})"

    @property
    def gradient(self) -> Signature:
        """What comes back: gradients look like the outputs that want them."""
        return Signature(tuple(meta for meta in self.tensors if meta.requires_grad), is_tuple=True)

    @classmethod
    def of(cls, value: object, where: str) -> Signature:
        """Signature of a stage's output. Raises ModelError unless it is a tensor or a tuple of tensors."""
        tensors = value if isinstance(value, tuple) else (value,)
        strange = [type(t).__name__ for t in tensors if not isinstance(t, torch.Tensor)]
        if strange or not 0 < len(tensors) <= _MAX_TENSORS:
            kind = type(value).__name__
            raise ModelError(
                where,
                f"a layer at a stage boundary returned a {kind}"
                + (f" of {len(tensors)} tensors" if not strange else "")
                + (f" holding a {strange[0]}" if strange and kind == "tuple" else ""),
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
        values = [len(self.tensors), int(self.is_tuple)]
        for meta in self.tensors:
            row = [_DTYPES.index(meta.dtype), int(meta.requires_grad), len(meta.shape), *meta.shape]
            values += row + [0] * (_FIELDS - len(row))
        return torch.tensor(values + [0] * (HEADER_NUMEL - len(values)), dtype=torch.int64)

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
class _Incoming:
    """A posted message: the tensors, or with shards the buffers that they are gathered in."""

    signature: Signature
    buffers: Tensors
    works: list[dist.Work]


@dataclass(slots=True)
class Inbox:
    """Receives of one channel of one step, posted in the sender's order.

    Args:
        messages: (virtual stage that receives, micro-batch) in the order in which the source sends.
        source: Global rank of the sender.
        group: Process group of the channel.
        device: Where buffers live.
        shards: How the sender cuts tensors; None if it sends them whole.
        headers: Of shapes that vary; None if headers, where there are any, come in the channel.
    """

    messages: Sequence[tuple[int, int]]
    source: int
    group: dist.ProcessGroup
    device: torch.device
    shards: Shards | None = None
    headers: Headers | None = None
    _posted: dict[tuple[int, int], _Incoming] = field(default_factory=dict)
    _next: int = 0
    _expected: int = 0

    @property
    def due(self) -> tuple[int, int]:
        """The message whose receive is to be posted next."""
        return self.messages[self._next]

    @property
    def num_posted(self) -> int:
        """Receives posted so far in this step."""
        return self._next

    @property
    def has_room(self) -> bool:
        """Whether one more receive may be posted ahead: as many as a sender lets be under way."""
        return self._next < len(self.messages) and len(self._posted) < IN_FLIGHT

    def post(self, signature: Signature | None) -> Signature:
        """Post the receive of :attr:`due`.

        Args:
            signature: What it will be. None waits for its header, which says so; the sender must send one.

        Returns:
            The signature.
        """
        if signature is None:
            header = torch.empty(HEADER_NUMEL, dtype=torch.int64, device=self.device)
            dist.recv(header, self.source, group=self.group)
            signature = Signature.decode(header)
        if self.shards is None:
            buffers = tuple(meta.empty(self.device) for meta in signature.tensors)
            wires = [_wire(buffer) for buffer in buffers]
        else:
            sizes = [meta.num_bytes for meta in signature.tensors]
            buffers = tuple(self.shards.buffer(size, self.device) for size in sizes)
            slots = map(self.shards.slot, buffers, sizes)
            wires = [slot for slot in slots if slot.numel()]
        works = [_started(dist.irecv(wire, self.source, group=self.group)) for wire in wires]
        self._posted[self.due] = _Incoming(signature, buffers, works)
        self._next += 1
        return signature

    def expect(self) -> None:
        """One more message may be posted, once its header is there.

        On an accelerator that is waited for: the plan of :mod:`dsx.plan.receives` rests on receives posted in
        time, and there the sender's host is ahead of its device, so that headers come early.
        """
        self._expected += 1
        self.post_announced(wait=self.device.type != "cpu")

    def post_announced(self, *, wait: bool = False) -> None:
        """Post the receives of expected messages whose headers have come; with ``wait``, of all expected."""
        while self._expected and self._post_next(wait=wait):
            self._expected -= 1

    def _post_next(self, *, wait: bool) -> bool:
        assert self.headers is not None
        header = self.headers.next(wait=wait)
        if header is not None:
            self.post(Signature.decode(header))
        return header is not None

    def take(self, message: tuple[int, int]) -> tuple[Signature, Tensors]:
        """Wait for a posted or expected message and hand its tensors over."""
        while message not in self._posted:
            self._post_next(wait=True)
            self._expected -= 1
        incoming = self._posted.pop(message)
        for work in incoming.works:
            work.wait()
        if self.shards is None:
            return incoming.signature, incoming.buffers
        gathers = [self.shards.gather(buffer) for buffer in incoming.buffers]
        for gather in gathers:
            if gather is not None:
                gather.wait()
        pairs = zip(incoming.buffers, incoming.signature.tensors, strict=True)
        tensors = tuple(b[: m.num_bytes].view(m.dtype).view(m.shape) for b, m in pairs)
        return incoming.signature, tensors


@dataclass(slots=True)
class Outbox:
    """Sends under way. Each keeps its tensors alive until they have left.

    Args:
        groups: This rank's groups.
        shards: How tensors are cut; None sends them whole.
        headers: Group of the hosts for headers; None sends them in the channel, before their message.
    """

    groups: Groups
    shards: Shards | None = None
    headers: dist.ProcessGroup | None = None
    _flying: dict[tuple[str, int], deque[list[tuple[dist.Work, torch.Tensor]]]] = field(default_factory=dict)

    def send(
        self,
        tensors: Sequence[torch.Tensor],
        kind: str,
        pp_rank: int,
        header: torch.Tensor | None = None,
    ) -> None:
        """Start sending one message to pipeline coordinate ``pp_rank``, ``header`` (on the host) first.

        Waits while IN_FLIGHT messages of the channel are under way (on a GPU the host goes on, and the
        current stream waits). Not so for shapes that vary on a CPU, where a receiver may post late.
        """
        name = channel(kind, self.groups.pp_rank, pp_rank)
        group, peer = self.groups.channels[name], self.groups.pipe_peer(pp_rank)
        flying = self._flying.setdefault((name, pp_rank), deque())
        late = self.headers is not None and kind == "F" and tensors[0].device.type == "cpu"
        while len(flying) >= IN_FLIGHT and not late:
            _wait(flying.popleft())
        message = []
        if header is not None and self.headers is not None:
            message.append((_started(dist.isend(header, peer, group=self.headers)), header))
        outs = [] if header is None or self.headers is not None else [header.to(tensors[0].device)]
        for tensor in tensors:
            outs += self._out(tensor.detach().contiguous())
        message += [(_started(dist.isend(out, peer, group=group)), out) for out in outs]
        flying.append(message)

    def _out(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What of ``tensor`` this rank sends: all, its share, or of a small one nothing."""
        if self.shards is None:
            return [_wire(tensor)]
        share = self.shards.own(tensor)
        return [share] if share.numel() else []

    def flush(self) -> None:
        """Wait until everything has left."""
        for flying in self._flying.values():
            while flying:
                _wait(flying.popleft())


def channel(kind: str, source: int, destination: int) -> str:
    """Name of the group that carries ``kind`` ("F" or "B") from one pipeline coordinate to another."""
    return f"{kind}_{'up' if destination > source else 'down'}"


def open_channels(groups: Groups, stages: StageMap, device: torch.device) -> None:
    """Send one number through every channel that a pipeline uses. A collective call over the pipe ranks.

    NCCL makes the communicator of a pair at its first transfer, and both ends wait for each other there; so
    that happens here, where every rank goes through its channels in the same global order. (Stock DeepSpeed
    does likewise: deepspeed/runtime/pipe/engine.py, "Initialize pipeline communicators".)
    """
    me, owners = groups.pp_rank, [stages.rank_of(stage) for stage in range(stages.num_stages)]
    neighbours = dict.fromkeys((a, b) for a, b in pairwise(owners) if a != b)
    token = torch.zeros(1, device=device)
    for kind, source, destination in (step for a, b in neighbours for step in (("F", a, b), ("B", b, a))):
        group = groups.channels[channel(kind, source, destination)]
        if me == source:
            dist.send(token, groups.pipe_peer(destination), group=group)
        elif me == destination:
            dist.recv(token, groups.pipe_peer(source), group=group)


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as it is sent: its bytes, if NCCL does not know its dtype."""
    return tensor if tensor.dtype in _NATIVE else tensor.view(-1).view(torch.uint8)


def _wait(message: Sequence[tuple[dist.Work, torch.Tensor]]) -> None:
    for work, _ in message:
        work.wait()


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is not a member of the channel's group"
    return work
