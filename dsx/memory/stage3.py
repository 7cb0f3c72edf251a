"""ZeRO-3, deepspeed/runtime/zero/stage3.py, with optimizer or parameters on the device or the host.

Parameters, gradients and optimizer state are cut parameter by parameter over the data-parallel ranks, each
padded to a multiple of N; what is whole at a time is :mod:`dsx.memory.stage3_gathering`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsx.memory.ledger import Leaf, Tensor
from dsx.memory.stage3_gathering import Coordinator
from dsx.memory.states import Gathering, States, free
from dsx.models.param import ParamSpec
from dsx.parallel.layout import Layout
from dsx.schedules.gathers import ChunkHolds, GatherPlan
from dsx.schedules.schedule import Action

_FILE = "zero/stage3.py"


class Stage3(States):
    """DeepSpeedZeroOptimizer_Stage3, with ``offload_optimizer`` or ``offload_param`` or without.

    Attributes:
        host_groups: Sub-groups that are updated on the host.
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
            self.settings.width,
            gathering,
            gathering.persistent([*self.leaves.values()]),
        )
        self.coordinator.offloaded = self.offload.parameters and not self.offload.unified
        groups = len(self.sub_groups)
        first = int((1 - self.offload.ratio) * groups) if self.offload.optimizer else groups
        self.host_groups = range(first, groups)
        self.updated: set[int] = set()
        self.elements = 0
        self.in_bucket: list[tuple[Leaf, Tensor | None]] = []
        self.bucket: Tensor | None = None
        self.gradients: list[Tensor] = []
        self._gathers: GatherPlan | None = None
        self.layers: Sequence[Sequence[Leaf]] = [self.order]
        self.ties: Sequence[Leaf] = ()
        self.stand_ins: list[Tensor] = []
        for leaf in self.order:
            leaf.accumulate = self.arrive

    def part(self, leaf: Leaf) -> int:
        """Elements of a rank's part of a parameter, padding included."""
        return self.plan.part(leaf.numel)

    @property
    def wire(self) -> int:
        """Bytes of a gradient's element as it is sent (``communication_data_type``)."""
        return self.settings.communication or self.settings.width

    # The engine

    def build(self) -> None:
        """Layer by layer, each partitioned as it is made (dsx engine/zero/building.py); ties made equal."""
        for layer in self.layers:
            kind = ("parameters", "layer being built", "P w of a layer", "dsx nn")
            whole = [self.new(*kind, leaf.numel, leaf.width) for leaf in reversed(layer)]
            for leaf in layer:
                self.keep_part(leaf)
                free(whole.pop())
                source = "dsx engine/zero/building.py stand_in"
                self.stand_ins.append(self.new("parameters", "stand-ins", "w", source, 1, leaf.width))
        for leaf in self.ties:
            free(self.coordinator.gather_alone(leaf))

    def keep_part(self, leaf: Leaf) -> None:
        """partition_parameters.py, _partition_param."""
        part, width = self.part(leaf), self.settings.width
        source = "zero/partition_parameters.py _partition_param"
        kind = "parameters", "partitions", "w P/N, padded", source
        held = self.frozen_parameters if leaf.name not in self.trained else self.parameters
        if self.offload.parameters:
            pin = self.offload.pinned_parameters
            held.append(self.host.pinned(*kind, part * width, pin=pin))
        else:
            held.append(self.new(*kind, part, width))

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

    def flatten(self) -> None:
        """Over the host into one buffer (utils.py), or on the host into a pinned one for each group."""
        name, formula, width = "partitions", "w P/N, padded", self.settings.width
        if self.offload.parameters:
            source = f"{_FILE} _create_param_groups_fp16_flat_cpu_memory"
            for group in self.plan.groups:
                size = sum(self.plan.part(numel) for _, numel in group) * width
                self.on_host.append(self.host.pinned("parameters", name, formula, source, size, pin=True))
            free(*self.parameters)
            self.parameters.clear()
            return
        source, size = "zero/utils.py defragment", self.local * width
        aside = self.host.new("temporaries", name, formula, source, size, pinned=False)
        free(*self.parameters)
        self.parameters = [self.new("parameters", name, formula, source, self.local, width)]
        free(aside)

    def make_masters(self) -> None:
        """Of fp32 parameters too: DeepSpeed takes them for parameters of another device."""
        source, narrow = f"{_FILE} _create_fp32_partitions", self.settings.width != 4
        moves = narrow or (self.offload.parameters and not self.offload.unified)
        stays = self.offload.parameters or self.offload.unified
        converted: Tensor | None = None
        for index, size in enumerate(self.sizes):
            host = index in self.host_groups
            if (narrow or not stays) if host else moves:
                before, kind = converted, ("temporaries", "converted", "4 P/N of a sub-group", source)
                converted = self._fp32(host, *kind, size)
                free(before)
            master = self._fp32(host, "optimizer", "master weights", "4 P/N, padded", source, size)
            (self.on_host if host else self.masters).append(master)
        free(converted)

    def _fp32(self, host: bool, category: str, name: str, formula: str, source: str, size: int) -> Tensor:
        if host:
            return self.host.new(category, name, formula, source, 4 * size, pinned=False)
        return self.new(category, name, formula, source, size, 4)

    def make_gradients(self) -> None:
        """Zeros for a moment, as the optimizer's state might want; the bucket; what micro-batches add up in.

        With the optimizer offloaded also the fp32 gradients of its masters.
        """
        offloaded, pin = self.offload.optimizer, self.offload.pinned
        source = f"{_FILE} initialize_optimizer_states"
        kind = "temporaries", "zero gradients", "4 of the largest sub-group", source
        zeros = self._fp32(offloaded, *kind, max(self.sizes))
        for index, size in enumerate(self.sizes if offloaded else ()):
            kind = "gradients", "fp32 gradients", "4 P/N, padded", source
            made = self.host.pinned(*kind, 4 * size, pin=pin)
            if index in self.host_groups:
                self.on_host.append(made)
            else:
                self.gradients.append(self.new(*kind, size, 4))
                free(made)
        free(zeros)
        if self.gathering.contiguous:
            # Gradients are copied next to each other as they come.
            kind = "buckets", "reduce bucket", "reduce_bucket_size w", f"{_FILE} _setup_for_real_optimizer"
            self.bucket = self.new(*kind, self.settings.bucket, self.wire)
        source, width = f"{_FILE} _setup_for_real_optimizer", self.settings.accumulate
        kind = "gradients", "gradient partitions", f"{width} P/N, padded", source
        if offloaded:
            self.on_host.append(self.host.pinned(*kind, width * self.local, pin=pin))
        else:
            self.gradients = [self.new(*kind, self.local, width)]

    @property
    def local(self) -> int:
        """Elements of all of this rank's partitions."""
        return sum(self.sizes)

    # Steps

    def plan_gathers(self, row: Sequence[Action], chunks: Mapping[int, Sequence[Leaf]]) -> None:
        """Take ``dsx.zero.keep_gathered_bytes`` to heart; ``chunks``: what each stage's layers use."""
        if not self.gathering.keep_bytes:
            return
        small, width = self.coordinator.persistent, self.settings.width
        holds = self.coordinator.holds = ChunkHolds(
            chunks,
            persistent=lambda leaf: leaf.name in small,
            size_bytes=lambda leaf: leaf.numel * width,
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
        bucket = self.settings.bucket
        if self.elements + leaf.numel > bucket and self.elements:
            self.flush()
        fits = self.gathering.contiguous and self.elements + leaf.numel <= bucket
        self.in_bucket.append((leaf, None if fits else gradient))
        self.elements += leaf.numel
        if fits:
            free(gradient)

    def flush(self) -> None:
        """Reduce what has come, and add this rank's part to what it has."""
        if not self.in_bucket:
            return
        if (
            self.gathering.contiguous
            and self.elements <= self.settings.bucket
            and not self.gathering.reduce_scatter
        ):
            held = self._all_reduced()
        else:
            held = self._scattered()
        self.add(held)
        free(*(gradient for _, gradient in self.in_bucket))
        self.in_bucket, self.elements = [], 0

    def add(self, held: list[Tensor]) -> None:
        """partition_grads: in place; or each partition comes from the host, is added to, and goes back.

        ``held`` are the reduced partitions.
        """
        if not self.offload.optimizer or self.offload.unified:
            free(*held)
            return
        source, width = f"{_FILE} partition_grads", self.settings.accumulate
        before: Tensor | None = None
        # A gradient beside the bucket goes when its part has been added, in the order of the parameters; a
        # single one that needed no copy holds the reduced part itself.
        places = {leaf.name: place for place, leaf in enumerate(self.order)}
        waiting = sorted(self.in_bucket, key=lambda item: places[item[0].name], reverse=True)
        alone = None if held else waiting[0][1]
        self.in_bucket.clear()
        for leaf, own in reversed(waiting):
            if self.part(leaf) * self.dp_rank < leaf.numel:
                kind, formula = ("temporaries", "sum so far"), "P/N of a parameter"
                now = self.new(*kind, formula, source, self.part(leaf), width)
                free(before)
                before = now
            if own is not alone:
                free(own)
        free(before, alone, *held)

    def _scattered(self) -> list[Tensor]:
        """reduce_scatter_coalesced: a flat copy with padding, unless one parameter needs none."""
        width, accumulate = self.wire, self.settings.accumulate
        apart = [
            gradient for _, gradient in self.in_bucket if gradient is not None and gradient.width != width
        ]
        source = f"{_FILE} __avg_scatter_grads"
        sent = [
            self.new("temporaries", "gradient as it is sent", "P", source, gradient.numel, width)
            for gradient in apart
        ]
        padded = sum(self.coordinator.padded(leaf) for leaf, _ in self.in_bucket)
        copies: list[Tensor] = []
        if len(self.in_bucket) > 1 or padded != self.in_bucket[0][0].numel:
            source = "comm/coalesced_collectives.py reduce_scatter_coalesced"
            formula = "bucket w, padded"
            copies.append(self.new("temporaries", "flat copy of the bucket", formula, source, padded, width))
        free(*sent)
        if accumulate == width:
            return copies
        kind = "temporaries", "partitions to add", "bucket/N", f"{_FILE} __avg_scatter_grads"
        parts = [self.new(*kind, self.part(leaf), accumulate) for leaf, _ in self.in_bucket]
        free(*copies)
        return parts

    def _all_reduced(self) -> list[Tensor]:
        """``reduce_scatter`` false (__avg_scatter_contiguous_grads): in the bucket, then a scaled copy."""
        width, accumulate = self.wire, self.settings.accumulate
        source = f"{_FILE} __avg_scatter_contiguous_grads"
        held: list[Tensor] = []
        if self.plan.dp > 1:
            held.append(self.new("temporaries", "scaled bucket", "bucket w", source, self.elements, width))
        if accumulate != width:
            formula = f"bucket {accumulate}"
            added = self.new("temporaries", "bucket to add", formula, source, self.elements, accumulate)
            free(*held)
            held = [added]
        return held

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """The epilogue of a backward: empty the bucket, let go of the model's first modules."""
        del boundary, came
        self.flush()
        self.coordinator.release_rest()

    # The update

    def step(self) -> None:
        """Sub-group by sub-group."""
        if self.offload.optimizer:
            self._finalize()
        self.coordinator.release_all()
        if not self.offload.optimizer and self.settings.accumulate != 4:
            self.norm(max(map(self.part, self.order)))
        for index, size in enumerate(self.sizes):
            if index in self.host_groups:
                self.update_on_host(size, first=index not in self.updated)
                self.updated.add(index)
                continue
            gradient = None if self.offload.optimizer else self.single(index, size)
            self.update_group(index, size)
            free(gradient)
        self.coordinator.gather_persistent([*self.leaves.values()])

    def single(self, index: int, size: int) -> Tensor | None:
        """_prepare_fp32_grad_for_sub_group: a flat fp32 copy; None for a single one that is fp32 already."""
        accumulate, source = self.settings.accumulate, f"{_FILE} _prepare_fp32_grad_for_sub_group"
        flat: Tensor | None = None
        if len(self.sub_groups[index]) > 1:
            flat = self.new("temporaries", "flat gradient", "P/N of a sub-group", source, size, accumulate)
        if accumulate == 4:
            return flat
        single = self.new("temporaries", "fp32 gradient", "4 P/N of a sub-group", source, size, 4)
        free(flat)
        return single

    def _finalize(self) -> None:
        """_finalize_offload_gradient_accumulation: the norm in fp64, then fp32 to the host."""
        source, width = f"{_FILE} _offload_grad_partition_at_boundary", self.settings.accumulate
        part: Tensor | None = None
        for leaf in self.order:
            size = self.part(leaf)
            if size * self.dp_rank >= leaf.numel:
                continue
            if not self.offload.unified:
                before, kind = part, ("temporaries", "sum of gradients", "P/N of a parameter", source)
                part = self.new(*kind, size, width)
                free(before)
            self.passing("in float64", "8 P/N of a parameter", source, min(size, 250_000_000), 8)
            if width != 4:
                self.passing("in float32", "4 P/N of a parameter", source, size, 4)
        free(part)


def built(layout: Layout, pp_rank: int, leaves: Mapping[str, Leaf]) -> tuple[list[list[Leaf]], list[Leaf]]:
    """A rank's parameters layer by layer, and those that other pipeline ranks have copies of."""
    specs = layout.params_of(pp_rank)
    layers: dict[int, list[Leaf]] = {layer: [] for layer in layout.stages.layers_of(pp_rank)}
    for spec in specs:
        first = next(layer for layer in layers if layer in _users(layout, spec))
        layers[first].append(leaves[spec.name])
    ties = [leaves[spec.name] for spec in specs if len(layout.owners(spec)) > 1]
    return list(layers.values()), ties


def uses(layout: Layout, pp_rank: int, leaves: Mapping[str, Leaf]) -> dict[int, list[Leaf]]:
    """Virtual stage of a pipeline rank -> the parameters that its layers use, tied ones included."""
    stages = layout.stages
    found: dict[int, list[Leaf]] = {stage: [] for stage in stages.stages_of(pp_rank)}
    for spec in layout.params_of(pp_rank):
        for stage in dict.fromkeys(map(stages.stage_of, _users(layout, spec))):
            if stage in found:
                found[stage].append(leaves[spec.name])
    return found


def _users(layout: Layout, spec: ParamSpec) -> list[int]:
    """Layers that use a parameter."""
    return [spec.layer] if spec.tie is None else [spec.layer, layout.stages.num_layers - 1]
