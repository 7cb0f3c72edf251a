"""The optimizer of a rank's part of a pipeline, of whatever the caller gave, and its parameter groups."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from dsx.engine.chunks import Tie
from dsx.engine.pipeline_module import PipelineModule
from dsx.errors import ConfigError, DsxError, ModelError
from dsx.launch.entry import AGREED
from dsx.nn.parameters import stays_float32
from dsx.parallel.groups import of_experts

Group = dict[str, Any]

SPARE = "spare"
"""What trains on a rank with nothing to train; no layer uses it."""


def prepare(
    model: PipelineModule,
    *,
    zero_stage: int,
    dtype: torch.dtype,
    optimizer: Optimizer | Callable[..., Any] | None,
    lr_scheduler: Any,
    model_parameters: Iterable[Any] | None,
) -> tuple[list[Any], Any]:
    """Parameters (or groups of them) and optimizer for ``deepspeed.initialize``.

    A collective call over all ranks. ZeRO-1 and 2 cut each group as one flat tensor, and so need
    :func:`split_groups`, which changes an optimizer's own groups in place. A rank with nothing to train gets
    :data:`SPARE`, as DeepSpeed allows no empty optimizer and all ranks take part in the collectives of its
    step. A callable is given what the caller gave, as in stock DeepSpeed. ``dtype`` is that of weights.

    Raises:
        ConfigError: A schedule was built for groups that have to be split; a list mixes parameters and
            groups; what should be an optimizer is none.
        ModelError: No rank has anything to train.
    """
    wide = [p for p in model.chunks.parameters() if p.requires_grad and stays_float32(p, dtype)]
    flat = {id(p) for p in wide} if wide or zero_stage in (1, 2) else None
    given = list(model.chunks.parameters() if model_parameters is None else model_parameters)
    instance, wrong = isinstance(optimizer, Optimizer), None
    try:
        groups = _groups_of(optimizer) if instance else as_groups(given)
        if optimizer is not None and not instance and not callable(optimizer):
            raise _no_optimizer(optimizer)
    except ConfigError as error:
        wrong, groups = error, []
    _agree_on(model, wrong)
    spare = _spare(model, any(p.requires_grad for group in groups for p in group["params"]))
    if instance:
        return groups, _settled(model, optimizer, flat, spare, lr_scheduler)
    if callable(optimizer):
        make = optimizer
        return given, lambda _: _settled(model, _made(make, given, spare), flat, spare, None)
    if spare is not None:
        groups[0]["params"] = [*groups[0]["params"], spare]
    return (groups if flat is None else split_groups(groups, model.ties, flat)), None


def _made(give: Callable[..., Any], given: list[Any], spare: nn.Parameter | None) -> Any:
    """What the caller's function makes of the parameters; a frozen stage may have none to give it."""
    if spare is None:
        return give(given)
    try:
        return give(given)
    except Exception:  # noqa: BLE001 - torch's optimizers, among others, refuse an empty list
        return give([spare])


def _settled(
    model: PipelineModule,
    optimizer: Any,
    flat: set[int] | None,
    spare: nn.Parameter | None,
    lr_scheduler: Any,
) -> Optimizer:
    """The optimizer with the groups that DeepSpeed can take. Collective, errors included."""
    wrong: DsxError | None = None
    try:
        groups = _groups_of(optimizer)
    except ConfigError as error:
        wrong, groups = error, []
    _agree_on(model, wrong)
    known = {id(p) for group in groups for p in group["params"]}
    if spare is not None and id(spare) not in known:
        if not groups:  # an optimizer without groups stands for one that does nothing
            return torch.optim.AdamW([spare], lr=0.0)
        groups[0]["params"] = [*groups[0]["params"], spare]
    before = [[id(p) for p in group["params"]] for group in groups]
    parts = groups if flat is None else split_groups(groups, model.ties, flat)
    parts = [group for group in parts if group["params"]]  # as DeepSpeed does
    changed = [[id(p) for p in group["params"]] for group in parts] != before
    if lr_scheduler is not None and not callable(lr_scheduler):
        _require_unchanged(model, lr_scheduler, changed=changed)
    optimizer.param_groups[:] = parts
    own: Optimizer = optimizer
    return own


def _groups_of(optimizer: Any) -> list[Group]:
    """An optimizer's own list of groups. Raises ConfigError if it is no torch optimizer, or has none."""
    groups = getattr(optimizer, "param_groups", None)
    if not isinstance(optimizer, Optimizer) or not isinstance(groups, list):
        raise _no_optimizer(optimizer)
    return groups


def _no_optimizer(given: Any) -> ConfigError:
    what = "no torch.optim.Optimizer" if not isinstance(given, Optimizer) else "without a list param_groups"
    return ConfigError(
        f"optimizer of type {type(given).__name__}",
        f"it is {what}",
        "give a torch optimizer, or a function that makes one of parameters; on a rank with nothing to train "
        "it may have no groups (param_groups = [])",
    )


def _agree_on(model: PipelineModule, error: DsxError | None) -> None:
    """Raise on every rank where one has an error. Collective."""
    ranks = _pipeline_ranks_where(model, error is not None)
    if ranks:
        error = error or ConfigError(
            "optimizer", f"pipeline rank {ranks[0]} made none", "see the error of that rank"
        )
        error.add_note(AGREED)
        raise error


def as_groups(parameters: Iterable[Any]) -> list[Group]:
    """Parameters or groups of them, given as a torch optimizer takes them, as groups. Raises ConfigError."""
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


def split_groups(groups: Sequence[Group], ties: Sequence[Tie], wide: Collection[int] = ()) -> list[Group]:
    """Groups in which each tied weight that spans pipeline ranks stands alone, and experts among themselves.

    ZeRO cuts a group as one flat tensor, over the same ranks. A tied weight that is alone is cut alike on
    every rank that holds it; experts are cut over fewer ranks than all else. Groups without anything to
    train, which ZeRO cannot cut, are left out. ``wide`` are the ids of parameters that stay in fp32 among
    others, and so cannot be of a tensor with them.
    """
    keys = {id(p): tie.key for tie in ties for p in tie.parameters if p.requires_grad}
    result = []
    for group in groups:
        # By whether it stays in fp32, and whether it is of experts; ties by their keys.
        parts: dict[Any, list[nn.Parameter]] = {at: [] for at in product((False, True), repeat=2)}
        for parameter in group["params"]:
            kind = id(parameter) in wide, of_experts(parameter)
            parts.setdefault(keys.get(id(parameter), kind), []).append(parameter)
        trained = [part for part in parts.values() if any(p.requires_grad for p in part)]
        # The first is the group itself, which an optimizer may know by more ways than its list of groups.
        halves = [group, *({**group} for _ in trained[1:])]
        for half, part in zip(halves, trained, strict=False):
            half["params"] = part
            result.append(half)
    return result


def _require_unchanged(model: PipelineModule, lr_scheduler: Any, *, changed: bool) -> None:
    """Raise the same ConfigError on every rank if one has changed groups that a schedule was made for."""
    if _pipeline_ranks_where(model, changed):
        error = ConfigError(
            f"lr_scheduler = {type(lr_scheduler).__name__}(optimizer)",
            "it follows the optimizer's parameter groups, which are split because of tied weights, "
            "experts or what stays in fp32, or are left out where a pipeline rank has nothing of them",
            "pass a callable: lr_scheduler=lambda optimizer: ...",
        )
        error.add_note(AGREED)
        raise error


def _pipeline_ranks_where(model: PipelineModule, flag: bool) -> list[int]:
    """The pipeline ranks on which ``flag`` is set, known on every rank. Collective."""
    flags = torch.zeros(model.groups.mesh.pp, dtype=torch.int32, device=model.device)
    flags[model.groups.pp_rank] = flag
    dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    return [rank for rank, found in enumerate(flags.tolist()) if found]


def _spare(model: PipelineModule, trains: bool) -> nn.Parameter | None:
    """A number that no layer uses, on a rank with nothing to train. Collective."""
    if len(_pipeline_ranks_where(model, not trains)) == model.groups.mesh.pp:
        error = ModelError(
            "dsx.initialize",
            "every parameter is frozen, so that there is nothing to train",
            "leave some with requires_grad, or use eval_batch alone: it needs no optimizer",
        )
        error.add_note(AGREED)
        raise error
    if trains:
        return None
    dtype = next((p.dtype for p in model.chunks.parameters()), torch.float32)
    spare = nn.Parameter(torch.zeros(1, dtype=dtype, device=model.device))
    model.chunks.register_parameter(SPARE, spare)
    spare.dsx_spare = True  # type: ignore[attr-defined]  # a tag, for whoever looks at the optimizer
    return spare


def hide_spare(model: PipelineModule) -> None:
    """Once the optimizer has the spare parameter, it is no part of the model."""
    if SPARE in dict(model.chunks.named_parameters(recurse=False)):
        delattr(model.chunks, SPARE)
