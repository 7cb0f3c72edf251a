"""What DeepSpeed 0.19.8 keeps for a rank's parameters, and takes for a moment, as :mod:`.tape` sees it.

One class per optimizer wrapper that DeepSpeed chooses (engine.py, _do_optimizer_sanity_check). Each is asked
in the order of a run: :meth:`States.build`, :meth:`States.start`, gradients as they come,
:meth:`States.reduce` after each backward, :meth:`States.step`. Source files are below deepspeed/runtime.

P: parameters of this rank's layers, tensor-parallel cut and padding included; N: data-parallel degree; w:
bytes of a parameter, 2 or 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from dsx.plan.memory.offload import Host, Offload
from dsx.plan.memory.reduction import ChunkReduction
from dsx.plan.memory.stage3_gathering import Gathering
from dsx.plan.memory.tape import Label, Leaf, Ledger, Storage, Tensor
from dsx.spec.zero import ZeroPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The update rule.

    Attributes:
        state_bytes: What it keeps for each parameter.
        step_bytes: What it takes besides, for each parameter, while it updates.
        one_by_one: Whether it takes that for one tensor at a time, not for all of them.
    """

    state_bytes: int
    step_bytes: int
    one_by_one: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """The config's part in it.

    Attributes:
        width: Bytes of a parameter: 2 or 4.
        accumulate: Bytes of an accumulated gradient.
        optimizer: The update rule.
        bucket: ``zero_optimization.reduce_bucket_size``, elements.
        communication: Bytes of a gradient on its way (``communication_data_type``); None as a parameter's.
        reduce: ``dsx.zero.reduce``.
        offload: What lives on the host.
        fused: Whether the update is DeepSpeed's FusedAdam or the like.
        gathering: ZeRO-3's sizes.
    """

    width: int
    accumulate: int
    optimizer: Optimizer
    bucket: int = 500_000_000
    communication: int | None = None
    reduce: Literal["step", "micro_batch"] = "step"
    offload: Offload | None = None
    fused: bool = False
    gathering: Gathering | None = None


class States:
    """Base: fp32 without ZeRO. Parameters, gradients and moments are the model's own tensors.

    Args:
        ledger: Counts.
        plan: ZeRO's cut of the rank's parameters.
        dp_rank: Data-parallel coordinate.
        leaves: The rank's parameters by name.
        settings: The config's part.

    Attributes:
        replicated: Parameters that are copies of another pipeline rank's, tied ones.
        reduction: dsx's own, if DeepSpeed does not reduce.
        in_place: Whether buckets come on top of gradients, which stay where they are.
        capacity_bytes: What a device has for tensors; None for enough.
    """

    in_place = False

    def __init__(
        self,
        ledger: Ledger,
        plan: ZeroPlan,
        dp_rank: int,
        leaves: Mapping[str, Leaf],
        settings: StateSettings,
    ) -> None:
        self.ledger, self.plan, self.dp_rank = ledger, plan, dp_rank
        self.leaves, self.settings, self.host = leaves, settings, Host(settings.offload, ledger)
        self.replicated: frozenset[str] = frozenset()
        self.order = [leaves[name] for group in plan.groups for name, _ in group]
        self.reduction: ChunkReduction | None = None
        self.capacity_bytes: int | None = None
        self.parameters: list[Tensor] = []
        self.moments: list[Tensor] = []

    def build(self) -> None:
        """The model's parameters, one by one."""
        self.parameters = [
            self.new("parameters", "parameter", "P w", "dsx nn", leaf.numel, leaf.width)
            for leaf in self.order
        ]

    def start(self) -> None:
        """What ``deepspeed.initialize`` adds."""

    def begin(self) -> None:
        """Before each step."""

    def before_action(self, position: int) -> None:
        """Before the action at ``position`` of the rank's row: go on with the reductions."""
        del position
        if self.reduction is not None:
            self.reduction.advance()

    def plan_reduction(self, uses: Mapping[int, Sequence[Leaf]]) -> None:
        """Have dsx reduce gradients, where it does (zero_adapters/reduction.py, reducible).

        Args:
            uses: Virtual stage -> parameters that its layers use.
        """
        if not self.reduces_itself:
            self.reduction = ChunkReduction(
                self.ledger,
                self,
                leaves=list(self.leaves.values()),
                uses=uses,
                dp=self.plan.dp,
                width=self.settings.communication or self.settings.width,
                bucket=self.settings.bucket,
            )

    @property
    def reduces_itself(self) -> bool:
        """Whether DeepSpeed reduces gradients."""
        return False

    def take(self, leaf: Leaf) -> Tensor | None:
        """Gradients in ``p.grad`` (zero_adapters/replicated.py)."""
        gradient, leaf.grad = leaf.grad, None
        return gradient

    def put(self, leaf: Leaf, gradient: Tensor) -> None:
        """Back there, in the parameter's dtype."""
        if gradient.width == leaf.width:
            leaf.grad = gradient.detach()
        else:
            source = "dsx zero_adapters/replicated.py put"
            leaf.grad = self.new("gradients", "averaged gradient", "w P", source, leaf.numel, leaf.width)

    def reduce(self, *, boundary: bool, came: bool) -> None:
        """After each backward; ``boundary`` after the last of the step, ``came`` if any gradient did."""

    def chunk_done(self, stage: int) -> None:
        """After the last action of a virtual stage."""
        if self.reduction is not None:
            self.reduction.chunk_done(stage)

    def before_step(self) -> None:
        """After the last action of a step."""
        if self.reduction is not None:
            self.reduction.finish()

    def step(self) -> None:
        """The update."""
        numels = [leaf.numel for leaf in self.order]
        self.update(numels)
        for leaf in self.order:
            leaf.grad = None

    def norm(self, largest: int) -> None:
        """Squares are taken in fp32, gradient by gradient (dsx/runtime/zero_adapters/norm.py)."""
        self.new(
            "temporaries",
            "gradient in float32",
            "4 of the largest gradient",
            "dsx zero_adapters/norm.py",
            largest,
            4,
        )

    def update(self, numels: Iterable[int]) -> None:
        """One optimizer step over fp32 tensors of these sizes."""
        numels, optimizer = list(numels), self.settings.optimizer
        if not self.moments and optimizer.state_bytes:
            self.moments = [
                self.new(
                    "optimizer",
                    "moments",
                    f"{optimizer.state_bytes} P",
                    "torch optim",
                    n * optimizer.state_bytes,
                    1,
                )
                for n in numels
            ]
        temporaries: list[Tensor] = []
        for n in numels if optimizer.step_bytes else ():
            if optimizer.one_by_one:
                temporaries.clear()
            temporaries.append(self._taken(n, "P"))

    def update_group(self, index: int, size: int) -> None:
        """The update of one group's partition."""
        optimizer = self.settings.optimizer
        if len(self.moments) <= index and optimizer.state_bytes:
            formula = f"{optimizer.state_bytes} P/N, padded"
            held = size * optimizer.state_bytes
            self.moments.append(self.new("optimizer", "moments", formula, "torch optim", held, 1))
        if optimizer.step_bytes:
            self._taken(size, "P/N")

    def _taken(self, elements: int, of: str) -> Tensor:
        """Temporaries of the update."""
        each = self.settings.optimizer.step_bytes
        return self.new("temporaries", "update", f"{each} {of}", "torch optim", elements * each, 1)

    def flattened(
        self, held: dict[str, Tensor], group: Sequence[tuple[str, int]], size: int, *, by_way_of_host: bool
    ) -> Tensor:
        """A group's parameters end to end; one alone without padding stays where it is.

        Args:
            held: The parameters by name; the group's are let go of.
            group: Name and elements of each.
            size: Elements of all, padding included.
            by_way_of_host: Flatten on the host what the device has no room for beside the parameters
                (zero/stage_1_and_2.py, __init__, flatten_on_accelerator).
        """
        source, width = "zero/stage_1_and_2.py flatten_dense_tensors_aligned", self.settings.width
        free = None if self.capacity_bytes is None else self.capacity_bytes - self.ledger.current_bytes
        on_host = by_way_of_host and free is not None and free < size * width
        copies = []
        for name, numel in group if on_host else ():
            copies.append(self._on_host("parameters on their way", "w P", source, numel * width))
            held[name] = self.new("parameters", "place of a parameter", "4", source, 1, 4)
        kind = "parameters", "flat parameters", "w P, padded", source
        if len(group) == 1 and group[0][1] == size:
            return self.new(*kind, size, width) if on_host else held.pop(group[0][0])
        padding = size - sum(numel for _, numel in group)
        if on_host:
            together = self._on_host("flat parameters", "w P, padded", source, size * width)
            copies.clear()
            flat = self.new(*kind, size, width)
            del together
        else:
            zeros = self.new("temporaries", "padding", "w 2 N", source, padding, width)
            flat = self.new(*kind, size, width)
            del zeros
        for name, _ in group:
            del held[name]
        return flat

    def _on_host(self, name: str, formula: str, source: str, size_bytes: int) -> Tensor:
        return self.host.new("temporaries", name, formula, source, size_bytes, pinned=False)

    def new(self, category: str, name: str, formula: str, source: str, numel: int, width: int) -> Tensor:
        """A flat tensor of ``numel`` elements."""
        return Tensor(
            (numel,), width, Storage(self.ledger, Label(category, name, formula, source), numel * width)
        )


class Unfused(States):
    """bf16 without ZeRO, torch's optimizers: fp16/unfused_optimizer.py, an fp32 copy of each parameter."""

    def start(self) -> None:
        """Masters, then a first update on zero gradients, which dsx undoes."""
        source = "fp16/unfused_optimizer.py __init__"
        self.masters = []
        for leaf in self.order:
            clone = self.new("temporaries", "clone", "w of a parameter", source, leaf.numel, leaf.width)
            self.masters.append(self.new("optimizer", "master weights", "4 P", source, leaf.numel, 4))
            del clone
        source = "fp16/unfused_optimizer.py initialize_optimizer_states"
        low = [
            self.new("gradients", "zero gradients", "w P", source, leaf.numel, leaf.width)
            for leaf in self.order
        ]
        high = [
            self.new("temporaries", "fp32 gradients", "4 P", source, leaf.numel, 4) for leaf in self.order
        ]
        self.update(leaf.numel for leaf in self.order)
        del low, high
        self.moments.clear()

    def step(self) -> None:
        """The norm, fp32 gradients beside the bf16 ones, and the update."""
        self.norm(max(leaf.numel for leaf in self.order))
        source = "fp16/unfused_optimizer.py step"
        gradients = [
            self.new("temporaries", "fp32 gradients", "4 P", source, leaf.numel, 4) for leaf in self.order
        ]
        self.update(leaf.numel for leaf in self.order)
        del gradients
        for leaf in self.order:
            leaf.grad = None


class Flat(States):
    """bf16 without ZeRO, fused optimizers: fp16/fused_optimizer.py, flat bf16 and flat fp32."""

    masters: Tensor

    def start(self) -> None:
        """Clones, their flat copy, the flat masters; a first update, which dsx undoes."""
        source = "fp16/fused_optimizer.py __init__"
        clones = [
            self.new("temporaries", "clones", "w P", source, leaf.numel, leaf.width) for leaf in self.order
        ]
        total = sum(leaf.numel for leaf in self.order)
        flat = self.new("parameters", "flat parameters", "w P", source, total, self.settings.width)
        clones.clear()
        self.parameters = [flat]
        clone = self.new("temporaries", "clone", "w P", source, total, self.settings.width)
        self.masters = self.new("optimizer", "master weights", "4 P", source, total, 4)
        del clone
        gradient = self.new("temporaries", "zero gradients", "4 P", source, total, 4)
        self.update([total])
        del gradient
        source = "dsx zero_adapters/replicated.py _undo_initial_step"
        wide = self._wide(source)
        flat = self.new("temporaries", "parameters in float32", "4 P", source, total, 4)
        wide.clear()
        del flat
        self.moments.clear()

    def step(self) -> None:
        """The norm, each gradient in fp32, then all flat, the update."""
        self.norm(max(leaf.numel for leaf in self.order))
        source = "fp16/fused_optimizer.py step"
        total = sum(leaf.numel for leaf in self.order)
        casts = self._wide(source)
        flat = self.new("temporaries", "flat fp32 gradients", "4 P", source, total, 4)
        casts.clear()
        for leaf in self.order:
            leaf.grad = None
        if self.replicated:
            self._masked_norm(total)
        self.update([total])
        del flat

    def _wide(self, source: str) -> list[Tensor]:
        return [
            self.new("temporaries", "each in float32", "4 P", source, leaf.numel, 4) for leaf in self.order
        ]

    def _masked_norm(self, total: int) -> None:
        """Where a copy of a tied weight does not count (runtime/utils.py, get_flattened_grad_norm)."""

        def new(width: int) -> Tensor:
            source = "runtime/utils.py get_flattened_grad_norm"
            return self.new("temporaries", "mask of the norm", "4 P, 4 P, P", source, total, width)

        marks, sums, mask = new(4), new(4), new(1)
        del marks, sums
        masked = new(4)
        del mask, masked
