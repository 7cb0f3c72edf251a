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
        groups = list(optimizer.param_groups)
        if flat:
            groups = split_tied(groups, model.ties)
            if len(groups) != len(optimizer.param_groups) and lr_scheduler is not None:
                _require_callable(lr_scheduler)
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
        result += [{**group, "params": part} for part in parts.values()]
    return [group for group in result if any(p.requires_grad for p in group["params"])]


def _require_callable(lr_scheduler: Any) -> None:
    if isinstance(lr_scheduler, torch.optim.lr_scheduler.LRScheduler):
        raise ConfigError(
            f"lr_scheduler = {type(lr_scheduler).__name__}(optimizer)",
            "it follows the optimizer's parameter groups, which are split because of tied weights",
            "pass a callable: lr_scheduler=lambda optimizer: ...",
        )


def _require_trainable(model: PipelineModule, groups: Sequence[Group], *, need_gradients: bool) -> None:
    """Raise the same LayoutError on every rank if the optimizer of one would be empty."""
    members = [p for group in groups for p in group["params"]]
    fine = any(p.requires_grad for p in members) if need_gradients else bool(members)
    empty = torch.zeros(model.groups.mesh.pp, dtype=torch.int32, device=model.device)
    empty[model.groups.pp_rank] = not fine
    dist.all_reduce(empty, op=dist.ReduceOp.MAX)
    ranks = [rank for rank, flag in enumerate(empty.tolist()) if flag]
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
