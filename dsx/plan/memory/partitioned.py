"""ZeRO-1 and 2 as :mod:`.states` sees them: deepspeed/runtime/zero/stage_1_and_2.py and bf16_optimizer.py."""

from __future__ import annotations

from collections.abc import Mapping

from dsx.plan.memory.states import States, StateSettings
from dsx.plan.memory.tape import Leaf, Ledger, Tensor
from dsx.spec.zero import ZeroPlan

_FILE = "zero/stage_1_and_2.py"


class Partitioned(States):
    """DeepSpeedZeroOptimizer: flat parameters, a partition of fp32 masters and moments, a reduce bucket."""

    def __init__(
        self,
        ledger: Ledger,
        plan: ZeroPlan,
        dp_rank: int,
        leaves: Mapping[str, Leaf],
        settings: StateSettings,
    ) -> None:
        super().__init__(ledger, plan, dp_rank, leaves, settings)
        self.sizes = [buffer.numel for buffer in plan.buffers(dp_rank)]
        self.mine = {piece.name for buffer in plan.buffers(dp_rank) for piece in buffer.pieces}
        self.mine_numel = sum(leaf.numel for leaf in self.order if leaf.name in self.mine)
        self.masters: list[Tensor] = []
        self.bucket: Tensor | None = None
        self.in_bucket: list[Leaf] = []
        self.elements = 0
        self.fresh: Tensor | None = None
        self.total: Tensor | None = None
        self.large: dict[str, Tensor] = {}
        if plan.stage == 2:
            for leaf in self.order:
                leaf.accumulate = self.arrive
        else:
            for leaf in self.order:
                leaf.accumulate = self.keep

    def start(self) -> None:
        """Group by group: the flat copy beside the parameters, then the fp32 partition; zero gradients at last."""
        width, held = (
            self.settings.width,
            dict(zip((leaf.name for leaf in self.order), self.parameters, strict=True)),
        )
        self.parameters = []
        for group, size in zip(self.plan.groups, self.sizes, strict=True):
            flat = self.new(
                "parameters",
                "flat parameters",
                "w P, padded",
                f"{_FILE} __init__",
                size * self.plan.dp,
                width,
            )
            for name, _ in group:
                del held[name]
            self.parameters.append(flat)
            clone = self.new(
                "temporaries", "clone of the partition", "w P/N", f"{_FILE} __init__", size, width
            )
            master = clone
            if width != 4:
                master = self.new(
                    "optimizer", "master weights", "4 P/N, padded", f"{_FILE} __init__", size, 4
                )
            else:
                del master, clone
                master = clone = self.new(
                    "optimizer", "master weights", "4 P/N, padded", f"{_FILE} __init__", size, 4
                )
            self.masters.append(master)
            del clone, master
        source = f"{_FILE} initialize_optimizer_states"
        zeros = [
            self.new("temporaries", "zero gradients", "4 P/N, padded", source, size, 4) for size in self.sizes
        ]
        zeros.clear()

    # Gradients

    def set_up(self) -> None:
        """setup_buckets: at a step's or a backward's first gradient."""
        if self.bucket is None:
            self.bucket = self.new(
                "buckets",
                "reduce bucket",
                "reduce_bucket_size w",
                f"{_FILE} setup_buckets",
                self.settings.bucket,
                self.settings.width,
            )

    def keep(self, leaf: Leaf, gradient: Tensor) -> None:
        """ZeRO-1: whole gradients until the boundary."""
        self.set_up()
        if leaf.grad is None:
            leaf.grad = gradient

    def arrive(self, leaf: Leaf, gradient: Tensor) -> None:
        """ZeRO-2: into the bucket, unless it is larger than that."""
        self.set_up()
        if self.elements + leaf.numel > self.settings.bucket:
            self.flush()
        if leaf.numel > self.settings.bucket:
            self.large[leaf.name] = gradient
        self.elements += leaf.numel
        self.in_bucket.append(leaf)

    def flush(self) -> None:
        """reduce_ipg_grads: a flat copy of the bucket, then this rank's gradients go to their own buffer."""
        if not self.elements:
            return
        source = f"{_FILE} allreduce_bucket"
        copy = self.new(
            "temporaries", "flat copy of the bucket", "bucket w", source, self.elements, self.settings.width
        )
        del copy
        if any(leaf.name in self.mine for leaf in self.in_bucket) and self.fresh is None:
            self.fresh = self.new(
                "gradients",
                "gradients in the partition",
                "w of parameters that the partition touches",
                f"{_FILE} copy_grads_in_partition",
                self.mine_numel,
                self.settings.width,
            )
        for leaf in self.in_bucket:
            self.large.pop(leaf.name, None)
        self.in_bucket, self.elements = [], 0

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """independent_gradient_partition_epilogue."""
        if self.plan.stage == 1:
            if not boundary:
                return
            for leaf in self.order:
                if leaf.grad is not None:
                    gradient, leaf.grad = leaf.grad, None
                    self.arrive(leaf, gradient)
                    del gradient
        elif not came and not boundary:
            return
        self.set_up()
        self.flush()
        if self.total is None:
            self.total = self.fresh
        self.fresh = self.bucket = None

    def step(self) -> None:
        """Group by group: norm, a flat gradient, its fp32 copy, the update."""
        settings = self.settings
        if settings.width != 4:
            largest = max(
                (p.stop - p.start for b in self.plan.buffers(self.dp_rank) for p in b.pieces), default=0
            )
            self.norm(largest)
        for index, size in enumerate(self.sizes):
            flat: Tensor | None = self.new(
                "temporaries", "flat gradient", "w P/N", f"{_FILE} step", size, settings.width
            )
            single = (
                flat
                if settings.width == 4
                else self.new("temporaries", "fp32 gradient", "4 P/N", f"{_FILE} step", size, 4)
            )
            flat = None
            if index == len(self.sizes) - 1:
                self.total = None
            self.update_group(index, size)
            del single


class Bf16(Partitioned):
    """BF16_Optimizer: ZeRO-1 of bf16 parameters with fp32 accumulation; whole fp32 gradients on every rank."""

    def start(self) -> None:
        """Flat parameters, fp32 partition, fp32 gradients."""
        source = "bf16_optimizer.py _setup_for_real_optimizer"
        held = dict(zip((leaf.name for leaf in self.order), self.parameters, strict=True))
        self.parameters, self.gradients = [], []
        for group, size in zip(self.plan.groups, self.sizes, strict=True):
            flat = self.new("parameters", "flat parameters", "2 P, padded", source, size * self.plan.dp, 2)
            for name, _ in group:
                del held[name]
            self.parameters.append(flat)
            clone = self.new("temporaries", "clone of the partition", "2 P/N", source, size, 2)
            self.masters.append(self.new("optimizer", "master weights", "4 P/N, padded", source, size, 4))
            del clone
            self.gradients.append(
                self.new("gradients", "fp32 gradients", "4 P, padded", source, size * self.plan.dp, 4)
            )

    def keep(self, leaf: Leaf, gradient: Tensor) -> None:
        """Summed up in the fp32 buffer after the backward; ``.grad`` is zeroed and stays."""
        if leaf.grad is None:
            leaf.grad = gradient

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """The fp32 gradients are reduced like any without ZeRO."""
        del came
        if boundary:
            self.all_reduce([Tensor((leaf.numel,), 4, None) for leaf in self.order])

    def step(self) -> None:
        """The update."""
        for index, size in enumerate(self.sizes):
            self.update_group(index, size)
