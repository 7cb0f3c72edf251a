"""Hugging Face model folders as catalogs and to be written, and their names and dsx's for one another.

Weights lie in safetensors, or as pickles in ``pytorch_model.bin`` (older folders, DeepSpeed's zero_to_fp32
and save_16bit_model), which are never executed (:mod:`dsx.checkpoint.formats.torch_file`); in one file, or in
several with an index.

A parameter of dsx may be several Hugging Face tensors (Q, K and V; gate and up; the experts of a layer) or
the transpose of one (GPT-2's Conv1D); its :class:`~dsx.models.param.ParamSpec` says so. In a catalog that is
only another start and other strides of the same bytes. So :func:`as_dsx` and :func:`as_hf` rename any
catalog, of stock DeepSpeed's checkpoints of ``transformers`` models too, optimizer states included.

A quantised folder's tensors are those of the plain model, which stored numbers and scales make when read, in
boxes as any other tensor (:mod:`dsx.checkpoint.unpack`). Which belong together is told by their names, and
how by the config (:mod:`dsx.models.config_values`); what they make has the config's dtype.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import isfinite, prod
from pathlib import Path
from typing import Any, TypeAlias

from dsx.checkpoint import store
from dsx.checkpoint.catalog import (
    Catalog,
    Checksum,
    Crc32Field,
    Entry,
    Packed,
    Piece,
    Skeleton,
    Target,
    left_behind,
)
from dsx.checkpoint.formats.huggingface.names import (
    CONFIG,
    INDEX,
    SINGLE,
    in_memory,
    is_buffer,
    read_json,
    stored_names,
    stored_shape,
    tied_names,
    turned,
    untied,
    weight_map,
)
from dsx.checkpoint.formats.safetensors_file import CRC32, contents, header_of
from dsx.checkpoint.formats.torch_file import TensorRef, read_torch_file
from dsx.checkpoint.json_text import parsed
from dsx.checkpoint.pieces import clipped, contiguous, whole_part
from dsx.checkpoint.read import compare
from dsx.config.adapter import SETTINGS as ADAPTER_SETTINGS
from dsx.config.adapter import WEIGHTS as ADAPTER_WEIGHTS
from dsx.errors import CheckpointError
from dsx.models.adapters import PREFIX, is_factor
from dsx.models.config_values import FolderQuantization, quantization_of, unquantized
from dsx.models.param import PRECISIONS, Box, ParamSpec

BIN_SINGLE = "pytorch_model.bin"
BIN_INDEX = "pytorch_model.bin.index.json"
FORMAT = "hf"
ADAPTER = "peft"
_AGAIN = "download or export it again"
_SAFE = "give the folder as safetensors, or the model before it was quantised"


def files_of(root: Path) -> tuple[str, Path] | None:
    """A model's one file of weights, and the index that there is with several; None if it has neither."""
    for single, index in ((SINGLE, root / INDEX), (BIN_SINGLE, root / BIN_INDEX)):
        if index.is_file() or (root / single).is_file():
            return single, index
    return None


def catalog_of(root: Path, only: str | None = None) -> Catalog:
    """What a model folder's safetensors hold, or its ``pytorch_model.bin``, under their own names.

    ``only`` names the one file of safetensors that counts; None for those of the model.
    """
    files = files_of(root) if only is None else (only, root / f"{only}.index.json")
    if files is None:
        raise CheckpointError(
            str(root), f"it has neither {SINGLE} nor {INDEX}", "name a Hugging Face model folder"
        )
    single, index = files
    safe = single != BIN_SINGLE
    told = weight_map(index, _AGAIN) if index.is_file() else {}
    found: dict[str, Entry] = {}
    checksums: list[Checksum] = []
    for file in dict.fromkeys(told.values()) if told else [single]:
        held, sums = contents(root, file) if safe else _bin_contents(root, file)
        found |= {entry.name: entry for entry in held}
        checksums += sums
    lost = next((name for name in told if name not in found), None)
    if lost is not None:
        raise CheckpointError(f"{root / told[lost]}: tensor {lost}", "the file does not have it", _AGAIN)
    entries = [found[name] for name in (told if safe and told else found)]
    facts: dict[str, Any] = {}
    if (root / CONFIG).is_file():
        config = read_json(root / CONFIG, _AGAIN)
        how = quantization_of(config) if only is None else None
        if how is not None:
            from dsx.checkpoint.formats.huggingface.catalog import plain_entries  # here: most are plain

            if not safe:
                raise CheckpointError(str(root / single), "dsx reads no quantised pickles", _SAFE)
            entries = plain_entries(root, entries, how)
        facts["hf_config"] = unquantized(config)
    read = {piece.file for entry in entries for _, piece in entry.stored}
    others = sorted(path.name for path in root.glob("adapter_*") if path.name not in read)
    if others:
        facts["left_behind"] = [f"{name}: an adapter beside the model, not merged into it" for name in others]
    return Catalog(
        root=root,
        format=FORMAT,
        entries=tuple(e if "float" in e.dtype else replace(e, role="buffer") for e in entries),
        facts=facts,
        checksums=tuple(checksums),
        links_allowed=True,
    )


def _bin_contents(root: Path, name: str) -> tuple[list[Entry], Sequence[Checksum]]:
    """As :func:`contents`, of a file of ``torch.save`` that holds a state dict."""
    file = read_torch_file(root, name)
    content = file.content if isinstance(file.content, dict) else {}
    refs = {str(name): ref for name, ref in content.items() if isinstance(ref, TensorRef)}
    if not refs:
        raise CheckpointError(str(file.path), "it holds no state dict: names with tensors", _AGAIN)
    return [
        Entry(
            name=name,
            state="weight",
            shape=ref.shape,
            dtype=ref.dtype,
            pieces=(Piece(file.name, ref.offset, (0,) * len(ref.shape), ref.shape, ref.strides),)
            if ref.numel
            else (),
        )
        for name, ref in refs.items()
    ], file.checksums


def transposes(source: Catalog, specs: Sequence[ParamSpec]) -> bool:
    """Whether a tensor of the same name has its last two dims the other way round in a checkpoint."""
    there = {spec.name: spec.hf_transposed for spec in source.specs}
    return any(there.get(spec.name, spec.hf_transposed) != spec.hf_transposed for spec in specs)


def as_dsx(source: Catalog, specs: Sequence[ParamSpec]) -> Catalog:
    """The same checkpoint under dsx's names; one that has them already stays as it is.

    One of the model in another form, with other parts fused, is read by the names that Hugging Face has for
    them.
    """
    known = {spec.name for spec in specs} <= {entry.name for entry in source.entries}
    if known and not transposes(source, specs):
        return replace(source, specs=tuple(specs))
    if is_dsx(source):
        source = as_hf(source, source.specs)
    by_name = source.by_name
    entries, homes = [], {}
    for spec in specs:
        found, states = states_of(source, spec, by_name)
        homes.update(dict.fromkeys(found, spec.name))
        entries += states
    # Tied tensors that a checkpoint stores a second time, each with the one that the model is given.
    kept = {home: name for name, home in homes.items()}
    copies = {
        name: kept[spec.name]
        for spec in specs
        for name in tied_names(spec)
        if name in by_name and name not in homes
    }
    unknown = sorted(by_name.keys() - homes.keys() - copies.keys())
    roles = {entry.name: entry.role for entry in source.entries}
    unknown = [name for name in unknown if not is_buffer(name) and roles[name] != "buffer"]
    if unknown:
        where = f"{_home(source, by_name[unknown[0]])}: tensor {unknown[0]}"
        if unknown[0].startswith(PREFIX) and not is_factor(unknown[0]) and any(spec.adapts for spec in specs):
            raise CheckpointError(
                where,
                "this adapter's folder carries resized embeddings, which PEFT saves unasked if the "
                "vocabulary is not that of base_model_name_or_path",
                "read it with PEFT, save it with save_embedding_layers=False, and then save what unload() "
                "returns, for dsx.model.path",
            )
        raise CheckpointError(
            where,
            f"the model has no place for it (of {len(unknown)} such tensors)",
            "use the config of the model that the checkpoint is of",
        )
    _check_copies(source, copies, by_name)
    return replace(
        source,
        entries=tuple(entries),
        specs=tuple(specs),
        facts=renamed(source.facts, lambda name: (homes[name],) if name in homes else (), str(source.root)),
    )


def is_dsx(source: Catalog) -> bool:
    """Whether a checkpoint's tensors have names of dsx's, and what Hugging Face calls them is known."""
    return any(spec.hf != (spec.name,) for spec in source.specs)


def under_common_names(a: Catalog, b: Catalog) -> tuple[Catalog, Catalog]:
    """Two checkpoints as they are, or under Hugging Face's names if fewer tensors are then in one alone."""
    pairs = ((a, b), (as_hf(a, a.specs), as_hf(b, b.specs)))
    return min(pairs, key=lambda pair: len(pair[0].by_name.keys() ^ pair[1].by_name.keys()))


def states_of(
    source: Catalog, spec: ParamSpec, by_name: Mapping[str, Mapping[str, Entry]]
) -> tuple[list[str], list[Entry]]:
    """Names under which a checkpoint has the parts of a parameter, and the parameter's states."""
    whole = in_memory(spec)
    # Stock engines have the module's own names, and so may a folder.
    if whole.hf[0] in by_name and (source.format != FORMAT or not any(name in by_name for name in spec.hf)):
        spec = whole
    found = [_stored_name(source, spec, name, by_name) for name in spec.hf]
    entries = []
    for state in dict.fromkeys(state for name in found for state in by_name[name]):
        lacking = next((name for name in found if state not in by_name[name]), None)
        if lacking is not None:
            raise CheckpointError(
                f"{source.root}: tensor {lacking}, {state}",
                f"it is missing, but the other parts of {spec.name} have it",
                "use a checkpoint of a model whose parts were trained together",
            )
        entries.append(_fused(source, spec, [by_name[name][state] for name in found]))
    return found, entries


def _home(source: Catalog, states: Mapping[str, Entry] | None = None) -> Path:
    """Where a model folder has a tensor, or would list it; of any other checkpoint the folder."""
    if source.format != FORMAT:
        return source.root
    files = [piece.file for entry in (states or {}).values() for piece in entry.pieces]
    names = (*files, INDEX, SINGLE, BIN_INDEX, BIN_SINGLE)
    return next((path for name in names if (path := source.root / name).is_file()), source.root)


def _check_copies(
    source: Catalog, copies: Mapping[str, str], by_name: Mapping[str, Mapping[str, Entry]]
) -> None:
    """Prove that leaving the second copies of tied tensors out loses nothing. Raises CheckpointError."""
    # The manifest's digests are filed under the names that the tensors have there.
    plain = replace(source, tile_elements=0, tile_digests={})
    for name, kept in copies.items():
        stored, held = by_name[name], by_name[kept]
        lone = sorted(stored.keys() - held.keys())
        if lone:
            raise untied(f"{_home(source, stored)}: tensor {name}, {lone[0]}", f"{kept} has no {lone[0]}")
        others = [replace(entry, name=kept) for entry in stored.values() if not _same_bytes(entry, held)]
        ours = replace(plain, entries=tuple(held.values()))
        for found in compare(replace(plain, entries=tuple(others)), ours):
            if not found.equal:
                what = found.what or f"{found.differing:,} of {found.elements:,} elements differ from {kept}"
                raise untied(f"{_home(source, stored)}: tensor {name}, {found.state}", what)


def _same_bytes(entry: Entry, held: Mapping[str, Entry]) -> bool:
    """Whether a copy is no copy: the same stretches of the same files, as in pickles of tied models."""
    other = held[entry.state]
    return (entry.shape, entry.dtype, entry.pieces) == (other.shape, other.dtype, other.pieces)


def as_hf(source: Catalog, specs: Sequence[ParamSpec], *, in_files: bool = True) -> Catalog:
    """The same checkpoint under Hugging Face's names, in the order of Hugging Face's model.

    That order is also the optimizer groups', so that a stock engine of the model finds its own by position.
    What is not the model's keeps its name and comes last; files have no place for its buffers.

    The names are those in Hugging Face's files or, without ``in_files``, those of transformers' own module,
    which a stock engine has.
    """
    in_order = all(spec.hf_whole or spec.hf_transposed for spec in specs)
    specs = specs if in_files else [in_memory(spec) for spec in specs]
    known = {spec.name: spec for spec in specs}
    names = [name for spec in specs for name in spec.hf]
    order = {name: at for at, name in enumerate(names if in_order else model_order(names))}
    entries: list[Entry] = []
    for entry in source.entries:
        spec = known.get(entry.name)
        if spec is not None:
            entries += parted(spec, entry)
        elif not in_files or entry.role != "buffer":
            entries.append(entry)
    where = str(source.root)
    facts = renamed(source.facts, lambda name: known[name].hf if name in known else (name,), where)
    for group in facts.get("param_groups", ()):
        group["names"].sort(key=lambda name: order.get(name, len(order)))
    return replace(
        source,
        entries=tuple(sorted(entries, key=lambda entry: order.get(entry.name, len(order)))),
        specs=(),
        tile_elements=0,
        tile_digests={},
        facts=facts,
    )


NamesOf: TypeAlias = Callable[[Collection[str], str | Path], Mapping[str, str | None]]
"""Gives the model's names of a folder's tensors, by their names there; None for what is no tensor of it."""


def under_model_names(
    source: Catalog, homes: Mapping[str, str | None], apart: Sequence[ParamSpec] = ()
) -> Catalog:
    """A folder's tensors under the names that its model has for them; None leaves a tensor out.

    ``apart`` are tensors of the model of which the folder has the parts that ``hf`` names.
    """
    named = ((entry, homes.get(entry.name, entry.name)) for entry in source.entries)
    found = replace(
        source,
        entries=tuple(replace(entry, name=name) for entry, name in named if name is not None),
        float32={homes.get(name) or name: dtypes for name, dtypes in source.float32.items()},
    )
    by_name = found.by_name
    joined = [spec for spec in apart if not by_name.keys().isdisjoint(spec.hf)]
    parts = {name for spec in joined for name in spec.hf}
    whole = chain.from_iterable(states_of(found, spec, by_name)[1] for spec in joined)
    others = (entry for entry in found.entries if entry.name not in parts)
    return replace(found, entries=(*others, *whole))


def with_names(source: Catalog, patterns: Sequence[tuple[str, str]], where: str) -> Catalog:
    """The same checkpoint under names that the user gives, by the first of ``patterns`` that matches.

    Each is a regular expression for the whole name, and the new name. Messages say ``where`` they are from.
    """

    def new_name(name: str) -> str:
        for pattern, new in patterns:
            match = re.fullmatch(pattern, name)
            if match is not None:
                try:
                    return match.expand(new)
                except (re.error, IndexError) as error:
                    raise CheckpointError(f"{where}: {new}", str(error), "correct the new name") from None
        return name

    homes: dict[str, str] = {}
    for name in dict.fromkeys(entry.name for entry in source.entries):
        other = homes.setdefault(new_name(name), name)
        if other != name:
            raise CheckpointError(
                f"{where}: {new_name(name)}", f"{other} and {name} would both be called so", "keep them apart"
            )
    entries = tuple(
        replace(entry, name=new_name(entry.name), aliases=tuple(map(new_name, entry.aliases)))
        for entry in source.entries
    )
    facts = renamed(source.facts, lambda name: (new_name(name),), str(source.root))
    return replace(source, entries=entries, facts=facts, specs=(), tile_elements=0, tile_digests={})


def model_order(names: Iterable[str]) -> tuple[str, ...]:
    """Hugging Face names in the order of the model's own parameters, which optimizers number them by.

    dsx has them in the order of computation, and fused biases after fused weights, where Hugging Face has one
    module after another. In blocks of Llama and its likes ``transformers`` registers attention and MLP before
    the norms (modeling_llama.py, ``LlamaDecoderLayer.__init__``), in those of GPT-NeoX after them.
    """
    norms = ("input_layernorm", "post_attention_layernorm")
    layers: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in names:
        parts = name.split(".")
        is_block = parts[:2] in (["model", "layers"], ["gpt_neox", "layers"])
        layer = ".".join(parts[:3]) if is_block else name.rpartition(".")[0]
        layers[layer][name.rpartition(".")[0]].append(name)
    found: list[str] = []
    for layer, modules in layers.items():
        others = [module for module in modules if module.rpartition(".")[2] not in norms]
        ends = [module for name in norms for module in modules if module.rpartition(".")[2] == name]
        order = (*ends, *others) if layer.startswith("gpt_neox.") else (*others, *ends)
        found += [name for module in order for name in modules[module]]
    return tuple(found)


def _stored_name(
    source: Catalog, spec: ParamSpec, name: str, by_name: Mapping[str, Mapping[str, Entry]]
) -> str:
    found = next((one for one in stored_names(spec, name) if one in by_name), None)
    if found is None:
        raise CheckpointError(
            f"{_home(source)}: tensor {name}",
            "it is missing",
            "use the config of the model that the checkpoint is of, or complete the download",
        )
    return found


def _fused(source: Catalog, spec: ParamSpec, parts: Sequence[Entry]) -> Entry:
    """One parameter's state, of the Hugging Face tensors that it is made of."""
    pieces: list[Piece] = []
    for entry, (_, box) in zip(parts, spec.hf_boxes, strict=True):
        wanted = stored_shape(spec, box)
        if entry.shape != wanted or entry.dtype != parts[0].dtype:
            raise CheckpointError(
                f"{_home(source, {entry.state: entry})}: {entry}",
                f"it is {entry.dtype} {entry.shape}, the model needs {parts[0].dtype} {wanted}",
                "use the config of the model that the checkpoint is of",
            )
        pieces += [_ours(piece, spec, box) for piece in entry.pieces]
    role = "buffer" if spec.buffer else parts[0].role
    return replace(parts[0], name=spec.name, shape=spec.shape, pieces=tuple(pieces), aliases=(), role=role)


def parted(spec: ParamSpec, entry: Entry) -> Iterator[Entry]:
    """The Hugging Face tensors of one parameter's state."""
    for name, box in spec.hf_boxes:
        yield replace(
            entry,
            name=name,
            shape=stored_shape(spec, box),
            pieces=tuple(_theirs(piece, spec, box) for piece in clipped(entry, box)),
            aliases=spec.hf_copies or tied_names(spec)[:1],
        )


def _ours(piece: Piece, spec: ParamSpec, box: Box) -> Piece:
    """A piece of a Hugging Face tensor as one of the parameter, of which the tensor is ``box``."""
    start, shape, strides = (turned(spec, dims) for dims in (piece.start, piece.shape, piece.strides))
    if spec.hf_stacked:
        start, shape, strides = (0, *start), (1, *shape), (prod(shape), *strides)
    start = tuple(at + low for at, (low, _) in zip(start, box, strict=True))
    return replace(piece, start=start, shape=shape, strides=strides)


def _theirs(piece: Piece, spec: ParamSpec, box: Box) -> Piece:
    """A piece of a parameter inside ``box`` as one of the Hugging Face tensor that ``box`` is."""
    first = 1 if spec.hf_stacked else 0
    start = tuple(at - low for at, (low, _) in zip(piece.start, box, strict=True))
    start, shape, strides = (turned(spec, dims[first:]) for dims in (start, piece.shape, piece.strides))
    return replace(piece, start=start, shape=shape, strides=strides)


def _renamed_number(value: Any, names_of: Callable[[str], Sequence[str]]) -> Any:
    """A number of all tensors of a group, or one per tensor, under other names."""
    if not isinstance(value, Mapping):
        return value
    return {name: one for old, one in value.items() for name in names_of(old)}


def renamed(facts: Mapping[str, Any], names_of: Callable[[str], Sequence[str]], where: str) -> dict[str, Any]:
    """Facts with the optimizer's groups under other names."""
    groups = []
    seen: dict[str, int] = {}
    for place, group in enumerate(facts.get("param_groups") or ()):
        names: dict[str, None] = {}
        for old in group["names"]:
            for name in names_of(old):
                names[name] = None
                if seen.setdefault(name, place) != place:
                    raise CheckpointError(
                        f"{where}: tensor {name}",
                        f"its parts are in optimizer groups {seen[name]} and {place}",
                        "train the parts of a fused tensor with the same hyperparameters",
                    )
        groups.append({**group, "names": list(names)})
        if "step" in group:
            groups[-1]["step"] = _renamed_number(group["step"], names_of)
        if "numbers" in group:
            numbers = {state: _renamed_number(one, names_of) for state, one in group["numbers"].items()}
            groups[-1]["numbers"] = numbers
    return {**facts, "param_groups": groups} if groups else dict(facts)


SHARD_BYTES = 5 << 30


def target_of(
    source: Catalog,
    root: Path,
    config: Mapping[str, Any],
    *,
    precision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Target:
    """A model folder with the weights of ``source``, which has Hugging Face's names.

    ``config`` is the content of ``config.json``, whose dtype becomes that of the weights; ``precision`` is
    fp32, bf16 or fp16, by default the source's. No file is larger than ``shard_bytes``, unless one tensor is.
    """
    if precision is not None and precision not in PRECISIONS:
        raise CheckpointError(f"precision = {precision}", "no such precision", "use fp32, bf16 or fp16")
    wanted = list(_weights(source, precision))
    if not wanted:
        raise CheckpointError(str(source.root), "it has no weights", "name a checkpoint with weights")
    held = shards(wanted, shard_bytes)
    names = [file_name(at, len(held)) for at in range(len(held))]
    skeletons, entries = [], []
    for name, shard in zip(names, held, strict=True):
        skeleton, placed = _file(name, shard)
        skeletons.append(skeleton)
        entries += placed
    if len(held) > 1:
        index = {
            "metadata": {"total_size": sum(entry.num_bytes for entry in wanted)},
            "weight_map": {
                entry.name: name for name, shard in zip(names, held, strict=True) for entry in shard
            },
        }
        skeletons.append(_text(INDEX, index))
    skeletons.append(_text(CONFIG, with_dtype(config, wanted)))
    catalog = Catalog(root=root, format=FORMAT, entries=tuple(entries), facts={"hf_config": dict(config)})
    states = ", ".join(sorted({entry.state for entry in source.entries} - {"weight", "master"}))
    note = f"A Hugging Face folder holds weights alone: {states} and counters stay behind."
    dropped = (*left_behind(source.facts), *((note,) if states else ()))
    return Target(catalog=catalog, skeletons=tuple(skeletons), dropped=dropped)


def shards(entries: Iterable[Entry], shard_bytes: int) -> list[list[Entry]]:
    """Tensors by files, none of them larger than ``shard_bytes`` unless a tensor is."""
    found: list[list[Entry]] = []
    for entry in entries:
        if not found or sum(one.num_bytes for one in found[-1]) + entry.num_bytes > shard_bytes:
            found.append([])
        found[-1].append(entry)
    return found


def _weights(source: Catalog, precision: str | None) -> list[Entry]:
    """Blank entries of every tensor: a weight stored nowhere is its master's, a buffer keeps its type."""
    told = precision or source.facts.get("precision")
    held = [states.get("weight", states.get("master")) for states in source.by_name.values()]
    entries = []
    for entry in held:
        if entry is None:
            continue
        dtype = entry.dtype
        if entry.role != "buffer" and (precision is not None or entry.state == "master"):
            dtype = source.dtype_in(entry.name, PRECISIONS.get(str(told), dtype))
        entries.append(replace(entry, state="weight", dtype=dtype, pieces=(), aliases=()))
    return entries


def with_dtype(config: Mapping[str, Any], entries: Iterable[Entry]) -> dict[str, Any]:
    """The ``config.json`` of weights, whose dtype it says if the parameters have one."""
    found = {entry.dtype for entry in entries if entry.role != "buffer"}
    dtypes = found - {"float32"} or found  # beside others, that is what the family keeps so
    kept = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    return kept | ({"dtype": dtypes.pop()} if len(dtypes) == 1 else {})


def file_name(at: int, count: int) -> str:
    """Name of one of ``count`` files of weights."""
    return SINGLE if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def _file(name: str, shard: list[Entry]) -> tuple[Skeleton, list[Entry]]:
    sums = {CRC32 + entry.name: "0" * 8 for entry in shard if entry.numel}
    named = ((entry.name, entry.dtype, entry.shape) for entry in shard)
    head, places = header_of(named, {"format": "pt", **sums})
    entries, fields, at = [], [], 0
    for entry, (start, stop) in zip(shard, places, strict=True):
        piece = whole_part(entry.shape).at(name, start, entry.item_bytes)
        entries.append(replace(entry, pieces=(piece,) if entry.numel else ()))
        if entry.numel:
            key = f'{json.dumps(CRC32 + entry.name)}:"'.encode()
            at = head.index(key, at) + len(key)
            fields.append(Crc32Field(start, stop, (at,), as_text=True))
    skeleton = Skeleton(file=name, num_bytes=places[-1][1], parts=((0, head),), crc32_fields=tuple(fields))
    return skeleton, entries


def as_json(content: Mapping[str, Any]) -> bytes:
    """A JSON file of a model folder."""
    return (json.dumps(content, indent=2) + "\n").encode()


def adapter_files(
    source: Catalog, root: Path, settings: Mapping[str, Any]
) -> tuple[Catalog, tuple[Skeleton, ...]]:
    """A folder of PEFT's with the weights of ``source``, which has its names, and its files."""
    skeleton, placed = _file(ADAPTER_WEIGHTS, _weights(source, None))
    catalog = Catalog(root=root, format=ADAPTER, entries=tuple(placed))
    return catalog, (skeleton, _text(ADAPTER_SETTINGS, settings))


def adapter_catalog(root: Path) -> Catalog:
    """What a folder of PEFT's holds."""
    return replace(catalog_of(root, ADAPTER_WEIGHTS), format=ADAPTER)


def looks_adapted(root: Path) -> bool:
    """Whether a folder has an adapter of PEFT's, and no model."""
    return (root / ADAPTER_SETTINGS).is_file() and (root / ADAPTER_WEIGHTS).is_file()


def _text(name: str, content: Mapping[str, Any]) -> Skeleton:
    data = as_json(content)
    return Skeleton(file=name, num_bytes=len(data), parts=((0, data),))


_WHOLE_AGAIN = "download it again, or give the model before it was quantised"
_MXFP4_BLOCK = 32
_STATE = ".quant_state.bitsandbytes__"
_LARGEST_STATE_BYTES = 1 << 16
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)  # that bitsandbytes has
_ACTIVATIONS = ("activation_scale", "input_scale")
"""Scales of inputs, which weights do not need."""


def plain_entries(root: Path, entries: Sequence[Entry], how: FolderQuantization) -> list[Entry]:
    """The tensors of the plain model of a folder, in the order of their numbers in the files.

    Raises:
        CheckpointError: Tensors that belong together are missing or do not fit.
    """
    folder = _Folder(root, {entry.name: entry for entry in entries}, how, set())
    made = [(entry, _METHODS[how.method](folder, entry)) for entry in entries]
    return [plain or entry for entry, plain in made if plain is not None or entry.name not in folder.used]


@dataclass(frozen=True, slots=True)
class _Folder:
    """A folder's tensors by name, and the names of those that are parts of others."""

    root: Path
    held: Mapping[str, Entry]
    how: FolderQuantization
    used: set[str]

    def part(self, state: str, name: str, shape: tuple[int, ...], *dtypes: str) -> Entry:
        """A stored tensor as the part of another, seen in a shape; of one of the dtypes, "bytes" for any."""
        entry = self.held.get(name)
        if entry is None:
            raise CheckpointError(f"{self.root}: tensor {name}", "it is missing", _WHOLE_AGAIN)
        if "bytes" in dtypes:
            dtypes, entry = ("uint8",), replace(entry, dtype="uint8", shape=(entry.num_bytes,))
        if entry.numel != prod(shape) or entry.dtype not in dtypes or not entry.numel:
            what = f"it is {entry.dtype} {entry.shape}, the tensor needs {' or '.join(dtypes)} {shape}"
            raise CheckpointError(f"{self.root}: tensor {name}", what, _WHOLE_AGAIN)
        self.used.add(name)
        seen = replace(entry.pieces[0], start=(0,) * len(shape), shape=shape, strides=contiguous(shape))
        return replace(entry, state=state, shape=shape, pieces=(seen,))

    def made(self, name: str, packed: Packed, *, turned: bool = False) -> Entry:
        """The tensor that parts make; ``turned`` for one whose last two dims are the other way round."""
        order = [*range(len(packed.shape))]
        order = [*order[:-2], *order[-2:][::-1]] if turned else order
        shape, steps = (
            tuple(each[dim] for dim in order) for each in (packed.shape, contiguous(packed.shape))
        )
        file = packed.part("numbers").pieces[0].file
        piece = Piece(file, 0, (0,) * len(shape), shape, steps, packed=packed)
        return Entry(name=name, state="weight", shape=shape, dtype=self.how.dtype, pieces=(piece,))


def _fp8(folder: _Folder, entry: Entry) -> Entry | None:
    """Of DeepSeek-V3 and transformers' FineGrainedFP8Config; where a matrix has one scale, of vLLM's too."""
    if entry.dtype != "float8_e4m3fn" or len(entry.shape) < 2:
        return None
    names = (f"{entry.name}_scale_inv", f"{entry.name}_scale")
    name = next((name for name in names if name in folder.held), names[0])
    block, grid = entry.shape, (1,) * len(entry.shape)
    if folder.how.block is not None:
        block = (*(1 for _ in entry.shape[2:]), *folder.how.block)
        grid = tuple(-(-extent // size) for extent, size in zip(entry.shape, block, strict=True))
    parts = (
        folder.part("numbers", entry.name, entry.shape, entry.dtype),
        folder.part("scales", name, grid, "float32", "bfloat16", "float16", "float8_e8m0fnu", "uint8"),
    )
    inputs = {f"{entry.name.rpartition('.')[0]}.{kind}" for kind in _ACTIVATIONS}
    folder.used.update(inputs & folder.held.keys())
    return folder.made(entry.name, Packed(method="fp8", shape=entry.shape, block=block, parts=parts))


def _mxfp4(folder: _Folder, entry: Entry) -> Entry | None:
    """Of GPT-OSS: experts [E, inputs, outputs], stored [E, outputs, inputs] by 32."""
    name = entry.name.removesuffix("_blocks")
    if name == entry.name or len(entry.shape) != 4:
        return None
    experts, rows, groups, _ = entry.shape
    parts = (
        folder.part("numbers", entry.name, (*entry.shape[:3], _MXFP4_BLOCK // 2), "uint8"),
        folder.part("scales", f"{name}_scales", entry.shape[:3], "uint8"),
    )
    shape, block = (experts, rows, groups * _MXFP4_BLOCK), (1, 1, _MXFP4_BLOCK)
    return folder.made(name, Packed(method="mxfp4", shape=shape, block=block, parts=parts), turned=True)


def _bitsandbytes(folder: _Folder, entry: Entry) -> Entry | None:
    """Of bitsandbytes' Linear8bitLt and Params4bit."""
    name, module = entry.name, entry.name.removesuffix("weight")
    shape = entry.shape
    if entry.dtype == "int8" and f"{module}SCB" in folder.held:
        folder.used.update({f"{module}weight_format"} & folder.held.keys())
        parts = [folder.part("numbers", name, shape, "int8")]
        parts.append(folder.part("scales", f"{module}SCB", shape[:1], "float32"))
        return folder.made(name, Packed(method="int8", shape=shape, block=(1, shape[-1]), parts=tuple(parts)))
    state = next((key for kind in ("nf4", "fp4") if (key := f"{name}{_STATE}{kind}") in folder.held), None)
    if state is None:
        return None
    shape, size, outer, mean = _settings(folder, folder.held[state])
    scales = -(-prod(shape) // size)
    # The numbers may be stored as another dtype's (bnb_4bit_quant_storage).
    parts = [folder.part("numbers", name, (shape[0], shape[1] // 2), "bytes")]
    parts.append(folder.part("table", f"{name}.quant_map", (16,), "float32"))
    parts.append(folder.part("scales", f"{name}.absmax", (scales,), "uint8" if outer else "float32"))
    if outer:
        parts.append(folder.part("outer_scales", f"{name}.nested_absmax", (-(-scales // outer),), "float32"))
        parts.append(folder.part("outer_table", f"{name}.nested_quant_map", (256,), "float32"))
    block = (1, size, outer)
    return folder.made(name, Packed(method="4bit", shape=shape, block=block, parts=tuple(parts), mean=mean))


def _settings(folder: _Folder, entry: Entry) -> tuple[tuple[int, int], int, int, float]:
    """Shape, numbers of a block, scales of a block (0: plain), and what is added to scales."""
    folder.part("settings", entry.name, entry.shape, "uint8")
    where, (piece,) = folder.root / entry.pieces[0].file, entry.pieces
    try:
        with store.opened(where) as file:
            file.seek(piece.offset)
            told: dict[str, Any] = parsed(file.read(min(entry.numel, _LARGEST_STATE_BYTES)))
        rows, columns = map(int, told["shape"])
        size, outer = int(told["blocksize"]), int(told.get("nested_blocksize") or 0)
        mean = float(told.get("nested_offset") or 0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        what = f"it says no shape and blocks of a matrix ({error!r})"
        raise CheckpointError(f"{where}: tensor {entry.name}", what, _WHOLE_AGAIN) from None
    if min(rows, columns) < 1 or columns % 2 or size not in _BLOCKS or outer < 0 or not isfinite(mean):
        what = f"a matrix of {rows} by {columns} in blocks of {size}, and of {outer} scales, is none of dsx's"
        raise CheckpointError(f"{where}: tensor {entry.name}", what, _WHOLE_AGAIN)
    return (rows, columns), size, outer, mean


_METHODS: Mapping[str, Callable[[_Folder, Entry], Entry | None]] = {
    "fp8": _fp8,
    "mxfp4": _mxfp4,
    "bitsandbytes": _bitsandbytes,
}
