"""Where the model comes from: a preset, an inline Hugging Face config, or a Hugging Face folder."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.config.load import read
from dsx.config.presets import BYTES_VOCABULARY, config_keys, find_preset
from dsx.config.problems import at, suggest
from dsx.config.schema import DsxConfig, ModelConfig
from dsx.config.tokenizer_source import BYTES, resolve_tokenizer
from dsx.errors import ConfigError, ModelError
from dsx.plan.hf_config import model_spec
from dsx.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """A model to build.

    Attributes:
        spec: Its architecture.
        hf_config: The Hugging Face config that ``spec`` was read from, overrides included.
        weights: Folder whose safetensors it starts from; None for fresh weights.
        tokenizer: What ``dsx.data.tokenizer`` names, "auto" resolved.
        notes: Choices that the user did not write.
    """

    spec: ModelSpec
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
    place, config = _read(model)
    weights = _weights(model)
    tokenizer = resolve_tokenizer(dsx, weights)
    family = config.get("model_type")
    if model.family is not None and family != model.family:
        raise ConfigError(
            at("dsx.model.family", model.family),
            f"{place} has model_type {json.dumps(family)}",
            "leave family out, or name the right one",
        )
    for key, value in model.overrides.items():
        known = config_keys(str(family)) | set(config)
        if key not in known:
            raise ConfigError(
                at(f"dsx.model.overrides.{key}", value), f"no key of a {family} config", suggest(key, known)
            )
    config |= model.overrides
    notes = []
    if config.pop("auto_map", None) is not None:  # nor does an export of the run have such code
        notes.append(f"{place}: auto_map names code of the model's own, which is not run: dsx has {family}")
    is_free = model.preset is not None and "vocab_size" not in model.overrides
    if is_free and tokenizer == BYTES and config["vocab_size"] != BYTES_VOCABULARY:
        config["vocab_size"] = BYTES_VOCABULARY
        notes.append(
            f"preset {model.preset}: vocabulary {BYTES_VOCABULARY}, from the byte tokenizer "
            "(dsx.model.overrides.vocab_size sets another)"
        )
    try:
        spec = model_spec(config)
    except ModelError as error:
        raise ModelError(f"{place}: {error.where}", error.what, error.fix) from None
    if tokenizer == BYTES and spec.vocab_size < BYTES_VOCABULARY:
        raise ConfigError(
            f"{place}: vocab_size = {spec.vocab_size}",
            f'dsx.data.tokenizer "bytes" makes ids up to {BYTES_VOCABULARY - 1}',
            f"use at least {BYTES_VOCABULARY}, or the model's own tokenizer",
        )
    return ModelSource(spec=spec, hf_config=config, weights=weights, tokenizer=tokenizer, notes=tuple(notes))


def _read(model: ModelConfig) -> tuple[str, dict[str, Any]]:
    """The config before overrides, and what to call it in messages."""
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
        return str(file), read(file)
    except ConfigError as error:
        place = error.where.removeprefix(f"{file}").removeprefix(", ").removeprefix(": ")
        what = ": ".join(filter(None, (place, error.what)))
        raise ConfigError(where, f"{file} cannot be read ({what})", "give a complete model folder") from None


def _weights(model: ModelConfig) -> Path | None:
    """Folder to load weights from, None for fresh ones."""
    if model.path is None:
        if model.weights == "load":
            raise ConfigError(
                at("dsx.model.weights", "load"),
                "a preset or an inline config has no weights",
                "give dsx.model.path, a Hugging Face folder, instead",
            )
        return None
    folder = Path(model.path)
    if model.weights == "random":
        return None
    if any(folder.glob("*.safetensors")):
        return folder
    if model.weights == "load":
        raise ConfigError(
            at("dsx.model.weights", "load"),
            f"{folder} holds no *.safetensors",
            'save the weights as safetensors, or set weights to "random"',
        )
    return None
