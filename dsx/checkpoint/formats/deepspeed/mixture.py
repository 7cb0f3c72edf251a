"""Weights of a mixture of experts that DeepSpeed's AutoEP trained, under the names of transformers' model.

AutoEP puts a module of its own in the place of a family's (deepspeed/module_inject/auto_ep_layer.py): its
router is ``router``, whose matrix is ``router.gate``, and which may have the family's name as an alias; its
experts are three stacks, w1 the gate, w2 down and w3 up, of which ``engine.save_checkpoint`` writes each
expert's matrices to a file of their own, as ``PREFIX.w1.EXPERT`` (deepspeed/runtime/engine.py,
``_save_moe_checkpoint``). Optimizer states are divided over an expert's replicas, and are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from dsx.checkpoint.catalog import Entry, Piece, Role
from dsx.checkpoint.formats.deepspeed.files import AUTOEP_LAYERS, StockFiles
from dsx.checkpoint.formats.torch_file import TensorRef, TorchFile
from dsx.errors import CheckpointError

LEFT_BEHIND = "optimizer: states of DeepSpeed's mixtures of experts are not read; the weights are"
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
