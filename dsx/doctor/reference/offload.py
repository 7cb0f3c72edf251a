"""Reference: what ZeRO offloads, and how: ``offload_*``, ``zenflow``, ``aio``."""

from __future__ import annotations

import math

from dsx.doctor.key import NoEffect, Rows, When

_param = Rows(
    path="zero_optimization.offload_param",
    source="runtime/zero/offload_config.py: DeepSpeedZeroOffloadParamConfig",
    unknown="refused",
    types="coerced",
)
_optimizer = Rows(
    path="zero_optimization.offload_optimizer",
    source="runtime/zero/offload_config.py: DeepSpeedZeroOffloadOptimizerConfig",
    unknown="refused",
    types="coerced",
)
_zenflow = Rows(
    path="zero_optimization.zenflow",
    source="runtime/zenflow/zenflow_config.py: ZenFlowConfig",
    unknown="refused",
    types="coerced",
    since="0.17.5",
)
_aio = Rows(
    path="aio",
    source="runtime/swap_tensor/aio_config.py: get_aio_config",
    unknown="ignored",
    types="raw",
    no_effect=(
        NoEffect(
            (
                When("zero_optimization.offload_param.device", "!=", "nvme"),
                When("zero_optimization.offload_optimizer.device", "!=", "nvme"),
                When("checkpoint.writer", "missing"),
            ),
            "nothing is offloaded to NVMe and no fast checkpoint writer is set",
        ),
    ),
)


def _nvme_only(block: Rows) -> tuple[NoEffect, ...]:
    return (NoEffect((When(f"{block.path}.device", "!=", "nvme"),), "only device nvme reads it"),)


def _offloaded(block: Rows) -> tuple[NoEffect, ...]:
    return (NoEffect((When(f"{block.path}.device", "==", "none"),), "device none offloads nothing"),)


_super = (
    NoEffect((When("zero_optimization.offload_optimizer.super_offload", "falsy"),), "super_offload is off"),
)
_below3 = (NoEffect((When("zero_optimization.stage", "<", 3),), "only ZeRO-3 reads it"),)
# 1 itself is refused.
_BELOW_1 = math.nextafter(1.0, 0.0)
_devices = ("none", "cpu", "nvme")

BLOCKS = (_param.block, _optimizer.block, _zenflow.block, _aio.block)
KEYS = (
    _param(
        "device",
        "string",
        "none",
        "where parameters wait: nowhere, CPU memory or NVMe",
        choices=_devices,
        trainer_auto=True,
    ),
    _param(
        "nvme_path",
        "string|null",
        None,
        "folder on the NVMe drive",
        no_effect=_nvme_only(_param),
        trainer_auto=True,
    ),
    _param(
        "buffer_count",
        "int",
        5,
        "buffers in the pool between NVMe and CPU",
        low=0,
        no_effect=_nvme_only(_param),
    ),
    _param(
        "buffer_size",
        "int",
        100_000_000,
        "size of each; at least the largest parameter",
        low=0,
        unit="elements",
        no_effect=_nvme_only(_param),
    ),
    _param(
        "max_in_cpu",
        "int",
        1_000_000_000,
        "elements kept in CPU memory although NVMe is used",
        low=0,
        unit="elements",
        no_effect=_nvme_only(_param),
    ),
    _param(
        "pin_memory",
        "bool",
        True,
        "page-locked CPU memory: faster copies, cannot be swapped out",
        no_effect=_offloaded(_param),
    ),
    _optimizer(
        "device",
        "string",
        "none",
        "where optimizer states live: on the GPU, in CPU memory or on NVMe",
        choices=_devices,
        trainer_auto=True,
    ),
    _optimizer(
        "nvme_path",
        "string|null",
        None,
        "folder on the NVMe drive",
        no_effect=_nvme_only(_optimizer),
        trainer_auto=True,
    ),
    _optimizer(
        "buffer_count",
        "int",
        4,
        "buffers in the pool; at least the states per parameter (Adam: 4)",
        low=0,
        no_effect=_nvme_only(_optimizer),
    ),
    _optimizer(
        "pin_memory",
        "bool",
        True,
        "page-locked CPU memory: faster copies, cannot be swapped out",
        no_effect=_offloaded(_optimizer),
    ),
    _optimizer(
        "pipeline_read",
        "bool",
        False,
        "read the next tile while stepping on this one",
        no_effect=_nvme_only(_optimizer),
    ),
    _optimizer(
        "pipeline_write",
        "bool",
        False,
        "write the previous tile while stepping on this one",
        no_effect=_nvme_only(_optimizer),
    ),
    _optimizer(
        "fast_init",
        "bool",
        False,
        "faster first writing of the states to NVMe",
        no_effect=_nvme_only(_optimizer),
    ),
    _optimizer(
        "ratio",
        "float",
        1.0,
        "share of the optimizer states that steps on the CPU (ZeRO-3 only)",
        low=0,
        high=1,
        since="0.12.3",
        no_effect=_offloaded(_optimizer),
    ),
    _optimizer(
        "super_offload",
        "bool",
        False,
        "SuperOffload: for GPUs tightly coupled to their CPU (ZeRO-3)",
        since="0.18.0",
        no_effect=(*_offloaded(_optimizer), *_below3),
    ),
    _optimizer(
        "cpuadam_cores_perc",
        "float",
        0.8,
        "share of the CPU cores that SuperOffload's Adam uses",
        low=0,
        high=1,
        since="0.18.0",
        no_effect=_super,
    ),
    _zenflow(
        "topk_ratio",
        "float",
        0.1,
        "share of the gradient columns that count as important",
        low=0,
        low_open=True,
        high=_BELOW_1,
    ),
    _zenflow(
        "select_strategy",
        "string",
        "auto",
        "when important columns are chosen anew",
        choices=("auto", "step", "epoch"),
        auto="meaning",
    ),
    _zenflow("select_interval", "int", "auto", "steps or epochs between two choices", low=1, auto="meaning"),
    _zenflow(
        "update_interval",
        "int",
        "auto",
        "steps between two updates of the rest",
        low=1,
        auto="meaning",
    ),
    _zenflow("overlap_step", "bool", False, "step on the CPU while forward and backward go on"),
    _zenflow("offload", "bool", False, "keep the important columns' states in CPU memory too"),
    _zenflow("auto_ratio", "float", 0.99, "threshold by which update_interval auto decides", low=0, high=1),
    _zenflow("full_warm_up_rounds", "int", 0, "first steps that update everything", unit="steps"),
    _zenflow(
        "pt_reserved_cores_perc",
        "float",
        0.5,
        "share of the CPU cores kept for PyTorch",
        low=0,
        high=1,
        since="0.17.6",
    ),
    _zenflow("steps_per_epoch", "int|null", None, "set by DeepSpeed itself", unit="steps"),
    Rows(path="", source=_aio.source, unknown="ignored", types="raw")(
        "aio", "object|null", None, "asynchronous disk access of NVMe offloading"
    ),
    _aio("block_size", "int", 1_048_576, "bytes per request", low=1, unit="bytes"),
    _aio("queue_depth", "int", 8, "requests in flight per thread", low=1),
    _aio("intra_op_parallelism", "int", 1, "threads that share one read or write", low=1, since="0.16.4"),
    _aio(
        "thread_count",
        "int",
        1,
        "the former name of intra_op_parallelism; not read any more",
        status="dead",
        until="0.16.4",
        replacement="aio.intra_op_parallelism",
    ),
    _aio("single_submit", "bool", False, "submit requests one by one instead of in batches"),
    _aio("overlap_events", "bool", True, "submit new requests before earlier ones are done"),
    _aio(
        "use_gds",
        "bool",
        False,
        "GPUDirect Storage: disk to GPU without CPU memory (CUDA only)",
        since="0.15.0",
    ),
)
