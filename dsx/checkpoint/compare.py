"""Two checkpoints, tensor by tensor, whatever their layouts and formats; a tile at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dsx.checkpoint.catalog import Catalog
from dsx.checkpoint.copy_plan import TILE_ELEMENTS, check_cover, tiles
from dsx.checkpoint.file_io import Array, convert, ulps
from dsx.checkpoint.read import Reader, Tile

BROKEN_ULPS = 2**64 - 1
"""The distance of a NaN from anything else."""

_LAYOUT_FACTS = {
    "mesh",
    "chunks",
    "placement",
    "stage_bounds",
    "zero_stage",
    "precision",
    "schedule",
    "versions",
    "random_files",
}
"""Facts in which a converted checkpoint may differ from its source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One state of one tensor in both.

    Attributes:
        differing: Number of elements with different bits.
        max_ulps: The largest distance, in representable numbers; :data:`BROKEN_ULPS` beside a NaN.
        max_abs: The largest absolute difference of finite elements.
        what: Why it could not be compared (shapes or dtypes differ); empty if it was.
    """

    name: str
    state: str
    elements: int
    differing: int = 0
    max_ulps: int = 0
    max_abs: float = 0.0
    what: str = ""

    @property
    def equal(self) -> bool:
        return not self.differing and not self.what


def compare(
    a: Catalog, b: Catalog, progress: Callable[[int], None] = lambda _: None
) -> Iterator[TensorDifference]:
    """Every entry that both have, in the order of ``a``; ``progress`` is told of more elements compared."""
    size = a.tile_elements or b.tile_elements or TILE_ELEMENTS
    others = b.by_key
    with Reader(a, size) as reads_a, Reader(b, size) as reads_b:
        for entry in a.entries:
            other = others.get(entry.key)
            if other is None:
                continue
            if (entry.shape, entry.dtype) != (other.shape, other.dtype):
                what = f"{entry.dtype} {list(entry.shape)} and {other.dtype} {list(other.shape)}"
                yield TensorDifference(name=entry.name, state=entry.state, elements=entry.numel, what=what)
                continue
            check_cover(entry, 0, size, str(a.root))
            check_cover(other, 0, size, str(b.root))
            found = TensorDifference(name=entry.name, state=entry.state, elements=entry.numel)
            for number, tile in enumerate(tiles(entry.shape, size)):
                one, two = reads_a.read(entry, tile, number), reads_b.read(other, tile, number)
                progress(one.values.size)
                if one.digest != two.digest:
                    found = _add(found, one, two, entry.dtype)
            yield found


def only_in(a: Catalog, b: Catalog) -> tuple[tuple[str, str], ...]:
    """Names and states of what ``a`` has and ``b`` lacks."""
    return tuple(sorted(a.by_key.keys() - b.by_key.keys()))


def fact_differences(a: Catalog, b: Catalog) -> dict[str, tuple[Any, Any]]:
    """Facts that both have with different values, and that do not depend on the layout.

    Of dsx's modules and of transformers' a model is described in other words; it has one config.
    """
    shared = (a.facts.keys() & b.facts.keys()) - _LAYOUT_FACTS
    if len({"config" in (each.facts.get("model") or ()) for each in (a, b)}) > 1:
        shared -= {"model"}
    return {key: (a.facts[key], b.facts[key]) for key in sorted(shared) if a.facts[key] != b.facts[key]}


def _add(found: TensorDifference, a: Tile, b: Tile, dtype: str) -> TensorDifference:
    flat_a, flat_b = a.values.reshape(-1), b.values.reshape(-1)
    bits = np.dtype(f"u{flat_a.dtype.itemsize}")
    at = np.flatnonzero(flat_a.view(bits) != flat_b.view(bits))
    one, two = flat_a[at], flat_b[at]
    return replace(
        found,
        differing=found.differing + len(at),
        max_ulps=max(found.max_ulps, int(ulps(one, two, dtype).max())),
        max_abs=max(found.max_abs, _max_abs(one, two, dtype)),
    )


def _max_abs(a: Array, b: Array, dtype: str) -> float:
    if dtype.startswith("float8"):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        wide = [convert(x, dtype, "float32") if dtype == "bfloat16" else x for x in (a, b)]
        distance = np.abs(wide[0].astype(np.float64) - wide[1].astype(np.float64))
    finite = distance[np.isfinite(distance)]
    return float(finite.max()) if finite.size else 0.0
