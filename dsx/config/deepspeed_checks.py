"""What dsx refuses in DeepSpeed's own keys, one small function per check, for DeepSpeed 0.19.8.

DeepSpeed ignores some of these mistakes in silence, and finds others only after every rank has started.
Each check takes the JSON without its ``dsx`` block and yields a ConfigError per problem.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeGuard

from dsx.config import deepspeed_keys as keys
from dsx.config.problems import at, either, suggest
from dsx.errors import ConfigError

Json = Mapping[str, Any]

# Blocks of DeepSpeed that would do dsx's work a second time, or not at all: key -> why and what instead.
_TAKEN_OVER = {
    "activation_checkpointing": (
        "dsx's models do not call DeepSpeed's activation checkpointing",
        'remove it; dsx.recompute ("selective" or "full") saves activations',
    ),
    "data_parallel_size": ("the degree follows from the world size", "remove it; see dsx.parallel"),
    "expert_parallel": ("dsx's models have no experts", "remove it"),
    "pipeline": (
        "dsx runs the pipeline itself",
        "remove it; use dsx.parallel.pipeline, dsx.schedule and dsx.partition",
    ),
    "sequence_parallel_size": (
        "DeepSpeed-Ulysses does not combine with dsx's mesh",
        "remove it; dsx.parallel.tensor with sequence_parallel shards the sequence",
    ),
    "tensor_parallel": (
        "DeepSpeed's AutoTP would cut the already cut layers again",
        "remove it; use dsx.parallel.tensor",
    ),
}
# The same, for blocks that do nothing unless enabled.
_TAKEN_OVER_IF_ENABLED = {
    "data_efficiency": ("dsx feeds the batches itself", "set it to false; see dsx.data"),
    "hybrid_engine": ("it replaces the engine that dsx builds on", "set it to false"),
    "torch_autocast": ("dsx's layers choose their own precision", 'set it to false and use "bf16"'),
}
# Where "auto" means something, or is just a name.
_AUTO_IS_FINE = {"autotuning", "checkpoint", "comet", "csv_monitor", "data_types", "tensorboard", "wandb"}


def deepspeed_problems(config: Json) -> list[ConfigError]:
    """Everything wrong with DeepSpeed's part of a config."""
    return [problem for check in CHECKS for problem in check(config)]


def check_top_level(config: Json) -> Iterator[ConfigError]:
    """Unknown keys, which DeepSpeed ignores in silence, and those that 0.19.8 removed."""
    for key, value in config.items():
        if key in keys.REMOVED:
            yield ConfigError(at(key, value), "DeepSpeed 0.19.8 has removed it", keys.REMOVED[key])
        elif key not in keys.TOP_LEVEL:
            yield ConfigError(
                at(key, value),
                "unknown key; DeepSpeed would ignore it",
                suggest(key, {*keys.TOP_LEVEL, "dsx"}),
            )


def check_taken_over(config: Json) -> Iterator[ConfigError]:
    """Blocks whose work dsx does."""
    for key, (why, fix) in _TAKEN_OVER.items():
        if key in config:
            yield ConfigError(at(key, config[key]), why, fix)
    for key, (why, fix) in _TAKEN_OVER_IF_ENABLED.items():
        if _block(config, key).get("enabled"):
            yield ConfigError(at(f"{key}.enabled", True), why, fix)


def check_blocks(config: Json) -> Iterator[ConfigError]:
    """Blocks that are written as something else than an object (``"bf16": true``)."""
    for key in ("bf16", "bfloat16", "fp16", "zero_optimization", "optimizer", "scheduler"):
        if key in config and not isinstance(config[key], dict):
            inner = {"zero_optimization": '{"stage": 3}', "optimizer": '{"type": "AdamW", "params": {...}}'}
            inner |= {"scheduler": '{"type": "WarmupLR", "params": {...}}'}
            example = inner.get(key, '{"enabled": true}')
            yield ConfigError(at(key, config[key]), "it must be an object", f'write "{key}": {example}')


def check_auto(config: Json) -> Iterator[ConfigError]:
    """The word "auto", which transformers' Trainer fills in and DeepSpeed drops or compares with numbers."""
    for key, value in _leaves({k: v for k, v in config.items() if k not in _AUTO_IS_FINE}):
        if value == "auto":
            yield ConfigError(
                at(key, value),
                'DeepSpeed itself knows no "auto" here (only transformers\' Trainer does)',
                "write the value, or leave the key out for DeepSpeed's default",
            )


def check_quoted(config: Json) -> Iterator[ConfigError]:
    """Numbers and booleans in quotes."""
    blocks = ("optimizer", "scheduler", "zero_optimization", "bf16", "bfloat16", "fp16")
    scalars = {key: value for key, value in config.items() if key not in _AUTO_IS_FINE | {"log_level"}}
    scalars = {key: value for key, value in scalars.items() if key in blocks or not isinstance(value, dict)}
    for key, value in _leaves(scalars):
        if isinstance(value, str) and re.fullmatch(r"-?\d+(\.\d*)?([eE][+-]?\d+)?|true|false", value):
            yield ConfigError(
                at(key, value), "quoted, where a number or true/false belongs", f"write {value}"
            )


def check_precision(config: Json) -> Iterator[ConfigError]:
    """bf16 or fp32: fp16 would scale the loss again at every pipeline stage."""
    if "bf16" in config and "bfloat16" in config:
        yield ConfigError(at("bfloat16", config["bfloat16"]), "an old name for bf16, also given", "keep bf16")
    name = "bf16" if "bf16" in config else "bfloat16"
    bf16, fp16 = _block(config, name), _block(config, "fp16")
    for key, value in bf16.items():
        if key not in keys.BF16:
            yield ConfigError(at(f"{name}.{key}", value), "unknown key", suggest(key, keys.BF16))
    for key, block in ((name, bf16), ("fp16", fp16)):
        if not isinstance(block.get("enabled", False), bool | str):
            yield ConfigError(at(f"{key}.enabled", block["enabled"]), "not a boolean", "write true or false")
    if fp16.get("enabled") is True:
        also = " and bf16 is enabled too" if bf16.get("enabled") is True else ""
        yield ConfigError(
            at("fp16.enabled", True),
            f"dsx trains in bf16 or fp32{also}",
            'remove fp16 and write "bf16": {"enabled": true}',
        )


def check_zero(config: Json) -> Iterator[ConfigError]:
    """ZeRO's stage and keys."""
    zero = _block(config, "zero_optimization")
    stage = zero.get("stage", 0)
    if not _is_int(stage) and not isinstance(stage, str):
        yield ConfigError(at("zero_optimization.stage", stage), "not a ZeRO stage", "use 0, 1, 2 or 3")
    elif _is_int(stage) and not 0 <= stage <= 3:
        yield ConfigError(at("zero_optimization.stage", stage), "ZeRO has stages 0 to 3", "use 0, 1, 2 or 3")
    secondary = zero.get("zero_hpz_partition_size", 1)
    if not isinstance(secondary, str) and not (_is_int(secondary) and secondary >= 0):
        place = at("zero_optimization.zero_hpz_partition_size", secondary)
        yield ConfigError(place, "not a number of ranks", "use 1 (off) or more")
    for key, value in zero.items():
        place = at(f"zero_optimization.{key}", value)
        if key in keys.REMOVED_ZERO:
            yield ConfigError(place, "DeepSpeed 0.19.8 has removed it", "remove it")
        elif key == "zenflow" and value is not None:
            yield ConfigError(place, "it steps the optimizer outside dsx's schedule", "remove it")
        elif key not in keys.ZERO | keys.ZERO_SHORT:
            yield ConfigError(place, "unknown key", suggest(key, keys.ZERO))


def check_offload(config: Json) -> Iterator[ConfigError]:
    """Offload at a stage that has nothing to offload, which DeepSpeed ignores in silence."""
    zero = _block(config, "zero_optimization")
    stage = zero_stage(config)
    offloads = (
        ("offload_param", 3, keys.OFFLOAD_PARAM, "only ZeRO-3 partitions parameters"),
        ("offload_optimizer", 1, keys.OFFLOAD_OPTIMIZER, "only ZeRO partitions the optimizer"),
    )
    for name, least, known, why in offloads:
        block = zero.get(name)
        place = f"zero_optimization.{name}"
        if block is None:
            continue
        if not isinstance(block, dict):
            yield ConfigError(
                at(place, block), "it must be an object", f'write "{name}": {{"device": "cpu"}}'
            )
            continue
        for key, value in block.items():
            if key not in known:
                yield ConfigError(at(f"{place}.{key}", value), "unknown key", suggest(key, known))
        device = block.get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            yield ConfigError(at(f"{place}.device", device), "no such device", 'use "cpu", "nvme" or "none"')
        elif device != "none" and stage < least:
            legal = either([f"{n}" for n in range(least, 4)])
            yield ConfigError(
                at(f"{place}.device", device),
                f"{why}, and zero_optimization.stage = {stage}",
                f"set zero_optimization.stage to {legal}, or remove {name}",
            )
        elif device == "nvme" and not block.get("nvme_path"):
            yield ConfigError(at(f"{place}.device", device), "nvme_path is missing", f"set {place}.nvme_path")


def check_optimizer(config: Json) -> Iterator[ConfigError]:
    """A known optimizer with an object of parameters."""
    if "optimizer" not in config:
        yield ConfigError(
            "optimizer",
            "the config has none",
            'add "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "torch_adam": true}}',
        )
        return
    optimizer = _block(config, "optimizer")
    kind, params = optimizer.get("type"), optimizer.get("params", {})
    if not isinstance(kind, str):
        if isinstance(config["optimizer"], dict):
            yield ConfigError(at("optimizer.type", kind), "no optimizer's name", 'write "type": "AdamW"')
    elif kind.lower() in keys.REMOVED_OPTIMIZERS:
        yield ConfigError(at("optimizer.type", kind), "DeepSpeed 0.19.8 has removed it", 'use "AdamW"')
    elif kind.lower() not in {name.lower() for name in keys.OPTIMIZERS} and kind not in keys.TORCH_OPTIMIZERS:
        known = keys.OPTIMIZERS | keys.TORCH_OPTIMIZERS
        yield ConfigError(at("optimizer.type", kind), "no such optimizer", suggest(kind, known))
    if not isinstance(params, dict):
        yield ConfigError(at("optimizer.params", params), "it must be an object", 'write {"lr": 3e-4}')
        return
    if "max_grad_norm" in params:
        value = params["max_grad_norm"]
        fix = f'remove it and write "gradient_clipping": {value} at the top level'
        yield ConfigError(at("optimizer.params.max_grad_norm", value), "DeepSpeed refuses it here", fix)
    rate = params.get("lr")
    if rate is not None and not isinstance(rate, str) and not (_is_number(rate) and rate >= 0):
        yield ConfigError(at("optimizer.params.lr", rate), "not a learning rate", "use a number such as 3e-4")


def check_untested_optimizer(config: Json) -> Iterator[ConfigError]:
    """Optimizers that DeepSpeed's ZeRO runs only when told to (an assertion on every rank)."""
    kind = _block(config, "optimizer").get("type")
    stage = zero_stage(config)
    if not isinstance(kind, str) or stage < 1 or config.get("zero_allow_untested_optimizer"):
        return
    known = {name.lower() for name in keys.OPTIMIZERS} | {name.lower() for name in keys.TORCH_OPTIMIZERS}
    if kind.lower() in known - keys.ZERO_TESTED_OPTIMIZERS:
        yield ConfigError(
            at("optimizer.type", kind),
            f"DeepSpeed has not tested it with ZeRO, and zero_optimization.stage = {stage}",
            'use "AdamW", or write "zero_allow_untested_optimizer": true',
        )


def check_scheduler(config: Json) -> Iterator[ConfigError]:
    """A known learning-rate scheduler whose parameters it takes."""
    if not isinstance(config.get("scheduler"), dict):
        return
    block = _block(config, "scheduler")
    kind, params = block.get("type"), block.get("params", {})
    known = keys.TORCH_SCHEDULERS | set(keys.SCHEDULERS)
    if not isinstance(kind, str) or kind not in known:
        yield ConfigError(at("scheduler.type", kind), "no such scheduler", suggest(str(kind), known))
        return
    if not isinstance(params, dict):
        yield ConfigError(at("scheduler.params", params), "it must be an object", "write {...}")
        return
    if kind in keys.TORCH_SCHEDULERS:
        return
    for key, value in params.items():
        if key not in keys.SCHEDULERS[kind]:
            place = at(f"scheduler.params.{key}", value)
            yield ConfigError(place, f"{kind} has no such parameter", suggest(key, keys.SCHEDULERS[kind]))
    for key in keys.SCHEDULERS_REQUIRED[kind]:
        if key not in params:
            yield ConfigError(f"scheduler.params.{key}", f"{kind} needs it", "add it")
    warmup = params.get("warmup_num_steps", 1)
    if not isinstance(warmup, str) and not (_is_int(warmup) and warmup >= 1):
        place = at("scheduler.params.warmup_num_steps", warmup)
        yield ConfigError(place, f"{kind} needs a whole number above 0", "use 1 or more")


def check_numbers(config: Json) -> Iterator[ConfigError]:
    """Clipping and printing."""
    clipping = config.get("gradient_clipping", 1.0)
    if not isinstance(clipping, str) and not (_is_number(clipping) and clipping >= 0):
        yield ConfigError(
            at("gradient_clipping", clipping), "not a norm", "use a positive number, or 0 for none"
        )
    every = config.get("steps_per_print")
    if every is not None and not isinstance(every, str) and not (_is_int(every) and every >= 1):
        place = at("steps_per_print", every)
        yield ConfigError(place, "DeepSpeed divides by it", "use 1 or more, or leave it out for silence")


CHECKS = (
    check_top_level,
    check_taken_over,
    check_blocks,
    check_auto,
    check_quoted,
    check_precision,
    check_zero,
    check_offload,
    check_optimizer,
    check_untested_optimizer,
    check_scheduler,
    check_numbers,
)


def zero_stage(config: Json) -> int:
    """ZeRO stage of a checked config; 0 when absent."""
    stage = _block(config, "zero_optimization").get("stage", 0)
    return stage if _is_int(stage) else 0


def is_bf16(config: Json) -> bool:
    """Whether a checked config trains in bf16."""
    return any(_block(config, key).get("enabled") is True for key in ("bf16", "bfloat16"))


def optimizer_notes(config: Json) -> Iterator[str]:
    """Builds that DeepSpeed would start on a machine without a GPU."""
    optimizer = _block(config, "optimizer")
    kind = str(optimizer.get("type", "")).lower()
    if kind in keys.COMPILED_OPTIMIZERS and not _block(optimizer, "params").get("torch_adam"):
        fix = " (optimizer.params.torch_adam = true compiles nothing)" if kind.startswith("adam") else ""
        yield f"optimizer {optimizer['type']}: DeepSpeed compiles its own at first use, a minute or two{fix}"


def _block(config: Json, key: str) -> dict[str, Any]:
    """The object at ``key``, empty if there is none."""
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Every value that is no container, with its dotted key."""
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, dict):
        inner = ((f"{key}.{name}" if key else name, item) for name, item in value.items())
    elif isinstance(value, list):
        inner = ((f"{key}[{i}]", item) for i, item in enumerate(value))
    else:
        yield key, value
    for name, item in inner:
        yield from _leaves(item, name)


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return _is_int(value) or isinstance(value, float)
