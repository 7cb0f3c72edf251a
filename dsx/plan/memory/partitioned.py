"""ZeRO-1 and 2 as :mod:`.states` sees them: deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py.

P, N, w as there; a: bytes of an accumulated gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

from dsx.plan.memory.states import States, StateSettings
from dsx.plan.memory.tape import Leaf, Ledger, Tensor
from dsx.spec.zero import ZeroPlan

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

    # Gradients that dsx reduces: zero_adapters/partitioned.py

    @property
    def reduces_itself(self) -> bool:
        """DeepSpeed does after every micro-batch, if asked to."""
        return False

    def _add(self, leaf: Leaf, gradient: Tensor) -> None:
        """Sums in another precision than the parameters'; to a wider one a gradient is added as it is."""
        source, width = "dsx zero_adapters/partitioned.py accumulate", self.settings.accumulate
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
        """To the fp32 buffer at once (zero_adapters/bf16.py)."""

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
