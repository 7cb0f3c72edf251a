"""A mixture of experts that DeepSpeed's AutoEP trained, under the names of transformers' model.

AutoEP puts a module of its own in the place of a family's (deepspeed/module_inject/auto_ep_layer.py): its
router is ``router``, whose matrix is ``router.gate``, and which may have the family's name as an alias; its
experts are three stacks, w1 the gate, w2 down and w3 up, of which ``engine.save_checkpoint`` writes each
expert's matrices to a file of their own, as ``PREFIX.w1.EXPERT`` (deepspeed/runtime/engine.py,
``_save_moe_checkpoint``). ZeRO 1 and 2 divide the optimizer states of stacks over the replicas of a rank's
experts, whose group has ``moe`` among its settings; ranks that hold a layer's experts together are neighbours
(deepspeed/utils/groups.py, ``_create_expert_and_data_parallel``). Those of ZeRO-0 have no names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dsx.checkpoint.catalog import Entry, Piece, Role
from dsx.checkpoint.formats.deepspeed.cut import ShardLayout
from dsx.checkpoint.formats.deepspeed.files import AUTOEP_LAYERS, StockFiles, config_of
from dsx.checkpoint.formats.deepspeed.flat import OptimizerGroup, OptimizerState, sharded_state
from dsx.checkpoint.formats.torch_file import TensorRef, TorchFile
from dsx.errors import CheckpointError
from dsx.models.param import ITEM_BYTES

_NOT_READ = ("round_robin_gradients", "use_data_before_expert_parallelism")  # other places of states
_MATRICES = ("w1", "w2", "w3")
_ROUTER = "router."
_USUAL_ROUTER = "gate"  # in all of AutoEP's presets


def entries_of(files: StockFiles) -> Iterator[Entry]:
    """Every weight, experts as one stack of gate and up, [experts, 2 width, hidden], and one of down.

    Raises:
        CheckpointError: Of another format, over tensor-parallel ranks or stages, or files that do not fit.
    """
    where = files.models[0, 0].path
    layers = files.first.get(AUTOEP_LAYERS)
    if not isinstance(layers, list) or not layers:
        raise _unread(str(where), "experts of DeepSpeed's MoE layers, which no model of transformers has")
    if files.mesh.tp * files.mesh.pp > 1:
        raise _unread(str(where), "a mixture of experts over tensor-parallel ranks or pipeline stages")
    module, buffers = files.first["module"], set(files.first.get("buffer_names") or ())
    for name, own in _names(module, [str(layer["module_path"]) for layer in layers]).items():
        role: Role = "buffer" if name in buffers else "trained"
        ref = module[name]
        yield Entry(
            name=own, state="weight", shape=ref.shape, dtype=ref.dtype, role=role,
            pieces=(_piece(files.models[0, 0], ref, ()),) if ref.numel else (),
        )  # fmt: skip
    numbers = {int(layer["moe_layer_id"]) for layer in layers}
    extra = next((file for (layer, _), file in files.experts.items() if layer not in numbers), None)
    if extra is not None:
        raise _unfit(extra, f"{where.name} tells of no such layer")
    for layer in layers:
        yield from _stacks(files, layer)


def unread_states(files: StockFiles) -> str | None:
    """What keeps optimizer states of a mixture from being read; None if nothing does."""
    config = config_of(files.first)
    settings = {**config, **(config.get("zero_optimization") or {})}
    told = next((f"with {key}" for key in _NOT_READ if settings.get(key)), None)
    why = told if files.optimizers else "at ZeRO-0, where they have no names,"
    return why and f"optimizer: states of DeepSpeed's mixtures of experts {why} are not read; the weights are"


def states_of(
    files: StockFiles, weights: Iterable[Entry]
) -> tuple[OptimizerState, dict[str, str], list[Entry]]:
    """Groups and numbers of the optimizer, the family's name of each parameter, and every state of each."""
    layers, shapes = files.first[AUTOEP_LAYERS], {entry.name: entry.shape for entry in weights}
    names = _names(files.first["module"], [str(layer["module_path"]) for layer in layers])
    rows: dict[str, int] = {}  # of a stack in the family's
    (ranks,) = {int(layer["ep_size"]) for layer in layers}
    for layer in layers:
        own = int(layer["num_experts"]) // ranks
        if [each["experts"] for each in layer["expert_placement"]["ranks"]] != [
            [*range(at * own, at * own + own)] for at in range(ranks)
        ]:
            raise _unread(str(files.root), "experts that are not dealt out in their order")
        prefix = str(layer["expert_key_prefix"])
        stacks = dict(zip(_MATRICES, ("gate_up_proj", "down_proj", "gate_up_proj"), strict=True))
        names |= {f"{prefix}.{each}": f"{prefix}.{home}" for each, home in stacks.items()}
        rows |= {f"{prefix}.w1": 0, f"{prefix}.w2": 0, f"{prefix}.w3": shapes[names[f"{prefix}.w1"]][1] // 2}
    state = sharded_state(files, 0, {}, ranks)
    held: dict[tuple[str, str, str], list[Piece]] = defaultdict(list)
    for one in state.fragments:
        item = ITEM_BYTES[one.dtype]
        for part in ShardLayout(one.shape).parts(0, one.shape, one.start, one.stop):
            piece = part.at(one.file, one.offset - one.start * item, item)
            if one.name in rows:
                expert, row, column = piece.start
                expert, row = expert + one.expert * one.shape[0], row + rows[one.name]
                piece = replace(piece, start=(expert, row, column))
            held[names[one.name], one.state, one.dtype].append(piece)
    entries = [
        Entry(name=name, state=kind, shape=shapes[name], dtype=dtype, role="trained", pieces=tuple(pieces))
        for (name, kind, dtype), pieces in held.items()
    ]
    return replace(state, groups=_joined(state.groups)), names, entries


def _joined(groups: Iterable[OptimizerGroup]) -> tuple[OptimizerGroup, ...]:
    """The user's groups, of which DeepSpeed has made two each: experts by themselves."""
    found: dict[str, OptimizerGroup] = {}
    for group in groups:
        kept = {key: value for key, value in group.settings.items() if key not in ("moe", "name")}
        before = found.setdefault(repr(kept), replace(group, names=(), settings=kept, numbers={}))
        numbers = {state: {**before.numbers.get(state, {}), **one} for state, one in group.numbers.items()}
        found[repr(kept)] = replace(before, names=(*before.names, *group.names), numbers=numbers)
    return tuple(found.values())


def _names(module: Mapping[str, Any], paths: Iterable[str]) -> dict[str, str]:
    """The family's own name of every tensor of the first model file; aliases of routers are left out."""
    found = {name: name for name, ref in module.items() if isinstance(ref, TensorRef)}
    for path in paths:
        inside = {name.removeprefix(f"{path}.") for name in found if name.startswith(f"{path}.")}
        routed = [name.removeprefix(_ROUTER) for name in inside if name.startswith(_ROUTER)]
        others = sorted({name.partition(".")[0] for name in inside if not name.startswith(_ROUTER)})
        alias = next((one for one in others if {f"{one}.{rest}" for rest in routed} <= inside), None)
        for rest in routed:
            own = f"{path}.{alias or _USUAL_ROUTER}.{rest.removeprefix('gate.')}"
            found[f"{path}.{_ROUTER}{rest}"] = own
            if alias is not None:
                del found[f"{path}.{alias}.{rest}"]
    return found


def _stacks(files: StockFiles, layer: Mapping[str, Any]) -> Iterator[Entry]:
    prefix, count = str(layer["expert_key_prefix"]), int(layer["num_experts"])
    number = int(layer["moe_layer_id"])
    held: list[tuple[TorchFile, dict[str, TensorRef]]] = []
    for expert in range(count):
        file = files.experts.get((number, expert))
        if file is None:
            name = f"layer_{number}_expert_{expert}_mp_rank_00_model_states.pt"
            raise CheckpointError(str(files.root / name), "it is missing", "use all the files of one save")
        found = {each: file.content.get(f"{prefix}.{each}.{expert}") for each in _MATRICES}
        refs = {each: ref for each, ref in found.items() if isinstance(ref, TensorRef)}
        if len(refs) < len(_MATRICES) or len(file.content) > len(_MATRICES):
            raise _unfit(
                file, f"its tensors are not {', '.join(f'{prefix}.{w}.{expert}' for w in _MATRICES)}"
            )
        width, hidden = refs["w1"].shape
        if (refs["w3"].shape, refs["w2"].shape) != ((width, hidden), (hidden, width)):
            raise _unfit(file, f"its matrices are of shapes {[ref.shape for ref in refs.values()]}")
        held.append((file, refs))
    shapes = {refs["w1"].shape for _, refs in held}
    dtypes = {ref.dtype for _, refs in held for ref in refs.values()}
    if len(shapes) > 1 or len(dtypes) > 1:
        what = f"experts of its layer are of shapes {sorted(shapes)} and dtypes {sorted(dtypes)}"
        raise _unfit(held[0][0], what)
    if strays := [one for (at, which), one in files.experts.items() if at == number and which >= count]:
        raise _unfit(strays[0], f"the layer has {count} experts")
    (dtype,) = dtypes
    for name, shape, parts in (
        ("gate_up_proj", (count, 2 * width, hidden), {"w1": 0, "w3": width}),
        ("down_proj", (count, hidden, width), {"w2": 0}),
    ):
        pieces = tuple(
            _piece(file, refs[each], (expert, at, 0))
            for expert, (file, refs) in enumerate(held)
            for each, at in parts.items()
        )
        yield Entry(name=f"{prefix}.{name}", state="weight", shape=shape, dtype=dtype, pieces=pieces)


def _piece(file: TorchFile, ref: TensorRef, start: tuple[int, ...]) -> Piece:
    """A whole tensor of a file: by itself, or with ``start`` as one expert's part of a stack."""
    more = (1,) if start else ()
    place = start or (0,) * len(ref.shape)
    return Piece(file.name, ref.offset, place, (*more, *ref.shape), (*(0 for _ in more), *ref.strides))


def _unread(where: str, what: str) -> CheckpointError:
    return CheckpointError(where, f"{what}: dsx cannot read it", "save with DeepSpeed without them")


def _unfit(file: TorchFile, what: str) -> CheckpointError:
    return CheckpointError(str(file.path), what, "use the files of one save")
