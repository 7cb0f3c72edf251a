"""What a run's checkpoints leave out: frozen parameters, and the model around a trained language model.

Frozen parameters are what building the model gives, of a folder or a seed, so that a checkpoint of a run says
where that is, and what is trained is all that it holds. Whoever needs the whole model puts both together
(:func:`completed`).

Of a composite model a run reads the language model's tensors alone, and its checkpoints hold these. What it
exports is the whole folder again (:func:`whole`): the other tensors byte for byte, the trained ones under the
names that the folder has for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from dsx.checkpoint.catalog import Catalog, Entry, Piece, Skeleton, model_fact
from dsx.checkpoint.claims import MISFITS, forms_of, model_of_fact, modules_in, text_key
from dsx.checkpoint.file_io import blamed
from dsx.checkpoint.formats.deepspeed.module import as_model
from dsx.checkpoint.formats.huggingface import catalog as hugging_face
from dsx.checkpoint.formats.huggingface.catalog import parted
from dsx.checkpoint.formats.huggingface.names import PROCESSOR_FILES, TOKENIZER_FILES, read_config
from dsx.checkpoint.merge import Merge
from dsx.config.run import RunConfig
from dsx.errors import CheckpointError
from dsx.models.param import ParamSpec
from dsx.models.params import stored_specs, tower_specs
from dsx.models.spec import RETIRED, HubModel, Model

_SAMPLE_BYTES = 1 << 20


def is_left_out(spec: ParamSpec, config: RunConfig | None) -> bool:
    """Whether checkpoints of a run leave out a parameter: where nobody says what it was built from, none."""
    return config is not None and not spec.trained and not spec.buffer


def base_fact(config: RunConfig | None) -> dict[str, Any] | None:
    """The fact ``base`` of a run's checkpoints; None if they hold the whole model."""
    if config is None or not any(is_left_out(spec, config) for spec in config.param_specs):
        return None
    multiple = config.dsx.model.vocab_multiple
    if config.weights is None:
        return {"seed": config.dsx.train.seed, "vocab_multiple": multiple}
    fact = {"path": str(config.weights.absolute()), "vocab_multiple": multiple}
    with suppress(CheckpointError):  # that the folder is gone keeps no run from saving
        fact["digest"] = digest_of(config.weights)
    return fact


def digest_of(folder: Path) -> str:
    """Of a model folder's weights: the names and sizes of their files, and the ends of each.

    Weights that were trained from the same start differ there, and reading all would take as long as loading.
    """
    content = hashlib.sha256()
    for name in sorted(hugging_face.catalog_of(folder).files):
        path = folder / name
        with blamed(path, "its ends", "reading", "restore the folder"), path.open("rb") as file:
            size = path.stat().st_size
            content.update(f"{name} {size} ".encode() + file.read(_SAMPLE_BYTES))
            file.seek(max(0, size - _SAMPLE_BYTES))
            content.update(file.read(_SAMPLE_BYTES))
    return content.hexdigest()


def require_same_base(catalog: Catalog, config: RunConfig | None) -> None:
    """Raise CheckpointError if what a checkpoint leaves out is not what this run has been built from.

    A folder may have moved.
    """
    there, here = catalog.facts.get("base"), base_fact(config)
    if config is None or there is None or here is None:
        return
    theirs = "config" in catalog.facts.get("model", {})
    if "seed" in there and "seed" in here and theirs != isinstance(config.model, HubModel):
        raise CheckpointError(
            str(catalog.root),
            f"its frozen parameters are left out, and are {told(there)} in "
            f"{'transformers' if theirs else 'dsx'}'s modules, of which this run's model is not made: "
            "its fresh ones are others",
            "use the dsx.model.implementation that wrote it, of a dsx that has it, or export it there "
            "(dsx.train.export_hf) and give the folder as dsx.model.path",
        )
    if all(there.get(key) == here.get(key) for key in ("seed", "digest")):
        return
    fix = f"dsx.train.seed = {there['seed']}" if "seed" in there else f"dsx.model.path = {there['path']}"
    raise CheckpointError(
        str(catalog.root),
        f"its frozen parameters are left out, and are {told(there)}; this run's are {told(here)}",
        f"set {fix}, with the weights that were there when the run began",
    )


def told(fact: Mapping[str, Any]) -> str:
    """A fact ``base`` for people."""
    if "seed" in fact:
        return f"fresh ones of seed {fact['seed']}"
    return f"those in {fact['path']} (digest {str(fact.get('digest'))[:12]})"


def of_today(source: Catalog) -> Catalog:
    """A checkpoint of modules that an earlier dsx had of a family as one of transformers' modules of it.

    One of a model that is trained whole stays as it is: its manifest says all that is needed.
    """
    fact, config = source.facts.get("model") or {}, source.facts.get("hf_config")
    is_whole = fact.get("adapter") is None and source.facts.get("base") is None
    if fact.get("family") not in RETIRED or "config" in fact or config is None or is_whole:
        return source
    model = model_of_fact({"config": config, "adapter": fact.get("adapter")})
    held = {name for spec in source.specs for name in spec.hf}
    renamed = hugging_face.as_dsx(source, [spec for spec in stored_specs(model) if held.issuperset(spec.hf)])
    return replace(renamed, facts={**renamed.facts, "model": model_fact(model)})


def completed(source: Catalog, folder: Path | None = None) -> Catalog:
    """A checkpoint with what it leaves out, of ``folder`` or the one that it names, where that stays."""
    fact = source.facts.get("base")
    if fact is None:
        if folder is not None and source.facts.get("composite") is None:
            raise CheckpointError(
                f"--base {folder}", f"{source.root} holds the whole model", "leave --base out"
            )
        return source
    if "seed" in fact:
        raise CheckpointError(
            str(source.root),
            f"its frozen parameters are left out, and are {told(fact)}",
            "load it in a run of the same model and seed, and export that (dsx.train.export_hf)",
        )
    root = folder_of(source, fact, folder, "the frozen parameters")
    return _with(source, hugging_face.catalog_of(root), fact)


def folder_of(source: Catalog, fact: Mapping[str, Any], folder: Path | None, what: str) -> Path:
    """The model folder that a fact names, or where it is now. Raises CheckpointError if it is another."""
    root = Path(fact["path"]) if folder is None else folder
    if not root.is_dir() or ("digest" in fact and fact["digest"] != digest_of(root)):
        why = "the weights there are others" if root.is_dir() else "there is no such folder"
        raise CheckpointError(
            f"{root}: {what} of {source.root}",
            why if folder is None else f"{why} than {told(fact)}",
            "name the folder that the run began from with --base",
        )
    return root


def _with(source: Catalog, base: Catalog, fact: Mapping[str, Any]) -> Catalog:
    """Both as one catalog under dsx's names."""
    facts = source.facts
    try:
        model = model_of_fact(facts["model"]).for_tensor(facts["mesh"]["tp"])
        specs = stored_specs(model, pad_multiple=int(fact["vocab_multiple"]))
    except MISFITS as error:
        raise CheckpointError(
            f"{source.root}: model", f"it cannot be made again ({error})", "use the dsx that wrote it"
        ) from error
    plain = replace(model, adapter=None)
    own = stored_specs(plain, pad_multiple=int(fact["vocab_multiple"]))
    base = as_model(under_known_names(base, plain), own, forms=forms_of(facts.get("hf_config") or {}))
    wanted = {spec.name for spec in own} - {entry.name for entry in source.entries}
    added = tuple(
        replace(entry, role="frozen", pieces=moved_below(_BASE, entry))
        for entry in base.entries
        if entry.name in wanted
    )
    order = {spec.name: at for at, spec in enumerate(specs)}
    entries = sorted((*source.entries, *added), key=lambda entry: order.get(entry.name, len(order)))
    return replace(
        source,
        entries=tuple(entries),
        facts={key: value for key, value in facts.items() if key != "base"},
        specs=specs,
        checksums=(*source.checksums, *(replace(one, file=f"{_BASE}/{one.file}") for one in base.checksums)),
        others={_BASE: base},
    )


_BASE = "base"
"""What files of the base begin with."""


def moved_below(folder: str, entry: Entry) -> tuple[Piece, ...]:
    """An entry's pieces, whose files are in a folder beside the others of a catalog."""
    found = []
    for piece in entry.pieces:
        packed = piece.packed
        if packed is not None:
            parts = tuple(replace(one, pieces=moved_below(folder, one)) for one in packed.parts)
            packed = replace(packed, parts=parts)
        found.append(replace(piece, file=f"{folder}/{piece.file}", packed=packed))
    return tuple(found)


def under_known_names(source: Catalog, model: Model | None) -> Catalog:
    """A checkpoint with the names that its model knows, whatever wrote the folder that it is."""
    if source.format != hugging_face.FORMAT or model is None:
        return source
    names_of, apart = names_in(source.facts.get("hf_config") or {}, model)
    if names_of is None:
        return source
    return hugging_face.under_model_names(source, names_of(source.by_name, source.root), apart)


def names_in(
    config: Mapping[str, Any], model: Model
) -> tuple[hugging_face.NamesOf | None, Sequence[ParamSpec]]:
    """What gives a model's names of tensors in a folder of a config.json; None if they are the same.

    With those of which the folder has parts, as :func:`~hugging_face.under_model_names` takes them.
    """
    if text_key(config) is not None:
        from dsx.hub.composite import CompositeNames  # here: as below

        beside = [spec.hf_whole for spec in tower_specs(model) if not spec.adapts]
        return (names := CompositeNames(config, beside)).of, names.apart
    if not isinstance(model, HubModel):
        return None, ()
    from dsx.hub.read import folder_names  # here: dsx's own families need neither torch nor transformers

    return folder_names(model).of, ()


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
