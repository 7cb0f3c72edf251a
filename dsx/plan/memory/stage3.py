"""ZeRO-3 as :mod:`.states` sees it: deepspeed/runtime/zero/stage3.py and partitioned_param_coordinator.py.

Parameters are gathered before a module uses them, some ahead of time, and released after it unless they come
again soon; which ones follows from a trace of modules that DeepSpeed records and forgets, replayed here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsx.plan.memory.states import States, StateSettings
from dsx.plan.memory.tape import Label, Leaf, Ledger, Storage, Tensor
from dsx.spec.zero import ZeroPlan

Module = tuple[Leaf, ...]
"""A module with parameters of its own, as these."""

_FILE = "zero/stage3.py"
_FETCH = "zero/partitioned_param_coordinator.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """``zero_optimization``'s stage3_* sizes, in elements."""

    prefetch: int = 50_000_000
    reuse_distance: int = 1_000_000_000
    live: int = 1_000_000_000
    persistence: int = 100_000


class _Handle:
    """A gathering under way: one flat buffer for several parameters, one's own buffer for a single one."""

    def __init__(self, coordinator: Coordinator, leaves: Sequence[Leaf]) -> None:
        self._coordinator, self._leaves, self._complete = coordinator, leaves, False
        padded = sum(coordinator.padded(leaf) for leaf in leaves)
        single = len(leaves) == 1
        self.flat: Tensor | None = coordinator.buffer(
            "gathered parameters" if single else "gathering", padded
        )

    def wait(self) -> None:
        """The parameters are there."""
        if self._complete:
            return
        self._complete = True
        for leaf in self._leaves:
            whole = (
                self.flat
                if len(self._leaves) == 1
                else self._coordinator.buffer("gathered parameters", leaf.numel)
            )
            self._coordinator.here[leaf.name] = whole
            self._coordinator.flying.discard(leaf.name)
            del whole
        if len(self._leaves) == 1:
            self.flat = None


class Coordinator:
    """PartitionedParameterCoordinator."""

    def __init__(
        self, ledger: Ledger, dp: int, width: int, gathering: Gathering, persistent: set[str]
    ) -> None:
        self.ledger, self.dp, self.width, self.gathering = ledger, dp, width, gathering
        self.persistent = persistent
        self.here: dict[str, Tensor | None] = {}
        self.flying: set[str] = set()
        self.registry: dict[str, _Handle] = {}
        self.active: dict[str, set[str]] = {}
        self.mode = "invalid"
        self.order: list[Module] = []
        self.queue: deque[tuple[Leaf, int]] = deque()
        self.recent: dict[str, int] = {}
        self.step_id = self.available = 0

    def padded(self, leaf: Leaf) -> int:
        """Elements of all partitions."""
        return -(-leaf.numel // self.dp) * self.dp

    def buffer(self, name: str, numel: int) -> Tensor:
        """Memory for gathered parameters."""
        what = Label(
            "parameters", name, "w of the parameters", "zero/partition_parameters.py all_gather_coalesced"
        )
        return Tensor((numel,), self.width, Storage(self.ledger, what, numel * self.width))

    def reset(self) -> None:
        """reset_step: before each forward of a chunk."""
        self._clean()
        if self.mode == "record":
            self.mode = "complete"
        elif self.mode == "invalid":
            self.mode = "record"
        self._rewind()

    def _rewind(self) -> None:
        self.queue = deque(
            (leaf, place)
            for place, module in enumerate(self.order)
            for leaf in module
            if self.mode == "complete"
        )
        self.recent, self.step_id, self.available = {}, 0, 0

    def _clean(self) -> None:
        for name, handle in list(self.registry.items()):
            handle.wait()
            self._drop(name, 0)
        self.registry.clear()

    def _prologue(self, module: Module) -> None:
        if self.mode == "complete" and (
            self.step_id >= len(self.order)
            or (self.order[self.step_id] is not module and self.order[self.step_id] != module)
        ):
            self.mode, self.order, self.queue, self.recent = "invalid", [], deque(), {}
            self._clean()
        if self.mode == "record":
            self.order.append(module)

    def fetch(self, module: Module) -> None:
        """fetch_sub_module: what it needs now, then what comes next."""
        self._prologue(module)
        key = module[0].name
        self._gather([leaf for leaf in module if self._absent(leaf)])
        for leaf in module:
            self.active.setdefault(leaf.name, set()).add(key)
            handle = self.registry.pop(leaf.name, None)
            if handle is not None:
                handle.wait()
            del handle
        if self.mode == "complete":
            self._advance(module)
        self.step_id += 1

    def _advance(self, module: Module) -> None:
        fresh = {leaf.name for leaf in module if self.recent.get(leaf.name, -1) < self.step_id}
        seen: set[str] = set()
        while self.queue and len(seen) < len(fresh):
            leaf, place = self.queue.popleft()
            self.recent[leaf.name] = place
            seen.add(leaf.name)
        most = min(self.gathering.live - self.available, self.gathering.prefetch)
        ahead: dict[str, Leaf] = {}
        numel = 0
        while self.queue and numel < most:
            leaf, place = self.queue.popleft()
            self.recent[leaf.name] = max(self.recent.get(leaf.name, -1), place)
            if self._absent(leaf) and leaf.name not in ahead:
                ahead[leaf.name] = leaf
                numel += leaf.numel
        self._gather(list(ahead.values()))

    def _absent(self, leaf: Leaf) -> bool:
        return leaf.name not in self.here and leaf.name not in self.flying

    def _gather(self, leaves: Sequence[Leaf]) -> None:
        if not leaves:
            return
        self.available += sum(leaf.numel for leaf in leaves)
        handle = _Handle(self, leaves)
        for leaf in leaves:
            self.registry[leaf.name] = handle
            self.flying.add(leaf.name)

    def release(self, module: Module) -> None:
        """release_sub_module: what is not needed again soon."""
        names = self._releasable(module) if self.mode == "complete" else {leaf.name for leaf in module}
        for leaf in module:
            self.active.setdefault(leaf.name, set()).discard(module[0].name)
            if leaf.name in names:
                self._drop(leaf.name, leaf.numel)

    def _releasable(self, module: Module) -> set[str]:
        names = {leaf.name for leaf in module if leaf.name not in self.persistent}
        names = {name for name in names if self.recent.get(name, -1) <= self.step_id}
        traversed = 0
        for later in self.order[self.step_id :]:
            if traversed >= self.gathering.reuse_distance or not names:
                break
            for leaf in later:
                names.discard(leaf.name)
                traversed += leaf.numel
        return names

    def _drop(self, name: str, numel: int) -> None:
        if name in self.here and not self.active.get(name):
            del self.here[name]
            self.available -= numel

    def release_leftover(self, module: Module) -> None:
        """release_backward_leftovers: a module whose backward nothing ended."""
        for leaf in module:
            self.active.setdefault(leaf.name, set()).discard(module[0].name)
            if leaf.name not in self.persistent:
                self._drop(leaf.name, leaf.numel)

    def release_all(self) -> None:
        """release_and_reset_all: before the update."""
        self._clean()
        self.active.clear()
        self.here.clear()

    def gather_persistent(self, leaves: Sequence[Leaf]) -> None:
        """After an update, small parameters are gathered for good."""
        for leaf in leaves:
            if leaf.name in self.persistent and leaf.name not in self.here:
                self.here[leaf.name] = self.buffer("persistent parameters", leaf.numel)


class Stage3(States):
    """DeepSpeedZeroOptimizer_Stage3."""

    def __init__(
        self,
        ledger: Ledger,
        plan: ZeroPlan,
        dp_rank: int,
        leaves: Mapping[str, Leaf],
        settings: StateSettings,
        gathering: Gathering | None = None,
    ) -> None:
        super().__init__(ledger, plan, dp_rank, leaves, settings)
        self.sizes = [buffer.numel for buffer in plan.buffers(dp_rank)]
        gathering = gathering or Gathering()
        persistent = {leaf.name for leaf in self.order if leaf.numel <= gathering.persistence}
        self.coordinator = Coordinator(ledger, plan.dp, settings.width, gathering, persistent)
        self.elements = 0
        self.in_bucket: list[tuple[Leaf, Tensor | None]] = []
        self.kept: list[Tensor] = []
        self.left: list[Module] = []
        for leaf in self.order:
            leaf.accumulate = self.arrive

    def start(self) -> None:
        """Partition each parameter; masters; gradients; the bucket."""
        width, settings, total = self.settings.width, self.settings, sum(self.sizes)
        held, parts = self.parameters[::-1], []
        self.parameters = []
        for leaf in self.order:
            part = -(-leaf.numel // self.plan.dp)
            parts.append(
                self.new(
                    "parameters",
                    "partitions",
                    "w P/N",
                    "zero/partition_parameters.py _partition_param",
                    part,
                    width,
                )
            )
            held.pop()
        parts.clear()
        self.parameters = [
            self.new("parameters", "partitions", "w P/N, padded", f"{_FILE} defragment", total, width)
        ]
        if width != 4:
            self._masters()
        largest = max(self.sizes)
        zeros = self.new(
            "temporaries",
            "zero gradients",
            "4 of the largest sub-group",
            f"{_FILE} initialize_optimizer_states",
            largest,
            4,
        )
        del zeros
        self.kept.append(
            self.new(
                "buckets",
                "reduce bucket",
                "reduce_bucket_size w",
                f"{_FILE} _setup_for_real_optimizer",
                settings.bucket,
                width,
            )
        )
        self.kept.append(
            self.new(
                "gradients",
                "gradient partitions",
                "P/N of the accumulation's width",
                f"{_FILE} _setup_for_real_optimizer",
                total,
                settings.accumulate,
            )
        )

    def _masters(self) -> None:
        converted: Tensor | None = None
        for size in self.sizes:
            converted = self.new(
                "temporaries",
                "converted",
                "4 P/N of a sub-group",
                f"{_FILE} _create_fp32_partitions",
                size,
                4,
            )
            self.kept.append(
                self.new(
                    "optimizer",
                    "master weights",
                    "4 P/N, padded",
                    f"{_FILE} _create_fp32_partitions",
                    size,
                    4,
                )
            )
        del converted

    def forward_begins(self) -> None:
        """Before a chunk's forward."""
        self.coordinator.reset()

    def fetch(self, module: tuple[Leaf, ...]) -> None:
        """Gather."""
        self.coordinator.fetch(module)

    def release(self, module: tuple[Leaf, ...]) -> None:
        """Let go."""
        self.coordinator.release(module)

    def leave_behind(self, module: tuple[Leaf, ...]) -> None:
        """Released at the end of the backward."""
        self.left.append(module)

    def arrive(self, leaf: Leaf, gradient: Tensor) -> None:
        """Into the bucket if there is room."""
        bucket = self.settings.bucket
        if self.elements + leaf.numel > bucket and self.elements:
            self.flush()
        fits = self.elements + leaf.numel <= bucket
        self.in_bucket.append((leaf, None if fits else gradient))
        self.elements += leaf.numel

    def flush(self) -> None:
        """reduce_scatter_coalesced: a flat copy with padding, unless one parameter needs none."""
        if not self.in_bucket:
            return
        settings, dp = self.settings, self.plan.dp
        padded = sum(self.coordinator.padded(leaf) for leaf, _ in self.in_bucket)
        alone = len(self.in_bucket) == 1 and padded == self.in_bucket[0][0].numel
        copy = (
            None
            if alone
            else self.new(
                "temporaries",
                "flat copy of the bucket",
                "bucket w, padded",
                "comm/coalesced_collectives.py reduce_scatter_coalesced",
                padded,
                settings.width,
            )
        )
        casts: list[Tensor] = []
        if settings.accumulate != settings.width:
            casts = [
                self.new(
                    "temporaries",
                    "partitions in the accumulation's dtype",
                    "bucket/N",
                    f"{_FILE} __avg_scatter_grads",
                    -(-leaf.numel // dp),
                    settings.accumulate,
                )
                for leaf, _ in self.in_bucket
            ]
        del copy, casts
        self.in_bucket, self.elements = [], 0

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """The epilogue empties the bucket."""
        del boundary, came
        self.flush()
        while self.left:
            self.coordinator.release_leftover(self.left.pop())

    def step(self) -> None:
        """Sub-group by sub-group."""
        settings = self.settings
        self.coordinator.release_all()
        if settings.accumulate != 4:
            largest = max(-(-leaf.numel // self.plan.dp) for leaf in self.order)
            self.norm(largest)
        for index, size in enumerate(self.sizes):
            source = f"{_FILE} _prepare_fp32_grad_for_sub_group"
            flat: Tensor | None = self.new(
                "temporaries", "flat gradient", "P/N of a sub-group", source, size, settings.accumulate
            )
            single = (
                flat
                if settings.accumulate == 4
                else self.new("temporaries", "fp32 gradient", "4 P/N of a sub-group", source, size, 4)
            )
            flat = None
            self.update_group(index, size)
            del single
        self.coordinator.gather_persistent(self.order)
