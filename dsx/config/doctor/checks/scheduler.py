"""The learning-rate schedule, against itself and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsx.config.doctor.context import Context
from dsx.config.doctor.finding import ABSENT, Edit, Finding, Path
from dsx.config.doctor.key import REQUIRED, Block
from dsx.config.doctor.other_names import SCHEDULES
from dsx.config.doctor.versions import Version
from dsx.config.wording import at, either, plain, suggest

_PARAMS = "scheduler.params"
# From here on WarmupLR ends at the optimizer's learning rate when warmup_max_lr is left out.
_WARMUP_ENDS_AT_LR: Version = (0, 17, 2)


def check_name(context: Context) -> Iterator[Finding]:
    """A block without a name does nothing; a name in another case is no name."""
    block = context.at(("scheduler",))
    if not isinstance(block, dict):
        return
    if "type" not in block:
        why = "without it DeepSpeed makes no schedule of this block, in silence"
        yield context.find("scheduler", "error", "scheduler.type", why, 'write "type": "WarmupLR"')
        return
    yield from _known(context, block["type"])
    if block["type"] is not None and not isinstance(block.get("params", {}), dict):
        return
    if "params" not in block and isinstance(block["type"], str):
        why = "DeepSpeed passes params on, and fails on a schedule without (TypeError)"
        path = ("scheduler", "params")
        yield context.find(
            "scheduler", "error", path, why, 'add "params": {}', Edit("set", path, {}), safe=True
        )


def _known(context: Context, kind: object) -> Iterator[Finding]:
    """A name that DeepSpeed or torch knows, spelt as there."""
    key = context.table.key("scheduler.type")
    if key is None or not isinstance(kind, str) or kind in (*key.choices, "auto"):
        return
    right = next((name for name in key.choices if plain(name) == plain(kind)), None)
    edits = (Edit("set", ("scheduler", "type"), right),) if right else ()
    other = SCHEDULES.get(plain(kind))
    fix = f'write "{right}"' if right else f'write "{other}", if that is meant' if other else ""
    why = "DeepSpeed and torch know no such schedule (names are case-sensitive)"
    fix = fix or suggest(kind, key.choices, otherwise=f"use {either(key.choices[:5])}")
    yield context.find("not-a-choice", "error", "scheduler.type", why, fix, *edits, safe=True)


def check_required(context: Context) -> Iterator[Finding]:
    """Parameters without a default, of the schedule and everywhere else."""
    seen: list[tuple[Path, Mapping[str, Any], Block | None]] = [
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
        for name, key in context.table.siblings(block).items():
            missing = key.default is REQUIRED and not {name, *key.aliases} & set(content)
            idle = context.no_effect(key.no_effect) is not None
            if missing and not idle and key.status == "live" and name not in key.aliases:
                why = f"{content_name(context, block.path)} needs it"
                yield context.find("missing", "error", (*path, name), why, f"add it ({key.effect})")


def content_name(context: Context, path: str) -> str:
    """The name of a block's owner: of ``scheduler.params`` the schedule's."""
    owner, _, last = path.rpartition(".")
    return context.text(f"{owner}.type") if last == "params" else path


def check_wrapped(context: Context) -> Iterator[Finding]:
    """A schedule of torch's gets DeepSpeed's wrapper of the optimizer (engine.py, _scheduler_from_config)."""
    block = context.table.block(context.config, _PARAMS)
    wrapped = bool(context.stage) or any(map(context.is_on, ("bf16.enabled", "fp16.enabled")))
    # dsx gives them the optimizer itself.
    if context.runner == "dsx" or not wrapped or block is None or not block.source.startswith("torch."):
        return
    why = (
        "a schedule of torch's, which refuses the wrapper of the optimizer that DeepSpeed gives it under "
        "ZeRO, bf16 and fp16 (TypeError)"
    )
    made = f"lr_scheduler=lambda optimizer: {context.text('scheduler.type')}(optimizer, ...)"
    fix = f"use one of DeepSpeed's, or pass deepspeed.initialize {made}"
    yield context.find("scheduler", "error", "scheduler.type", why, fix)


def check_warmup(context: Context) -> Iterator[Finding]:
    """Warm-up against the whole run and the optimizer's learning rate."""
    kind = context.text("scheduler.type")
    if not kind.startswith("Warmup"):
        return
    total, warmup = (
        context.number(f"{_PARAMS}.total_num_steps"),
        context.number(f"{_PARAMS}.warmup_num_steps"),
    )
    if total is not None and warmup is not None and warmup > total:
        default = "" if context.written(f"{_PARAMS}.warmup_num_steps") else " by default"
        why = f"warm-up takes {warmup:g} steps{default}, so that it never ends"
        yield context.find("scheduler", "warning", f"{_PARAMS}.total_num_steps", why, "make warm-up shorter")
    low, high = context.number(f"{_PARAMS}.warmup_min_lr"), context.number(f"{_PARAMS}.warmup_max_lr")
    if low is not None and high is not None and low > high and context.written(f"{_PARAMS}.warmup_max_lr"):
        why = f"above {at('warmup_max_lr', high)}: the learning rate falls during warm-up"
        yield context.find("scheduler", "warning", f"{_PARAMS}.warmup_min_lr", why, "swap the two")
    yield from _learning_rate(context, kind)


def _learning_rate(context: Context, kind: str) -> Iterator[Finding]:
    name = f"{_PARAMS}.warmup_max_lr"
    rate, high = context.number("optimizer.params.lr"), context.number(name)
    if not context.written("optimizer.params.lr") or rate is None or kind == "WarmupCosineLR":
        return
    if context.at(tuple(name.split("."))) is ABSENT:
        follows = kind == "WarmupLR" and context.version >= _WARMUP_ENDS_AT_LR
        if not follows and rate != 1e-3:
            why = f"left out, it is 0.001, and replaces optimizer.params.lr = {rate:g}"
            edits = (Edit("set", tuple(name.split(".")), rate),)
            yield context.find("scheduler", "error", name, why, f'write "warmup_max_lr": {rate:g}', *edits)
    elif high is not None and high != rate:
        why = f"the schedule goes to it, whatever optimizer.params.lr = {rate:g} says"
        yield context.find("scheduler", "warning", name, why, "write the same in both")


def check_cycle(context: Context) -> Iterator[Finding]:
    """OneCycle goes up."""
    low, high = context.number(f"{_PARAMS}.cycle_min_lr"), context.number(f"{_PARAMS}.cycle_max_lr")
    if context.text("scheduler.type") == "OneCycle" and low is not None and high is not None and low > high:
        why = f"above {at('cycle_max_lr', high)}: the learning rate falls first"
        yield context.find("scheduler", "warning", f"{_PARAMS}.cycle_min_lr", why, "swap the two")
