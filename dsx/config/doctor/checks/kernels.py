"""Parameters that one implementation of an optimizer takes and another does not, and ZenFlow's intervals."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dsx.config.doctor.context import ACCUMULATION, MICRO, TRAIN, Context
from dsx.config.doctor.finding import ABSENT, Edit, Finding, Path
from dsx.config.doctor.table import Slot

_TORCH = frozenset({"foreach", "maximize", "capturable", "differentiable", "fused"})
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
    ("adam", False): _TORCH,
    ("adam", True): _TORCH | _CPU_REFUSES,
    ("adamw", False): _TORCH,
    ("adamw", True): _TORCH | _CPU_REFUSES,
    ("lion", False): frozenset({"fp32_optimizer_states"}),
    ("lion", True): _CPU_REFUSES,
    ("adagrad", False): frozenset({"amsgrad", "fp32_optimizer_states"}),
    ("adagrad", True): frozenset({"lr_decay", "initial_accumulator_value", *_TORCH} - {"capturable"}),
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
