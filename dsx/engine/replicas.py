"""Checks whether ranks that should hold the same weights still do, bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from dsx.checkpoint.run.names import Names
from dsx.engine.layer_parameters import checksum
from dsx.fault_tolerance.waits import named

if TYPE_CHECKING:
    from dsx.engine.engine import PipelineEngine

_SHOWN = 4

Tensors = list[tuple[str, torch.Tensor]]


def differences(engine: PipelineEngine) -> list[str]:
    """Replicated weights that differ between ranks, with these ranks. Collective.

    Weights are compared as the model computes with them: below ZeRO-3 all weights over data parallelism
    (ZeRO-3 holds none of them twice), those that tensor parallelism does not cut over its ranks, and both
    ends of a tie.

    Returns:
        A sentence for each, the same on every rank; empty if all is well.
    """
    found = [text for group, tensors in _replicas(engine) for text in _compare(engine, group, tensors)]
    # Only one rank of each group speaks of it.
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    any_found = torch.tensor([len(found)], device=engine.pipeline.device)
    dist.all_reduce(any_found, op=dist.ReduceOp.MAX)
    if not int(any_found):
        return []
    dist.all_gather_object(everywhere, found)
    return [*dict.fromkeys(text for texts in everywhere for text in texts)]


def summary(texts: Sequence[str]) -> str:
    """The first few of :func:`differences`."""
    more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return f"{'; '.join(texts[:_SHOWN])}{more}"


def _replicas(engine: PipelineEngine) -> Iterator[tuple[dist.ProcessGroup, Tensors]]:
    """Groups, each with the tensors that its ranks hold alike, in the same order on each rank."""
    names, groups = Names(engine), engine.groups
    parameters = list(engine.pipeline.chunks.parameters())
    if engine.zero_optimization_stage() < 3:
        yield groups.data, [(names.of(p).name, p) for p in parameters]
    whole = [p for p in parameters if not getattr(p, "tensor_model_parallel", False)]
    yield groups.tensor, [(names.of(p).name, _here(p)) for p in whole]
    for tie in engine.pipeline.ties:
        yield tie.group, [(f"tied weight {tie.key}", _here(p)) for p in tie.parameters]


def _here(parameter: nn.Parameter) -> torch.Tensor:
    """What this rank has of a parameter; under ZeRO-3, its part."""
    part = getattr(parameter, "ds_tensor", None)
    return parameter if part is None else part


def _compare(engine: PipelineEngine, group: dist.ProcessGroup, tensors: Tensors) -> list[str]:
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == 1 or not tensors:
        return []
    device = engine.pipeline.device
    sums = torch.stack([checksum(tensor).to(device) for _, tensor in tensors])
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN, group=group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    wrong = (least != most).nonzero().view(-1).tolist()
    if not wrong:
        return []
    all_sums = [torch.empty_like(sums) for _ in ranks]
    dist.all_gather(all_sums, sums, group=group)
    return [_told(tensors[i][0], ranks, [int(theirs[i]) for theirs in all_sums]) for i in wrong]


def _told(name: str, ranks: Sequence[int], sums: Sequence[int]) -> str:
    """A sentence on who differs from the majority, or, without one, that they differ."""
    (common, count), *_ = Counter(sums).most_common(1)
    odd = [rank for rank, value in zip(ranks, sums, strict=True) if value != common]
    if 2 * count <= len(ranks):
        return f"{name} differs between {named(tuple(ranks))}"
    others = [rank for rank in ranks if rank not in odd]
    return f"{name} of {named(odd)} is not what {named(others)} {'have' if len(others) > 1 else 'has'}"
