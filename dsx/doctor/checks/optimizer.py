"""The optimizer and the learning-rate schedule: names, parameters, and what each implementation takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, Final

from dsx.config.wording import at, either, plain, suggest
from dsx.doctor.context import ACCUMULATION, MICRO, TRAIN, Context
from dsx.doctor.finding import ABSENT, Edit, Finding, Path, Severity
from dsx.doctor.key import REQUIRED, KeyBlock, Version
from dsx.doctor.other_names import OPTIMIZER_PARTS, SCHEDULES
from dsx.doctor.reference import optimizer_names as keys
from dsx.doctor.table import Slot

_TORCH_PARAMETERS = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused"})
_KERNEL = frozenset({"bias_correction", "set_grad_none"})
_CPU_REFUSES: Final = frozenset({"set_grad_none"})
# Whole numbers that are not converted: schedules and torch's DataLoader ask for an int.
_COUNTS: Final[tuple[Path, ...]] = (
    ("scheduler", "params", "warmup_num_steps"),
    ("scheduler", "params", "lr_range_test_step_size"),
    (TRAIN,),
    (MICRO,),
    (ACCUMULATION,),
)
# (optimizer, made on the CPU) -> parameters of other implementations, which end in a TypeError
# (runtime/engine.py, _configure_basic_optimizer; ops/*/cpu_*.py; torch/optim/adagrad.py).
_REFUSED: Final = {
    ("adam", False): _TORCH_PARAMETERS,
    ("adam", True): _TORCH_PARAMETERS | _CPU_REFUSES,
    ("adamw", False): _TORCH_PARAMETERS,
    ("adamw", True): _TORCH_PARAMETERS | _CPU_REFUSES,
    ("lion", False): frozenset({"fp32_optimizer_states"}),
    ("lion", True): _CPU_REFUSES,
    ("adagrad", False): frozenset({"amsgrad", "fp32_optimizer_states"}),
    ("adagrad", True): frozenset(
        {"lr_decay", "initial_accumulator_value", *_TORCH_PARAMETERS} - {"capturable"}
    ),
}


def check_parameters(context: Context) -> Iterator[Finding]:
    """Parameters that the implementation which DeepSpeed chooses does not take."""
    kind = context.text("optimizer.type").lower()
    params = context.at(("optimizer", "params"))
    if not isinstance(params, dict) or context.stage is None:
        return
    on_cpu = context.offloads("optimizer") and context.stage > 0
    if kind in ("adam", "adamw") and context.is_on("optimizer.params.torch_adam"):
        refused, chosen, fix = _KERNEL, "torch's Adam", "remove it"
    else:
        refused = _REFUSED.get((kind, on_cpu), frozenset())
        chosen = f"DeepSpeed's {'CPU ' if on_cpu else ''}{kind}"
        fix = 'remove it, or write "torch_adam": true' if kind.startswith("adam") else "remove it"
    for word in params:
        if word in refused:
            path = ("optimizer", "params", word)
            why = f"{chosen}, which is what runs here, has no such parameter: TypeError"
            # What asks for nothing can go; else torch's Adam may be what is meant.
            idle = params[word] is None or params[word] is False
            gone = Edit("remove", path)
            yield context.find("optimizer-parameter", "error", path, why, fix, gone, safe=idle)


def check_same_key(context: Context) -> Iterator[Finding]:
    """One key under two of its names, of which DeepSpeed refuses one."""
    seen: dict[tuple[Path, str], Slot] = {}
    for slot in context.slots:
        place = (slot.path[:-1], slot.name)
        first = seen.setdefault(place, slot)
        if slot.key is not None and slot.key.aliases and first is not slot:
            why = f"the same key as {first.path[-1]}, which is given too: DeepSpeed refuses one of them"
            yield context.find("duplicate-key", "error", slot.path, why, "keep one of them")


def check_zenflow(context: Context) -> Iterator[Finding]:
    """When ZenFlow selects and updates (runtime/zenflow/engine.py, configure_zenflow)."""
    block = ("zero_optimization", "zenflow")
    if not isinstance(context.at(block), dict) or context.runner == "dsx":
        return
    name = ".".join(block)
    strategy = context.value(f"{name}.select_strategy")
    select, update = context.value(f"{name}.select_interval"), context.value(f"{name}.update_interval")
    if strategy == "auto" and isinstance(select, int):
        why = 'with select_strategy "auto" the interval is chosen: DeepSpeed raises a Warning'
        yield context.find(
            "zenflow", "error", f"{name}.select_interval", why, 'say "step" or "epoch", or remove it'
        )
    elif strategy in ("step", "epoch") and select == "auto":
        why = f'select_strategy "{strategy}" needs a number: DeepSpeed raises ValueError'
        yield context.find("zenflow", "error", f"{name}.select_interval", why, "write a number")
    elif strategy == "step" and isinstance(select, int) and isinstance(update, int) and select < update:
        why = f"below update_interval = {update}: DeepSpeed raises ValueError"
        yield context.find("zenflow", "error", f"{name}.select_interval", why, f"use {update} or more")
    steps = context.value("gradient_accumulation_steps")
    if isinstance(update, int) and isinstance(steps, int) and context.stage != 0 and steps != update:
        why = f"ZenFlow replaces it by its update_interval = {update}, in silence"
        yield context.find("zenflow", "warning", "gradient_accumulation_steps", why, "write the same in both")


def check_compile(context: Context) -> Iterator[Finding]:
    """Two ways of compiling."""
    name = "compile.autoep_non_moe"
    if context.is_on(name) and context.is_on("compile.deepcompile"):
        why = "it does not go with deepcompile: DeepSpeed raises ValueError"
        yield context.find("compile", "error", name, why, "keep one of the two")


def check_whole_numbers(context: Context) -> Iterator[Finding]:
    """1e3 for steps: a whole number to DeepSpeed's own reader, a float to the Trainer's (lr_schedules.py)."""
    if context.runner != "trainer":
        return
    for path in _COUNTS:
        value, written = context.at(path), context.source.written(path)
        if value is not ABSENT and any(char in written for char in ".eE") and isinstance(value, int):
            why = f"the Trainer reads {written} as a float, where DeepSpeed and torch refuse one"
            edit = Edit("set", path, value)
            yield context.find("wrong-type", "error", path, why, f"write {value}", edit, safe=True)


_PARAMS = "scheduler.params"
# From here on WarmupLR ends at the optimizer's learning rate when warmup_max_lr is left out.
_WARMUP_ENDS_AT_LR: Version = (0, 17, 2)


def check_schedule(context: Context) -> Iterator[Finding]:
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


_TYPE = "optimizer.type"
_DEEPSPEED = {name.lower() for name in keys.OPTIMIZERS}
_TORCH = {name.lower(): name for name in keys.TORCH_OPTIMIZERS}
_NAMES = {name.lower(): name for name in sorted(keys.OPTIMIZERS | keys.TORCH_OPTIMIZERS)}


def check_name(context: Context) -> Iterator[Finding]:
    """A name that DeepSpeed knows: its own in any case, torch's in theirs (runtime/engine.py)."""
    if not isinstance(context.at(("optimizer",)), dict):
        return
    kind = context.at(("optimizer", "type"))
    if kind is ABSENT:
        why = "without it DeepSpeed makes no optimizer of this block, in silence"
        yield context.find("optimizer-name", "error", _TYPE, why, 'write "type": "AdamW"')
    elif not isinstance(kind, str) or kind == "auto":
        return
    elif kind.lower() in keys.REMOVED_OPTIMIZERS:
        why = "DeepSpeed 0.19.8 has removed it (since 0.19.7)"
        yield context.find("removed", "error", _TYPE, why, 'use "AdamW"')
    elif kind.lower() not in _DEEPSPEED and kind not in keys.TORCH_OPTIMIZERS:
        # adam_w and sgd are surely AdamW and SGD; DeepSpeedCPUAdam and adamw_8bit not quite.
        right = _NAMES.get(plain(kind))
        edits = (Edit("set", ("optimizer", "type"), right),) if right else ()
        bare = _NAMES.get(reduce(lambda name, part: name.replace(part, ""), OPTIMIZER_PARTS, plain(kind)))
        fix = f'write "{right}"' if right else f'write "{bare}", if that is meant' if bare else ""
        fix = fix or suggest(kind, _NAMES.values(), otherwise='use "AdamW"')
        yield context.find("optimizer-name", "error", _TYPE, "no such optimizer", fix, *edits, safe=True)


def check_untested(context: Context) -> Iterator[Finding]:
    """Optimizers that ZeRO runs only when told to (an assertion on every rank)."""
    kind, stage = context.text(_TYPE), context.stage
    if not stage or context.is_on("zero_allow_untested_optimizer"):
        return
    if kind.lower() in (_DEEPSPEED | set(_TORCH)) - keys.ZERO_TESTED_OPTIMIZERS:
        why = f"DeepSpeed has not tested it with ZeRO, and {at('zero_optimization.stage', stage)}"
        fix = 'use "AdamW", or write "zero_allow_untested_optimizer": true'
        yield context.find("optimizer-untested", "error", _TYPE, why, fix)


def check_clipping(context: Context) -> Iterator[Finding]:
    """``max_grad_norm`` among the parameters, which DeepSpeed refuses."""
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


def check_betas(context: Context) -> Iterator[Finding]:
    """Betas are two numbers of at least 0 and below 1."""
    name = "optimizer.params.betas"
    betas = context.value(name)
    if not context.written(name) or not isinstance(betas, list):
        return
    if len(betas) != 2 or not all(_is_number(beta) for beta in betas):
        if "auto" in betas and context.runner == "trainer":
            yield context.find("betas", "error", name, '"auto" stands for the whole list', 'write "auto"')
        else:
            yield context.find("betas", "error", name, "not two numbers", "write [0.9, 0.999]")
    elif not all(0 <= beta < 1 for beta in betas):
        why = "each must be at least 0 and below 1"
        yield context.find("betas", "error", name, why, "write [0.9, 0.999]")


def check_adam(context: Context) -> Iterator[Finding]:
    """Type "Adam" decays weights as AdamW does (runtime/engine.py, _configure_basic_optimizer)."""
    decay = context.number("optimizer.params.weight_decay")
    if context.text(_TYPE).lower() == "adam" and decay and context.is_on("optimizer.params.adam_w_mode"):
        why = f"DeepSpeed's Adam is AdamW: weight_decay {decay:g} is decoupled from the gradient"
        fix = 'write "AdamW" to say so, or "adam_w_mode": false for plain Adam'
        yield context.find("adam-is-adamw", "note", _TYPE, why, fix)
    if context.text(_TYPE).lower() == "adamw" and context.value("optimizer.params.adam_w_mode") is False:
        why = "type AdamW ignores it: weight decay stays decoupled"
        yield context.find(
            "adam-is-adamw", "error", "optimizer.params.adam_w_mode", why, 'use "type": "Adam" for plain Adam'
        )


def check_amsgrad(context: Context) -> Iterator[Finding]:
    """AMSGrad, which DeepSpeed's own kernels do not know (ops/adam/fused_adam.py)."""
    name = "optimizer.params.amsgrad"
    kind = context.text(_TYPE).lower()
    if not context.is_on(name) or kind not in ("adam", "adamw", "lamb"):
        return
    if context.value("optimizer.params.torch_adam") is not True:
        why = "DeepSpeed's fused kernel raises RuntimeError on it"
        fix = "remove it" if kind == "lamb" else 'remove it, or write "torch_adam": true'
        yield context.find("amsgrad", "error", name, why, fix)


def check_offload(context: Context) -> Iterator[Finding]:
    """Offload wants DeepSpeed's CPU optimizers; dsx knows what it runs."""
    if context.runner == "dsx" or not context.offloads("optimizer") or context.stage == 0:
        return
    kind = context.text(_TYPE).lower()
    forced = context.value("zero_force_ds_cpu_optimizer") is not False
    if kind in ("adam", "adamw") and context.is_on("optimizer.params.torch_adam"):
        why = "with offload_optimizer torch's Adam steps on the CPU, slower than DeepSpeed's CPU Adam"
        yield context.find(
            "offload-torch-adam",
            "note",
            "optimizer.params.torch_adam",
            why,
            "remove it, or offload_optimizer",
        )
    elif forced and (context.client_optimizer or context.at(("optimizer",)) is ABSENT):
        # transformers and Accelerate put DeepSpeed's CPU optimizer in the place of torch's.
        if context.runner == "trainer":
            return
        severity: Severity = "error" if context.client_optimizer else "note"
        why = (
            "with offload an optimizer of the script must be DeepSpeedCPUAdam or DeepSpeedCPULion: others, "
            "torch's too, end in a ZeRORuntimeException"
        )
        fix = 'pass one of the two, or write "zero_force_ds_cpu_optimizer": false'
        yield context.find("offload-torch-adam", severity, "zero_optimization.offload_optimizer", why, fix)


def check_client(context: Context) -> Iterator[Finding]:
    """An optimizer in the JSON and one in the script: the script's wins."""
    if context.client_optimizer and isinstance(context.at(("optimizer",)), dict):
        why = (
            "the script passes an optimizer to deepspeed.initialize: DeepSpeed ignores this block in silence"
        )
        yield context.find("client-optimizer", "error", "optimizer", why, "remove one of the two")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
