"""What a stock checkpoint that is to be written holds: tensors, groups and steps, in the engine's order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from dsx.checkpoint import plain
from dsx.checkpoint.catalog import NO_SETTINGS, Catalog, Entry, numbers_in
from dsx.checkpoint.pieces import Part, cut_parts, local_parts
from dsx.errors import CheckpointError
from dsx.models.param import ITEM_BYTES, PRECISIONS, ParamSpec
from dsx.parallel.mesh import Coordinates, Mesh
from dsx.parallel.zero import ZeroPlan

_SUB_GROUP_SIZE = 1_000_000_000  # DeepSpeed's own


@dataclass(frozen=True, slots=True, kw_only=True)
class StockLayout:
    """The engine that will load the checkpoint.

    Attributes:
        zero_stage: 0 to 3.
        precision: fp32, bf16 or fp16.
        groups: Names in each optimizer group, in the optimizer's order; the source's if empty.
        bounds: Of a PipelineModule: first layer of every stage, then the number of layers; else empty.
        tied: Of a PipelineModule: (key, layers that use it) of every TiedLayerSpec.
        specs: How tensor parallelism cuts each tensor and pads vocabularies, where that is known; of all
            tensors if ``tp`` is above 1.
    """

    dp: int
    zero_stage: int
    precision: str = "fp32"
    groups: tuple[tuple[str, ...], ...] = ()
    bounds: tuple[int, ...] = ()
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()
    tp: int = 1
    specs: tuple[ParamSpec, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StockPlan:
    """Everything that the files say.

    Attributes:
        blanks: Every entry to be written, without pieces.
        modules: Names in the model's order.
        groups: Names in each optimizer group.
        numbers: The optimizer's states that are one number, ``step`` among them, by name.
        moments: States of the optimizer beside the master, by group.
        stage: Pipeline stage that the names are those of.
        tensor: Tensor-parallel rank whose parts of them it is.
    """

    layout: StockLayout
    facts: Mapping[str, Any]
    blanks: Mapping[tuple[str, str], Entry]
    modules: Sequence[str]
    groups: Sequence[Sequence[str]]
    settings: Sequence[Mapping[str, Any]]
    numbers: Mapping[str, Mapping[str, float]]
    moments: Sequence[Sequence[str]]
    stage: int = 0
    tensor: int = 0
    specs: Mapping[str, ParamSpec] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Catalog, layout: StockLayout) -> StockPlan:
        if layout.precision not in PRECISIONS:
            raise CheckpointError(
                f"precision = {layout.precision}", "DeepSpeed has none such", "use fp32, bf16 or fp16"
            )
        known = {spec.name for spec in layout.specs}
        for entry in source.entries if layout.tp > 1 else ():
            if entry.name not in known:
                raise CheckpointError(
                    f"{source.root}: tensor {entry.name}",
                    f"the checkpoint does not say how tensor parallelism of degree {layout.tp} cuts it",
                    "leave --tensor out, or name a CONFIG of the model",
                )
        held = source.by_key
        saved = source.facts.get("param_groups") or []
        groups = layout.groups or tuple(tuple(group["names"]) for group in saved)
        order = tuple(dict.fromkeys(entry.name for entry in source.entries))
        trained = [name for group in groups for name in group]
        if not trained:
            raise CheckpointError(
                str(source.root),
                "it has no optimizer groups, and DeepSpeed's checkpoints are of an optimizer",
                "load the weights into the model before deepspeed.initialize instead",
            )
        lacking = sorted(set(trained) - {entry.name for entry in source.entries})
        if lacking:
            raise CheckpointError(
                f"{source.root}: tensor {lacking[0]}",
                "the checkpoint does not have it",
                "give the names of the model that will load it",
            )
        _check_settings(source, saved, layout)
        moments = [_moments(source, group) for group in groups]
        blanks: dict[tuple[str, str], Entry] = {}
        weight = PRECISIONS[layout.precision]
        for name in order:
            found = held.get((name, "weight")) or held[name, "master"]
            # Weights of a run of the same precision are what it had them in, some of a family's in fp32.
            kept = found.state == "weight" and source.facts.get("precision") == layout.precision
            dtype = found.dtype if found.role == "buffer" or kept else weight
            blanks[name, "weight"] = replace(found, state="weight", dtype=dtype, pieces=())
        for group, kept in zip(groups, moments, strict=True):
            for name in group:
                blank = replace(blanks[name, "weight"], dtype="float32")
                blanks |= {(name, state): replace(blank, state=state) for state in ("master", *kept)}
        homes = {name: group for group in saved for name in group["names"]}
        return cls(
            layout=layout,
            facts=source.facts,
            blanks=blanks,
            modules=order,
            groups=groups,
            settings=[_settings(homes.get(group[0], {}) if group else {}) for group in groups],
            numbers={name: numbers_in(homes.get(name, {}), name) for name in trained},
            moments=moments,
            specs={spec.name: spec for spec in layout.specs},
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a rank's part of a tensor, padding included."""
        spec = self.specs.get(name)
        return self.blanks[name, "weight"].shape if spec is None else spec.local_shape(self._at)

    def parts(self, name: str, start: int, stop: int) -> tuple[Part, ...]:
        """Elements ``start`` to ``stop`` of a rank's flattened part, as boxes of the tensor; no padding."""
        spec = self.specs.get(name)
        if spec is not None:
            return local_parts(spec, self._at, start, stop)
        return cut_parts(self.shape(name), {}, start, stop)

    @property
    def _at(self) -> Coordinates:
        return Mesh.of(tp=self.layout.tp).at(self.tensor)

    def is_cut(self, name: str) -> bool:
        """Whether each tensor-parallel rank has another part of a tensor."""
        spec = self.specs.get(name)
        return spec is not None and spec.split is not None

    @property
    def mp_rank(self) -> int:
        """The model-parallel rank: pipeline stage slowest, tensor fastest."""
        return self.stage * self.layout.tp + self.tensor

    def zero_keys(self) -> dict[str, Any]:
        """``zero_optimization`` of the engine; the source's decides where everything lies."""
        config = plain.decode(self.facts.get("deepspeed_config", {}), "deepspeed_config")
        saved = config.get("zero_optimization")
        return {**(saved if isinstance(saved, dict) else {}), "stage": self.layout.zero_stage}

    def zero(self) -> ZeroPlan:
        keys, dtype = self.zero_keys(), PRECISIONS[self.layout.precision]
        size = keys.get("sub_group_size")
        return ZeroPlan(
            stage=self.layout.zero_stage,
            dp=self.layout.dp,
            groups=tuple(tuple((name, prod(self.shape(name))) for name in group) for group in self.groups),
            sub_group_size=int(size) if isinstance(size, int | float) else _SUB_GROUP_SIZE,
            # 16 bytes' worth of elements of the model's dtype (stage_1_and_2.py:443)
            alignment=16 // ITEM_BYTES[dtype] if keys.get("parameter_alignment") else 1,
            round_robin=bool(keys.get("round_robin_gradients", False)),
        )

    def config(self) -> dict[str, Any]:
        """``ds_config`` of the engine, the source's if it had one."""
        saved = plain.decode(self.facts.get("deepspeed_config", {}), "deepspeed_config")
        modes = {
            mode: {**(saved.get(mode) or {}), "enabled": self.layout.precision == mode}
            for mode in ("bf16", "fp16")
            if mode in saved or self.layout.precision == mode
        }
        return {**saved, **modes, "zero_optimization": self.zero_keys()}

    @property
    def num_stages(self) -> int:
        return max(1, len(self.layout.bounds) - 1)

    def ranks(self) -> tuple[StockPlan, ...]:
        """The same of every model-parallel rank. Raises CheckpointError as :meth:`stages`."""
        return tuple(
            replace(stage, tensor=tensor) for stage in self.stages() for tensor in range(self.layout.tp)
        )

    def stages(self) -> tuple[StockPlan, ...]:
        """The same of every pipeline stage: first its tied modules, then its layers, as PipelineModule."""
        if not self.layout.bounds:
            return (self,)
        tied = dict(self.layout.tied)
        for name in self.modules:
            layer, _, rest = name.partition(".")
            if not (layer.isdecimal() and int(layer) < self.layout.bounds[-1]) and not (
                layer == "tied_modules" and rest.partition(".")[0] in tied
            ):
                raise CheckpointError(
                    f"tensor {name}",
                    f"it is of none of the pipeline's {self.layout.bounds[-1]} layers and of no tied module "
                    f"of {sorted(tied)}",
                    "name the layers of the pipeline that will load it, and its tied modules",
                )
        return tuple(self._of_stage(stage) for stage in range(self.num_stages))

    def _of_stage(self, stage: int) -> StockPlan:
        low, high = self.layout.bounds[stage], self.layout.bounds[stage + 1]
        shared = sorted(
            (min(at for at in layers if low <= at < high), key)
            for key, layers in self.layout.tied
            if any(low <= at < high for at in layers)
        )
        prefixes = [f"tied_modules.{key}." for _, key in shared] + [f"{layer}." for layer in range(low, high)]
        mine = [name for prefix in prefixes for name in self.modules if name.startswith(prefix)]
        groups = [[name for name in mine if name in set(group)] for group in self.groups]
        if not all(groups) and self.layout.zero_stage:
            raise CheckpointError(
                f"stage {stage} of the pipeline, layers {low} to {high - 1}",
                f"it has no tensor of optimizer group {groups.index([])}, with which DeepSpeed's ZeRO fails",
                "use fewer stages, or ZeRO stage 0",
            )
        return replace(self, modules=mine, groups=groups, stage=stage)

    def flat_order(self) -> list[list[str]]:
        """``param_shapes``: names in flat order, per group or (stage 3) per sub-group."""
        if self.layout.zero_stage == 3:  # the first rank has a part of every parameter
            return [[piece.name for piece in buffer.pieces] for buffer in self.zero().buffers(0)]
        zero = self.zero()
        return [[name for name, _ in zero.in_flat_order(at, group)] for at, group in enumerate(zero.groups)]


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: plain.decode(value, f"{key} of an optimizer group")
        for key, value in group.items()
        if key not in NO_SETTINGS
    }


def _moments(source: Catalog, trained: Sequence[str]) -> list[str]:
    """States of the optimizer, which all tensors of a group must have."""
    by_name: dict[str, set[str]] = {name: set() for name in trained}
    for entry in source.entries:
        if entry.name in by_name and entry.state not in ("weight", "master"):
            by_name[entry.name].add(entry.state)
    every = set().union(*by_name.values())
    for name, states in by_name.items():
        if states != every:
            raise CheckpointError(
                f"{source.root}: tensor {name}",
                f"it has no {', '.join(sorted(every - states))}, which others of its optimizer group have",
                "train it on until every parameter has had a gradient",
            )
    order = ("exp_avg", "exp_avg_sq")
    return [*(state for state in order if state in every), *sorted(every.difference(order))]


def _check_settings(source: Catalog, groups: Sequence[Mapping[str, Any]], layout: StockLayout) -> None:
    """Optimizers take their hyperparameters from the checkpoint, and fail at their next step without."""
    for at, group in enumerate(groups):
        if group.get("use_muon") and layout.zero_stage and (layout.dp > 1 or layout.zero_stage == 3):
            raise CheckpointError(
                f"{source.root}: optimizer group {at} with {group['names'][0]}",
                f"at ZeRO {layout.zero_stage} on {layout.dp} data-parallel ranks DeepSpeed's Muon has its "
                "momentum by whole tensors, which dsx does not write",
                "ask for --data 1 and --zero 1 or 2, or for dsx",
            )
        if group["names"] and not group.keys() - {*NO_SETTINGS, "param_names"}:
            raise CheckpointError(
                f"{source.root}: optimizer group {at} with {group['names'][0]}",
                "it has no learning rate and no other hyperparameter, as DeepSpeed's elastic checkpoints",
                'say them, group by group, in a rules file: {"settings": [{"lr": 0.001, "betas": [...]}]}; '
                "or convert to dsx, whose runs take their config's",
            )
