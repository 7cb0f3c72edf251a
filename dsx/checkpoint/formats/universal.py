"""DeepSpeed's universal checkpoints, as ``ds_to_universal.py`` of deepspeed 0.19.8 writes them, as a catalog.

``zero/<parameter>/<state>.pt`` holds one state of one whole parameter, as a tensor (from ZeRO-3, and flat) or
as ``{"param": tensor, "cat_dim": ...}``; ``zero/optimizer_state.pt`` the hyperparameters; the model files of
the checkpoint that it was made from lie beside. Those alone have what DeepSpeed's own loading forgets: frozen
parameters and buffers. A folder ``tmp`` is what an interrupted conversion leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from dsx.checkpoint import store
from dsx.checkpoint.catalog import ITEM_BYTES, Catalog, Entry, Piece
from dsx.checkpoint.formats.deepspeed_facts import facts_of
from dsx.checkpoint.formats.deepspeed_files import StockFiles, open_stock
from dsx.checkpoint.formats.deepspeed_flat import Fragment, Group, OptimizerState
from dsx.checkpoint.formats.deepspeed_module import Module, modules_of
from dsx.checkpoint.formats.deepspeed_numbers import number_of, numbers_of
from dsx.checkpoint.formats.torch_file import TorchFile, read_torch_file
from dsx.checkpoint.formats.unpickle import TensorRef
from dsx.checkpoint.pieces import Part, contiguous, interval_boxes
from dsx.errors import CheckpointError

FORMAT = "universal"
FOLDER, COMMON = store.UNIVERSAL_FILE.split("/")
NUMBERS = "dsx_numbers"  # the optimizer's numbers beside step, by tensor, where dsx wrote the checkpoint
_AGAIN = "convert it again, into a new folder"


def looks_universal(root: Path) -> bool:
    """Whether a folder has a universal checkpoint's files."""
    return (root / FOLDER / COMMON).is_file()


def catalog_of(root: Path) -> Catalog:
    """What a universal checkpoint holds.

    Raises:
        CheckpointError: It is the rest of an interrupted conversion, a file is missing or damaged, or a
            tensor's shape is nowhere to be found.
    """
    for left in (root / "tmp", root / FOLDER / "tmp"):
        if left.is_dir():
            raise CheckpointError(
                str(left),
                "its conversion was interrupted, or told to keep this folder (--keep_temp_folder)",
                f"if you know that it came to its end, remove the folder tmp; else {_AGAIN}",
            )
    files = open_stock(root, universal=True)
    module = modules_of(files)[0] if files.pp * files.tp == 1 else None
    shapes = _shapes(files)
    held = list(_parameters(root))
    common = read_torch_file(root, f"{FOLDER}/{COMMON}")
    entries = list(_entries(root, held, shapes, module, files.tp))
    trained = {entry.name for entry in entries if entry.role == "trained"}
    lost = sorted(set(shapes) - trained)
    if lost:
        raise CheckpointError(
            f"{root / FOLDER}: tensor {lost[0]}", f"it is missing (of {len(lost)} such tensors)", _AGAIN
        )
    if module is not None:
        entries += _kept(module, trained)
    numbers = {name: _numbers(name, parts, common) for name, parts in held}
    states = {0: OptimizerState((), tuple(_groups(files, common, numbers)))}
    facts = facts_of(files, states, {}, common)
    lost = [*facts.get("left_behind", ()), *_lost(files, {entry.name for entry in entries})]
    facts |= {"left_behind": lost} if lost else {}
    optimizer = "AdamW" if any(entry.state == "exp_avg_sq" for entry in entries) else None
    checksums = [one for _, parts in held for file in parts.values() for one in file.checksums]
    return Catalog(
        root=root,
        format=FORMAT,
        entries=tuple(entries),
        facts={**({"optimizer": optimizer} if optimizer else {}), **facts, **_mesh(files)},
        checksums=(*checksums, *(one for file in files.all for one in file.checksums)),
    )


def _lost(files: StockFiles, known: set[str]) -> Iterator[str]:
    """Frozen tensors and buffers that DeepSpeed's conversion keeps nowhere whole; of pipelines nowhere."""
    told: dict[str, str] = {}
    for model in files.models.values():
        told |= dict.fromkeys(map(str, model.content.get("frozen_param_shapes") or ()), "frozen tensor")
        told |= dict.fromkeys(map(str, model.content.get("buffer_names") or ()), "buffer")
    yield from (
        f"{kind} {name}: the conversion to universal lost it"
        for name, kind in told.items()
        if name not in known
    )


def _mesh(files: StockFiles) -> dict[str, Any]:
    return {"mesh": {"pp": files.pp, "dp": files.dp, "tp": files.tp}}


def _parameters(root: Path) -> Iterator[tuple[str, dict[str, TorchFile]]]:
    """Every parameter's files by state."""
    for folder in sorted(path for path in (root / FOLDER).iterdir() if path.is_dir()):
        parts = {
            path.stem: read_torch_file(root, f"{FOLDER}/{folder.name}/{path.name}")
            for path in sorted(folder.glob("*.pt"))
        }
        if not parts:
            raise CheckpointError(str(folder), "it is empty: its conversion was interrupted", _AGAIN)
        yield folder.name, parts


def _shapes(files: StockFiles) -> dict[str, tuple[int, ...]]:
    """Local shape of every trained parameter."""
    return {
        str(name): tuple(shape)
        for model in files.models.values()
        for group in model.content.get("param_shapes") or ()
        for name, shape in group.items()
    }


def _entries(
    root: Path,
    held: Sequence[tuple[str, Mapping[str, TorchFile]]],
    shapes: Mapping[str, tuple[int, ...]],
    module: Module | None,
    tp: int,
) -> Iterator[Entry]:
    aliases = {names[0]: names[1:] for names in module.ties} if module is not None else {}
    for name, parts in held:
        if name not in shapes and (module is None or set(parts) <= {"fp32"}):
            continue  # a copy, as fp32, of what a model file has
        for state, file in parts.items():
            if state == "step":
                continue
            ref = _tensor(file)
            shape, local = ref.shape, shapes.get(name, ref.shape)
            divided = tp > 1 and len(local) == 1  # a vector: the file has it whole, the model a part
            if len(shape) < 2 and not divided:
                shape = local
            where = f"{root / file.name}: tensor {name}, {state}"
            if prod(shape) != ref.numel or not ref.contiguous:
                raise CheckpointError(
                    where,
                    f"it has {ref.numel} elements, and the model's, {shape}, others",
                    "convert it from ZeRO 1 or 2, whose universal files keep shapes",
                )
            piece = Piece(file.name, ref.offset, (0,) * len(shape), shape, contiguous(shape))
            yield Entry(
                name=name,
                state="master" if state == "fp32" else state,
                shape=shape,
                dtype=ref.dtype,
                pieces=(piece,) if ref.numel else (),
                aliases=tuple(aliases.get(name, ())),
            )


def _tensor(file: TorchFile) -> TensorRef:
    content = file.content.get("param") if isinstance(file.content, dict) else file.content
    if not isinstance(content, TensorRef):
        raise CheckpointError(str(file.path), "it holds no tensor", _AGAIN)
    return content


def _numbers(name: str, parts: Mapping[str, TorchFile], common: TorchFile) -> dict[str, float]:
    """A tensor's states that are one number."""
    content = common.content if isinstance(common.content, dict) else {}
    told = content.get(NUMBERS)
    mine = told.get(name) if isinstance(told, dict) else None
    found = numbers_of(mine if isinstance(mine, dict) else {}, {}, common)
    file = parts.get("step")
    step = None if file is None else number_of(file.content, file)
    return found if step is None else {**found, "step": step}


def _kept(module: Module, trained: set[str]) -> Iterator[Entry]:
    """Frozen parameters, buffers and the weights, from the model file."""
    by_name: dict[str, list[Fragment]] = {}
    for fragment in module.weights:
        by_name.setdefault(fragment.name, []).append(fragment)
    aliases = {names[0]: names[1:] for names in module.ties}
    for name, fragments in by_name.items():
        yield Entry(
            name=name,
            state="weight",
            shape=fragments[0].shape,
            dtype=fragments[0].dtype,
            pieces=tuple(piece for fragment in fragments for piece in _pieces(fragment)),
            role="buffer" if name in module.buffers else "trained" if name in trained else "frozen",
            aliases=tuple(aliases.get(name, ())),
        )


def _pieces(fragment: Fragment) -> Iterator[Piece]:
    strides = fragment.strides or contiguous(fragment.shape)
    for box in interval_boxes(fragment.shape, fragment.start, fragment.stop):
        corner = tuple(low for low, _ in box)
        flat = sum(at * step for at, step in zip(corner, strides, strict=True)) - fragment.start
        part = Part(corner, tuple(high - low for low, high in box), strides, flat)
        yield part.at(fragment.file, fragment.offset, ITEM_BYTES[fragment.dtype])


def _groups(
    files: StockFiles, common: TorchFile, numbers: Mapping[str, Mapping[str, float]]
) -> Iterator[Group]:
    """The optimizer's groups, with names by ``param_shapes``."""
    content = common.content if isinstance(common.content, dict) else {}
    inner = content.get("optimizer_state_dict")
    saved = inner.get("param_groups") if isinstance(inner, dict) else content.get("param_groups")
    shapes = [model.content.get("param_shapes") or () for model in files.models.values()]
    fallback = None
    if isinstance(inner, dict):
        state = (inner.get("state") or {}).get(0) or {}
        fallback = number_of(state.get("step"), common)
    for place, settings in enumerate(saved or ()):
        places = settings["params"] if isinstance(inner, dict) and files.zero_stage == 3 else [place]
        names = dict.fromkeys(
            str(name) for one in shapes for number in places if number < len(one) for name in one[number]
        )
        known: dict[str, dict[str, float]] = {}
        for name in names:
            for state, one in {"step": fallback, **numbers.get(name, {})}.items():
                known.setdefault(state, {}).update({} if one is None else {name: one})
        yield Group(
            names=tuple(names),
            settings={key: value for key, value in settings.items() if key != "params"},
            file=common,
            numbers=known,
        )
