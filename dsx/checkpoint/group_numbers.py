"""Optimizer states that are one number per tensor, in ``param_groups``: ``step`` and ``numbers``.

:mod:`dsx.checkpoint.catalog` lists these facts. What all tensors of a group have alike is written once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_numbers(group: Mapping[str, Any], values: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """A group with these states.

    Args:
        group: Its names and hyperparameters.
        values: By state and name.
    """
    kept = {state: one for state, by_name in values.items() if (one := _one(by_name)) is not None}
    step = kept.pop("step", None)
    return {**group, "step": step, **({"numbers": kept} if kept else {})}


def numbers_in(group: Mapping[str, Any], name: str) -> dict[str, float]:
    """The states of tensor ``name`` that are one number, those that it has.

    >>> numbers_in({"step": 3, "numbers": {"mu_product": {"a": 0.5}}}, "a")
    {'step': 3.0, 'mu_product': 0.5}
    >>> numbers_in({"step": None}, "a")
    {}
    """
    told = {"step": group.get("step"), **group.get("numbers", {})}
    found = {state: one.get(name) if isinstance(one, Mapping) else one for state, one in told.items()}
    return {state: float(one) for state, one in found.items() if one is not None}


def _one(by_name: Mapping[str, float]) -> Mapping[str, float] | float | None:
    """The value that all tensors have; by name where they differ; None if there is none."""
    return dict(by_name) if len({*by_name.values()}) > 1 else next(iter(by_name.values()), None)
