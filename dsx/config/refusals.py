"""Which of DeepSpeed's keys stop a run and why, from one table; and what a config's keys are to DeepSpeed.

The table is ``reference/refused.toml``. The doctor reports its rows, a run stops at them before anything is
allocated, and the documentation lists those of dsx. A row has

- ``key``: the dotted key that is at fault; of several names of it (parted by ``|``) the one that is written.
- ``when``: conditions, all of which hold (:meth:`Context.holds`).
- ``why`` and ``fix``: clauses as in Finding; ``{a.key}`` stands for that key's value.
- ``check``: id of the finding; ``severity``: "error" if it is left out.
- ``by``: who refuses it. "deepspeed" (left out): DeepSpeed fails, or silently does something else than
  written. "pipeline": what dsx's engine cannot do; "initialize": the same, where a config with a ``dsx``
  block can have nothing of the kind. "dsx": what a config with a ``dsx`` block says in another place.
- ``runners``: of "deepspeed", "trainer" and "dsx", those that it is told; all if left out.
- ``remove``, ``set``, ``rename``: edits that mend it; ``safe``: whether, or when ("default": nobody wrote
  the key, "idle": it asks for nothing), they may be made without asking.
- ``since``, ``before``: the first version of DeepSpeed that minds, and the first that no longer does;
  ``where``: its file, below deepspeed/.
- ``each``: the row once for each of these tables, whose words go where ``<word>`` stands.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, reduce
from typing import Any, Final, Literal, get_args

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.document import Source
from dsx.config.keys import (
    REQUIRED,
    Key,
    KeyBlock,
    NoEffect,
    NoValue,
    Slot,
    Table,
    Version,
    When,
    condition,
    converted,
    judge,
    read_data,
    reference,
    variant,
    version,
)
from dsx.config.wording import HIDDEN_HERE, Path, hidden_in, show

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True, slots=True)
class Edit:
    """One change of the file.

    Attributes:
        kind: "set" a value (makes the objects on the way), "remove" the key, "rename" it (value kept).
        value: What "set" writes; the new last part for "rename".
    """

    kind: Literal["set", "remove", "rename"]
    path: Path
    value: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding about a config.

    Attributes:
        check: Id of the check: ``batch-triple``. Stable: people write it into their tools.
        severity: "error": it fails, or silently does something else than what is written. "warning": likely a
            mistake. "note": worth knowing.
        path: The key; empty for the file as a whole.
        value: What is written there; ABSENT where nothing is.
        why: What is wrong: a clause without a full stop, that can follow "key = value: ".
        fix: What to do: an imperative clause without a full stop.
        edits: Changes that mend it; empty if a person must choose.
        safe: Whether the edits may be made without asking: DeepSpeed does the same with them as without, or
            refuses the config (here or when the engine is made) and they are the only reading of it. Nothing
            that DeepSpeed refuses for what it asks is taken away, and no value that it uses is changed.
    """

    check: str
    severity: Severity
    path: Path
    value: Any
    why: str
    fix: str
    edits: tuple[Edit, ...] = ()
    safe: bool = False


ABSENT = NoValue("absent")
"""The value of a key that is not written."""

UNKNOWN = NoValue("unknown")
"""A value that cannot be known here: an "auto" that a Trainer fills in, or one that is wrong anyway."""

Runner = Literal["deepspeed", "trainer", "dsx"]
STAGE = "zero_optimization.stage"


@dataclass(frozen=True, kw_only=True)
class Context:
    """A config to check.

    Attributes:
        runner: Who runs it: DeepSpeed alone, transformers' Trainer (or Accelerate), or dsx.
        world_size: Number of ranks; None if not given.
        pipeline: Stages of the model's pipeline under stock DeepSpeed: 1 for none, None if not said.
        client_optimizer: Whether the script passes an optimizer to deepspeed.initialize.
        mesh: Degrees by their axis, and the size; None before they are known.
    """

    source: Source
    runner: Runner
    version: Version
    world_size: int | None = None
    pipeline: int | None = None
    client_optimizer: bool = False
    guessed: bool = False
    mesh: Mapping[str, int] | None = None

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content without the ``dsx`` block."""
        return {key: value for key, value in self.source.config.items() if key != "dsx"}

    @cached_property
    def table(self) -> Table:
        return reference()

    @cached_property
    def slots(self) -> tuple[Slot, ...]:
        return tuple(self.table.walk(self.config))

    @cached_property
    def places(self) -> dict[str, Path]:
        return {slot.name: slot.path for slot in reversed(self.slots)}

    @cached_property
    def values(self) -> dict[str, Any]:
        """Dotted name -> value as DeepSpeed uses it, of the keys that are written.

        And facts: ``run.dtype`` is the model's dtype if the config decides it, ``run.pipeline`` whether the
        model is a pipeline under stock DeepSpeed ("said", "implied", "none"), ``run.client_optimizer``
        whether the script makes the optimizer, ``run.adapter`` the type of dsx's adapter if there is one, and
        ``mesh.dp``, ``mesh.tp``, ``mesh.replicas`` (ranks with the same parameters) and ``mesh.size`` are
        there with a mesh.
        """
        values = _values(self.config, self.slots, self.runner)
        values["run.client_optimizer"] = self.client_optimizer
        adapter = step(self.source.config.get("dsx"), "adapter") if self.runner == "dsx" else None
        if isinstance(adapter, Mapping):
            values["run.adapter"] = adapter.get("type", "lora")
        values |= {f"mesh.{axis}": degree for axis, degree in (self.mesh or {}).items()}
        if self.runner != "dsx" and (self.pipeline is not None or self.config.get("pipeline")):
            stages = self.pipeline
            values["run.pipeline"] = "implied" if stages is None else "said" if stages > 1 else "none"
        return values

    def value(self, name: str) -> Any:
        """What DeepSpeed uses for a key: written, else its default; UNKNOWN where that cannot be said."""
        if name in self.values:
            return self.values[name]
        block = next((b for b in ("optimizer.params", "scheduler.params") if name.startswith(b + ".")), "")
        key = self.table.key(name, variant(self.config, block) if block else "")
        return None if key is None else key.default

    def number(self, name: str) -> int | float | None:
        value = self.value(name)
        return value if is_number(value) else None

    def text(self, name: str) -> str:
        """The value, if it is a string; else empty."""
        value = self.value(name)
        return value if isinstance(value, str) else ""

    def is_on(self, name: str) -> bool:
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

    def holds(self, condition: When) -> bool:
        """Whether a condition holds; one on an unknown value does not, except for "asked" and "isnt".

        Of the value: comparisons, "in" and "not-in" a list, "odd", "truthy" and "falsy"; "isnt" is "!=", and
        "asked" what DeepSpeed may take for true. Of the key: "given" and "missing", "written" and "unwritten"
        (with a value that can be used). Of the text: "present" and "absent", "object", of these "filled" and
        "idle" (which asks for nothing), "like" and "unlike" (what another key holds).
        """
        key, operator, other = condition.key, condition.operator, condition.value
        if operator in ("given", "missing"):
            return (key in self.values) == (operator == "given")
        if operator in ("written", "unwritten"):
            return self.written(key) == (operator == "written")
        if operator in _OF_TEXT:
            return _of_text(self.at(self.path(key)), operator, lambda: self.at(self.path(other[1:])))
        value = self.value(key)
        if operator in ("asked", "isnt"):
            return bool(value) if operator == "asked" else bool(value != other)
        if isinstance(other, str) and other.startswith("@"):
            other = self.value(other[1:])
        nothing = any(each is UNKNOWN or each is REQUIRED for each in (value, other))
        return not nothing and _compare(value, operator, other)

    def no_effect(self, causes: Sequence[NoEffect]) -> NoEffect | None:
        """The first of ``causes`` all of whose conditions hold."""
        return next((cause for cause in causes if all(map(self.holds, cause.conditions))), None)

    def path(self, name: str) -> Path:
        """Where the key of a dotted name is written (perhaps under another name), or would be."""
        return self.places.get(name) or tuple(name.split("."))

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
    is_on = {name: values.get(f"{name}.enabled", False) for name in ("fp16", "bf16")}
    dtype = next((name for name, on in is_on.items() if on is True), None)
    if dtype is not None or not any(is_on.values()):
        values["run.dtype"] = dtype or "fp32"
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


_OF_TEXT: Final = ("present", "absent", "object", "filled", "idle", "like", "unlike")


def _of_text(found: Any, operator: str, other: Callable[[], Any]) -> bool:
    if operator in ("present", "absent"):
        return (found is not ABSENT) == (operator == "present")
    if operator in ("like", "unlike"):
        return bool(found == other()) == (operator == "like")
    is_idle = isinstance(found, dict) and not any(found.values())
    return isinstance(found, dict) and (operator == "object" or is_idle == (operator == "idle"))


def _compare(value: Any, operator: str, other: Any) -> bool:
    if operator in ("truthy", "falsy"):
        return bool(value) == (operator == "truthy")
    if operator in ("==", "!="):
        return bool(value == other) == (operator == "==")
    if operator in ("in", "not-in"):
        return (value in other) == (operator == "in")
    numbers = [number for number in (value, 0 if operator == "odd" else other) if is_number(number)]
    if len(numbers) < 2:
        return False
    compared = {
        "<": value < numbers[1], "<=": value <= numbers[1],
        ">": value > numbers[1], ">=": value >= numbers[1], "odd": value % 2 == 1,
    }  # fmt: skip
    return bool(compared[operator])


def is_number(value: object) -> bool:
    """Whether it is a number of JSON's."""
    return isinstance(value, int | float) and not isinstance(value, bool)


By = Literal["deepspeed", "pipeline", "initialize", "dsx"]
# Who refuses what under each runner.
_REFUSERS: Final[Mapping[Runner, tuple[By, ...]]] = {
    "deepspeed": ("deepspeed",),
    "trainer": ("deepspeed",),
    "dsx": ("deepspeed", "pipeline", "dsx"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A row of the table; the head of this module says what its attributes are."""

    check: str
    key: str
    when: tuple[When, ...]
    why: str
    fix: str
    severity: Severity = "error"
    by: By = "deepspeed"
    runners: tuple[Runner, ...] = get_args(Runner)
    remove: bool = False
    set: Any = ABSENT
    rename: str = ""
    safe: Literal[True, False, "default", "idle"] = False
    since: str = ""
    before: str = ""
    where: str = ""

    @property
    def needs_mesh(self) -> bool:
        """Whether it depends on degrees of parallelism, which are known once a run is resolved."""
        return any(condition.key.startswith("mesh.") for condition in self.when)

    def finding(self, context: Context) -> Finding | None:
        """What is to be said of a config; None if the conditions do not hold."""
        past = bool(self.before) and context.version >= version(self.before)
        if past or (self.since and context.version < version(self.since)):
            return None
        if context.runner not in self.runners or not all(map(context.holds, self.when)):
            return None
        paths = [context.path(name) for name in self.key.split("|")]
        path = next((path for path in paths if context.at(path) is not ABSENT), paths[0])
        edits = tuple(self._edits(context, path))
        safe = self.safe is True
        if self.safe == "default":
            safe = not context.written(self.key)
        elif self.safe == "idle":
            safe = context.at(path) in (None, False)
        why, fix = (_filled(text, context) for text in (self.why, self.fix))
        return context.find(self.check, self.severity, path, why, fix, *edits, safe=safe)

    def _edits(self, context: Context, path: Path) -> Iterator[Edit]:
        if self.remove:
            yield Edit("remove", path)
        if self.rename:
            yield Edit("rename", path, self.rename)
        if self.set is not ABSENT:
            is_key = isinstance(self.set, str) and self.set.startswith("@")
            yield Edit("set", path, context.value(self.set[1:]) if is_key else self.set)


def _filled(text: str, context: Context) -> str:
    """``text`` with the values of the keys that it names in braces."""

    def word(found: re.Match[str]) -> str:
        value = context.value(found[1])
        return value if isinstance(value, str) else show(value)

    return re.sub(r"\{([a-z][\w.]*)\}", word, text)


def read_rules(content: Mapping[str, Any]) -> tuple[Rule, ...]:
    """The rules in a TOML file's content."""
    return tuple(rule for row in content["rule"] for rule in _rules(row))


def _rules(row: Mapping[str, Any]) -> Iterator[Rule]:
    """The rule of a row, or one for each of the tables in ``each``."""
    fields = {name: value for name, value in row.items() if name != "each"}
    for words in row.get("each", [{}]):
        own = _put(fields, words)
        when = [each for item in own.pop("when") for each in (item if isinstance(item, list) else [item])]
        runners = tuple(own.pop("runners", get_args(Runner)))
        yield Rule(when=tuple(map(condition, when)), runners=runners, **own)


def _put(node: Any, words: Mapping[str, Any]) -> Any:
    """``node`` with ``words`` where their names stand in angle brackets."""
    if isinstance(node, dict):
        return {name: _put(value, words) for name, value in node.items()}
    if isinstance(node, list):
        return [_put(item, words) for item in node]
    if not isinstance(node, str):
        return node
    if node[1:-1] in words and node == f"<{node[1:-1]}>":
        return words[node[1:-1]]
    return re.sub(r"<(\w+)>", lambda found: str(words.get(found[1], found[0])), node)


@cache
def refused() -> tuple[Rule, ...]:
    """The table of what stops a run."""
    return read_rules(read_data("refused"))


@cache
def names(group: str) -> frozenset[str]:
    """Names of optimizers that the table has: "deepspeed", "torch", "removed", "compiled" or "tested"."""
    return frozenset(read_data("refused")["optimizers"][group])


def check_rules(context: Context) -> Iterator[Finding]:
    """The rows of the table that are about this config, whatever the mesh."""
    yield from apply(refused(), context)


def apply(rules: Sequence[Rule], context: Context, by: Sequence[By] = ()) -> Iterator[Finding]:
    """The findings of ``rules`` about a config, for those who run it or for ``by``."""
    who = by or _REFUSERS[context.runner]
    told = (rule.finding(context) for rule in rules if rule.by in who)
    yield from (finding for finding in told if finding is not None)


def check_betas(context: Context) -> Iterator[Finding]:
    """Check that betas are two numbers of at least 0 and below 1."""
    name = "optimizer.params.betas"
    betas = context.value(name)
    if not context.written(name) or not isinstance(betas, list):
        return
    if len(betas) != 2 or not all(map(is_number, betas)):
        if "auto" in betas and context.runner == "trainer":
            yield context.find("betas", "error", name, '"auto" stands for the whole list', 'write "auto"')
        else:
            yield context.find("betas", "error", name, "not two numbers", "write [0.9, 0.999]")
    elif not all(0 <= beta < 1 for beta in betas):
        why = "each must be at least 0 and below 1"
        yield context.find("betas", "error", name, why, "write [0.9, 0.999]")


def check_required(context: Context) -> Iterator[Finding]:
    """Find missing keys that have no default, of the schedule and everywhere else."""
    seen: list[tuple[Path, Mapping[str, Any], KeyBlock | None]] = [
        ((), context.config, context.table.blocks.get(("", "")))
    ]
    seen += [
        (slot.path, slot.value, context.table.block(context.config, slot.name))
        for slot in context.slots
        if isinstance(slot.value, dict)
    ]
    for path, content, block in seen:
        if block is None or block.path in ("optimizer", "scheduler"):
            continue
        owner, _, last = block.path.rpartition(".")
        called = context.text(f"{owner}.type") if last == "params" else block.path
        for name, key in context.table.siblings(block).items():
            missing = key.default is REQUIRED and not {name, *key.aliases} & set(content)
            idle = context.no_effect(key.no_effect) is not None
            if missing and not idle and key.status == "live" and name not in key.aliases:
                why, fix = f"{called} needs it", f"add it ({key.effect})"
                yield context.find("missing", "error", (*path, name), why, fix)


def check_hidden(context: Context) -> Iterator[Finding]:
    """Find what stands in the place of a secret in a config that dsx wrote."""
    for path, _ in hidden_in(context.config):
        yield context.find("hidden-secret", "error", path, *HIDDEN_HERE)


def check_same_key(context: Context) -> Iterator[Finding]:
    """Find a key under two of its names, one of which DeepSpeed refuses."""
    seen: dict[tuple[Path, str], Slot] = {}
    for slot in context.slots:
        place = (slot.path[:-1], slot.name)
        first = seen.setdefault(place, slot)
        if slot.key is not None and slot.key.aliases and first is not slot:
            why = f"the same key as {first.path[-1]}, which is given too: DeepSpeed refuses one of them"
            yield context.find("duplicate-key", "error", slot.path, why, "keep one of them")


# 2^24 leaves 2^-7 to 65504 / 2^24: the first steps of most runs overflow and are skipped.
_HIGH_SCALE_POWER = 24
# DeepSpeedEngine.backward asks optimizers of ZeRO alone to scale the loss from here on (its PR 7665).
_NEVER_SCALED: Version = (0, 18, 3)
# The largest number of fp16.
_MOST_FP16 = 65504
# torch multiplies a tensor by no whole number that 64 bits cannot hold.
_MOST_SCALE_POWER = 63


def check_loss_scale(context: Context) -> Iterator[Finding]:
    """Check fp16's loss scaling."""
    scale, enabled = context.number("fp16.loss_scale"), context.value("fp16.enabled")
    if scale == 0 and enabled is True:
        yield from _dynamic(context)
    elif scale == 0 and enabled is UNKNOWN:
        # The Trainer decides.
        yield from _positive(context, "warning", ", which fails if fp16 is chosen")
    if scale and enabled is not False and (context.stage != 0 or context.runner == "dsx"):
        yield from _static(context, scale)
    unscaled = context.runner != "dsx" and context.stage == 0 and context.version >= _NEVER_SCALED
    if scale != 1 and enabled is True and unscaled:
        why = (
            "without ZeRO DeepSpeed divides gradients by the loss scale, and since 0.18.3 never multiplies "
            f"the loss by it, so that they are {f'{scale:g} times' if scale else 'by that factor'} too small"
            f"{_of_small_gradients(context)}"
        )
        fix = f'set {STAGE} to 1, use bf16, or write "loss_scale": 1'
        # Without the block, a script may set the stage.
        severity: Severity = "warning" if context.at(("zero_optimization",)) is ABSENT else "error"
        yield context.find("loss-scale", severity, "fp16.enabled", why, fix)


# Optimizers that divide by the size of gradients, but for an eps; and those that do not look at it.
_WITH_EPS: Final = frozenset({"adam", "adamw", "adamax", "nadam", "radam", "lamb", "rmsprop", "adagrad"})
_BY_SIGN: Final = frozenset({"lion", "muon"})


def _of_small_gradients(context: Context) -> str:
    """What gradients that are all too small by one factor do to the step, as the end of a sentence."""
    kind = context.text("optimizer.type").lower()
    clips = context.value("gradient_clipping")
    effects = [] if clips in (0, None) else ["gradient_clipping compares a norm as much too small"]
    if kind in _WITH_EPS or not kind:
        effects.append("eps weighs as much more in Adam and its like, which divide by their size")
    if kind not in _WITH_EPS | _BY_SIGN:
        effects.append(f"{'the step of SGD' if not kind else 'the step'} is as much too small")
    return f": {', '.join(effects)}" if effects else ""


def _static(context: Context, scale: float) -> Iterator[Finding]:
    """Find a fixed scale that no overflow lowers: steps whose gradients are inf are all skipped."""
    if scale <= _MOST_FP16:
        return
    why = "a fixed scale stays when gradients overflow, and DeepSpeed skips each such step without a word: "
    high = scale > 2**_HIGH_SCALE_POWER
    largest = _MOST_FP16 / scale
    why += (
        f"above {largest:.2g} they are inf in fp16" if high else "a loss in fp16 is inf with more than 65504"
    )
    fix = "use 0, a scale that adapts, or 1024"
    yield context.find("loss-scale", "error" if high else "warning", "fp16.loss_scale", why, fix)


def _positive(context: Context, severity: Severity, when: str = "") -> Iterator[Finding]:
    for name in ("loss_scale_window", "min_loss_scale"):
        # The value as it is written, because DeepSpeed would not use one out of its range.
        value = context.at(context.path(f"fp16.{name}"))
        if isinstance(value, int | float) and value <= 0:
            why = f"dynamic loss scaling needs a whole number above 0{when}"
            yield context.find("out-of-range", severity, f"fp16.{name}", why, "use 1 or more")


def _dynamic(context: Context) -> Iterator[Finding]:
    yield from _positive(context, "error")
    power, floor = context.number("fp16.initial_scale_power"), context.number("fp16.min_loss_scale")
    if power is None or floor is None:
        return
    if power > _MOST_SCALE_POWER:
        why = f"a power of two, not the scale itself: 2^{power:g} is no number that torch can multiply with"
        yield context.find("loss-scale", "error", "fp16.initial_scale_power", why, "use 16")
    elif power > _HIGH_SCALE_POWER:
        why = f"the first steps overflow and are skipped until the scale has halved down from 2^{power:g}"
        yield context.find("loss-scale", "note", "fp16.initial_scale_power", why, "use 16")
    if power < 1024 and floor > 2**power:
        why = f"above the initial scale 2^{power:g}"
        yield context.find("loss-scale", "error", "fp16.min_loss_scale", why, "use 1")
    why = (
        "fp16 scales the loss; when overflows have brought the scale down to min_loss_scale "
        f"({floor:g}), DeepSpeed ends the run with an exception"
    )
    fix = "on GPUs since Ampere use bf16, which needs no scale"
    yield context.find("loss-scale", "note", "fp16.enabled", why, fix)


CHECKS: Final = (check_required, check_hidden, check_same_key, check_betas, check_loss_scale, check_rules)
"""What stops a run of keys that DeepSpeed knows, with values that they take."""


def is_right(context: Context, slot: Slot) -> bool:
    """Whether DeepSpeed reads the key, and takes a value such as it has."""
    key = slot.key
    if key is None:
        return is_comment(slot)
    if is_past(context, key):
        return key.status == "dead" and (not is_dead_wrong(slot, key) or asks_for_default(slot, key))
    if key.status == "deprecated" and key.replacement:
        return context.at(tuple(key.replacement.split("."))) is ABSENT
    if slot.name == "optimizer.type":
        return not isinstance(slot.value, str) or is_optimizer(slot.value)
    fault = judge(slot.value, key).fault
    return not fault or is_tuned(context, slot) or (fault in RANGES and slot.name in OWN_RANGES)


RANGES: Final = ("out-of-range", "not-a-choice")
# Bounds that hold for dynamic scaling only.
OWN_RANGES: Final = frozenset({"fp16.loss_scale_window", "fp16.min_loss_scale"})


def is_optimizer(name: str) -> bool:
    """Whether DeepSpeed knows it: its own in any case, torch's as they are written (runtime/engine.py)."""
    return name.lower() in {own.lower() for own in names("deepspeed")} or name in names("torch")


def is_comment(slot: Slot) -> bool:
    """A key by which strict JSON is commented, in a block that ignores it."""
    word = str(slot.path[-1])
    says_so = word.startswith(("_", "//", "#", "$")) or word.lower() in ("comment", "comments")
    return says_so and slot.block.unknown == "ignored"


def is_past(context: Context, key: Key) -> bool:
    """Whether this DeepSpeed no longer has the key."""
    return key.status in ("removed", "dead") and (not key.until or context.version >= version(key.until))


def asks_for_default(slot: Slot, key: Key) -> bool:
    """Whether a key that is accepted and read by nothing asks for its default, which does no harm."""
    return slot.value in (key.default, "auto", None)


def is_dead_wrong(slot: Slot, key: Key) -> bool:
    """Whether a dead key is another one's old name, or asks for stages that nobody makes."""
    return bool(key.replacement) or slot.path[0] == "pipeline"


def is_tuned(context: Context, slot: Slot) -> bool:
    """Whether a value is for the autotuner: a list to try, "auto" or "all" (autotuning/README.md)."""
    tunable = slot.name in (TRAIN, MICRO, ACCUMULATION) or slot.name.startswith("zero_optimization.")
    space = isinstance(slot.value, list) or slot.value in ("auto", "all")
    return context.tunes and tunable and space


def errors(context: Context) -> list[Finding] | None:
    """Errors that stop a run; None where DeepSpeed does not know a key or value: that is the doctor's."""
    if not all(is_right(context, slot) for slot in context.slots):
        return None
    found = [finding for check in CHECKS for finding in check(context)]
    return [finding for finding in found if finding.severity == "error"]
