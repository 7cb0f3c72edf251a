"""ZeRO-1 and 2: deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py, with and without offload.

P, N, w as in :mod:`dsx.memory.states`; a: bytes of an accumulated gradient.

With offload, and at ZeRO-2 with ``dsx.zero.reduce = "micro_batch"``, DeepSpeed reduces by itself
(dsx/engine/zero/reduction.py, reducible): at ZeRO-2 after every backward, at ZeRO-1 when the step begins.
With offload the gradients of parameters that this rank updates then go to the host one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from dsx.memory.ledger import Leaf, Tensor
from dsx.memory.states import States, free

_FILE = "zero/stage_1_and_2.py"


@dataclass(slots=True)
class _Slice:
    """Consecutive gradients of a bucket that one rank owns; ``own``: this rank adds each to its sums."""

    owner: int
    numel: int
    own: bool


def _sent_together(
    leaves: Iterable[Leaf], owners: Mapping[str, Sequence[tuple[int, int]]], own: int | None, limit: int
) -> Iterator[list[_Slice]]:
    """average_tensor, allreduce_and_scatter: slices of a bucket as they are flattened together and reduced.

    Args:
        leaves: What is in the bucket, in order.
        owners: Ranks of each parameter, with the elements that each keeps.
        own: This rank, if it adds its slices in another precision; None if no slice is treated apart.
        limit: Elements of a bucket.
    """
    slices: list[_Slice] = []
    for leaf in leaves:
        for owner, numel in owners[leaf.name]:
            if slices and owner != own and not slices[-1].own and slices[-1].owner == owner:
                slices[-1].numel += numel
            else:
                slices.append(_Slice(owner, numel, owner == own))
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
        source = f"{_FILE} __init__"
        for size in self.flatten_groups(self.sizes, by_way_of_host=True):
            self.make_master(source, size, cloned=self.settings.width != 4)
        source = f"{_FILE} initialize_optimizer_states"
        kind = "temporaries", "zero gradients", "4 P/N, padded", source
        free(*[self.new(*kind, size, 4) for size in self.sizes])

    def make_master(self, source: str, size: int, *, cloned: bool) -> None:
        """The fp32 partition of a group, from a clone in the parameters' precision where that is another."""
        width = self.settings.width
        clone = None
        if cloned:
            clone = self.new("temporaries", "clone of the partition", "w P/N", source, size, width)
        self.masters.append(self.new("optimizer", "master weights", "4 P/N, padded", source, size, 4))
        free(clone)

    # Gradients that dsx reduces: engine/zero/partitioned.py

    def _add(self, leaf: Leaf, gradient: Tensor) -> None:
        """Add to a sum in another precision than the parameters'; a wider one takes a gradient as it is."""
        source, width = "dsx engine/zero/partitioned.py accumulate", self.settings.accumulate
        if leaf.name not in self.sums or width <= gradient.width:
            cast = self.new("gradients", "accumulated gradient", "a P", source, gradient.numel, width)
            if leaf.name in self.sums:
                free(cast)
            else:
                self.sums[leaf.name] = cast
        free(gradient)

    def take(self, leaf: Leaf) -> Tensor | None:
        """The sum over micro-batches."""
        return self.sums.pop(leaf.name, None) if self.separate else super().take(leaf)

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """Put this rank's interval, if it has one, into the group's buffer."""
        del gradient
        if leaf.name in self.places:
            self.average(self.places[leaf.name])

    def average(self, group: int) -> Tensor:
        """The group's averaged gradients, of which this rank keeps its part; made once per step."""
        if group not in self.averaged:
            source = f"{_FILE} _build_compact_grad_partition_buffer"
            kind = "gradients", "averaged gradients", "a P/N, padded", source
            self.averaged[group] = self.new(*kind, self.sizes[group], self.settings.accumulate)
        return self.averaged[group]

    def complete(self) -> None:
        """Make a buffer for every group, whether anything is in it or not."""
        for group in range(len(self.sizes)):
            self.average(group)

    def step(self) -> None:
        """Take the norm, then, group by group, an fp32 copy of the gradients and the update."""
        if self.settings.accumulate != 4:
            self.norm(max((p.stop - p.start for b in self.buffers for p in b.pieces), default=0))
        for group, size in enumerate(self.sizes):
            gradient = self.single(group, size)
            self.update_group(group, size)
            free(gradient)

    def single(self, group: int, size: int) -> Tensor:
        """The averaged gradients in fp32, which are then freed."""
        averaged = self.averaged.pop(group)
        if averaged.width == 4:
            return averaged
        wide = self.new("temporaries", "fp32 gradients", "4 P/N", f"{_FILE} step", size, 4)
        free(averaged)
        return wide


class Bucketed(Partitioned):
    """ZeRO-2 with ``dsx.zero.reduce = "micro_batch"``: DeepSpeed reduces, bucket by bucket, in backwards."""

    reduces_itself = True

    def prepare(self) -> None:
        """The bucket."""
        super().prepare()
        self.owners = self.plan.owners()
        self.mine_numel = sum(leaf.numel for leaf in self.order if leaf.name in self.places)
        self.bucket: Tensor | None = None
        self.in_bucket: list[Leaf] = []
        self.elements = 0
        self.fresh: Tensor | None = None
        self.total: list[Tensor | None] = []
        self.came: set[str] = set()
        self.large: Tensor | None = None
        self.lingering: list[Tensor] = []
        for leaf in self.order:
            leaf.accumulate = self.arrive

    def set_up(self) -> None:
        """setup_buckets: at a backward's first gradient."""
        if self.bucket is None:
            kind = "buckets", "reduce bucket", "reduce_bucket_size w", f"{_FILE} setup_buckets"
            self.bucket = self.new(*kind, self.settings.bucket, self.settings.width)

    def arrive(self, leaf: Leaf, gradient: Tensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, unless it is larger than that."""
        self.set_up()
        if self.elements + leaf.numel > self.settings.bucket:
            self.flush()
        if leaf.numel > self.settings.bucket:
            free(self.large)
            self.large = gradient
        else:
            free(gradient)
        self.elements += leaf.numel
        self.in_bucket.append(leaf)
        self.came.add(leaf.name)

    def flush(self) -> None:
        """reduce_ipg_grads: average_tensor's flat copy, then this rank's gradients go to their own buffer."""
        if not self.elements:
            return
        own = self.dp_rank if self.separate else None
        mine = [leaf for leaf in self.in_bucket if leaf.name in self.places]
        for leaf in mine if self.separate else ():
            self.average(self.places[leaf.name])
        for slices in _sent_together(self.in_bucket, self.owners, own, self.settings.bucket):
            self._reduce_slices(slices)
        if self.separate and mine and self.large is not None:
            # Added to the partition, and still the parameter's until the epilogue ends.
            self.lingering.append(self.large)
            self.large = None
        elif mine and not self.separate and self.fresh is None:
            source, formula = f"{_FILE} copy_grads_in_partition", "w of parameters that the partition touches"
            kind = "gradients", "gradients in the partition", formula, source
            self.fresh = self.new(*kind, self.mine_numel, self.settings.width)
        free(self.large)
        self.in_bucket, self.elements, self.large = [], 0, None

    def _reduce_slices(self, slices: Sequence[_Slice]) -> None:
        source, width = f"{_FILE} allreduce_bucket", self.settings.width
        flat = None
        if len(slices) > 1:
            kind = "temporaries", "flat copy of the bucket", "bucket w", source
            flat = self.new(*kind, sum(part.numel for part in slices), width)
        source = f"{_FILE} _add_to_grad_partition_buffer"
        for part in slices:
            if part.own:
                self.passing("gradient in float32", "4 of a gradient", source, part.numel, 4)
        free(flat)

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """independent_gradient_partition_epilogue."""
        if not came and not boundary:
            return
        self.set_up()
        self.flush()
        if not self.separate:
            # get_all_grad_tensors: those of other chunks count as zeros, to which the next are added.
            missing = [leaf for leaf in self.order if leaf.name in self.places and leaf.name not in self.came]
            source, width = f"{_FILE} get_all_grad_tensors", self.settings.width
            kind = "gradients", "zeros", "w of another chunk's", source
            zeros = [self.new(*kind, leaf.numel, width) for leaf in missing]
            if self.total:
                free(self.fresh, *zeros)
            else:
                self.total = [self.fresh, *zeros]
        free(*self.lingering, self.bucket)
        self.came.clear()
        self.lingering.clear()
        self.fresh = self.bucket = None
        if self.separate and boundary:
            self.complete()

    def single(self, group: int, size: int) -> Tensor:
        """Of the sums over micro-batches."""
        if self.separate:
            return super().single(group, size)
        source, width = f"{_FILE} step", self.settings.width
        gradient = self.new("temporaries", "flat gradients", "w P/N", source, size, width)
        if width != 4:
            flat = gradient
            gradient = self.new("temporaries", "fp32 gradients", "4 P/N", source, size, 4)
            free(flat)
        if group == len(self.sizes) - 1:
            free(*self.total)
            self.total = []
        return gradient


class Bf16(Partitioned):
    """BF16_Optimizer: ZeRO-1 of bf16 parameters with fp32 accumulation; every rank has whole gradients."""

    in_place = True

    def start(self) -> None:
        """Flat parameters, fp32 partition, fp32 gradients."""
        source = "bf16_optimizer.py _setup_for_real_optimizer"
        self.gradients: list[Tensor] = []
        kind = "gradients", "fp32 gradients", "4 P, padded", source
        for size in self.flatten_groups(self.sizes, by_way_of_host=False):
            self.make_master(source, size, cloned=True)
            self.gradients.append(self.new(*kind, size * self.plan.dp, 4))

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

    def step(self) -> None:
        """One update, group by group."""
        for index, size in enumerate(self.sizes):
            self.update_group(index, size)


class PartitionedOffload(States):
    """DeepSpeedZeroOptimizer with ``offload_optimizer``."""

    reduces_itself = True

    def prepare(self) -> None:
        """This rank's partition, and the bucket."""
        self.sizes = [buffer.numel for buffer in self.plan.buffers(self.dp_rank)]
        self.owners = self.plan.owners()
        self.separate = self.settings.accumulate != self.settings.width
        self.staged = self.settings.accumulate if self.plan.stage == 1 else self.settings.width
        self.there: set[str] = set()
        self.updated = False
        self.micro_step, self.over = 0, True
        self.scratch: Tensor | None = None
        self.bucket: Tensor | None = None
        self.in_bucket: list[tuple[Leaf, Tensor | None]] = []
        self.elements = 0
        self.sums: list[Tensor] = []
        self.lingering: list[Tensor] = []
        for leaf in self.order:
            leaf.accumulate = self.arrive if self.plan.stage == 2 else self.keep

    # The engine

    def start(self) -> None:
        """Group by group: the flat copy beside the parameters, then masters and a bf16 copy on the host."""
        width, source, pin = self.settings.width, f"{_FILE} __init__", self.offload.pinned
        for size in self.flatten_groups(self.sizes, by_way_of_host=True):
            clone = None
            if width != 4 or not self.offload.unified:
                clone = self.new("temporaries", "clone of the partition", "w P/N", source, size, width)
            kind = "optimizer", "master weights", "4 P/N, padded", source
            self.on_host.append(self.host.pinned(*kind, 4 * size, pin=pin))
            free(clone)
            kind = "parameters", "updated", "w P/N, padded", source
            self.on_host.append(self.host.pinned(*kind, width * size, pin=pin))
        kind = "buckets", "gradient on its way", "w of the largest parameter", source
        largest = max(leaf.numel for leaf in self.order)
        self.on_host.append(self.host.pinned(*kind, width * largest, pin=pin))
        self.scratch = self.new(*kind, largest, width)
        kind = "gradients", "fp32 gradients", "4 P/N, padded", f"{_FILE} initialize_optimizer_states"
        self.on_host += [self.host.pinned(*kind, 4 * size, pin=pin) for size in self.sizes]

    # Gradients

    def set_up(self) -> None:
        """setup_buckets: at a step's or a backward's first gradient."""
        if self.over:
            # Set back before each backward (dsx/engine/zero/partitioned.py, before_backward).
            self.micro_step, self.over = 0, False
        if self.bucket is None:
            self.micro_step += 1
            kind = "buckets", "reduce bucket", f"reduce_bucket_size {self.staged}", f"{_FILE} setup_buckets"
            self.bucket = self.new(*kind, self.settings.bucket, self.staged)

    def keep(self, leaf: Leaf, gradient: Tensor) -> None:
        """ZeRO-1: whole gradients until the step, in the precision of sums."""
        self.set_up()
        if self.separate:
            source = f"{_FILE} _fill_param_grad_accum_attribute"
            narrow, gradient = gradient, self.new("gradients", "sums", "4 P", source, leaf.numel, 4)
            free(narrow)
        if leaf.grad is None:
            leaf.grad = gradient
        else:
            free(gradient)

    def arrive(self, leaf: Leaf, gradient: Tensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket; a larger one by itself."""
        self.set_up()
        if self.elements + leaf.numel > self.settings.bucket:
            self.flush()
        own: Tensor | None = None
        if leaf.numel > self.settings.bucket:
            source = f"{_FILE} reduce_independent_p_g_buckets_and_remove_grads"
            own = self.new("gradients", "gradient, cloned", "w P", source, leaf.numel, gradient.width)
        self.in_bucket.append((leaf, own))
        self.elements += leaf.numel
        free(gradient)

    def flush(self) -> None:
        """reduce_ipg_grads: average, then this rank's gradients go to the host."""
        if any(self._mine(leaf) for leaf, _ in self.in_bucket):
            self._sum_up()
        leaves, own_rank = [leaf for leaf, _ in self.in_bucket], self.dp_rank if self.separate else None
        for slices in _sent_together(leaves, self.owners, own_rank, self.settings.bucket):
            self._reduce(slices)
        while self.in_bucket:
            leaf, own = self.in_bucket.pop(0)
            mine = self._mine(leaf)
            if mine and not self.separate and self.micro_step and leaf.name not in self.there:
                self.there.add(leaf.name)
                source = f"{_FILE} async_accumulate_grad_in_cpu_via_gpu"
                name, formula = "gradients of parameters in the partition", "w P of the parameter"
                size, pin = self.settings.width * leaf.numel, self.offload.pinned
                self.on_host.append(self.host.pinned("gradients", name, formula, source, size, pin=pin))
            if mine and self.plan.stage == 1:
                self._to_host(mine)
            # Forgotten at once if it is another rank's (ZeRO-2), or has gone to the host for good (ZeRO-1).
            if own is not None and bool(mine) == (self.plan.stage == 2):
                self.lingering.append(own)
            else:
                free(own)
        self.elements = 0

    def _sum_up(self) -> None:
        """The buffer of this rank's sums, made when the first of its gradients comes, or at the end."""
        if self.separate and not self.sums:
            source = f"{_FILE} _build_compact_grad_partition_buffer"
            kind = "gradients", "gradient partition", "4 P/N, padded", source
            self.sums = [self.new(*kind, size, 4) for size in self.sizes]

    def _reduce(self, slices: Sequence[_Slice]) -> None:
        """allreduce_and_copy_with_multiple_ranks: in a flat copy, unless there is but one slice."""
        total, width = sum(part.numel for part in slices), self.settings.communication or self.settings.width
        source, copy = f"{_FILE} allreduce_bucket", None
        if len(slices) > 1:
            copy = self.new("temporaries", "flat copy of the bucket", "bucket", source, total, self.staged)
        if self.staged != width:
            flat, copy = (
                copy,
                self.new("temporaries", "bucket as it is sent", "bucket w", source, total, width),
            )
            free(flat)
        source = f"{_FILE} _add_to_grad_partition_buffer"
        for part in slices:
            if part.own:
                self.passing("gradient to add", "4 of a gradient", source, part.numel, 4)
        free(copy)

    def _mine(self, leaf: Leaf) -> int:
        return sum(numel for owner, numel in self.owners[leaf.name] if owner == self.dp_rank)

    def _to_host(self, numel: int) -> None:
        """set_norm_for_param_grad_in_gpu, async_inplace_copy_grad_to_fp32_buffer_from_gpu."""
        source = f"{_FILE} set_norm_for_param_grad_in_gpu"
        self.passing("gradient in float64", "8 of a gradient's part", source, numel, 8)
        if self.settings.accumulate != 4:
            source = f"{_FILE} async_inplace_copy_grad_to_fp32_buffer_from_gpu"
            self.passing("gradient in float32", "4 of a gradient's part", source, numel, 4)

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """independent_gradient_partition_epilogue."""
        del boundary
        self.over = True
        if self.plan.stage == 2 and came:
            self._end()

    def _end(self) -> None:
        """The epilogue: the bucket goes, and whatever a parameter still has for a gradient."""
        self.flush()
        self._sum_up()
        free(self.bucket, *self.lingering)
        self.bucket = None
        self.lingering.clear()

    # The update

    def step(self) -> None:
        """Send the last gradients to the host, where the update runs."""
        if self.plan.stage == 1:
            self._reduce_all()
        else:
            self._finalize()
        for size in self.sizes:
            self.update_on_host(size, first=not self.updated)
            free(*self.sums[:1])
            self.sums = self.sums[1:]
        self.updated = True

    def _reduce_all(self) -> None:
        """reduce_gradients, called as the step begins."""
        self.over = False
        for leaf in self.order:
            gradient = self.take(leaf)
            if gradient is not None:
                self.arrive(leaf, gradient)
        self._end()

    def _finalize(self) -> None:
        """_finalize_cpu_offload_gradient_accumulation: back from the host to be squared."""
        source, width = f"{_FILE} _restore_cpu_offload_grad_to_gpu", self.settings.width
        for leaf in self.order:
            mine = self._mine(leaf)
            if mine and self.separate:
                self._to_host(mine)
            elif mine:
                with self.aside("gradient, back", "w P", source, leaf.numel, width):
                    self._to_host(mine)
