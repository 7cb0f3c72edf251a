"""The numbers that a diagnosis reads, taken from whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsx.plan.parity import causes
from dsx.plan.parity.facts import Degrees, Finding, GradientFacts, NormFacts, UpdateFacts
from dsx.runtime.verify.assemble import Whole, WholeStep
from dsx.runtime.verify.measure import fit, relative, scale_of, shares_of
from dsx.runtime.verify.reference import Evaluation
from dsx.runtime.verify.seen import Known


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a layout has its tensors.

    Attributes:
        known: Logical name -> what its first holder knows of it.
        holders: Logical name -> pipeline ranks that hold it, the first holder first.
        degrees: Of the layout.
    """

    known: Mapping[str, Known]
    holders: Mapping[str, tuple[int, ...]]
    degrees: Degrees

    def replicated(self, name: str) -> bool:
        """Whether several tensor-parallel ranks hold all of it."""
        spec = self.known[name].spec
        return self.degrees.tp > 1 and (spec is None or spec.split is None)

    def copies(self, name: str, whole: Whole) -> list[Tensor]:
        """All copies of a tensor but the first."""
        return [*whole.copies, *(whole.shards[1:] if self.replicated(name) else ())]

    def first_shard(self, name: str, tensor: Tensor) -> Tensor:
        """What tensor-parallel rank 0 holds of a logical tensor, flat."""
        spec = self.known[name].spec
        if spec is None or spec.split is None:
            return tensor.flatten()
        boxes = spec.boxes(self.degrees.tp, 0)
        return torch.cat([tensor[tuple(slice(*span) for span in box)].flatten() for box in boxes])


def gradient_facts(
    places: Places,
    name: str,
    step: WholeStep,
    each: Sequence[Mapping[str, Tensor]],
    error: float,
    previous: Tensor | None,
) -> GradientFacts:
    """One tensor's gradient against the reference's.

    Args:
        places: Of the layout.
        name: The tensor.
        step: The layout's step.
        each: Every micro-batch's gradients in the reference, replica fastest.
        error: As the comparison measured it.
        previous: The reference's gradient in the step before.
    """
    parts = torch.stack([gradients[name] for gradients in each]) / len(each)
    wanted = parts.sum(0)
    whole = step.gradients.get(name) or Whole(
        values=torch.zeros_like(wanted), shards=(), copies=(), padding=0.0
    )
    replicated = places.replicated(name)
    shards = whole.shards if replicated else whole.shards[:1]
    shares, left = shares_of(whole.values, parts, places.degrees.dp)
    return GradientFacts(
        name=name,
        error=error,
        max_abs=float((whole.values - wanted).abs().max()),
        stage=places.holders[name][0],
        replicated=replicated,
        holders=len(places.holders[name]),
        fit=fit(whole.values, wanted),
        shares=shares,
        shares_residual=left,
        tensor_spread=max((relative(shard, whole.values) for shard in shards[1:]), default=0.0),
        tensor_sum=fit(_sum_of(shards), wanted) if len(shards) > 1 else None,
        holder_spread=max((relative(t, whole.values) for t in whole.copies), default=0.0),
        holder_sum=fit(_sum_of([whole.values, *whole.copies]), wanted) if whole.copies else None,
        previous=None if previous is None else fit(whole.values - wanted, previous),
        padding=whole.padding / max(scale_of(wanted), 1e-30),
    )


def norm_facts(
    places: Places, seen: float | None, norm: float, squares: Mapping[str, float], expected: Evaluation
) -> NormFacts:
    """A norm against the reference's, with the sums of squares that it is made of."""
    return NormFacts(
        seen=seen,
        expected=norm,
        squares=squares,
        stages={name: places.holders[name][0] for name in squares},
        holders={name: len(places.holders[name]) for name in squares},
        replicated=frozenset(name for name in squares if places.replicated(name)),
        first_shard={
            name: float(places.first_shard(name, expected.gradients[name]).double().square().sum())
            for name in squares
        },
    )


def update_facts(
    name: str, before: Tensor, after: Tensor, expected: Tensor, *, rate: float, decay: float
) -> UpdateFacts:
    """One update against torch's; differences below two roundings of the weight itself are none."""
    moved, wanted = after - before, expected - before
    rounding = 2 * torch.finfo(torch.float32).eps * before.abs()
    off = ((moved - wanted).abs() - rounding).clamp_min(0.0)
    size = max(scale_of(wanted), scale_of(moved) * 1e-3, 1e-30)
    return UpdateFacts(
        name=name,
        error=float(off.max()) / size,
        max_abs=float((moved - wanted).abs().max()),
        fit=fit(moved, wanted),
        decay=fit(moved - wanted, before),
        learning_rate=rate,
        weight_decay=decay,
    )


def not_gathered(step: WholeStep, name: str, number: int) -> Finding:
    """The finding for a weight in the model that is not what its optimizer holds after a step."""

    def flat(wholes: Mapping[str, Whole]) -> Tensor:
        return torch.cat([wholes[key].values.flatten() for key in sorted(step.after)])

    now, held, old = flat(step.next_weights), flat(step.after), flat(step.weights)
    what = f"weight {name} in the model is not what its optimizer holds after the step"
    if torch.equal(now, old):
        cause, why = (
            causes.NOT_GATHERED,
            "the model has the weights from before the step: the new ones never came",
        )
    elif any(torch.equal(now.sort().values, kept.sort().values) for kept in (held, held.bfloat16().float())):
        cause = causes.PARTITION_ORDER
        why = "the model has the right numbers in the wrong places: ZeRO's parts are joined in another order"
    else:
        cause, why = (
            causes.NOT_GATHERED,
            "parts of the new weights have not come, or others have come in their place",
        )
    return Finding(cause=cause, what=what, why=why, step=number, tensor=name)


def _sum_of(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).sum(0)


def outputs_of(parts: Sequence[Tensor], wanted: Tensor) -> Iterator[Tensor]:
    """A layer's output on each tensor-parallel rank, or put together where it is cut, in the wanted shape.

    Args:
        parts: One per tensor-parallel rank, in order.
        wanted: What one process gives.
    """
    if not parts:
        return
    if all(part.shape == wanted.shape for part in parts):
        yield from parts
        return
    for dim in range(wanted.dim()):
        whole = list(wanted.shape)
        rest = [size for at, size in enumerate(whole) if at != dim]
        if all([s for at, s in enumerate(p.shape) if at != dim] == rest for p in parts):
            joined = torch.cat(list(parts), dim)
            # Columns that pad the vocabulary are no part of what is compared.
            yield joined.narrow(dim, 0, min(joined.shape[dim], whole[dim]))
            return
