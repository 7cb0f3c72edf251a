"""Loss scalers in stock checkpoints that are to be written (deepspeed/runtime/fp16/loss_scaler.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dsx.checkpoint.formats.deepspeed_plan import StockPlan
from dsx.checkpoint.formats.unpickle import Global, Record

_LOSS_SCALE: Mapping[str, Any] = {
    "cur_scale": 65536,
    "cur_iter": 0,
    "last_overflow_iter": -1,
    "scale_factor": 2.0,
    "scale_window": 1000,
    "min_scale": 1,
    "delayed_shift": 2,
    "cur_hysteresis": 2,
    "consecutive_hysteresis": False,
    "raise_error_at_min_scale": True,
    "dynamic": True,
}


def scaler(plan: StockPlan) -> dict[str, Any]:
    """The loss scaler's keys of an optimizer's file."""
    module = "deepspeed.runtime.fp16.loss_scaler"
    if plan.layout.precision == "fp16":
        state = {**_loss_scale(plan), "dtype": Global("torch", "float16")}
        made = Record(f"{module}.DynamicLossScaler", (), state)
        return {"loss_scaler": made, "dynamic_loss_scale": True, "overflow": False}
    made = Record(f"{module}.LossScaler", (), {"cur_scale": 1.0, "dynamic": False})
    return {"loss_scaler": made, "dynamic_loss_scale": False, "overflow": False}


def _loss_scale(plan: StockPlan) -> dict[str, Any]:
    """The source's dynamic loss scale, or DeepSpeed's first (runtime/fp16/loss_scaler.py)."""
    saved = plan.facts.get("loss_scale") or {}
    known = saved if saved.get("dynamic") or saved.get("dynamic_loss_scale") else {}
    scale = {key: value for key, value in known.items() if key in _LOSS_SCALE}
    return {**_LOSS_SCALE, "cur_iter": int(plan.facts.get("step", 0)), **scale}


def unfused_scale(plan: StockPlan) -> dict[str, Any]:
    """The loss scaler's keys of FP16_UnfusedOptimizer."""
    if plan.layout.precision == "bf16":
        return {"dynamic_loss_scale": False, "cur_scale": 1.0, "cur_iter": int(plan.facts.get("step", 0))}
    keys = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
    return {"dynamic_loss_scale": True, **{key: _loss_scale(plan)[key] for key in keys}}
