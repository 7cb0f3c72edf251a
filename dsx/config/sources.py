"""Where a config's model, tokenizer and data come from: presets, files of this machine, names of the hub.

It also finds the files that come with dsx: recipes, configs, guides and the set of tested versions. In a
checkout they are where they are worked on; in a wheel they are in the package (``dsx/wheel.py``).
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from dsx.config.document import shipped
from dsx.config.load import read_hf_config
from dsx.config.schema import NO_TOKENIZER, OWN, DataConfig, DsxConfig, ModelConfig
from dsx.config.wording import at, either, suggest
from dsx.errors import ConfigError, ModelError
from dsx.models.config_values import with_floats
from dsx.models.family import BYTES_VOCABULARY
from dsx.models.hf_config import FAMILIES, model_spec
from dsx.models.presets import find_preset, presets
from dsx.models.spec import RETIRED, HubModel, Model
from dsx.terminal import shortened

# Kinds of files: plain text, and what `datasets` reads by the builder of that name.
TEXTS: Final = frozenset({".txt", ".text", ".md", ".rst", ".py"})
TABLES: Final = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
STANDARD_LIBRARY: Final = "python-stdlib"
PATTERN: Final = re.compile(r"[*?\[]")
FIX_OF_RETIRED: Final = "remove the key: transformers' modules train the same, and read its checkpoints"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def is_hub_name(word: str, suffixes: frozenset[str] = TEXTS | TABLES.keys()) -> bool:
    """Whether a word that is no file here may be a name of the hub: no path, pattern or file ending."""
    looks_local = word[0] in "./~" or Path(word).suffix in suffixes
    return not looks_local and _HUB_NAME.fullmatch(word) is not None


def missing(data: DataConfig) -> Iterator[ConfigError]:
    """Sources, a tokenizer and a template that are neither on this machine nor possible names of the hub."""
    for index, part in enumerate(data.parts()):
        key = f"dsx.data.sources[{index}].source" if data.sources else "dsx.data.source"
        if part.source != STANDARD_LIBRARY and not _is_there(part.source) and not is_hub_name(part.source):
            what = f"there is no such file or folder (looked for {Path(part.source).expanduser().absolute()})"
            yield ConfigError(at(key, part.source), what, f'check the path, or use "{STANDARD_LIBRARY}"')
    template = data.chat_template or "{"
    if "{" not in template and not _is_there(template):
        what = f"there is no such file (looked for {Path(template).expanduser().absolute()})"
        yield ConfigError(
            at("dsx.data.chat_template", template), what, "name a Jinja file, or write the template"
        )
    name = data.tokenizer
    if name not in ("auto", "bytes") and not _is_there(name) and not is_hub_name(name, frozenset()):
        what = f"there is no such folder (looked for {Path(name).expanduser().absolute()})"
        fix = 'give a folder with tokenizer files, a name of the hub, or "bytes"'
        yield ConfigError(at("dsx.data.tokenizer", name), what, fix)


def _is_there(word: str) -> bool:
    try:
        path = Path(word).expanduser()
        # glob.glob rather than Path.glob: the pattern may be absolute.
        return path.exists() or bool(PATTERN.search(word) and glob.glob(str(path), recursive=True))  # noqa: PTH207
    except (OSError, RuntimeError, ValueError):  # a name too long, an unknown home, a zero byte
        return False


BYTES = "bytes"

# Each alone makes a tokenizer for transformers' AutoTokenizer; vocab.json has its merges.txt beside it.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def resolve_tokenizer(dsx: DsxConfig, weights: Path | None) -> str:
    """Name of the tokenizer: the config's own, the model folder, "bytes", or "none" for samples of ids."""
    if dsx.data.tokenizer != "auto":
        return dsx.data.tokenizer
    folder = dsx.model.path
    if folder is not None and any((Path(folder) / name).is_file() for name in _VOCABULARIES):
        return folder
    if dsx.data.source == OWN:
        return NO_TOKENIZER
    if weights is None:
        return BYTES
    raise ConfigError(
        at("dsx.data.tokenizer", "auto"),
        f"{folder} has weights but no tokenizer ({', '.join(_VOCABULARIES)})",
        'copy its tokenizer files there, or name a tokenizer: a folder, a hub name, or "bytes"',
    )


def vocabulary_of(tokenizer: str) -> int | None:
    """Number of ids of a local tokenizer, if its JSON says it; otherwise None."""
    for name in ("tokenizer.json", "vocab.json"):
        try:
            content = json.loads((Path(tokenizer).expanduser() / name).read_text(encoding="utf-8"))
            words = content["model"]["vocab"] if name == "tokenizer.json" else content
            # A Unigram model lists its words; others have an id for each.
            ids: list[int] = list(words.values() if isinstance(words, dict) else range(len(words)))
            ids += [int(token["id"]) for token in content.get("added_tokens", ())]
            return 1 + int(max(ids))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue  # not there, or none that transformers would read
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model to build.

    Attributes:
        spec: Its architecture, or what transformers' modules are cut into.
        hf_config: The Hugging Face config that ``spec`` was read from, overrides included.
        weights: Folder whose safetensors it starts from; None for fresh weights.
        tokenizer: What ``dsx.data.tokenizer`` names, "auto" resolved.
    """

    spec: Model
    hf_config: dict[str, Any]
    weights: Path | None
    tokenizer: str
    notes: tuple[str, ...]


def read_model(dsx: DsxConfig) -> ModelSource:
    """The model that ``dsx.model`` names, with the vocabulary of the byte tokenizer if it is a preset.

    Raises:
        ConfigError: No such preset or folder, a bad override, weights or a tokenizer asked for where there
            are none.
        ModelError: A Hugging Face config that dsx cannot build.
    """
    model = dsx.model
    place, given = _read(model)
    config, notes = _of_language(given, place)
    weights = _weights(model)
    tokenizer = resolve_tokenizer(dsx, weights)
    family = config.get("model_type")
    if model.family is not None and family is None:
        raise ConfigError(
            at("dsx.model.family", model.family),
            f"{place} has no model_type",
            f'add "model_type": {json.dumps(model.family)} to it: it says how the other keys are read',
        )
    if model.family is not None and family != model.family:
        raise ConfigError(
            at("dsx.model.family", model.family),
            f"{place} has model_type {json.dumps(family)}",
            "leave family out, or name the right one",
        )
    is_own = _is_own(dsx, family, place)
    for key, value in model.overrides.items():
        known = set(config) | (FAMILIES[str(family)].keys if is_own else _keys_of(config, place))
        if key not in known:
            raise ConfigError(
                at(f"dsx.model.overrides.{key}", value), f"no key of a {family} config", suggest(key, known)
            )
    config = with_floats(config | model.overrides)
    if config.pop("auto_map", None) is not None:  # nor does an export of the run have such code
        notes.append(f"{place}: auto_map names code of the model's own, which is not run")
    is_free = model.preset is not None and "vocab_size" not in model.overrides
    if is_free and tokenizer == BYTES and config["vocab_size"] != BYTES_VOCABULARY:
        config["vocab_size"] = BYTES_VOCABULARY
        notes.append(
            f"preset {model.preset}: vocabulary {BYTES_VOCABULARY}, from the byte tokenizer "
            "(dsx.model.overrides.vocab_size sets another)"
        )
    try:
        config, spec = (config, model_spec(config)) if is_own else _of_hub(config, dsx.parallel.tensor_plan)
    except ModelError as error:
        raise ModelError(f"{place}: {error.where}", error.what, error.fix) from None
    if not is_own:
        notes.append(f"{place}: {family}, made of transformers' modules")
    if tokenizer == BYTES and spec.vocab_size < BYTES_VOCABULARY:
        raise ConfigError(
            f"{place}: vocab_size = {spec.vocab_size}",
            f'dsx.data.tokenizer "bytes" makes ids up to {BYTES_VOCABULARY - 1}',
            f"use at least {BYTES_VOCABULARY}, or the model's own tokenizer",
        )
    spec, seen = _with_pictures(spec, dsx, given, place, weights)
    notes += seen
    return ModelSource(
        spec=_adapted(spec, dsx, given),
        hf_config=config,
        weights=weights,
        tokenizer=tokenizer,
        notes=tuple(notes),
    )


def _of_language(config: dict[str, Any], place: str) -> tuple[dict[str, Any], list[str]]:
    """The language model's part of a config, where it is composed of several models, and that it is one."""
    if config.get("model_type") in FAMILIES:
        return config, []
    from dsx.hub.composite import language_config  # here: dsx's own families need nothing of it

    try:
        inner = language_config(config)
        family, kind = (each.get("model_type") for each in (inner, config))
        said = f"{place}: {family}, the language model of {kind}, whose other parts ride along untrained"
        return inner, [said] * (family != kind)
    except ModelError as error:
        raise ModelError(f"{place}: {error.where}", error.what, error.fix) from None


def spec_of(hf_config: Mapping[str, Any]) -> Model:
    """The model that a config.json describes, of dsx's own modules where it has them. Raises ModelError."""
    config = {key: value for key, value in hf_config.items() if key != "auto_map"}
    own = config.get("model_type") in tuple(FAMILIES)
    return model_spec(config) if own else _of_hub(config, {})[1]


def _with_pictures(
    spec: Model, dsx: DsxConfig, given: dict[str, Any], place: str, weights: Path | None
) -> tuple[Model, list[str]]:
    """The model, with the tower of the composite one if that runs. Raises ConfigError if there is none."""
    if not dsx.data.pictures:
        _refuse_tower(dsx, "no tower runs without pictures", "set dsx.data.pictures to true")
        return spec, []
    from dsx.hub.composite import text_key  # here: other runs need nothing of it

    def refusal(what: str, fix: str) -> ConfigError:
        return ConfigError(at("dsx.data.pictures", value=True), what, fix)

    if text_key(given) is None:
        raise refusal(f"{place} is of one model, which reads text", "name a composite model's folder")
    if weights is None:
        raise refusal("the tower is read from a folder with weights", 'leave dsx.model.weights at "auto"')
    if not isinstance(spec, HubModel) or "Positions" in spec.kinds or len(spec.stream) != 1:
        what = f"{spec.family if isinstance(spec, HubModel) else place} has other layers than transformers' "
        raise refusal(f"{what}blocks behind its word embedding", "train it on text alone")
    parallel = dsx.parallel
    for key, degree in (("context", parallel.context), ("expert", parallel.expert)):
        if degree not in (1, "auto"):
            what = f"{at(f'dsx.parallel.{key}', degree)}: ranks would share rows that have pictures in them"
            raise refusal(what, f"set dsx.parallel.{key} to 1")
    if dsx.adapter is not None:
        fix = "name the tower's modules in dsx.adapter.targets or train_also"
        _refuse_tower(dsx, "beside an adapter the model itself is frozen", fix)
    return _with_tower(spec, dsx, given, place), [f"{place}: its tower is on every rank of the first stage"]


def _refuse_tower(dsx: DsxConfig, what: str, fix: str) -> None:
    if dsx.train.tower:
        raise ConfigError(at("dsx.train.tower", list(dsx.train.tower)), what, fix)


def _with_tower(spec: HubModel, dsx: DsxConfig, given: dict[str, Any], place: str) -> HubModel:
    """The model with the tower, of which ``dsx.train.tower`` names parameters."""
    from dsx.hub.composite import with_tower  # here: other runs need nothing of it

    found = with_tower(spec, json.dumps(given, sort_keys=True), dsx.train.tower)
    names = {name for each in found.tower_params if not each.buffer for name in (each.hf_whole, *each.hf)}
    for number, pattern in enumerate(dsx.train.tower):
        if not any(re.search(pattern, name) for name in names):
            fix = suggest(pattern, {".".join(each.split(".")[:3]) for each in names}, otherwise=min(names))
            what = f"no parameter of the tower of {place} has it in its name"
            raise ConfigError(at(f"dsx.train.tower[{number}]", pattern), what, fix)
    return found


def _adapted(spec: Model, dsx: DsxConfig, given: dict[str, Any]) -> Model:
    """The model, which is in that of a config, with the adapter that the run's config asks for."""
    if dsx.adapter is None:
        return spec
    from dsx.config.adapter import adapter_of  # here: other runs need nothing of it

    modules = {}
    if given.get("model_type") not in FAMILIES:
        from dsx.hub.composite import modules_in  # here: as above

        modules = modules_in(given)
    return replace(spec, adapter=adapter_of(dsx.adapter, spec, modules=modules))


def _is_own(dsx: DsxConfig, family: object, place: str) -> bool:
    """Whether the layers are made of dsx's own modules. Raises ConfigError if they cannot be."""
    wanted, plan = dsx.model.implementation, dsx.parallel.tensor_plan
    has = isinstance(family, str) and family in FAMILIES
    if wanted == "dsx" and not has:
        raise ConfigError(
            at("dsx.model.implementation", wanted),
            f"{place} has model_type {json.dumps(family)}, and dsx has modules of {', '.join(FAMILIES)}"
            + f"; those of {family} that an earlier dsx had are gone" * (family in RETIRED),
            FIX_OF_RETIRED if family in RETIRED else 'use "transformers" or "auto"',
        )
    if dsx.data.pictures and has and wanted == "dsx":
        what = "the tower of pictures works with transformers' modules"
        raise ConfigError(at("dsx.model.implementation", wanted), what, 'use "transformers" or "auto"')
    is_own = has and wanted != "transformers" and not dsx.data.pictures
    if is_own and plan:
        raise ConfigError(
            at("dsx.parallel.tensor_plan", next(iter(plan))),
            "it is about transformers' modules, and dsx's own are cut as they are made",
            'set dsx.model.implementation to "transformers", or remove the plan',
        )
    return is_own


def _of_hub(config: Mapping[str, Any], plan: Mapping[str, str | None]) -> tuple[dict[str, Any], Model]:
    """The config as its family wants it, and the model that transformers makes of it."""
    text, model = _hub_model(json.dumps(config), tuple(plan.items()))
    return json.loads(text), model


@lru_cache(maxsize=8)
def _hub_model(text: str, plan: tuple[tuple[str, str | None], ...]) -> tuple[str, Model]:
    """The same of a config as JSON, and as JSON: a plan asks hundreds of times."""
    from dsx.hub.model_structure import check_keys, with_family_floats  # dsx's own families need neither
    from dsx.hub.read import hub_model

    config = with_family_floats(json.loads(text))
    check_keys(config)
    return json.dumps(config), hub_model(config, dict(plan))


def _keys_of(config: Mapping[str, Any], place: str) -> set[str]:
    from dsx.hub.model_structure import hf_config_of

    try:
        made = hf_config_of(config)
    except ModelError as error:
        raise ModelError(f"{place}: {error.where}", error.what, error.fix) from None
    return {*made.to_dict(), *made.attribute_map}


def _read(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    if model.preset is not None:
        preset = find_preset(model.family, model.preset)
        return f"dsx.model.preset {preset.name}", dict(preset.config)
    if model.config is not None:
        return "dsx.model.config", dict(model.config)
    assert model.path is not None
    where = at("dsx.model.path", model.path)
    file = Path(model.path) / "config.json"
    if not os.path.isfile(file):  # noqa: PTH113 - no exception for a name that no file can have
        raise ConfigError(
            where, f"there is no file {file}", "give a local Hugging Face model folder (download it first)"
        )
    try:
        return str(file), read_hf_config(file)
    except ConfigError as error:
        what = f"its config.json cannot be read ({error.where}: {error.what})"
        raise ConfigError(where, what, "give a complete model folder") from None


def _weights(model: ModelConfig) -> Path | None:
    """Folder to load weights from, None for fresh ones."""
    folder = None if model.path is None else Path(model.path)
    if folder is not None and model.weights != "random" and any(folder.glob("*.safetensors")):
        return folder
    pickled = (
        next(folder.glob("pytorch_model*.bin"), None)
        if folder is not None and model.weights != "random"
        else None
    )
    if model.weights == "load" or pickled is not None:
        what = f"{folder} holds no *.safetensors" + (f", but {pickled.name}" if pickled is not None else "")
        fix = 'save the weights as safetensors, or set weights to "random"'
        if folder is None:
            what = "a preset or an inline config has no weights"
            fix = "give dsx.model.path, a Hugging Face folder, instead"
        raise ConfigError(at("dsx.model.weights", model.weights), what, fix)
    return None


def find_model(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``dsx.model`` block of what ``--model`` names, and the Hugging Face config behind it.

    Args:
        model: A preset, as ``llama-3-8b`` or ``gpt2/tiny``; a Hugging Face config.json; or a model folder.
    """
    where = f"--model {model}"
    path = Path(model)
    try:
        path.exists()
    except OSError as error:  # a name that no file can have
        raise ConfigError(shortened(where, 80), str(error.strerror), "give a path that can be") from None
    if path.is_dir():
        file = path / "config.json"
        if not file.is_file():
            raise ConfigError(
                where, "the folder has no config.json", "give a Hugging Face model folder, or a preset's name"
            )
        return {"path": model, "weights": "random"}, _of_language(read_hf_config(file), str(file))[0]
    if path.is_file():
        config = read_hf_config(path)
        if "model_type" not in config:
            raise ConfigError(where, "it has no model_type", "give a Hugging Face config.json")
        return {"config": config}, _of_language(config, str(path))[0]
    if path.suffix == ".json":
        raise ConfigError(where, "there is no such file", "give a Hugging Face config.json")
    family, _, name = model.rpartition("/")
    known = {preset.family for preset in presets()}
    if family and family not in known:
        raise ConfigError(
            where,
            "there is no such folder, and no such family of presets",
            f"give a folder with a config.json, or a preset such as {min(known)}/{name}",
        )
    families = [preset.family for preset in presets() if preset.name == name]
    if not family and len(families) > 1:
        fix = f"write {either([f'{each}/{name}' for each in families])}"
        raise ConfigError(where, "several families have a preset of this name", fix)
    names = [preset.name for preset in presets() if family in ("", preset.family)]
    if name not in names:
        what = f"there is no such preset, file or folder; presets are {', '.join(dict.fromkeys(names))}"
        raise ConfigError(
            where, what, suggest(name, names, otherwise="name one, or the path of a config.json")
        )
    preset = find_preset(family or None, name)
    config = json.loads(json.dumps(preset.config))
    block = {"preset": name, "family": preset.family, "overrides": {"vocab_size": config["vocab_size"]}}
    return block, config


_PINS = "constraints.txt"
_WARNED_OF = ("torch", "transformers", "datasets")  # another DeepSpeed is refused (dsx/engine/zero)


def newer_than_tested() -> tuple[str, ...]:
    """A sentence for each package whose major or minor version is above the one that dsx is tested with."""
    try:
        text = shipped(_PINS).read_text(encoding="utf-8")
    except ConfigError:
        return ()
    told = []
    for name in _WARNED_OF:
        pin = re.search(rf"^{name}==(\S+)$", text, flags=re.MULTILINE)
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        if pin is not None and _release(version) > _release(pin[1]):
            told.append(f"{name} {version} is newer than {pin[1]}, the newest that this dsx is tested with")
    return tuple(told)


def _release(version: str) -> tuple[int, ...]:
    """Major and minor number.

    >>> _release("2.13.0+cpu"), _release("3.0rc1")
    ((2, 13), (3, 0))
    """
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
