"""ZeRO-1 and 2: deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py, with and without offload.

Where ZeRO-2 reduces after every backward (``dsx.zero.reduce``), DeepSpeed does so by itself. With offload the
gradients of parameters that this rank updates then go to the host one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsx.memory.ledger import Leaf, Tensor
from dsx.memory.states import States, free


@dataclass(slots=True)
class _Slice:
    """Consecutive gradients of a bucket that one rank owns; ``own``: this rank adds each to its sums."""

    owner: int
    numel: int
    own: bool


def _sent_together(
    leaves: Iterable[Leaf], owners: Mapping[str, Sequence[tuple[int, int, int]]], own: int | None, limit: int
) -> Iterator[list[_Slice]]:
    """average_tensor, allreduce_and_scatter: slices of a bucket as they are flattened together and reduced.

    Args:
        leaves: What is in the bucket, in order.
        owners: Ranks of each parameter, with the interval that each keeps.
        own: This rank, if it adds its slices in another precision; None if no slice is treated apart.
        limit: Elements of a bucket.
    """
    slices: list[_Slice] = []
    for leaf in leaves:
        for owner, start, stop in owners[leaf.name]:
            if slices and owner != own and not slices[-1].own and slices[-1].owner == owner:
                slices[-1].numel += stop - start
            else:
                slices.append(_Slice(owner, stop - start, owner == own))
    together: list[_Slice] = []
    for part in slices:
        together.append(part)
        if sum(each.numel for each in together) > limit:
            yield together
            together = []
    if together:
        yield together


class Partitioned(States):
    """DeepSpeedZeroOptimizer: flat parameters; a partition of masters, moments and averaged gradients."""

    def prepare(self) -> None:
        """This rank's partition."""
        self.buffers = self.plan.buffers(self.dp_rank)
        self.sizes = [buffer.numel for buffer in self.buffers]
        self.places = {piece.name: index for index, b in enumerate(self.buffers) for piece in b.pieces}
        self.separate = self.settings.accumulate != self.settings.width
        self.averaged: dict[int, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        for leaf in self.order if self.separate else ():
            leaf.accumulate = self._add

    def start(self) -> None:
        """Group by group the flat copy beside the parameters, the fp32 partition; zero gradients last."""
        for index, size in enumerate(self.flatten_groups(self.sizes, by_way_of_host=True)):
            self.make_master(size, cloned=self.width_of(index) != 4)
        free(*[self.new("temporaries", "zero gradients", size, 4) for size in self.sizes])

    def width_of(self, group: int) -> int:
        """Bytes of an element of a group's parameters."""
        (first, _), *_ = self.plan.groups[group]
        return self.leaves[first].width

    # Gradients that dsx reduces: engine/zero/partitioned.py

    def _add(self, leaf: Leaf, gradient: Tensor) -> None:
        """Add to a sum in another precision than the parameters'; a wider one takes a gradient as it is."""
        width = self.settings.accumulate
        if leaf.name not in self.sums or width <= gradient.width:
            cast = self.new("gradients", "accumulated gradient", gradient.numel, width)
            if self.sums.setdefault(leaf.name, cast) is not cast:
                free(cast)
        free(gradient)

    def take(self, leaf: Leaf) -> Tensor | None:
        """The sum over micro-batches."""
        return self.sums.pop(leaf.name, None) if self.separate else super().take(leaf)

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """Put this rank's interval, if it has one, into the group's buffer."""
        del gradient
        if leaf.name in self.places:
            self.average(self.places[leaf.name])

    def average(self, group: int) -> None:
        """The group's averaged gradients, of which this rank keeps its part; made once per step."""
        if group not in self.averaged:
            kind = "gradients", "averaged gradients"
            width = max(self.settings.accumulate, self.width_of(group))
            self.averaged[group] = self.new(*kind, self.sizes[group], width)

    def complete(self) -> None:
        """Make a buffer for every group, whether anything is in it or not."""
        for group in range(len(self.sizes)):
            self.average(group)

    def step(self) -> None:
        """Take the norm, then, group by group, an fp32 copy of the gradients and the update."""
        if self.settings.accumulate != 4:
            self.norm(max((p.stop - p.start for b in self.buffers for p in b.pieces), default=0))
        self.update_groups()

    def single(self, group: int) -> Tensor | None:
        """The averaged gradients in fp32."""
        averaged = self.averaged.pop(group)
        if averaged.width == 4:
            return averaged
        wide = self.new("temporaries", "fp32 gradients", averaged.numel, 4)
        free(averaged)
        return wide


class Bf16(Partitioned):
    """BF16_Optimizer: ZeRO-1 of bf16 parameters with fp32 accumulation; every rank has whole gradients."""

    in_place = True

    def start(self) -> None:
        """Flat parameters, fp32 partition, fp32 gradients."""
        self.gradients: list[Tensor] = []
        for index, size in enumerate(self.flatten_groups(self.sizes, by_way_of_host=False)):
            self.make_master(size)
            whole = size * self.plan.ranks(index)
            self.gradients.append(self.new("gradients", "fp32 gradients", whole, 4))

    def _add(self, leaf: Leaf, gradient: Tensor) -> None:
        """To the fp32 buffer at once (engine/zero/replicated.py)."""
        del leaf
        free(gradient)

    def take(self, leaf: Leaf) -> Tensor | None:
        """The buffer's part, which stays in place."""

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """Over what is in the buffer."""

    def complete(self) -> None:
        """Averages are in the buffers."""

    def single(self, group: int) -> Tensor | None:
        """This rank's interval of the buffer."""


class Bucketed(Partitioned):
    """DeepSpeed reduces: here ZeRO-2 with ``dsx.zero.reduce = "micro_batch"``, in each backward."""

    reduces_itself = True

    def prepare(self) -> None:
        """The bucket, and the bytes of a gradient in it."""
        super().prepare()
        self.owners = self.plan.owners()
        self.bucket: Tensor | None = None
        self.in_bucket: list[tuple[Leaf, Tensor | None]] = []
        self.elements = 0
        self.fresh: Tensor | None = None
        self.total: list[Tensor | None] = []
        self.came: set[str] = set()
        self.lingering: list[Tensor] = []
        for leaf in self.order:
            leaf.accumulate = self.arrive

    def set_up(self) -> None:
        """setup_buckets: at a backward's first gradient."""
        if self.bucket is None:
            self.bucket = self.new("buckets", "reduce bucket", self.settings.bucket, self.settings.width)

    def arrive(self, leaf: Leaf, gradient: Tensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, unless it is larger than that."""
        self.set_up()
        if self.elements + leaf.numel > self.settings.bucket:
            self.flush()
        own = self.apart(gradient) if leaf.numel > self.settings.bucket else None
        if own is not gradient:
            free(gradient)
        self.in_bucket.append((leaf, own))
        self.elements += leaf.numel
        self.came.add(leaf.name)

    def apart(self, gradient: Tensor) -> Tensor:
        """A gradient that is larger than the bucket, as it waits."""
        return gradient

    def flush(self) -> None:
        """reduce_ipg_grads: average, then this rank's gradients go where it keeps them."""
        if self.separate:
            self.make_room([leaf for leaf, _ in self.in_bucket if leaf.name in self.places])
        leaves, own = [leaf for leaf, _ in self.in_bucket], self.dp_rank if self.separate else None
        for slices in _sent_together(leaves, self.owners, own, self.settings.bucket):
            self._reduce(slices)
        for leaf, gradient in self.in_bucket:
            mine = leaf.name in self.places
            if mine:
                self.keep(leaf)
            if gradient is not None and self.lingers(mine=mine):
                self.lingering.append(gradient)
            else:
                free(gradient)
        self.in_bucket, self.elements = [], 0

    def make_room(self, mine: Sequence[Leaf]) -> None:
        """Buffers of the sums of these, which are in another precision than the parameters."""
        for leaf in mine:
            self.average(self.places[leaf.name])

    def _reduce(self, slices: Sequence[_Slice]) -> None:
        """allreduce_bucket: of a flat copy, unless there is but one slice; each in the precision of sums."""
        total, width = sum(part.numel for part in slices), self.settings.communication or self.settings.width
        copy = None
        if len(slices) > 1:
            copy = self.new("temporaries", "flat copy of the bucket", total, self.settings.width)
        if self.settings.width != width:
            flat, copy = copy, self.new("temporaries", "bucket as it is sent", total, width)
            free(flat)
        for part in slices:
            if part.own:  # _add_to_grad_partition_buffer
                self.passing("gradient to add", part.numel, 4)
        free(copy)

    def keep(self, leaf: Leaf) -> None:
        """copy_grads_in_partition: one buffer for the parameters that the partition touches."""
        del leaf
        if not self.separate and self.fresh is None:
            numel = sum(leaf.numel for leaf in self.order if leaf.name in self.places)
            self.fresh = self.new("gradients", "gradients in the partition", numel, self.settings.width)

    def lingers(self, *, mine: bool) -> bool:
        """Whether a large gradient is the parameter's until the backward ends."""
        return mine and self.separate

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """independent_gradient_partition_epilogue."""
        if not came and not boundary:
            return
        self.set_up()
        self.flush()
        if not self.separate:
            # get_all_grad_tensors: those of other chunks count as zeros, to which the next are added.
            missing = [leaf for leaf in self.order if leaf.name in self.places and leaf.name not in self.came]
            zeros = [self.new("gradients", "zeros", leaf.numel, self.settings.width) for leaf in missing]
            if self.total:
                free(self.fresh, *zeros)
            else:
                self.total = [self.fresh, *zeros]
        self.came.clear()
        self.fresh = None
        self.drop_bucket()
        if self.separate and boundary:
            self.complete()

    def drop_bucket(self) -> None:
        """The bucket goes, and whatever a parameter still has for a gradient."""
        free(*self.lingering, self.bucket)
        self.lingering.clear()
        self.bucket = None

    def single(self, group: int) -> Tensor | None:
        """Of the sums over micro-batches."""
        if self.separate:
            return super().single(group)
        size, width = self.sizes[group], self.settings.width
        gradient = self.new("temporaries", "flat gradients", size, width)
        if width != 4:
            flat, gradient = gradient, self.new("temporaries", "fp32 gradients", size, 4)
            free(flat)
        if group == len(self.sizes) - 1:
            free(*self.total)
            self.total = []
        return gradient


class PartitionedOffload(Partitioned):
    """DeepSpeedZeroOptimizer with ``offload_optimizer``; averages go to its fp32 gradients on the host."""

    def prepare(self) -> None:
        """What is on the host."""
        super().prepare()
        self.host_groups = range(len(self.sizes))
        self.own = {piece.name: piece.stop - piece.start for b in self.buffers for piece in b.pieces}

    # The engine

    def start(self) -> None:
        """Group by group: the flat copy beside the parameters, then masters and a bf16 copy on the host."""
        pins = self.offload.pinned and not self.offload.unified
        unpinned = None  # what a bf16 copy was pinned from is there until DeepSpeed's constructor ends
        for index, size in enumerate(self.flatten_groups(self.sizes, by_way_of_host=True)):
            width = self.width_of(index)
            self.make_master(size, cloned=width != 4 or not self.offload.unified)
            free(unpinned)
            self._keep_there("parameters", "updated", size, width)
            unpinned = self.host.new("temporaries", "updated, before pinning", size, width) if pins else None
        largest, width = max(leaf.numel for leaf in self.order), self.settings.width
        self._keep_there("buckets", "gradient on its way", largest, width)
        self.scratch = [self.on_host[-1], self.new("buckets", "gradient on its way", largest, width)]
        for size in self.sizes:
            self._keep_there("gradients", "fp32 gradients", size, 4)
        free(unpinned)
        if not self.reduces_itself:
            self.on_host.remove(self.scratch[0])
            free(*self.scratch)

    def keep_master(self, size: int) -> None:
        """On the host."""
        self._keep_there("optimizer", "master weights", size, 4)

    def _keep_there(self, category: str, name: str, numel: int, width: int) -> None:
        self.on_host.append(self.host.pinned(category, name, numel, width, pin=self.offload.pinned))

    # Gradients that dsx reduces

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """To the host, in fp32."""
        if gradient.width != 4 and leaf.name in self.own:
            self.passing("gradient in float32", self.own[leaf.name], 4)

    def complete(self) -> None:
        """Averages are on the host."""

    # The update

    def step(self) -> None:
        """Where the gradients are."""
        self.update_groups()

    def single(self, group: int) -> Tensor | None:
        """None on the device."""


class BucketedOffload(PartitionedOffload, Bucketed):
    """The same where DeepSpeed reduces, and adds up gradients on the host."""

    def prepare(self) -> None:
        """What is on the host."""
        super().prepare()
        self.there: set[str] = set()
        self.micro_step, self.over = 0, True

    # Gradients

    def set_up(self) -> None:
        """setup_buckets: at a step's or a backward's first gradient."""
        if self.over:
            # Set back before each backward (dsx/engine/zero/partitioned.py, before_backward).
            self.micro_step, self.over = 0, False
        self.micro_step += self.bucket is None
        super().set_up()

    def apart(self, gradient: Tensor) -> Tensor:
        """Cloned."""
        return self.new("gradients", "gradient, cloned", gradient.numel, gradient.width)

    def make_room(self, mine: Sequence[Leaf]) -> None:
        """All at once: when the first of this rank's gradients comes, or at the end."""
        for group in range(len(self.sizes)) if mine else ():
            self.average(group)

    def keep(self, leaf: Leaf) -> None:
        """On the host: whole, where DeepSpeed adds up micro-batches there."""
        if not self.separate and self.micro_step and leaf.name not in self.there:
            self.there.add(leaf.name)
            kind = "gradients", "gradients of parameters in the partition"
            self._keep_there(*kind, leaf.numel, self.settings.width)

    def lingers(self, *, mine: bool) -> bool:
        """Those of other ranks are forgotten at once."""
        return mine

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """independent_gradient_partition_epilogue."""
        del boundary
        self.over = True
        if came:
            self.flush()
            if self.separate:
                self.make_room(self.order)
            self.drop_bucket()

    # The update

    def step(self) -> None:
        """_finalize_cpu_offload_gradient_accumulation: back from the host to be squared, and to the host."""
        for leaf in self.order:
            if leaf.name not in self.places:
                continue
            back = None
            if not self.separate:
                back = self.new("temporaries", "gradient, back", leaf.numel, self.settings.width)
            self.passing("gradient in float64", self.own[leaf.name], 8)
            if self.settings.accumulate != 4:
                self.passing("gradient in float32", self.own[leaf.name], 4)
            free(back)
        self.update_groups()

    def single(self, group: int) -> Tensor | None:
        """What sums there are on the device."""
        return self.averaged.pop(group, None)
