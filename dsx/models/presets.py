"""The built-in models of all families, and each by its name."""

from __future__ import annotations

from typing import get_args

from dsx.config.wording import at, either, suggest
from dsx.errors import ConfigError
from dsx.models.family import Preset, shipped_presets
from dsx.models.hf_config import FAMILIES
from dsx.models.spec import PresetFamily


def presets() -> tuple[Preset, ...]:
    """Every built-in model, smallest first within a family."""
    return tuple(
        preset
        for name in get_args(PresetFamily)
        for preset in (FAMILIES[name].presets if name in FAMILIES else shipped_presets(name))
    )


def find_preset(family: PresetFamily | None, name: str) -> Preset:
    """The preset called ``name``, of ``family`` when that is given. Raises ConfigError."""
    named = [preset for preset in presets() if preset.name == name]
    found = [preset for preset in named if family in (None, preset.family)]
    if len(found) == 1:
        return found[0]
    if found:
        fix = f"set dsx.model.family to {either([preset.family for preset in found])}"
        raise ConfigError(at("dsx.model.preset", name), "several families have it", fix)
    if named:
        of = named[0].family
        raise ConfigError(
            at("dsx.model.family", family),
            f'preset "{name}" is of family "{of}"',
            f'use "{of}" or leave it out',
        )
    names = [preset.name for preset in presets() if family in (None, preset.family)]
    raise ConfigError(
        at("dsx.model.preset", name),
        f"there is no such preset; there are {', '.join(dict.fromkeys(names))}",
        suggest(name, names, otherwise="name one of these"),
    )
