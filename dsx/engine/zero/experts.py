"""Has DeepSpeed take the experts of a layer as those that their replicas alone hold.

DeepSpeed's wrappers know experts: of each parameter group ZeRO-1 and 2 ask for the ranks that cut it, and
ZeRO-3 of each parameter. Its engine finds them by modules of its own, and then trains in other ways, for
which it keeps groups of its own for the whole process. So here the wrappers are told, and the engine is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, partialmethod
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from dsx.engine.zero.calls import changed
from dsx.parallel.groups import Groups, of_experts


def place(parameters: Iterable[Any], groups: Groups) -> None:
    """Tell ZeRO-3 over which ranks it is to cut each of these, before it does."""
    for parameter in parameters:
        if of_experts(parameter):
            # partition_parameters.py, _convert_to_deepspeed_param
            parameter.ds_zero_partition_process_group = groups.expert_data


@contextmanager
def experts_apart(groups: Groups, module: nn.Module) -> Iterator[None]:
    """Inside the block, what DeepSpeed makes of ``module`` keeps experts among their replicas."""
    apart = groups.expert_data is not None
    if apart:
        place(module.parameters(), groups)
    with changed(_changes(groups) if apart else ()):
        yield


def _changes(groups: Groups) -> Iterator[tuple[type, str, Any]]:
    """What DeepSpeed's classes do differently with experts: (class, method, what takes its place)."""

    def broadcast(engine: Any) -> None:
        for parameter in engine.module.parameters():
            if not hasattr(parameter, "ds_id"):  # what is cut was sent before it was
                dist.broadcast(parameter.data, group=groups.replicas_of(parameter), group_src=0)

    def configure(wrapper: Any) -> None:
        for at, group in enumerate(wrapper.optimizer.param_groups):
            if any(map(of_experts, group["params"])):
                wrapper.real_dp_process_group[at] = groups.expert_data
        if isinstance(wrapper, DeepSpeedZeroOptimizer):
            link = wrapper._lazy_init_hp_params_optimizer_state  # noqa: SLF001
            wrapper._lazy_init_hp_params_optimizer_state = partial(_linked, wrapper, link)  # noqa: SLF001
        if hasattr(wrapper, "partition_count"):
            wrapper.partition_count = [*map(dist.get_world_size, wrapper.real_dp_process_group)]
        wrapper.has_moe_layers = False  # which would have the norm, and checkpoints, go DeepSpeed's way

    yield DeepSpeedEngine, "_broadcast_model", broadcast
    for kind in (DeepSpeedZeroOptimizer, BF16_Optimizer):
        yield kind, "_configure_moe_settings", configure
        yield kind, "__init__", partialmethod(_told, kind.__init__)


def _told(wrapper: Any, build: Callable[..., None], *given: Any, **named: Any) -> None:
    build(wrapper, *given, **named | {"has_moe_layers": True})


def _linked(wrapper: Any, link: Callable[[], None]) -> None:
    """Have ``safe_get_full_optimizer_state`` find states, once each group has some.

    DeepSpeed links them after the first group's update, when those behind it, as of experts, have none.
    """
    if all(part in wrapper.optimizer.state for part in wrapper.single_partition_of_fp32_groups):
        link()
