"""Values against the reference: type, range, choice, quotes, null, "auto"; old names, keys without effect.

Checks that compute follow: ranks, batch, loss scale, rates, buckets; and names of optimizers and schedules.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import reduce
from typing import Any, Final

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN, resolve_batch
from dsx.config.document import is_finite, same
from dsx.config.keys import REQUIRED, Key, NoEffect, Slot, ValueVerdict, converted, judge, shown, version
from dsx.config.refusals import (
    ABSENT,
    OWN_RANGES,
    RANGES,
    STAGE,
    Context,
    Edit,
    Finding,
    Severity,
    is_optimizer,
    is_tuned,
    names,
    step,
)
from dsx.config.wording import Path, at, dotted, either, plain, show, suggest
from dsx.doctor.unknown import optimizer_parts, other_names
from dsx.errors import ConfigError
from dsx.models.param import PRECISIONS
from dsx.parallel.limits import divisors

# Keys that are names in some spelling, which have checks of their own.
_NAMES = frozenset({"optimizer.type", "scheduler.type"})
_SWITCHES = (STAGE, "fp16.enabled", "bf16.enabled")
# Numbers outside DeepSpeed's pydantic blocks that fail as strings at the latest in the first step: compared,
# divided by or passed to an optimizer. Others may never be looked at, or compare unequal in silence.
_FAIL_QUOTED = frozenset({TRAIN, MICRO, ACCUMULATION, "gradient_clipping", "steps_per_print"})
_FAIL_QUOTED_IN = ("optimizer.params.", "scheduler.params.")
# Words outside those blocks that DeepSpeed refuses in another spelling.
_REFUSED_WORDS = frozenset(
    {"communication_data_type", "data_types.grad_accum_dtype", "data_types.param_dtype"}
)


def check_values(context: Context) -> Iterator[Finding]:
    """Check every value against its row."""
    for slot in context.slots:
        key = slot.key
        if key is None or key.status in ("removed", "dead"):
            continue
        verdict = judge(slot.value, key)
        constant = isinstance(slot.value, float) and not is_finite(slot.value)
        if constant and context.runner == "deepspeed" and context.source.text:
            continue  # check_constants says that DeepSpeed does not read it
        if verdict.fault and is_tuned(context, slot):
            continue
        if verdict.fault == "auto":
            yield from _auto(context, slot, key)
        elif verdict.fault == "null":
            fix = "remove it for the default" + ("" if key.default is REQUIRED else f", {show(key.default)}")
            gone, refused = Edit("remove", slot.path), slot.block.types == "coerced"
            why = f"not {verdict.expected}"
            yield context.find("null", "error", slot.path, why, fix, gone, safe=refused)
        elif verdict.fault and not (verdict.fault in RANGES and slot.name in OWN_RANGES | _NAMES):
            yield from _wrong(context, slot, key, verdict)


def _wrong(context: Context, slot: Slot, key: Key, verdict: ValueVerdict) -> Iterator[Finding]:
    edits = (Edit("set", slot.path, verdict.meant),) if verdict.has_meant else ()
    works = slot.block.types == "coerced" and converted(slot.value, key) is not None
    if verdict.fault == "quoted":
        why = "quoted, where a number or true/false belongs"
        if _python_word(slot.value):
            why = "Python's spelling; here it is a string"
        if works and context.runner != "dsx":
            why += "; DeepSpeed converts it, other readers of the file may not"
        severity: Severity = "warning" if works and context.runner != "dsx" else "error"
        fix = f"write {_bare(slot.value, verdict)}"
        safe = _is_the_only_reading(slot, key, verdict)
        yield context.find("quoted", severity, slot.path, why, fix, *edits, safe=safe)
    elif verdict.fault == "wrong-type":
        if works and isinstance(slot.value, str) and context.runner != "dsx":
            meant = converted(slot.value, key)
            why = f"not {verdict.expected}; DeepSpeed converts it, other readers of the file may not"
            edit = Edit("set", slot.path, meant)
            yield context.find("quoted", "warning", slot.path, why, f"write {show(meant)}", edit, safe=True)
            return
        if verdict.has_meant and context.runner != "dsx":
            fix = f"write {show(verdict.meant)}"
            level: Severity = "error" if key.strict else "note"
            why = "a number for a boolean"
            yield context.find("wrong-type", level, slot.path, why, fix, *edits, safe=True)
            return
        if key.path == "zero_optimization" and isinstance(slot.value, bool) and context.runner != "dsx":
            return  # The check of the old form says what it does.
        words, inside = _type_words(slot, key, verdict), _object(context, slot, key)
        yield context.find("wrong-type", "error", slot.path, *words, *inside, safe=True)
    elif verdict.fault == "not-a-choice":
        yield _not_a_choice(context, slot, key, verdict)
    else:
        fix = f"use {verdict.expected} ({key.effect})"
        if key.default is not REQUIRED:
            fix += ", or leave it out"
        yield context.find("out-of-range", "error", slot.path, f"not {verdict.expected}", fix)


def _is_the_only_reading(slot: Slot, key: Key, verdict: ValueVerdict) -> bool:
    """Whether DeepSpeed reads a quoted value as the bare one, or fails on it whatever else is written."""
    if slot.block.types == "coerced":
        return converted(slot.value, key) in (None, verdict.meant)
    is_number = not isinstance(verdict.meant, bool)
    return is_number and (slot.name in _FAIL_QUOTED or slot.name.startswith(_FAIL_QUOTED_IN))


# Names of dtypes -> the only ones that some keys take.
_DTYPES = {dtype: name for name, dtype in PRECISIONS.items()} | {"half": "fp16", "float": "fp32"}


def _not_a_choice(context: Context, slot: Slot, key: Key, verdict: ValueVerdict) -> Finding:
    why, fix = f"not one of {verdict.expected}", f"use {verdict.expected}"
    if isinstance(slot.value, str):
        words = [choice for choice in key.choices if isinstance(choice, str)]
        meant = {plain(slot.value), _DTYPES.get(slot.value.lower())}
        spelt = [word for word in words if plain(word) in meant]
        if len(spelt) == 1:
            edit = Edit("set", slot.path, spelt[0])
            safe = slot.block.types == "coerced" or slot.name in _REFUSED_WORDS
            fix = f'write "{spelt[0]}"'
            return context.find("not-a-choice", "error", slot.path, why, fix, edit, safe=safe)
        fix = suggest(slot.value, map(str, key.choices), otherwise=fix)
    return context.find("not-a-choice", "error", slot.path, why, fix)


def _bare(value: str, verdict: ValueVerdict) -> str:
    """What to write, in the notation of the quoted ``value`` (3e-4, not 0.0003) where it is JSON."""
    try:
        return value.strip() if json.loads(value) == verdict.meant else show(verdict.meant)
    except json.JSONDecodeError:
        return show(verdict.meant)


def _type_words(slot: Slot, key: Key, verdict: ValueVerdict) -> tuple[str, str]:
    if not key.kinds:
        return f"JSON has no value for it ({key.effect})", "remove it"
    if "object" in key.kinds:
        is_switch = key.main and isinstance(slot.value, bool)
        example = key.example or (f'{{"{key.main}": {show(slot.value)}}}' if is_switch else "{...}")
        return "it must be an object", f'write "{slot.path[-1]}": {example}'
    why = f"not {verdict.expected}"
    if isinstance(slot.value, float) and not is_finite(slot.value):
        return f"not a {'finite ' * (slot.value == slot.value)}number", f"use {verdict.expected}"
    if isinstance(slot.value, str) and slot.value.lower() == "auto" and key.trainer_auto:
        return why, 'write "auto", in lower case, for transformers\' Trainer or Accelerate; else a value'
    if isinstance(slot.value, str) and slot.value.strip().rstrip(",") in ("NaN", "Infinity", "-Infinity"):
        why += ": a word that is no number of JSON's, nor of HJSON's"
    if _python_word(slot.value):
        why += "; JSON writes null" if "None" in str(slot.value) else "; JSON writes true and false"
    return why, f"use {verdict.expected}"


def _object(context: Context, slot: Slot, key: Key) -> tuple[Edit, ...]:
    """``"bf16": true`` as ``{"enabled": true}``, ``"offload_param": "cpu"`` as ``{"device": "cpu"}``."""
    inner = context.table.key(f"{key.path}.{key.main}") if key.main else None
    if inner is None:
        return ()
    verdict = judge(slot.value, inner)
    fits = not verdict.fault or verdict.has_meant
    return (Edit("set", slot.path, {key.main: verdict.meant}),) if fits else ()


def _auto(context: Context, slot: Slot, key: Key) -> Iterator[Finding]:
    """The word "auto", which is transformers' and Accelerate's."""
    if context.runner == "trainer" and key.trainer_auto:
        if slot.name == STAGE:
            why = "Accelerate fills it in from its own config; under transformers' Trainer it is silently 0"
            yield context.find("auto", "warning", slot.path, why, "write the stage")
        return
    default = "" if key.default is REQUIRED else f" ({show(key.default)})"
    fix = "write the value, or leave the key out for DeepSpeed's default"
    if context.runner == "deepspeed" and key.trainer_auto:
        fix += "; under transformers' Trainer or Accelerate, say --for trainer"
    who = 'DeepSpeed itself knows no "auto" here (only transformers\' Trainer, dsx.Trainer and Accelerate do)'
    if context.runner == "trainer":
        who = 'neither the Trainer nor Accelerate fills in an "auto" here'
    if slot.name in _SWITCHES and key.auto == "default":
        why = f"{who}: it is silently the default{default}"
        yield context.find("auto", "error", slot.path, why, fix)
    elif key.auto == "default" and context.runner != "dsx":
        why = f"{who}: it is dropped, and the default{default} used"
        # This helps a Trainer's config that was not recognised as one.
        safe = not (context.guessed and key.trainer_auto)
        yield context.find("auto", "note", slot.path, why, fix, Edit("remove", slot.path), safe=safe)
    else:
        yield context.find("auto", "error", slot.path, f"{who}, and uses the word as if it were a value", fix)


def check_trainer(context: Context) -> Iterator[Finding]:
    """Say once that the Trainer fills in what is "auto"."""
    if context.runner != "trainer":
        return
    filled = [slot for slot in context.slots if slot.key and slot.value == "auto" and slot.key.trainer_auto]
    if len(filled) == 1 and context.guessed and not context.tunes:
        why = "right under transformers' Trainer or Accelerate, and refused by DeepSpeed alone"
        fix = "say --for trainer or --for deepspeed"
        yield context.find("auto", "warning", filled[0].path, why, fix)
    elif filled:
        words = ", ".join(dotted(slot.path) for slot in filled[:3]) + (", ..." if len(filled) > 3 else "")
        why = f'{len(filled)} values are "auto" ({words}): right under transformers\' Trainer or Accelerate'
        fix = "nothing to do there; DeepSpeed alone would fail, or use defaults (dsx check --for deepspeed)"
        yield context.find("auto", "note", (), why, fix)


def check_no_effect(context: Context) -> Iterator[Finding]:
    """Find keys that do nothing, given the others."""
    for slot in context.slots:
        key = slot.key
        if key is None or key.status in ("removed", "dead"):
            continue
        if slot.value is None or slot.value is False or slot.value in (key.default, "none", "auto"):
            continue
        if judge(slot.value, key).fault in ("wrong-type", "null"):
            continue
        cause = context.no_effect(key.no_effect)
        if cause is None or _is_switch(cause, slot) or slot.name in _OWN_CHECKS:
            continue
        first = cause.conditions[0]
        # ZeRO is off as a whole, as where a script's argument sets its stage.
        without_zero = (first.key, first.operator, first.value) == (STAGE, "<", 1)
        severity: Severity = "note" if without_zero else "warning"
        yield context.find("no-effect", severity, slot.path, f"it does nothing: {cause.why}", _fix(cause))


# These have checks of their own.
_OWN_CHECKS = frozenset({"zero_optimization.offload_param", "zero_optimization.offload_optimizer"})


def _is_switch(cause: NoEffect, slot: Slot) -> bool:
    """Whether the key's block is off, which is said once for the block, if at all."""
    owner = ".".join(slot.name.split(".")[:-1])
    return any(condition.key == f"{owner}.enabled" for condition in cause.conditions)


def _fix(cause: NoEffect) -> str:
    condition = cause.conditions[0]
    words = {"<": "at least", "<=": "above", ">": "at most", ">=": "below"}
    if condition.operator in words:
        return f"remove it, or set {condition.key} to {words[condition.operator]} {show(condition.value)}"
    if condition.operator in ("falsy", "missing"):
        return f"remove it, or set {condition.key}"
    return f"remove it, or change {condition.key}"


def check_switched_off(context: Context) -> Iterator[Finding]:
    """Find blocks that are filled in and do nothing, because ``enabled`` is missing."""
    for slot in context.slots:
        if slot.key is None or not isinstance(slot.value, dict) or not slot.value:
            continue
        switch = context.table.key(f"{slot.name}.enabled")
        if switch is None or switch.default is not False or switch.status != "live":
            continue
        if not any(word.lower().startswith("enable") for word in slot.value):
            why = 'the block does nothing without "enabled": true'
            fix = 'add "enabled": true, or remove the block'
            yield context.find("no-effect", "warning", slot.path, why, fix)


def _python_word(value: object) -> bool:
    """Whether the value is a Python constant that HJSON read as a string."""
    return isinstance(value, str) and value.strip().rstrip(",") in ("True", "False", "None")


def check_old_form(context: Context) -> Iterator[Finding]:
    """Find ``"zero_optimization": true``, which means stage 1."""
    path = ("zero_optimization",)
    value = context.at(path)
    if isinstance(value, bool) and context.runner != "dsx":
        meant: dict[str, Any] = {"stage": int(value)}
        if value and "allgather_size" in context.config:
            meant["allgather_bucket_size"] = context.config["allgather_size"]
        edit = Edit("set", path, meant)
        why = f"the form of before 2020; DeepSpeed takes it for stage {int(value)}"
        yield context.find("deprecated", "warning", path, why, f"write {show(meant)}", edit, safe=True)


def check_deprecated(context: Context) -> Iterator[Finding]:
    """Find keys that still work under a new name (bfloat16 has rows of its own)."""
    for slot in context.slots:
        key = slot.key
        if key is None or key.status != "deprecated" or key.path == "bfloat16":
            continue
        if not key.replacement:
            why = f"deprecated, and DeepSpeed does not read it ({key.effect})"
            gone = Edit("remove", slot.path)
            yield context.find("deprecated", "warning", slot.path, why, "remove it", gone, safe=True)
            continue
        target = tuple(key.replacement.split("."))
        if context.at(target) is not ABSENT:
            why = f"{key.replacement} replaces it, and is given too: DeepSpeed stops with an assertion"
            gone, safe = Edit("remove", slot.path), _says_the_same(slot, context.at(target))
            yield context.find("deprecated", "error", slot.path, why, "remove it", gone, safe=safe)
            continue
        fix = f"use {key.replacement}"
        why = "deprecated; DeepSpeed still reads it"
        yield context.find("deprecated", "warning", slot.path, why, fix, *_renewed(slot, target), safe=True)


def _says_the_same(slot: Slot, new: object) -> bool:
    """Whether the replacement of a deprecated key, present too, has what the key asks for."""
    if isinstance(slot.value, bool) and isinstance(new, dict):
        return slot.value == (new.get("device", "none") not in ("none", None))
    return same(slot.value, new)


def _renewed(slot: Slot, target: tuple[str, ...]) -> tuple[Edit, ...]:
    """Edits from a deprecated key to its replacement, where their values mean the same."""
    if target[-1] in ("offload_optimizer", "offload_param"):
        gone = Edit("remove", slot.path)
        if slot.value is not True:
            return (gone,) if slot.value is False else ()
        return (gone, Edit("set", target, {"device": "cpu"}))
    if slot.path[:-1] == target[:-1]:
        return (Edit("rename", slot.path, target[-1]),)
    return (Edit("remove", slot.path), Edit("set", target, slot.value))


def check_duplicates(context: Context) -> Iterator[Finding]:
    """Find keys written twice, which DeepSpeed refuses and of which other readers take the last."""
    for path, lines in context.source.twice():
        where = ", ".join(map(str, lines))
        why = f"the key is written twice (lines {where}): DeepSpeed refuses it, others take the last"
        yield context.find("duplicate-key", "error", path, why, "keep one of them")


def check_syntax(context: Context) -> Iterator[Finding]:
    """Find HJSON, which DeepSpeed and dsx read and others do not."""
    document = context.source.document
    if document is None or context.runner == "dsx" or not context.source.text.strip():
        return
    kinds: list[str] = list(dict.fromkeys(kind for kind, _ in document.relaxed))
    if context.source.text.startswith("\ufeff"):
        kinds.append("byte order mark")
    if not kinds:
        return
    line = context.source.line_column(document.relaxed[0][1])[0] if document.relaxed else 1
    what = f"{', '.join(kinds)}, first on line {line}"
    if context.runner == "trainer":
        why = f"no strict JSON ({what}), which the Trainer and Accelerate refuse"
        yield context.find("syntax", "error", (), why, "write strict JSON")
    else:
        why = f"no strict JSON ({what}): DeepSpeed reads it, but transformers, Accelerate and jq refuse it"
        yield context.find("syntax", "note", (), why, "write strict JSON if another tool reads the file")


def check_constants(context: Context) -> Iterator[Finding]:
    """Find NaN and Infinity in a file: numbers to Python's json, and none to DeepSpeed's reader."""
    found = list(constants(context.config))
    if not found or context.runner == "dsx":
        return
    who = "transformers' Trainer and Accelerate, which use Python's json, read it as a number"
    what = "DeepSpeed's reader of files (HJSON) takes it and the rest of its line for a word"
    if context.runner == "deepspeed" and context.source.text:
        fix = "write a number, or leave it out; under the Trainer or Accelerate, say --for trainer"
        for path in found:
            yield context.find("wrong-type", "error", path, f"no number here: {what}; {who}", fix)
    elif context.guessed and not any(slot.value == "auto" for slot in context.slots):
        known = [slot for slot in context.slots if slot.path in found]
        right = [slot for slot in known if slot.key and not judge(slot.value, slot.key).fault]
        for slot in right[:1]:
            fix = "say --for trainer or --for deepspeed"
            yield context.find("syntax", "warning", slot.path, f"{who}; {what}", fix)


def constants(node: object, path: Path = ()) -> Iterator[Path]:
    """Where NaN and Infinity stand."""
    if isinstance(node, dict | list):
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            yield from constants(value, (*path, key))
    elif isinstance(node, float) and not is_finite(node):
        yield path


def check_newer(context: Context) -> Iterator[Finding]:
    """Find keys that are newer than the DeepSpeed in question."""
    for slot in context.slots:
        if slot.key is not None and slot.key.since and version(slot.key.since) > context.version:
            does = "refuses" if slot.block.unknown == "refused" else "ignores"
            why = f"it came with DeepSpeed {slot.key.since}; {shown(context.version)} {does} it"
            yield context.find("version", "error", slot.path, why, f"use DeepSpeed {slot.key.since} or newer")


_SEQUENCE = "sequence_parallel_size"


def data_parallel_size(context: Context) -> int | None:
    """The ranks by which DeepSpeed multiplies the micro-batch (runtime/config.py); None if unknown.

    AutoTP's degree is not divided out: DeepSpeed makes its groups after this.
    """
    if context.world_size is None or context.runner == "dsx":
        return None
    shared = (context.pipeline or 1) * int(context.number(_SEQUENCE) or 1)
    return context.world_size // shared if context.world_size % shared == 0 else None


def check_world(context: Context) -> Iterator[Finding]:
    """Check that the parallel degrees divide the number of ranks."""
    world = context.world_size
    if world is None or context.runner == "dsx":
        return
    yield from _grid(context, world)
    always = (_SEQUENCE, "tensor_parallel.autotp_size", "zero_optimization.zero_hpz_partition_size")
    switched = ("expert_parallel.autoep_size", "hybrid_engine.inference_tp_size")
    on = [name for name in switched if context.is_on(f"{name.partition('.')[0]}.enabled")]
    for name in (*always, *on):
        size = context.number(name)
        if size and context.written(name) and world % min(int(size), world):
            fix = f"use {either(divisors(world))}"
            yield context.find("degree", "error", name, f"it does not divide {world} ranks", fix)
        elif size and context.written(name) and size > world:
            fix = f"use at most {world}"
            if name != always[2]:
                yield context.find("degree", "error", name, f"there are only {world} ranks", fix)
            elif context.stage == 3:
                why = f"there are only {world} ranks: DeepSpeed takes {world}, in silence"
                yield context.find("degree", "warning", name, why, fix)


def _grid(context: Context, world: int) -> Iterator[Finding]:
    """Pipeline stages, and the mesh of data and sequence parallelism (pipe/module.py; initialize)."""
    stages = context.pipeline or 1
    if world % stages:
        why = f"PipelineModule refuses {stages} stages on {world} ranks: they do not divide them"
        yield context.find("degree", "error", ("pipeline",), why, f"use {either(divisors(world))} stages")
    data, sequence = context.number("data_parallel_size"), context.number(_SEQUENCE)
    if data and sequence and context.written(_SEQUENCE) and data * sequence != world:
        why = f"times {_SEQUENCE} = {sequence} it is not {world} ranks: no mesh can be made"
        fix = (
            f"use {world // int(sequence)}"
            if world % sequence == 0
            else f"use a {_SEQUENCE} that divides {world}"
        )
        yield context.find("degree", "error", "data_parallel_size", why, fix)


def check_batch_triple(context: Context) -> Iterator[Finding]:
    """Check that micro-batch x accumulation x data-parallel ranks is the batch."""
    given = {name: context.value(name) for name in (TRAIN, MICRO, ACCUMULATION)}
    if any(value is not None and (_whole(value) or 0) < 1 for value in given.values()):  # or UNKNOWN
        return
    if given[TRAIN] is None and given[MICRO] is None:
        return
    dp = data_parallel_size(context)
    if dp is not None:
        yield from _with_ranks(context, given, dp)
        return
    train = given[TRAIN]
    per_rank = math.prod(given[name] or 1 for name in (MICRO, ACCUMULATION))
    if train is None or (given[MICRO] is None and given[ACCUMULATION] is None):
        return
    names = [name for name in (MICRO, ACCUMULATION) if given[name]]
    factors = " x ".join(at(name, given[name]) for name in names)
    if train % per_rank:
        low, high = train // per_rank * per_rank, -(-train // per_rank) * per_rank
        legal = " or ".join(str(n) for n in (low, high) if n)
        fix = f"write {TRAIN} = {legal}, or leave it out: DeepSpeed computes it"
        why = f"no multiple of {factors}, so that no number of ranks fits"
        yield context.find("batch-triple", "error", TRAIN, why, fix)
    elif len(names) == 2:
        ranks = train // per_rank
        why = f"with {factors} it is right for {ranks} data-parallel rank{'s' * (ranks != 1)} only"
        fix = f"leave {TRAIN} or {ACCUMULATION} out to run on any number; say --gpus to check one"
        yield context.find("batch-triple", "note", TRAIN, why, fix)


def _with_ranks(context: Context, given: dict[str, int | None], dp: int) -> Iterator[Finding]:
    try:
        resolve_batch(given, dp)
    except ConfigError as error:
        name = next(name for name in (TRAIN, MICRO) if given[name] is not None)
        why = error.what if error.path else f"{error.what} ({error.where})"  # several keys
        yield context.find("batch-triple", "error", name, why, error.fix)


def check_schedule_length(context: Context) -> Iterator[Finding]:
    """Find a learning-rate schedule that ends before the run does."""
    steps: Any = reduce(step, ("dsx", "train", "steps"), context.source.config)
    name = "scheduler.params.total_num_steps"
    total = context.number(name)
    if isinstance(steps, int) and total is not None and context.written(name) and steps > total:
        why = f"dsx.train.steps is {steps}: the last {steps - total:g} run at the least learning rate"
        yield context.find("schedule-length", "warning", name, why, f"write {steps}, if that is not meant")


def check_rounds(context: Context) -> Iterator[Finding]:
    """Find islands (``dsx.outer``) that never meet before the end of the run."""
    every, steps = (_whole(reduce(step, ("dsx", *key), context.source.config)) for key in _EVERY)
    if every is not None and steps is not None and every > steps > 0:
        why = f"dsx.train.steps is {steps}: the islands average their weights once, after the last step"
        fix = f"use {steps} or less, if that is not meant"
        yield context.find("outer-rounds", "warning", ("dsx", "outer", "every"), why, fix)


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


_EVERY: Final[tuple[tuple[str, str], ...]] = (("outer", "every"), ("train", "steps"))


# Optimizers whose step is about as large as the learning rate, whatever the gradient.
_NORMALIZED: Final = frozenset({"adam", "adamw", "adamax", "nadam", "radam", "lamb", "lion"})
_ADAM_LIKE: Final = _NORMALIZED - {"lion"}
_LARGE_RATE: Final = 0.01  # for them
_RATES: Final = ("optimizer.params.lr", "scheduler.params.warmup_max_lr", "scheduler.params.cycle_max_lr")
_METRICS: Final = ("data_efficiency", "data_sampling", "curriculum_learning", "curriculum_metrics")


def check_learning_rate(context: Context) -> Iterator[Finding]:
    """Find a rate above 1 where weights move by about that much a step, or one that is the weight decay's."""
    kind = context.text("optimizer.type").lower()
    if kind not in _NORMALIZED:
        return
    for name in _RATES:
        rate = context.number(name)
        if rate is not None and rate > 1 and context.written(name):
            why = f"each step of {kind} moves a weight by about this much: the run diverges at once"
            yield context.find("unit", "warning", name, why, f"write {_inverted(rate)}, if that is meant")
    name = "optimizer.params.weight_decay"
    decay, rate = context.number(name), context.number(_RATES[0])
    if decay is not None and rate is not None and 0 < decay <= 1e-3 and rate >= max(_LARGE_RATE, 10 * decay):
        why = f"with lr = {rate:g} the two look exchanged"
        yield context.find("unit", "warning", name, why, f'write "lr": {decay:g}, "weight_decay": {rate:g}')


def _inverted(rate: float) -> str:
    """The number whose exponent has the other sign: 1e-4 for 1e4."""
    mantissa, exponent = f"{rate:e}".split("e")
    return f"{float(mantissa):g}e-{int(exponent)}" if int(exponent) else "1e-4"


def check_betas_order(context: Context) -> Iterator[Finding]:
    """Find betas in the wrong order: the gradient's average comes first, and has the shorter memory."""
    name = "optimizer.params.betas"
    betas = context.value(name)
    if context.text("optimizer.type").lower() not in _ADAM_LIKE or not isinstance(betas, list):
        return
    if len(betas) == 2 and all(isinstance(beta, float) for beta in betas) and betas[0] > betas[1]:
        path = context.path(name)
        why = "the first is larger: they are the decay of the gradient's average, then of its square's"
        edit = Edit("set", path, [betas[1], betas[0]])
        yield context.find("unit", "warning", path, why, f"write [{betas[1]:g}, {betas[0]:g}]", edit)


def check_difficulties(context: Context) -> Iterator[Finding]:
    """Find curricula, of the former and the present kind, that begin with what they should end with."""
    metrics = context.at(_METRICS)
    names = metrics if isinstance(metrics, dict) else {}
    for block in (("curriculum_learning",), *((*_METRICS, name) for name in names)):
        paths = (*block, "min_difficulty"), (*block, "max_difficulty")
        low, high = map(context.at, paths)
        if isinstance(low, int | float) and isinstance(high, int | float) and low > high:
            edits = Edit("set", paths[0], high), Edit("set", paths[1], low)
            why = f"above max_difficulty = {high:g}: what is learned becomes easier"
            yield context.find("unit", "warning", paths[0], why, "swap the two", *edits)


# 4e9 elements are 8 GB in bf16, and overlap_comm makes two such buckets.
_LARGE_BUCKET = 4_000_000_000
_BUCKETS = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")


def check_buckets(context: Context) -> Iterator[Finding]:
    """Check bucket sizes, which count elements and not bytes."""
    for last in _BUCKETS:
        name = f"zero_optimization.{last}"
        size = context.number(name)
        if size is None or not context.written(name):
            continue
        if size > _LARGE_BUCKET:
            gigabytes = size * 2 / 1e9
            why = f"buckets count elements: in 16 bit this is {gigabytes:,.0f} GB of memory on each rank"
            yield context.find("bucket-size", "warning", name, why, "use 5e8 or less")


# Whole numbers that are not converted: schedules and torch's DataLoader ask for an int.
_COUNTS: Final[tuple[Path, ...]] = (
    ("scheduler", "params", "warmup_num_steps"),
    ("scheduler", "params", "lr_range_test_step_size"),
    (TRAIN,),
    (MICRO,),
    (ACCUMULATION,),
)


def check_whole_numbers(context: Context) -> Iterator[Finding]:
    """Find 1e3 for steps: whole to DeepSpeed's own reader, a float to the Trainer's (lr_schedules.py)."""
    if context.runner != "trainer":
        return
    for path in _COUNTS:
        value, written = context.at(path), context.source.written(path)
        if value is not ABSENT and any(char in written for char in ".eE") and isinstance(value, int):
            why = f"the Trainer reads {written} as a float, where DeepSpeed and torch refuse one"
            edit = Edit("set", path, value)
            yield context.find("wrong-type", "error", path, why, f"write {value}", edit, safe=True)


def check_schedule(context: Context) -> Iterator[Finding]:
    """Find a name that neither DeepSpeed nor torch knows, also one in another case."""
    key, kind = context.table.key("scheduler.type"), context.at(("scheduler", "type"))
    if key is None or not isinstance(kind, str) or kind in (*key.choices, "auto"):
        return
    right = next((name for name in key.choices if plain(name) == plain(kind)), None)
    edits = (Edit("set", ("scheduler", "type"), right),) if right else ()
    other = other_names("schedules").get(plain(kind))
    fix = f'write "{right}"' if right else f'write "{other}", if that is meant' if other else ""
    why = "DeepSpeed and torch know no such schedule (names are case-sensitive)"
    fix = fix or suggest(kind, key.choices, otherwise=f"use {either(key.choices[:5])}")
    yield context.find("not-a-choice", "error", "scheduler.type", why, fix, *edits, safe=True)


def check_optimizer(context: Context) -> Iterator[Finding]:
    """Find a name that DeepSpeed does not know (runtime/engine.py)."""
    name = "optimizer.type"
    kind = context.at(("optimizer", "type"))
    if not isinstance(kind, str) or kind == "auto" or is_optimizer(kind):
        return
    if kind.lower() in names("removed"):
        why = "DeepSpeed 0.19.8 has removed it (since 0.19.7)"
        yield context.find("removed", "error", name, why, 'use "AdamW"')
        return
    known = {each.lower(): each for each in sorted(names("deepspeed") | names("torch"))}
    # adam_w and sgd are surely AdamW and SGD; DeepSpeedCPUAdam and adamw_8bit not quite.
    right = known.get(plain(kind))
    edits = (Edit("set", ("optimizer", "type"), right),) if right else ()
    bare = known.get(reduce(lambda word, part: word.replace(part, ""), optimizer_parts(), plain(kind)))
    fix = f'write "{right}"' if right else f'write "{bare}", if that is meant' if bare else ""
    fix = fix or suggest(kind, known.values(), otherwise='use "AdamW"')
    yield context.find("optimizer-name", "error", name, "no such optimizer", fix, *edits, safe=True)


def check_clipping(context: Context) -> Iterator[Finding]:
    """Find ``max_grad_norm`` among the parameters, which DeepSpeed refuses."""
    path = ("optimizer", "params", "max_grad_norm")
    value = context.at(path)
    if value is ABSENT:
        return
    edits = [Edit("remove", path)]
    clips = context.at(("gradient_clipping",))
    fix = f'remove it; "gradient_clipping": {clips} is set already'
    if clips is ABSENT:
        edits.append(Edit("set", ("gradient_clipping",), value))
        fix = f'remove it and write "gradient_clipping": {value} at the top level'
    yield context.find(
        "max-grad-norm",
        "error",
        path,
        "DeepSpeed refuses it here",
        fix,
        *edits,
        safe=clips in (ABSENT, value),
    )
