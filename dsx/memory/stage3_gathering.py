"""ZeRO-3's gathers as :mod:`dsx.memory.stage3` sees them: which parameters are whole when.

DeepSpeed gathers a module's parameters before it runs, what comes soon ahead of time, and lets go of them
after it unless they come again soon (zero/partitioned_param_coordinator.py). Under dsx that follows the
recording of a whole step, the first one, and with ``dsx.zero.keep_gathered_bytes`` a plan of what to keep
(dsx/engine/zero/stage3.py). Here the same decisions are taken again, in the same order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from dsx.memory.ledger import Leaf, Ledger, Tensor
from dsx.memory.states import Gathering, free
from dsx.parallel.zero import part_numel
from dsx.schedules.gathers import ChunkHolds, StepTrace

Module = tuple[Leaf, ...]
"""A module with these parameters of its own; maybe none."""

NEVER = -1
"""Before a step's first module."""


class _Handle:
    """A gathering under way: one flat buffer for several parameters, one's own buffer for a single one."""

    def __init__(self, coordinator: Coordinator, leaves: Sequence[Leaf]) -> None:
        self._coordinator, self._leaves, self._complete = coordinator, leaves, False
        self._waiting = len(leaves)
        apart = len(leaves) == 1 or coordinator.gathering.sequential or coordinator.dp == 1
        self._own = [coordinator.own_buffer(leaf) for leaf in leaves] if apart else []
        self._flat = None if apart else coordinator.flat_buffer(leaves)

    def wait(self) -> None:
        """The parameters are there; the flat buffer stays until :meth:`let_go` for each of them."""
        if self._complete:
            return
        self._complete = True
        coordinator = self._coordinator
        for place, leaf in enumerate(self._leaves):
            if self._own:
                whole = self._own[place]
            elif self._flat is not None and coordinator.gathering.all_reduce:
                whole = self._flat.detach()
            else:
                whole = coordinator.copied(leaf)
            coordinator.settle(leaf, whole)
            coordinator.flying.discard(leaf.name)

    def let_go(self) -> None:
        """One of the parameters is no longer waited for; after the last of them the flat buffer goes."""
        self._waiting -= 1
        if not self._waiting:
            free(self._flat)


class _Recording:
    """The modules of a step in order."""

    def __init__(self, modules: Sequence[Module]) -> None:
        self.uses = [(place, leaf) for place, module in enumerate(modules) for leaf in module]
        self.trace = StepTrace([(leaf, leaf.numel) for leaf in module] for module in modules)

    def queue(self, step: int) -> deque[tuple[int, Leaf]]:
        """Uses from ``step`` on."""
        begin = bisect_left(self.uses, step, key=lambda use: use[0])
        return deque(self.uses[begin:] if begin else self.uses)


class Coordinator:
    """PartitionedParameterCoordinator under dsx's StepGathers.

    Args:
        width: Bytes of a parameter.
        persistent: Names of parameters that stay gathered through a step.
        offloaded: Whether partitions live on the host, and come to the device to be gathered.

    Attributes:
        holds: What is held between actions; None holds nothing.
    """

    def __init__(
        self,
        ledger: Ledger,
        dp: int,
        width: int,
        gathering: Gathering,
        persistent: frozenset[str],
        *,
        offloaded: bool = False,
    ) -> None:
        self.ledger, self.dp, self.width, self.gathering = ledger, dp, width, gathering
        self.persistent, self.offloaded = persistent, offloaded
        self.here: dict[str, Leaf] = {}
        self.flying: set[str] = set()
        self._registry: dict[str, _Handle] = {}
        self._active: dict[str, set[str]] = {}
        self._backward: list[Module] = []
        self.holds: ChunkHolds[Leaf] | None = None
        self._order: list[Module] = []
        self._recording: _Recording | None = None
        self._steps = 0
        self._queue: deque[tuple[int, Leaf]] = deque()
        self._passed: dict[str, int] = {}
        self._step = self._available = 0

    # Memory

    def padded(self, leaf: Leaf) -> int:
        """Elements of all partitions."""
        return part_numel(leaf.numel, self.dp) * self.dp

    def copied(self, leaf: Leaf) -> Tensor:
        """A parameter copied out of a flat buffer."""
        return self._new("gathered parameters", leaf.numel)

    def own_buffer(self, leaf: Leaf) -> Tensor | None:
        """What a single parameter is gathered into and stays in; None where the only partition is it."""
        if self.dp == 1:
            return self.copied(leaf) if self.offloaded else None
        return self.gather_alone(leaf)

    def flat_buffer(self, leaves: Sequence[Leaf]) -> Tensor:
        """The buffer that several are gathered into."""
        buffer = self._new("gathering", sum(map(self.padded, leaves)))
        free(*self.uploads(leaves))
        return buffer

    def uploads(self, leaves: Sequence[Leaf]) -> list[Tensor]:
        """Partitions that come from the host to be gathered."""
        sizes = [part_numel(leaf.numel, self.dp) for leaf in leaves] if self.offloaded else []
        return [self._new("partitions on their way", size) for size in sizes]

    def _new(self, name: str, numel: int) -> Tensor:
        return self.ledger.tensor("parameters", name, numel, self.width)

    # Steps

    def begin(self) -> None:
        """StepGathers.begin: the first step records, later ones prefetch."""
        self._clean()
        if self._steps == 1:
            self._recording = _Recording(self._order)
        self._steps += 1
        self._queue = self._recording.queue(0) if self._recording is not None else deque()
        self._passed, self._step, self._available = {}, 0, 0
        self.keep(frozenset())

    def keep(self, stages: frozenset[int]) -> None:
        """StepGathers.before_action: of these chunks nothing is let go; prefetching starts anew from here."""
        gone, held = self.holds.change(stages) if self.holds is not None else ([], [])
        for stage, leaf in gone:
            self._workers(leaf).discard(f"chunk {stage}")
        for stage, leaf in held:
            self._workers(leaf).add(f"chunk {stage}")
        if self._recording is not None and self.gathering.keep_bytes:
            self._queue, self._passed = self._recording.queue(self._step), {}

    def _workers(self, leaf: Leaf) -> set[str]:
        """Who is at work with a parameter (ds_active_sub_modules)."""
        return self._active.setdefault(leaf.name, set())

    def _clean(self) -> None:
        for name, handle in self._registry.items():
            handle.wait()
            self._drop(self.here[name])
        for handle in self._registry.values():
            handle.let_go()
        self._registry.clear()

    # Modules

    def fetch(self, module: Module, *, forward: bool) -> None:
        """fetch_sub_module: what it needs now, then what comes next."""
        if self._steps == 1:
            self._order.append(module)
        if not forward:
            self._backward.append(module)
        self._gather([leaf for leaf in module if self._absent(leaf)])
        for leaf in module:
            self._workers(leaf).add(module[0].name)
            handle = self._registry.pop(leaf.name, None)
            if handle is not None:
                handle.wait()
                handle.let_go()
        if self._recording is not None:
            self._advance(module)
        self._step += 1

    def _advance(self, module: Module) -> None:
        fresh = sum(self._passed.get(leaf.name, NEVER) < self._step for leaf in module)
        for _ in range(fresh):
            place, leaf = self._queue.popleft()
            self._passed[leaf.name] = place
        most = min(self.gathering.live - self._available, self.gathering.prefetch)
        ahead: dict[str, Leaf] = {}
        numel = 0
        while self._queue and numel < most:
            place, leaf = self._queue.popleft()
            self._passed[leaf.name] = max(self._passed.get(leaf.name, NEVER), place)
            if self._absent(leaf) and leaf.name not in ahead:
                ahead[leaf.name] = leaf
                numel += leaf.numel
        self._gather(list(ahead.values()))

    def _absent(self, leaf: Leaf) -> bool:
        return leaf.name not in self.here and leaf.name not in self.flying

    def _gather(self, leaves: Sequence[Leaf]) -> None:
        if not leaves:
            return
        self._available += sum(leaf.numel for leaf in leaves)
        handle = _Handle(self, leaves)
        for leaf in leaves:
            self._registry[leaf.name] = handle
            self.flying.add(leaf.name)

    def release(self, module: Module, *, forward: bool) -> None:
        """release_sub_module: what is not needed again soon."""
        if not forward:
            self._backward.remove(module)
        for leaf in module:
            self._workers(leaf).discard(module[0].name)
            if self._recording is None or self._releasable(leaf):
                self._drop(leaf)

    def release_rest(self) -> None:
        """After a backward: modules whose inputs get no gradient, so that nothing told of their end."""
        for module in self._backward[::-1]:
            for leaf in module:
                self._workers(leaf).discard(module[0].name)
                free = leaf.name not in self.persistent if self._recording is None else self._releasable(leaf)
                if free:
                    self._drop(leaf)
        self._backward.clear()

    def _releasable(self, leaf: Leaf) -> bool:
        if leaf.name in self.persistent:
            return False
        if self.gathering.keep_bytes:
            return True
        assert self._recording is not None
        passed = self._passed.get(leaf.name, NEVER)
        return (
            passed <= self._step
            and self._recording.trace.distance(leaf, self._step) >= self.gathering.reuse_distance
        )

    def settle(self, leaf: Leaf, whole: Tensor | None) -> None:
        """A parameter is whole, in this memory alone; None if in that of its only partition."""
        if whole is not None:
            leaf.hold(whole)
            free(whole)
        self.here[leaf.name] = leaf

    def _drop(self, leaf: Leaf) -> None:
        if leaf.name in self.here and not self._active.get(leaf.name):
            del self.here[leaf.name]
            leaf.release()
            self._available -= leaf.numel

    # The update

    def release_all(self) -> None:
        """release_and_reset_all: before the update."""
        self._clean()
        self._active.clear()
        for leaf in list(self.here.values()):
            self._drop(leaf)

    def gather_persistent(self, leaves: Sequence[Leaf]) -> None:
        """After an update small parameters are gathered for good (stage3.py, _post_step)."""
        small = [leaf for leaf in leaves if leaf.name in self.persistent]
        if len(small) == 1 or self.gathering.sequential:
            for leaf in small:
                self.settle(leaf, self.gather_alone(leaf))
            return
        parts = self.uploads(small) if self.dp > 1 else []
        for leaf in small:
            alone = self.dp == 1
            whole = self.own_buffer(leaf) if alone else self._new("gathered parameters", self.padded(leaf))
            self.settle(leaf, whole)
        free(*parts)

    def gather_alone(self, leaf: Leaf) -> Tensor:
        """_allgather_params_sequential: a buffer of its own, on one rank too."""
        buffer = self._new("gathered parameters", self.padded(leaf))
        free(*self.uploads([leaf]))
        return buffer
