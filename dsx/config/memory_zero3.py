"""ZeRO-3's keys of a config as :mod:`dsx.plan.memory` takes them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.config.problems import at
from dsx.errors import ConfigError
from dsx.plan.memory.stage3_gathering import Gathering

_SIZES = {
    "prefetch": "stage3_prefetch_bucket_size",
    "reuse_distance": "stage3_max_reuse_distance",
    "live": "stage3_max_live_parameters",
    "persistence": "stage3_param_persistence_threshold",
    "model_persistence": "stage3_model_persistence_threshold",
    "sub_group": "sub_group_size",
}

_SWITCHES = {
    "contiguous": "contiguous_gradients",
    "reduce_scatter": "reduce_scatter",
    "sequential": "stage3_allgather_sequential",
    "all_reduce": "stage3_use_all_reduce_for_fetch_params",
}

_UNKNOWN = {
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "stage3_module_granularity_threshold": 0,
    "leaf_module": None,
}


def gathering_of(zero: Mapping[str, Any], keep_gathered_bytes: int) -> Gathering:
    """``zero_optimization`` of ZeRO-3, and ``dsx.zero.keep_gathered_bytes``.

    Raises:
        ConfigError: A key whose memory dsx does not know, or a size that is no number.
    """
    for key, off in _UNKNOWN.items():
        value = _value(zero, key)
        if value and value != off:
            raise ConfigError(
                at(f"zero_optimization.{key}", value),
                "dsx has not learned what memory it takes",
                "remove it for the estimate",
            )
    sizes = {field: elements(zero, key) for field, key in _SIZES.items()}
    switches = {field: _value(zero, key) for field, key in _SWITCHES.items()}
    if switches["sequential"]:
        sizes["prefetch"] = 1  # deepspeed/runtime/engine.py, _configure_zero_optimizer
    given: dict[str, Any] = {field: value for field, value in sizes.items() if value is not None}
    given.update({field: bool(value) for field, value in switches.items() if value is not None})
    return Gathering(**given, keep_bytes=keep_gathered_bytes)


def elements(zero: Mapping[str, Any], key: str) -> int | None:
    """A size in ``zero_optimization``; None leaves it to DeepSpeed. Raises ConfigError for no number."""
    value = _value(zero, key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ConfigError(
            at(f"zero_optimization.{key}", value), "not a number of elements", "use e.g. 50000000"
        )
    return int(value)


def _value(zero: Mapping[str, Any], key: str) -> Any:
    """Of a key, or of its short form, which DeepSpeed takes as well, as it does "auto" for the default."""
    value = zero.get(key, zero.get(key.removeprefix("stage3_")))
    return None if value == "auto" else value
