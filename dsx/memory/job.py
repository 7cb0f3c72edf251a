"""A config as the memory estimate takes it: layout, optimizer, offload, ZeRO's sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from dsx.config.deepspeed import offloads_optimizer, precision, zero_stage
from dsx.config.load import explain, raise_all
from dsx.config.run import RunConfig
from dsx.config.schema import FaultsConfig, ZeroConfig
from dsx.config.wording import at
from dsx.errors import ConfigError
from dsx.memory.estimate import Job, enough_micro_batches
from dsx.memory.islands import IslandSettings
from dsx.memory.layer_record import DeviceKind, Shape
from dsx.memory.record_cache import ModelRecords
from dsx.memory.states import Gathering, Offload, Optimizer, StateSettings
from dsx.models.flops import WIDTHS
from dsx.models.param import PRECISIONS
from dsx.schedules.program import Program
from dsx.schedules.schedule import Schedule, lower

if TYPE_CHECKING:
    from dsx.memory.pictures import Pictures

LION_STATE_BYTES = 8
"""DeepSpeed's Lion for CPUs also makes a second moment, which it does not use (ops/lion/cpu_lion.py)."""


def offload_of(
    zero: Mapping[str, Any],
    optimizer: Mapping[str, Any],
    declared_bytes: int | None,
    device: DeviceKind = "cuda",
) -> Offload | None:
    """``offload_optimizer`` and ``offload_param``; None if nothing is offloaded.

    Raises:
        ConfigError: NVMe, or another kind of offload whose memory dsx does not know.
    """
    for name in ("cpu_offload", "cpu_offload_param"):
        if zero.get(name):
            fix = "offload_param" if name.endswith("param") else "offload_optimizer"
            raise ConfigError(
                at(f"zero_optimization.{name}", zero[name]),
                "a deprecated key, which the estimate does not read",
                f'write "{fix}": {{"device": "cpu"}}',
            )
    moved, parameters = _block(zero, "offload_optimizer"), _block(zero, "offload_param")
    if moved is None and parameters is None:
        return None
    moved = moved or {}
    if moved.get("super_offload"):
        raise ConfigError(
            at("zero_optimization.offload_optimizer.super_offload", True),
            "dsx has not learned what memory it takes",
            "remove it for the estimate",
        )
    chosen = optimizer_of(optimizer, "cpu", declared_bytes)
    kernel = chosen.kind == "lion" and declared_bytes is None
    return Offload(
        optimizer=bool(moved),
        parameters=parameters is not None,
        pinned=bool(moved.get("pin_memory", True)),
        pinned_parameters=bool((parameters or {}).get("pin_memory", True)),
        ratio=float(moved.get("ratio", 1.0)),
        state_bytes=LION_STATE_BYTES if kernel else chosen.rule.state_bytes,
        step_bytes=chosen.rule.step_bytes,
        unified=device == "cpu",
    )


def _block(zero: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    block: Mapping[str, Any] = zero.get(name) or {}
    device = block.get("device") or "none"
    if device == "nvme":
        raise ConfigError(
            at(f"zero_optimization.{name}.device", device),
            "dsx has not learned what memory NVMe's buffers take",
            'use "cpu" for the estimate',
        )
    return None if device == "none" else block


WITH_DECLARED = 8
"""Bytes that an update of unknown kind is taken to need for each parameter while it runs: two fp32
temporaries, what torch's updates of many tensors at a time take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The optimizer that DeepSpeed makes of the block (runtime/engine.py, _configure_basic_optimizer).

    Attributes:
        rule: The memory of its update.
        kind: ``adam`` and the like, in small letters.
        fused: Whether DeepSpeed's bf16 wrapper without ZeRO flattens for it: its FusedAdam alone.
    """

    rule: Optimizer
    kind: str
    fused: bool


def optimizer_of(block: Mapping[str, Any], device: DeviceKind, declared_bytes: int | None) -> Chosen:
    """The optimizer of a config.

    Args:
        block: ``optimizer``.
        device: Where it runs; on a CPU torch's updates go tensor by tensor.
        declared_bytes: ``dsx.optimizer_bytes``, which takes precedence over what dsx knows.

    Raises:
        ConfigError: dsx does not know what it keeps, and nobody has said so.
    """
    name, params = block["type"], block.get("params", {})
    kind = name.lower()
    if kind == "adam" and params.get("adam_w_mode", True):
        kind = "adamw"
    # torch's own, no kernel of DeepSpeed's; weight decay is added to a copy of the gradient.
    own = kind not in ("adam", "adamw", "lion", "lamb") or bool(params.get("torch_adam", False))
    decays = kind in ("adam", "sgd") and bool(params.get("weight_decay", 0.0))
    if declared_bytes is not None:
        rule = Optimizer(state_bytes=declared_bytes, step_bytes=WITH_DECLARED)
    elif kind in ("adam", "adamw", "lion", "sgd"):
        rule = _known(kind, params, own=own, decays=decays, device=device)
    else:
        raise ConfigError(
            at("optimizer.type", name),
            "dsx does not know how many bytes it keeps for each parameter",
            'say so, e.g. "dsx": {"optimizer_bytes": 8} for two fp32 numbers',
        )
    return Chosen(rule=rule, kind=kind, fused=kind in ("adam", "adamw") and not own)


def _known(kind: str, params: Mapping[str, Any], *, own: bool, decays: bool, device: DeviceKind) -> Optimizer:
    """torch/optim/adam.py and sgd.py; DeepSpeed's kernels take nothing besides their state.

    An update of many tensors at a time (_multi_tensor_adam) makes roots of the second moments, and gradients
    with decay; one of a tensor at a time (_single_tensor_adam) makes a root and its quotient, and the
    gradient with decay.
    """
    state = {"adam": 8, "adamw": 8, "lion": 4, "sgd": 4 * bool(params.get("momentum", 0.0))}[kind]
    state += 4 * (kind in ("adam", "adamw") and bool(params.get("amsgrad")))
    if not own or params.get("fused"):
        return Optimizer(state_bytes=state, step_bytes=0)
    single = device == "cpu" or params.get("foreach") is False
    roots = 0 if kind == "sgd" else 8 if single else 4
    return Optimizer(state_bytes=state, step_bytes=roots + 4 * decays, one_by_one=single)


_ANY_STAGE: Mapping[str, Any] = {
    "torch_autocast.enabled": False,
    "bf16.check_grad_overflow": False,
    "bf16.bf16_master_weights_and_grads": False,
    "bf16.bf16_optimizer_states": False,
    "fp16.fp16_master_weights_and_grads": False,
    "bfloat16.check_grad_overflow": False,
    "bfloat16.bf16_master_weights_and_grads": False,
    "bfloat16.bf16_optimizer_states": False,
    "managed_gradient_accumulation": True,
    "zero_optimization.zenflow": None,
    "zero_optimization.cpu_offload_use_pin_memory": None,
}
"""Key -> what it is by default, which is what the ledger knows."""

_PARTITIONED: Mapping[str, Any] = {
    "zero_optimization.round_robin_gradients": False,
    "zero_optimization.parameter_alignment": False,
}
"""The same at ZeRO-1 and 2, whose flat tensors these lay out otherwise."""

_BUCKETED: Mapping[str, Any] = {
    "zero_optimization.reduce_scatter": True,
    "zero_optimization.use_multi_rank_bucket_allreduce": True,
}
"""Where DeepSpeed reduces gradients in its bucket: ``dsx.zero.reduce = "micro_batch"``."""

_ON_DEVICE: Mapping[str, Any] = {
    "zero_optimization.overlap_comm": False,
    "zero_optimization.contiguous_gradients": True,
}
"""The same, of which offload leaves no choice."""


def require_learned(deepspeed: Mapping[str, Any], *, reduces_micro_batches: bool) -> None:
    """Raise ConfigError for the first of DeepSpeed's keys that the estimate would get wrong."""
    for key, usual in _concerned(deepspeed, reduces_micro_batches):
        value: Any = deepspeed
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and value != usual:
            raise ConfigError(
                at(key, value), "dsx has not learned what memory it takes", "remove it for the estimate"
            )


def _concerned(deepspeed: Mapping[str, Any], reduces_micro_batches: bool) -> Iterator[tuple[str, Any]]:
    yield from _ANY_STAGE.items()
    if zero_stage(deepspeed) in (1, 2):
        yield from _PARTITIONED.items()
    if reduces_micro_batches:
        yield from _BUCKETED.items()
        if not offloads_optimizer(deepspeed):
            yield from _ON_DEVICE.items()


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
    """The value of a key or of its short form, which DeepSpeed takes as well; "auto" means the default."""
    value = zero.get(key, zero.get(key.removeprefix("stage3_")))
    return None if value == "auto" else value


_WIDTHS = {**WIDTHS, **{dtype: WIDTHS[name] for name, dtype in PRECISIONS.items()}}
"""Bytes of DeepSpeed's names of dtypes."""


def job_of(
    config: RunConfig,
    *,
    device: DeviceKind = "cuda",
    capacity_bytes: int | None = None,
    imbalance: float = 1.0,
) -> Job:
    """The run that ``config`` describes, on a kind of device.

    Args:
        config: The resolved config.
        device: The kind of device whose code paths the run takes.
        capacity_bytes: Memory of a device for tensors; ZeRO-1 and 2 flatten parameters on the host if it is
            too little for two copies. None for enough.
        imbalance: Of experts that several ranks hold: rows that come to the fullest rank, over their mean.

    Raises:
        ConfigError: Something whose memory dsx does not know: an optimizer that nobody has declared
            (``dsx.optimizer_bytes``), NVMe, pictures of chats that cannot be read.
    """
    mesh, stages, recompute = config.mesh, config.stage_map, config.dsx.recompute
    if recompute == "auto":
        raise ConfigError(
            at("dsx.recompute", recompute),
            "what is computed again is chosen when the layers have been measured, at the start of a run",
            'use "none", "selective", "full" or "offload" for the estimate',
        )
    each = config.reduces_micro_batches
    require_learned(config.deepspeed, reduces_micro_batches=each)
    count = enough_micro_batches(config.program, stages.num_ranks, config.accumulation, device)
    schedule = _lowered(config.program, stages.num_ranks, stages.num_chunks, count)
    sequence_parallel = config.dsx.parallel.sequence_parallel
    states = state_settings(
        config.deepspeed, config.dsx.zero, config.dsx.optimizer_bytes, device, reduces_micro_batches=each
    )
    seen = _pictures_of(config)
    shape = Shape(
        model=config.model,
        tensor=mesh.tp,
        sequence_parallel=sequence_parallel,
        micro_batch=config.micro_batch_size,
        sequence_length=config.sequence_length,
        width=states.width,
        vocab_multiple=config.dsx.model.vocab_multiple,
        recompute=recompute,
        device=device,
        documents=config.dsx.data.keeps_apart,
        loss_chunk=config.loss_chunk,
        context=mesh.cp,
        context_method=config.dsx.parallel.method,
        mlp_tiles=config.mlp_tiles,
        expert=mesh.ep,
        imbalance=min(imbalance, float(mesh.ep)),  # which all rows on one rank are
        pictures=() if seen is None else seen.inputs,
    )
    return Job(
        records=ModelRecords(shape),
        layout=config.layout,
        schedule=schedule,
        left_out=config.accumulation - count,
        alike=mesh.tp > 1 and not sequence_parallel,
        states=states,
        device=device,
        capacity_bytes=capacity_bytes,
        islands=islands_of(config),
        supposed="" if seen is None else seen.said,
    )


def _pictures_of(config: RunConfig) -> Pictures | None:
    """Those of a micro-batch; None where none are read."""
    if not config.dsx.data.pictures:
        return None
    from dsx.memory.pictures import pictures_of  # here: other runs need none of it

    return pictures_of(config.dsx.data, config.micro_batch_size)


@lru_cache(maxsize=64)
def _lowered(program: Program, num_ranks: int, num_chunks: int, num_micro_batches: int) -> Schedule:
    """A schedule with its transfers, for which a plan asks many times."""
    return lower(program.build(num_ranks, num_chunks, num_micro_batches))


def faults_of(content: Mapping[str, Any]) -> FaultsConfig:
    """``dsx.faults``, which nothing has checked yet in the config of a layer list. Raises ConfigError."""
    block = content.get("dsx")
    if not isinstance(block, Mapping | None):
        fix = 'write e.g. "dsx": {"optimizer_bytes": 8}, or leave it out'
        raise ConfigError(at("dsx", block), "not a JSON object", fix)
    given = (block or {}).get("faults") or {}
    try:
        return FaultsConfig.model_validate_json(json.dumps(given))
    except ValidationError as error:
        raise_all("config", explain(error, given, FaultsConfig, ("dsx", "faults")))
        raise


def islands_of(config: RunConfig) -> IslandSettings | None:
    """The islands of a run; None if it is one job."""
    outer = config.dsx.outer
    if outer is None:
        return None
    return IslandSettings(count=outer.islands, shares=outer.shares, wire=outer.wire, goes_on=outer.delay > 0)


def state_settings(
    deepspeed: Mapping[str, Any],
    settings: ZeroConfig,
    declared_bytes: int | None,
    device: DeviceKind,
    *,
    reduces_micro_batches: bool = False,
) -> StateSettings:
    """Precision, optimizer and ZeRO's sizes of a checked config.

    Raises:
        ConfigError: Something whose memory dsx does not know.
    """
    zero = deepspeed.get("zero_optimization", {})
    chosen = optimizer_of(deepspeed["optimizer"], device, declared_bytes)
    width = WIDTHS[precision(deepspeed)]
    bucket = elements(zero, "reduce_bucket_size")
    accumulate = deepspeed.get("data_types", {}).get("grad_accum_dtype")
    return StateSettings(
        width=width,
        is_bf16=precision(deepspeed) == "bf16",
        accumulate=width if accumulate is None else _WIDTHS[accumulate],
        optimizer=chosen.rule,
        bucket=500_000_000 if bucket is None else bucket,
        communication=_WIDTHS.get(deepspeed.get("communication_data_type", "")),
        reduces_micro_batches=reduces_micro_batches,
        offload=offload_of(zero, deepspeed["optimizer"], declared_bytes, device),
        fused=chosen.fused,
        gloo=device == "cpu",
        gathering=gathering_of(zero, settings.keep_gathered_bytes) if zero_stage(deepspeed) == 3 else None,
    )
