"""Reference: ``scheduler`` and the ``params`` of every schedule that DeepSpeed makes from JSON."""

from __future__ import annotations

from typing import Any, Final

from dsx.doctor.key import REQUIRED, Block, Key, Rows

_TRAINER: Final = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")

_STEPS = {"unit": "steps"}
_COUNT = {"unit": "steps", "low": 1}
# What a parameter does, whatever schedule takes it: kinds, effect, the rest.
_EFFECTS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "last_batch_iteration": ("int", "step to start from; -1 for a new run", _STEPS),
    "lr_range_test_min_lr": ("float|list", "learning rate at the start", {"low": 0}),
    "lr_range_test_step_size": ("int", "steps per increase", _COUNT),
    "lr_range_test_step_rate": ("float", "how fast the learning rate grows", {}),
    "lr_range_test_staircase": ("bool", "grow in steps instead of continuously", {}),
    "cycle_min_lr": ("float|list", "least learning rate of the cycle", {"low": 0}),
    "cycle_max_lr": ("float|list", "greatest learning rate of the cycle", {"low": 0}),
    "decay_lr_rate": ("float", "decay of the learning rate after the cycle", {}),
    "cycle_first_step_size": (
        "int|float",
        "steps of the rising half",
        {"unit": "steps", "low": 0, "low_open": True},
    ),
    "cycle_second_step_size": (
        "int|float|null",
        "steps of the falling half; as the first if absent",
        {"unit": "steps", "low": 0},
    ),
    "cycle_first_stair_count": ("int", "stairs in the rising half; 0 for none", {}),
    "cycle_second_stair_count": ("int|null", "stairs in the falling half; as the first if absent", {}),
    "decay_step_size": (
        "int|float",
        "steps per decay after the cycle; 0 for none",
        {"unit": "steps", "low": 0},
    ),
    "cycle_momentum": ("bool", "cycle momentum against the learning rate", {}),
    "cycle_min_mom": ("float|list", "least momentum", {}),
    "cycle_max_mom": ("float|list", "greatest momentum", {}),
    "decay_mom_rate": ("float", "decay of the momentum after the cycle", {}),
    "warmup_min_lr": ("float|list", "learning rate at the start of warm-up", {"low": 0}),
    "warmup_max_lr": ("float|list|null", "learning rate at its end", {"low": 0}),
    "warmup_num_steps": ("int", "steps of warm-up", _COUNT),
    "warmup_type": ("string", "how it rises; any other word counts as log", {"choices": ("log", "linear")}),
    "total_num_steps": ("int", "steps of the whole run", _COUNT),
    "warmup_min_ratio": ("float", "share of the learning rate at the start", {"low": 0, "high": 1}),
    "cos_min_ratio": ("float", "share of it at the end", {"low": 0, "high": 1}),
    "last_epoch": ("int", "step to start from; -1 for a new run", _STEPS),
    "factor": ("float", "factor on the learning rate until total_iters", {}),
    "total_iters": ("int", "steps of the schedule", _STEPS),
    "T_max": ("int", "steps of half a cosine", _STEPS),
    "eta_min": ("float", "least learning rate", {}),
    "T_0": ("int", "steps until the first restart", _COUNT),
    "T_mult": ("int", "factor on that at each restart", {"low": 1}),
    "base_lr": ("float|list", "least learning rate of the cycle", {}),
    "max_lr": ("float|list", "greatest learning rate of the cycle", {}),
    "step_size_up": ("int", "steps of the rising half", _STEPS),
    "step_size_down": ("int|null", "steps of the falling half", _STEPS),
    "mode": ("string", "shape of the cycle", {"choices": ("triangular", "triangular2", "exp_range")}),
    "gamma": ("float", "decay factor", {}),
    "scale_mode": (
        "string",
        "whether a scale function sees cycles or steps",
        {"choices": ("cycle", "iterations")},
    ),
    "base_momentum": ("float|list", "least momentum", {}),
    "max_momentum": ("float|list", "greatest momentum", {}),
    "start_factor": ("float", "factor on the learning rate at the start", {}),
    "end_factor": ("float", "factor on it at the end", {}),
    "milestones": ("list", "steps at which it decays", {"items": "int"}),
    "total_steps": ("int|null", "steps of the whole run", _COUNT),
    "epochs": ("int|null", "epochs, with steps_per_epoch instead of total_steps", {"low": 1}),
    "steps_per_epoch": ("int|null", "steps per epoch", {"low": 1}),
    "pct_start": ("float", "share of the rising part", {"low": 0, "high": 1}),
    "anneal_strategy": ("string", "shape", {"choices": ("cos", "linear")}),
    "div_factor": ("float", "max_lr divided by this is the start", {}),
    "final_div_factor": ("float", "the start divided by this is the end", {}),
    "three_phase": ("bool", "fall back first, then on", {}),
    "power": ("float", "power of the polynomial", {}),
    "step_size": ("int", "steps per decay", _COUNT),
}
_WARMUP = {
    "warmup_min_lr": 0.0,
    "warmup_max_lr": 0.001,
    "warmup_num_steps": 1000,
    "warmup_type": "log",
    "last_batch_iteration": -1,
}

_DEEPSPEED: Final[dict[str, dict[str, Any]]] = {
    "LRRangeTest": {
        "lr_range_test_min_lr": 1e-3,
        "lr_range_test_step_size": 2000,
        "lr_range_test_step_rate": 1.0,
        "lr_range_test_staircase": False,
        "last_batch_iteration": -1,
    },
    "OneCycle": {
        "cycle_min_lr": REQUIRED,
        "cycle_max_lr": REQUIRED,
        "decay_lr_rate": 0.0,
        "cycle_first_step_size": 2000,
        "cycle_second_step_size": None,
        "cycle_first_stair_count": 0,
        "cycle_second_stair_count": None,
        "decay_step_size": 0,
        "cycle_momentum": True,
        "cycle_min_mom": 0.8,
        "cycle_max_mom": 0.9,
        "decay_mom_rate": 0.0,
        "last_batch_iteration": -1,
    },
    "WarmupLR": _WARMUP | {"warmup_max_lr": None},
    "WarmupDecayLR": {"total_num_steps": REQUIRED} | _WARMUP,
    "WarmupCosineLR": {
        "total_num_steps": REQUIRED,
        "warmup_min_ratio": 0.0,
        "warmup_num_steps": 1000,
        "cos_min_ratio": 0.0001,
        "warmup_type": "log",
        "last_batch_iteration": -1,
    },
}
# Of torch.optim.lr_scheduler: those that JSON can describe, as torch 2.13 declares them.
_TORCH: Final[dict[str, dict[str, Any]]] = {
    "ConstantLR": {"factor": 1 / 3, "total_iters": 5},
    "CosineAnnealingLR": {"T_max": REQUIRED, "eta_min": 0.0},
    "CosineAnnealingWarmRestarts": {"T_0": REQUIRED, "T_mult": 1, "eta_min": 0.0},
    "CyclicLR": {"base_lr": REQUIRED, "max_lr": REQUIRED, "step_size_up": 2000, "step_size_down": None,
                 "mode": "triangular", "gamma": 1.0, "scale_mode": "cycle", "cycle_momentum": True,
                 "base_momentum": 0.8, "max_momentum": 0.9},
    "ExponentialLR": {"gamma": REQUIRED},
    "LinearLR": {"start_factor": 1 / 3, "end_factor": 1.0, "total_iters": 5},
    "MultiStepLR": {"milestones": REQUIRED, "gamma": 0.1},
    "OneCycleLR": {"max_lr": REQUIRED, "total_steps": None, "epochs": None, "steps_per_epoch": None,
                   "pct_start": 0.3, "anneal_strategy": "cos", "cycle_momentum": True, "base_momentum": 0.85,
                   "max_momentum": 0.95, "div_factor": 25.0, "final_div_factor": 1e4, "three_phase": False},
    "PolynomialLR": {"total_iters": 5, "power": 1.0},
    "StepLR": {"step_size": REQUIRED, "gamma": 0.1},
}  # fmt: skip

_top = Rows(path="", source="runtime/config.py: get_scheduler_name", unknown="ignored", types="raw")
_scheduler = Rows(path="scheduler", source=_top.source, unknown="ignored", types="raw")


def _params(
    name: str, source: str, defaults: dict[str, Any], since: str = ""
) -> tuple[Block, tuple[Key, ...]]:
    """The block of ``scheduler.params`` of one type, and its rows."""
    rows = Rows(
        path="scheduler.params",
        source=source,
        unknown="refused",
        types="raw",
        variant=name.lower(),
        since=since,
    )
    keys = []
    for key, default in defaults.items():
        kinds, effect, more = _EFFECTS[key]
        # Only WarmupLR takes the optimizer's learning rate for a missing one; elsewhere null crashes.
        kinds = kinds if default is None else kinds.replace("|null", "")
        keys.append(rows(key, kinds, default, effect, trainer_auto=key in _TRAINER, **more))
    return rows.block, tuple(keys)


_VARIANTS = (
    *(
        _params(
            name, f"runtime/lr_schedules.py: {name}", defaults, "0.12.3" if name == "WarmupCosineLR" else ""
        )
        for name, defaults in _DEEPSPEED.items()
    ),
    *(
        _params(name, f"torch.optim.lr_scheduler.{name}", defaults | {"last_epoch": -1})
        for name, defaults in _TORCH.items()
    ),
)
BLOCKS = (_scheduler.block, *(block for block, _ in _VARIANTS))
KEYS = (
    _top(
        "scheduler", "object", {}, "the learning-rate schedule, unless one is passed to deepspeed.initialize"
    ),
    _scheduler(
        "type", "string", REQUIRED, "name of the schedule, spelt exactly", choices=(*_DEEPSPEED, *_TORCH)
    ),
    # A scheduler without params is made with **None: a TypeError.
    _scheduler("params", "object", REQUIRED, "its keyword arguments"),
    *(key for _, keys in _VARIANTS for key in keys),
)
