"""Who holds what: mesh, stages, parameters and ZeRO stage together. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from dsx.errors import LayoutError
from dsx.models.param import ParamSpec
from dsx.parallel.mesh import Mesh
from dsx.parallel.stages import StageMap
from dsx.parallel.zero import ZeroPlan, part_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """What a rank keeps of its tensor of one parameter, which the spec says by the rank's coordinates.

    Attributes:
        weights: Interval of the flattened tensor that the rank keeps between uses.
        state: Interval of the flattened tensor whose master weights and optimizer state the rank keeps.
    """

    spec: ParamSpec
    weights: tuple[int, int]
    state: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A model laid out over ranks.

    Attributes:
        stages: Layers of every virtual stage; as many pipeline ranks as the mesh.
        params: Every parameter of the model (:func:`dsx.models.params.param_specs`). A tied one is used by
            its own layer and by the last layer, the head.
        dtype: Of the run's weights, by torch's name.
    """

    mesh: Mesh
    stages: StageMap
    params: tuple[ParamSpec, ...]
    zero_stage: int = 0
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.mesh.pp != self.stages.num_ranks:
            raise LayoutError(
                f"mesh axis pp = {self.mesh.pp}",
                f"the stage map is for {self.stages.num_ranks} pipeline ranks",
                "make both for the same pipeline degree",
            )
        at = self.mesh.at()
        for spec in self.params:
            self.stages.stage_of(spec.layer)
            spec.local_shape(at)

    def owners(self, spec: ParamSpec) -> tuple[int, ...]:
        """Pipeline ranks that hold ``spec``: one, or two for a weight tied across the pipeline."""
        return tuple(sorted({self.stages.rank_of(self.stages.stage_of(layer)) for layer in self.users(spec)}))

    def users(self, spec: ParamSpec) -> list[int]:
        """Layers that use ``spec``: its own, and the last one if it is tied."""
        return [spec.layer] if spec.tie is None else [spec.layer, self.stages.num_layers - 1]

    def params_of(self, pp_rank: int) -> tuple[ParamSpec, ...]:
        """Parameters of a pipeline rank, in layer order."""
        held = set(self.stages.layers_of(pp_rank))
        last = self.stages.num_layers - 1 in held
        return tuple(spec for spec in self.params if spec.layer in held or (last and spec.tie is not None))

    def local_parameters(self, pp_rank: int) -> int:
        """Elements on one rank of ``pp_rank`` before ZeRO, after the tensor-parallel cut and padding.

        A tied table counts on every pipeline rank that holds a layer of it.
        """
        at = self.mesh.at()
        return sum(prod(spec.local_shape(at)) for spec in self.params_of(pp_rank))

    def zero_plan(self, pp_rank: int) -> ZeroPlan:
        """ZeRO's cut of a pipeline rank's trained parameters, for dsx's own optimizer groups.

        There is one group, in layer order, and one of experts after it, then both of what stays in fp32.
        ZeRO-1 and 2 cut a group as one flat tensor, so there a weight that is tied across pipeline ranks has
        a group of its own behind them, which both its holders cut alike.
        """
        kinds: dict[tuple[bool, bool], list[tuple[str, int]]]
        kinds = {(wide, shared): [] for wide, shared in product((False, True), repeat=2)}
        tied: list[tuple[str, int]] = []
        at = self.mesh.at()
        for spec in self.params_of(pp_rank):
            if not spec.trained:
                continue
            alone = self.zero_stage in (1, 2) and len(self.owners(spec)) > 1
            shared = spec.experts is not None and self.mesh.ep > 1
            kind = spec.dtype_in(self.dtype) != self.dtype, shared
            (tied if alone else kinds[kind]).append((spec.name, prod(spec.local_shape(at))))
        groups = tuple(tuple(group) for group in (*kinds.values(), *([item] for item in tied)) if group)
        experts = {group[0] for (_, shared), group in kinds.items() if shared and group}
        return ZeroPlan(
            stage=self.zero_stage,
            dp=self.mesh.num_replicas,
            groups=groups,
            experts_over=self.mesh.ep,
            experts=frozenset(at for at, group in enumerate(groups) if group[0] in experts),
        )

    def holdings(self, rank: int) -> tuple[Holding, ...]:
        """Every parameter that ``rank`` holds a share of, in layer order."""
        at = self.mesh.at(rank)
        _, pp_rank = at.along("pp")
        plan, replica = self.zero_plan(pp_rank), self.mesh.replica(rank)
        weights, state = plan.weights(replica), plan.state(replica)

        def frozen(spec: ParamSpec) -> tuple[int, int]:
            numel, experts = prod(spec.local_shape(at)), spec.experts is not None
            its = self.mesh.replicas(experts=experts), self.mesh.replica_of(rank, experts=experts)
            return part_of(numel, *its) if self.zero_stage == 3 else (0, numel)

        return tuple(
            Holding(
                spec=spec,
                weights=weights[spec.name] if spec.trained else frozen(spec),
                state=state[spec.name] if spec.trained else (0, 0),
            )
            for spec in self.params_of(pp_rank)
        )
