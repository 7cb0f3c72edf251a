"""ZeRO-3, deepspeed/runtime/zero/stage3.py, with optimizer or parameters on the device or the host.

Parameters, gradients and optimizer state are cut parameter by parameter over the data-parallel ranks, each
padded to a multiple of N.

DeepSpeed gathers a module's parameters before it runs, what comes soon ahead of time, and lets go of them
after it unless they come again soon (zero/partitioned_param_coordinator.py). Under dsx that follows the
recording of a whole step, the first one, and with ``dsx.zero.keep_gathered_bytes`` a plan of what to keep
(dsx/engine/zero/stage3.py). :class:`Coordinator` takes the same decisions again, in the same order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsx.memory.ledger import Leaf, Ledger, Tensor
from dsx.memory.states import Gathering, States, free
from dsx.parallel.layout import Layout
from dsx.parallel.zero import part_numel
from dsx.schedules.gathers import ChunkHolds, GatherPlan, StepTrace
from dsx.schedules.schedule import Action

Module = tuple[Leaf, ...]
"""A module with these parameters of its own; maybe none."""

Waiting = tuple[Leaf, Tensor | None]
"""A gradient that waits to be reduced; None if it lies in the bucket."""

NEVER = -1
"""Before a step's first module."""


class _Handle:
    """A gathering under way: one flat buffer for several parameters, one's own buffer for a single one."""

    def __init__(self, coordinator: Coordinator, leaves: Sequence[Leaf]) -> None:
        self._coordinator, self._leaves, self._complete = coordinator, leaves, False
        self._waiting = len(leaves)
        self._own: dict[str, Tensor | None] = {}
        self._flat: dict[tuple[int, int], Tensor] = {}
        for ranks, together in coordinator.by_ranks(leaves).items():
            if len(together) == 1 or coordinator.gathering.sequential or ranks == 1:
                self._own |= {leaf.name: coordinator.own_buffer(leaf) for leaf in together}
                continue
            for width in sorted({leaf.width for leaf in together}):
                its = [leaf for leaf in together if leaf.width == width]
                self._flat[ranks, width] = coordinator.flat_buffer(its)

    def wait(self) -> None:
        """The parameters are there; the flat buffer stays until :meth:`let_go` for each of them."""
        if self._complete:
            return
        self._complete = True
        coordinator = self._coordinator
        for leaf in self._leaves:
            if leaf.name in self._own:
                whole = self._own[leaf.name]
            elif coordinator.gathering.all_reduce:
                whole = self._flat[coordinator.ranks(leaf), leaf.width].detach()
            else:
                whole = coordinator.copied(leaf)
            coordinator.settle(leaf, whole)
            coordinator.flying.discard(leaf.name)

    def let_go(self) -> None:
        """One of the parameters is no longer waited for; after the last of them the flat buffer goes."""
        self._waiting -= 1
        if not self._waiting:
            free(*self._flat.values())


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
        persistent: Names of parameters that stay gathered through a step.
        offloaded: Whether partitions live on the host, and come to the device to be gathered.

    Attributes:
        holds: What is held between actions; None holds nothing.
        modules: Those of the first step, one after the other.
    """

    def __init__(
        self,
        ledger: Ledger,
        dp: int,
        gathering: Gathering,
        persistent: frozenset[str],
        *,
        offloaded: bool = False,
    ) -> None:
        self.ledger, self.dp, self.gathering = ledger, dp, gathering
        self.persistent, self.offloaded = persistent, offloaded
        self.here: dict[str, Leaf] = {}
        self.flying: set[str] = set()
        self._registry: dict[str, _Handle] = {}
        self._active: dict[str, set[str]] = {}
        self._backward: list[Module] = []
        self.holds: ChunkHolds[Leaf] | None = None
        self.modules: list[Module] = []
        self._recording: _Recording | None = None
        self._steps = 0
        self._queue: deque[tuple[int, Leaf]] = deque()
        self._passed: dict[str, int] = {}
        self._step = self._available = 0

    # Memory

    def ranks(self, leaf: Leaf) -> int:
        """How many a parameter is cut over."""
        return self.dp // leaf.experts_over

    def by_ranks(self, leaves: Sequence[Leaf]) -> dict[int, list[Leaf]]:
        """Those that are gathered together: experts among their replicas, all others among all."""
        found: dict[int, list[Leaf]] = {}
        for leaf in leaves:
            found.setdefault(self.ranks(leaf), []).append(leaf)
        return found

    def padded(self, leaf: Leaf) -> int:
        """Elements of all partitions."""
        return part_numel(leaf.numel, self.ranks(leaf)) * self.ranks(leaf)

    def copied(self, leaf: Leaf) -> Tensor:
        """A parameter copied out of a flat buffer."""
        return self._new("gathered parameters", leaf.numel, leaf.width)

    def own_buffer(self, leaf: Leaf) -> Tensor | None:
        """What a single parameter is gathered into and stays in; None where the only partition is it."""
        if self.ranks(leaf) == 1:
            return self.copied(leaf) if self.offloaded else None
        return self.gather_alone(leaf)

    def flat_buffer(self, leaves: Sequence[Leaf]) -> Tensor:
        """The buffer that several are gathered into."""
        buffer = self._new("gathering", sum(map(self.padded, leaves)), leaves[0].width)
        free(*self.uploads(leaves))
        return buffer

    def uploads(self, leaves: Sequence[Leaf]) -> list[Tensor]:
        """Partitions that come from the host to be gathered."""
        return [
            self._new("partitions on their way", part_numel(leaf.numel, self.ranks(leaf)), leaf.width)
            for leaf in (leaves if self.offloaded else ())
        ]

    def _new(self, name: str, numel: int, width: int) -> Tensor:
        return self.ledger.tensor("parameters", name, numel, width)

    # Steps

    def begin(self) -> None:
        """StepGathers.begin: the first step records, later ones prefetch."""
        self._clean()
        if self._steps == 1:
            self._recording = _Recording(self.modules)
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
            self.modules.append(module)
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
        if not forward and module in self._backward:  # else nobody used its output
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
                if self._releasable(leaf):
                    self._drop(leaf)
        self._backward.clear()

    def _releasable(self, leaf: Leaf) -> bool:
        if leaf.name in self.persistent:
            return False
        if self.gathering.keep_bytes or self._recording is None:
            return True
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
        persistent = [leaf for leaf in leaves if leaf.name in self.persistent]
        for ranks, small in self.by_ranks(persistent).items():
            if len(small) == 1 or self.gathering.sequential:
                for leaf in small:
                    self.settle(leaf, self.gather_alone(leaf))
                continue
            parts = [] if ranks == 1 else self.uploads(small)
            for leaf in small:
                size = self.padded(leaf)
                made = "gathered parameters", size, leaf.width
                whole = self.own_buffer(leaf) if ranks == 1 else self._new(*made)
                self.settle(leaf, whole)
            free(*parts)

    def gather_alone(self, leaf: Leaf) -> Tensor:
        """_allgather_params_sequential: a buffer of its own, on one rank too."""
        buffer = self._new("gathered parameters", self.padded(leaf), leaf.width)
        free(*self.uploads([leaf]))
        return buffer


class Stage3(States):
    """DeepSpeedZeroOptimizer_Stage3, with ``offload_optimizer`` or ``offload_param`` or without.

    Attributes:
        layers: Parameters of each layer of this rank, in the order in which layers are built.
        ties: Those of them that other pipeline ranks have copies of.
    """

    def prepare(self) -> None:
        """This rank's partitions, the coordinator of gathers, and the bucket."""
        gathering = self.gathering = self.settings.gathering or Gathering()
        self.plan = replace(self.plan, sub_group_size=gathering.sub_group)
        self.sub_groups = [[self.leaves[name] for name, _ in held] for _, held in self.plan.sub_groups()]
        self.sizes = [sum(map(self.part, group)) for group in self.sub_groups]
        self.coordinator = Coordinator(
            self.ledger,
            self.plan.dp,
            gathering,
            gathering.persistent([*self.leaves.values()]),
            offloaded=self.offload.parameters and not self.offload.unified,
        )
        groups = len(self.sub_groups)
        first = int((1 - self.offload.ratio) * groups) if self.offload.optimizer else groups
        self.host_groups = range(first, groups)
        self.buckets: dict[int, list[Waiting]] = {}
        self.held_buckets: list[Tensor] = []
        self.gradients: list[Tensor] = []
        self._gathers: GatherPlan | None = None
        self.layers: Sequence[Sequence[Leaf]] = [self.order]
        self.ties: Sequence[Leaf] = ()
        self.stand_ins: list[Tensor] = []
        for leaf in self.order:
            leaf.accumulate = self.arrive

    def part(self, leaf: Leaf) -> int:
        """Elements of a rank's part of a parameter, padding included."""
        return part_numel(leaf.numel, self.among(leaf)[0])

    def has_own(self, leaf: Leaf) -> bool:
        """Whether this rank's part of a parameter is more than padding."""
        return self.part(leaf) * self.among(leaf)[1] < leaf.numel

    @property
    def sent(self) -> int:
        """Bytes of a gradient's element as most are sent (``communication_data_type``)."""
        return self.settings.communication or self.settings.width

    def wire(self, leaf: Leaf) -> int:
        """Bytes of an element of this gradient as it is sent."""
        return leaf.width if leaf.width > self.settings.width else self.sent

    def sums(self, leaf: Leaf) -> int:
        """Bytes of an element of a sum of gradients."""
        return max(self.settings.accumulate, leaf.width)

    # The engine

    def build(self) -> None:
        """Layer by layer, each partitioned as it is made (dsx engine/zero/building.py); ties made equal."""
        for layer in self.layers:
            whole = [
                self.new("parameters", "layer being built", leaf.numel, leaf.width)
                for leaf in reversed(layer)
            ]
            for leaf in layer:
                # partition_parameters.py, _partition_param.
                kind = "parameters", "partitions", self.part(leaf), leaf.width
                held = self.parameters if leaf.name in self.trained else self.frozen_parameters
                if self.offload.parameters:
                    held.append(self.host.pinned(*kind, pin=self.offload.pinned_parameters))
                else:
                    held.append(self.new(*kind))
                free(whole.pop())
                self.stand_ins.append(self.new("parameters", "stand-ins", 1, leaf.width))
        for leaf in self.ties:
            free(self.coordinator.gather_alone(leaf))

    def start(self) -> None:
        """One buffer for all partitions; masters; bucket and gradients; hooks."""
        free(*self.stand_ins)
        self.stand_ins.clear()
        self.flatten()
        self.make_masters()
        self.make_gradients()
        # Hooks are put on whole parameters, one after the other (create_reduce_and_remove_grad_hooks).
        for leaf in self.order:
            free(self.coordinator.gather_alone(leaf))
        self.make_wide_gradients()

    def flatten(self) -> None:
        """Over the host into one buffer (utils.py), or on the host into a pinned one for each group."""
        kind = "parameters", "partitions"
        if self.offload.parameters:
            for group in self.plan.groups:
                leaves = [self.leaves[name] for name, _ in group]
                size, width = sum(map(self.part, leaves)), leaves[0].width
                self.on_host.append(self.host.pinned(*kind, size, width, pin=True))
            free(*self.parameters)
            self.parameters.clear()
            return
        trained = [leaf for layer in self.layers for leaf in layer if leaf.name in self.trained]
        held, self.parameters = list(zip(trained, self.parameters, strict=True)), []
        for width in dict.fromkeys(leaf.width for leaf in self.order):
            size = sum(self.part(leaf) for leaf in trained if leaf.width == width)
            with self.host.ledger.aside("partitions", size, width):
                free(*(part for leaf, part in held if leaf.width == width))
                self.parameters.append(self.new(*kind, size, width))

    def make_masters(self) -> None:
        """Of fp32 parameters too: DeepSpeed takes them for parameters of another device."""
        stays = self.offload.parameters or self.offload.unified
        converted: Tensor | None = None
        for index, size in enumerate(self.sizes):
            narrow = self.sub_groups[index][0].width != 4
            moves = narrow or (self.offload.parameters and not self.offload.unified)
            host = index in self.host_groups
            new = self.host.new if host else self.new
            if (narrow or not stays) if host else moves:
                before, converted = converted, new("temporaries", "converted", size, 4)
                free(before)
            (self.on_host if host else self.masters).append(new("optimizer", "master weights", size, 4))
        free(converted)

    def make_gradients(self) -> None:
        """Zeros for a moment, as the optimizer's state might want; the bucket; what micro-batches add up in.

        With the optimizer offloaded also the fp32 gradients of its masters.
        """
        offloaded, pin, width = self.offload.optimizer, self.offload.pinned, self.settings.accumulate
        zeros = (self.host if offloaded else self).new("temporaries", "zero gradients", max(self.sizes), 4)
        for index, size in enumerate(self.sizes if offloaded else ()):
            made = self.host.pinned("gradients", "fp32 gradients", size, 4, pin=pin)
            if index in self.host_groups:
                self.on_host.append(made)
            else:
                self.gradients.append(self.new("gradients", "fp32 gradients", size, 4))
                free(made)
        free(zeros)
        if self.gathering.contiguous:
            # Gradients are copied next to each other as they come.
            self.held_buckets.append(self.new("buckets", "reduce bucket", self.settings.bucket, self.sent))
        self._keep_sums(sum(self.sizes), width)

    def make_wide_gradients(self) -> None:
        """A bucket, and sums, of what is in fp32 among others, unless all are (engine/zero/float32.py)."""
        wide = [leaf for leaf in self.order if leaf.width > self.settings.width]
        if wide and self.gathering.contiguous and self.sent != 4:
            size = min(self.settings.bucket, sum(leaf.numel for leaf in wide))
            self.held_buckets.append(self.new("buckets", "reduce bucket in float32", size, 4))
        if wide and self.settings.accumulate != 4:
            self._keep_sums(sum(map(self.part, wide)), 4)

    def _keep_sums(self, size: int, width: int) -> None:
        kind = "gradients", "gradient partitions", size, width
        if self.offload.optimizer:
            self.on_host.append(self.host.pinned(*kind, pin=self.offload.pinned))
        else:
            self.gradients.append(self.new(*kind))

    # Steps

    def plan_gathers(self, row: Sequence[Action], chunks: Mapping[int, Sequence[Leaf]]) -> None:
        """Take ``dsx.zero.keep_gathered_bytes`` to heart; ``chunks``: what each stage's layers use."""
        if not self.gathering.keep_bytes:
            return
        small = self.coordinator.persistent
        holds = self.coordinator.holds = ChunkHolds(
            chunks,
            persistent=lambda leaf: leaf.name in small,
            size_bytes=lambda leaf: leaf.numel * leaf.width,
            budget_bytes=self.gathering.keep_bytes,
        )
        self._gathers = holds.plan(row)

    def begin(self) -> None:
        """A step begins."""
        self.coordinator.begin()

    def before_action(self, position: int) -> None:
        """The action at ``position`` comes next."""
        if self._gathers is not None:
            self.coordinator.keep(self._gathers.kept[position])

    # Gradients

    def arrive(self, leaf: Leaf, gradient: Tensor) -> None:
        """Into the bucket if there is room; else reduced with the next, or at the backward's end."""
        wire, limit = self.wire(leaf), self.settings.bucket
        others = self.buckets.get(wire) and self.buckets[wire][0][0].experts_over != leaf.experts_over
        if others or self.elements(wire) + leaf.numel > limit:
            self.flush(wire)
        fits = self.gathering.contiguous and self.elements(wire) + leaf.numel <= limit
        self.buckets.setdefault(wire, []).append((leaf, None if fits else gradient))
        if fits:
            free(gradient)

    def elements(self, wire: int) -> int:
        """Those of the gradients that wait to be sent in so many bytes each."""
        return sum(leaf.numel for leaf, _ in self.buckets.get(wire, ()))

    def flush(self, wire: int) -> None:
        """Reduce what has come, and add this rank's part to what it has."""
        waiting = self.buckets.pop(wire, [])
        if not waiting:
            return
        numel = sum(leaf.numel for leaf, _ in waiting)
        together = self.gathering.contiguous and numel <= self.settings.bucket
        if together and not self.gathering.reduce_scatter:
            held = self._all_reduced(waiting)
        else:
            held = self._scattered(waiting)
        self.add(held, waiting)
        free(*(gradient for _, gradient in waiting))

    def add(self, held: list[Tensor], bucket: list[Waiting]) -> None:
        """partition_grads: in place; or each partition comes from the host, is added to, and goes back.

        ``held`` are the reduced partitions.
        """
        if not self.offload.optimizer or self.offload.unified:
            free(*held)
            return
        before: Tensor | None = None
        # A gradient beside the bucket goes when its part has been added, in the order of the parameters; a
        # single one that needed no copy holds the reduced part itself.
        places = {leaf.name: place for place, leaf in enumerate(self.order)}
        waiting = sorted(bucket, key=lambda item: places[item[0].name], reverse=True)
        alone = None if held else waiting[0][1]
        bucket.clear()
        for leaf, own in reversed(waiting):
            if self.has_own(leaf):
                so_far = self.new("temporaries", "sum so far", self.part(leaf), self.sums(leaf))
                free(before)
                before = so_far
            if own is not alone:
                free(own)
        free(before, alone, *held)

    def _scattered(self, bucket: Sequence[Waiting]) -> list[Tensor]:
        """reduce_scatter_coalesced: a flat copy with padding, unless one parameter needs none.

        Between CPUs (engine/zero/stage3.py) it is without, and what the other ranks send lies beside it; one
        rank has no copy.
        """
        first, _ = bucket[0]
        width, accumulate = self.wire(first), max(self.sums(leaf) for leaf, _ in bucket)
        sent = [
            self.new("temporaries", "gradient as it is sent", gradient.numel, width)
            for _, gradient in bucket
            if gradient is not None and gradient.width != width
        ]
        padded = sum(self.coordinator.padded(leaf) for leaf, _ in bucket)
        copies: list[Tensor] = []
        ranks, place = self.among(first)
        if self.settings.gloo:
            numels = [leaf.numel for leaf, _ in bucket] if self.plan.dp > 1 else []
            each = [(numel, -(-numel // ranks)) for numel in numels]
            mine = sum(max(0, min(part, numel - part * place)) for numel, part in each)
            sizes = sum(numels), (ranks - 1) * mine
            copies += (
                self.new("temporaries", "flat copy of the bucket", size, width) for size in sizes if size
            )
        elif len(bucket) > 1 or padded != first.numel:
            copies.append(self.new("temporaries", "flat copy of the bucket", padded, width))
        free(*sent)
        if accumulate == width:
            return copies
        parts = [
            self.new("temporaries", "partitions to add", self.part(leaf), accumulate) for leaf, _ in bucket
        ]
        free(*copies)
        return parts

    def _all_reduced(self, bucket: Sequence[Waiting]) -> list[Tensor]:
        """``reduce_scatter`` false (__avg_scatter_contiguous_grads): in the bucket, then a scaled copy."""
        width, accumulate = self.wire(bucket[0][0]), max(self.sums(leaf) for leaf, _ in bucket)
        numel = sum(leaf.numel for leaf, _ in bucket)
        held: list[Tensor] = []
        if self.plan.dp > 1:
            held.append(self.new("temporaries", "scaled bucket", numel, width))
        if accumulate != width:
            added = self.new("temporaries", "bucket to add", numel, accumulate)
            free(*held)
            held = [added]
        return held

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """The epilogue of a backward: empty the bucket, let go of the model's first modules."""
        del boundary, came
        for wire in sorted(self.buckets):
            self.flush(wire)
        self.coordinator.release_rest()

    # The update

    def step(self) -> None:
        """Sub-group by sub-group."""
        if self.offload.optimizer:
            self._finalize()
        self.coordinator.release_all()
        narrow = [self.part(leaf) for leaf in self.order if self.sums(leaf) != 4]
        if not self.offload.optimizer and narrow:
            self.norm(max(narrow))
        self.update_groups()
        self.coordinator.gather_persistent([*self.leaves.values()])

    def single(self, group: int) -> Tensor | None:
        """_prepare_fp32_grad_for_sub_group: a flat fp32 copy; None for a single one that is fp32 already."""
        if self.offload.optimizer:
            return None  # the masters' own
        size, accumulate = self.sizes[group], self.sums(self.sub_groups[group][0])
        flat: Tensor | None = None
        if len(self.sub_groups[group]) > 1:
            flat = self.new("temporaries", "flat gradient", size, accumulate)
        if accumulate == 4:
            return flat
        wide = self.new("temporaries", "fp32 gradient", size, 4)
        free(flat)
        return wide

    def _finalize(self) -> None:
        """_finalize_offload_gradient_accumulation: the norm in fp64, then fp32 to the host."""
        part: Tensor | None = None
        for leaf in self.order:
            size, width = self.part(leaf), self.sums(leaf)
            if not self.has_own(leaf):
                continue
            if not self.offload.unified:
                before, part = part, self.new("temporaries", "sum of gradients", size, width)
                free(before)
            self.passing("in float64", min(size, 250_000_000), 8)
            if width != 4:
                self.passing("in float32", size, 4)
        free(part)


def built(layout: Layout, pp_rank: int, leaves: Mapping[str, Leaf]) -> tuple[list[list[Leaf]], list[Leaf]]:
    """A rank's parameters layer by layer, and those that other pipeline ranks have copies of."""
    specs = layout.params_of(pp_rank)
    layers: dict[int, list[Leaf]] = {layer: [] for layer in layout.stages.layers_of(pp_rank)}
    for spec in specs:
        first = next(layer for layer in layers if layer in layout.users(spec))
        layers[first].append(leaves[spec.name])
    ties = [leaves[spec.name] for spec in specs if len(layout.owners(spec)) > 1]
    return list(layers.values()), ties


def uses(layout: Layout, pp_rank: int, leaves: Mapping[str, Leaf]) -> dict[int, list[Leaf]]:
    """Virtual stage of a pipeline rank -> the parameters that its layers use, tied ones included."""
    stages = layout.stages
    found: dict[int, list[Leaf]] = {stage: [] for stage in stages.stages_of(pp_rank)}
    for spec in layout.params_of(pp_rank):
        for stage in dict.fromkeys(map(stages.stage_of, layout.users(spec))):
            if stage in found:
                found[stage].append(leaves[spec.name])
    return found
