"""fp16, bf16 and the dtypes beside them."""

from __future__ import annotations

from collections.abc import Iterator

from dsx.doctor.context import STAGE, UNKNOWN, Context
from dsx.doctor.finding import ABSENT, Edit, Finding, Severity
from dsx.doctor.key import Version

_FP32 = {"fp32", "float32", "float", "torch.float32"}
_BF16 = {"bf16", "bfloat16", "torch.bfloat16"}
_FP16 = {"fp16", "float16", "half", "torch.float16"}
# 2^24 leaves 2^-7 to 65504 / 2^24: the first steps of most runs overflow and are skipped.
_HIGH_SCALE_POWER = 24
# DeepSpeedEngine.backward asks optimizers of ZeRO alone to scale the loss from here on (its PR 7665).
_NEVER_SCALED: Version = (0, 18, 3)
# The largest number of fp16.
_MOST_FP16 = 65504
# torch multiplies a tensor by no whole number that 64 bits cannot hold.
_MOST_SCALE_POWER = 63


def dtype(context: Context) -> str | None:
    """The model's dtype, "fp16", "bf16" or "fp32"; None if the config leaves it open."""
    for name in ("fp16", "bf16"):
        if context.is_on(f"{name}.enabled"):
            return name
    known = all(context.value(f"{name}.enabled") is False for name in ("fp16", "bf16"))
    return "fp32" if known else None


def _same(one: str, other: str) -> bool:
    return any(one in group and other in group for group in (_FP32, _BF16, _FP16))


def check_both(context: Context) -> Iterator[Finding]:
    """One of them."""
    if context.is_on("fp16.enabled") and context.is_on("bf16.enabled") and context.runner != "dsx":
        why = "fp16 and bf16 are both enabled: DeepSpeed stops with an assertion"
        yield context.find("precision-both", "error", "fp16.enabled", why, "keep bf16, or fp16 on older GPUs")
    old, new = context.at(("bfloat16",)), context.at(("bf16",))
    if old is ABSENT:
        return
    severity: Severity
    if new is not ABSENT:
        same, gone = old == new, Edit("remove", ("bfloat16",))
        severity, why = (
            "warning" if same else "error",
            "the former name of bf16, also given: DeepSpeed reads bf16",
        )
        yield context.find("deprecated", severity, ("bfloat16",), why, "keep bf16", gone, safe=same)
        return
    edit = Edit("rename", ("bfloat16",), "bf16")
    severity, why = "note", "the former name of bf16, which DeepSpeed reads just the same"
    if context.runner == "trainer":
        severity, why = (
            "warning",
            "the former name of bf16: DeepSpeed reads it, the Trainer and Accelerate do not",
        )
    yield context.find("deprecated", severity, ("bfloat16",), why, 'write "bf16"', edit, safe=True)


def check_loss_scale(context: Context) -> Iterator[Finding]:
    """fp16's loss scaling."""
    scale, enabled = context.number("fp16.loss_scale"), context.value("fp16.enabled")
    if scale == 0 and enabled is True:
        yield from _dynamic(context)
    elif scale == 0 and enabled is UNKNOWN:
        # The Trainer decides.
        yield from _positive(context, "warning", ", which fails if fp16 is chosen")
    if scale and enabled is not False and context.stage != 0:
        yield from _static(context, scale)
    unscaled = context.runner != "dsx" and context.stage == 0 and context.version >= _NEVER_SCALED
    if scale != 1 and enabled is True and unscaled:
        why = (
            "without ZeRO DeepSpeed divides gradients by the loss scale, and since 0.18.3 never multiplies "
            f"the loss by it: steps are {f'{scale:g} times' if scale else 'by that factor'} too small"
        )
        fix = f'set {STAGE} to 1, use bf16, or write "loss_scale": 1'
        # Without the block, a script may set the stage.
        severity: Severity = "warning" if context.at(("zero_optimization",)) is ABSENT else "error"
        yield context.find("loss-scale", severity, "fp16.enabled", why, fix)
    # Asserted whether fp16 is enabled or not.
    if scale and context.text("optimizer.type").lower() == "lamb":
        why = "Lamb needs dynamic loss scaling: DeepSpeed stops with an assertion"
        yield context.find("loss-scale", "error", "fp16.loss_scale", why, "use 0")


def _static(context: Context, scale: float) -> Iterator[Finding]:
    """A fixed scale, which no overflow brings down: steps whose gradients are inf are all skipped."""
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
        # As written: out of its range it is nothing that DeepSpeed would use.
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


def check_master_weights(context: Context) -> Iterator[Finding]:
    """16-bit master weights need ZeRO and, mostly, DeepSpeed's CPU Adam (runtime/base_optimizer.py)."""
    states = "bf16.bf16_optimizer_states"
    for name in ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads"):
        if not context.is_on(name):
            continue
        if context.stage == 0:
            why = "only ZeRO keeps master weights of its own: DeepSpeed stops with an assertion"
            yield context.find(
                "master-weights", "error", name, why, "set zero_optimization.stage to 1, 2 or 3"
            )
        elif not (context.offloads("optimizer") or (name.startswith("bf16") and context.is_on(states))):
            why = "DeepSpeed takes it only with offload_optimizer and its CPU Adam"
            fix = 'add zero_optimization.offload_optimizer {"device": "cpu"}, or remove it'
            yield context.find("master-weights", "error", name, why, fix)
    if context.is_on(states) and not context.is_on("bf16.bf16_master_weights_and_grads"):
        why = "it needs bf16_master_weights_and_grads"
        yield context.find(
            "master-weights", "error", states, why, "set bf16.bf16_master_weights_and_grads to true"
        )


def check_data_types(context: Context) -> Iterator[Finding]:
    """``data_types`` against the model's dtype (runtime/engine.py, _do_optimizer_sanity_check)."""
    model = dtype(context)
    if model is None:
        return
    if model == "bf16" and context.text("communication_data_type").lower() == "fp16":
        why = "gradients are in bf16, and what is above 65504 becomes inf on its way in fp16"
        fix = 'write "bf16" or "fp32", or leave it out'
        yield context.find("data-types", "warning", "communication_data_type", why, fix)
    wanted = context.text("data_types.param_dtype")
    if wanted and not _same(wanted, model):
        why = f"the precision blocks make the model {model}: DeepSpeed stops with an assertion"
        yield context.find("data-types", "error", "data_types.param_dtype", why, "remove it")
    accumulate = context.text("data_types.grad_accum_dtype")
    if accumulate and context.stage == 0 and not _same(accumulate, model):
        why = f"without ZeRO it must be the model's dtype, {model}: DeepSpeed raises NotImplementedError"
        fix = "remove it, or set zero_optimization.stage to 1"
        yield context.find("data-types", "error", "data_types.grad_accum_dtype", why, fix)


def check_autocast(context: Context) -> Iterator[Finding]:
    """torch.autocast beside a 16-bit model."""
    if not context.is_on("torch_autocast.enabled"):
        return
    model = dtype(context)
    if model in ("fp16", "bf16"):
        why = f"{model}.enabled already makes the weights {model}: autocast adds fp32 for some operations"
        yield context.find("data-types", "note", "torch_autocast.enabled", why, f"keep one, it or {model}")
    if context.is_on("zero_optimization.zero_quantized_weights"):
        why = "it does not go with zero_quantized_weights: DeepSpeed stops with an assertion"
        yield context.find("data-types", "error", "torch_autocast.enabled", why, "keep one of the two")
