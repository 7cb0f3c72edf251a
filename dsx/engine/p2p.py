"""Asynchronous transfers between pipeline ranks: messages, their headers and shares.

Messages of one channel (kind, source, destination) go out in the order in which the source's schedule row
sends them, and the destination posts its receives in that very order, at moments that
:mod:`dsx.schedules.receives` has proved safe. Neither end waits for the other, except that a sender never has
more than two messages of a channel under way. NCCL matches the transfers of a pair by order alone, and so
does gloo here.

Where shapes vary, a receiver has to know a message's shape before it can post the receive. In the channel of
the messages themselves a header could be waited for only where its message is posted, and on a GPU reading it
waits for the device. So headers have a group of their own on the hosts (gloo), in which they are received as
they come.

Without sequence parallelism every tensor-parallel rank has the same activation at a stage boundary, and the
pipeline would send it once per rank. Here each rank sends 1/tp of the bytes to its peer, and the receiving
ranks put the whole together over their own, faster links (arXiv:2104.04473, section 4.1, "scatter/gather
communication optimization").
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from queue import Empty, SimpleQueue

import torch
import torch.distributed as dist

from dsx.errors import LayoutError, ModelError
from dsx.nn.parallel import TensorParallel
from dsx.parallel.groups import Groups
from dsx.parallel.stages import StageMap


def header_group(groups: Groups) -> dist.ProcessGroup:
    """A group of the pipe ranks' hosts. A collective call over those ranks alone."""
    ranks = list(groups.mesh.group_of(groups.rank, "pp"))
    group: dist.ProcessGroup | None = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert group is not None
    return group


class Headers:
    """The headers that one rank sends this one in a step, in order.

    A thread receives them, because gloo cannot be asked whether a receive is done without waiting for it.

    Args:
        numel: Elements of each, int64.
        source: Global rank of the sender.
        group: :func:`header_group`.
    """

    def __init__(self, *, count: int, numel: int, source: int, group: dist.ProcessGroup) -> None:
        self._numel, self._source, self._group = numel, source, group
        self._arrived: SimpleQueue[torch.Tensor | Exception] = SimpleQueue()
        threading.Thread(target=self._receive, args=(count,), daemon=True).start()

    def next(self, *, wait: bool) -> torch.Tensor | None:
        """The next header; None if it has not come and must not be waited for.

        Raises:
            RuntimeError: The connection to the sender broke.
        """
        try:
            found = self._arrived.get(block=wait)
        except Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def _receive(self, count: int) -> None:
        try:
            for _ in range(count):
                header = torch.empty(self._numel, dtype=torch.int64)
                dist.recv(header, self._source, group=self._group)
                self._arrived.put(header)
        except Exception as error:  # noqa: BLE001 - raised where the header is wanted
            self._arrived.put(error)


@dataclass(slots=True)
class Signatures:
    """What each boundary carries, learned from its first micro-batch; nothing is kept for dynamic shapes.

    Attributes:
        dynamic: Whether shapes may differ from micro-batch to micro-batch.
        shards: How tensors are cut for the transfer; None if they go whole.
        headers: Group for the headers of dynamic shapes (:func:`dsx.engine.p2p.header_group`).
    """

    dynamic: bool
    shards: Shards | None = None
    headers: dist.ProcessGroup | None = None
    _known: dict[tuple[int, bool], Signature] = field(default_factory=dict)
    _announced: set[tuple[int, bool]] = field(default_factory=set)
    _checked: set[tuple[str, int, bool]] = field(default_factory=set)

    def get(self, stage: int, training: bool) -> Signature | None:
        return self._known.get((stage, training))

    def learn(self, stage: int, training: bool, signature: Signature) -> None:
        """Remember what came in (static shapes only)."""
        if not self.dynamic:
            self._known[stage, training] = signature

    def announce(self, stage: int, training: bool, signature: Signature) -> bool:
        """Whether a header must go before this message. Raises ModelError if a static shape changed."""
        if self.dynamic:
            return True
        key = (stage, training)
        known = self._known.setdefault(key, signature)
        if known != signature:
            raise ModelError(
                f"input of virtual stage {stage}",
                f"it changed from {known} to {signature}",
                "build the PipelineModule with dynamic_shape=True, or call reset_activation_shape() on every "
                "rank before the change (for a short last batch, drop it: dataloader_drop_last)",
            )
        first = key not in self._announced
        self._announced.add(key)
        return first

    def check(self, kind: str, stage: int, training: bool, tensors: Tensors) -> None:
        """Check that all ranks hold a boundary's first message to ``stage`` alike, before they cut it.

        A collective call over the tensor-parallel ranks. Raises ModelError if they do not.
        """
        if self.shards is not None and (kind, stage, training) not in self._checked:
            self._checked.add((kind, stage, training))
            what = "activation into" if kind == "F" else "gradient of the output of"
            self.shards.require_equal(tensors, f"{what} virtual stage {stage}")

    def reset(self) -> None:
        """Forget everything; the next message of each boundary brings its header again."""
        self._known.clear()
        self._announced.clear()
        self._checked.clear()


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

        Every tensor-parallel rank must call this in the same order, which they do because they walk one
        schedule.
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
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    @property
    def num_bytes(self) -> int:
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
        """The signature of what comes back: gradients look like the outputs that want them."""
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
        shards: How the sender cuts tensors; None if it sends them whole.
        headers: The headers of varying shapes; None if any headers come in the channel.
    """

    messages: Sequence[tuple[int, int]]
    source: int
    group: dist.ProcessGroup
    device: torch.device
    shards: Shards | None = None
    headers: Headers | None = None
    _posted: dict[tuple[int, int], _Incoming] = field(default_factory=dict)
    num_posted: int = 0
    _expected: int = 0

    @property
    def due(self) -> tuple[int, int]:
        """The message whose receive is to be posted next."""
        return self.messages[self.num_posted]

    @property
    def has_room(self) -> bool:
        """Whether one more receive may be posted ahead: as many as a sender lets be under way."""
        return self.num_posted < len(self.messages) and len(self._posted) < IN_FLIGHT

    def post(self, signature: Signature | None) -> Signature:
        """Post the receive of :attr:`due`.

        A ``signature`` of None waits for the header, which says what it will be; the sender must send one.
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
        self.num_posted += 1
        return signature

    def expect(self) -> None:
        """One more message may be posted, once its header is there.

        On an accelerator that is waited for: the plan of :mod:`dsx.schedules.receives` rests on receives
        posted in time, and there the sender's host is ahead of its device, so that headers come early.
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
        """The part of ``tensor`` that this rank sends: all, its share, or nothing of a small one."""
        if self.shards is None:
            return [_wire(tensor)]
        share = self.shards.own(tensor)
        return [share] if share.numel() else []

    def flush(self) -> None:
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
