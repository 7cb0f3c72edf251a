"""One rank's file of a checkpoint: its blocks of every tensor, hashed on their way to the disk."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsx.checkpoint.catalog import Checksum, Entry, Piece
from dsx.checkpoint.checksums import digest
from dsx.checkpoint.file_io import blamed, write_from
from dsx.checkpoint.formats import dsx_native
from dsx.checkpoint.pieces import Part
from dsx.checkpoint.reader import stretches, tiles_of
from dsx.runtime.arrays import as_numpy
from dsx.runtime.stored import MASTER, WEIGHT, Content, Stored, extent, stored_here
from dsx.spec.param import ParamSpec

if TYPE_CHECKING:
    from dsx.runtime.engine import PipelineEngine

_WRITE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive elements of a flat tensor that a rank writes.

    Attributes:
        item: What the file says of them.
        spec: The logical tensor.
        values: The elements, one dim, where they are.
    """

    item: dsx_native.Stored
    spec: ParamSpec
    values: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one rank has written.

    Attributes:
        entries: Every state of every tensor that it has a part of, with its own pieces alone.
        specs: Their logical tensors.
        checksums: Of every stretch of its file.
    """

    entries: tuple[Entry, ...]
    specs: tuple[ParamSpec, ...]
    checksums: tuple[Checksum, ...]


def file_name(rank: int) -> str:
    """The file of a rank."""
    return f"rank_{rank:05d}.safetensors"


def blocks_of(engine: PipelineEngine) -> list[Block]:
    """What this rank writes, in the order of its file: wide elements first, then by state."""
    blocks = [_block(stored, content) for stored in stored_here(engine) for content in stored.contents]
    return sorted(blocks, key=lambda block: (-block.item.entry.item_bytes, block.item.entry.state))


def on_host(blocks: Sequence[Block]) -> list[Block]:
    """Copies in the host's memory, which the run does not change."""
    return [replace(block, values=block.values.detach().to("cpu", copy=True)) for block in blocks]


def num_bytes(blocks: Sequence[Block]) -> int:
    """Size of the tensors."""
    return sum(block.item.num_bytes for block in blocks)


def write_share(blocks: Sequence[Block], folder: Path, rank: int) -> Share:
    """Write the file of ``rank`` below ``folder`` and flush it to the disk.

    Raises:
        CheckpointError: The disk is full, or refuses otherwise.
    """
    name = file_name(rank)
    path = folder / name
    header = dsx_native.header_of([block.item for block in blocks])
    entries: list[Entry] = []
    checksums = [Checksum(name, 0, len(header), "xxh3_128", digest(header))]
    what = f"the part of rank {rank}"
    with blamed(path, what, "when dsx writes", "free space, or choose another folder"):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            write_from(descriptor, memoryview(header), 0)
            at = len(header)
            for block in blocks:
                data = _bytes_of(block.values)
                for low in range(0, len(data), _WRITE_BYTES):
                    write_from(descriptor, data[low : low + _WRITE_BYTES], at + low)
                entry, sums = _described(block.item, name, at, data)
                entries.append(entry)
                checksums += sums
                at += len(data)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    return Share(entries=tuple(entries), specs=_specs(blocks), checksums=tuple(checksums))


def _block(stored: Stored, content: Content) -> Block:
    low, high = extent(content.parts)
    entry = Entry(
        name=content.spec.name,
        state=_state(stored, content),
        shape=content.spec.shape,
        dtype=stored.dtype,
        pieces=(),
        role=content.role,
    )
    parts = tuple(Part(p.start, p.shape, p.strides, p.flat - low) for p in content.parts)
    item = dsx_native.Stored(entry, 0, high - low, parts, (high - low,))
    return Block(item, content.spec, stored.values[low:high])


def _state(stored: Stored, content: Content) -> str:
    """An fp32 weight is its own master (:mod:`dsx.checkpoint.formats.dsx_native`)."""
    return WEIGHT if content.state == MASTER and stored.computes_as_master else content.state


def _bytes_of(values: torch.Tensor) -> memoryview:
    host = values.detach()
    if host.device.type != "cpu":
        host = host.cpu()
    return memoryview(as_numpy(host.contiguous())).cast("B")


def _described(
    item: dsx_native.Stored, file: str, origin: int, data: memoryview
) -> tuple[Entry, list[Checksum]]:
    """The entry with its pieces in the file, and a checksum for each stretch that a reader may ask for."""
    size = item.entry.item_bytes
    pieces = tuple(part.at(file, origin, size) for part in item.parts)
    sums = [
        Checksum(file, start, stop, "xxh3_128", digest(data[start - origin : stop - origin]))
        for piece in pieces
        for start, stop in _stretches(item.entry, piece)
    ]
    return replace(item.entry, pieces=pieces), sums


def _stretches(entry: Entry, piece: Piece) -> Iterator[tuple[int, int]]:
    for tile in tiles_of(entry.shape, piece.box):
        yield from stretches(piece, tile, entry.item_bytes)


def _specs(blocks: Iterable[Block]) -> tuple[ParamSpec, ...]:
    """Of dsx's own layers: those of others are not known to be cut in any way."""
    known: dict[str, Any] = {
        block.spec.name: block.spec for block in blocks if block.spec.hf != (block.spec.name,)
    }
    return tuple(known.values())
