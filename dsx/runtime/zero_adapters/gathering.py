"""ZeRO-3's gathers over a whole step of a schedule: ahead of use, and kept between uses under a budget.

DeepSpeed records which modules run in what order and prefetches from the recording. It begins anew at every
forward of the engine's module, which under a pipeline is every forward of a chunk: what follows is never what
was recorded, so that it records, discards and records again, compares each recording over the data-parallel
ranks (which waits for the device), and prefetches next to nothing. Here a recording is a step. Every step of
a schedule is the same, and so the next action's parameters, of another chunk or not, are on their way while
this one computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from torch import nn

from dsx.errors import ConfigError
from dsx.plan.gathers import GatherPlan, gather_plan
from dsx.spec.schedule import Action, Schedule

Parameter: TypeAlias = Any
"""An nn.Parameter with what ZeRO-3 adds to it (``ds_numel``, ``ds_persist``, ...)."""

_PRIVATE = "_PartitionedParameterCoordinator__"


class StepGathers:
    """What DeepSpeed's coordinator of ZeRO-3 gathers and lets go of in the steps of schedules.

    Args:
        optimizer: DeepSpeed's ZeRO-3 optimizer.
        uses: Virtual stage of this rank -> parameters that its layers use.
        pp_rank: This rank's pipeline coordinate.
        budget_bytes: Memory for parameters that stay gathered between actions of their chunk. 0 leaves the
            choice to ``stage3_max_reuse_distance``.

    Raises:
        ConfigError: A budget with parameters on NVMe, whose buffers follow DeepSpeed's own order.
    """

    def __init__(
        self, optimizer: Any, uses: Mapping[int, Iterable[Parameter]], pp_rank: int, budget_bytes: int
    ) -> None:
        if budget_bytes and optimizer.parameter_offload.offload_device == OffloadDeviceEnum.nvme:
            raise ConfigError(
                f"dsx.zero.keep_gathered_bytes = {budget_bytes}",
                "parameters on NVMe come through a few buffers that kept ones would fill",
                'use 0, or "offload_param": {"device": "cpu"}',
            )
        self._coordinator = optimizer.parameter_offload.get_param_coordinator()
        self._pp_rank, self._budget_bytes = pp_rank, budget_bytes
        # Small parameters are always gathered ("persistent"). What is tied counts for every stage.
        self._parameters = {
            stage: tuple(p for p in dict.fromkeys(used) if not p.ds_persist) for stage, used in uses.items()
        }
        self._plans: list[tuple[Schedule, GatherPlan]] = []
        self._schedule: Schedule | None = None
        self._kept: frozenset[int] = frozenset()
        self._trace = _Trace(())
        optimizer.parameter_offload.fwd_pre_hook.remove()  # the reset at every forward
        setattr(self._coordinator, f"{_PRIVATE}params_to_release", self._releasable)
        self._release_leftovers = self._coordinator.release_backward_leftovers
        self._coordinator.release_backward_leftovers = self._release_rest
        _release_after_every_backward(optimizer.parameter_offload)

    def begin(self, schedule: Schedule) -> None:
        """A step of ``schedule`` begins. A collective call over data parallelism when it is a new one.

        Its first step records, later ones prefetch from the recording; steps of another schedule between
        them (an evaluation) make it record once more.
        """
        if schedule is not self._schedule and not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()  # noqa: SLF001
        self._schedule = schedule
        self._coordinator.reset_step()
        self._keep(frozenset())

    def before(self, position: int) -> None:
        """The action at ``position`` of this rank's row comes next: hold what the plan keeps after it."""
        if self._budget_bytes and self._schedule is not None:
            self._keep(self.plan(self._schedule).kept[position])
            self._look_again()

    def plan(self, schedule: Schedule) -> GatherPlan:
        """What stays gathered when, in a step of ``schedule``."""
        for known, plan in self._plans:
            if known is schedule:
                return plan
        row: tuple[Action, ...] = schedule.rows[self._pp_rank]
        plan = gather_plan(row, self.stage_bytes(), self._budget_bytes)
        self._plans.append((schedule, plan))
        return plan

    def stage_bytes(self) -> dict[int, int]:
        """Virtual stage -> size of its parameters when they are gathered, persistent ones left out."""
        return {
            stage: sum(p.ds_numel * p.element_size() for p in parameters)
            for stage, parameters in self._parameters.items()
        }

    def _keep(self, stages: frozenset[int]) -> None:
        """DeepSpeed does not let go of a parameter that a module is at work with: be that module.

        What is no longer kept goes when the modules of the coming action are done with it.
        """
        for stage in self._kept - stages:
            for parameter in self._parameters[stage]:
                parameter.ds_active_sub_modules.discard(_holder(stage))
        for stage in stages - self._kept:
            for parameter in self._parameters[stage]:
                parameter.ds_active_sub_modules.add(_holder(stage))
        self._kept = stages

    def _look_again(self) -> None:
        """Have prefetching start from here.

        It takes each use off a queue once, also when the parameter is there at that moment. What the plan
        lets go of before that use has to be found again.
        """
        coordinator = self._coordinator
        if coordinator.is_complete_trace():
            order = getattr(coordinator, f"{_PRIVATE}param_order")
            step = getattr(coordinator, f"{_PRIVATE}step_id")
            here = bisect_left(order, step, key=lambda use: use.step_id_last_used_at)
            setattr(coordinator, f"{_PRIVATE}param_queue", deque(order[here:]))
            getattr(coordinator, f"{_PRIVATE}most_recent_step_id_param_fetched_for").clear()

    def _releasable(self, submodule: nn.Module, step: int) -> set[int]:
        """Stands in for ``__params_to_release``: ids of the parameters to let go of after ``submodule``.

        The same rule (a parameter stays when it is used again within the reuse distance, or when prefetching
        has passed over that use because it was there), without a walk from each module over the rest of the
        step, which is now long. With a budget the plan alone decides.
        """
        trace, coordinator = self._trace_of_step(), self._coordinator
        parameters = iter_params(submodule, recurse=z3_leaf_module(submodule))
        candidates = [p for p in parameters if not p.ds_persist]
        if self._budget_bytes:
            return {p.ds_id for p in candidates}
        passed = getattr(coordinator, f"{_PRIVATE}most_recent_step_id_param_fetched_for")
        distance = getattr(coordinator, f"{_PRIVATE}max_reuse_dist_in_numel")
        return {p.ds_id for p in candidates if passed[p] <= step and trace.distance(p, step) >= distance}

    def _release_rest(self) -> None:
        """After a backward: the modules whose inputs get no gradient (a model's first), by the same rule."""
        if not self._coordinator.is_complete_trace():
            self._release_leftovers()
            return
        active = getattr(self._coordinator, f"{_PRIVATE}active_backward_submodules")
        for module in list(reversed(active.values())):
            self._coordinator.release_sub_module(module, forward=False)

    def _trace_of_step(self) -> _Trace:
        order = getattr(self._coordinator, f"{_PRIVATE}submodule_order")
        if self._trace.modules is not order:
            self._trace = _Trace(order)
        return self._trace


def _release_after_every_backward(offload: Any) -> None:
    """Have each module's parameters let go of when its backward is done, in every micro-batch.

    DeepSpeed counts the inputs whose gradients are to come on the module, from nothing at each forward
    (parameter_offload.py, _post_backward_module_hook). With several forwards under way the count goes below
    zero at the second backward and its release never comes: the whole chunk stays gathered to the end of its
    backward. Here each forward has a count of its own.
    """
    for module in offload.module.modules():
        if "post_bwd_fn" in vars(module):
            module.post_bwd_fn = _Inputs(module, offload.post_sub_module_backward_function)


class _Inputs:
    """Stands in for DeepSpeed's PostBackwardFunctionModule of one module."""

    def __init__(self, module: Any, done: Callable[[nn.Module], None]) -> None:
        self._module, self._done = module, done
        self._remaining = [0]

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """One tensor among the inputs of a forward. DeepSpeed sets ``ds_grads_remaining`` to 0 before."""
        if not x.requires_grad:
            return x
        if self._module.ds_grads_remaining == 0:
            self._remaining = [0]
        self._module.ds_grads_remaining += 1
        self._remaining[0] += 1
        y: torch.Tensor = _AfterBackward.apply(x, self._remaining, self._module, self._done)
        return y


class _AfterBackward(torch.autograd.Function):
    """Identity; the last of a forward's inputs to get its gradient ends the module's backward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, remaining: list[int], module: nn.Module, done: Callable[[nn.Module], None]
    ) -> torch.Tensor:
        ctx.remaining, ctx.module, ctx.done = remaining, module, done
        return x.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.remaining[0] -= 1
        if ctx.remaining[0] == 0:
            ctx.done(ctx.module)
        return gradients[0], None, None, None


class _Trace:
    """A recording: the modules of a step in order, and how far it is from each point to a parameter's use."""

    def __init__(self, modules: tuple[nn.Module, ...]) -> None:
        self.modules = modules
        self._uses: dict[int, list[int]] = {}
        sizes = [0]
        for index, module in enumerate(modules):
            parameters = list(iter_params(module, recurse=z3_leaf_module(module)))
            sizes.append(sum(p.ds_numel for p in parameters))
            for parameter in parameters:
                self._uses.setdefault(id(parameter), []).append(index)
        self._before = list(accumulate(sizes))

    def distance(self, parameter: Parameter, step: int) -> float:
        """Elements that modules from ``step`` on use before the next one that uses ``parameter``."""
        uses = self._uses.get(id(parameter), [])
        next_use = bisect_left(uses, step)
        return self._before[uses[next_use]] - self._before[step] if next_use < len(uses) else float("inf")


def _holder(stage: int) -> int:
    """Stands for a virtual stage among the ids of modules, which are not negative."""
    return -1 - stage
