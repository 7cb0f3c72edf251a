"""ZeRO-1 and 2: deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py, with and without offload.

P, N, w as there; a: bytes of an accumulated gradient.

DeepSpeed reduces here (dsx/engine/zero/reduction.py leaves it to it): at ZeRO-2 after every
backward, at ZeRO-1 when the step begins. Gradients of parameters that this rank updates go to the host one by
one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dsx.memory.ledger import Leaf, Ledger, Tensor
from dsx.memory.states import Offload, States, StateSettings
from dsx.parallel.zero import ZeroPlan

_FILE = "zero/stage_1_and_2.py"


class Partitioned(States):
    """DeepSpeedZeroOptimizer: flat parameters; a partition of masters, moments and averaged gradients."""

    def __init__(
        self,
        ledger: Ledger,
        plan: ZeroPlan,
        dp_rank: int,
        leaves: Mapping[str, Leaf],
        settings: StateSettings,
    ) -> None:
        super().__init__(ledger, plan, dp_rank, leaves, settings)
        self.buffers = plan.buffers(dp_rank)
        self.sizes = [buffer.numel for buffer in self.buffers]
        self.places = {piece.name: index for index, b in enumerate(self.buffers) for piece in b.pieces}
        self.separate = settings.accumulate != settings.width
        self.masters: list[Tensor] = []
        self.averaged: dict[int, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        for leaf in self.order if self.separate else ():
            leaf.accumulate = self._add

    def start(self) -> None:
        """Group by group the flat copy beside the parameters, the fp32 partition; zero gradients last."""
        width = self.settings.width
        held = dict(zip((leaf.name for leaf in self.order), self.parameters, strict=True))
        self.parameters = []
        for group, size in zip(self.plan.groups, self.sizes, strict=True):
            self.parameters.append(self.flattened(held, group, size * self.plan.dp, by_way_of_host=True))
            source = f"{_FILE} __init__"
            clone = None
            if width != 4:
                clone = self.new("temporaries", "clone of the partition", "w P/N", source, size, width)
            self.masters.append(self.new("optimizer", "master weights", "4 P/N, padded", source, size, 4))
            del clone
        source = f"{_FILE} initialize_optimizer_states"
        zeros = [
            self.new("temporaries", "zero gradients", "4 P/N, padded", source, size, 4) for size in self.sizes
        ]
        zeros.clear()

    # Gradients that dsx reduces: engine/zero/partitioned.py

    @property
    def reduces_itself(self) -> bool:
        """DeepSpeed does after every micro-batch, if asked to."""
        return False

    def _add(self, leaf: Leaf, gradient: Tensor) -> None:
        """Sums in another precision than the parameters'; to a wider one a gradient is added as it is."""
        source, width = "dsx engine/zero/partitioned.py accumulate", self.settings.accumulate
        if leaf.name in self.sums and width > gradient.width:
            return
        cast = self.new("gradients", "accumulated gradient", "a P", source, gradient.numel, width)
        self.sums.setdefault(leaf.name, cast)

    def take(self, leaf: Leaf) -> Tensor | None:
        """The sum over micro-batches."""
        if self.separate:
            return self.sums.pop(leaf.name, None)
        return super().take(leaf)

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """This rank's interval, if it has one, into the group's buffer."""
        del gradient
        if leaf.name in self.places:
            self.average(self.places[leaf.name])

    def average(self, group: int) -> Tensor:
        """The group's averaged gradients, of which this rank keeps its part; made once per step."""
        if group not in self.averaged:
            source = f"{_FILE} _build_compact_grad_partition_buffer"
            size, width = self.sizes[group], self.settings.accumulate
            self.averaged[group] = self.new(
                "gradients", "averaged gradients", "a P/N, padded", source, size, width
            )
        return self.averaged[group]

    def before_step(self) -> None:
        """A buffer for every group, with something in it or not."""
        super().before_step()
        if self.reduction is not None:
            for group in range(len(self.sizes)):
                self.average(group)

    def step(self) -> None:
        """Norm, then group by group an fp32 copy of the gradients and the update."""
        if self.settings.accumulate != 4:
            self.norm(max((p.stop - p.start for b in self.buffers for p in b.pieces), default=0))
        for group, size in enumerate(self.sizes):
            gradient = self._single(group, size)
            self.update_group(group, size)
            del gradient

    def _single(self, group: int, size: int) -> Tensor:
        """The averaged gradients in fp32, which are then let go of."""
        averaged = self.averaged.pop(group)
        if averaged.width == 4:
            return averaged
        return self.new("temporaries", "fp32 gradients", "4 P/N", f"{_FILE} step", size, 4)


class Bucketed(Partitioned):
    """ZeRO-2 with ``dsx.zero.reduce = "micro_batch"``: DeepSpeed reduces, bucket by bucket, in backwards."""

    def __init__(
        self,
        ledger: Ledger,
        plan: ZeroPlan,
        dp_rank: int,
        leaves: Mapping[str, Leaf],
        settings: StateSettings,
    ) -> None:
        super().__init__(ledger, plan, dp_rank, leaves, settings)
        self.owners = self._owned()
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

    @property
    def reduces_itself(self) -> bool:
        """It does."""
        return True

    def set_up(self) -> None:
        """setup_buckets: at a backward's first gradient."""
        if self.bucket is None:
            source, width = f"{_FILE} setup_buckets", self.settings.width
            self.bucket = self.new(
                "buckets", "reduce bucket", "reduce_bucket_size w", source, self.settings.bucket, width
            )

    def arrive(self, leaf: Leaf, gradient: Tensor) -> None:
        """reduce_independent_p_g_buckets_and_remove_grads: into the bucket, unless it is larger than that."""
        self.set_up()
        if self.elements + leaf.numel > self.settings.bucket:
            self.flush()
        if leaf.numel > self.settings.bucket:
            self.large = gradient
        self.elements += leaf.numel
        self.in_bucket.append(leaf)
        self.came.add(leaf.name)

    def flush(self) -> None:
        """reduce_ipg_grads: average_tensor's flat copy, then this rank's gradients go to their own buffer."""
        if not self.elements:
            return
        self._average_bucket()
        mine = [leaf for leaf in self.in_bucket if leaf.name in self.places]
        if self.separate:
            for leaf in mine:
                self.average(self.places[leaf.name])
            # Added to the partition, and still the parameter's until the epilogue ends.
            if mine and self.large is not None:
                self.lingering.append(self.large)
        elif mine and self.fresh is None:
            source, formula = f"{_FILE} copy_grads_in_partition", "w of parameters that the partition touches"
            self.fresh = self.new(
                "gradients",
                "gradients in the partition",
                formula,
                source,
                self.mine_numel,
                self.settings.width,
            )
        self.in_bucket, self.elements, self.large = [], 0, None

    def _average_bucket(self) -> None:
        """average_tensor, allreduce_and_scatter: slices are flattened together, this rank's added in fp32."""
        together: list[tuple[int, bool]] = []
        for part in [*self._slices(), (0, False)]:
            if part[0]:
                together.append(part)
            elements = sum(size for size, _ in together)
            if not part[0] or elements > self.settings.bucket:
                self._reduce_slices(together, elements)
                together = []

    def _reduce_slices(self, slices: list[tuple[int, bool]], elements: int) -> None:
        source, width = f"{_FILE} allreduce_bucket", self.settings.width
        flat = None
        if len(slices) > 1:
            flat = self.new("temporaries", "flat copy of the bucket", "bucket w", source, elements, width)
        for size, added in slices:
            if added:
                source = f"{_FILE} _add_to_grad_partition_buffer"
                self.new("temporaries", "gradient in float32", "4 of a gradient", source, size, 4)
        del flat

    def _slices(self) -> list[tuple[int, bool]]:
        """Elements of each rank's part of the bucket, neighbours of one rank together; this one's apart."""
        found: list[tuple[int, bool]] = []
        last = -1
        for leaf in self.in_bucket:
            for rank, size in self.owners[leaf.name]:
                added = self.separate and rank == self.dp_rank
                if rank == last and not added:
                    found[-1] = (found[-1][0] + size, found[-1][1])
                else:
                    found.append((size, added))
                if added:
                    self.average(self.places[leaf.name])
                last = rank
        return found

    def _owned(self) -> dict[str, list[tuple[int, int]]]:
        """Each parameter's ranks, with the elements that each keeps."""
        found: dict[str, list[tuple[int, int]]] = {}
        for group, size in zip(self.plan.groups, self.sizes, strict=True):
            start = 0
            for name, numel in group:
                ranks = range(start // size, -(-(start + numel) // size))
                found[name] = [
                    (rank, min(start + numel, (rank + 1) * size) - max(start, rank * size)) for rank in ranks
                ]
                start += numel
        return found

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """independent_gradient_partition_epilogue."""
        if not came and not boundary:
            return
        self.set_up()
        self.flush()
        if not self.separate:
            # get_all_grad_tensors: those of other chunks count as zeros, to which the next are added.
            missing = [leaf for leaf in self.order if leaf.name in self.places and leaf.name not in self.came]
            zeros = [self._zeros(leaf) for leaf in missing]
            self.total = self.total or [self.fresh, *zeros]
            del zeros
        self.came.clear()
        self.lingering.clear()
        self.fresh = self.bucket = None
        if self.separate and boundary:
            for group in range(len(self.sizes)):
                self.average(group)

    def _zeros(self, leaf: Leaf) -> Tensor:
        source, width = f"{_FILE} get_all_grad_tensors", self.settings.width
        return self.new("gradients", "zeros", "w of another chunk's", source, leaf.numel, width)

    def _single(self, group: int, size: int) -> Tensor:
        if self.separate:
            return super()._single(group, size)
        flat = self.new("temporaries", "flat gradients", "w P/N", f"{_FILE} step", size, self.settings.width)
        gradient = flat
        if self.settings.width != 4:
            gradient = self.new("temporaries", "fp32 gradients", "4 P/N", f"{_FILE} step", size, 4)
        del flat
        if group == len(self.sizes) - 1:
            self.total = []
        return gradient


class Bf16(Partitioned):
    """BF16_Optimizer: ZeRO-1 of bf16 parameters with fp32 accumulation; every rank has whole gradients."""

    in_place = True

    def start(self) -> None:
        """Flat parameters, fp32 partition, fp32 gradients."""
        source = "bf16_optimizer.py _setup_for_real_optimizer"
        held = dict(zip((leaf.name for leaf in self.order), self.parameters, strict=True))
        self.parameters, self.gradients = [], []
        for group, size in zip(self.plan.groups, self.sizes, strict=True):
            self.parameters.append(self.flattened(held, group, size * self.plan.dp, by_way_of_host=False))
            clone = self.new("temporaries", "clone of the partition", "2 P/N", source, size, 2)
            self.masters.append(self.new("optimizer", "master weights", "4 P/N, padded", source, size, 4))
            del clone
            whole = size * self.plan.dp
            self.gradients.append(self.new("gradients", "fp32 gradients", "4 P, padded", source, whole, 4))

    def _add(self, leaf: Leaf, gradient: Tensor) -> None:
        """To the fp32 buffer at once (engine/zero/bf16.py)."""

    def take(self, leaf: Leaf) -> Tensor | None:
        """The buffer's part, which stays in place."""

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """Over what is in the buffer."""

    def before_step(self) -> None:
        """Finish the reductions."""
        if self.reduction is not None:
            self.reduction.finish()

    def step(self) -> None:
        """One update, group by group."""
        for index, size in enumerate(self.sizes):
            self.update_group(index, size)


@dataclass(slots=True)
class _Slice:
    """Neighbours in the bucket that go to one rank; ``own`` ones add to an fp32 partition one by one."""

    owner: int
    numel: int
    own: bool


class PartitionedOffload(States):
    """DeepSpeedZeroOptimizer with ``offload_optimizer``."""

    def __init__(
        self,
        ledger: Ledger,
        plan: ZeroPlan,
        dp_rank: int,
        leaves: Mapping[str, Leaf],
        settings: StateSettings,
    ) -> None:
        super().__init__(ledger, plan, dp_rank, leaves, settings)
        self.offload = settings.offload or Offload()
        self.sizes = [buffer.numel for buffer in plan.buffers(dp_rank)]
        self.owners: dict[str, list[tuple[int, int]]] = {}
        for rank in range(plan.dp):
            for buffer in plan.buffers(rank):
                for piece in buffer.pieces:
                    self.owners.setdefault(piece.name, []).append((rank, piece.stop - piece.start))
        self.separate = settings.accumulate != settings.width
        self.staged = settings.accumulate if plan.stage == 1 else settings.width
        self.on_host: list[Tensor] = []
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
            leaf.accumulate = self.arrive if plan.stage == 2 else self.keep

    @property
    def reduces_itself(self) -> bool:
        """DeepSpeed does."""
        return True

    # The engine

    def start(self) -> None:
        """Group by group: the flat copy beside the parameters, then masters and a bf16 copy on the host."""
        width = self.settings.width
        held = dict(zip((leaf.name for leaf in self.order), self.parameters, strict=True))
        self.parameters, source, pin = [], f"{_FILE} __init__", self.offload.pinned
        for group, size in zip(self.plan.groups, self.sizes, strict=True):
            self.parameters.append(self.flattened(held, group, size * self.plan.dp, by_way_of_host=True))
            clone = None
            if width != 4 or not self.offload.unified:
                clone = self.new("temporaries", "clone of the partition", "w P/N", source, size, width)
            kind, formula = ("optimizer", "master weights"), "4 P/N, padded"
            self.on_host.append(self.host.pinned(*kind, formula, source, 4 * size, pin=pin))
            del clone
            kind, formula = ("parameters", "updated"), "w P/N, padded"
            self.on_host.append(self.host.pinned(*kind, formula, source, width * size, pin=pin))
        kind, formula = ("buckets", "gradient on its way"), "w of the largest parameter"
        largest = max(leaf.numel for leaf in self.order)
        self.on_host.append(self.host.pinned(*kind, formula, source, width * largest, pin=pin))
        self.scratch = self.new(*kind, formula, source, largest, width)
        source = f"{_FILE} initialize_optimizer_states"
        for size in self.sizes:
            kind = "gradients", "fp32 gradients"
            self.on_host.append(self.host.pinned(*kind, "4 P/N, padded", source, 4 * size, pin=pin))

    # Gradients

    def set_up(self) -> None:
        """setup_buckets: at a step's or a backward's first gradient."""
        if self.over:
            # Set back before each backward (dsx/engine/zero/partitioned.py, before_backward).
            self.micro_step, self.over = 0, False
        if self.bucket is None:
            self.micro_step += 1
            formula, size = f"reduce_bucket_size {self.staged}", self.settings.bucket
            self.bucket = self.new(
                "buckets", "reduce bucket", formula, f"{_FILE} setup_buckets", size, self.staged
            )

    def keep(self, leaf: Leaf, gradient: Tensor) -> None:
        """ZeRO-1: whole gradients until the step, in the precision of sums."""
        self.set_up()
        if self.separate:
            source = f"{_FILE} _fill_param_grad_accum_attribute"
            gradient = self.new("gradients", "sums", "4 P", source, leaf.numel, 4)
        if leaf.grad is None:
            leaf.grad = gradient

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

    def flush(self) -> None:
        """reduce_ipg_grads: average, then this rank's gradients go to the host."""
        if self.in_bucket:
            self._average()
        while self.in_bucket:
            leaf, own = self.in_bucket.pop(0)
            mine = self._mine(leaf)
            if mine and not self.separate and self.micro_step and leaf.name not in self.there:
                self.there.add(leaf.name)
                source, size = (
                    f"{_FILE} async_accumulate_grad_in_cpu_via_gpu",
                    self.settings.width * leaf.numel,
                )
                kind, formula = (
                    ("gradients", "gradients of parameters in the partition"),
                    "w P of the parameter",
                )
                pin = self.offload.pinned
                self.on_host.append(self.host.pinned(*kind, formula, source, size, pin=pin))
            if mine and self.plan.stage == 1:
                self._to_host(mine)
            # Forgotten at once if it is another rank's (ZeRO-2), or has gone to the host for good (ZeRO-1).
            if own is not None and bool(mine) == (self.plan.stage == 2):
                self.lingering.append(own)
            del own
        self.elements = 0

    def _average(self) -> None:
        """average_tensor, allreduce_and_scatter: slices in a flat copy, unless there is but one."""
        if any(self._mine(leaf) for leaf, _ in self.in_bucket):
            self._sum_up()
        waiting: list[_Slice] = []
        for part in self._slices():
            waiting.append(part)
            if sum(p.numel for p in waiting) > self.settings.bucket:
                self._reduce(waiting)
                waiting = []
        if waiting:
            self._reduce(waiting)

    def _sum_up(self) -> None:
        """The buffer of this rank's sums, made when the first of its gradients comes, or at the end."""
        if self.separate and not self.sums:
            source = f"{_FILE} _build_compact_grad_partition_buffer"
            self.sums = [
                self.new("gradients", "gradient partition", "4 P/N, padded", source, size, 4)
                for size in self.sizes
            ]

    def _slices(self) -> list[_Slice]:
        found: list[_Slice] = []
        for leaf, _ in self.in_bucket:
            for owner, numel in self.owners[leaf.name]:
                own = self.separate and owner == self.dp_rank
                if found and not own and not found[-1].own and found[-1].owner == owner:
                    found[-1].numel += numel
                else:
                    found.append(_Slice(owner, numel, own))
        return found

    def _reduce(self, slices: list[_Slice]) -> None:
        """allreduce_and_copy_with_multiple_ranks."""
        total, width = sum(part.numel for part in slices), self.settings.communication or self.settings.width
        source, copy = f"{_FILE} allreduce_bucket", None
        if len(slices) > 1:
            copy = self.new("temporaries", "flat copy of the bucket", "bucket", source, total, self.staged)
        if self.staged != width:
            copy = self.new("temporaries", "bucket as it is sent", "bucket w", source, total, width)
        source = f"{_FILE} _add_to_grad_partition_buffer"
        for part in slices:
            if part.own:
                self.new("temporaries", "gradient to add", "4 of a gradient", source, part.numel, 4)
        del copy

    def _mine(self, leaf: Leaf) -> int:
        return sum(numel for owner, numel in self.owners[leaf.name] if owner == self.dp_rank)

    def _to_host(self, numel: int) -> None:
        """set_norm_for_param_grad_in_gpu, async_inplace_copy_grad_to_fp32_buffer_from_gpu."""
        kind, formula = ("temporaries", "gradient in float64"), "8 of a gradient's part"
        self.new(*kind, formula, f"{_FILE} set_norm_for_param_grad_in_gpu", numel, 8)
        if self.settings.accumulate != 4:
            source = f"{_FILE} async_inplace_copy_grad_to_fp32_buffer_from_gpu"
            self.new("temporaries", "gradient in float32", "4 of a gradient's part", source, numel, 4)

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
        self.bucket = None
        self.lingering.clear()

    # The update

    def step(self) -> None:
        """The last of the gradients to the host, where the update is."""
        if self.plan.stage == 1:
            self._reduce_all()
        else:
            self._finalize()
        state, source = self.offload.state_bytes, "torch optim, or DeepSpeed's for CPUs"
        for size in self.sizes:
            if state and not self.updated:
                formula, size_bytes = f"{state} P/N, padded", state * size
                self.on_host.append(
                    self.host.new("optimizer", "moments", formula, source, size_bytes, pinned=False)
                )
            self.host.taken(source, [size], self.offload.step_bytes)
            del self.sums[:1]
        self.updated = True

    def _reduce_all(self) -> None:
        """reduce_gradients, called as the step begins."""
        self.over = False
        for leaf in self.order:
            if leaf.grad is not None:
                gradient, leaf.grad = leaf.grad, None
                self.arrive(leaf, gradient)
                del gradient
        self._end()

    def _finalize(self) -> None:
        """_finalize_cpu_offload_gradient_accumulation: back from the host to be squared."""
        source = f"{_FILE} _restore_cpu_offload_grad_to_gpu"
        for leaf in self._updated_here():
            restored = None
            if not self.separate:
                width = self.settings.width
                restored = self.new("temporaries", "gradient, back", "w P", source, leaf.numel, width)
            self._to_host(self._mine(leaf))
            del restored

    def _updated_here(self) -> Iterator[Leaf]:
        return (leaf for leaf in self.order if self._mine(leaf))
