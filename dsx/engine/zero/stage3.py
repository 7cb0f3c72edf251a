"""ZeRO-3: parameters and gradients partitioned parameter by parameter, gathered as the schedule needs them.

Parameters are gathered ahead of use, and kept between uses under a budget, over a whole step of a schedule.
DeepSpeed records which modules run in what order and prefetches from the recording. It begins anew at every
forward of the engine's module, which under a pipeline is every forward of a chunk. What follows is never what
was recorded, so it records, discards and records again, compares each recording over the data-parallel ranks
(which waits for the device), and prefetches next to nothing. Here a recording is a step. Every step of a
schedule is the same, so the next action's parameters, of whichever chunk, are gathered while this one
computes.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import filterfalse, zip_longest
from typing import Any, TypeAlias

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from torch import nn

from dsx.engine.chunks import Tie
from dsx.engine.zero.calls import GradientHooks
from dsx.engine.zero.float32 import gradients_in_float32
from dsx.engine.zero.messages import empty, end_sum, start_sum
from dsx.engine.zero.reduction import LeftToDeepSpeed, ZeroAdapter
from dsx.engine.zero.replica_check import GradientPart
from dsx.errors import ConfigError, LayoutError
from dsx.nn.embedding import TiedUse
from dsx.nn.parallel import uncompiled
from dsx.nn.parameters import is_of_tower
from dsx.parallel.groups import Groups
from dsx.schedules.gathers import ChunkHolds, GatherPlan, StepTrace
from dsx.schedules.schedule import Schedule
from dsx.terminal import complain, printable

Parameter: TypeAlias = Any
"""An nn.Parameter with what ZeRO-3 adds to it (``ds_numel``, ``ds_persist``, ...)."""

_PRIVATE = "_PartitionedParameterCoordinator__"

_LOOK_SECONDS, _LOOKS_LATER = 2.0, 2.0
"""The first look at a step that does not go on, and how much later each further one comes."""

_REMEMBERED = 64
"""Modules that replicas which do not go on tell each other of: more than are gathered ahead."""


class FetchOrder:
    """The modules that this rank's step has gathered parameters for, beside the other replicas'.

    A layer that is skipped at random, by replicas whose generators differ, has each compute with parts of
    what the others gather. Where they run as many modules nobody notices; else they wait for each other.
    DeepSpeed compares all ranks, of which pipeline ranks rightly differ, by numbers that count the modules of
    every engine that a process has had; that goes.

    Args:
        varies: Whether layers may run other modules from step to step, as no layer of dsx's families does.
            A thread then looks at replicas that do not go on. Making it is a collective call over them.
    """

    def __init__(self, coordinator: Any, module: nn.Module, groups: Groups, *, varies: bool) -> None:
        partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
        self._groups, self._varies = groups, varies
        self._names = {inner: name for name, inner in module.named_modules()}
        self._step, self._run = 0, list[str]()
        self._recent: deque[Ran] = deque(maxlen=_REMEMBERED)
        if groups.mesh.num_replicas == 1:  # nobody to be compared with
            return
        fetch = coordinator.fetch_sub_module

        def noted(submodule: nn.Module, forward: bool) -> None:
            if any(True for _ in iter_params(submodule, recurse=z3_leaf_module(submodule))):
                name = self._names.get(submodule, "")
                self._run.append(name)
                if varies:
                    before = self._recent[-1][1] if self._recent else ""
                    chain = hashlib.blake2b(f"{before} {name}".encode(), digest_size=8).hexdigest()
                    self._recent.append((len(self._run), chain, name))
            fetch(submodule, forward)

        coordinator.fetch_sub_module = noted
        if varies:
            token = [os.urandom(8).hex()]
            ranks = dist.get_process_group_ranks(groups.data)
            dist.broadcast_object_list(token, src=ranks[0], group=groups.data)
            given = (weakref.ref(self), token[0], ranks.index(groups.rank), len(ranks))
            threading.Thread(target=_look, args=given, name="dsx ZeRO-3 order", daemon=True).start()

    def begin(self, *, known: bool) -> None:
        """A step begins; ``known``: whether DeepSpeed has a recording that all replicas have.

        A collective call over replicas unless it is, or where layers vary.

        Raises:
            LayoutError: The step before ran other modules on other replicas. On each of them.
        """
        run = self._run.copy()
        self._run.clear()
        self._recent.clear()
        self._step += 1
        size = self._groups.mesh.num_replicas
        if size == 1 or (known and not self._varies):
            return
        digest = int.from_bytes(hashlib.blake2b("\n".join(run).encode(), digest_size=7).digest(), "little")
        ends = torch.tensor([digest, -digest], device=get_accelerator().current_device_name())
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._groups.data)
        if int(ends.sum()):
            everywhere: list[list[str]] = [[]] * size
            dist.all_gather_object(everywhere, run, group=self._groups.data)
            raise _apart(next(pair for names in everywhere if (pair := _first(everywhere[0], names))), size)

    def told(self) -> tuple[int, list[Ran]]:
        """The number of the step, and its last modules so far."""
        return self._step, list(self._recent)


Ran = tuple[int, str, str]
"""A module that was run: its place in the step, a digest of those up to it, its name."""

Difference = tuple[int, str, str]
"""(place in the step, module that one replica ran there, that another one ran)."""


def _first(one: Sequence[str], other: Sequence[str]) -> Difference | None:
    pairs = enumerate(zip_longest(one, other, fillvalue="nothing more"), 1)
    return next(((place, *pair) for place, pair in pairs if pair[0] != pair[1]), None)


def _apart(found: Difference, size: int) -> LayoutError:
    place, one, other = found
    return LayoutError(
        f"ZeRO-3 over {size} replicas",
        f"replicas ran different layers in a step, as module {place} of it {one} and {other}: each gathers a "
        "part of what the others compute with",
        "have layers that are skipped at random skipped by all replicas together (seed their generators "
        "alike), or use zero_optimization.stage 2",
    )


def _parted(mine: Sequence[Ran], theirs: Sequence[Ran]) -> Difference | None:
    """Where two replicas have run different modules, if that is among the last ones of both."""
    there = {place: (digest, name) for place, digest, name in theirs}
    for place, digest, name in mine:
        same, other = there.get(place, (digest, name))
        if digest != same:
            return place, name, other
    return None


def _look(watched: weakref.ref[FetchOrder], token: str, replica: int, size: int) -> None:
    """End this process once it waits for a replica that has run other modules in the same step.

    Each replica looks at the next one: of a ring of which not all are alike, some pair is not.
    """
    with suppress(RuntimeError, OSError):  # the store has gone: its host ends, which others tell of
        # A connection of its own: the run's may be waiting. torch has no public name for the store.
        store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001
        store = store.clone()
        mine, next_one = (f"dsx ZeRO-3 order {token} {number % size}" for number in (replica, replica + 1))
        before, seconds, wait = None, _LOOK_SECONDS, threading.Event()
        while not wait.wait(seconds) and (order := watched()) is not None and dist.is_initialized():
            now = order.told()
            del order  # which may end
            stands, before = now == before, now
            seconds = seconds * _LOOKS_LATER if stands else _LOOK_SECONDS
            if not stands:
                continue
            store.set(mine, json.dumps(now))
            if not store.check([next_one]):
                continue
            step, ran = json.loads(store.get(next_one))
            if step == now[0] and (found := _parted(now[1], ran)):
                complain(f"error: {printable(str(_apart(found, size)))}", raw=True)
                os._exit(1)


class StepGathers(LeftToDeepSpeed):
    """Controls what DeepSpeed's coordinator of ZeRO-3 gathers and frees in the steps of schedules.

    Args:
        uses: Virtual stage of this rank -> parameters that its layers use.
        varies: As of :class:`FetchOrder`.
        budget_bytes: Memory for parameters that stay gathered between actions of their chunk. 0 leaves the
            choice to ``stage3_max_reuse_distance``.

    Raises:
        ConfigError: A budget with parameters on NVMe, whose buffers follow DeepSpeed's own order.
    """

    def __init__(
        self,
        optimizer: Any,
        uses: Mapping[int, Iterable[Parameter]],
        groups: Groups,
        budget_bytes: int,
        *,
        varies: bool,
    ) -> None:
        if budget_bytes and optimizer.parameter_offload.offload_device == OffloadDeviceEnum.nvme:
            raise ConfigError(
                f"dsx.zero.keep_gathered_bytes = {budget_bytes}",
                "parameters on NVMe come through a few buffers that kept ones would fill",
                'use 0, or "offload_param": {"device": "cpu"}',
            )
        self._coordinator = optimizer.parameter_offload.get_param_coordinator()
        self._pp_rank, self._budget_bytes = groups.pp_rank, budget_bytes
        self._order = FetchOrder(self._coordinator, optimizer.parameter_offload.module, groups, varies=varies)
        self.holds: ChunkHolds[Parameter] = ChunkHolds(
            uses,
            persistent=lambda p: bool(p.ds_persist),
            size_bytes=lambda p: int(p.ds_numel * p.element_size()),
            budget_bytes=budget_bytes,
        )
        self._plans: list[tuple[Schedule, GatherPlan]] = []
        self._schedule: Schedule | None = None
        self._traced: tuple[nn.Module, ...] = ()
        self._trace: StepTrace[Parameter] = StepTrace(())
        optimizer.parameter_offload.fwd_pre_hook.remove()  # the reset at every forward
        setattr(self._coordinator, f"{_PRIVATE}params_to_release", self._releasable)
        self._release_leftovers = self._coordinator.release_backward_leftovers
        self._coordinator.release_backward_leftovers = self._release_rest
        _release_after_every_backward(optimizer.parameter_offload)

    def begin(self, schedule: Schedule) -> None:
        """A step of ``schedule`` begins. A collective call over data parallelism when it is a new one.

        Its first step records, later ones prefetch from the recording; steps of another schedule between
        them (an evaluation) make it record once more.

        Raises:
            LayoutError: The step before ran other modules on other data-parallel ranks. On each of them.
        """
        self._order.begin(known=self._coordinator.is_complete_trace())
        if schedule is not self._schedule and not self._coordinator.is_invalid_trace():
            self._coordinator._invalidate_trace()  # noqa: SLF001
        self._schedule = schedule
        self._coordinator.reset_step()
        self._keep(frozenset())

    def before_action(self, position: int) -> None:
        """Hold what the plan keeps after the action at ``position`` of this rank's row, which comes next."""
        if self._budget_bytes and self._schedule is not None:
            self._keep(self.plan(self._schedule).kept[position])
            self._look_again()

    def plan(self, schedule: Schedule) -> GatherPlan:
        """The plan of what stays gathered when, in a step of ``schedule``."""
        for known, plan in self._plans:
            if known is schedule:
                return plan
        plan = self.holds.plan(schedule.rows[self._pp_rank])
        self._plans.append((schedule, plan))
        return plan

    def _keep(self, stages: frozenset[int]) -> None:
        """Keep parameters by posing as a module that works with them, which DeepSpeed takes none from.

        What is no longer kept goes when the modules of the coming action are done with it.
        """
        gone, held = self.holds.change(stages)
        for stage, parameter in gone:
            parameter.ds_active_sub_modules.discard(_holder(stage))
        for stage, parameter in held:
            parameter.ds_active_sub_modules.add(_holder(stage))

    def _look_again(self) -> None:
        """Have prefetching start from here.

        Prefetching takes each use off a queue once, even if the parameter is there at that moment. What the
        plan frees before that use has to be found again.
        """
        coordinator = self._coordinator
        if coordinator.is_complete_trace():
            order = getattr(coordinator, f"{_PRIVATE}param_order")
            step = getattr(coordinator, f"{_PRIVATE}step_id")
            here = bisect_left(order, step, key=lambda use: use.step_id_last_used_at)
            setattr(coordinator, f"{_PRIVATE}param_queue", deque(order[here:]))
            getattr(coordinator, f"{_PRIVATE}most_recent_step_id_param_fetched_for").clear()

    def _releasable(self, submodule: nn.Module, step: int) -> set[int]:
        """Replaces ``__params_to_release``: ids of the parameters to free after ``submodule``.

        It has the same rule (a parameter stays if it is used again within the reuse distance, or if
        prefetching has passed over that use because it was there), without a walk from each module over the
        rest of the step, which is now long. With a budget the plan alone decides.
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
        """After a backward, free by the same rule for modules whose inputs get no gradient."""
        if not self._coordinator.is_complete_trace():
            self._release_leftovers()
            return
        active = getattr(self._coordinator, f"{_PRIVATE}active_backward_submodules")
        for module in list(reversed(active.values())):
            self._coordinator.release_sub_module(module, forward=False)

    def _trace_of_step(self) -> StepTrace[Parameter]:
        order = getattr(self._coordinator, f"{_PRIVATE}submodule_order")
        if self._traced is not order:
            self._traced = order
            self._trace = StepTrace(
                [(p, p.ds_numel) for p in iter_params(module, recurse=z3_leaf_module(module))]
                for module in order
            )
        return self._trace


def _release_after_every_backward(offload: Any) -> None:
    """Free each module's parameters when its backward is done, in every micro-batch.

    DeepSpeed counts the inputs whose gradients are to come on the module, from nothing at each forward
    (parameter_offload.py, _post_backward_module_hook). With several forwards under way the count goes below
    zero at the second backward and its release never comes: the whole chunk stays gathered to the end of its
    backward. Here each forward has a count of its own.
    """
    for module in offload.module.modules():
        if "post_bwd_fn" in vars(module):
            module.post_bwd_fn = _Inputs(module, offload.post_sub_module_backward_function)


class _Inputs:
    """Replaces DeepSpeed's PostBackwardFunctionModule of one module."""

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


def _reduce_with_input(leaf: nn.Module) -> None:
    """Have the gradients of a leaf reduced once that of its hidden states has come.

    DeepSpeed has torch tell it, for which a backward ends before it begins where no argument wants a
    gradient: none does inside a tuple, nor in a first block behind a frozen embedding (torch/utils/hooks.py).
    """
    hooks: dict[int, Any] = leaf._backward_hooks  # noqa: SLF001 (DeepSpeed holds handles alone)
    theirs = [key for key, hook in hooks.items() if hook.__name__ == "reduce_leaf_module_grads"]
    for reduce in [hooks.pop(key) for key in theirs]:
        done = partial(reduce, grad_input=None, grad_output=None)

        def begun(given: Any, done: Callable[[nn.Module], None] = done) -> Any:
            if isinstance(given, tuple) and given:
                return begun(given[0], done), *given[1:]
            if not torch.is_grad_enabled() or not torch.is_floating_point(given):
                return given
            x = given if given.requires_grad else given.detach().requires_grad_()
            return _AfterBackward.apply(x, [1], leaf, done)

        def before(_: nn.Module, given: Any, named: dict[str, Any]) -> Any:
            if given:
                return begun(given), named
            name = next(iter(named))
            return given, {**named, name: begun(named[name])}

        leaf.register_forward_pre_hook(partial(uncompiled, before), with_kwargs=True)


def _holder(stage: int) -> int:
    """Stands for a virtual stage among the ids of modules, which are not negative."""
    return -1 - stage


class Stage3Adapter(ZeroAdapter):
    """Gradients that each backward reduces and scatters, parameter by parameter."""

    def attach(self) -> None:
        """Have DeepSpeed ask for the norm once all gradients are final, on every path to the update."""
        self._optimizer._get_norm_groups = self._reduce_ties_and_norm  # noqa: SLF001
        self._hooks = GradientHooks(self._optimizer, "reduce_ready_partitions_and_remove_grads")
        self._wide_sums = gradients_in_float32(self._optimizer)
        optimizer, scatter = self._optimizer, "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
        replicas = self._scope.groups.mesh.num_replicas
        # Of experts too, whose gradients are of all tokens of those that hold them together.
        optimizer._gradient_averaging_world_size = lambda _parameters, _ranks: replicas  # noqa: SLF001
        predivides = optimizer.postscale_gradients and optimizer.gradient_predivide_factor != 1.0
        if self._device.type == "cpu" and not predivides and optimizer.all2all_process_group is None:
            setattr(optimizer, scatter, self._scattered)
        for module in self._engine.module.modules():
            if z3_leaf_module(module):
                _reduce_with_input(module)
            if isinstance(module, TiedUse):
                for parameter in filterfalse(is_of_tower, module.tied_module.parameters()):
                    deepspeed.zero.register_external_parameter(module, parameter)

    def before_backward(self) -> None:
        """Start each step from zeroed partitions and always add.

        DeepSpeed overwrites on a step's first micro-batch and tells it by counting forwards
        (stage3.py:2394-2407). Once two backwards follow each other, chunks take turns, or two chunks share a
        tied weight, that overwrites gradients or adds stale ones, silently.
        """
        self._hooks.before_backward()
        if self._fresh:
            for sums in filter(
                torch.is_tensor, (self._optimizer.grad_partitions_flat_buffer, self._wide_sums)
            ):
                sums.zero_()
            self._fresh = False
        self._optimizer._epilogue_ran_this_backward = False  # noqa: SLF001
        self._optimizer.micro_step_id = 1

    def _scattered(self, parameters: Sequence[Any], wire: torch.dtype) -> list[torch.Tensor]:
        """This rank's parts of the averages of parameters' gradients, sent by messages (between CPUs).

        Stands in for ``__avg_scatter_grads``. A part has the same number of elements on every rank, but for
        the last ones, which have what is left.
        """
        group = self._optimizer._get_param_partition_group(parameters[0])  # noqa: SLF001
        ranks, own = dist.get_world_size(group), dist.get_rank(group)
        averages = [parameter.grad.view(-1).to(wire) for parameter in parameters]
        share = 1.0 / self._scope.groups.mesh.num_replicas
        if ranks == 1 and share != 1.0:
            averages = [gradient * share for gradient in averages]
        elif ranks > 1:
            sizes = [-(-gradient.numel() // ranks) for gradient in averages]
            pieces = [
                [
                    gradient[rank * size : (rank + 1) * size]
                    for gradient, size in zip(averages, sizes, strict=True)
                ]
                for rank in range(ranks)
            ]
            lengths = [[piece.numel() for piece in its] for its in pieces]
            parts = empty(sum(map(sum, lengths)), wire, self._device).split([sum(its) for its in lengths])
            for rank, part in enumerate(parts):
                for piece, place in zip(pieces[rank], part.split(lengths[rank]), strict=True):
                    torch.mul(piece, share, out=place)
            end_sum(parts[own], *start_sum(group, parts))
            averages = list(parts[own].split(lengths[own]))
        return [average.to(self._optimizer.gradient_accumulation_dtype) for average in averages]

    def _reduce_ties_and_norm(self) -> list[torch.Tensor]:
        """Replaces ``_get_norm_groups`` by one group, the whole model, once ties are summed."""
        self.sum_ties(self._tied())
        scaled = self.take_norm(self._parts(), partitioned=True)
        # A norm that is none makes DeepSpeed skip the step (stage3.py, step).
        norm = torch.full_like(scaled, torch.nan) if self.loss_scale.refused else scaled
        # Where the gradients are that it scales: torch multiplies none on the host by a number on a GPU.
        return [norm.to(self._optimizer.device)]

    def _tied(self) -> Iterator[tuple[Tie, torch.Tensor]]:
        for tie in self._ties:
            ids = {id(parameter) for parameter in tie.parameters}
            yield from ((tie, part.gradient) for part in self._parts() if id(part.parameter) in ids)

    def _parts(self) -> Iterator[GradientPart]:
        """This rank's parts, padded with zeros, because each parameter is cut into equal parts."""
        optimizer = self._optimizer
        for index, parameters in enumerate(optimizer.fp16_groups):
            rank = dist.get_rank(optimizer.sub_group_process_groups[index])
            if optimizer.offload_optimizer:
                flat = optimizer.fp32_partitioned_groups_flat[index].grad
                for parameter in parameters:
                    _, start, length = optimizer.grad_position[optimizer.get_param_id(parameter)]
                    yield GradientPart(parameter, flat.narrow(0, start, length), rank * length)
            else:
                for parameter, gradient in zip(parameters, optimizer.averaged_gradients[index], strict=True):
                    yield GradientPart(parameter, gradient, rank * gradient.numel())


def share_groups(wrapper: Any) -> None:
    """Have the second optimizer of a partly offloaded ZeRO-3 follow the first one's settings.

    It steps what stays on the GPU (``offload_optimizer.ratio``), and its first group is a copy, which no
    schedule reaches (stage3.py:317). Both may have the same groups: each step puts its parameters into them
    and takes them out again (stage3.py, _optimizer_step).
    """
    second = getattr(wrapper, "backup_optimizer", None)
    if second is not None:
        second.param_groups.clear()
        second.state.clear()
        for group in wrapper.optimizer.param_groups:
            second.add_param_group(group)
