"""Which rank writes which part of every tensor into a dsx checkpoint. Pure data, from a Layout.

Each rank writes what it holds anyway. What several hold alike is written once, by one of them or, if it is
large, by each in part, so that all ranks write about as much.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from dsx.spec.layout import Layout
from dsx.spec.param import ParamSpec
from dsx.spec.zero import ZeroPlan

_SPREAD_ELEMENTS = 1 << 16
"""A tensor with fewer elements than this is not spread over data-parallel ranks: it would be crumbs."""


@dataclass(frozen=True, slots=True)
class Share:
    """Elements ``start`` to ``stop`` of the flattened local tensor that a rank writes; none if equal."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """What one rank writes of one parameter.

    Attributes:
        spec: The parameter.
        tp_rank: The rank's coordinate, which says what its local tensor is of.
        weight: Of the weight.
        state: Of the fp32 master and of each optimizer state.
    """

    spec: ParamSpec
    tp_rank: int
    weight: Share
    state: Share


def shares(layout: Layout, rank: int) -> Iterator[Shares]:
    """What ``rank`` writes of every parameter that it holds, in layer order.

    Over all ranks, every element of every tensor is written exactly once.
    """
    at = layout.mesh.coords(rank)
    plan, dp = layout.zero_plan(at["pp"]), at["dp"]
    weights, states = plan.weights(dp), plan.state(dp)
    for number, spec in enumerate(layout.params):
        owners = layout.owners(spec)
        if at["pp"] not in owners:
            continue
        mine = at["pp"] == owners[0] and (spec.split is not None or at["tp"] == number % layout.mesh.tp)
        nothing = Share(0, 0)
        spread = _spread(layout, spec, dp, number)
        yield Shares(
            spec=spec,
            tp_rank=at["tp"],
            weight=(Share(*weights[spec.name]) if _cut(plan, 3) else spread) if mine else nothing,
            state=(Share(*states[spec.name]) if _cut(plan, 1) else spread) if mine else nothing,
        )


def _cut(plan: ZeroPlan, stage: int) -> bool:
    """Whether data-parallel ranks hold different parts of what ZeRO cuts from ``stage`` on."""
    return plan.stage >= stage


def _spread(layout: Layout, spec: ParamSpec, dp_rank: int, number: int) -> Share:
    """This data-parallel rank's part of what all of them hold: whole rows, or all, or nothing."""
    shape, dp = spec.local_shape(layout.mesh.tp), layout.mesh.dp
    numel = prod(shape)
    if numel < _SPREAD_ELEMENTS or not shape:
        return Share(0, numel if dp_rank == number % dp else 0)
    row = prod(shape[1:])
    rows = -(-shape[0] // dp)
    return Share(min(dp_rank * rows, shape[0]) * row, min((dp_rank + 1) * rows, shape[0]) * row)
