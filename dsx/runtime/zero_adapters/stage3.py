"""ZeRO-3: parameters and gradients partitioned parameter by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partitioned_param_coordinator
from torch import nn

from dsx.runtime.chunks import TiedUse
from dsx.runtime.zero_adapters.gathering import StepGathers
from dsx.runtime.zero_adapters.hooks import GradientHooks
from dsx.runtime.zero_adapters.norm import NormScope, Refuses, all_reduce_sum
from dsx.spec.schedule import Schedule

if TYPE_CHECKING:
    from dsx.runtime.groups import Groups
    from dsx.runtime.pipeline_module import Tie


class Stage3Adapter:
    """Keeps accumulation straight across chunks; its norm also sums tied gradients first."""

    def __init__(self, engine: Any, scope: NormScope, ties: Sequence[Tie], gathers: StepGathers) -> None:
        self._engine, self._scope, self._ties, self.gathers = engine, scope, ties, gathers
        self._optimizer = engine.optimizer
        self._norm = torch.zeros(())
        self._refuses: Refuses | None = None
        self._fresh = True
        # Called once all gradients are final, on every path that leads to the update.
        self._optimizer._get_norm_groups = self._reduce_ties_and_norm  # noqa: SLF001
        self._hooks = GradientHooks(self._optimizer, "reduce_ready_partitions_and_remove_grads")
        for module in engine.module.modules():
            if isinstance(module, TiedUse):
                for parameter in module.tied_module.parameters():
                    deepspeed.zero.register_external_parameter(module, parameter)

    @property
    def reduced_here(self) -> bool:
        """Gradients are reduced and scattered in each backward."""
        return False

    def begin(self, schedule: Schedule) -> None:
        """Gather as the steps of ``schedule`` do."""
        self.gathers.begin(schedule)

    def before_action(self, position: int) -> None:
        """Keep what the action's chunk needs again soon."""
        self.gathers.before(position)

    def before_backward(self, stage: int) -> None:
        """Start each step from zeroed partitions and always add.

        DeepSpeed overwrites on a step's first micro-batch and tells it by counting forwards
        (stage3.py:2394-2407). Once two backwards follow each other, chunks take turns, or two chunks share a
        tied weight, that overwrites gradients or adds stale ones, silently.
        """
        del stage
        self._hooks.before_backward()
        if self._fresh:
            self._optimizer.grad_partitions_flat_buffer.zero_()
            self._fresh = False
        self._optimizer._epilogue_ran_this_backward = False  # noqa: SLF001
        self._optimizer.micro_step_id = 1

    def chunk_done(self, stage: int) -> None:
        """Gradients have been reduced and scattered as they came."""
        del stage

    def before_step(self, refuses: Refuses | None = None) -> None:
        """The next step starts from nothing."""
        self._refuses = refuses
        self._fresh = True

    def grad_norm(self) -> float:
        """Norm before clipping."""
        return float(self._norm)

    def _reduce_ties_and_norm(self) -> list[torch.Tensor]:
        """Stands in for ``_get_norm_groups``: one group, the whole model."""
        device = self._engine.device
        for tie in self._ties:
            ids = {id(parameter) for parameter in tie.parameters}
            for parameter, gradient in self._pieces():
                if id(parameter) in ids:
                    all_reduce_sum(gradient, tie.group, device)
        self._norm = self._scope.norm(self._pieces(), partitioned=True, device=device)
        refused = self._refuses is not None and self._refuses(self._norm)
        # A norm that is none makes DeepSpeed skip the step (stage3.py, step).
        norm = torch.full_like(self._norm, torch.nan) if refused else self._norm
        # Where the gradients are that it scales: torch multiplies none on the host by a number on a GPU.
        return [norm.to(self._optimizer.device)]

    def _pieces(self) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """(parameter, this rank's part of its gradient, padding included as zeros)."""
        optimizer = self._optimizer
        for index, parameters in enumerate(optimizer.fp16_groups):
            if optimizer.offload_optimizer:
                flat = optimizer.fp32_partitioned_groups_flat[index].grad
                for parameter in parameters:
                    _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                    yield parameter, flat.narrow(0, start, length)
            else:
                yield from zip(parameters, optimizer.averaged_gradients[index], strict=True)


def scope_consistency_checks(groups: Groups) -> None:
    """Compare ZeRO-3's traces over the data-parallel group only.

    The coordinator checks that all ranks gather the same parameters in the same order by a broadcast from
    world rank 0 (deepspeed/runtime/zero/utils.py, assert_ints_same_as_other_ranks); pipeline ranks rightly
    differ, so that the stock check deadlocks.
    """
    group, source, size = groups.data, groups.mesh.group_of(groups.rank, "dp")[0], groups.mesh.dp

    def same_over_data_parallel(ints: Sequence[int]) -> None:
        if size == 1:
            return
        device = torch.device(deepspeed.accelerator.get_accelerator().current_device_name())
        mine = torch.tensor([len(ints), *ints], dtype=torch.int64, device=device)
        length = mine[:1].clone()
        dist.broadcast(length, source, group=group)
        theirs = mine.clone() if int(length) == len(ints) else None
        agree = torch.tensor([theirs is not None], dtype=torch.int32, device=device)
        dist.all_reduce(agree, op=dist.ReduceOp.MIN, group=group)
        if bool(agree) and theirs is not None:
            dist.broadcast(theirs, source, group=group)
        if not bool(agree) or theirs is None or not torch.equal(mine, theirs):
            raise RuntimeError(
                f"ZeRO-3: data-parallel ranks gather different parameters; rank {groups.rank}: {list(ints)}"
            )

    partitioned_param_coordinator.assert_ints_same_as_other_ranks = same_over_data_parallel
