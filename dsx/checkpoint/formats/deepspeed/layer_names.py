"""dsx's layer lists under stock DeepSpeed, where tied modules have other names and vocabularies padding.

``PipelineModule`` calls a tied layer's tensors ``tied_modules.<key>.<path>``, where dsx has
``<layer>.<path>``. A checkpoint of one tensor-parallel rank has a table's padding rows, and does not say so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dsx.checkpoint.catalog import Catalog, Entry
from dsx.checkpoint.formats.huggingface.catalog import as_dsx, clipped, renamed
from dsx.checkpoint.pieces import whole
from dsx.models.param import ParamSpec


def tied_names(specs: Sequence[ParamSpec]) -> dict[str, str]:
    """What PipelineModule calls the tensors that several layers use."""
    return {
        spec.name: f"tied_modules.{spec.tie}.{spec.name.partition('.')[2]}"
        for spec in specs
        if spec.tie is not None
    }


def under_names(source: Catalog, names: Mapping[str, str]) -> Catalog:
    """The same checkpoint with some tensors under other names, and without what is known of their cuts."""
    if not any(entry.name in names for entry in source.entries):
        return source
    entries = []
    for entry in source.entries:
        name = names.get(entry.name, entry.name)
        aliases = tuple(alias for alias in entry.aliases if alias != name)
        entries.append(replace(entry, name=name, aliases=aliases))
    return replace(
        source,
        entries=tuple(entries),
        tile_digests={(names.get(n, n), state): sums for (n, state), sums in source.tile_digests.items()},
        facts=renamed(source.facts, lambda name: (names.get(name, name),), str(source.root)),
        specs=(),
    )


def as_model(source: Catalog, specs: Sequence[ParamSpec]) -> Catalog:
    """The same checkpoint under dsx's names, whatever engine of the model wrote it.

    Args:
        source: Of dsx, of a Hugging Face model, or of dsx's layers in a stock engine.
        specs: The model's tensors.

    Raises:
        CheckpointError: It is of another model.
    """
    stock = {name: ours for ours, name in tied_names(specs).items()}
    source = under_names(source, stock)
    known = {spec.name: spec for spec in specs}
    entries = tuple(_unpadded(entry, known.get(entry.name)) for entry in source.entries)
    return as_dsx(replace(source, entries=entries), specs)


def _unpadded(entry: Entry, spec: ParamSpec | None) -> Entry:
    if spec is None or spec.pad_multiple is None or entry.shape != spec.local_shape(1):
        return entry
    pieces = [clipped(piece, whole(spec.shape), entry.item_bytes) for piece in entry.pieces]
    return replace(entry, shape=spec.shape, pieces=tuple(piece for piece in pieces if piece is not None))
