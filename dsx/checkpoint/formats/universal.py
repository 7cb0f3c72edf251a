"""DeepSpeed's universal checkpoints, read as catalogs and written.

``zero/<parameter>/<state>.pt`` holds one state of one whole parameter, as a tensor (from ZeRO-3, and flat) or
as ``{"param": tensor, "cat_dim": ...}``; ``zero/optimizer_state.pt`` the hyperparameters; the model files of
the checkpoint that it was made from lie beside. Those alone have what DeepSpeed's own loading forgets: frozen
parameters and buffers. A folder ``tmp`` is what an interrupted conversion leaves.

One made here loads at ZeRO 1, 2 and (written for it) 3, at any data-parallel degree; what DeepSpeed's loading
forgets (buffers, frozen parameters: engine.py:4660) lies in the model file, where dsx finds it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from dsx.checkpoint import store
from dsx.checkpoint.catalog import Catalog, Entry, Piece, Target
from dsx.checkpoint.formats.deepspeed.cut import ShardLayout
from dsx.checkpoint.formats.deepspeed.files import StockFiles, open_stock
from dsx.checkpoint.formats.deepspeed.flat import (
    Fragment,
    OptimizerGroup,
    OptimizerState,
    number_of,
    numbers_of,
)
from dsx.checkpoint.formats.deepspeed.module import Module, modules_of
from dsx.checkpoint.formats.deepspeed.reader import facts_of, located
from dsx.checkpoint.formats.deepspeed.target import (
    VERSION,
    Files,
    StockLayout,
    StockPlan,
    clipping,
    group_settings,
    scaler,
    stage_of,
    tag_of,
    whole_share,
    write_model,
)
from dsx.checkpoint.formats.torch_file import TensorRef, TorchFile, read_torch_file
from dsx.checkpoint.formats.torch_target import number
from dsx.checkpoint.pieces import contiguous
from dsx.errors import CheckpointError

FORMAT = "universal"
FOLDER, COMMON = store.UNIVERSAL_FILE.split("/")
NUMBERS = "dsx_numbers"  # the optimizer's numbers beside step, by tensor, where dsx wrote the checkpoint
_AGAIN = "convert it again, into a new folder"


def looks_universal(root: Path) -> bool:
    """Whether a folder has a universal checkpoint's files."""
    return (root / FOLDER / COMMON).is_file()


def catalog_of(root: Path) -> Catalog:
    """What a universal checkpoint holds."""
    for left in (root / "tmp", root / FOLDER / "tmp"):
        if left.is_dir():
            raise CheckpointError(
                str(left),
                "its conversion was interrupted, or told to keep this folder (--keep_temp_folder)",
                f"if you know that it came to its end, remove the folder tmp; else {_AGAIN}",
            )
    files = open_stock(root, universal=True)
    module = modules_of(files)[0] if len(files.ranks) == 1 else None
    shapes = {
        str(name): tuple(shape)
        for model in files.models.values()
        for group in model.content.get("param_shapes") or ()
        for name, shape in group.items()
    }
    held = list(_parameters(root))
    common = read_torch_file(root, f"{FOLDER}/{COMMON}")
    entries = list(_entries(root, held, shapes, module, cut=len(files.shards) > 1))
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
        facts={**({"optimizer": optimizer} if optimizer else {}), **facts},
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


def _parameters(root: Path) -> Iterator[tuple[str, dict[str, TorchFile]]]:
    for folder in sorted(path for path in (root / FOLDER).iterdir() if path.is_dir()):
        parts = {
            path.stem: read_torch_file(root, f"{FOLDER}/{folder.name}/{path.name}")
            for path in sorted(folder.glob("*.pt"))
        }
        if not parts:
            raise CheckpointError(str(folder), "it is empty: its conversion was interrupted", _AGAIN)
        yield folder.name, parts


def _entries(
    root: Path,
    held: Sequence[tuple[str, Mapping[str, TorchFile]]],
    shapes: Mapping[str, tuple[int, ...]],
    module: Module | None,
    *,
    cut: bool,
) -> Iterator[Entry]:
    aliases = {names[0]: names[1:] for names in module.ties} if module is not None else {}
    for name, parts in held:
        if name not in shapes and (module is None or set(parts) <= {"fp32"}):
            continue  # a copy, as fp32, of what a model file has
        for state, file in parts.items():
            if state == "step":
                continue
            ref = file.content.get("param") if isinstance(file.content, dict) else file.content
            if not isinstance(ref, TensorRef):
                raise CheckpointError(str(file.path), "it holds no tensor", _AGAIN)
            shape, local = ref.shape, shapes.get(name, ref.shape)
            divided = cut and len(local) == 1  # a vector: the file has it whole, the model a part
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
            pieces=tuple(
                piece for fragment in fragments for piece in located(ShardLayout(fragment.shape), 0, fragment)
            ),
            role="buffer" if name in module.buffers else "trained" if name in trained else "frozen",
            aliases=tuple(aliases.get(name, ())),
        )


def _groups(
    files: StockFiles, common: TorchFile, numbers: Mapping[str, Mapping[str, float]]
) -> Iterator[OptimizerGroup]:
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
        yield OptimizerGroup(
            names=tuple(names),
            settings={key: value for key, value in settings.items() if key != "params"},
            file=common,
            numbers=known,
        )


_INFO = {"universal_checkpoint_version": 0.4}  # deepspeed/checkpoint/constants.py


def target_of(source: Catalog, root: Path, layout: StockLayout) -> Target:
    """A universal checkpoint with everything that ``source`` has.

    ``source`` is under the names of the model that will load it. Of a pipeline's ``layout`` only its names
    matter, and the data-parallel degree not at all.
    """
    if layout.zero_stage == 0:
        raise CheckpointError(
            "zero = 0", "DeepSpeed loads universal checkpoints with ZeRO alone", "use ZeRO 1, 2 or 3"
        )
    plan = StockPlan.of(source, replace(layout, dp=1, bounds=(), tied=(), specs=()))
    padded = {spec.name for spec in layout.specs if spec.pad_multiple is not None}
    files = Files(root)
    files.begin(plan)
    for at, group in enumerate(plan.groups):
        for name in group:
            if "/" in name or name in ("", ".", ".."):
                raise CheckpointError(
                    f"{source.root}: tensor {name}", "its name cannot be a folder's", "rename it"
                )
            _write_parameter(plan, files, name, plan.moments[at], padded=name in padded)
    files.add(f"{FOLDER}/{COMMON}", _common(plan), [])
    write_model(plan, files, 0, {"universal_checkpoint_info": _INFO})
    target = tag_of(source, files, root, FORMAT)
    others = sorted({state for held in _other_numbers(plan).values() for state in held})
    note = f"DeepSpeed's universal loader does not take {', '.join(others)} of the optimizer; dsx does."
    return replace(target, dropped=(*target.dropped, *((note,) if others else ())))


def _write_parameter(
    plan: StockPlan, files: Files, name: str, moments: Sequence[str], *, padded: bool
) -> None:
    # DeepSpeed pads a vocabulary to what the loading model has (universal_checkpoint.py, VOCAB_TENSOR).
    more = {"vocab_tensor": True} if padded else {}
    for state in ("master", *moments):
        share = whole_share(plan, plan.blanks[name, state])
        stem = "fp32" if state == "master" else state
        files.add(f"{FOLDER}/{name}/{stem}.pt", {"cat_dim": 0, "param": share.hole, **more}, [share])
    if "step" in plan.numbers[name]:
        files.add(f"{FOLDER}/{name}/step.pt", number(plan.numbers[name]["step"]), [])


def _common(plan: StockPlan) -> dict[str, Any]:
    """What both forms of DeepSpeed's loading look for (base_optimizer.py:332, stage3.py:3653)."""
    step = next((held["step"] for held in plan.numbers.values() if "step" in held), None)
    settings = group_settings(plan, [[at] for at in range(len(plan.groups))])
    state = {} if step is None else {0: {"step": number(step)}}
    more: dict[str, Any] = {}
    if plan.layout.zero_stage == 3:
        numbers = [
            [at for at, buffer in enumerate(plan.zero().buffers(0)) if buffer.group == group]
            for group in range(len(plan.groups))
        ]
        more = {"optimizer_state_dict": {"state": state, "param_groups": group_settings(plan, numbers)}}
    return {
        **scaler(plan),
        **clipping(plan),
        "zero_stage": stage_of(plan),
        "ds_version": VERSION,
        "param_groups": settings,
        **more,
        **({NUMBERS: others} if (others := _other_numbers(plan)) else {}),
    }


def _other_numbers(plan: StockPlan) -> dict[str, dict[str, float]]:
    """What the universal format has no place for: DeepSpeed's loader ignores this key, dsx reads it."""
    every = {name: {s: one for s, one in held.items() if s != "step"} for name, held in plan.numbers.items()}
    return {name: held for name, held in every.items() if held}
