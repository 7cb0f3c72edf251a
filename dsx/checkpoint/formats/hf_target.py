"""Hugging Face model folders to be written: ``AutoModelForCausalLM.from_pretrained`` loads them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsx.checkpoint.catalog import Catalog, Entry, Piece
from dsx.checkpoint.formats.hf_catalog import FORMAT
from dsx.checkpoint.formats.hf_names import CONFIG, INDEX, SINGLE
from dsx.checkpoint.formats.safetensors_file import CRC32, NAMES
from dsx.checkpoint.pieces import contiguous
from dsx.checkpoint.target import Crc32Field, Skeleton, Target, Written, left_behind
from dsx.errors import CheckpointError

SHARD_BYTES = 5 << 30
_PRECISIONS: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def target_of(
    source: Catalog,
    root: Path,
    config: Mapping[str, Any],
    *,
    precision: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Target:
    """A model folder with the weights of ``source``, which has Hugging Face's names.

    Args:
        source: See :func:`dsx.checkpoint.formats.hf_catalog.as_hf`.
        root: Folder to make.
        config: Content of ``config.json``; its dtype becomes that of the weights.
        precision: fp32, bf16 or fp16; the source's by default.
        shard_bytes: Largest file, unless one tensor is larger.

    Raises:
        CheckpointError: The source has no weights, or a precision that is not known.
    """
    if precision is not None and precision not in _PRECISIONS:
        raise CheckpointError(f"precision = {precision}", "no such precision", "use fp32, bf16 or fp16")
    wanted = list(_weights(source, precision))
    if not wanted:
        raise CheckpointError(str(source.root), "it has no weights", "name a checkpoint with weights")
    shards: list[list[Entry]] = [[]]
    for entry in wanted:
        if shards[-1] and sum(one.num_bytes for one in shards[-1]) + entry.num_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(entry)
    names = [_file_name(at, len(shards)) for at in range(len(shards))]
    skeletons, entries = [], []
    for name, shard in zip(names, shards, strict=True):
        skeleton, placed = _file(name, shard)
        skeletons.append(skeleton)
        entries += placed
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(entry.num_bytes for entry in wanted)},
            "weight_map": {
                entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard
            },
        }
        skeletons.append(_text(INDEX, index))
    dtypes = {entry.dtype for entry in wanted}
    out = {key: value for key, value in config.items() if key not in ("dtype", "torch_dtype")}
    skeletons.append(_text(CONFIG, out | ({"dtype": dtypes.pop()} if len(dtypes) == 1 else {})))
    catalog = Catalog(root=root, format=FORMAT, entries=tuple(entries), facts={"hf_config": dict(config)})
    return Target(catalog=catalog, skeletons=tuple(skeletons), finish=_finish, dropped=_dropped(source))


def _finish(folder: Path, written: Written) -> None:
    """Nothing: a model folder has no manifest."""


def _dropped(source: Catalog) -> tuple[str, ...]:
    states = sorted({entry.state for entry in source.entries} - {"weight", "master"})
    left = left_behind(source.facts)
    if not states:
        return left
    return (
        *left,
        f"A Hugging Face folder holds weights alone: {', '.join(states)} and counters stay behind.",
    )


def _weights(source: Catalog, precision: str | None) -> list[Entry]:
    """Blank entries of every parameter; a weight that is stored nowhere is its master's."""
    told = precision or source.facts.get("precision")
    found: dict[str, Entry] = {}
    for entry in source.entries:
        if entry.role == "buffer" or entry.state not in ("weight", "master"):
            continue
        known = found.get(entry.name)
        if known is None or (known.state, entry.state) == ("master", "weight"):
            found[entry.name] = entry
    entries = []
    for entry in found.values():
        dtype = entry.dtype
        if precision is not None or entry.state == "master":
            dtype = _PRECISIONS.get(str(told), dtype)
        entries.append(replace(entry, state="weight", dtype=dtype, pieces=(), aliases=()))
    return entries


def _file_name(at: int, count: int) -> str:
    return SINGLE if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def _file(name: str, shard: list[Entry]) -> tuple[Skeleton, list[Entry]]:
    # transformers refuses files without the format entry.
    sums = {CRC32 + entry.name: "0" * 8 for entry in shard if entry.numel}
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **sums}}
    offset = 0
    for entry in shard:
        header[entry.name] = {
            "dtype": NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [offset, offset + entry.num_bytes],
        }
        offset += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 64 + 56)  # tensors begin at a multiple of 64
    base = 8 + len(text)
    head = len(text).to_bytes(8, "little") + text
    entries, fields, at = [], [], 0
    for entry in shard:
        start, stop = (base + place for place in header[entry.name]["data_offsets"])
        corner = (0,) * len(entry.shape)
        piece = Piece(name, start, corner, entry.shape, contiguous(entry.shape))
        entries.append(replace(entry, pieces=(piece,) if entry.numel else ()))
        if entry.numel:
            key = f'{json.dumps(CRC32 + entry.name)}:"'.encode()
            at = head.index(key, at) + len(key)
            fields.append(Crc32Field(start, stop, (at,), as_text=True))
    skeleton = Skeleton(file=name, num_bytes=base + offset, parts=((0, head),), crc32_fields=tuple(fields))
    return skeleton, entries


def _text(name: str, content: Mapping[str, Any]) -> Skeleton:
    data = (json.dumps(content, indent=2) + "\n").encode()
    return Skeleton(file=name, num_bytes=len(data), parts=((0, data),))
