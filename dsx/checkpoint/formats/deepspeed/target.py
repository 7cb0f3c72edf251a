"""Stock DeepSpeed checkpoints to be written: what ``engine.load_checkpoint`` of deepspeed 0.19.8 reads back.

A plain engine at ZeRO 0 to 3 or a PipelineModule at ZeRO 0 or 1, both with tensor parallelism where it is
known how that cuts each tensor.
DeepSpeed finds optimizer state by position alone, so the order of the parameters in each optimizer group must
be that of the engine that will load it: by default the order in which the source lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from dsx.checkpoint import plain
from dsx.checkpoint.catalog import (
    NO_SETTINGS,
    Catalog,
    Entry,
    Piece,
    Skeleton,
    Target,
    left_behind,
    numbers_in,
)
from dsx.checkpoint.formats.deepspeed.cut import UNIVERSAL_INFO, cut_info
from dsx.checkpoint.formats.deepspeed.files import OUTER
from dsx.checkpoint.formats.deepspeed.reader import FORMAT
from dsx.checkpoint.formats.torch_file import Global, PickledObject
from dsx.checkpoint.formats.torch_target import Call, Hole, Ordered, number, size_of, torch_skeleton
from dsx.checkpoint.pieces import Part, cut_parts, local_parts
from dsx.errors import CheckpointError
from dsx.models.param import ITEM_BYTES, PRECISIONS, ParamSpec
from dsx.parallel.mesh import Coordinates, Mesh
from dsx.parallel.zero import Buffer, ZeroPlan, part_numel, part_of

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


_LOSS_SCALE: Mapping[str, Any] = {
    "cur_scale": 65536,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dynamic": True,
}


def scaler(plan: StockPlan) -> dict[str, Any]:
    """The loss scaler's keys of an optimizer's file."""
    module = "deepspeed.runtime.fp16.loss_scaler"
    fixed = _fixed_scale(plan)
    if fixed is None:
        state = {**_loss_scale(plan), "dtype": Global("torch", "float16")}
        made = PickledObject(f"{module}.DynamicLossScaler", (), state)
        return {"loss_scaler": made, "dynamic_loss_scale": True, "overflow": False}
    made = PickledObject(f"{module}.LossScaler", (), {"cur_scale": fixed, "dynamic": False})
    return {"loss_scaler": made, "dynamic_loss_scale": False, "overflow": False}


def _fixed_scale(plan: StockPlan) -> float | None:
    """The scale that no overflow changes: 1 but in fp16, and there the source's; None for a dynamic one."""
    if plan.layout.precision != "fp16":
        return 1.0
    saved = plan.facts.get("loss_scale") or {}
    is_fixed = saved.get("dynamic", saved.get("dynamic_loss_scale")) is False
    return float(saved["cur_scale"]) if is_fixed and "cur_scale" in saved else None


def _loss_scale(plan: StockPlan) -> dict[str, Any]:
    """The source's dynamic loss scale, or DeepSpeed's first (runtime/fp16/loss_scaler.py)."""
    saved = plan.facts.get("loss_scale") or {}
    known = saved if saved.get("dynamic") or saved.get("dynamic_loss_scale") else {}
    scale = {key: value for key, value in known.items() if key in _LOSS_SCALE}
    return {**_LOSS_SCALE, "cur_iter": int(plan.facts.get("step", 0)), **scale}


def unfused_scale(plan: StockPlan) -> dict[str, Any]:
    """The loss scaler's keys of FP16_UnfusedOptimizer."""
    fixed = _fixed_scale(plan)
    if fixed is not None:
        return {"dynamic_loss_scale": False, "cur_scale": fixed, "cur_iter": int(plan.facts.get("step", 0))}
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    return {"dynamic_loss_scale": True, **{key: _loss_scale(plan)[key] for key in keys}}


class Files:
    """The files so far, and what lies where in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.skeletons: list[Skeleton] = []
        self._pieces: dict[tuple[str, str], list[Piece]] = {}
        self._blanks: dict[tuple[str, str], Entry] = {}
        self._copies: dict[str, list[int]] = {}

    def begin(self, plan: StockPlan) -> None:
        """What follows is of another rank. Copies of what earlier ranks have are replicas."""
        for name in plan.modules:
            stages = self._copies.setdefault(name, [])
            if plan.stage not in stages:
                stages.append(plan.stage)

    def add(self, name: str, content: Any, held: Sequence[StockShare]) -> None:
        """Add a file, and the entries that fill the holes in it."""
        self.skeletons.append(torch_skeleton(name, content))
        for share in held:
            key = share.entry.key
            self._blanks[key] = share.entry
            pieces = self._pieces.setdefault(key, [])
            origin = share.hole.offset + (share.offset - share.start) * share.entry.item_bytes
            for part in share.plan.parts(key[0], share.start, share.stop):
                pieces.append(part.at(name, origin, share.entry.item_bytes, self._replica(share)))

    def _replica(self, share: StockShare) -> int:
        """Number of a copy: of a tensor that is cut, all tensor-parallel ranks' parts make one."""
        plan, name = share.plan, share.entry.name
        copy = self._copies[name].index(plan.stage) if share.copy is None else share.copy
        return copy if plan.is_cut(name) else copy * plan.layout.tp + plan.tensor

    def entries(self) -> tuple[Entry, ...]:
        return tuple(replace(blank, pieces=tuple(self._pieces[key])) for key, blank in self._blanks.items())


@dataclass(frozen=True, slots=True)
class StockShare:
    """Elements ``start`` to ``stop`` of a rank's flattened local tensor at element ``offset`` of a hole.

    ``copy`` numbers the copies that one tensor-parallel rank has; by default one per stage.
    """

    plan: StockPlan
    entry: Entry
    hole: Hole
    start: int
    stop: int
    offset: int
    copy: int | None = None


def whole_share(plan: StockPlan, entry: Entry, copy: int | None = None) -> StockShare:
    """A rank's part of a tensor, in a hole of its own."""
    shape = plan.shape(entry.name)
    return StockShare(plan, entry, Hole(entry.dtype, shape), 0, prod(shape), 0, copy)


VERSION = "0.19.8"


def target_of(source: Catalog, root: Path, layout: StockLayout) -> Target:
    """A stock checkpoint with everything that ``source`` has, under the source's names."""
    whole_plan = StockPlan.of(source, layout)
    if layout.bounds and (layout.zero_stage > 1 or (layout.zero_stage == 0 and layout.precision == "bf16")):
        raise CheckpointError(
            f"zero = {layout.zero_stage}, precision = {layout.precision}, in a pipeline",
            "DeepSpeed's PipelineEngine has no ZeRO 2 and 3, and does not load what it saves at 0 in bf16",
            "use ZeRO 1: --zero 1",
        )
    files = Files(root)
    for plan in whole_plan.ranks():
        files.begin(plan)
        if layout.zero_stage == 0:
            _write_plain(plan, files)
            continue
        for rank in range(layout.dp):
            _write_optimizer(plan, files, rank)
        for rank in range(layout.dp if layout.zero_stage == 3 else 1):
            write_model(plan, files, rank)
    for tensor in range(layout.tp) if layout.bounds else ():
        _write_layers(replace(whole_plan, tensor=tensor), files)
    target = tag_of(source, files, root, FORMAT)
    # Everything has its place, but what DeepSpeed makes of something else as it loads.
    held, stage = target.catalog.by_key, whole_plan.layout.zero_stage
    for (name, state), blank in whole_plan.blanks.items():
        from_master = state == "weight" and stage == 3 and blank.role == "trained"
        is_weight = state == "master" and stage == 0 and whole_plan.layout.precision == "fp32"
        if (name, state) not in held and not from_master and not is_weight and blank.numel:
            raise CheckpointError(
                f"{target.catalog.root}: {blank}",
                "no file of such an engine has a place for it: it would be lost",
                "name the layers of the pipeline that will load it, and its tied modules (--tied)",
            )
    return target


def tag_of(source: Catalog, files: Files, root: Path, form: str) -> Target:
    """The checkpoint that ``files`` make, of one of DeepSpeed's two forms."""
    random = "The ranks' random states stay behind: DeepSpeed's checkpoints have no place for them."
    return Target(
        catalog=Catalog(root=root, format=form, entries=files.entries(), facts=source.facts),
        skeletons=tuple(files.skeletons),
        dropped=(*([random] if source.facts.get("random_files") else []), *left_behind(source.facts)),
        is_tag=True,
    )


def _write_optimizer(plan: StockPlan, files: Files, rank: int) -> None:
    zero = plan.zero()
    buffers = zero.buffers(rank)
    flat = _flat_stage3 if plan.layout.zero_stage == 3 else _flat_stages12
    shares: list[StockShare] = []
    states: dict[int, dict[str, Any]] = {}
    masters: list[Hole] = []
    for at, buffer in enumerate(buffers):
        padding = 0 if plan.layout.zero_stage == 3 else _tail(zero, buffer, rank)
        holes = {"master": Hole("float32", (buffer.numel - padding,))}
        holes |= {state: Hole("float32", (buffer.numel,)) for state in plan.moments[buffer.group]}
        for state, hole in holes.items():
            shares += [
                StockShare(plan, plan.blanks[piece.name, state], hole, piece.start, piece.stop, piece.offset)
                for piece in buffer.pieces
            ]
        masters.append(holes.pop("master"))
        states[at] = {**_numbers(plan, _one_of(plan, buffer)), **holes}
    mine = [[at for at, buffer in enumerate(buffers) if buffer.group == g] for g in range(len(plan.groups))]
    base = {"state": states, "param_groups": group_settings(plan, mine)}
    content = {
        "optimizer_state_dict": flat(plan, zero, rank, base, masters),
        "ds_config": plan.config(),
        "ds_version": VERSION,
    }
    prefix = "bf16_" if plan.layout.precision == "bf16" else ""
    files.add(f"{prefix}zero_pp_rank_{rank}_mp_rank_{plan.mp_rank:02d}_optim_states.pt", content, shares)


def _one_of(plan: StockPlan, buffer: Buffer) -> str | None:
    """A parameter whose numbers are those of a flat buffer, which is one parameter to the optimizer."""
    group = plan.groups[buffer.group]
    names = [piece.name for piece in buffer.pieces] if plan.layout.zero_stage == 3 else group
    first = next(iter(names or group), None)
    other = next((name for name in names if plan.numbers[name] != plan.numbers[str(first)]), None)
    if other is not None:
        raise CheckpointError(
            f"tensors {first} and {other}",
            f"the optimizer has {plan.numbers[str(first)]} for one and {plan.numbers[other]} for the other; "
            f"at ZeRO {plan.layout.zero_stage} there is one for all tensors in a flat buffer",
            "ask for ZeRO 0, or put them into optimizer groups of their own",
        )
    return first


def _tail(zero: ZeroPlan, buffer: Buffer, rank: int) -> int:
    """Elements of a rank's part that lie after the group's last parameter (stage_1_and_2.py:541)."""
    end = max(
        (rank_at * buffer.numel + piece.offset + piece.stop - piece.start)
        for rank_at in range(zero.dp)
        for piece in zero.buffers(rank_at)[buffer.group].pieces
    )
    return min(buffer.numel, max(0, (rank + 1) * buffer.numel - end))


def clipping(plan: StockPlan) -> dict[str, Any]:
    """The clipping that the source was trained with; where that is not known, the loading engine's own stays.

    DeepSpeed takes it from the checkpoint over its own config (stage_1_and_2.py, ``_load_global_state``).
    """
    told = plan.config().get("gradient_clipping")
    return {} if told is None else {"clip_grad": float(told)}


def _flat_stages12(
    plan: StockPlan, zero: ZeroPlan, rank: int, base: dict[str, Any], masters: list[Hole]
) -> dict[str, Any]:
    """``DeepSpeedZeroOptimizer.state_dict``."""
    buffers = zero.buffers(rank)
    return {
        **scaler(plan),
        **clipping(plan),
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
        "zero_stage": stage_of(plan),
        "group_paddings": [_tail(zero, buffer, rank) for buffer in buffers],
        "param_alignment_paddings": [_alignment(zero, at) for at in range(len(plan.groups))],
        "partition_count": [plan.layout.dp] * len(plan.groups),
        "ds_version": VERSION,
        "param_slice_mappings": [
            Ordered(
                {
                    name: PickledObject(
                        "deepspeed.utils.tensor_fragment.fragment_address",
                        (),
                        {"numel": piece.stop - piece.start, "start": piece.offset},
                    )
                    for name in plan.groups[buffer.group]
                    for piece in buffer.pieces
                    if piece.name == name
                }
            )
            for buffer in buffers
        ],
    }


def _flat_stage3(
    plan: StockPlan, zero: ZeroPlan, _: int, base: dict[str, Any], masters: list[Hole]
) -> dict[str, Any]:
    """``DeepSpeedZeroOptimizer_Stage3._rigid_state_dict``."""
    return {
        "zero_stage": stage_of(plan),
        **scaler(plan),
        "partition_count": zero.dp,
        "optimizer_state_dict": base,
        "fp32_flat_groups": masters,
    }


def _alignment(zero: ZeroPlan, at: int) -> list[int]:
    """Padding after each parameter of a group, in flat order, that brings the next one to the alignment."""
    order = zero.in_flat_order(at, zero.groups[at])
    return [-numel % zero.alignment for _, numel in order[:-1]] + [0] * bool(order)


def write_model(plan: StockPlan, files: Files, rank: int, more: Mapping[str, Any] | None = None) -> None:
    """The model file of a data-parallel rank, with further keys ``more``."""
    stage = plan.layout.zero_stage
    sharded = stage == 3
    frozen = [name for name in plan.modules if plan.blanks[name, "weight"].role == "frozen"]
    shares: list[StockShare] = []
    module: dict[str, Hole] = {}
    for name in () if plan.layout.bounds else plan.modules:
        entry = plan.blanks[name, "weight"]
        if sharded and entry.role != "buffer":
            module[name] = Hole(entry.dtype, (0,))
        else:
            share = whole_share(plan, entry)
            module[name] = share.hole
            shares += [share] if rank == 0 else []
        module.update(dict.fromkeys(entry.aliases, module[name]))
    parts: dict[str, Hole] = {}
    for name in frozen if stage >= 2 else ():
        entry, numel = plan.blanks[name, "weight"], prod(plan.shape(name))
        start, stop = part_of(numel, plan.layout.dp, rank)
        hole = Hole(entry.dtype, (part_numel(numel, plan.layout.dp),) if sharded else plan.shape(name))
        parts[name] = hole if sharded else module[name]
        shares += [StockShare(plan, entry, hole, start, stop, 0)] if sharded and start < stop else []
    content = _common(plan, Ordered(module)) | {
        "param_shapes": _shapes(plan, plan.flat_order()),
        "frozen_param_shapes": None
        if stage < 2
        else Ordered({name: size_of(plan.shape(name)) for name in frozen}),
        "shared_params": {
            alias: name
            for name in (() if plan.layout.bounds else plan.modules)
            for alias in plan.blanks[name, "weight"].aliases
        },
        "frozen_param_fragments": None if stage < 2 else Ordered(parts),
    }
    prefix = f"zero_pp_rank_{rank}_" if sharded else ""
    files.add(f"{prefix}mp_rank_{plan.mp_rank:02d}_model_states.pt", content | dict(more or {}), shares)


def _shapes(plan: StockPlan, groups: Sequence[Sequence[str]]) -> list[Ordered]:
    """``param_shapes``. DeepSpeed writes none without ZeRO, and minds none: there it is for dsx's reader."""
    return [Ordered({name: size_of(plan.shape(name)) for name in group}) for group in groups]


def _write_plain(plan: StockPlan, files: Files) -> None:
    """Without ZeRO: one file; in bf16 the form of FP16_UnfusedOptimizer."""
    stored = () if plan.layout.bounds else plan.modules
    module = {name: whole_share(plan, plan.blanks[name, "weight"]) for name in stored}
    shares = list(module.values())
    names = [name for group in plan.groups for name in group]
    states: dict[int, dict[str, Any]] = {}
    moments = [kept for group, kept in zip(plan.groups, plan.moments, strict=True) for _ in group]
    for at, name in enumerate(names):
        held = {state: whole_share(plan, plan.blanks[name, state]) for state in moments[at]}
        shares += held.values()
        states[at] = {**_numbers(plan, name), **{state: share.hole for state, share in held.items()}}
    ends = [sum(map(len, plan.groups[:at])) for at in range(len(plan.groups) + 1)]
    numbers = [list(range(ends[at], ends[at + 1])) for at in range(len(plan.groups))]
    optimizer: dict[str, Any] = {"state": states, "param_groups": group_settings(plan, numbers)}
    if plan.layout.precision != "fp32":
        masters = [
            [whole_share(plan, plan.blanks[name, "master"]) for name in group] for group in plan.groups
        ]
        shares += [share for group in masters for share in group]
        holes = [[share.hole for share in group] for group in masters]
        optimizer = {**unfused_scale(plan), "optimizer_state_dict": optimizer, "fp32_groups": holes}
    weights = {name: share.hole for name, share in module.items()}
    for name in stored:
        weights.update(dict.fromkeys(plan.blanks[name, "weight"].aliases, weights[name]))
    files.add(
        f"mp_rank_{plan.mp_rank:02d}_model_states.pt",
        _common(plan, Ordered(weights))
        | {"optimizer": optimizer, "param_shapes": _shapes(plan, plan.groups)},
        shares,
    )


def _write_layers(plan: StockPlan, files: Files) -> None:
    """A PipelineModule's layers; of a tied module, every layer that saves it (module.py, save_state_dict)."""
    tied = {layer: f"tied_modules.{key}." for key, layers in plan.layout.tied for layer in layers}
    files.begin(plan)
    seen: dict[str, int] = {}
    suffix = f"-model_{plan.tensor:02d}" if plan.layout.tp > 1 else ""
    for layer in range(plan.layout.bounds[-1]):
        prefix = tied.get(layer, f"{layer}.")
        shares: dict[str, StockShare] = {}
        for name in plan.modules:
            entry, path = plan.blanks[name, "weight"], name.removeprefix(prefix)
            saves = f"{layer}.{path}" in entry.aliases or (not entry.aliases and name not in seen)
            if name.startswith(prefix) and (layer not in tied or saves):
                shares[path] = whole_share(plan, entry, seen.get(name, 0))
                seen[name] = seen.get(name, 0) + 1
        if shares:
            content = Ordered({path: share.hole for path, share in shares.items()})
            files.add(f"layer_{layer:02d}{suffix}-model_states.pt", content, list(shares.values()))


def _common(plan: StockPlan, module: Ordered) -> dict[str, Any]:
    """``DeepSpeedEngine._common_checkpoint_state``, and the client's state."""
    counters = plan.facts.get("counters", {})
    scheduler = plan.facts.get("lr_scheduler")
    client, outer = plain.decode(plan.facts.get("client_state", {}), "client_state"), plan.facts.get("outer")
    return {
        "module": None if plan.layout.bounds else module,
        "buffer_names": [name for name in plan.modules if plan.blanks[name, "weight"].role == "buffer"],
        "optimizer": None,
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": None,
        "frozen_param_fragments": None,
        "lr_scheduler": None if scheduler is None else plain.decode(scheduler, "lr_scheduler"),
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": int(counters.get("skipped_steps", 0)),
        "global_steps": int(plan.facts.get("step", 0)),
        "global_samples": int(counters.get("global_samples", 0)),
        "dp_world_size": plan.layout.dp,
        "mp_world_size": plan.num_stages * plan.layout.tp,
        "checkpoint_parallel_dimensions": {"pp_degree": plan.num_stages, "tp_degree": plan.layout.tp},
        "ds_config": plan.config(),
        "ds_version": VERSION,
        **({UNIVERSAL_INFO: cuts} if (cuts := cut_info(plan.layout.specs)) else {}),
        **({} if outer is None else {OUTER: plain.decode(outer, "outer")}),
        **client,
    }


def stage_of(plan: StockPlan) -> Call:
    """The ZeRO stage, as DeepSpeed's enum."""
    return Call(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (plan.layout.zero_stage,))


def group_settings(plan: StockPlan, numbers: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    """``param_groups``, each with the numbers of its parameters."""
    pairs = zip(plan.settings, numbers, strict=True)
    return [{**settings, "params": list(mine)} for settings, mine in pairs]


def _numbers(plan: StockPlan, name: str | None) -> dict[str, Any]:
    """The step count and its like, in a tensor per parameter as torch's optimizers have them."""
    held = plan.numbers.get(name, {}) if name is not None and any(plan.moments) else {}
    return {state: number(one) for state, one in held.items()}
