"""ZeRO-1 and ZeRO-2: flat parameter groups, each data-parallel rank owning an interval of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero import stage_1_and_2
from torch import nn

from dsx.engine.chunks import Tie
from dsx.engine.zero.calls import GradientHooks
from dsx.engine.zero.master_shards import master_shards
from dsx.engine.zero.messages import empty, share_weights, write_sum
from dsx.engine.zero.reduction import ZeroAdapter
from dsx.engine.zero.replica_check import GradientPart
from dsx.errors import ConfigError


class PartitionedAdapter(ZeroAdapter):
    """Whole gradients accumulate on this rank, which keeps its intervals of them once they are reduced.

    The intervals of a group lie in one flat tensor, which is what the optimizer updates with. Where dsx
    reduces gradients and nothing is offloaded, the step is :meth:`_step`.

    Tied weights sit in parameter groups of their own (:func:`dsx.engine.optimizers.split_groups`), so
    that their interval of the gradient is the same on every pipeline rank that holds a copy.
    """

    def attach(self) -> None:
        """Sum tied gradients at the beginning of a step, and replace the optimizer's norm by dsx's.

        Raises:
            ConfigError: Tied weights are in other groups, because the user's optimizer was built in another
                way, or the optimizer cannot have them.
        """
        optimizer = self._optimizer
        # Sums in another precision than the parameters' are kept by hooks.
        self.needs_backward = optimizer.use_separate_grad_accum or optimizer.use_grad_accum_attribute
        self._spans = [each.spans for each in master_shards(self._engine)]
        self._places = {id(span.parameter): (at, span) for at, its in enumerate(self._spans) for span in its}
        trained = set(self._engine.module.parameters())
        self._reduced = [[span for span in its if span.parameter in trained] for its in self._spans]
        self._flat: dict[int, torch.Tensor] = {}
        self._own = self.hooks.by_dsx and not optimizer.cpu_offload
        if self._own and torch.device(optimizer.device).type == "cpu":
            optimizer.update_lp_params = partial(
                share_weights,
                optimizer.single_partition_of_fp32_groups,
                optimizer.parallel_partitioned_bit16_groups,
                optimizer.real_dp_process_group,
            )
        tied = [(tie, index) for tie in self._ties for index in self._groups_of(tie)]
        step = self._step if self._own else optimizer.step

        def step_with_ties(_optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._norm = torch.full((), torch.nan)  # until computed, if it is
            # The one moment at which gradients are final and not yet used, at every stage and with offload.
            if tied and optimizer.cpu_offload:
                optimizer._wait_for_offload_copies()  # noqa: SLF001
            self.sum_ties((tie, part) for tie, index in tied for part in self._of_group(index))
            return step(*args, **kwargs)

        optimizer.step = MethodType(step_with_ties, optimizer)  # torch's schedules wrap methods
        optimizer.scaled_global_norm = self._global_norm
        if self.hooks.by_dsx:
            optimizer.process_gradients = lambda parameter, _: self.accumulate(parameter)
            if optimizer.cpu_offload:  # of the largest parameter's size, for DeepSpeed's own way to the host
                optimizer.temp_grad_buffer_for_gpu_offload = optimizer.temp_grad_buffer_for_cpu_offload = None
        self._hooks = GradientHooks(optimizer, "process_gradients", prepare=optimizer.setup_buckets)

    def _step(self) -> None:
        """DeepSpeed's step (stage_1_and_2.py), with what is left to do where gradients lie as they are used.

        A gradient that is not finite shows in the norm, which DeepSpeed asks too: nothing else looks for it.
        """
        optimizer, norm = self._optimizer, None
        optimizer.micro_step_id = stage_1_and_2.INITIAL_MICRO_STEP_ID
        optimizer.overflow, optimizer._global_grad_norm = False, None  # noqa: SLF001
        if optimizer.compute_grad_norm:
            norm = self._global_norm()
            if optimizer.check_grad_overflow or optimizer.dtype != torch.bfloat16:
                optimizer.overflow |= is_invalid_grad_norm(norm)
        elif optimizer.check_grad_overflow:
            optimizer.averaged_gradients = {group: [flat] for group, flat in self._flat.items()}
            optimizer.check_overflow(partition_gradients=optimizer.partition_gradients)
            optimizer.averaged_gradients.clear()
        scale = optimizer.loss_scale
        optimizer._update_scale(optimizer.overflow)  # noqa: SLF001
        if optimizer.overflow:
            self._flat.clear()
            optimizer._global_grad_norm = math.inf if optimizer.compute_grad_norm else None  # noqa: SLF001
            for timer in stage_1_and_2.OPTIMIZER_TIMERS:
                with self._timed(timer):
                    pass
            return
        if norm is not None:
            optimizer._global_grad_norm = norm / scale  # noqa: SLF001
        for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
            with self._timed(stage_1_and_2.OPTIMIZER_GRADIENTS_TIMER):
                master.grad = self._flat.pop(group).to(master.dtype)
                optimizer.unscale_and_clip_grads([master.grad], norm)
            with self._timed(stage_1_and_2.OPTIMIZER_STEP_TIMER):
                optimizer._optimizer_step(group)  # noqa: SLF001
                master.grad = None
        with self._timed(stage_1_and_2.OPTIMIZER_ALLGATHER_TIMER):
            optimizer.update_lp_params()
        for group in range(len(optimizer.bit16_groups)):
            optimizer._update_model_bit16_weights(group)  # noqa: SLF001 (where a program has replaced ``p.data``)
        optimizer.timers.log(stage_1_and_2.OPTIMIZER_TIMERS)

    @contextmanager
    def _timed(self, timer: str) -> Iterator[None]:
        self._optimizer.timers(timer).start()
        try:
            yield
        finally:
            self._optimizer.timers(timer).stop()

    def accumulate(self, parameter: nn.Parameter) -> None:
        """Add a gradient that has come, in the precision that the user wants sums in."""
        if not self._optimizer.use_separate_grad_accum:
            return
        gradient, parameter.grad = parameter.grad, None
        dtype, total = self._optimizer.gradient_accumulation_dtype, parameter.grad_accum  # type: ignore[attr-defined]
        if total is None:
            parameter.grad_accum = gradient.to(dtype)  # type: ignore[attr-defined,union-attr]
        else:
            # What is narrower than the sum is added without a copy of the sum's width.
            narrower = torch.promote_types(dtype, gradient.dtype) == dtype  # type: ignore[union-attr]
            total.add_(gradient if narrower else gradient.to(dtype))  # type: ignore[union-attr]

    def take(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The sum over micro-batches."""
        found: torch.Tensor | None = parameter.grad
        parameter.grad = None
        if self._optimizer.use_separate_grad_accum:
            found, parameter.grad_accum = parameter.grad_accum, None  # type: ignore[attr-defined]
        return found

    def put(self, parameter: nn.Parameter, start: int, *parts: torch.Tensor) -> None:
        """Keep an average of this rank's interval."""
        if place := self._places.get(id(parameter)):
            group, span = place
            at = span.offset + start - span.start
            mine = self._buffer(group).narrow(0, at, parts[0].numel())
            write_sum(mine, *parts)
            if self._optimizer.cpu_offload:  # DeepSpeed waits for such copies as its step begins
                self._optimizer._record_offload_copy()  # noqa: SLF001

    def complete(self) -> None:
        """Have a buffer for every group before the step, of zeros where no parameter is this rank's."""
        for group in range(len(self._optimizer.bit16_groups)):
            self._buffer(group)

    def _buffer(self, group: int) -> torch.Tensor:
        """This rank's interval of a group's gradient, flat; zeros where nothing is put."""
        if self._optimizer.cpu_offload:
            return self._optimizer.single_partition_of_fp32_groups[group].grad  # type: ignore[no-any-return]
        if group not in self._flat:
            optimizer = self._optimizer
            own = optimizer.bit16_groups[group][0].dtype
            dtype = torch.promote_types(optimizer.gradient_accumulation_dtype, own)
            form = dtype, torch.device(optimizer.device)
            flat = self._flat[group] = empty(optimizer.partition_size[group], *form)
            end = 0
            for span in self._reduced[group]:
                flat[end : span.offset].zero_()
                end = span.offset + span.stop - span.start
            flat[end:].zero_()
        return self._flat[group]

    def forget(self) -> None:
        """What DeepSpeed has summed of the step, too."""
        super().forget()
        self._flat.clear()
        for sums in (self._optimizer.averaged_gradients, self._optimizer.all_grad_tensors):
            sums.clear()

    def came_late(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient has come since, so that there is a sum again."""
        return parameter.grad is not None or getattr(parameter, "grad_accum", None) is not None

    def before_backward(self) -> None:
        """Where DeepSpeed reduces with offload, start each step from zeroed accumulators and always add.

        DeepSpeed overwrites on a step's first micro-batch, told by a counter that chunks and shared weights
        upset; ``setup_buckets`` adds one to it before it is read (stage_1_and_2.py:3258, 1855).
        """
        self._hooks.before_backward()
        if not self._optimizer.cpu_offload or self.hooks.by_dsx:
            return
        if self._fresh:
            for accumulator in self._optimizer.accumulated_grads_in_cpu.values():
                accumulator.zero_()
            for partition in self._optimizer.single_partition_of_fp32_groups:
                partition.grad.zero_()  # parameters without a gradient in this step keep the last one's
            self._fresh = False
        self._optimizer.micro_step_id = 0

    def _global_norm(self, norm_type: int = 2) -> torch.Tensor:
        """Stands in for ``scaled_global_norm``."""
        assert norm_type == 2, "only the 2-norm is defined here"
        scaled = self.take_norm(self._parts(), partitioned=True)
        if self.loss_scale.refused:
            self._optimizer.overflow = True  # read after this (stage_1_and_2.py, step)
        # Where the gradients are that it scales: torch multiplies none on the host by a number on a GPU.
        return scaled.to(self._optimizer.device)

    def _groups_of(self, tie: Tie) -> list[int]:
        """The optimizer's groups that hold ``tie``'s weights, and nothing else."""
        tied = {id(parameter) for parameter in tie.parameters}
        found = []
        for index, group in enumerate(self._optimizer.bit16_groups):
            members = {id(parameter) for parameter in group}
            if members & tied:
                found.append(index)
            if members & tied and any(getattr(parameter, "use_muon", False) for parameter in group):
                raise ConfigError(
                    "optimizer = Muon",
                    f"ZeRO-1 and 2 take its update before tied gradients ({tie.key!r}) are summed",
                    "use ZeRO-0, another optimizer, or one pipeline rank for all uses of the tied weight",
                )
            if members & tied and members - tied:
                raise ConfigError(
                    f"optimizer = {type(self._optimizer.optimizer).__name__}",
                    f"the tied weight {tie.key!r} shares a parameter group with others, which ZeRO-1 and 2 "
                    "cut as one",
                    "give initialize() the optimizer itself, or a callable that keeps the groups it is given",
                )
        return found

    def _of_group(self, index: int) -> list[torch.Tensor]:
        """This rank's interval of group ``index``'s gradient, as the tensors that hold it."""
        if self._optimizer.cpu_offload:
            return [self._optimizer.single_partition_of_fp32_groups[index].grad]
        if self._own:
            return [self._flat[index]]
        return [t for t in self._optimizer.averaged_gradients[index] if t is not None and t.numel()]

    def _parts(self) -> Iterator[GradientPart]:
        """This rank's intervals of all groups, in which the first parameter may begin midway."""
        optimizer = self._optimizer
        for index, spans in enumerate(self._spans):
            if optimizer.cpu_offload or self._own:
                (flat,) = self._of_group(index)
                gradients = [flat.narrow(0, span.offset, span.stop - span.start) for span in spans]
            else:
                gradients = [
                    g for g in optimizer.averaged_gradients[index] if not getattr(g, "_zero_padding", False)
                ]
            for span, gradient in zip(spans, gradients, strict=False):
                yield GradientPart(span.parameter, gradient, span.start)
