"""A model by its name on the command line: a preset, a Hugging Face config or folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dsx.config.load import read
from dsx.config.presets import find_preset, presets
from dsx.config.wording import either, suggest
from dsx.errors import ConfigError
from dsx.terminal import shortened


def find_model(model: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The ``dsx.model`` block of what ``--model`` names, and the Hugging Face config behind it.

    Args:
        model: A preset, as ``llama-3-8b`` or ``gpt2/tiny``; a Hugging Face config.json; or a model folder.

    Raises:
        ConfigError: There is no such preset, file or folder, or the folder has no config.json.
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
        return {"path": model, "weights": "random"}, read(file)
    if path.is_file():
        config = read(path)
        if "model_type" not in config:
            raise ConfigError(where, "it has no model_type", "give a Hugging Face config.json")
        return {"config": config}, config
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
