"""A checkpoint to be written: its catalog, and its files with room for the tensors. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.checkpoint.catalog import Catalog, Checksum


@dataclass(frozen=True, slots=True)
class Crc32Field:
    """Where a file keeps the CRC32 of its own bytes ``start`` to ``stop``, as torch's zip files do.

    Attributes:
        start: First byte of the member.
        stop: Byte after the last.
        places: Offsets of the fields, four bytes each, little-endian (local header or data descriptor, and
            central directory).
        as_text: The fields are eight hexadecimal digits instead: safetensors' header is JSON.
    """

    start: int
    stop: int
    places: tuple[int, ...]
    as_text: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Skeleton:
    """A file before its tensors are in it. What neither a part nor a piece covers is zero.

    Attributes:
        file: Path relative to the checkpoint's folder.
        num_bytes: Size of the complete file.
        parts: (offset, bytes) to write as they are: headers, pickled structure, JSON.
        crc32_fields: Filled in when the bytes that they are about are all written.
    """

    file: str
    num_bytes: int
    parts: tuple[tuple[int, bytes], ...] = ()
    crc32_fields: tuple[Crc32Field, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was learned while the tensors were written.

    Attributes:
        checksums: xxh3_128 of every region written, in the order of files and offsets.
        tile_elements: Size of the tiles that were used.
        tile_digests: As in :class:`~dsx.checkpoint.catalog.Catalog`, of the new checkpoint.
    """

    checksums: tuple[Checksum, ...]
    tile_elements: int
    tile_digests: Mapping[tuple[str, str], tuple[str, ...]]


def left_behind(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """Notes of what the source's reader could not make data of."""
    return tuple(f"stays behind: {what}" for what in facts.get("left_behind", ()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a writer wants made.

    Attributes:
        catalog: The new checkpoint; its pieces say where every byte goes. ``root`` is the final folder.
        skeletons: Every file to make first.
        finish: Writes what can be known only at the end (a manifest), into the folder that it is given;
            called once, last; most formats know everything before.
        dropped: What the source has and this format or layout cannot hold, one sentence each.
        is_tag: Whether the folder is one of several beside a file ``latest``.
    """

    catalog: Catalog
    skeletons: tuple[Skeleton, ...]
    finish: Callable[[Path, Written], None] = lambda *_: None
    dropped: tuple[str, ...] = ()
    is_tag: bool = False
