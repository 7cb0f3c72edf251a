"""What dsx brings besides its code: recipes, configs, guides and the set of versions that it is tested with.

In a checkout they are where they are worked on; a wheel installs them under ``share/dsx`` of the environment.
"""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

from dsx.errors import ConfigError

GUIDES = Path(__file__).parents[1] / "guides"
"""A page each, in Markdown."""

_CHECKOUT = Path(__file__).parents[2]
_PINS = "constraints.txt"
_WARNED_OF = ("torch", "transformers", "datasets")  # another DeepSpeed is refused (runtime/zero_adapters)


def shipped(name: str) -> Path:
    """The file ``recipes/NAME.py``, ``configs/NAME.json`` or ``constraints.txt``.

    Raises:
        ConfigError: The installation lacks it.
    """
    if (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / name).is_file():
        return _CHECKOUT / name
    place = ("share", "dsx", *Path(name).parts)
    try:
        files = metadata.files("dsx") or ()
    except metadata.PackageNotFoundError:
        files = ()
    for file in files:
        if file.parts[-len(place) :] == place:
            found = Path(str(file.locate())).resolve()
            if found.is_file():
                return found
    raise ConfigError(
        name, "this installation of dsx lacks it", "install dsx with pip, from a wheel or a checkout"
    )


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
