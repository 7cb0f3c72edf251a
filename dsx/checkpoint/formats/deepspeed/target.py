"""Stock DeepSpeed checkpoints to be written: what ``engine.load_checkpoint`` of deepspeed 0.19.8 reads back.

A plain engine at ZeRO 0 to 3 or a PipelineModule at ZeRO 0 or 1, both with tensor parallelism where it is
known how that cuts each tensor.
DeepSpeed finds optimizer state by position alone, so the order of the parameters in each optimizer group must
be that of the engine that will load it: by default the order in which the source lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from dsx.checkpoint import plain
from dsx.checkpoint.catalog import Catalog, Entry, Piece, Skeleton, Target, left_behind
from dsx.checkpoint.formats.deepspeed.cut import UNIVERSAL_INFO, cut_info
from dsx.checkpoint.formats.deepspeed.files import OUTER
from dsx.checkpoint.formats.deepspeed.plan import StockLayout, StockPlan
from dsx.checkpoint.formats.deepspeed.reader import FORMAT
from dsx.checkpoint.formats.torch_file import Global, PickledObject
from dsx.checkpoint.formats.torch_target import Call, Hole, Ordered, number, size_of, torch_skeleton
from dsx.errors import CheckpointError
from dsx.parallel.zero import Buffer, ZeroPlan, part_numel, part_of

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
