"""Reference: number formats: ``fp16``, ``bf16``, ``torch_autocast``, ``data_types``."""

from __future__ import annotations

from dsx.doctor.key import NoEffect, Rows, When, unless

_top = Rows(path="", source="runtime/config.py: DeepSpeedConfig", unknown="ignored", types="raw")
_bf16 = Rows(
    path="bf16",
    source="runtime/precision_config.py: DeepSpeedBF16Config",
    unknown="refused",
    types="coerced",
    no_effect=unless("bf16.enabled", "bf16 is off"),
)
_fp16 = Rows(
    path="fp16",
    source="runtime/precision_config.py: DeepSpeedFP16Config",
    unknown="refused",
    types="coerced",
    no_effect=unless("fp16.enabled", "fp16 is off"),
)
_autocast = Rows(
    path="torch_autocast",
    source="runtime/config.py: get_torch_autocast_enabled",
    unknown="ignored",
    types="raw",
    since="0.17.2",
    no_effect=unless("torch_autocast.enabled", "torch_autocast is off"),
)
_data_types = Rows(
    path="data_types", source="runtime/config.py: get_data_types_params", unknown="ignored", types="raw"
)
_dynamic = (NoEffect((When("fp16.loss_scale", "!=", 0),), "a loss_scale other than 0 is fixed"),)
_names = (
    "fp32",
    "float32",
    "float",
    "torch.float32",
    "fp16",
    "float16",
    "half",
    "torch.float16",
    "bf16",
    "bfloat16",
    "torch.bfloat16",
)

BLOCKS = (_bf16.block, _fp16.block, _autocast.block, _data_types.block)
KEYS = (
    _top("bf16", "object|null", {}, "weights and gradients in bf16, master weights in fp32"),
    _top(
        "bfloat16",
        "object",
        {},
        "the former name of bf16; read only when bf16 is absent",
        status="deprecated",
        replacement="bf16",
    ),
    _bf16("enabled", "bool", False, "train in bf16", trainer_auto=True),
    _bf16(
        "immediate_grad_update",
        "bool",
        False,
        "add each gradient to the fp32 one as soon as it exists",
        since="0.13.3",
    ),
    _bf16("check_grad_overflow", "bool", True, "skip a step whose gradients hold inf or NaN", since="0.17.1"),
    _bf16(
        "bf16_master_weights_and_grads",
        "bool",
        False,
        "master weights and gradients in bf16 too, without fp32 copies (ZeRO-1, 2, 3)",
        since="0.18.3",
    ),
    _bf16(
        "bf16_optimizer_states",
        "bool",
        False,
        "optimizer states in bf16 too; needs bf16_master_weights_and_grads",
        since="0.18.3",
    ),
    _top("fp16", "object", {}, "weights and gradients in fp16 with loss scaling, master weights in fp32"),
    _fp16("enabled", "bool", False, "train in fp16", trainer_auto=True),
    _fp16("auto_cast", "bool", False, "cast floating-point inputs of the model to fp16"),
    _fp16("loss_scale", "float", 0, "factor on the loss; 0 for a dynamic one", low=0),
    _fp16(
        "initial_scale_power",
        "int",
        16,
        "the dynamic loss scale starts at 2 to this power",
        no_effect=_dynamic,
    ),
    # The last two are positive in a dynamic scale only (_validate_dynamic_loss_scale_params).
    _fp16(
        "loss_scale_window",
        "int",
        1000,
        "steps without overflow after which the scale doubles",
        low=1,
        unit="steps",
        no_effect=_dynamic,
    ),
    # Below 1 it never comes down to 1, where the scale shrinks (DynamicLossScaler.update_scale).
    _fp16(
        "hysteresis", "int", 2, "the scale is halved at every so many overflows", low=1, no_effect=_dynamic
    ),
    _fp16(
        "consecutive_hysteresis",
        "bool",
        False,
        "refill hysteresis after every step without overflow",
        since="0.9.3",
        no_effect=_dynamic,
    ),
    _fp16(
        "min_loss_scale",
        "int",
        1,
        "the scale never goes below this; at it, an overflow is an error",
        low=1,
        no_effect=_dynamic,
    ),
    _fp16(
        "fp16_master_weights_and_grads",
        "bool",
        False,
        "master weights and gradients in fp16 too; needs ZeRO and DeepSpeed's CPU Adam",
    ),
    _top(
        "torch_autocast", "object", {}, "torch.autocast with ZeRO: dtype chosen per operation", since="0.17.2"
    ),
    _autocast("enabled", "bool", False, "run forward under torch.autocast"),
    _autocast(
        "dtype",
        "string",
        None,
        "dtype of autocast; the accelerator's preferred one if absent",
        choices=(*_names, "int8", "torch.int8"),
    ),
    _autocast(
        "lower_precision_safe_modules",
        "list",
        None,
        "full class names of modules whose gradients are reduced in that dtype",
        items="string",
    ),
    _top("data_types", "object", {}, "dtypes apart from fp16 and bf16"),
    _data_types(
        "grad_accum_dtype",
        "string|null",
        None,
        "dtype in which gradients are accumulated; the model's if absent",
        choices=(*_names, "int8", "torch.int8"),
    ),
    _data_types(
        "param_dtype",
        "string|null",
        None,
        "must be that of fp16 or bf16; only checked",
        choices=(*_names, "int8", "torch.int8"),
        since="0.19.2",
    ),
    _data_types(
        "buffer_dtype",
        "string|null",
        None,
        "dtype that the model's buffers are cast to",
        choices=(*_names, "int8", "torch.int8"),
        since="0.19.2",
    ),
    _data_types(
        "keep_in_fp32_modules",
        "list",
        "auto",
        'patterns of the names of buffers that stay in fp32; "auto": those that the model names',
        since="0.19.8",
        auto="meaning",
        items="string",
    ),
)
