"""Keys that do not go together, as data: what DeepSpeed refuses once the engine is made, or later.

DeepSpeedConfig takes all of these; the run stops in the constructor that is named in ``where`` (below
deepspeed/), after every rank has loaded its model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from dsx.config.wording import show
from dsx.doctor.context import STAGE, Context
from dsx.doctor.finding import ABSENT, Edit, Finding
from dsx.doctor.key import When


@dataclass(frozen=True, slots=True)
class Conflict:
    """A combination that fails.

    Attributes:
        name: Dotted key that the finding is about.
        when: Conditions, all of which hold.
        why: What fails.
        fix: What to do.
        where: The constructor or check in DeepSpeed.
        change: Value of ``name`` that mends it for certain; ABSENT if a person must choose.
    """

    name: str
    when: tuple[When, ...]
    why: str
    fix: str
    where: str
    change: Any = ABSENT


_ZERO = "zero_optimization"
_SCATTER, _OVERLAP = f"{_ZERO}.reduce_scatter", f"{_ZERO}.overlap_comm"
_OPTIMIZER, _PARAM = f"{_ZERO}.offload_optimizer.device", f"{_ZERO}.offload_param.device"
_QUANTIZED, _ZENFLOW = f"{_ZERO}.zero_quantized_gradients", f"{_ZERO}.zenflow"
_GRAD_NORM, _RATIO = f"{_ZERO}.compute_grad_norm", f"{_ZERO}.offload_optimizer.ratio"
_STAGE3 = When(STAGE, "==", 3)
_BELOW3 = (When(STAGE, ">", 0), When(STAGE, "<", 3))
_MUON = When("optimizer.type", "==", "muon")
_MASTER = ("fp16.fp16_master_weights_and_grads", "bf16.bf16_master_weights_and_grads")
_AUTOTP = "tensor_parallel.autotp_size"
_TP = When(_AUTOTP, ">", 1)
_RANKS = "sequence_parallel_size"


def _on(*names: str) -> tuple[When, ...]:
    return tuple(When(name, "truthy") for name in names)


def _off(*names: str) -> tuple[When, ...]:
    return tuple(When(name, "falsy") for name in names)


_ZERO_CONFLICTS: Final = (
    Conflict(
        _SCATTER,
        (_MUON, _STAGE3, *_on(_SCATTER)),
        "at ZeRO-3 Muon does not go with reduce_scatter, which is on by default: DeepSpeed raises ValueError",
        f"set {_SCATTER} to false",
        "runtime/zero/stage3.py",
        change=False,
    ),
    Conflict(
        _QUANTIZED,
        (_MUON, _STAGE3, *_on(_QUANTIZED)),
        "Muon does not go with quantized gradients: DeepSpeed raises ValueError",
        "remove it",
        "runtime/zero/stage3.py",
    ),
    Conflict(
        _QUANTIZED,
        (_STAGE3, *_on(_QUANTIZED), *_off(_SCATTER)),
        "quantized gradients are reduced by reduce-scatter, which is off: DeepSpeed stops with an assertion",
        f"remove {_SCATTER}",
        "runtime/zero/stage3.py",
    ),
    Conflict(
        _ZENFLOW,
        (When(_ZENFLOW, "!=", None), *_BELOW3, When(_OPTIMIZER, "==", "none")),
        "ZenFlow works on an offloaded optimizer: DeepSpeed raises ValueError",
        f'add {_ZERO}.offload_optimizer {{"device": "cpu"}}, or remove zenflow',
        "runtime/zenflow/zenflow_stage_1_and_2.py",
    ),
    *(
        Conflict(
            f"{_ZENFLOW}.offload",
            (*_on(f"{_ZENFLOW}.offload"), *when),
            "it needs overlap_comm: DeepSpeed stops with an assertion",
            f"set {_OVERLAP} to true",
            "runtime/zenflow/",
        )
        for when in ((*_BELOW3, *_off(_OVERLAP)), (_STAGE3, When(_OVERLAP, "==", False)))
    ),
    Conflict(
        _GRAD_NORM,
        (When(_GRAD_NORM, "==", False), *_BELOW3, When(_ZENFLOW, "!=", None)),
        "ZenFlow needs the norm: DeepSpeed raises ValueError",
        "remove it",
        "runtime/zero/stage_1_and_2.py",
        change=True,
    ),
    *(
        Conflict(
            _GRAD_NORM,
            (
                When(_GRAD_NORM, "==", False),
                When(STAGE, "==", 1),
                *_on("bf16.enabled"),
                When("data_types.grad_accum_dtype", "==", word),
                When(_OPTIMIZER, "==", "none"),
            ),
            f'not with ZeRO-1 in bf16 that accumulates in fp32 (data_types.grad_accum_dtype = "{word}"): '
            "DeepSpeed raises ValueError",
            "remove one of the two, or use ZeRO-2",
            "runtime/engine.py: _do_optimizer_sanity_check",
        )
        for word in ("fp32", "float32", "float", "torch.float32")
    ),
    Conflict(
        _MASTER[1],
        (*_on(*_MASTER), When(STAGE, ">", 0)),
        f"{_MASTER[0]} is on too: DeepSpeed stops with an assertion",
        "keep that of the precision that is enabled",
        "runtime/base_optimizer.py",
    ),
    *(
        Conflict(
            name,
            (*when, When(STAGE, ">", 0), When(_OPTIMIZER, "!=", "none"), other),
            "it is for DeepSpeed's CPU Adam, and the optimizer is another: DeepSpeed stops with an assertion",
            'use type "AdamW" without torch_adam',
            where,
        )
        for name, when, where in (
            (_MASTER[0], _on(_MASTER[0]), "runtime/zero/stage_1_and_2.py"),
            (_MASTER[1], _on(_MASTER[1]), "runtime/zero/stage_1_and_2.py"),
            (_RATIO, (_STAGE3, When(_RATIO, "<", 1)), "runtime/zero/stage3.py"),
        )
        for other in (
            *_on("optimizer.params.torch_adam"),
            *(When("optimizer.type", "==", kind) for kind in ("lion", "adagrad", "muon")),
        )
    ),
)

_DEEP = _on("compile.deepcompile")
_STATES, _PARAMETERS = "compile.offload_opt_states", "compile.offload_parameters"
_ACTIVATION = "compile.offload_activation"
_SKIP_EP = "compile.autoep_non_moe"
_COMPILE_CONFLICTS: Final = (
    Conflict(
        _STATES,
        (*_DEEP, *_on(_STATES), _STAGE3, When(_OPTIMIZER, "!=", "none")),
        f"{_ZERO}.offload_optimizer keeps the same states off the GPU already: engine.compile() raises "
        "ValueError",
        "keep one of the two",
        "compile/init_z3.py",
    ),
    *(
        Conflict(
            name,
            (*_DEEP, *_on(name, other), _STAGE3),
            f"it does not go with {other}: engine.compile() raises ValueError",
            "keep one of the two",
            "compile/init_z3.py",
        )
        for name, other in ((_ACTIVATION, _PARAMETERS), (_ACTIVATION, _STATES), (_STATES, _PARAMETERS))
    ),
    Conflict(
        "managed_gradient_accumulation",
        (*_DEEP, When("managed_gradient_accumulation", "==", False)),
        "false does not go with compile.deepcompile: DeepSpeed stops with an assertion",
        "remove one of the two",
        "runtime/engine.py: _do_sanity_check",
    ),
    *(
        Conflict(_SKIP_EP, (*_on(_SKIP_EP), when), f"{why}: engine.compile() raises ValueError", fix, where)
        for when, why, fix, where in (
            (
                When("expert_parallel.comm_backend", "!=", "comm"),
                'it goes with expert_parallel.comm_backend "comm" only',
                'use "comm", or remove this',
                "runtime/engine.py: compile",
            ),
            (_TP, "it does not go with AutoTP yet", "remove one of the two", "runtime/engine.py: compile"),
            (_STAGE3, "it does not go with ZeRO-3 yet", f"set {STAGE} to 2", "runtime/engine.py: compile"),
            (
                When(_RANKS, ">", 1),
                f"it does not go with {_RANKS} yet",
                "remove one of the two",
                "runtime/engine.py: compile",
            ),
            (
                When(_OPTIMIZER, "!=", "none"),
                "it does not go with offloading yet",
                f"remove {_ZERO}.offload_optimizer",
                "runtime/engine.py: compile",
            ),
        )
    ),
)

_LIGER = "tensor_parallel.vocab_parallel_ce_backend"
_EXPERT = "expert_parallel"
_SIZE, _WIDTH = f"{_EXPERT}.autoep_size", f"{_EXPERT}.expert_tensor_parallel_size"
_BACKEND, _COMBINE = f"{_EXPERT}.comm_backend", f"{_EXPERT}.combine_impl"
_ROWS, _SPLIT = f"{_EXPERT}.row_weighting_impl", f"{_EXPERT}.async_split_plan"
_TOKENS = f"{_EXPERT}.comm_max_tokens_per_rank"
_FUSED_SUM = When(_COMBINE, "==", "fused_weighted_sum")
_FUSED_ROWS = When(_ROWS, "==", "fused")
_CHECKED = "module_inject/auto_ep_config.py: validate_autoep_config"
_FOLDED = "module_inject/auto_ep_folding.py: validate_folding_global"
_ZERO3_EXPERTS = "runtime/engine.py: _validate_zero3_moe_compatibility"


def _experts(name: str, *when: When, why: str, fix: str, where: str = _CHECKED) -> Conflict:
    """A conflict of an AutoEP that is on, which ends in a ValueError."""
    return Conflict(name, (*_on(f"{_EXPERT}.enabled"), *when), f"{why}: DeepSpeed refuses it", fix, where)


_EXPERT_CONFLICTS: Final = (
    _experts(_WIDTH, When(_WIDTH, "!=", 1), why="only 1 works so far", fix="use 1", where=_FOLDED),
    _experts(
        _TOKENS,
        When(_BACKEND, "==", "deepep"),
        When(_TOKENS, "==", 0),
        why='comm_backend "deepep" needs it above 0',
        fix="write micro-batch x longest sequence",
    ),
    _experts(
        f"{_EXPERT}.gate_up_impl",
        When(f"{_EXPERT}.gate_up_impl", "==", "fused"),
        *_off(f"{_EXPERT}.use_grouped_mm"),
        why='"fused" is one grouped product, and use_grouped_mm is off',
        fix="set use_grouped_mm to true",
    ),
    *(
        _experts(_ROWS, _FUSED_ROWS, when, why=why, fix="remove it")
        for when, why in (
            (When(_BACKEND, "!=", "deepep"), '"fused" goes with comm_backend "deepep" only'),
            (When(_SIZE, "==", 1), '"fused" needs an autoep_size above 1'),
        )
    ),
    _experts(_COMBINE, _FUSED_SUM, _TP, why="it does not go with AutoTP", fix="remove one of the two"),
    _experts(
        _COMBINE,
        _FUSED_SUM,
        When(_BACKEND, "==", "deepep"),
        When(_SIZE, ">", 1),
        why='comm_backend "deepep" combines by itself',
        fix="remove it",
    ),
    _experts(
        _SPLIT,
        *_on(_SPLIT),
        _TP,
        When(_SIZE, ">", 1),
        why="it does not go with AutoTP yet",
        fix="remove one of the two",
    ),
    _experts(
        _SIZE,
        _TP,
        When(_SIZE, "==", 1),
        why="with AutoTP the experts must be divided as well",
        fix="use 2 or more, or remove AutoTP",
        where=_FOLDED,
    ),
    _experts(
        _RANKS,
        _TP,
        When(_RANKS, ">", 1),
        why="with experts it does not go with AutoTP",
        fix="keep one of the two",
        where=_FOLDED,
    ),
    *(
        _experts(
            name,
            _STAGE3,
            when,
            why="it does not go with AutoEP at ZeRO-3 yet",
            fix=f"remove it, or set {STAGE} to 2",
            where=_ZERO3_EXPERTS,
        )
        for name, when in (
            (_RANKS, When(_RANKS, ">", 1)),
            (_QUANTIZED, When(_QUANTIZED, "truthy")),
            (f"{_ZERO}.zero_hpz_partition_size", When(f"{_ZERO}.zero_hpz_partition_size", ">", 1)),
        )
    ),
    Conflict(
        _LIGER,
        (_TP, When(_LIGER, "==", "liger"), When("tensor_parallel.vocab_parallel_lm_head", "==", False)),
        '"liger" needs the divided output layer, and vocab_parallel_lm_head is false: DeepSpeed raises '
        "ValueError",
        "set vocab_parallel_lm_head to true, or remove this",
        "runtime/engine.py: _apply_autotp_partitioning",
    ),
)

CONFLICTS: Final = (*_ZERO_CONFLICTS, *_COMPILE_CONFLICTS, *_EXPERT_CONFLICTS)


def check_conflicts(context: Context) -> Iterator[Finding]:
    """Combinations of the table above."""
    for conflict in CONFLICTS:
        if all(map(context.holds, conflict.when)):
            edits: tuple[Edit, ...] = ()
            if conflict.change is not ABSENT:
                edits = (Edit("set", context.path(conflict.name), conflict.change),)
            # A default that fails is nobody's wish.
            safe = not context.written(conflict.name)
            yield context.find(
                "conflict", "error", conflict.name, conflict.why, conflict.fix, *edits, safe=safe
            )


# Two keys that must say the same, or of which the first must not be above the second.
_EQUAL: Final = (
    ("tensor_parallel.tp.tp_size", _AUTOTP, (1,), "DeepSpeed raises ValueError"),
    (f"{_EXPERT}.preset_model", "tensor_parallel.preset_model", (None,), "DeepSpeed raises ValueError"),
)
_GROUPS = (f"{_EXPERT}.num_limited_groups", f"{_EXPERT}.num_expert_groups")


def check_pairs(context: Context) -> Iterator[Finding]:
    """Pairs of keys against each other."""
    for name, other, free, does in _EQUAL:
        one, two = context.value(name), context.value(other)
        off = other == _AUTOTP and not context.holds(_TP)
        if context.written(name) and context.written(other) and one != two and one not in free and not off:
            why = f"{other} is {show(two)}: {does}"
            yield context.find("conflict", "error", name, why, "write the same, or remove it")
    limited, groups = map(context.number, _GROUPS)
    if (
        limited is not None
        and groups is not None
        and limited > groups
        and context.is_on(f"{_EXPERT}.enabled")
    ):
        why = f"above num_expert_groups = {groups}: DeepSpeed raises ValueError"
        yield context.find("conflict", "error", _GROUPS[0], why, f"use at most {groups}")


# Adam's parameter, two states and gradient are read together (swap_tensor/partitioned_optimizer_swapper.py).
_ADAM_BUFFERS = 4


def check_nvme_buffers(context: Context) -> Iterator[Finding]:
    """Buffers between NVMe and CPU memory: assertions at the first forward pass or step."""
    if context.stage != 3:
        return
    param, optimizer = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
    if context.value(_PARAM) == "nvme" and context.number(f"{param}.buffer_count") == 0:
        why = "without a buffer no parameter comes back from NVMe: DeepSpeed stops with an assertion"
        yield context.find(
            "conflict", "error", f"{param}.buffer_count", why, "use 1 or more; the default is 5"
        )
    count = context.number(f"{optimizer}.buffer_count")
    adam = context.text("optimizer.type").lower() in ("adam", "adamw")
    if context.value(_OPTIMIZER) == "nvme" and adam and count is not None and count < _ADAM_BUFFERS:
        why = (
            "Adam needs 4 at a time, for the parameter, two states and the gradient: DeepSpeed stops with an "
            "assertion"
        )
        yield context.find("conflict", "error", f"{optimizer}.buffer_count", why, "use 4 or more")
