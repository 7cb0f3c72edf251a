"""Learning-rate schedules: what makes them, and whether they reach the optimizer that trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deepspeed.runtime import lr_schedules
from torch.optim import lr_scheduler as torch_schedules

from dsx.errors import ConfigError

_DEEPSPEED = tuple(lr_schedules.VALID_LR_SCHEDULES)


def schedule_of(block: Mapping[str, Any] | None, given: Any) -> Any:
    """The user's schedule, or what makes that of a config's ``scheduler`` block for an optimizer.

    DeepSpeed would give the schedule its own wrapper of the optimizer, which torch's schedules refuse under
    ZeRO and in bf16, and behind which it may have made the optimizer anew (deepspeed/runtime/engine.py,
    _scheduler_from_config; zero/stage3.py, initialize_optimizer_states). A callable gets the optimizer
    itself.

    Args:
        block: Of the config, if it has one.
        given: A schedule, or a callable that makes one from an optimizer; None leaves it to the config.

    Returns:
        ``given``, a callable, or None without a schedule.

    Raises:
        ConfigError: No such schedule, or one that wants a metric.
    """
    if given is not None:
        _require_no_metric(given)
        return given
    name, params = (block or {}).get("type"), (block or {}).get("params") or {}
    if name is None:
        return None
    kind = _kind(name)
    if kind is None:
        raise ConfigError(
            f"scheduler.type = {name!r}",
            "DeepSpeed and torch know no such schedule (names are case-sensitive)",
            f"use one of {', '.join(_DEEPSPEED)}, or a class of torch.optim.lr_scheduler",
        )
    if issubclass(kind, torch_schedules.ReduceLROnPlateau):
        raise _wants_a_metric(f"scheduler.type = {name!r}")

    def make(optimizer: Any) -> Any:
        try:
            return kind(optimizer, **params)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"scheduler.params = {params!r}",
                f"{name} of {type(optimizer).__name__} cannot be made: {error}",
                f"give {name} the parameters that it takes",
            ) from error

    return make


def require_drives(lr_scheduler: Any, optimizer: Any) -> None:
    """Refuse a schedule of an optimizer that does not train: the learning rate would never change.

    Args:
        lr_scheduler: As it was made. One that does not say whose it is passes.
        optimizer: The optimizer that trains, inside of DeepSpeed's wrapper; None if nothing trains.

    Raises:
        ConfigError: It is another optimizer's, or wants a metric.
    """
    _require_no_metric(lr_scheduler)
    own = getattr(lr_scheduler, "optimizer", None)
    own = own if hasattr(own, "step") else None
    if None not in (own, optimizer) and own is not optimizer:
        raise ConfigError(
            f"lr_scheduler = {type(lr_scheduler).__name__}(...)",
            f"it moves the learning rate of another optimizer ({type(own).__name__}), which does not train",
            "make it from the optimizer that is given to dsx.initialize, or pass a callable: "
            "lr_scheduler=lambda optimizer: ...",
        )


def _require_no_metric(lr_scheduler: Any) -> None:
    """Refuse a schedule that wants one: DeepSpeed would pass it the batch size (engine.py:3550)."""
    if isinstance(lr_scheduler, torch_schedules.ReduceLROnPlateau):
        raise _wants_a_metric("lr_scheduler = ReduceLROnPlateau(...)")


def _kind(name: Any) -> Any:
    """The class of a schedule that DeepSpeed or torch knows by this name."""
    if name in _DEEPSPEED:
        return getattr(lr_schedules, name)
    kind = getattr(torch_schedules, name, None) if isinstance(name, str) else None
    base = torch_schedules.LRScheduler
    known = isinstance(kind, type) and issubclass(kind, base) and kind is not base
    return kind if known else None


def _wants_a_metric(where: str) -> ConfigError:
    return ConfigError(
        where,
        "it wants a metric at every step, and DeepSpeed would give it the batch size",
        "leave it out; make ReduceLROnPlateau(engine.basic_optimizer) after dsx.initialize, and call its "
        "step(loss) yourself, on every rank",
    )
