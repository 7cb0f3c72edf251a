"""Reference: ``optimizer`` and the ``params`` of every type that DeepSpeed makes from JSON.

``params`` are passed on as keyword arguments, so that an unknown name is a TypeError when the engine is made.
"""

from __future__ import annotations

from typing import Any, Final

from dsx.doctor.key import REQUIRED, Block, Key, Rows

_TRAINER: Final = ("lr", "betas", "eps", "weight_decay")

# What a parameter does, whatever optimizer takes it: kinds, effect, bounds.
_EFFECTS: Final[dict[str, tuple[str, str, dict[str, Any]]]] = {
    "lr": ("float", "learning rate", {"low": 0}),
    "betas": ("list", "decay of the running averages of the gradient and of its square", {}),
    "eps": ("float", "added to the denominator", {"low": 0}),
    "weight_decay": ("float", "decay of the weights at each step", {"low": 0}),
    "bias_correction": ("bool", "correct the averages for their start at zero", {}),
    "amsgrad": ("bool", "AMSGrad; refused by the fused and CPU kernels", {}),
    "set_grad_none": ("bool", "zero_grad() drops gradients instead of zeroing them (fused kernel only)", {}),
    "torch_adam": ("bool", "use torch's optimizer instead of DeepSpeed's: nothing is compiled", {}),
    "adam_w_mode": ("bool", "decoupled weight decay (AdamW); false makes type Adam plain Adam", {}),
    "fp32_optimizer_states": (
        "bool|null",
        "with offload_optimizer: states in fp32; false for the model's dtype",
        {"since": "0.19.1"},
    ),
    "foreach": ("bool|null", "torch: one kernel over many tensors", {}),
    "fused": ("bool|null", "torch: one kernel for the whole step", {}),
    "maximize": ("bool", "torch: maximize the loss", {}),
    "capturable": ("bool", "torch: may be recorded into a CUDA graph", {}),
    "differentiable": ("bool", "torch: let autograd pass through the step", {}),
    "decoupled_weight_decay": ("bool", "torch: decay the weights as AdamW does", {}),
    "decoupled_wd": ("bool", "mup: decay scaled as the learning rate is not", {}),
    "eps_inside_sqrt": ("bool", "add eps below the root", {}),
    "max_coeff": ("float", "greatest trust ratio of a layer", {}),
    "min_coeff": ("float", "least trust ratio of a layer", {}),
    "lr_decay": ("float", "decay of the learning rate", {"low": 0}),
    "initial_accumulator_value": ("float", "start of the sum of squares", {"low": 0}),
    "momentum": ("float", "momentum", {"low": 0}),
    "muon_lr": ("float", "learning rate of the matrices instead of lr", {"low": 0, "since": "0.18.3"}),
    "adam_lr": ("float", "learning rate of the rest instead of lr", {"low": 0, "since": "0.18.3"}),
    "ns_method": ("string", "Newton-Schulz method", {"since": "0.19.0", "choices": ("gram", "standard")}),
    "dampening": ("float", "dampening of the momentum", {}),
    "nesterov": ("bool", "Nesterov momentum", {}),
    "lambd": ("float", "decay term", {}),
    "alpha": ("float", "power or smoothing constant", {}),
    "t0": ("float", "step at which averaging starts", {}),
    "rho": ("float", "decay of the running averages", {}),
    "beta2_decay": ("float", "decay of beta2", {}),
    "d": ("float", "clipping threshold of the update", {}),
    "max_iter": ("int", "iterations per step", {}),
    "max_eval": ("int|null", "function evaluations per step", {}),
    "tolerance_grad": ("float", "stop at this gradient", {}),
    "tolerance_change": ("float", "stop at this change", {}),
    "history_size": ("int", "updates remembered", {}),
    "line_search_fn": ("string|null", "line search", {}),
    "momentum_decay": ("float", "decay of the momentum", {}),
    "centered": ("bool", "divide by the variance", {}),
    "etas": ("list", "factors by which step sizes shrink and grow", {}),
    "step_sizes": ("list", "least and greatest step size", {}),
}
_KERNEL = {
    "lr": 1e-3,
    "bias_correction": True,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0.0,
    "amsgrad": False,
    "set_grad_none": True,
}
_SWITCHES = {"torch_adam": False, "adam_w_mode": True, "fp32_optimizer_states": None}
# Taken with torch_adam only, by torch.optim.Adam and AdamW.
_TORCH_ADAM = {
    "foreach": None,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}

# Type, in lower case -> (where it is made, its parameters and their defaults).
_DEEPSPEED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "adam": ("ops/adam/fused_adam.py: FusedAdam", _KERNEL | _SWITCHES | _TORCH_ADAM),
    "adamw": ("ops/adam/fused_adam.py: FusedAdam", _KERNEL | _SWITCHES | _TORCH_ADAM),
    "adagrad": (
        "runtime/engine.py: _configure_basic_optimizer",
        {
            "lr": 0.01,
            "lr_decay": 0,
            "weight_decay": 0,
            "initial_accumulator_value": 0,
            "eps": 1e-10,
            "foreach": None,
            "maximize": False,
            "differentiable": False,
            "fused": None,
            "amsgrad": False,
            "fp32_optimizer_states": True,
        },
    ),
    "lamb": (
        "ops/lamb/fused_lamb.py: FusedLamb",
        {
            "lr": 1e-3,
            "bias_correction": True,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "eps_inside_sqrt": False,
            "weight_decay": 0.0,
            "max_coeff": 10.0,
            "min_coeff": 0.01,
            "amsgrad": False,
        },
    ),
    "lion": (
        "ops/lion/fused_lion.py: FusedLion",
        {
            "lr": 1e-3,
            "betas": [0.9, 0.999],
            "weight_decay": 0.0,
            "set_grad_none": True,
            "fp32_optimizer_states": True,
        },
    ),
    "muon": (
        "runtime/engine.py: _muon_param_groups",
        {
            "lr": 0.02,
            "momentum": 0.95,
            "weight_decay": 0,
            "ns_method": "gram",
            "betas": [0.9, 0.95],
            "eps": 1e-10,
            "muon_lr": None,
            "adam_lr": None,
            "foreach": None,
            **_SWITCHES,
        },
    ),
    "muadam": (
        "mup: MuAdam",
        {
            "lr": 1e-3,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0,
            "amsgrad": False,
            "decoupled_wd": False,
            **_TORCH_ADAM,
        },
    ),
    "muadamw": (
        "mup: MuAdamW",
        {
            "lr": 1e-3,
            "betas": [0.9, 0.999],
            "eps": 1e-8,
            "weight_decay": 0.01,
            "amsgrad": False,
            **_TORCH_ADAM,
        },
    ),
    "musgd": (
        "mup: MuSGD",
        {
            "lr": 1e-3,
            "momentum": 0,
            "dampening": 0,
            "weight_decay": 0,
            "nesterov": False,
            "decoupled_wd": False,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": None,
        },
    ),
}
_SINCE: Final = {
    "muadam": "0.10.2",
    "muadamw": "0.10.2",
    "musgd": "0.10.2",
    "lion": "0.11.0",
    "muon": "0.17.6",
}

_LOOP = {"foreach": None, "maximize": False, "differentiable": False}
_ADAM_LIKE = {
    "lr": 0.002,
    "betas": [0.9, 0.999],
    "eps": 1e-8,
    "weight_decay": 0,
    "capturable": False,
    **_LOOP,
}
# Classes of torch.optim that are not in _DEEPSPEED, as torch 2.13 declares them.
_TORCH: Final[dict[str, dict[str, Any]]] = {
    "ASGD": {"lr": 0.01, "lambd": 0.0001, "alpha": 0.75, "t0": 1e6, "weight_decay": 0, "capturable": False,
             **_LOOP},
    "Adadelta": {"lr": 1.0, "rho": 0.9, "eps": 1e-6, "weight_decay": 0, "capturable": False, **_LOOP},
    "Adafactor": {"lr": 0.01, "beta2_decay": -0.8, "eps": [None, 0.001], "d": 1.0, "weight_decay": 0.0,
                  "foreach": None, "maximize": False},
    "Adamax": _ADAM_LIKE,
    "LBFGS": {"lr": 1, "max_iter": 20, "max_eval": None, "tolerance_grad": 1e-7, "tolerance_change": 1e-9,
              "history_size": 100, "line_search_fn": None},
    "NAdam": _ADAM_LIKE | {"momentum_decay": 0.004, "decoupled_weight_decay": False},
    "RAdam": _ADAM_LIKE | {"lr": 1e-3, "decoupled_weight_decay": False},
    "RMSprop": {"lr": 0.01, "alpha": 0.99, "eps": 1e-8, "weight_decay": 0, "momentum": 0, "centered": False,
                "capturable": False, **_LOOP},
    "Rprop": {"lr": 0.01, "etas": [0.5, 1.2], "step_sizes": [1e-6, 50], "capturable": False, **_LOOP},
    "SGD": {"lr": 0.001, "momentum": 0, "dampening": 0, "weight_decay": 0, "nesterov": False, "fused": None,
            **_LOOP},
    "SparseAdam": {"lr": 0.001, "betas": [0.9, 0.999], "eps": 1e-8, "maximize": False},
}  # fmt: skip
_NAMES: Final = ("Adagrad", "Adam", "AdamW", "Lamb", "Lion", "Muon", "MuAdam", "MuAdamW", "MuSGD", *_TORCH)

_top = Rows(path="", source="runtime/config.py: get_optimizer_name", unknown="ignored", types="raw")
_optimizer = Rows(path="optimizer", source=_top.source, unknown="ignored", types="raw")


def _params(variant: str, source: str, defaults: dict[str, Any]) -> tuple[Block, tuple[Key, ...]]:
    """The block of ``optimizer.params`` of one type, and its rows."""
    # Muon picks the keys that its two halves know (_MUON_HALF_KEYS) and drops the rest.
    unknown: Any = "ignored" if variant == "muon" else "refused"
    since = _SINCE.get(variant, "")
    rows = Rows(
        path="optimizer.params", source=source, unknown=unknown, types="raw", variant=variant, since=since
    )
    keys = []
    for name, default in defaults.items():
        kinds, effect, more = _EFFECTS[name]
        # Adafactor's eps is a pair.
        kinds = "list" if isinstance(default, list) else kinds
        more = {} if isinstance(default, list) else dict(more)
        # A parameter that came with its optimizer, or before 0.9.
        more.setdefault("since", since)
        keys.append(rows(name, kinds, default, effect, trainer_auto=name in _TRAINER, **more))
    return rows.block, tuple(keys)


_VARIANTS = (
    *(_params(variant, source, defaults) for variant, (source, defaults) in _DEEPSPEED.items()),
    *(_params(name.lower(), f"torch.optim.{name}", defaults) for name, defaults in _TORCH.items()),
)
BLOCKS = (_optimizer.block, *(block for block, _ in _VARIANTS))
KEYS = (
    _top("optimizer", "object", {}, "the optimizer, unless one is passed to deepspeed.initialize"),
    # DeepSpeed's own names count in any case, those of torch.optim as they are spelt there.
    _optimizer("type", "string", REQUIRED, "name of the optimizer", choices=_NAMES, any_case=True),
    _optimizer("params", "object", {}, "its keyword arguments"),
    _optimizer(
        "legacy_fusion", "bool", False, "in fp16 without ZeRO: keep the states of the older FusedAdam"
    ),
    *(key for _, keys in _VARIANTS for key in keys),
)
