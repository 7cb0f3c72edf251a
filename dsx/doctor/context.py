"""What the checks look at: the config, its values as DeepSpeed would use them, and who runs it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

from dsx.config.wording import either
from dsx.doctor.finding import ABSENT, Edit, Finding, Path, Severity
from dsx.doctor.key import Key, Kind, NoEffect, Version, When
from dsx.doctor.source import Source, is_finite
from dsx.doctor.table import Slot, Table, variant

# What pydantic takes for a boolean in its default mode (docs.pydantic.dev, "Booleans").
_TRUE = {"1", "t", "true", "y", "yes", "on"}
_FALSE = {"0", "f", "false", "n", "no", "off"}
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?")
_PYTHON = {"True": True, "False": False, "None": None}

_PLURALS = {"string": "strings", "int": "whole numbers", "float": "numbers"}

Fault = Literal["", "auto", "null", "quoted", "wrong-type", "out-of-range", "not-a-choice"]


@dataclass(frozen=True, slots=True)
class ValueVerdict:
    """What a value is for its key.

    Attributes:
        fault: Empty if it fits.
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
    if value == "auto" and key.auto == "meaning":
        return ValueVerdict("", value, False, expected)
    # Where any string goes, it is a name like others.
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
    """What pydantic makes of a value of another type, for a block that is read by it; None if it refuses."""
    if key.auto == "meaning":
        return None  # a string is as good as a number there, and is kept
    if isinstance(value, str):
        return _from_string(value.strip(), key)
    if isinstance(value, bool) and ("int" in key.kinds or "float" in key.kinds):
        return int(value)
    return bool(value) if _is_switch(value, key) else None


def _from_string(word: str, key: Key) -> Any | None:
    if "bool" in key.kinds and word.lower() in _TRUE | _FALSE:
        return word.lower() in _TRUE
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
    """0 and 1 for a boolean."""
    return "bool" in key.kinds and isinstance(value, int | float) and value in (0, 1)


def _is(value: Any, kind: Kind) -> bool:
    if kind == "any":
        return True
    if kind in ("int", "float"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        return kind == "float" or (is_finite(value) and value == int(value))
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
    if not is_finite(value):
        return "out-of-range"
    below = key.low is not None and (value < key.low or (key.low_open and value == key.low))
    return "out-of-range" if below or (key.high is not None and value > key.high) else ""


def python_word(value: object) -> bool:
    """Whether the value is a Python constant that HJSON read as a string."""
    return isinstance(value, str) and value.strip().rstrip(",") in _PYTHON


Runner = Literal["deepspeed", "trainer", "dsx"]
TRAIN, MICRO = "train_batch_size", "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
STAGE = "zero_optimization.stage"


class _Unknown:
    """A value that cannot be known here: "auto" that a Trainer fills in, or one that is wrong anyway."""

    def __repr__(self) -> str:
        return "unknown"


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A config to check.

    Attributes:
        source: The file.
        config: Its content without the ``dsx`` block.
        table: The reference.
        runner: Who runs it: DeepSpeed alone, transformers' Trainer (or Accelerate), or dsx.
        version: DeepSpeed's.
        world_size: Ranks; None if not said.
        pipeline: Stages of the model's pipeline under stock DeepSpeed: 1 for none, None if not said.
        client_optimizer: Whether the script passes an optimizer to deepspeed.initialize.
        guessed: Whether ``runner`` was guessed from the config.
        slots: Every key of ``config`` beside its row.
        values: Dotted name -> value as DeepSpeed uses it, of the keys that are written.
    """

    source: Source
    config: Mapping[str, Any]
    table: Table
    runner: Runner
    version: Version
    world_size: int | None = None
    pipeline: int | None = None
    client_optimizer: bool = False
    guessed: bool = False
    slots: Sequence[Slot] = field(default=(), repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def value(self, name: str) -> Any:
        """What DeepSpeed uses for a key: written, else its default; UNKNOWN where that cannot be said."""
        if name in self.values:
            return self.values[name]
        key = self.table.key(name, self._variant(name))
        return None if key is None else key.default

    def number(self, name: str) -> int | float | None:
        """The value, if it is a number."""
        value = self.value(name)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    def text(self, name: str) -> str:
        """The value, if it is a string; else empty."""
        value = self.value(name)
        return value if isinstance(value, str) else ""

    def is_on(self, name: str) -> bool:
        """Whether the value is true."""
        return self.value(name) is True

    def written(self, name: str) -> bool:
        """Whether the key is in the config with a value that can be used."""
        return name in self.values and self.values[name] is not UNKNOWN

    @property
    def tunes(self) -> bool:
        """Whether DeepSpeed's autotuner is on, which puts numbers where the config has "auto" or a list."""
        return self.is_on("autotuning.enabled")

    @property
    def stage(self) -> int | None:
        """ZeRO's stage; None if it cannot be known."""
        stage = self.value(STAGE)
        return stage if isinstance(stage, int) else None

    def offloads(self, what: str) -> bool:
        """Whether ``param`` or ``optimizer`` go to CPU or NVMe."""
        return self.value(f"zero_optimization.offload_{what}.device") in ("cpu", "nvme")

    def holds(self, condition: When) -> bool:
        """Whether a condition holds; what is not known does not."""
        value = self.value(condition.key)
        if condition.operator in ("given", "missing"):
            return (condition.key in self.values) == (condition.operator == "given")
        if value is UNKNOWN:
            return False
        if condition.operator in ("truthy", "falsy"):
            return bool(value) == (condition.operator == "truthy")
        return _compare(value, condition)

    def no_effect(self, causes: Sequence[NoEffect]) -> NoEffect | None:
        """The first of ``causes`` all of whose conditions hold."""
        return next((cause for cause in causes if all(map(self.holds, cause.conditions))), None)

    def path(self, name: str) -> Path:
        """Where the key of a dotted name is written (perhaps under another name), or would be."""
        return next((slot.path for slot in self.slots if slot.name == name), tuple(name.split(".")))

    def find(
        self,
        check: str,
        severity: Severity,
        name: str | Path,
        why: str,
        fix: str,
        *edits: Edit,
        safe: bool = False,
    ) -> Finding:
        """A finding about the key of a dotted name, or at a path; ``safe`` is of its edits (see Finding)."""
        path = self.path(name) if isinstance(name, str) else name
        value = self.at(path)
        return Finding(
            check=check,
            severity=severity,
            path=path,
            value=value,
            why=why,
            fix=fix,
            edits=edits,
            safe=safe and bool(edits),
        )

    def at(self, path: Path) -> Any:
        """What is written at ``path``; ABSENT for nothing."""
        if not path:
            return ABSENT
        return reduce(step, path, self.config)

    def _variant(self, name: str) -> str:
        block = next((b for b in ("optimizer.params", "scheduler.params") if name.startswith(b + ".")), "")
        return variant(self.config, block) if block else ""


def context(
    source: Source,
    table: Table,
    *,
    runner: Runner,
    version: Version,
    world_size: int | None = None,
    pipeline: int | None = None,
    client_optimizer: bool = False,
    guessed: bool = False,
) -> Context:
    """The context of checks of ``source``."""
    config = {key: value for key, value in source.config.items() if key != "dsx"}
    slots = list(table.walk(config))
    return Context(
        source=source,
        config=config,
        table=table,
        runner=runner,
        version=version,
        world_size=world_size,
        pipeline=pipeline,
        client_optimizer=client_optimizer,
        guessed=guessed,
        slots=slots,
        values=_values(config, slots, runner),
    )


def _values(config: Mapping[str, Any], slots: Sequence[Slot], runner: Runner) -> dict[str, Any]:
    """Dotted name -> value as DeepSpeed would use it."""
    values: dict[str, Any] = {}
    for slot in slots:
        # DeepSpeed reads bfloat16 only without bf16.
        if slot.key is not None and not (slot.path[0] == "bfloat16" and "bf16" in config):
            value = _used(slot, runner)
            if value is not ABSENT:
                values[slot.name] = value
    zero = config.get("zero_optimization")
    if isinstance(zero, bool):
        # runtime/zero/config.py, read_zero_config_deprecated.
        values[STAGE] = int(zero)
    for old, new in (("cpu_offload", "offload_optimizer"), ("cpu_offload_param", "offload_param")):
        if values.get(f"zero_optimization.{old}") is True:
            values.setdefault(f"zero_optimization.{new}.device", "cpu")
    return values


def _used(slot: Slot, runner: Runner) -> Any:
    """The value that DeepSpeed uses for a key; ABSENT if it is dropped."""
    key = slot.key
    assert key is not None
    verdict = judge(slot.value, key)
    if verdict.fault == "auto":
        if runner == "trainer" and key.trainer_auto:
            return UNKNOWN
        return ABSENT if key.auto == "default" else UNKNOWN
    if not verdict.fault:
        return slot.value.lower() if key.any_case and isinstance(slot.value, str) else slot.value
    if slot.block.types == "coerced" and verdict.fault in ("quoted", "wrong-type"):
        value = converted(slot.value, key)
        return UNKNOWN if value is None else value
    return UNKNOWN


def step(node: Any, part: str | int) -> Any:
    """What ``node`` holds at ``part``; ABSENT for nothing."""
    if isinstance(node, Mapping):
        return node.get(part, ABSENT)
    if isinstance(node, list) and isinstance(part, int) and part < len(node):
        return node[part]
    return ABSENT


def _compare(value: Any, condition: When) -> bool:
    other = condition.value
    if condition.operator == "==":
        return bool(value == other)
    if condition.operator == "!=":
        return bool(value != other)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    below = {"<": value < other, "<=": value <= other, ">": value > other, ">=": value >= other}
    return bool(below[condition.operator])
