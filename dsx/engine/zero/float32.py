"""Has DeepSpeed keep parameters in fp32 beside others in bf16 or fp16, as their family has them.

DeepSpeed casts all parameters of a module to one dtype, and its ZeRO-3 has one buffer for all partitions, one
for gradients as they are sent, and one for their sums. By what it has for torch's autocast, it gathers and
reduces by dtype already. Groups of optimizers have one dtype each (dsx.engine.optimizers.split_groups), and
masters are copies in fp32, as ever.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.engine import CASTABLE_DTYPES, DeepSpeedEngine
from deepspeed.runtime.zero import stage3
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3, IPGBucketZ3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from dsx.engine.zero.calls import changed
from dsx.nn.parameters import stays_float32

_STAGE_3 = "_DeepSpeedZeroOptimizer_Stage3__"


@contextmanager
def float32_kept(dtype: torch.dtype) -> Iterator[None]:
    """Inside the block, what DeepSpeed makes keeps fp32 what stays so beside weights of ``dtype``."""
    with changed(() if dtype == torch.float32 else (*_changes(dtype), *_of_stage_3())):
        yield


def _changes(dtype: torch.dtype) -> Iterator[tuple[Any, str, Any]]:
    """The engine's cast, and what wrappers say of the run: (class, attribute, what takes its place)."""
    cast = DeepSpeedEngine._cast_module_mixed_precision  # noqa: SLF001

    def cast_others(
        engine: Any, low: torch.dtype | None, buffers: Any, partitioned: bool, *more: Any
    ) -> None:
        if low is not None and not partitioned:
            for parameter in engine.module.parameters():
                if parameter.dtype in CASTABLE_DTYPES and not stays_float32(parameter, low):
                    parameter.data = parameter.data.to(low)
        cast(engine, None, buffers, partitioned, *more)

    yield DeepSpeedEngine, "_cast_module_mixed_precision", cast_others
    for kind in (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3):
        yield kind, "dtype", _OfRun(dtype)


def _of_stage_3() -> Iterator[tuple[Any, str, Any]]:
    """A buffer of partitions for each dtype, on the device, or for each group, on the host."""
    flatten = stage3.defragment
    on_host = DeepSpeedZeroOptimizer_Stage3._create_param_groups_fp16_flat_cpu_memory  # noqa: SLF001

    def flatten_each(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
        flat = [flatten([tensor for tensor in tensors if tensor.dtype == its]) for its in dtypes]
        assert isinstance(flat[0], torch.Tensor)
        return flat[0]

    def find_groups(wrapper: Any) -> None:
        for group in wrapper.fp16_groups:
            numel = sum(parameter.partition_numel() for parameter in group)
            wrapper.fp16_partitioned_groups_flat.append(group[0].ds_tensor.data.as_strided((numel,), (1,)))

    def make_on_host(wrapper: Any) -> None:
        on_host(wrapper)
        memory = wrapper.param_groups_fp16_flat_cpu_memory
        for at, group in enumerate(wrapper.trainable_param_groups):
            if (its := group["params"][0].ds_tensor.dtype) != memory[at].dtype:
                memory[at] = get_accelerator().pin_memory(torch.empty(memory[at].numel(), dtype=its))

    yield stage3, "defragment", flatten_each
    yield DeepSpeedZeroOptimizer_Stage3, "_set_fp16_partitioned_groups_flat", find_groups
    yield DeepSpeedZeroOptimizer_Stage3, "_create_param_groups_fp16_flat_cpu_memory", make_on_host


@dataclass(frozen=True, slots=True)
class _OfRun:
    """An attribute of wrappers that is the run's dtype, whatever that of their first parameter is."""

    dtype: torch.dtype

    def __get__(self, wrapper: Any, _: type) -> torch.dtype:
        return self.dtype

    def __set__(self, wrapper: Any, _: torch.dtype) -> None:
        vars(wrapper)["dtype"] = self.dtype


def gradients_in_float32(wrapper: Any) -> torch.Tensor | None:
    """Have ZeRO-3 send and add up gradients of fp32 parameters in fp32; their sums, if those lie apart."""
    trained = [parameter for group in wrapper.fp16_groups for parameter in group]
    wide = [parameter for parameter in trained if parameter.dtype == torch.float32 != wrapper.dtype]
    if not wide:
        return None
    of_others, buckets = wrapper.get_param_comm_dtype, wrapper.ipg_buckets
    wrapper.get_param_comm_dtype = lambda p: p.dtype if p.dtype == torch.float32 else of_others(p)
    if torch.float32 not in buckets:
        bucket = buckets[torch.float32] = IPGBucketZ3()
        if wrapper.contiguous_gradients:
            most = min(wrapper.reduce_bucket_size, sum(parameter.ds_numel for parameter in wide))
            bucket.buffer = torch.empty(most, device=get_accelerator().current_device_name())
    if wrapper.gradient_accumulation_dtype == torch.float32:
        return None
    reduce, places = (
        getattr(wrapper, f"{_STAGE_3}reduce_and_partition_ipg_grads"),
        f"{_STAGE_3}param_id_to_grad_partition",
    )

    def reduce_as_sent(dtype: torch.dtype) -> None:
        own = wrapper.gradient_accumulation_dtype
        wrapper.gradient_accumulation_dtype = torch.promote_types(own, dtype)
        try:
            reduce(dtype)
        finally:
            wrapper.gradient_accumulation_dtype = own

    setattr(wrapper, f"{_STAGE_3}reduce_and_partition_ipg_grads", reduce_as_sent)
    sizes = [parameter.partition_numel() for parameter in wide]
    sums = torch.zeros(sum(sizes), device=wrapper.device)
    if wrapper.offload_optimizer_pin_memory:
        sums = get_accelerator().pin_memory(sums)
    for parameter, part in zip(wide, sums.split(sizes), strict=True):
        getattr(wrapper, places)[parameter.ds_id] = part
    return sums
