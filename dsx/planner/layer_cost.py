"""What layers take for one micro-batch, measured or predicted: seconds and bytes, which add up to stages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

from dsx.schedules.simulate import Costs

PARTS = (
    *("again_seconds", "forward_wait", "again_wait", "backward_wait", "input_wait", "weight_wait"),
    *("context_wait", "expert_wait", "expert_back_wait", "hidden_wait", "host_wait"),
)
"""Seconds of a :class:`LayerCost` that are a part of others, 0 where nobody tells them apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCost:
    """What one layer, or several one after the other, take on one rank for one micro-batch.

    Attributes:
        backward_seconds: A whole backward.
        backward_input_seconds: The first part of a divided backward, the gradient of the input.
        backward_weight_seconds: The second part.
        again_seconds: Of a whole backward and of the first part: computing forward again.
        forward_wait: Of a forward: communication that it waits for.
        again_wait: The same of the forward done again.
        backward_wait: The same of a whole backward, without what is done again.
        input_wait: The same of the first part of a divided backward.
        weight_wait: The same of its second part.
        context_wait: Of the waits of a forward, of what is done again, and of a backward in one part or two:
            that for the ranks that share a sequence.
        expert_wait: The same for those that hold experts together.
        expert_back_wait: Of that, a backward's.
        hidden_wait: Of that, what the weight gradients of such a layer above hide in a divided backward.
        host_wait: Of the waits of a forward, and of a backward in one part or two: that for copies to the
            host and back.
        kept_bytes: Activations kept from the forward to the backward.
        pending_bytes: What is kept between the two parts of a divided backward.
        working_bytes: What the backward computes again and holds at once, beyond ``kept_bytes``.
        boundary_bytes: The output, if a stage ends here; 0 for the last layer, whose output stays.
    """

    forward_seconds: float
    backward_seconds: float
    backward_input_seconds: float
    backward_weight_seconds: float
    again_seconds: float = 0.0
    forward_wait: float = 0.0
    again_wait: float = 0.0
    backward_wait: float = 0.0
    input_wait: float = 0.0
    weight_wait: float = 0.0
    context_wait: float = 0.0
    expert_wait: float = 0.0
    expert_back_wait: float = 0.0
    hidden_wait: float = 0.0
    host_wait: float = 0.0
    kept_bytes: int = 0
    pending_bytes: int = 0
    working_bytes: int = 0
    boundary_bytes: int = 0

    @property
    def seconds(self) -> float:
        """Forward and whole backward."""
        return self.forward_seconds + self.backward_seconds

    @property
    def computing_seconds(self) -> float:
        """The same without what is done again and without waiting."""
        again, wait = self.again_seconds + self.again_wait, self.forward_wait + self.backward_wait
        return self.seconds - again - wait

    @classmethod
    def total(cls, layers: Sequence[Self]) -> Self:
        """Of layers that run one after the other.

        Recomputation happens layer by layer, so the largest of the ``working_bytes`` counts.
        """
        return cls(
            forward_seconds=sum(x.forward_seconds for x in layers),
            backward_seconds=sum(x.backward_seconds for x in layers),
            backward_input_seconds=sum(x.backward_input_seconds for x in layers),
            backward_weight_seconds=sum(x.backward_weight_seconds for x in layers),
            **{name: sum(getattr(x, name) for x in layers) for name in PARTS},
            kept_bytes=sum(x.kept_bytes for x in layers),
            pending_bytes=sum(x.pending_bytes for x in layers),
            working_bytes=max(x.working_bytes for x in layers),
            boundary_bytes=layers[-1].boundary_bytes,
        )


def hidden(layers: Sequence[LayerCost]) -> tuple[float, float]:
    """Of a stage's divided backward: the waits for rows that are hidden, by what seconds of weight gradients.

    Each layer with experts hides its rows behind the one above, the stage's last one behind none.
    """
    found = [x for x in layers if x.expert_back_wait]
    weights = sum(x.backward_weight_seconds - x.weight_wait for x in found[1:])
    return sum(x.hidden_wait for x in found[:-1]), weights


def stage_costs(layers: Sequence[LayerCost], bounds: Iterable[int]) -> tuple[LayerCost, ...]:
    """Layers added up per virtual stage ``[bounds[s], bounds[s + 1])``."""
    return tuple(LayerCost.total(layers[start:stop]) for start, stop in pairwise(bounds))


def action_costs(stages: Iterable[LayerCost], transfer_seconds: float = 0.0) -> Costs:
    """Seconds of every virtual stage, for the simulator."""
    stages = [*stages]
    return Costs(
        forward_seconds=tuple(x.forward_seconds for x in stages),
        backward_seconds=tuple(x.backward_seconds for x in stages),
        backward_input_seconds=tuple(x.backward_input_seconds for x in stages),
        backward_weight_seconds=tuple(x.backward_weight_seconds for x in stages),
        transfer_seconds=transfer_seconds,
    )
