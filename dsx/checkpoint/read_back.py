"""A target read as its loader reads it, before it gets its name: names, ties, shapes, and where parts lie.

The reader of the target's format knows nothing of the plan that the files were made by. What it finds in them
has to be that plan: a loader that follows the same rules then finds every tensor, whole and in its place.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from dsx.checkpoint.catalog import Catalog, Entry, Piece, check_files
from dsx.checkpoint.claims import specs_of_model
from dsx.checkpoint.copy_plan import TILE_ELEMENTS, check_cover, region
from dsx.checkpoint.formats import hf_catalog
from dsx.checkpoint.formats.deepspeed_order import TIED
from dsx.checkpoint.open import open_checkpoint
from dsx.checkpoint.pieces import PieceIndex, volume
from dsx.errors import CheckpointError, ModelError
from dsx.plan.hf_config import model_spec
from dsx.spec.param import Box

_REPORT = "report this, with the command: the target was removed again, the source is untouched"


def check_target(folder: Path, wanted: Catalog) -> None:
    """Prove that a finished folder is read as what it was meant to be.

    Args:
        folder: Where the files are now.
        wanted: What they were made by.

    Raises:
        CheckpointError: A tensor, one of its names, its shape, dtype or role, or a part of it is not there.
    """
    try:
        found = open_checkpoint(folder)
        check_files(found)
    except CheckpointError as error:
        raise CheckpointError(
            f"{wanted.root}: {error.where}", f"what was written cannot be read again: {error.what}", _REPORT
        ) from error
    held = found.by_key
    for entry in wanted.entries:
        same = held.pop(entry.key, None)
        if same is None:
            raise _wrong(wanted, entry, "the files do not have it")
        _check_entry(wanted, entry, same, is_hf=found.format == hf_catalog.FORMAT)
    if held:
        raise _wrong(wanted, next(iter(held.values())), "the files have it, and it was not to be written")
    if found.format == hf_catalog.FORMAT:
        _check_model(found, wanted)


def _check_entry(wanted: Catalog, entry: Entry, found: Entry, *, is_hf: bool) -> None:
    told = [("shape", entry.shape, found.shape), ("dtype", entry.dtype, found.dtype)]
    if not is_hf:  # whose files say neither
        # A pipeline's layers are other names of a tied module's tensors; a source need not have known them.
        more = {*found.aliases} - {*entry.aliases} if entry.name.startswith(f"{TIED}.") else set()
        told += [
            ("role", entry.role, found.role),
            ("other names", sorted(entry.aliases), sorted({*found.aliases} - more)),
        ]
    for what, mine, theirs in told:
        if mine != theirs:
            raise _wrong(wanted, entry, f"its {what}: {mine} was to be written, a loader finds {theirs}")
    check_cover(found, 0, wanted.tile_elements or TILE_ELEMENTS, str(wanted.root))
    homes: dict[str, list[Piece]] = defaultdict(list)
    for piece in entry.pieces:
        homes[piece.file].append(piece)
    indices = {file: PieceIndex(pieces) for file, pieces in homes.items()}
    for piece in found.pieces:
        others = indices[piece.file].overlaps(piece.box) if piece.file in indices else ()
        same = (
            volume(box) for other, box in others if _place(piece, box, entry) == _place(other, box, entry)
        )
        if sum(same) != volume(piece.box):
            raise _wrong(wanted, entry, f"a loader looks for {region(piece.box)} elsewhere in {piece.file}")


def _place(piece: Piece, box: Box, entry: Entry) -> tuple[int, tuple[int, ...]]:
    """Byte of a box's first element in the file, and the steps from there to its others."""
    first = sum((low - at) * step for (low, _), at, step in zip(box, piece.start, piece.strides, strict=True))
    steps = (step for (low, high), step in zip(box, piece.strides, strict=True) if high - low > 1)
    return piece.offset + entry.item_bytes * first, tuple(steps)


def _check_model(found: Catalog, wanted: Catalog) -> None:
    """A Hugging Face folder against its own config, where that is of one of dsx's families."""
    try:
        model = model_spec(dict(found.facts.get("hf_config") or {}))
    except ModelError:
        return
    try:
        hf_catalog.as_dsx(found, specs_of_model(found, model))
    except CheckpointError as error:
        raise CheckpointError(
            f"{wanted.root}: {error.where.removeprefix(f'{found.root}: ')}",
            f"its config.json is of another model: {error.what}",
            "give the config.json of the model that the checkpoint is of",
        ) from error


def _wrong(wanted: Catalog, entry: Entry, what: str) -> CheckpointError:
    return CheckpointError(f"{wanted.root}: {entry}", what, _REPORT)
