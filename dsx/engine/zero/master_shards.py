"""The part of each parameter that a rank keeps in fp32, for each of DeepSpeed's optimizer wrappers.

This is the one place that knows where DeepSpeed 0.19.8 has its master weights. Sources below
deepspeed/runtime: zero/stage_1_and_2.py and bf16_optimizer.py (one flat partition per group), zero/stage3.py
(sub-groups of parameters, each cut by itself), fp16/fused_optimizer.py (one flat tensor per group),
fp16/unfused_optimizer.py and plain torch optimizers (a tensor per parameter).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsx.parallel.zero import ZeroPlan


@dataclass(frozen=True, slots=True)
class ParameterSpan:
    """Elements ``start`` to ``stop`` of a flattened local parameter, at ``offset`` in a flat tensor."""

    parameter: nn.Parameter
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MasterShard:
    """One fp32 tensor that the optimizer updates.

    Attributes:
        master: The tensor; flattened, it has the elements that ``spans`` name, and padding.
        spans: The parts of parameters that it holds.
        optimizer: Whose ``state[master]`` has its moments.
    """

    master: torch.Tensor
    group: int
    spans: tuple[ParameterSpan, ...]
    optimizer: torch.optim.Optimizer

    def moments(self) -> dict[str, torch.Tensor]:
        """Optimizer states as large as the master, flattened, by the optimizer's own name."""
        return {
            name: value.view(-1)
            for name, value in self._state().items()
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == self.master.numel()
        }

    def numbers(self) -> dict[str, float]:
        """Optimizer states that are one number, such as ``step``."""
        return {
            name: float(value)
            for name, value in self._state().items()
            if isinstance(value, (int, float)) or (isinstance(value, torch.Tensor) and not value.dim())
        }

    def make(self, moments: Sequence[str], numbers: Mapping[str, float]) -> None:
        """Set the states: moments of zeros where there are none, numbers of the kind that is used."""
        state = self.optimizer.state[self.master]
        for name in moments:
            if name not in state:
                state[name] = torch.zeros_like(self.master, memory_format=torch.preserve_format)
        group = self.optimizer.param_groups[self.group]
        read_by_kernels = group.get("capturable") or group.get("fused")
        for name, number in numbers.items():
            # As torch.optim loads it (optimizer.py, _process_value_according_to_param_policy).
            device = torch.device("cpu") if name == "step" and not read_by_kernels else self.master.device
            if name not in state or isinstance(state[name], torch.Tensor):
                state[name] = torch.tensor(number, dtype=torch.float32, device=device)
            else:
                state[name] = type(state[name])(number)

    def _state(self) -> Mapping[str, Any]:
        # .get: asking a defaultdict for it would make it.
        found: Mapping[str, Any] = self.optimizer.state.get(self.master, {})
        return found


def master_shards(engine: Any) -> tuple[MasterShard, ...]:
    """Every master of this rank, in the optimizer's order; none without an optimizer."""
    wrapper = engine.optimizer
    if wrapper is None:
        return ()
    _, masters = _KINDS.get(type(wrapper).__name__, ("", _plain))
    return tuple(masters(wrapper))


def trained_parameters(engine: Any) -> Iterator[nn.Parameter]:
    """Every parameter that an optimizer of this rank's ZeRO group updates, whichever of them holds it."""
    wrapper = engine.optimizer
    if wrapper is None:
        return
    if (kind := type(wrapper).__name__) in _KINDS:
        for group in getattr(wrapper, _KINDS[kind][0]):
            yield from group
    else:
        for group in wrapper.param_groups:
            yield from filter(_is_trained(wrapper), group["params"])


def refresh_weights(engine: Any) -> None:
    """Make the weights that the model computes with what the masters say. Collective over each ZeRO group."""
    wrapper = engine.optimizer
    kind = type(wrapper).__name__
    with torch.no_grad():
        if kind in ("DeepSpeedZeroOptimizer", "BF16_Optimizer"):
            wrapper.update_lp_params()
        elif kind == "DeepSpeedZeroOptimizer_Stage3":
            _refresh_partitions(wrapper)
        elif kind == "FP16_Optimizer":
            for low, high in zip(wrapper.fp16_groups_flat, wrapper.fp32_groups_flat, strict=True):
                low.copy_(high)
        elif kind == "FP16_UnfusedOptimizer":
            for lows, highs in zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True):
                for low, high in zip(lows, highs, strict=True):
                    low.copy_(high)


def adopt_weights(engine: Any) -> None:
    """Make the masters what the model's weights are, which somebody has changed. Not at ZeRO-3."""
    with torch.no_grad():
        for part in master_shards(engine):
            flat = part.master.view(-1)
            for span in part.spans:
                weights = span.parameter.detach().view(-1)[span.start : span.stop]
                flat[span.offset : span.offset + weights.numel()].copy_(weights)


def _refresh_partitions(wrapper: Any) -> None:
    for low, high in zip(
        wrapper.fp16_partitioned_groups_flat, wrapper.fp32_partitioned_groups_flat, strict=True
    ):
        low.data.copy_(high.data)
    # Parameters below the persistence threshold are never given back: gather them anew (stage3.py, step).
    if wrapper.persistent_parameters:
        wrapper.persistent_parameters[0].partition(wrapper.persistent_parameters, has_been_updated=False)
        wrapper.persistent_parameters[0].all_gather(wrapper.persistent_parameters)


def owners(engine: Any) -> dict[nn.Parameter, list[tuple[int, int, int]]]:
    """ZeRO-1 and 2: the data-parallel ranks that update a parameter, each with its interval, in order.

    A rank is its place in the process group of the parameter's optimizer group. An interval is its first
    element of the flattened parameter, and the one after its last.
    """
    wrapper = engine.optimizer
    cuts = _bf16_cuts if type(wrapper).__name__ == "BF16_Optimizer" else _zero_1_and_2_cuts
    return {
        parameters[name]: intervals
        for plan, parameters in cuts(wrapper)
        for name, intervals in plan.owners().items()
    }


_Cut = tuple[ZeroPlan, dict[str, nn.Parameter]]


def _cut(
    groups: Sequence[Sequence[nn.Parameter]], stage: int, process_group: Any = None, **options: Any
) -> _Cut:
    """How :class:`ZeroPlan` cuts groups (stage 0: parameters), and its names for parameters.

    Without a process group one rank keeps all.
    """
    names = {f"{at}.{index}": p for at, group in enumerate(groups) for index, p in enumerate(group)}
    plan = ZeroPlan(
        stage=stage,
        dp=1 if process_group is None else dist.get_world_size(process_group),
        groups=tuple(
            tuple((f"{at}.{index}", getattr(p, "ds_numel", p.numel())) for index, p in enumerate(group))
            for at, group in enumerate(groups)
        ),
        **options,
    )
    return plan, names


def _spans(cut: _Cut, process_group: Any = None) -> list[tuple[ParameterSpan, ...]]:
    """What this rank keeps of each group (stage 0: of each parameter)."""
    plan, names = cut
    return [
        tuple(
            ParameterSpan(names[piece.name], piece.start, piece.stop, piece.offset)
            for piece in buffer.pieces
            if not hasattr(names[piece.name], "dsx_spare")
        )
        for buffer in plan.buffers(0 if process_group is None else dist.get_rank(process_group))
    ]


def _cuts(
    groups: Sequence[Sequence[nn.Parameter]], ranks: Sequence[Any], stage: int, **options: Any
) -> list[_Cut]:
    """Each group's, over the process group of its own."""
    return [_cut([group], stage, its, **options) for group, its in zip(groups, ranks, strict=True)]


def _zero_1_and_2_cuts(wrapper: Any) -> list[_Cut]:
    groups = wrapper.bit16_groups
    aligned, round_robin = 16 if wrapper.parameter_alignment else 0, bool(wrapper.round_robin_gradients)
    return [
        _cut([group], 1, its, alignment=max(1, aligned // group[0].element_size()), round_robin=round_robin)
        for group, its in zip(groups, wrapper.real_dp_process_group, strict=True)
    ]


def _bf16_cuts(wrapper: Any) -> list[_Cut]:
    return _cuts(wrapper.bf16_groups, wrapper.real_dp_process_group, 1)


def _of_groups(
    wrapper: Any,
    cuts: Sequence[_Cut],
    ranks: Sequence[Any],
    masters: Sequence[torch.Tensor],
    numbers: Mapping[int, int] | None = None,
) -> Iterator[MasterShard]:
    """The masters of flat groups; ``numbers`` are the optimizer's of those that are parts of its groups."""
    for index, (cut, its, master) in enumerate(zip(cuts, ranks, masters, strict=True)):
        (spans,) = _spans(cut, its)
        group = index if numbers is None else numbers[index]
        yield MasterShard(master=master, group=group, spans=spans, optimizer=wrapper.optimizer)


def _zero_1_and_2(wrapper: Any) -> Iterator[MasterShard]:
    ranks, masters = wrapper.real_dp_process_group, wrapper.single_partition_of_fp32_groups
    yield from _of_groups(wrapper, _zero_1_and_2_cuts(wrapper), ranks, masters)


def _bf16(wrapper: Any) -> Iterator[MasterShard]:
    ranks, masters = wrapper.real_dp_process_group, wrapper.fp32_groups_flat_partition
    yield from _of_groups(wrapper, _bf16_cuts(wrapper), ranks, masters)


def _zero_3(wrapper: Any) -> Iterator[MasterShard]:
    """Sub-groups are cut parameter by parameter, as a group that nothing closes."""
    ranks = wrapper.sub_group_process_groups
    cuts = _cuts(wrapper.fp16_groups, ranks, 3, sub_group_size=sys.maxsize)
    numbers = wrapper.sub_group_to_group_id
    yield from _of_groups(wrapper, cuts, ranks, wrapper.fp32_partitioned_groups_flat, numbers)


def _flat_groups(wrapper: Any) -> Iterator[MasterShard]:
    spans = _spans(_cut(wrapper.fp16_groups, 1))
    for group, (master, its) in enumerate(zip(wrapper.fp32_groups_flat, spans, strict=True)):
        yield MasterShard(master=master, group=group, spans=its, optimizer=wrapper.optimizer)


def _copies(wrapper: Any) -> Iterator[MasterShard]:
    for group, (parameters, masters) in enumerate(zip(wrapper.fp16_groups, wrapper.fp32_groups, strict=True)):
        for master, its in zip(masters, _spans(_cut([parameters], 0)), strict=True):
            yield MasterShard(master=master, group=group, spans=its, optimizer=wrapper.optimizer)


def _plain(optimizer: torch.optim.Optimizer) -> Iterator[MasterShard]:
    for group, settings in enumerate(optimizer.param_groups):
        trained = list(filter(_is_trained(optimizer), settings["params"]))
        for parameter, its in zip(trained, _spans(_cut([trained], 0)), strict=True):
            yield MasterShard(master=parameter, group=group, spans=its, optimizer=optimizer)


def _is_trained(optimizer: torch.optim.Optimizer) -> Callable[[nn.Parameter], bool]:
    """Of parameters that torch's optimizer was given: not those that were frozen from the start."""
    return lambda parameter: parameter.requires_grad or parameter in optimizer.state


_KINDS: dict[str, tuple[str, Callable[[Any], Iterator[MasterShard]]]] = {
    "DeepSpeedZeroOptimizer": ("bit16_groups", _zero_1_and_2),
    "BF16_Optimizer": ("bf16_groups", _bf16),
    "DeepSpeedZeroOptimizer_Stage3": ("fp16_groups", _zero_3),
    "FP16_Optimizer": ("fp16_groups", _flat_groups),
    "FP16_UnfusedOptimizer": ("fp16_groups", _copies),
}
"""Class of a wrapper -> the name of its parameter groups, and what gives its masters."""
