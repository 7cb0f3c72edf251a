"""Words of error messages: a key with its value, the nearest known word, a list of choices."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsx.errors import KeyPlace

Path = tuple[str | int, ...]
"""The path of a key, from the top of a config."""

_MAX_VALUE_CHARACTERS = 80
_SUM_UP_AFTER = 12
# Words more similar than this differ by a slip of the finger.
_TYPO = 0.9


_SECRET = re.compile(
    r"(^|.*_)(passwd|password|passphrase|pass|pwd|secret|credentials?|authorization|cookie|dsn|pat|webhook(_url)?"
    r"|connection_string|access_key_id|(access|account|api|comet|encryption|license|private|secret|service"
    r"|signing|ssh|subscription|wandb)_?key|(access|api|auth|bearer|bot|comet|git|github|gitlab|hf|hub"
    r"|hugging_?face|id|jwt|refresh|sas|security|service|session|slack|user|wandb)_?token)|token|bearer",
    re.IGNORECASE,
)
# What stands in an address, and what begins as the keys of those who give keys do.
_IN_TEXT = re.compile(
    r"(?P<before>://)[^/@\s:]*:[^/@\s]+(?=@)"
    r"|(?P<name>[?&](?:[\w-]*[_-])?(?i:(?:api)?key|token|secret|password|sig|signature)=|\b(?i:bearer) )"
    r"[^\s&#]+"
    r"|\b(?:(?:hf|gh[a-z])_[A-Za-z0-9]{30,}|github_pat_\w{30,}|(?:glpat|xox[a-z]|sk)-[\w-]{20,}"
    r"|A[KS]IA[A-Z0-9]{16}\b)",
)
HIDDEN = "***"
"""In the place of a secret in what is recorded, printed or sent."""


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of a JSON value in which :data:`HIDDEN` stands for the texts of keys that are secrets.

    Args:
        value: The value.
        name: Its own key.

    >>> without_secrets({"comet": {"api_key": "k", "project": "p"}, "max_tokens": 3})
    {'comet': {'api_key': '***', 'project': 'p'}, 'max_tokens': 3}
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(each, within(name, str(key))) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each, name) for each in value]
    if isinstance(value, bool) or value in (None, ""):
        return value
    if _SECRET.fullmatch(name.replace("-", "_")):
        return HIDDEN
    return _IN_TEXT.sub(rf"\g<before>\g<name>{HIDDEN}", value) if isinstance(value, str) else value


def within(outer: str, name: str) -> str:
    """The name to go by for a key of a block: the block's, if that is a secret."""
    return outer if _SECRET.fullmatch(outer.replace("-", "_")) else name


def item_without_secrets(item: str) -> str:
    """A ``key=value`` item of ``--set`` in which :data:`HIDDEN` stands for what is secret.

    >>> item_without_secrets("comet.api_key=k"), item_without_secrets("a=[1]")
    ('comet.api_key=***', 'a=[1]')
    """
    name, separator, text = item.partition("=")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    shown = without_secrets(value if isinstance(value, Mapping | list) else text, name.rpartition(".")[2])
    if shown in (value, text):
        return item
    return f"{name}{separator}{shown if isinstance(shown, str) else json.dumps(shown)}"


def parted_from_secrets(value: Any, path: Path = ()) -> tuple[Any, list[Path]]:
    """A copy of a JSON value without the keys that are secrets, and the paths of what is missing or hidden.

    >>> parted_from_secrets({"comet": {"api_key": "k", "project": "p"}})
    ({'comet': {'project': 'p'}}, [('comet', 'api_key')])
    """
    if isinstance(value, Mapping):
        kept, missing = {}, []
        for name, each in value.items():
            if not isinstance(each, Mapping | list) and without_secrets(each, str(name)) == HIDDEN != each:
                missing.append((*path, str(name)))
                continue
            kept[name], more = parted_from_secrets(each, (*path, str(name)))
            missing += more
        return kept, missing
    if isinstance(value, list):
        parts = [parted_from_secrets(each, (*path, number)) for number, each in enumerate(value)]
        return [each for each, _ in parts], [one for _, more in parts for one in more]
    shown = without_secrets(value, _name_of(path))
    return shown, [] if shown == value else [path]


def _name_of(path: Path) -> str:
    """The key that a value at a path goes by."""
    name = ""
    for part in path:
        name = within(name, part) if isinstance(part, str) else name
    return name


def show(value: object, name: str = "") -> str:
    """``value``, of the key ``name``, as JSON on one line, shortened and without secrets."""
    text = json.dumps(without_secrets(value, name), default=str)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else text[: _MAX_VALUE_CHARACTERS - 3] + "..."


def dotted(path: Sequence[str | int]) -> str:
    """``("a", "b", 0)`` as ``a.b[0]``.

    >>> dotted(("scheduler", "params", "betas", 1))
    'scheduler.params.betas[1]'
    """
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")


def key(name: str) -> KeyPlace:
    """A key as the place of an error about something that is not written there.

    >>> key("dsx.data.sources[0].source").path
    ('dsx', 'data', 'sources', 0, 'source')
    """
    parts = re.findall(r"[^.\[\]]+", name)
    return KeyPlace(name, tuple(int(part) if part.isdigit() else part for part in parts))


def at(name: str, value: object) -> KeyPlace:
    """``key = value``, the place of an error."""
    return KeyPlace(f"{name} = {show(value, name.rpartition('.')[2])}", key(name).path, value)


def suggest(word: str, known: Iterable[str], *, otherwise: str = "remove it") -> str:
    """The fix for an unknown ``word``: the nearest known one, or all of them if none is near.

    Args:
        word: The unknown word.
        known: The words that could be meant.
        otherwise: The fix if no word is near, and there are too many to list.
    """
    known = sorted(known)
    if part := _part(word, known):
        return f'write "{part}", if that is meant'
    near = difflib.get_close_matches(word.lower(), [name.lower() for name in known], n=1, cutoff=0.6)
    if near:
        return f'write "{next(name for name in known if name.lower() == near[0])}", if that is meant'
    if len(known) > _SUM_UP_AFTER:
        return otherwise
    return f"use {either(known)}" if known else otherwise


def _part(word: str, known: Sequence[str]) -> str:
    """The only known word that ``word`` begins with or contains, unless another is nearly all of it.

    >>> _part("tensor_paralel", ["pipeline", "sequence_parallel", "tensor"])
    'tensor'
    >>> _part("sequence_paralel", ["pipeline", "sequence_parallel", "tensor"])
    ''
    """
    parts = set(word.lower().replace("-", "_").split("_"))
    found = [name for name in known if name.lower() in parts]
    is_typo = difflib.get_close_matches(word.lower(), known, n=1, cutoff=_TYPO)
    return found[0] if len(found) == 1 and not is_typo else ""


def plain(word: str) -> str:
    """``word`` without case and punctuation.

    >>> plain("Zero-Optimization")
    'zerooptimization'
    """
    return "".join(char for char in word.lower() if char.isalnum())


def either(options: Sequence[object]) -> str:
    """``1, 2 or 4``."""
    words = [str(option) for option in options]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
