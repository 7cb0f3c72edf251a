"""Words of error messages: a key with its value, the nearest known word, a list of choices."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dsx.errors import KeyPlace

Path = tuple[str | int, ...]
"""The path of a key, from the top of a config."""

_MAX_VALUE_CHARACTERS = 80
_SUM_UP_AFTER = 12
# Words more similar than this differ by a slip of the finger.
_TYPO = 0.9


# The words of a key whose value is a secret. Tokens in the plural are mostly those of a text: user_tokens.
_SECRET = re.compile(
    r"(^|.*_)((passwd|[a-z]*password|passphrase|pass|pwd|pat|secret|creds?|credential|auth|authorization|cookie|dsn|jwt"
    r"|webhook(_url)?|connection_string|session_?id|access_key_id|(access|account|anthropic|api|auth|aws|azure"
    r"|comet|deploy|encryption|hf|hub|license|master|openai|private|secret|service|signing|ssh|storage|subscription"
    r"|wandb)_?key|(access|api|auth|bearer|gh|github|gitlab|hf|hugging_?face|refresh|secret|slack|wandb)_?token)s?"
    r"|(bot|client|comet|deploy|git|hub|id|jwt|login|oauth|personal|private|sas|security|service|session"
    r"|user)_?token)|token|bearer",
)
_HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
# What begins as the keys of those who give keys do, and is as mixed as these.
_MIXED = r"(?=[\w-]*\d)(?=[\w-]*[A-Z])(?=[\w-]*[a-z])"
_KEY = (
    r"(?:(?:hf|gh[a-z])_[A-Za-z0-9]{30,}|github_pat_\w{30,}|A[KS]IA[A-Z0-9]{16}"
    rf"|(?:glpat|xox[a-z])-{_MIXED}[\w-]{{20,}}"
    r"|sk-(?=(?:[\w-]*[_-])?(?=[A-Za-z]*\d)(?:[A-Za-z0-9]{30}|(?=[a-z\d]*[A-Z])(?=[A-Z\d]*[a-z])[A-Za-z0-9]{12}))"
    r"[\w-]{20,})"
)
# By itself: beside a letter, a dot or a slash it is part of a name or a path.
_BARE = re.compile(
    rf"(?<![\w./\\-]){_KEY}(?![\w/\\-]|\.\w)"
    r"|(?P<before>\b(?i:bearer) )(?=[\w.~+/-]*\d)[\w.~+/-]{16,}=*"
)
# Who asks, and with what password. The second kind of password has a slash, and is no port.
_ADDRESS = re.compile(
    rf"(?P<before>://)(?:[^/@\s:]*:(?:[^/\s]{{1,999}}|(?!\d{{1,5}}/)[^@\s]{{1,999}})|{_KEY})(?=@(?!sha256:))"
)
_QUERY = re.compile(r"(?P<before>[?&](?P<name>[\w.-]+)=)[^\s&#]+")
_SIGNED = ("sig", "signature")
# Keys of names and paths, by their last words.
_NAMES = re.compile(
    r"(.*_)?(adapter|checkpoint|config|dir|directory|family|file|filename|folder|model|name|output|path|preset"
    r"|resume|source|tokenizer|weight)s?"
)
HIDDEN = "<hidden-secret>"
"""In the place of a secret in what is recorded, printed or sent: no pattern of files, and no secret."""
HIDDEN_HERE = ("dsx hid a secret here when it wrote this config", "put the secret back, or remove the key")
"""What is wrong with a config that has :data:`HIDDEN`, and what to do."""


def _words(name: str) -> str:
    """The words of a key, however it is spelt.

    >>> _words("wandbApiKey"), _words("API-KEY")
    ('wandb_api_key', 'api_key')
    """
    return _HUMP.sub("_", re.sub(r"\W", "_", name)).lower()


def _is_secret(name: str) -> bool:
    return _SECRET.fullmatch(_words(name)) is not None


def without_secrets(value: Any, name: str = "") -> Any:
    """A copy of a JSON value in which :data:`HIDDEN` stands for the texts of keys that are secrets.

    A text or number without a secret comes back as the same object.

    ``name`` is the value's own key.

    >>> without_secrets({"comet": {"api_key": "k", "project": "p"}, "max_tokens": 3})
    {'comet': {'api_key': '<hidden-secret>', 'project': 'p'}, 'max_tokens': 3}
    """
    if isinstance(value, Mapping):
        return {key: without_secrets(each, within(name, str(key))) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(each, name) for each in value]
    if isinstance(value, bool) or value in (None, ""):
        return value
    if _is_secret(name):
        return HIDDEN
    return _clean(value, name) if isinstance(value, str) else value


def _clean(text: str, name: str) -> str:
    """``text`` of the key ``name`` without the secrets that stand in it."""
    shown = _QUERY.sub(_answered, _ADDRESS.sub(_hidden, text))
    if not _NAMES.fullmatch(_words(name)):
        shown = _BARE.sub(_hidden, shown)
    return text if shown == text else shown


def _hidden(found: re.Match[str]) -> str:
    return f"{found['before'] or ''}{HIDDEN}"


def _answered(found: re.Match[str]) -> str:
    is_secret = _is_secret(found["name"]) or _words(found["name"]).endswith(_SIGNED)
    return _hidden(found) if is_secret else found[0]


def hidden_in(value: Any, path: Path = ()) -> Iterator[tuple[Path, str]]:
    """The paths and texts of ``value`` in which :data:`HIDDEN` stands.

    >>> list(hidden_in({"comet": [{"api_key": HIDDEN}]}))
    [(('comet', 0, 'api_key'), '<hidden-secret>')]
    """
    if isinstance(value, Mapping | list | tuple):
        for part, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from hidden_in(each, (*path, part))
    elif isinstance(value, str) and HIDDEN in value:
        yield path, value


def within(outer: str, name: str) -> str:
    """The name to go by for a key of a block: the block's, if that is a secret."""
    return outer if _is_secret(outer) else name


def item_without_secrets(item: str) -> str:
    """A ``key=value`` item of ``--set`` in which :data:`HIDDEN` stands for what is secret.

    >>> item_without_secrets("comet.api_key=k"), item_without_secrets("a=[1]")
    ('comet.api_key=<hidden-secret>', 'a=[1]')
    """
    name, separator, text = item.partition("=")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    shown = without_secrets(
        value if isinstance(value, Mapping | list) else text, name_of(name.strip().split("."))
    )
    if shown in (value, text):
        return item
    return f"{name}{separator}{shown if isinstance(shown, str) else json.dumps(shown)}"


def parted_from_secrets(value: Any, path: Path = ()) -> tuple[Any, list[Path]]:
    """A copy of a JSON value without what is secret, and the paths of what is missing or hidden in a text.

    >>> parted_from_secrets({"comet": {"api_key": "k", "project": "p"}})
    ({'comet': {'project': 'p'}}, [('comet', 'api_key')])
    """
    if not isinstance(value, Mapping | list | tuple):
        shown = without_secrets(value, name_of(path))
        return shown, [] if shown is value else [path]
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    parted = {part: parted_from_secrets(each, (*path, part)) for part, each in parts}
    kept = {part: each for part, (each, missing) in parted.items() if not (missing and each == HIDDEN)}
    missing = [one for _, more in parted.values() for one in more]
    return kept if isinstance(value, Mapping) else list(kept.values()), missing


def name_of(path: Sequence[str | int]) -> str:
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
    place = key(name)
    return KeyPlace(f"{name} = {show(value, name_of(place.path))}", place.path, value)


def suggest(word: str, known: Iterable[str], *, otherwise: str = "remove it") -> str:
    """The fix for an unknown ``word``: the nearest known one, or all of them if none is near.

    ``otherwise`` is the fix if no word is near and there are too many to list.
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
