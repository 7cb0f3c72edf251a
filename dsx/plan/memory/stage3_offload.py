"""ZeRO-3 with optimizer or parameters on the host, as :mod:`.stage3` sees it without."""

from __future__ import annotations

from collections.abc import Mapping

from dsx.plan.memory.offload import Offload
from dsx.plan.memory.stage3 import Stage3
from dsx.plan.memory.states import StateSettings
from dsx.plan.memory.tape import Leaf, Ledger, Tensor
from dsx.spec.zero import ZeroPlan

_FILE = "zero/stage3.py"


class Stage3Offload(Stage3):
    """DeepSpeedZeroOptimizer_Stage3 with ``offload_optimizer`` or ``offload_param``."""

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
        self.coordinator.offloaded = self.offload.parameters and not self.offload.unified
        self.on_host: list[Tensor] = []
        groups = len(self.sub_groups)
        first = int((1 - self.offload.ratio) * groups) if self.offload.optimizer else groups
        self.host_groups = range(first, groups)

    # The engine

    def keep_part(self, leaf: Leaf) -> None:
        """On the host."""
        if not self.offload.parameters:
            super().keep_part(leaf)
            return
        source, size = "zero/partition_parameters.py _partition_param", self.part(leaf) * self.settings.width
        pin = self.offload.pinned_parameters
        self.parameters.append(self.host.pinned("parameters", "partitions", "w P/N", source, size, pin=pin))

    def flatten(self) -> None:
        """On the host into one pinned buffer for each group."""
        if not self.offload.parameters:
            super().flatten()
            return
        source = f"{_FILE} _create_param_groups_fp16_flat_cpu_memory"
        for group in self.plan.groups:
            size = sum(self.part(self.leaves[name]) for name, _ in group) * self.settings.width
            self.on_host.append(
                self.host.pinned("parameters", "partitions", "w P/N, padded", source, size, pin=True)
            )
        self.parameters.clear()

    def make_masters(self) -> None:
        """On the host, or beside a copy that comes from there."""
        if not self.offload.optimizer and not self.offload.parameters:
            super().make_masters()
            return
        source, aside = f"{_FILE} _create_fp32_partitions", None
        moves = self.settings.width != 4 or (self.offload.parameters and not self.offload.unified)
        for index, size in enumerate(self.sizes):
            host = index in self.host_groups
            there = self.offload.parameters or self.offload.unified
            copies = not there or self.settings.width != 4 if host else moves
            kind, formula = ("temporaries", "converted"), "4 P/N of a sub-group"
            if copies:
                aside = (
                    self.host.new(*kind, formula, source, 4 * size, pinned=False)
                    if host
                    else self.new(*kind, formula, source, size, 4)
                )
            kind, formula = ("optimizer", "master weights"), "4 P/N, padded"
            if host:
                self.on_host.append(self.host.new(*kind, formula, source, 4 * size, pinned=False))
            else:
                self.masters.append(self.new(*kind, formula, source, size, 4))
        del aside

    def make_gradients(self) -> None:
        """fp32 gradients of the masters, then the partitions in which micro-batches add up."""
        if not self.offload.optimizer:
            super().make_gradients()
            return
        source = f"{_FILE} initialize_optimizer_states"
        largest = self.host.new(
            "temporaries",
            "zero gradients",
            "4 of the largest sub-group",
            source,
            4 * max(self.sizes),
            pinned=False,
        )
        for index, size in enumerate(self.sizes):
            kind, formula = ("gradients", "fp32 gradients"), "4 P/N, padded"
            made = self.host.pinned(*kind, formula, source, 4 * size, pin=self.offload.pinned)
            if index in self.host_groups:
                self.on_host.append(made)
            else:
                self.gradients.append(self.new(*kind, formula, source, size, 4))
            del made
        del largest
        self.make_bucket()
        source, width = f"{_FILE} _setup_for_real_optimizer", self.settings.accumulate
        kind, formula = ("gradients", "gradient partitions"), f"{width} P/N, padded"
        size = width * self.local
        self.on_host.append(self.host.pinned(*kind, formula, source, size, pin=self.offload.pinned))

    # Gradients

    def add(self, held: list[Tensor]) -> None:
        """partition_grads: each partition comes from the host, is added to, and goes back."""
        if not self.offload.optimizer or self.offload.unified:
            super().add(held)
            return
        source, width = f"{_FILE} partition_grads", self.settings.accumulate
        before: Tensor | None = None
        # A gradient beside the bucket goes when its part has been added, in the order of the parameters; a
        # single one that needed no copy holds the reduced part itself.
        places = {leaf.name: place for place, leaf in enumerate(self.order)}
        waiting = sorted(self.in_bucket, key=lambda item: places[item[0].name], reverse=True)
        alone = None if held else waiting[0][1]
        self.in_bucket.clear()
        while waiting:
            leaf, own = waiting.pop()
            if self.part(leaf) * self.dp_rank >= leaf.numel:
                continue
            kind, formula = ("temporaries", "sum so far"), "P/N of a parameter"
            now = self.new(*kind, formula, source, self.part(leaf), width)
            before = now
            del now, own
        del before, alone

    def step(self) -> None:
        """The sums' squares by way of the device, the update on the host."""
        if not self.offload.optimizer:
            super().step()
            return
        self.finalize()
        self.coordinator.release_all()
        for index, size in enumerate(self.sizes):
            if index in self.host_groups:
                self.update_on_host(index, size)
            else:
                self.update_group(index, size)
        self.coordinator.gather_persistent(self.order)

    def finalize(self) -> None:
        """_finalize_offload_gradient_accumulation: the norm in fp64, then fp32 to the host."""
        source, width = f"{_FILE} _offload_grad_partition_at_boundary", self.settings.accumulate
        part: Tensor | None = None
        for leaf in self.order:
            size = self.part(leaf)
            if size * self.dp_rank >= leaf.numel:
                continue
            if not self.offload.unified:
                part = self.new("temporaries", "sum of gradients", "P/N of a parameter", source, size, width)
            self.new("temporaries", "in float64", "8 P/N of a parameter", source, min(size, 250_000_000), 8)
            if width != 4:
                self.new("temporaries", "in float32", "4 P/N of a parameter", source, size, 4)
        del part

    def update_on_host(self, index: int, size: int) -> None:
        """Moments at the first update; what the update takes besides."""
        state, source = self.offload.state_bytes, "torch optim, or DeepSpeed's for CPUs"
        if state and index not in self.updated:
            formula = f"{state} P/N, padded"
            size_bytes = state * size
            self.on_host.append(
                self.host.new("optimizer", "moments", formula, source, size_bytes, pinned=False)
            )
        self.updated.add(index)
        self.host.taken(source, [size], self.offload.step_bytes)
