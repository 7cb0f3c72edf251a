"""Where the frozen parameters of a run are from, which its checkpoints leave out: a folder, or a seed.

They are what building the model gives, so that a checkpoint of a run says where that is, and what is trained
is all that it holds. Whoever needs the whole model puts both together (:func:`completed`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsx.checkpoint.catalog import Catalog, Entry, Piece, model_fact
from dsx.checkpoint.claims import MISFITS, forms_of, model_of_fact, text_key
from dsx.checkpoint.file_io import blamed
from dsx.checkpoint.formats.deepspeed.module import as_model
from dsx.checkpoint.formats.huggingface import catalog as hugging_face
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
