"""What each key of DeepSpeed 0.19.8's JSON is (types, defaults, bounds, history), and whether a value fits.

The rows are data in ``reference/*.toml``, for people to edit, read without torch or pydantic;
tests/doctor/test_reference.py holds them against the installed DeepSpeed: its pydantic models, constants and
signatures. Versions were read out of DeepSpeed's releases 0.8.3 to 0.19.8. A file has blocks, each with the
rows of its keys; the words ``"null"`` and ``"required"`` stand for a default of null, which TOML does
not have, and for no default.

- ``[[block]]``: ``path``, ``source``, ``unknown``, ``types``, ``variant``; ``since`` and ``no_effect`` hold
  for each of its keys, the latter but for ``enabled``. One with ``keys_only`` is described in another file.
- ``[[block.key]]``: ``name``, ``kinds`` (parted by ``|``), ``default``, ``effect``, and other attributes of
  Key.
- ``[causes]``: names for what makes keys do nothing, used in ``no_effect``; conditions are ``key operator
  value``, the value as JSON.
- ``[parameters.NAME]``: a key that many blocks have, in ``[block.defaults]`` with its default there.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Final, Literal, cast

from dsx.config.document import is_finite
from dsx.config.wording import Path, either
from dsx.errors import ConfigError

Version = tuple[int, ...]

# What the reference and the checks describe.
REFERENCE: Version = (0, 19, 8)


def version(text: str) -> Version:
    """``0.19.8`` as numbers; what follows them (``+cu121``, ``rc1``) is left out."""
    found = re.match(r"v?(\d+)\.(\d+)(?:\.(\d+))?", text.strip())
    if found is None:
        raise ConfigError(f"version {text}", "it is no version number", "write one such as 0.16.4")
    return tuple(int(part or 0) for part in found.groups())


def shown(number: Version) -> str:
    """``(0, 19, 8)`` as ``0.19.8``."""
    return ".".join(map(str, number))


def installed() -> Version:
    """The version of the installed DeepSpeed; the reference's if there is none."""
    try:
        return version(importlib.metadata.version("deepspeed"))
    except importlib.metadata.PackageNotFoundError:
        return REFERENCE


Kind = Literal["bool", "int", "float", "string", "object", "list", "null", "any"]
Operator = Literal[
    "==", "!=", "isnt", "<", "<=", ">=", ">", "in", "not-in", "odd", "truthy", "falsy", "asked",
    "given", "missing", "written", "unwritten",
    "present", "absent", "object", "filled", "idle", "like", "unlike",
]  # fmt: skip


class NoValue:
    """What stands where there is no value of JSON's; it says of itself why there is none."""

    def __init__(self, word: str) -> None:
        self._word = word

    def __repr__(self) -> str:
        return self._word


REQUIRED = NoValue("required")
"""The default of a key that has none."""


@dataclass(frozen=True, slots=True)
class When:
    """A condition on the config, as data: ``key operator value``.

    ``key`` is dotted; a key that is not written has its default from the reference. A ``value`` that is text
    with an ``@`` before it is the value of that key. :meth:`dsx.config.refusals.Context.holds` says what
    the operators mean.
    """

    key: str
    operator: Operator
    value: Any = None


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A key does nothing when all of ``conditions`` hold, because of ``why`` (a clause, no full stop)."""

    conditions: tuple[When, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """What is known of one key.

    Attributes:
        path: Dotted, from the top: ``zero_optimization.offload_param.device``.
        kinds: JSON types that mean something here ("float" takes ints too; "int" takes 5e8).
        default: JSON value that DeepSpeed uses when the key is absent, or REQUIRED (within its block).
        effect: What it does, one line in our words.
        variant: Of a block whose keys depend on a name: the optimizer's or scheduler's type in DeepSpeed's
            spelling in lower case (``adamw``, ``warmuplr``); empty elsewhere.
        choices: The only values allowed, of a list the only items; strings are compared in lower case if
            ``any_case``.
        items: JSON type of a list's items; empty if they are of several, or judged elsewhere.
        low, high: Inclusive bounds; with ``low_open`` the lower one is exclusive.
        unit: "elements", "bytes", "steps", "seconds", "ranks" ... or empty.
        status: "deprecated" still works as ``replacement`` (without one it does nothing but warn), "removed"
            is refused by the version in ``until``, "dead" is accepted and never read.
        since, until: First version that reads it, first version that does not; empty: before 0.9, still.
        replacement: Dotted key that replaces it.
        auto: What the word "auto" does in DeepSpeed itself here: "default" (dropped: the default is used),
            "meaning" (it is a value of its own), "kept" (the string is used as if it were the value: wrong).
        trainer_auto: Whether transformers' Trainer fills in "auto" here.
        aliases: Other spellings of the last part that DeepSpeed takes for the same key.
        main: Of an object, the key inside whose value is often written in its place (``"bf16": true``).
        example: Of an object, how it is written.
        strict: Whether DeepSpeed asks for a boolean by name, where a number for one fails.
        infinite: Whether Infinity, which Python's json reads and writes, is a number like others here.
        source: ``file:line`` or class in DeepSpeed 0.19.8, below deepspeed/.
    """

    path: str
    kinds: tuple[Kind, ...]
    default: Any
    effect: str
    source: str
    variant: str = ""
    choices: tuple[Any, ...] = ()
    items: Kind | Literal[""] = ""
    any_case: bool = False
    low: float | None = None
    high: float | None = None
    low_open: bool = False
    unit: str = ""
    no_effect: tuple[NoEffect, ...] = ()
    status: Literal["live", "deprecated", "removed", "dead"] = "live"
    since: str = ""
    until: str = ""
    replacement: str = ""
    auto: Literal["default", "meaning", "kept"] = "kept"
    trainer_auto: bool = False
    aliases: tuple[str, ...] = ()
    main: str = ""
    example: str = ""
    strict: bool = False
    infinite: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyBlock:
    """One object of the JSON, and how DeepSpeed treats what is in it.

    Attributes:
        path: Dotted; empty for the top level.
        unknown: What DeepSpeed does with a key that it does not know: "refused" (an error), "ignored"
            (silence), "free" (names are the user's own: nothing is unknown).
        types: "coerced" (pydantic: "5" becomes 5, "true" becomes true, what cannot be is an error) or
            "raw" (used as written: a quoted number fails late or misbehaves).
        variant: As in Key, for ``optimizer.params`` and ``scheduler.params``.
        source: As in Key.
    """

    path: str
    unknown: Literal["refused", "ignored", "free"]
    types: Literal["coerced", "raw"]
    source: str
    variant: str = ""


# Blocks whose keys depend on the name beside them: block -> key that holds the name.
_VARIANTS = {"optimizer.params": "optimizer.type", "scheduler.params": "scheduler.type"}
# Names in old configs for a block that is still read under them.
_SAME_BLOCK = {"bfloat16": "bf16"}


@dataclass(frozen=True, slots=True)
class Slot:
    """One key of a config.

    Attributes:
        path: Where it is written.
        name: Dotted path in the reference (short and old names replaced, list indices as ``[]``).
        key: Its row; None for an unknown key.
    """

    path: Path
    name: str
    value: Any
    key: Key | None
    block: KeyBlock


@dataclass(frozen=True, slots=True)
class Table:
    """The reference's rows, and lookups over them."""

    rows: tuple[Key, ...] = field(repr=False)
    objects: tuple[KeyBlock, ...] = field(repr=False)
    keys: Mapping[tuple[str, str], Key] = field(repr=False)
    blocks: Mapping[tuple[str, str], KeyBlock] = field(repr=False)
    members: Mapping[tuple[str, str], Mapping[str, Key]] = field(repr=False)

    def key(self, name: str, variant: str = "") -> Key | None:
        return self.keys.get((name, variant))

    def common(self, name: str) -> Key | None:
        """The row of a dotted name; of a parameter, that of AdamW or WarmupLR."""
        return self.key(name) or self.key(name, "adamw") or self.key(name, "warmuplr")

    def is_infinite(self, value: object, name: str) -> bool:
        """Whether ``value`` is Infinity, and the key of a dotted name takes it."""
        key = self.key(name)
        return value == math.inf and key is not None and key.infinite

    def siblings(self, block: KeyBlock) -> Mapping[str, Key]:
        """Rows of a block by every spelling of their last part."""
        return self.members.get((block.path, block.variant), {})

    def named(self, last: str) -> list[Key]:
        """Rows whose last part is ``last``, outside blocks whose keys depend on a name; also AdamW's."""
        return [
            key
            for (_, variant), key in self.keys.items()
            if key.path.rpartition(".")[2] == last and variant in ("", "adamw") and key.status == "live"
            if key.path.partition(".")[0] not in _SAME_BLOCK
        ]

    def walk(self, config: Mapping[str, Any]) -> Iterator[Slot]:
        """Every key of ``config`` down to where the reference ends."""
        top = self.blocks.get(("", ""))
        if top is not None:
            yield from self._walk(config, config, (), top)

    def _walk(
        self, config: Mapping[str, Any], node: Mapping[str, Any], path: Path, block: KeyBlock
    ) -> Iterator[Slot]:
        siblings = self.siblings(block)
        for word, value in node.items():
            here = (*path, word)
            # In a free block the names are the user's own, and a row "*" says what each holds.
            key = siblings.get(word, siblings.get("*"))
            if key is None and block.unknown == "free":
                continue
            if key is None:
                yield Slot(here, f"{block.path}.{word}".removeprefix("."), value, None, block)
                continue
            yield Slot(here, key.path, value, key, block)
            name = _SAME_BLOCK.get(key.path, key.path)
            for at, inner, suffix in _inside(here, value):
                below = self.block(config, name + suffix)
                if below is not None:
                    yield from self._walk(config, inner, at, below)

    def block(self, config: Mapping[str, Any], name: str) -> KeyBlock | None:
        """The block of a dotted name; of several, that of the type which ``config`` names."""
        if name in _VARIANTS:
            return self.blocks.get((name, variant(config, name)))
        return self.blocks.get((name, ""))


@cache
def reference() -> Table:
    """The whole reference, read when it is first asked for."""
    contents = [read_data(topic) for topic in _TOPICS]
    rows = tuple(key for content in contents for key in _keys(content))
    blocks = tuple(block for content in contents for block in _blocks(content))
    members: dict[tuple[str, str], dict[str, Key]] = {}
    for key in rows:
        owner, _, last = key.path.rpartition(".")
        group = members.setdefault((owner, key.variant), {})
        for word in (last, *key.aliases):
            group.setdefault(word, key)
    return Table(
        rows=rows,
        objects=blocks,
        keys={(key.path, key.variant): key for key in rows},
        blocks={(block.path, block.variant): block for block in blocks},
        members=members,
    )


def variant(config: Mapping[str, Any], block: str) -> str:
    """Lower-case name of the optimizer or scheduler that ``config`` names for a block of parameters."""
    owner, _, last = _VARIANTS.get(block, "").rpartition(".")
    node = config.get(owner)
    kind = node.get(last) if isinstance(node, dict) else None
    return kind.lower() if isinstance(kind, str) else ""


def _inside(path: Path, value: object) -> Iterator[tuple[Path, Mapping[str, Any], str]]:
    """The objects in ``value``: path, content, and what follows their block's name."""
    if isinstance(value, dict):
        yield path, value, ""
    elif isinstance(value, list):
        for i, item in enumerate(value):
            if isinstance(item, dict):
                yield (*path, i), item, "[]"


_TOPICS: Final = (
    "top", "optimizers", "schedulers", "precision", "zero", "offload", "training", "parallel", "reports",
    "data", "tuning", "former",
)  # fmt: skip
_TUPLES: Final = ("choices", "aliases")


@cache
def read_data(topic: str) -> dict[str, Any]:
    """The content of one file of the reference."""
    file = files("dsx.config").joinpath("reference", f"{topic}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return [_value(item) for item in value]
    return {"null": None, "required": REQUIRED}.get(value, value) if isinstance(value, str) else value


def condition(text: str) -> When:
    """A condition as the TOML files write it."""
    key, operator, *value = text.split(" ", 2)
    other = value[0] if value and value[0].startswith("@") else json.loads(value[0]) if value else None
    return When(key, cast("Operator", operator), other)


def _key(block: Mapping[str, Any], row: Mapping[str, Any], causes: Mapping[str, NoEffect]) -> Key:
    given = {
        name: value for name, value in row.items() if name not in ("name", "kinds", "default", "no_effect")
    }
    given |= {name: tuple(_value(given[name])) for name in _TUPLES if name in given}
    # DeepSpeedConfigModel.__init__ (runtime/config_utils.py) drops every value that is "auto".
    common = {"since": block.get("since", ""), "auto": "default" if block["types"] == "coerced" else "kept"}
    names = [*row.get("no_effect", ()), *(block.get("no_effect", ()) if row["name"] != "enabled" else ())]
    return Key(
        path=f"{block['path']}.{row['name']}".lstrip("."),
        kinds=cast("tuple[Kind, ...]", tuple(filter(None, row["kinds"].split("|")))),
        default=_value(row["default"]),
        source=block["source"],
        variant=block.get("variant", ""),
        no_effect=tuple(causes[name] for name in names),
        **(common | given),
    )


def _keys(content: Mapping[str, Any]) -> Iterator[Key]:
    causes = {
        name: NoEffect(tuple(map(condition, cause["when"])), cause["why"])
        for name, cause in content.get("causes", {}).items()
    }
    for block in content["block"]:
        for name, default in block.get("defaults", {}).items():
            yield _key(block, content["parameters"][name] | {"name": name, "default": default}, causes)
        for row in block.get("key", ()):
            yield _key(block, row, causes)


def _blocks(content: Mapping[str, Any]) -> Iterator[KeyBlock]:
    fields = KeyBlock.__dataclass_fields__
    for block in content["block"]:
        if not block.get("keys_only"):
            yield KeyBlock(**{name: value for name, value in block.items() if name in fields})


# What pydantic takes for a boolean in its default mode (docs.pydantic.dev, "Booleans").
TRUE = {"1", "t", "true", "y", "yes", "on"}
_FALSE = {"0", "f", "false", "n", "no", "off"}
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")

_PLURALS = {"string": "strings", "int": "whole numbers", "float": "numbers"}

Fault = Literal["", "auto", "null", "quoted", "wrong-type", "out-of-range", "not-a-choice"]


@dataclass(frozen=True, slots=True)
class ValueVerdict:
    """The judgement of a value for its key.

    Attributes:
        fault: What is wrong; empty if it fits.
        meant: The value that was surely meant, where ``has_meant``; else the value itself.
        has_meant: Whether a machine may write ``meant`` instead.
        expected: What the key takes, in words.
    """

    fault: Fault
    meant: Any
    has_meant: bool
    expected: str


def judge(value: Any, key: Key) -> ValueVerdict:
    """``value`` against ``key``."""
    expected = describe(key)
    if (value == "auto" and key.auto == "meaning") or (key.infinite and value == math.inf):
        return ValueVerdict("", value, False, expected)
    # Where any string is allowed, this is a name like others.
    is_name = "any" in key.kinds or ("string" in key.kinds and not key.choices)
    if value == "auto" and not (is_name or "auto" in key.choices):
        return ValueVerdict("auto", value, False, expected)
    if value is None:
        fits = "null" in key.kinds or "any" in key.kinds
        return ValueVerdict("" if fits else "null", value, False, expected)
    if not any(_is(value, kind) for kind in key.kinds):
        meant = unquoted(value, key)
        if meant is not None:
            inner = _limits(meant, key)
            return ValueVerdict(inner or "quoted", meant, not inner, expected)
        if _is_switch(value, key):
            return ValueVerdict("wrong-type", bool(value), True, expected)
        return ValueVerdict("wrong-type", value, False, expected)
    if isinstance(value, list) and key.items and not all(_is(item, key.items) for item in value):
        return ValueVerdict("wrong-type", value, False, expected)
    return ValueVerdict(_limits(value, key), value, False, expected)


def unquoted(value: Any, key: Key) -> Any | None:
    """The number or boolean that is written in a string, if the key takes one; else None.

    Python's ``True``, which HJSON reads as a string, and a comma that HJSON takes along, are seen too.
    """
    if not isinstance(value, str):
        return None
    word = value.strip().rstrip(",").strip()
    found: Any = None
    if word.lower() in ("true", "false"):
        found = word.lower() == "true"
    elif _NUMBER.fullmatch(word.replace("_", "")):
        word = word.replace("_", "")
        number = float(word)
        found = int(number) if is_finite(number) and number == int(number) and "." not in word else number
    return found if found is not None and any(_is(found, kind) for kind in key.kinds) else None


def converted(value: Any, key: Key) -> Any | None:
    """What pydantic makes of a value of another type, in a block that it reads; None if it refuses."""
    if key.auto == "meaning":
        return None  # a string may stand there as well as a number, and is kept
    if isinstance(value, str):
        return _from_string(value.strip(), key)
    if isinstance(value, bool) and ("int" in key.kinds or "float" in key.kinds):
        return int(value)
    return bool(value) if _is_switch(value, key) else None


def _from_string(word: str, key: Key) -> Any | None:
    if "bool" in key.kinds and word.lower() in TRUE | _FALSE:
        return word.lower() in TRUE
    if "float" in key.kinds or "int" in key.kinds:
        try:
            number = float(word)
        except ValueError:
            return None
        if "float" in key.kinds:
            return number
        # Whole numbers are not read from exponents.
        return (
            int(number) if is_finite(number) and number == int(number) and "e" not in word.lower() else None
        )
    return None


def describe(key: Key) -> str:
    """What ``key`` takes, in words."""
    if key.choices:
        words = either([f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in key.choices])
        return f"a list of {words}" if "list" in key.kinds else words
    nouns = {
        "bool": "true or false",
        "int": "a whole number",
        "float": "a number",
        "string": "a string",
        "object": "an object {...}",
        "list": f"a list of {_PLURALS[key.items]}" if key.items in _PLURALS else "a list [...]",
        "any": "a value",
    }
    text = " or ".join(nouns[kind] for kind in key.kinds if kind != "null") or "anything that JSON can say"
    return text + _bounds(key)


def _bounds(key: Key) -> str:
    low = "" if key.low is None else f"{key.low:g}"
    if key.low is not None and key.high is not None:
        return f" from {low} to {key.high:g}"
    if key.high is not None:
        return f" of at most {key.high:g}"
    if not low:
        return ""
    return f" above {low}" if key.low_open else f" of at least {low}"


def _is_switch(value: object, key: Key) -> bool:
    """Whether the value is 0 or 1 for a boolean."""
    return "bool" in key.kinds and isinstance(value, int | float) and value in (0, 1)


def _is(value: Any, kind: Kind) -> bool:
    if kind == "any":
        return True
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float) or not is_finite(value):
            return False
        return kind == "float" or value == int(value)
    types: dict[str, type] = {"bool": bool, "string": str, "object": dict, "list": list, "null": type(None)}
    return isinstance(value, types[kind])


def _limits(value: Any, key: Key) -> Literal["", "out-of-range", "not-a-choice"]:
    if key.choices and isinstance(value, list):
        return "" if all(item in key.choices for item in value) else "not-a-choice"
    if key.choices and not isinstance(value, bool | dict):
        if value in key.choices:
            return ""
        lower = [choice.lower() for choice in key.choices if isinstance(choice, str)]
        return "" if key.any_case and isinstance(value, str) and value.lower() in lower else "not-a-choice"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    below = key.low is not None and (value < key.low or (key.low_open and value == key.low))
    return "out-of-range" if below or (key.high is not None and value > key.high) else ""
