"""A composite model's folder around the language model that is trained: what rides along, and under what names.

A run reads the language model's tensors alone, and its checkpoints hold these. What it exports is the whole
folder again: the other tensors byte for byte, the trained ones under the names that the folder has for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from contextlib import suppress
from pathlib import Path
from typing import Any

from dsx.checkpoint.base import digest_of, folder_of
from dsx.checkpoint.catalog import Catalog, Entry, Skeleton
from dsx.checkpoint.formats.huggingface import catalog as hugging_face
from dsx.checkpoint.formats.huggingface.names import CONFIG, PROCESSOR_FILES, TOKENIZER_FILES, read_config
from dsx.checkpoint.merge import Merge
from dsx.config.run import RunConfig
from dsx.errors import CheckpointError
from dsx.models.hf_config import FAMILIES
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
        architecture: transformers' class of it.
    """

    folder: Catalog
    key: str
    names: Mapping[str, str]
    architecture: str

    @property
    def config(self) -> dict[str, Any]:
        """Content of its config.json."""
        return dict(self.folder.facts["hf_config"])

    @property
    def tower(self) -> tuple[Entry, ...]:
        """Every tensor that is not the language model's; kept in its type whatever that is."""
        inside = set(self.names.values())
        return tuple(
            replace(entry, role="buffer") for entry in self.folder.entries if entry.name not in inside
        )

    def config_with(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json around a language model of a config, and the class that reads it."""
        own = hugging_face.with_dtype(text, ())
        return {"architectures": [self.architecture], **self.config, self.key: own}

    def inside(self, spec: ParamSpec) -> ParamSpec:
        """A parameter of the language model under the folder's names."""
        return replace(spec, hf=tuple(self.names[name] for name in spec.hf))


def composite_at(root: Path | None) -> Composite | None:
    """The composite model in a folder; None if there is none, or the folder is of one model.

    Raises:
        CheckpointError: The folder cannot be read.
        ModelError: Its language model cannot be told apart.
    """
    config = {} if root is None else read_config(root)
    key = _key_of(config)
    if root is None or key is None:
        return None
    from dsx.hub.composite import CompositeNames  # here: dsx's own families need no transformers

    folder, known = hugging_face.catalog_of(root), CompositeNames(config)
    found = known.of(folder.by_name, root)
    names = known.names | {own: name for name, own in found.items() if own is not None}
    return Composite(folder=folder, key=key, names=names, architecture=known.architecture)


def _key_of(config: Mapping[str, Any]) -> str | None:
    if config.get("model_type", "") in ("", *FAMILIES):
        return None
    from dsx.hub.composite import text_key  # here: as above

    return text_key(config)


def composite_fact(config: RunConfig | None) -> dict[str, Any] | None:
    """The fact ``composite`` of a run's checkpoints; None if its model is a folder's whole one."""
    if config is None or config.weights is None:
        return None
    with suppress(CheckpointError):  # that the folder is gone keeps no run from saving
        return fact_of(config.weights, read_config(config.weights))
    return None


def fact_of(root: Path, config: Mapping[str, Any]) -> dict[str, str] | None:
    """The fact ``composite`` of a language model read from a folder with a config.json; None as above."""
    return {"path": str(root.absolute()), "digest": digest_of(root)} if _key_of(config) else None


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language model in a folder; of any folder."""
    if _key_of(config) is None:
        return dict(config)
    from dsx.hub import composite  # here: as above

    return composite.language_config(config)


def whole(source: Catalog, merge: Merge | None, folder: Path | None) -> tuple[Catalog, Merge | None]:
    """A checkpoint under Hugging Face's names with the rest of the composite model that it was trained in.

    Args:
        source: A checkpoint, or a language model of a folder of its own, which stays as it is.
        merge: What is added to its weights.
        folder: The composite model's folder; where the checkpoint says by default.

    Raises:
        CheckpointError: The folder is gone, or another.
    """
    fact = source.facts.get("composite")
    if fact is None:
        return source, merge
    found = composite_at(folder_of(source, fact, folder, "the other parts of the model"))
    assert found is not None, "a digest tells one folder from another"
    names = found.names
    if merge is not None:
        merge = replace(
            merge,
            source=hugging_face.under_model_names(merge.source, names),
            products={names[name]: product for name, product in merge.products.items()},
        )
    tower = tuple(
        replace(entry, pieces=tuple(replace(one, file=f"{_HOME}/{one.file}") for one in entry.pieces))
        for entry in found.tower
    )
    inner = hugging_face.under_model_names(source, names)
    facts = {**source.facts, "hf_config": found.config_with(source.facts["hf_config"])}
    checksums = tuple(replace(one, file=f"{_HOME}/{one.file}") for one in found.folder.checksums)
    return replace(
        inner,
        entries=(*inner.entries, *tower),
        facts=facts,
        checksums=(*inner.checksums, *checksums),
        others={**inner.others, _HOME: found.folder},
    ), merge


def other_files(source: Catalog) -> Iterator[Skeleton]:
    """Files of a composite model's folder about its texts and images, of a checkpoint that :func:`whole` gave."""
    if _HOME in source.others:
        for path in sorted(source.others[_HOME].root.iterdir()):
            if path.name in TOKENIZER_FILES | PROCESSOR_FILES:
                data = path.read_bytes()
                yield Skeleton(file=path.name, num_bytes=len(data), parts=((0, data),))
