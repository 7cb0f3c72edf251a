"""What the optimizer is given: parameter groups in which tied weights stand alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dsx.errors import ConfigError, LayoutError
from dsx.runtime.entry import AGREED

if TYPE_CHECKING:
    from dsx.runtime.pipeline_module import PipelineModule, Tie

Group = dict[str, Any]


def prepare(
    model: PipelineModule,
    *,
    zero_stage: int,
    optimizer: Optimizer | Callable[..., Any] | None,
    lr_scheduler: Any,
    model_parameters: Iterable[Any] | None,
) -> list[Group]:
    """Parameter groups for ``deepspeed.initialize``; a client optimizer's own are split in place.

    A collective call over all ranks.

    Args:
        model: The pipeline.
        zero_stage: ZeRO-1 and 2 cut each group as one flat tensor, and so need :func:`split_tied`.
        optimizer: The user's, if any.
        lr_scheduler: The user's, if any.
        model_parameters: As :func:`dsx.initialize` takes them.

    Raises:
        ConfigError: A scheduler was built for groups that have to be split; a list mixes parameters and
            groups.
        LayoutError: A rank has nothing to train.
    """
    flat = zero_stage in (1, 2)
    if isinstance(optimizer, Optimizer):
        before = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        groups = split_tied(optimizer.param_groups, model.ties) if flat else optimizer.param_groups
        groups = [group for group in groups if group["params"]]  # as DeepSpeed does
        changed = [[id(p) for p in group["params"]] for group in groups] != before
        if lr_scheduler is not None and not callable(lr_scheduler):
            _require_unchanged(model, lr_scheduler, changed=changed)
        optimizer.param_groups[:] = groups
    else:
        given = model.chunks.parameters() if model_parameters is None else model_parameters
        groups = as_groups(given)
        if flat:
            groups = split_tied(groups, model.ties)
    _require_trainable(model, groups, need_gradients=zero_stage > 0)
    return groups


def as_groups(parameters: Iterable[Any]) -> list[Group]:
    """Parameters or parameter groups, as a torch optimizer takes them, as groups. Raises ConfigError."""
    given = list(parameters)
    if all(isinstance(item, Mapping) for item in given):
        groups = [dict(item) for item in given]
    elif any(isinstance(item, Mapping) for item in given):
        raise ConfigError(
            "model_parameters",
            "they mix parameters and parameter groups",
            'put every parameter into a group: {"params": [...]}',
        )
    else:
        groups = [{"params": given}]
    for group in groups:
        members = group["params"]
        group["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
    return groups


def split_tied(groups: Sequence[Group], ties: Sequence[Tie]) -> list[Group]:
    """Groups in which each tied weight that spans pipeline ranks stands alone.

    ZeRO cuts a group as one flat tensor; alone, a tied weight is cut alike on every rank that holds it.
    Groups without anything to train, which ZeRO cannot cut, are left out.
    """
    keys = {id(p): tie.key for tie in ties for p in tie.parameters if p.requires_grad}
    result = []
    for group in groups:
        parts: dict[str | None, list[nn.Parameter]] = {None: []}
        for parameter in group["params"]:
            parts.setdefault(keys.get(id(parameter)), []).append(parameter)
        trained = [part for part in parts.values() if any(p.requires_grad for p in part)]
        # The first is the group itself, which an optimizer may know by more ways than its list of groups.
        halves = [group, *({**group} for _ in trained[1:])]
        for half, part in zip(halves, trained, strict=False):
            half["params"] = part
            result.append(half)
    return result


def _require_unchanged(model: PipelineModule, lr_scheduler: Any, *, changed: bool) -> None:
    """Raise the same ConfigError on every rank if a schedule was made for groups that one has changed."""
    if _pipeline_ranks_where(model, changed):
        error = ConfigError(
            f"lr_scheduler = {type(lr_scheduler).__name__}(optimizer)",
            "it follows the optimizer's parameter groups, which are split because of tied weights, or are "
            "left out where a pipeline rank has nothing of them to train",
            "pass a callable: lr_scheduler=lambda optimizer: ...",
        )
        error.add_note(AGREED)
        raise error


def _pipeline_ranks_where(model: PipelineModule, flag: bool) -> list[int]:
    """Pipeline ranks of which one has ``flag``, known on every rank. Collective."""
    flags = torch.zeros(model.groups.mesh.pp, dtype=torch.int32, device=model.device)
    flags[model.groups.pp_rank] = flag
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [rank for rank, found in enumerate(flags.tolist()) if found]


def _require_trainable(model: PipelineModule, groups: Sequence[Group], *, need_gradients: bool) -> None:
    """Raise the same LayoutError on every rank if the optimizer of one would be empty."""
    members = [p for group in groups for p in group["params"]]
    fine = any(p.requires_grad for p in members) if need_gradients else bool(members)
    ranks = _pipeline_ranks_where(model, not fine)
    if not ranks:
        return
    layers = {rank: list(model.stage_map.layers_of(rank)) for rank in ranks}
    error = LayoutError(
        f"pipeline ranks {ranks} (layers {layers})",
        "their optimizer has nothing to train, which DeepSpeed does not allow",
        "cut the stages so that every rank has a trainable parameter (partition_method), or use fewer ranks",
    )
    error.add_note(AGREED)
    raise error
