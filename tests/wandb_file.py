"""W&B's own record of an offline run, read back from its file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2


def wandb_records(folder: Path) -> Iterator[Any]:
    """Records of the ``.wandb`` file in ``folder``, in W&B's own protobuf messages.

    The file is a LevelDB log behind a 7-byte header: blocks of 32 KiB hold chunks of checksum (4 bytes),
    length (2), type (1; 1 whole, 2 first, 3 middle, 4 last) and data.
    """
    wandb.teardown()  # stops its service process, which writes the file after finish() has returned
    (path,) = folder.glob("*.wandb")
    raw, at, record = path.read_bytes(), 7, b""
    while at < len(raw):
        if 32768 - at % 32768 < 7:  # no room for a chunk header: the rest of the block is padding
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(raw[at + 4 : at + 6], "little"), raw[at + 6]
        data = raw[at + 7 : at + 7 + length]
        assert int.from_bytes(raw[at : at + 4], "little") == zlib.crc32(raw[at + 6 : at + 7 + length])
        record, at = record + data, at + 7 + length
        if kind in {1, 4}:
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def of_kind(kind: str, folder: Path) -> list[Any]:
    """The messages of one kind of record, such as "run", "history" or "artifact"."""
    found = wandb_records(folder)
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def history(folder: Path) -> list[dict[str, Any]]:
    """Rows as W&B recorded them, without its own ``_`` keys."""
    rows = []
    for row in of_kind("history", folder):
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        rows.append({key: value for key, value in items.items() if not key.startswith("_")})
    return rows


def by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Records of ``metrics.jsonl`` as W&B has them: one row per step."""
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        rows.setdefault(record["train/step"], {}).update(record)
    return list(rows.values())
