"""Errors about values that ``--set`` has put over a config say so: the file does not have them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dsx.config.load import SeveralProblemsError, raise_all
from dsx.errors import ConfigError, DsxError, KeyPlace

_TOLD = "--set)"
_MODEL = "dsx.model.overrides."


@contextmanager
def told_of_set(overrides: Sequence[str]) -> Iterator[None]:
    """Inside the block, errors say which value is not the file's.

    Args:
        overrides: ``key=value`` items, as ``--set`` takes them.
    """
    try:
        yield
    except DsxError as error:
        keys = [item.partition("=")[0].strip() for item in overrides]
        told = _told(error, keys)
        if told is error:
            raise
        for note in getattr(error, "__notes__", ()):
            told.add_note(note)
        raise told from None


def _told(error: DsxError, keys: Sequence[str]) -> DsxError:
    """The error that names the keys of ``--set`` which it is about; itself if it is about none."""
    if isinstance(error, SeveralProblemsError):
        problems = [_told(problem, keys) for problem in error.problems]
        if all(one is other for one, other in zip(problems, error.problems, strict=True)):
            return error
        try:
            raise_all(error.where, [each for each in problems if isinstance(each, ConfigError)])
        except ConfigError as several:
            return several
    found = [key for key in dict.fromkeys(keys) if _is_about(error, key)]
    if not found or error.where.endswith(_TOLD) or error.where.startswith("--set "):
        return error
    alone = error.where.count(" = ") < 2
    where = f"{error.where} ({_TOLD}" if alone else f"{error.where} ({', '.join(found)} by {_TOLD}"
    return type(error)(KeyPlace(where, error.path, error.value), error.what, error.fix)


def _is_about(error: DsxError, key: str) -> bool:
    if _begins(error.path, key):
        return True
    # A model's own keys are told by their names in its config.json.
    names = [key, key.removeprefix(_MODEL)] if key.startswith(_MODEL) else [key]
    return any(re.search(rf"(?<![\w.]){re.escape(name)}(?!\w)", error.where) for name in names)


def _begins(path: Sequence[str | int], key: str) -> bool:
    parts = key.split(".")
    return [str(part) for part in path[: len(parts)]] == parts
