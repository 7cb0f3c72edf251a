"""What DeepSpeed 0.19.8 keeps for a rank's parameters, and takes for a moment, on the ledger.

There is one class per optimizer wrapper that DeepSpeed chooses (engine.py, _do_optimizer_sanity_check). Each
is asked in the order of a run: :meth:`States.build`, :meth:`States.start`, gradients as they come,
:meth:`States.reduce` after each backward, :meth:`States.step`. In which buckets gradients leave, what is cut
where and what stays gathered is decided by the objects that the engine itself uses (dsx.parallel.reduction,
dsx.parallel.zero, dsx.schedules.gathers). Sources named here are below deepspeed/runtime.

With offload the device keeps parameters (or, with parameters offloaded, none between uses) and the reduce
bucket. The host keeps fp32 masters, their gradients, the moments and, at ZeRO-3, the partitions that
gradients add up in. Where DeepSpeed reduces, gradients go there parameter by parameter, by way of the device,
where they are added up and squared.

Tensors are freed by name (:func:`free`, :meth:`Ledger.aside`) at the moment when the engine frees its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dsx.memory.ledger import Leaf, Ledger, Tensor
from dsx.parallel.reduction import ChunkReduction, GradientPiece, by_owner
from dsx.parallel.zero import ZeroPlan
from dsx.schedules.schedule import Schedule


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """``zero_optimization``'s keys for ZeRO-3; sizes in elements.

    What is not here changes nothing that a rank holds: ``overlap_comm`` picks streams (its copies are the
    allocator's to keep a little longer), ``round_robin_gradients``, ``allgather_*`` and
    ``use_multi_rank_bucket_allreduce`` belong to ZeRO-1 and 2.

    Attributes:
        prefetch: ``stage3_prefetch_bucket_size``; the parameter that reaches it still comes along.
        reuse_distance: ``stage3_max_reuse_distance``.
        live: ``stage3_max_live_parameters``; bounds prefetching alone.
        persistence: ``stage3_param_persistence_threshold``.
        model_persistence: ``stage3_model_persistence_threshold``, of all persistent parameters together.
        sub_group: ``sub_group_size``.
        contiguous: ``contiguous_gradients``.
        reduce_scatter: Whether gradients are scattered, not all-reduced.
        sequential: ``stage3_allgather_sequential``: a buffer for each parameter.
        all_reduce: ``stage3_use_all_reduce_for_fetch_params``: parameters lie in the buffer they came in.
        keep_bytes: ``dsx.zero.keep_gathered_bytes``.
    """

    prefetch: int = 50_000_000
    reuse_distance: int = 1_000_000_000
    live: int = 1_000_000_000
    persistence: int = 100_000
    model_persistence: int = 1 << 63
    sub_group: int = 1_000_000_000
    contiguous: bool = True
    reduce_scatter: bool = True
    sequential: bool = False
    all_reduce: bool = False
    keep_bytes: int = 0

    def persistent(self, leaves: Sequence[Leaf]) -> frozenset[str]:
        """Parameters that stay gathered through a step (parameter_offload.py, mark_persistent_parameters)."""
        names, total = set(), 0
        for leaf in leaves:
            if leaf.numel <= self.persistence and total + leaf.numel <= self.model_persistence:
                names.add(leaf.name)
                total += leaf.numel
        return frozenset(names)


class Host:
    """The host's memory of one rank.

    Args:
        offload: Whether pinned memory is rounded, and whether the host's memory is the device's.
        device: The device's ledger.
    """

    def __init__(self, offload: Offload | None, device: Ledger) -> None:
        self._unified = offload is not None and offload.unified
        self.ledger = device if self._unified else Ledger()
        self.new = self.ledger.tensor
        self._rounds = offload is not None and offload.rounds

    def pinned(self, category: str, name: str, numel: int, width: int, *, pin: bool) -> Tensor:
        """A flat tensor; ``pin`` copies it into page-locked memory, which comes in powers of two."""
        if not pin or self._unified:
            return self.new(category, name, numel, width)
        size_bytes = numel * width
        with self.ledger.aside(f"{name}, before pinning", size_bytes, 1):
            if self._rounds and size_bytes:
                size_bytes = 1 << (size_bytes - 1).bit_length()
            return self.new(category, name, size_bytes, 1)


def free(*tensors: Tensor | None) -> None:
    """Let go of the memory that these tensors hold, each by its one owner; None is nothing to free."""
    for tensor in tensors:
        if tensor is not None:
            tensor.release()


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
        is_bf16: Whether these are bf16's, which have an optimizer wrapper of their own.
        accumulate: Bytes of an accumulated gradient.
        bucket: ``zero_optimization.reduce_bucket_size``, elements.
        communication: Bytes of a gradient on its way (``communication_data_type``); None as a parameter's.
        reduces_micro_batches: Whether DeepSpeed reduces gradients after every backward (ZeRO-2).
        fused: Whether the update is DeepSpeed's FusedAdam or the like.
        gloo: Whether the ranks are CPUs, which send an owner its gradients whole.
    """

    width: int
    accumulate: int
    optimizer: Optimizer
    is_bf16: bool = False
    bucket: int = 500_000_000
    communication: int | None = None
    reduces_micro_batches: bool = False
    offload: Offload | None = None
    fused: bool = False
    gloo: bool = False
    gathering: Gathering | None = None


class Bucket(NamedTuple):
    """Gradients under way: the pieces that this rank gets, all end to end, what comes from other ranks."""

    pieces: Sequence[GradientPiece[Leaf]]
    flat: Tensor
    received: Tensor | None = None


class CountedBuckets:
    """Buckets of gradients on the ledger: what dsx/engine/zero/reduction.py GradientTransport allocates.

    Args:
        states: Where gradients are taken from, and averages go.
    """

    def __init__(self, states: States) -> None:
        self._states = states
        self._width = states.settings.communication or states.settings.width
        self.in_place, self.apart = states.in_place, states.plan.stage > 0
        self.alone = states.plan.dp == 1
        self.waits = states.settings.gloo and not self.alone
        owners = states.plan.owners() if states.plan.stage else {}
        self._owners = {states.leaves[name]: intervals for name, intervals in owners.items()}

    def watch(self, parameters: Sequence[Leaf], came: Callable[[Leaf], None]) -> Callable[[], None]:
        """As a hook of torch's."""

        def tell(watcher: Callable[[Leaf], None] | None) -> None:
            for leaf in parameters:
                leaf.came = watcher

        tell(came)
        return partial(tell, None)

    def leave(self, parameter: Leaf) -> None:
        """The gradient stays where it is."""

    def send(self, pieces: Sequence[GradientPiece[Leaf]]) -> Bucket:
        """A flat copy, or of one gradient alone that needs no sum, itself."""
        states = self._states
        if self.alone:
            gradient = states.take(pieces[0].parameter)
            return Bucket(pieces, gradient or self._flat(0))
        flat = self._flat(sum(piece.length for piece in pieces), pieces[0].parameter.width)
        for piece in pieces:
            free(states.take(piece.parameter))
        if not self._owners:
            return Bucket(pieces, flat)
        ranks, place = states.among(pieces[0].parameter)
        mine = by_owner(pieces, self._owners, ranks)[place]
        others = ranks - 1 if states.settings.gloo else 0
        received = others * sum(piece.length for piece in mine)
        return Bucket(mine, flat, self._flat(received, pieces[0].parameter.width))

    def land(self, bucket: Bucket) -> None:
        """The averages go to the states."""
        for piece in bucket.pieces:
            self._states.put(piece.parameter, bucket.flat)
        free(bucket.flat, bucket.received)

    def lacking(self, parameters: Mapping[Leaf, bool]) -> set[Leaf]:
        """Ranks are alike."""
        return {leaf for leaf, marked in parameters.items() if marked}

    def all_left(self) -> None:
        """No gradient comes late in a plan."""

    def complete(self) -> None:
        """The states have all averages."""
        self._states.complete()

    def _flat(self, elements: int, own: int = 0) -> Tensor:
        width = own if own > self._states.settings.width else self._width
        return self._states.new("buckets", "gradients under way", elements, width)


class States:
    """fp32 without ZeRO: parameters, gradients and moments are the model's own tensors. Base of the others.

    Attributes:
        replicated: Parameters that are copies of another pipeline rank's, tied ones.
        order: Parameters that are trained, in the optimizer's order.
        trained: Their names.
        sizes: Elements of each part of the masters that is updated by itself, in turn.
        host_groups: Those of them that are updated on the host.
        reduction: dsx's own, if DeepSpeed does not reduce.
        in_place: Whether buckets come on top of gradients, which stay where they are.
        reduces_itself: Whether DeepSpeed reduces gradients.
        capacity_bytes: What a device has for tensors; None for enough.
    """

    in_place = False
    reduces_itself = False

    def __init__(
        self,
        ledger: Ledger,
        plan: ZeroPlan,
        dp_rank: int,
        leaves: Mapping[str, Leaf],
        settings: StateSettings,
    ) -> None:
        self.ledger, self.plan, self.dp_rank = ledger, plan, dp_rank
        self.new, self.aside, self.passing = ledger.tensor, ledger.aside, ledger.passing
        self.leaves, self.settings, self.host = leaves, settings, Host(settings.offload, ledger)
        self.offload = settings.offload or Offload()
        self.replicated: frozenset[str] = frozenset()
        self.order = [leaves[name] for group in plan.groups for name, _ in group]
        self.trained = {leaf.name for leaf in self.order}
        self.reduction: ChunkReduction[Leaf, Bucket] | None = None
        self.capacity_bytes: int | None = None
        self.parameters: list[Tensor] = []
        self.frozen_parameters: list[Tensor] = []
        self.masters: list[Tensor] = []
        self.moments: list[Tensor] = []
        self.on_host: list[Tensor] = []
        self.sizes: list[int] = []
        self.host_groups = range(0)
        self._updated: set[int] = set()
        self.prepare()

    def prepare(self) -> None:
        """The last act of construction: what one kind of states has besides."""

    def build(self) -> None:
        """The model's parameters, one by one."""
        self.parameters = self.each("parameters", "parameter", self.settings.width)
        frozen = (leaf for leaf in self.leaves.values() if leaf.name not in self.trained)
        self.frozen_parameters = [
            self.new("parameters", "frozen parameter", leaf.numel, leaf.width) for leaf in frozen
        ]

    def start(self) -> None:
        """What ``deepspeed.initialize`` adds."""

    def begin(self) -> None:
        """Before each step."""
        if self.reduction is not None:
            self.reduction.begin(self._schedule)

    def before_action(self, position: int) -> None:
        """Before the action at ``position`` of the rank's row: go on with the reductions."""
        if self.reduction is not None:
            self.reduction.before_action(position)

    def plan_reduction(self, uses: Mapping[int, Sequence[Leaf]], schedule: Schedule, pp_rank: int) -> None:
        """Have dsx reduce gradients of what each virtual stage uses, where it does so at all."""
        if not self.reduces_itself:
            self.reduction = ChunkReduction(
                CountedBuckets(self),
                sizes={leaf: leaf.numel for leaf in self.leaves.values() if leaf.name in self.trained},
                uses=uses,
                kinds={leaf: (leaf.width, leaf.experts_over > 1) for leaf in self.leaves.values()},
                bucket_elements=self.settings.bucket,
                rank=pp_rank,
            )
            self._schedule = schedule

    def among(self, leaf: Leaf) -> tuple[int, int]:
        """How many ranks hold the same elements of a parameter, and which of them this one is."""
        return self.plan.dp // leaf.experts_over, self.dp_rank // leaf.experts_over

    def take(self, leaf: Leaf) -> Tensor | None:
        """The step's gradient, which the states forget: ``p.grad`` (engine/zero/replicated.py)."""
        gradient, leaf.grad = leaf.grad, None
        return gradient

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """The average, a view on its bucket, in the parameter's dtype: back into ``p.grad``."""
        if gradient.width == leaf.width:
            leaf.grad = gradient.detach()
        else:
            leaf.grad = self.new("gradients", "averaged gradient", leaf.numel, leaf.width)

    def complete(self) -> None:
        """All averages have been put."""

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
        self.update([[leaf.numel for leaf in self.order]])
        self.drop_gradients()

    def drop_gradients(self) -> None:
        """``zero_grad(set_to_none=True)``."""
        for leaf in self.order:
            free(self.take(leaf))

    def norm(self, largest: int) -> None:
        """Squares are taken in fp32, gradient by gradient (dsx/engine/zero/replica_check.py, square)."""
        self.passing("gradient in float32", largest, 4)

    # The update

    def update(self, groups: Sequence[Sequence[int]]) -> None:
        """One optimizer step over fp32 tensors of these sizes, group by group, each with its moments."""
        rule, first = self.settings.optimizer, not self.moments
        for numels in groups:
            if first:
                self.moments += [self.new("optimizer", "moments", size, rule.state_bytes) for size in numels]
            held: list[Tensor] = []
            for numel in numels:
                if rule.one_by_one:
                    free(*held)
                    held.clear()
                held.append(self.new("temporaries", "update", numel, rule.step_bytes))
            free(*held)

    def update_groups(self) -> None:
        """Group by group, the update, which makes the moments when it is the first."""
        for index, size in enumerate(self.sizes):
            gradient = self.single(index)
            on_host = index in self.host_groups
            new, held = (self.host.new, self.on_host) if on_host else (self.new, self.moments)
            rule = self.offload if on_host else self.settings.optimizer
            if index not in self._updated:
                self._updated.add(index)
                held.append(new("optimizer", "moments", size, rule.state_bytes))
            free(new("temporaries", "update", size, rule.step_bytes), gradient)

    def single(self, group: int) -> Tensor | None:
        """The group's gradient as the update takes it, which is then freed; None for one that stays."""

    # Masters

    def make_master(self, size: int, *, cloned: bool = True) -> None:
        """``size`` fp32 elements, from a clone in the parameters' precision unless that is fp32 as well."""
        clone = self.new("temporaries", "clone", size, self.settings.width) if cloned else None
        self.keep_master(size)
        free(clone)

    def keep_master(self, size: int) -> None:
        """The fp32 elements alone."""
        self.masters.append(self.new("optimizer", "master weights", size, 4))

    def flatten_groups(self, sizes: Sequence[int], *, by_way_of_host: bool) -> Iterator[int]:
        """Group by group the flat copy beside the parameters; yields after each what a rank has of it.

        Args:
            sizes: Elements of a rank's partition of each group.
            by_way_of_host: Flatten on the host what the device has no room for beside the parameters
                (zero/stage_1_and_2.py, __init__, flatten_on_accelerator).
        """
        held = dict(zip((leaf.name for leaf in self.order), self.parameters, strict=True))
        self.parameters = []
        for index, size in enumerate(sizes):
            whole = size * self.plan.ranks(index)
            self.parameters.append(self._flattened(held, self.plan.groups[index], whole, by_way_of_host))
            yield size
        free(*held.values())

    def _flattened(
        self, held: dict[str, Tensor], group: Sequence[tuple[str, int]], size: int, by_way_of_host: bool
    ) -> Tensor:
        """A group's parameters end to end, ``size`` elements with padding; one alone without stays as it is.

        ``held`` are the parameters by name; the group's are let go of.
        """
        width = self.leaves[group[0][0]].width
        room = None if self.capacity_bytes is None else self.capacity_bytes - self.ledger.current_bytes
        on_host = by_way_of_host and room is not None and room < size * width
        copies = []
        for name, numel in group if on_host else ():
            copies.append(self.host.new("temporaries", "parameters on their way", numel, width))
            place = self.new("parameters", "place of a parameter", 1, 4)
            free(held[name])
            held[name] = place
        kind = "parameters", "flat parameters", size, width
        if len(group) == 1 and group[0][1] == size:
            flat = self.new(*kind) if on_host else held.pop(group[0][0])
            free(*copies)
            return flat
        if on_host:
            together = self.host.new("temporaries", "flat parameters", size, width)
            free(*copies)
            flat = self.new(*kind)
            free(together)
        else:
            with self.aside("padding", size - sum(numel for _, numel in group), width):
                flat = self.new(*kind)
        free(*(held.pop(name) for name, _ in group))
        return flat

    def each(self, category: str, name: str, width: int) -> list[Tensor]:
        """A tensor of ``width`` for each parameter that is trained, or its own if that is wider."""
        return [self.new(category, name, leaf.numel, max(width, leaf.width)) for leaf in self.order]

    def groups(self) -> list[list[Leaf]]:
        """The optimizer's without ZeRO: one, unless some of it stays in fp32 (dsx/engine/optimizers.py)."""
        if all(leaf.width == self.settings.width for leaf in self.order):
            return [self.order]
        return [[self.leaves[name] for name, _ in group] for group in self.plan.groups]

    def casts(self, group: Sequence[Leaf]) -> list[Tensor]:
        """Of each that is not in fp32, its values or its gradient so."""
        narrow = (leaf.numel for leaf in group if leaf.width != 4)
        return [self.new("temporaries", "each in float32", numel, 4) for numel in narrow]


class Unfused(States):
    """Half precision without ZeRO, torch's optimizers: fp16/unfused_optimizer.py, each parameter in fp32."""

    def start(self) -> None:
        """Masters, then a first update on zero gradients, which dsx undoes."""
        for leaf in self.order:
            self.make_master(leaf.numel, cloned=leaf.width != 4)
        low = self.each("gradients", "zero gradients", self.settings.width)
        high = self.each("temporaries", "fp32 gradients", 4)
        self.update([[leaf.numel for leaf in group] for group in self.groups()])
        free(*low, *high, *self.moments)
        self.moments.clear()

    def step(self) -> None:
        """The norm, fp32 gradients beside the bf16 ones, and the update."""
        self.norm(max(leaf.numel for leaf in self.order))
        gradients = self.casts(self.order)
        self.update([[leaf.numel for leaf in group] for group in self.groups()])
        free(*gradients)
        self.drop_gradients()


class Flat(States):
    """Half precision without ZeRO, fused optimizers: fp16/fused_optimizer.py, groups flat, and in fp32."""

    def prepare(self) -> None:
        """Parameters of a group are one tensor."""
        self._groups = self.groups()
        self._sizes = [sum(leaf.numel for leaf in group) for group in self._groups]

    def start(self) -> None:
        """Clones, their flat copy, the flat masters; a first update, which dsx undoes."""
        held, self.parameters = iter(self.parameters), []
        for group, size in zip(self._groups, self._sizes, strict=True):
            width = group[0].width
            clones = [self.new("temporaries", "clones", leaf.numel, width) for leaf in group]
            self.parameters.append(self.new("parameters", "flat parameters", size, width))
            free(*clones, *(next(held) for _ in group))
            self.make_master(size, cloned=width != 4)
        with self.aside("zero gradients", sum(self._sizes), 4):
            self.update([[size] for size in self._sizes])
        for group, size in zip(self._groups, self._sizes, strict=True):
            # dsx/engine/zero/replicated.py _undo_initial_step
            wide = self.casts(group)
            self.passing("parameters in float32", size, 4)
            free(*wide)
        free(*self.moments)
        self.moments.clear()

    def step(self) -> None:
        """The norm, each gradient in fp32, then all flat, the update."""
        self.norm(max(leaf.numel for leaf in self.order))
        flat: list[Tensor] = []
        for group, size in zip(self._groups, self._sizes, strict=True):
            casts = self.casts(group)
            flat.append(self.new("temporaries", "flat fp32 gradients", size, 4))
            free(*casts, *(self.take(leaf) for leaf in group))
        for size in self._sizes if self.replicated else ():
            # A copy of a tied weight does not count (runtime/utils.py, get_flattened_grad_norm).
            kind = "temporaries", "mask of the norm", size
            marks, sums, mask = (self.new(*kind, width) for width in (4, 4, 1))
            free(marks, sums)
            free(self.new(*kind, 4), mask)
        self.update([[size] for size in self._sizes])
        free(*flat)
