"""Optimizer state of stock checkpoints without ZeRO: whole tensors, by number and without names.

In fp32 it is the state dict of the optimizer. In half precision DeepSpeed's FP16_Optimizer keeps the masters
beside it, as a list of tensors per group (``fp32_groups``); or, with fused optimizers, as one flat buffer per
group, whose parameters have neither names nor shapes and which is refused.
(deepspeed/runtime/fp16/fused_optimizer.py, unfused_optimizer.py.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dsx.checkpoint.catalog import unusable
from dsx.checkpoint.file_io import crc32_of_zeros
from dsx.checkpoint.formats.deepspeed.cut import Rules
from dsx.checkpoint.formats.deepspeed.files import StockFiles
from dsx.checkpoint.formats.deepspeed.flat import Fragment, OptimizerGroup, OptimizerState, numbers_of, whole
from dsx.checkpoint.formats.deepspeed.module import Module, layer_prints
from dsx.checkpoint.formats.deepspeed.order import ZEROS, assign, stage_names
from dsx.checkpoint.formats.torch_file import FileStorage, TensorRef, TorchFile
from dsx.errors import CheckpointError

_NOTHING = OptimizerState((), ())


def plain_states(files: StockFiles, modules: Mapping[int, Module], rules: Rules) -> dict[int, OptimizerState]:
    """Optimizer state by model-parallel rank, with names found by order and shape."""
    if all(not files.models[rank, 0].content.get("optimizer") for rank in files.ranks):
        return dict.fromkeys(files.ranks, _NOTHING)
    saved = {rank: _parts(files.models[rank, 0]) for rank in files.ranks}
    found: dict[int, OptimizerState] = {}
    for tensor in files.shards:
        mine = files.stages_of(tensor)
        groups = [saved[rank].groups for rank in mine]
        told = [
            _told(files.models[rank, 0], saved[rank], modules[tensor if files.layers else rank])
            for rank in mine
        ]
        named: Sequence[Sequence[Sequence[str]] | None]
        if None not in told:
            named = told
        elif files.layers:
            prints = [_prints(files.models[rank, 0], saved[rank]) for rank in mine]
            same = Counter(layer_prints(files).values())
            named = stage_names(
                modules[tensor].order,
                groups,
                str(files.root),
                rules.groups,
                prints,
                rules.ties,
                twins=frozenset(at for at, told in layer_prints(files).items() if same[told] > 1),
            )
        else:
            named = [
                assign(modules[rank].order, saved[rank].groups, str(files.models[rank, 0].path), rules.groups)
                for rank in mine
            ]
        for rank, names in zip(mine, named, strict=True):
            if names is None:
                raise CheckpointError(
                    f"{files.models[rank, 0].path}: optimizer",
                    "its states have no names, and shapes that no order of the model's parameters has",
                    "use the files of one save; if an optimizer group lists its parameters in another order, "
                    'train it on for one step with "zero_optimization": {"stage": 1}, which writes names',
                )
            found[rank] = _state(files.models[rank, 0], saved[rank], names)
    return found


@dataclass(frozen=True, slots=True)
class _Saved:
    """The torch optimizer's state dict, DeepSpeed's masters by group, and the shapes of every group."""

    state: Mapping[int, Mapping[str, Any]]
    param_groups: Sequence[Mapping[str, Any]]
    masters: Sequence[Sequence[TensorRef]]
    groups: Sequence[Sequence[tuple[int, ...] | None]]


def _prints(file: TorchFile, saved: _Saved) -> list[list[Any]]:
    """For every parameter the CRC32s of its states, where the file has them; ZEROS where nothing else is."""
    found = []
    for settings in saved.param_groups:
        states = [saved.state.get(number, {}) for number in settings["params"]]
        refs = [
            [ref for key, ref in state.items() if isinstance(ref, TensorRef) and ref.shape]
            for state in states
        ]
        found.append([_print([file.storages[ref.storage] for ref in one]) for one in refs])
    return found


def _print(storages: Sequence[FileStorage]) -> Any:
    if not storages or any(one.crc32 is None for one in storages):
        return None
    if all(one.crc32 == crc32_of_zeros(one.stop - one.start) for one in storages):
        return ZEROS
    return tuple(one.crc32 for one in storages)


def _state(file: TorchFile, saved: _Saved, names: Sequence[Sequence[str]]) -> OptimizerState:
    fragments: list[Fragment] = []
    found = []
    for place, (settings, mine) in enumerate(zip(saved.param_groups, names, strict=True)):
        numbers: dict[str, dict[str, float]] = defaultdict(dict)
        for at, name in enumerate(mine):
            held = saved.state.get(settings["params"][at], {})
            shape = saved.groups[place][at]  # other states are one number, such as ``step``
            refs = {key: ref for key, ref in held.items() if isinstance(ref, TensorRef) and key != "step"}
            tensors = {key: ref for key, ref in refs.items() if ref.shape or not shape}
            rest = {key: value for key, value in held.items() if key not in tensors}
            for state, number in numbers_of(rest, settings, file).items():
                numbers[state][name] = number
            if saved.masters:
                fragments.append(whole(saved.masters[place][at], file, name, "master"))
            fragments += [whole(ref, file, name, str(key)) for key, ref in tensors.items()]
        kept = {key: value for key, value in settings.items() if key != "params"}
        found.append(OptimizerGroup(names=tuple(mine), settings=kept, file=file, numbers=numbers))
    return OptimizerState(tuple(fragments), tuple(found))


def _told(file: TorchFile, saved: _Saved, module: Module) -> list[list[str]] | None:
    """Names that the file itself gives: dsx's in ``param_shapes``, torch's of optimizers made with names."""
    shapes = file.content.get("param_shapes")
    groups = shapes if isinstance(shapes, list) else [one.get("param_names") for one in saved.param_groups]
    found = [[str(name) for name in group] for group in groups if isinstance(group, dict | list)]
    if [len(group) for group in found] != [len(group) for group in saved.groups]:
        return None
    fit = (
        name in module.order and shape in (None, module.order[name])
        for group, held in zip(found, saved.groups, strict=True)
        for name, shape in zip(group, held, strict=True)
    )
    return found if all(fit) else None


def _parts(file: TorchFile) -> _Saved:
    saved = file.content.get("optimizer")
    inner = saved.get("optimizer_state_dict", saved) if isinstance(saved, dict) else None
    if not isinstance(inner, dict) or not isinstance(inner.get("state"), dict):
        raise unusable(str(file.path), "an optimizer of unknown form")
    masters = saved.get("fp32_groups") or saved.get("fp32_groups_flat") or []
    groups: list[list[tuple[int, ...] | None]] = []
    for place, settings in enumerate(inner["param_groups"]):
        if masters and isinstance(masters[place], TensorRef):
            raise CheckpointError(
                str(file.path),
                "one flat buffer of fp32 weights per group, whose parameters have neither names nor shapes",
                'train it on for one step with "zero_optimization": {"stage": 1}, which writes names',
            )
        if masters:
            groups.append([ref.shape for ref in masters[place]])
        else:
            groups.append([_shape(inner["state"].get(number, {})) for number in settings["params"]])
    return _Saved(inner["state"], inner["param_groups"], masters, groups)


def _shape(state: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Shape of a parameter, by its state; None where it has none."""
    shapes = [ref.shape for key, ref in state.items() if isinstance(ref, TensorRef) and key != "step"]
    return max(shapes, key=lambda shape: (prod(shape), len(shape))) if shapes else None
