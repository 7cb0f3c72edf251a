"""A composite model's folder around the language model that is trained: what rides along, and the names.

A run reads the language model's tensors alone, and its checkpoints hold these. What it exports is the whole
folder again: the other tensors byte for byte, the trained ones under the names that the folder has for them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from dsx.checkpoint.base import digest_of, folder_of, moved_below
from dsx.checkpoint.catalog import Catalog, Entry, Skeleton
from dsx.checkpoint.claims import modules_in, text_key
from dsx.checkpoint.formats.huggingface import catalog as hugging_face
from dsx.checkpoint.formats.huggingface.catalog import parted
from dsx.checkpoint.formats.huggingface.names import PROCESSOR_FILES, TOKENIZER_FILES, read_config
from dsx.checkpoint.merge import Merge
from dsx.config.run import RunConfig
from dsx.errors import CheckpointError
from dsx.models.param import ParamSpec

_HOME = "composite"
"""What files of the folder begin with, in a catalog of a checkpoint and it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Composite:
    """A composite model's folder.

    Attributes:
        folder: Its tensors under its own names.
        key: The part of its config that is the language model's.
        names: The folder's name of each tensor of the language model, by that in a folder of its own.
        apart: Tensors of the language model of which the folder has parts, by the same name.
        beside: The folder's name of each of the tower's, by that which transformers writes.
        architecture: transformers' class of it.
    """

    folder: Catalog
    key: str
    names: Mapping[str, str]
    apart: Mapping[str, ParamSpec]
    beside: Mapping[str, str]
    architecture: str

    def tower(self, held: Collection[str]) -> tuple[Entry, ...]:
        """Every tensor that is neither the language model's nor ``held``; one of whatever type keeps it."""
        inside = {*self.names.values(), *held}
        return tuple(replace(one, role="buffer") for one in self.folder.entries if one.name not in inside)

    def config_with(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json around a language model of a config, and the class that reads it."""
        own = {"architectures": [self.architecture], **self.folder.facts["hf_config"]}
        return own | {self.key: hugging_face.with_dtype(text, ())}

    def inside(self, spec: ParamSpec) -> ParamSpec:
        """A parameter in the folder's form, under its names."""
        names = self.beside if spec.tower else self.names
        if not spec.tower:
            spec = replace(self.apart.get(spec.hf[0], spec), name=spec.name)
        return replace(spec, hf=tuple(names[name] for name in spec.hf))

    def around(self, source: Catalog) -> Catalog:
        """Tensors of the language model by itself in the folder's form, under its names."""
        parts = {name: spec.hf for name, spec in self.apart.items()}
        entries = (
            parted(self.apart[one.name], one) if one.name in parts else (one,) for one in source.entries
        )
        kept = {own: types for name, types in source.float32.items() for own in parts.get(name, (name,))}
        divided = replace(source, entries=tuple(chain.from_iterable(entries)), float32=kept)
        return hugging_face.under_model_names(divided, {**self.names, **self.beside})

    def merged(self, merge: Merge) -> Merge:
        """The same of what is added to weights."""
        products = {}
        for name, product in merge.products.items():
            first, spec = product.rows.start, self.apart.get(name)
            boxes = () if spec is None else spec.hf_boxes
            spans = {own: slice(first + box[0][0], first + box[0][1]) for own, box in boxes}
            for own, rows in (spans or {name: product.rows}).items():
                products[{**self.names, **self.beside}[own]] = replace(product, rows=rows)
        return replace(merge, source=self.around(merge.source), products=products)


def composite_at(root: Path | None, *, tower: bool = False) -> Composite | None:
    """The composite model in a folder; None if there is none, or the folder is of one model.

    ``tower``: Whether anything of its tower was trained, so that the folder must have all of it.

    Raises:
        CheckpointError: The folder cannot be read.
        ModelError: Its language model cannot be told apart.
    """
    config = {} if root is None else read_config(root)
    key = text_key(config)
    if root is None or key is None:
        return None
    from dsx.hub.composite import CompositeNames  # here: other models need no transformers

    folder, known = hugging_face.catalog_of(root), CompositeNames(config)
    found = known.of(folder.by_name, root)
    names = known.names | {own: name for name, own in found.items() if own is not None}
    others = known.of_tower(folder.by_name, root) if tower else {}
    beside = {own: name for name, own in others.items() if own is not None}
    return Composite(
        folder=folder,
        key=key,
        names=names,
        apart={spec.name: spec for spec in known.apart},
        beside=beside,
        architecture=known.architecture,
    )


def fact_of(root: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The fact ``composite`` of a language model in a folder of a config.json; None if it is all that is."""
    modules = modules_in(config)
    return {"path": str(root.absolute()), "digest": digest_of(root), "modules": modules} if modules else None


def composite_fact(config: RunConfig | None) -> dict[str, Any] | None:
    """The same of a run's model."""
    if config is not None and config.weights is not None:
        with suppress(CheckpointError):  # that the folder is gone keeps no run from saving
            return fact_of(config.weights, read_config(config.weights))
    return None


def whole(source: Catalog, merge: Merge | None, folder: Path | None) -> tuple[Catalog, Merge | None]:
    """A checkpoint under Hugging Face's names with the rest of the composite model that it was trained in.

    Args:
        source: A checkpoint; one of a language model by itself stays as it is.
        merge: What is added to its weights.
        folder: The composite model's folder; where the checkpoint says by default.

    Raises:
        CheckpointError: The folder is gone, or another.
    """
    fact = source.facts.get("composite")
    if fact is None:
        return source, merge
    root, tower = folder_of(source, fact, folder, "the other parts of the model"), source.facts.get("model")
    found = composite_at(root, tower="pictures" in (tower or {}))
    assert found is not None, "a digest tells one folder from another"
    merge = None if merge is None else found.merged(merge)
    source = found.around(source)
    others = (replace(each, pieces=moved_below(_HOME, each)) for each in found.tower(source.by_name))
    sums = (replace(one, file=f"{_HOME}/{one.file}") for one in found.folder.checksums)
    return replace(
        source,
        entries=(*source.entries, *others),
        facts={**source.facts, "hf_config": found.config_with(source.facts["hf_config"])},
        checksums=(*source.checksums, *sums),
        others={**source.others, _HOME: found.folder},
    ), merge


def other_files(source: Catalog) -> Iterator[Skeleton]:
    """What a composite model's folder has about its texts and images, of a checkpoint that is ``whole``."""
    if _HOME in source.others:
        for path in sorted(source.others[_HOME].root.iterdir()):
            if path.name in TOKENIZER_FILES | PROCESSOR_FILES:
                data = path.read_bytes()
                yield Skeleton(file=path.name, num_bytes=len(data), parts=((0, data),))
