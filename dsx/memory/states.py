"""What DeepSpeed 0.19.8 keeps for a rank's parameters, and takes for a moment, as the ledger sees it.

One class per optimizer wrapper that DeepSpeed chooses (engine.py, _do_optimizer_sanity_check). Each is asked
in the order of a run: :meth:`States.build`, :meth:`States.start`, gradients as they come,
:meth:`States.reduce` after each backward, :meth:`States.step`. Source files are below deepspeed/runtime.

P: parameters of this rank's layers, tensor-parallel cut and padding included; N: data-parallel degree; w:
bytes of a parameter, 2 or 4.

What ZeRO-Offload moves to the host: settings, and the host's own ledger.

The device keeps parameters (or, with parameters offloaded, none between uses) and the reduce bucket. The host
keeps fp32 masters, their gradients, the moments and, at ZeRO-3, the partitions that gradients add up in.
Gradients go there parameter by parameter, by way of the device, where they are added up and squared.

Gradients over data parallelism as dsx/engine/zero/reduction.py sends them: chunk by chunk.

P: parameters of a bucket; w: bytes of an element on the wire; N: data-parallel degree.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from dsx.memory.ledger import Label, Leaf, Ledger, Storage, Tensor
from dsx.memory.stage3_gathering import Gathering
from dsx.parallel.zero import ZeroPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Offload:
    """``offload_optimizer`` and ``offload_param``, of which dsx runs ``"device": "cpu"``.

    Attributes:
        optimizer: Whether the optimizer's state and its update are on the host.
        parameters: Whether partitions of parameters are (ZeRO-3).
        pinned: ``offload_optimizer.pin_memory``.
        pinned_parameters: ``offload_param.pin_memory``.
        ratio: ``offload_optimizer.ratio``, ZeRO-3: sub-groups on the host, of all; the first stay behind.
        state_bytes: What the update keeps for each element there.
        step_bytes: What the update takes besides, for each element of a group: torch's Adam on a CPU 8,
            DeepSpeed's nothing.
        rounds: Whether pinned memory comes in powers of two (torch's CachingHostAllocator does that).
        unified: Whether the device is the host: a run on CPUs, where nothing has to be moved or pinned.
    """

    optimizer: bool = False
    parameters: bool = False
    pinned: bool = True
    pinned_parameters: bool = False
    ratio: float = 1.0
    state_bytes: int = 0
    step_bytes: int = 0
    rounds: bool = True
    unified: bool = False


class Host:
    """The host's memory of one rank.

    Args:
        offload: Whether pinned memory is rounded, and whether the host's memory is the device's.
        device: The device's ledger.
    """

    def __init__(self, offload: Offload | None, device: Ledger) -> None:
        self._unified = offload is not None and offload.unified
        self.ledger = device if self._unified else Ledger()
        self._rounds = offload is not None and offload.rounds

    def new(
        self, category: str, name: str, formula: str, source: str, size_bytes: int, *, pinned: bool
    ) -> Tensor:
        """A flat tensor of so many bytes; page-locked ones take the next power of two."""
        if pinned and self._rounds and size_bytes:
            size_bytes = 1 << (size_bytes - 1).bit_length()
            formula += ", rounded up to a power of two"
        what = Label(category, name, formula, source)
        return Tensor((size_bytes,), 1, Storage(self.ledger, what, size_bytes))

    def pinned(
        self, category: str, name: str, formula: str, source: str, size_bytes: int, *, pin: bool
    ) -> Tensor:
        """Like :meth:`new`; ``pin`` copies from pageable memory, which is there until the copy is."""
        pageable = self.new(
            "temporaries", f"{name}, before pinning", formula, source, size_bytes, pinned=False
        )
        if not pin or self._unified:
            del pageable
            return self.new(category, name, formula, source, size_bytes, pinned=False)
        locked = self.new(category, name, formula, source, size_bytes, pinned=True)
        del pageable
        return locked

    def taken(self, source: str, elements: Sequence[int], step_bytes: int) -> None:
        """The temporaries of an update, group after group."""
        for size in elements:
            self.new("temporaries", "update", f"{step_bytes} P/N", source, size * step_bytes, pinned=False)


AT_ONCE = 2
"""Buckets under way where gradients stay in place (engine/zero/reduction.py)."""


class GradientStore(Protocol):
    """Where an optimizer accumulates gradients, and where it wants the averaged ones.

    Attributes:
        in_place: Gradients stay in the store's memory.
    """

    in_place: bool

    def take(self, leaf: Leaf) -> Tensor | None:
        """The gradient of this step, which the store forgets; None if there is none or it stays in place."""

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """The average, a view on its bucket."""


class _Piece(NamedTuple):
    """Elements of a parameter's gradient."""

    leaf: Leaf
    length: int


@dataclass(frozen=True, slots=True)
class _Bucket:
    pieces: Sequence[_Piece]
    flat: Tensor


class ChunkReduction:
    """Reduces every parameter once per step, each chunk's after its last action.

    Args:
        ledger: Counts.
        store: Of the optimizer.
        leaves: All parameters, in the module's order.
        uses: Virtual stage -> parameters that its layers use.
        dp: Data-parallel degree.
        width: Bytes of an element on the wire.
        bucket: Elements that close a bucket; 0 for the largest parameter's.
    """

    def __init__(
        self,
        ledger: Ledger,
        store: GradientStore,
        *,
        leaves: Sequence[Leaf],
        uses: Mapping[int, Sequence[Leaf]],
        dp: int,
        width: int,
        bucket: int,
    ) -> None:
        self._ledger, self._store, self._dp = ledger, store, dp
        self._width = width
        self._bucket_elements = bucket or max((leaf.numel for leaf in leaves), default=1)
        self._users: dict[str, set[int]] = {leaf.name: set() for leaf in leaves}
        self._leaves = list(leaves)
        for stage, used in uses.items():
            for leaf in used:
                self._users[leaf.name].add(stage)
        self._done: set[int] = set()
        self._left: set[str] = set()
        self._waiting: deque[list[_Piece]] = deque()
        self._flying: deque[_Bucket] = deque()

    def chunk_done(self, stage: int) -> None:
        """A virtual stage has nothing more to do in this step."""
        self._done.add(stage)
        self._start([leaf for leaf in self._leaves if self._users[leaf.name] <= self._done])

    def advance(self) -> None:
        """Before an action: the next bucket, in the place of the oldest one if there are enough."""
        if self._waiting:
            if self._is_full:
                self._land(self._flying.popleft())
            self._send(self._waiting.popleft())

    def finish(self) -> None:
        """Before the update: the rest, then the averages go to the store, bucket by bucket."""
        self._start(self._leaves)
        while self._waiting:
            self.advance()
        while self._flying:
            self._land(self._flying.popleft())
        self._done.clear()
        self._left.clear()

    def _start(self, leaves: Sequence[Leaf]) -> None:
        filling: list[_Piece] = []
        room = self._bucket_elements
        for leaf in leaves:
            if leaf.name in self._left:
                continue
            self._left.add(leaf.name)
            if self._store.in_place and self._dp == 1:
                continue
            for piece in self._cut(leaf, room):
                filling.append(piece)
                room -= piece.length
                if self._dp == 1 or room <= 0:
                    self._waiting.append(filling)
                    filling, room = [], self._bucket_elements
        if filling:
            self._waiting.append(filling)
        while self._waiting and not self._is_full:
            self._send(self._waiting.popleft())

    def _cut(self, leaf: Leaf, room: int) -> Iterator[_Piece]:
        """All of it; in place, as much as the bucket has room for, then buckets full of it."""
        left = leaf.numel
        while left:
            length = min(room, left) if self._store.in_place else left
            yield _Piece(leaf, length)
            left, room = left - length, self._bucket_elements

    @property
    def _is_full(self) -> bool:
        return self._store.in_place and len(self._flying) >= AT_ONCE

    def _send(self, pieces: Sequence[_Piece]) -> None:
        if self._dp == 1:
            gradient = self._store.take(pieces[0].leaf)
            self._flying.append(_Bucket(pieces, gradient or self._flat(0)))
            return
        flat = self._flat(sum(piece.length for piece in pieces))
        for piece in pieces:
            self._store.take(piece.leaf)
        self._flying.append(_Bucket(pieces, flat))

    def _flat(self, elements: int) -> Tensor:
        what = Label(
            "buckets", "gradients under way", "P w, P of a chunk", "dsx engine/zero/reduction.py _send"
        )
        storage = Storage(self._ledger, what, elements * self._width)
        return Tensor((elements,), self._width, storage)

    def _land(self, bucket: _Bucket) -> None:
        for piece in bucket.pieces:
            self._store.put(piece.leaf, bucket.flat)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The update rule.

    Attributes:
        state_bytes: What it keeps for each parameter.
        step_bytes: What it takes besides, for each parameter, while it updates.
        one_by_one: Whether it takes that for one tensor at a time, not for all of them.
    """

    state_bytes: int
    step_bytes: int
    one_by_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """The config's part in it.

    Attributes:
        width: Bytes of a parameter: 2 or 4.
        accumulate: Bytes of an accumulated gradient.
        optimizer: The update rule.
        bucket: ``zero_optimization.reduce_bucket_size``, elements.
        communication: Bytes of a gradient on its way (``communication_data_type``); None as a parameter's.
        reduce: ``dsx.zero.reduce``.
        offload: What lives on the host.
        fused: Whether the update is DeepSpeed's FusedAdam or the like.
        gathering: ZeRO-3's sizes.
    """

    width: int
    accumulate: int
    optimizer: Optimizer
    bucket: int = 500_000_000
    communication: int | None = None
    reduce: Literal["step", "micro_batch"] = "step"
    offload: Offload | None = None
    fused: bool = False
    gathering: Gathering | None = None


class States:
    """Base: fp32 without ZeRO. Parameters, gradients and moments are the model's own tensors.

    Args:
        ledger: Counts.
        plan: ZeRO's cut of the rank's parameters.
        dp_rank: Data-parallel coordinate.
        leaves: The rank's parameters by name.
        settings: The config's part.

    Attributes:
        replicated: Parameters that are copies of another pipeline rank's, tied ones.
        reduction: dsx's own, if DeepSpeed does not reduce.
        in_place: Whether buckets come on top of gradients, which stay where they are.
        capacity_bytes: What a device has for tensors; None for enough.
    """

    in_place = False

    def __init__(
        self,
        ledger: Ledger,
        plan: ZeroPlan,
        dp_rank: int,
        leaves: Mapping[str, Leaf],
        settings: StateSettings,
    ) -> None:
        self.ledger, self.plan, self.dp_rank = ledger, plan, dp_rank
        self.leaves, self.settings, self.host = leaves, settings, Host(settings.offload, ledger)
        self.replicated: frozenset[str] = frozenset()
        self.order = [leaves[name] for group in plan.groups for name, _ in group]
        self.reduction: ChunkReduction | None = None
        self.capacity_bytes: int | None = None
        self.parameters: list[Tensor] = []
        self.moments: list[Tensor] = []

    def build(self) -> None:
        """The model's parameters, one by one."""
        self.parameters = [
            self.new("parameters", "parameter", "P w", "dsx nn", leaf.numel, leaf.width)
            for leaf in self.order
        ]

    def start(self) -> None:
        """What ``deepspeed.initialize`` adds."""

    def begin(self) -> None:
        """Before each step."""

    def before_action(self, position: int) -> None:
        """Before the action at ``position`` of the rank's row: go on with the reductions."""
        del position
        if self.reduction is not None:
            self.reduction.advance()

    def plan_reduction(self, uses: Mapping[int, Sequence[Leaf]]) -> None:
        """Have dsx reduce gradients, where it does (engine/zero/reduction.py, reducible).

        Args:
            uses: Virtual stage -> parameters that its layers use.
        """
        if not self.reduces_itself:
            self.reduction = ChunkReduction(
                self.ledger,
                self,
                leaves=list(self.leaves.values()),
                uses=uses,
                dp=self.plan.dp,
                width=self.settings.communication or self.settings.width,
                bucket=self.settings.bucket,
            )

    @property
    def reduces_itself(self) -> bool:
        """Whether DeepSpeed reduces gradients."""
        return False

    def take(self, leaf: Leaf) -> Tensor | None:
        """Gradients in ``p.grad`` (engine/zero/replicated.py)."""
        gradient, leaf.grad = leaf.grad, None
        return gradient

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """Back there, in the parameter's dtype."""
        if gradient.width == leaf.width:
            leaf.grad = gradient.detach()
        else:
            source = "dsx engine/zero/replicated.py put"
            leaf.grad = self.new("gradients", "averaged gradient", "w P", source, leaf.numel, leaf.width)

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """After each backward; ``boundary`` after the last of the step, ``came`` if any gradient did."""

    def chunk_done(self, stage: int) -> None:
        """After the last action of a virtual stage."""
        if self.reduction is not None:
            self.reduction.chunk_done(stage)

    def before_step(self) -> None:
        """After the last action of a step."""
        if self.reduction is not None:
            self.reduction.finish()

    def step(self) -> None:
        """The update."""
        numels = [leaf.numel for leaf in self.order]
        self.update(numels)
        for leaf in self.order:
            leaf.grad = None

    def norm(self, largest: int) -> None:
        """Squares are taken in fp32, gradient by gradient (dsx/engine/zero/norm.py)."""
        self.new(
            "temporaries",
            "gradient in float32",
            "4 of the largest gradient",
            "dsx engine/zero/norm.py",
            largest,
            4,
        )

    def update(self, numels: Iterable[int]) -> None:
        """One optimizer step over fp32 tensors of these sizes."""
        numels, optimizer = list(numels), self.settings.optimizer
        if not self.moments and optimizer.state_bytes:
            self.moments = [
                self.new(
                    "optimizer",
                    "moments",
                    f"{optimizer.state_bytes} P",
                    "torch optim",
                    n * optimizer.state_bytes,
                    1,
                )
                for n in numels
            ]
        temporaries: list[Tensor] = []
        for n in numels if optimizer.step_bytes else ():
            if optimizer.one_by_one:
                temporaries.clear()
            temporaries.append(self._taken(n, "P"))

    def update_group(self, index: int, size: int) -> None:
        """The update of one group's partition."""
        optimizer = self.settings.optimizer
        if len(self.moments) <= index and optimizer.state_bytes:
            formula = f"{optimizer.state_bytes} P/N, padded"
            held = size * optimizer.state_bytes
            self.moments.append(self.new("optimizer", "moments", formula, "torch optim", held, 1))
        if optimizer.step_bytes:
            self._taken(size, "P/N")

    def _taken(self, elements: int, of: str) -> Tensor:
        """Temporaries of the update."""
        each = self.settings.optimizer.step_bytes
        return self.new("temporaries", "update", f"{each} {of}", "torch optim", elements * each, 1)

    def flattened(
        self, held: dict[str, Tensor], group: Sequence[tuple[str, int]], size: int, *, by_way_of_host: bool
    ) -> Tensor:
        """A group's parameters end to end; one alone without padding stays where it is.

        Args:
            held: The parameters by name; the group's are let go of.
            group: Name and elements of each.
            size: Elements of all, padding included.
            by_way_of_host: Flatten on the host what the device has no room for beside the parameters
                (zero/stage_1_and_2.py, __init__, flatten_on_accelerator).
        """
        source, width = "zero/stage_1_and_2.py flatten_dense_tensors_aligned", self.settings.width
        free = None if self.capacity_bytes is None else self.capacity_bytes - self.ledger.current_bytes
        on_host = by_way_of_host and free is not None and free < size * width
        copies = []
        for name, numel in group if on_host else ():
            copies.append(self._on_host("parameters on their way", "w P", source, numel * width))
            held[name] = self.new("parameters", "place of a parameter", "4", source, 1, 4)
        kind = "parameters", "flat parameters", "w P, padded", source
        if len(group) == 1 and group[0][1] == size:
            return self.new(*kind, size, width) if on_host else held.pop(group[0][0])
        padding = size - sum(numel for _, numel in group)
        if on_host:
            together = self._on_host("flat parameters", "w P, padded", source, size * width)
            copies.clear()
            flat = self.new(*kind, size, width)
            del together
        else:
            zeros = self.new("temporaries", "padding", "w 2 N", source, padding, width)
            flat = self.new(*kind, size, width)
            del zeros
        for name, _ in group:
            del held[name]
        return flat

    def _on_host(self, name: str, formula: str, source: str, size_bytes: int) -> Tensor:
        return self.host.new("temporaries", name, formula, source, size_bytes, pinned=False)

    def new(self, category: str, name: str, formula: str, source: str, numel: int, width: int) -> Tensor:
        """A flat tensor of ``numel`` elements."""
        return Tensor(
            (numel,), width, Storage(self.ledger, Label(category, name, formula, source), numel * width)
        )


class Unfused(States):
    """bf16 without ZeRO, torch's optimizers: fp16/unfused_optimizer.py, an fp32 copy of each parameter."""

    def start(self) -> None:
        """Masters, then a first update on zero gradients, which dsx undoes."""
        source = "fp16/unfused_optimizer.py __init__"
        self.masters = []
        for leaf in self.order:
            clone = self.new("temporaries", "clone", "w of a parameter", source, leaf.numel, leaf.width)
            self.masters.append(self.new("optimizer", "master weights", "4 P", source, leaf.numel, 4))
            del clone
        source = "fp16/unfused_optimizer.py initialize_optimizer_states"
        low = [
            self.new("gradients", "zero gradients", "w P", source, leaf.numel, leaf.width)
            for leaf in self.order
        ]
        high = [
            self.new("temporaries", "fp32 gradients", "4 P", source, leaf.numel, 4) for leaf in self.order
        ]
        self.update(leaf.numel for leaf in self.order)
        del low, high
        self.moments.clear()

    def step(self) -> None:
        """The norm, fp32 gradients beside the bf16 ones, and the update."""
        self.norm(max(leaf.numel for leaf in self.order))
        source = "fp16/unfused_optimizer.py step"
        gradients = [
            self.new("temporaries", "fp32 gradients", "4 P", source, leaf.numel, 4) for leaf in self.order
        ]
        self.update(leaf.numel for leaf in self.order)
        del gradients
        for leaf in self.order:
            leaf.grad = None


class Flat(States):
    """bf16 without ZeRO, fused optimizers: fp16/fused_optimizer.py, flat bf16 and flat fp32."""

    masters: Tensor

    def start(self) -> None:
        """Clones, their flat copy, the flat masters; a first update, which dsx undoes."""
        source = "fp16/fused_optimizer.py __init__"
        clones = [
            self.new("temporaries", "clones", "w P", source, leaf.numel, leaf.width) for leaf in self.order
        ]
        total = sum(leaf.numel for leaf in self.order)
        flat = self.new("parameters", "flat parameters", "w P", source, total, self.settings.width)
        clones.clear()
        self.parameters = [flat]
        clone = self.new("temporaries", "clone", "w P", source, total, self.settings.width)
        self.masters = self.new("optimizer", "master weights", "4 P", source, total, 4)
        del clone
        gradient = self.new("temporaries", "zero gradients", "4 P", source, total, 4)
        self.update([total])
        del gradient
        source = "dsx engine/zero/replicated.py _undo_initial_step"
        wide = self._wide(source)
        flat = self.new("temporaries", "parameters in float32", "4 P", source, total, 4)
        wide.clear()
        del flat
        self.moments.clear()

    def step(self) -> None:
        """The norm, each gradient in fp32, then all flat, the update."""
        self.norm(max(leaf.numel for leaf in self.order))
        source = "fp16/fused_optimizer.py step"
        total = sum(leaf.numel for leaf in self.order)
        casts = self._wide(source)
        flat = self.new("temporaries", "flat fp32 gradients", "4 P", source, total, 4)
        casts.clear()
        for leaf in self.order:
            leaf.grad = None
        if self.replicated:
            self._masked_norm(total)
        self.update([total])
        del flat

    def _wide(self, source: str) -> list[Tensor]:
        return [
            self.new("temporaries", "each in float32", "4 P", source, leaf.numel, 4) for leaf in self.order
        ]

    def _masked_norm(self, total: int) -> None:
        """Where a copy of a tied weight does not count (runtime/utils.py, get_flattened_grad_norm)."""

        def new(width: int) -> Tensor:
            source = "runtime/utils.py get_flattened_grad_norm"
            return self.new("temporaries", "mask of the norm", "4 P, 4 P, P", source, total, width)

        marks, sums, mask = new(4), new(4), new(1)
        del marks, sums
        masked = new(4)
        del mask, masked
