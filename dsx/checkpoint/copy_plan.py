"""From what a checkpoint holds to what another shall hold: which bytes go where. Pure, no torch.

Work is cut by *tiles* of the logical tensors: runs of rows (or of a row) of at most ``tile_elements``
elements. They depend on the tensor's shape alone. So a tile's digest is the same in every layout, and what a
row-major piece has of a tile is one stretch of its file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

from dsx.checkpoint.catalog import Catalog, Entry, Piece, unusable
from dsx.checkpoint.pieces import PieceIndex, intersect, subtract, volume, whole
from dsx.errors import CheckpointError
from dsx.models.param import Box

TILE_ELEMENTS = 1 << 20
_FLOATS = {"float64", "float32", "float16", "bfloat16"}


@dataclass(frozen=True, slots=True)
class CopyJob:
    """One state of one tensor to be made from a state of the source, with conversion if dtypes differ.

    Attributes:
        change: Given a tile in float32, and which it is, gives what shall be there; None for a copy.
    """

    source: Entry
    target: Entry
    writes: PieceIndex = field(repr=False, compare=False)
    change: Callable[[Any, Box], Any] | None = field(default=None, repr=False, compare=False)

    @property
    def converts(self) -> bool:
        return self.source.dtype != self.target.dtype or self.change is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlan:
    """Everything to copy.

    Attributes:
        jobs: One per entry of the target, in its order.
        notes: What changes on the way or stays behind, one sentence each.
    """

    jobs: tuple[CopyJob, ...]
    tile_elements: int
    notes: tuple[str, ...]

    @property
    def read_bytes(self) -> int:
        """Bytes to read; an entry that makes two is read twice."""
        return sum(
            prod(piece.shape) * part.item_bytes
            for job in self.jobs
            for part, piece in job.source.stored
            if piece.replica == 0
        )

    @property
    def write_bytes(self) -> int:
        """Bytes of tensors to write, replicas counted."""
        return sum(
            prod(piece.shape) * job.target.item_bytes for job in self.jobs for piece in job.target.pieces
        )

    def units(self) -> Iterator[tuple[int, int, Box]]:
        """Index of the job, index of the tile in it, and the tile: the pieces of work, in order."""
        for at, job in enumerate(self.jobs):
            for number, tile in enumerate(tiles(job.target.shape, self.tile_elements)):
                yield at, number, tile


def tiles(shape: Sequence[int], tile_elements: int) -> Iterator[Box]:
    """The tiles of a tensor in row-major order; each is one stretch of the flattened tensor.

    >>> list(tiles((5, 2), 4))
    [((0, 2), (0, 2)), ((2, 4), (0, 2)), ((4, 5), (0, 2))]
    >>> list(tiles((2, 3), 2))
    [((0, 1), (0, 2)), ((0, 1), (2, 3)), ((1, 2), (0, 2)), ((1, 2), (2, 3))]
    """
    if not prod(shape):
        return
    if not shape:
        yield ()
        return
    row = prod(shape[1:])
    if row > tile_elements:
        for index in range(shape[0]):
            yield from (((index, index + 1), *tile) for tile in tiles(shape[1:], tile_elements))
        return
    rows = max(1, tile_elements // row)
    for low in range(0, shape[0], rows):
        yield ((low, min(low + rows, shape[0])), *whole(shape[1:]))


def plan(source: Catalog, target: Catalog) -> CopyPlan:
    """Match every entry of ``target`` with one of ``source`` and prove that each element is copied once.

    ``master`` may come from ``weight`` and the other way round, converted; a weight of another dtype comes
    from the fp32 master where there is one.
    """
    tile_elements = source.tile_elements or target.tile_elements or TILE_ELEMENTS
    held = source.by_key
    jobs = []
    for entry in target.entries:
        found = _source_of(entry, held, source)
        _check_match(found, entry, source)
        job = CopyJob(found, entry, PieceIndex(entry.pieces))
        check_cover(found, 0, tile_elements, str(source.root))
        for replica in sorted({piece.replica for piece in entry.pieces} or {0}):
            check_cover(entry, replica, tile_elements, f"{target.root} (to be written)")
        jobs.append(job)
    return CopyPlan(
        jobs=tuple(jobs), tile_elements=tile_elements, notes=(*_converted(jobs), *_left(source, jobs))
    )


def check_cover(entry: Entry, replica: int, tile_elements: int, where: str) -> None:
    """Prove that the pieces of one replica hold every element of a tensor exactly once."""
    pieces = [piece for piece in entry.pieces if piece.replica == replica]
    if len(pieces) == 1 and pieces[0].shape == entry.shape:
        return
    outside = next((p for p in pieces if intersect(p.box, whole(entry.shape)) != p.box), None)
    if outside is not None:
        raise unusable(
            f"{where}: {entry}",
            f"{outside.file} has {region(outside.box)} of it, whose shape is {entry.shape}",
        )
    # They hold every element exactly once if they are as many and none shares an element with another.
    ordered = sorted(((piece, piece.box) for piece in pieces), key=lambda held: held[0].start)
    if sum(prod(piece.shape) for piece in pieces) == entry.numel and _twice(ordered) is None:
        return
    index = PieceIndex(pieces)
    for tile in tiles(entry.shape, tile_elements):  # finds the place, for the message
        found = index.overlaps(tile)
        covered = sum(volume(box) for _, box in found)
        twice = _twice(found) if len(found) > 1 else None
        if twice is not None:
            raise CheckpointError(
                f"{where}: {entry}",
                f"{region(twice[2])} is held twice, by {twice[0].file} and {twice[1].file}",
                "use another checkpoint, or say which holds the right one",
            )
        if covered != volume(tile):
            gaps = [tile]
            for _, hole in found:
                gaps = [rest for gap in gaps for rest in subtract(gap, hole)]
            raise CheckpointError(
                f"{where}: {entry}",
                f"nothing holds {region(min(gaps))}",
                "complete the checkpoint: the files of some rank are missing or do not belong to it",
            )


def region(box: Box) -> str:
    """A box as it would be written in Python: ``[0:2, 3:4]``."""
    return f"[{', '.join(f'{start}:{stop}' for start, stop in box)}]"


def _twice(found: Sequence[tuple[Piece, Box]]) -> tuple[Piece, Piece, Box] | None:
    """Two pieces that hold the same region. Only what shares rows is compared: boxes come by corner."""
    for at, (piece, box) in enumerate(found):
        for later in range(at + 1, len(found)):
            other, other_box = found[later]
            if box and other_box[0][0] >= box[0][1]:
                break
            shared = intersect(box, other_box)
            if shared is not None:
                return piece, other, shared
    return None


def _source_of(entry: Entry, held: dict[tuple[str, str], Entry], source: Catalog) -> Entry:
    same = held.get(entry.key)
    if entry.state == "weight" and (same is None or same.dtype != entry.dtype):
        same = held.get((entry.name, "master"), same)
    elif entry.state == "master" and same is None:
        same = held.get((entry.name, "weight"))
    if same is not None:
        return same
    states = sorted(state for name, state in held if name == entry.name)
    what = f"it has {', '.join(states)} of it, not {entry.state}" if states else "it has no such tensor"
    raise CheckpointError(
        f"{source.root}: {entry}",
        what,
        "use the config of the model that the checkpoint was trained with",
    )


def _check_match(found: Entry, wanted: Entry, source: Catalog) -> None:
    where = f"{source.root}: {found}"
    if found.shape != wanted.shape:
        raise CheckpointError(
            where,
            f"its shape is {found.shape}, the target's is {wanted.shape}",
            "use the config of the model that the checkpoint was trained with",
        )
    if found.dtype != wanted.dtype and not {found.dtype, wanted.dtype} <= _FLOATS:
        raise CheckpointError(where, f"{found.dtype} cannot become {wanted.dtype}", f"ask for {found.dtype}")


def _converted(jobs: Sequence[CopyJob]) -> Iterator[str]:
    kinds = Counter(
        (job.source.state, job.source.dtype, job.target.state, job.target.dtype)
        for job in jobs
        if job.converts or job.source.state != job.target.state
    )
    for (state, dtype, new_state, new_dtype), count in kinds.items():
        yield f"{new_state} ({new_dtype}) of {count} tensors is made from {state} ({dtype})"


def _left(source: Catalog, jobs: Sequence[CopyJob]) -> Iterator[str]:
    """What no job reads. A weight is what rounding makes of its master: it is not lost if that is kept."""

    def is_wide(job: CopyJob) -> bool:
        return job.source.dtype == job.target.dtype == "float32"

    used = {job.source.key for job in jobs}
    made = {job.target.name for job in jobs}
    kept = {job.target.name for job in jobs if job.source.state in ("weight", "master") and is_wide(job)}
    left = [
        entry
        for entry in source.entries
        if entry.key not in used and not (entry.state in ("weight", "master") and entry.name in kept)
    ]
    for state, count in Counter(entry.state for entry in left if entry.name in made).items():
        yield f"{state} of {count} tensors stays behind: the target has no place for it"
    unknown = sorted({entry.name for entry in left if entry.name not in made})
    if unknown:
        more = ", ..." if len(unknown) > 5 else ""
        yield (
            f"{len(unknown)} tensors stay behind, which the target does not know: "
            f"{', '.join(unknown[:5])}{more}"
        )
