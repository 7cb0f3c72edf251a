"""A dense model folder as one of a mixture of experts, copied tile by tile. ``dsx upcycle`` is this."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from dsx.checkpoint.base import under_known_names
from dsx.checkpoint.catalog import Catalog, Entry, Piece, Role, Skeleton, check_files
from dsx.checkpoint.copy_plan import plan
from dsx.checkpoint.formats.huggingface import catalog as hugging_face
from dsx.checkpoint.formats.huggingface.names import TOKENIZER_FILES, read_config
from dsx.checkpoint.pieces import clipped
from dsx.checkpoint.reshard import Conversion
from dsx.checkpoint.staging import check_absent
from dsx.hub.read import hub_model
from dsx.hub.upcycle import Made, Upcycling, made_of, mixture_config, proved, specs_of
from dsx.models.param import Box


def prepare(dense: Path, root: Path, wanted: Upcycling) -> Conversion:
    """Plan an upcycling, prove it on a small model, and find all that can be wrong before a byte is written.

    ``dense`` is a Hugging Face folder of a dense causal language model; ``root``, which is made, gets its
    tokenizer's files too.

    Raises:
        CheckpointError: ``root`` exists, or ``dense`` is incomplete.
        ModelError: The families do not match, or the mixture would not compute the same.
    """
    check_absent(root)
    config = read_config(dense)
    order, scales = proved(config, wanted)
    mixture, specs = mixture_config(config, wanted), specs_of(config)
    made = made_of(specs, specs_of(mixture), wanted, order)
    found = under_known_names(hugging_face.catalog_of(dense), hub_model(config))
    check_files(found)
    source = hugging_face.as_dsx(found, specs)
    held = {entry.name: entry for entry in source.entries}
    entries: list[Entry] = []
    changes: dict[str, Any] = {}
    for each in made:
        own = list(hugging_face.parted(each.spec, _entry(each, held)))
        entries += own
        scale = scales.get(each.scaled or "", 1.0)
        for entry in own:
            if not each.shares:
                rows = wanted.rows(each.spec) if each.is_router else None
                changes[entry.name] = partial(_drawn, rows)
            elif scale != 1:
                changes[entry.name] = partial(_scaled, scale)
    upcycled = Catalog(
        root=dense, format=source.format, entries=tuple(entries), facts={"hf_config": mixture},
        checksums=source.checksums, links_allowed=source.links_allowed,
    )  # fmt: skip
    target = hugging_face.target_of(upcycled, root, mixture)
    copied = tuple(
        Skeleton(file=path.name, num_bytes=path.stat().st_size, parts=((0, path.read_bytes()),))
        for path in sorted(dense.iterdir())
        if path.name in TOKENIZER_FILES and path.is_file()
    )
    target = replace(target, skeletons=(*target.skeletons, *copied))
    copies = plan(upcycled, target.catalog)
    jobs = tuple(replace(job, change=changes.get(job.source.name)) for job in copies.jobs)
    return Conversion(source=upcycled, target=target, layout=None, plan=replace(copies, jobs=jobs))


def _entry(made: Made, held: Mapping[str, Entry]) -> Entry:
    """A tensor of the mixture, its bytes where the dense one has them."""
    spec = made.spec
    if not made.shares:
        # Its values are drawn; a copy has to read as many all the same.
        entry = max(held.values(), key=lambda one: one.numel)
        first = entry.read_pieces[0]
        steps = (0,) * (len(spec.shape) - 1)
        pieces = [
            Piece(first.file, first.offset, (*at, 0), (*(1 for _ in steps), spec.shape[-1]), (*steps, 1))
            for at in product(*map(range, spec.shape[:-1]))
        ]
    else:
        entry, pieces = held[made.shares[0].name], []
        for share in made.shares:
            pieces += [_moved(piece, share.home, share.box) for piece in clipped(held[share.name], share.box)]
    role: Role = "buffer" if spec.buffer else "trained"
    return replace(entry, name=spec.name, shape=spec.shape, pieces=tuple(pieces), role=role, aliases=())


def _moved(piece: Piece, home: Box, box: Box) -> Piece:
    """A piece of a dense tensor inside ``box`` as one of the new tensor, of which that box is ``home``."""
    more = len(home) - len(box)  # the dim that counts experts
    lows = [low for low, _ in home]
    start = [at - low + new for at, (low, _), new in zip(piece.start, box, lows[more:], strict=True)]
    return replace(
        piece,
        start=(*lows[:more], *start),
        shape=(*(1 for _ in lows[:more]), *piece.shape),
        strides=(*(0 for _ in lows[:more]), *piece.strides),
    )


def _scaled(scale: float, values: Any, _: Box) -> Any:
    return values * scale


def _drawn(rows: Any, values: Any, tile: Box) -> Any:
    return values * 0 if rows is None else rows[tuple(slice(*span) for span in tile)]
