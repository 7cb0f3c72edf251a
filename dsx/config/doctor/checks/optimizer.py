"""The optimizer's name and parameters."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from dsx.config import deepspeed_keys as keys
from dsx.config.doctor.context import Context
from dsx.config.doctor.finding import ABSENT, Edit, Finding, Severity
from dsx.config.doctor.other_names import OPTIMIZER_PARTS
from dsx.config.wording import at, plain, suggest

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
