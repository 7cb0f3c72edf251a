"""What is seen of a layout's training, in a form that travels between processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dsx.spec.mesh import Mesh
from dsx.spec.param import ParamSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a rank knows of one of its parameters.

    Attributes:
        shape: Of the rank's tensor, whole over data parallelism.
        spec: The logical tensor it is a part of; None for layers that are not dsx's (then it is whole).
        copy: Whether an earlier pipeline rank holds the same tensor.
        trained: Whether it wants a gradient.
    """

    shape: tuple[int, ...]
    spec: ParamSpec | None
    copy: bool
    trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of a flattened parameter that a rank's optimizer updates, fp32, around one step.

    Attributes:
        name: Logical tensor.
        start: First element.
        before: Values before the step.
        after: Values after it.
        gradient: What the optimizer was given; None if it was given nothing.
    """

    name: str
    start: int
    before: Tensor
    after: Tensor
    gradient: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """A parameter as the model computes with it, of data-parallel rank 0.

    Attributes:
        values: This rank's tensor, float32.
        spread: Largest difference between data-parallel ranks.
    """

    values: Tensor
    spread: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStep:
    """One step on one rank.

    Attributes:
        loss: As the engine gives it.
        norm: As the engine reports it; None if it does not.
        pieces: The optimizer's.
        spread: Tensor -> largest difference of its gradient between data-parallel ranks that hold it all.
    """

    loss: float
    norm: float | None
    pieces: Sequence[Piece]
    spread: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """Everything that one rank has seen.

    Attributes:
        rank: Its number in the mesh.
        known: Its parameters by logical name.
        built: Weights as the model was built, before anything was put into them.
        weights: Weights before each step, and after the last; empty on data-parallel ranks but the first.
        steps: The steps.
        outputs: Layer -> its output for the first micro-batch of the first step.
    """

    rank: int
    known: dict[str, Known]
    built: dict[str, Tensor]
    weights: Sequence[dict[str, Weight]]
    steps: Sequence[RankStep]
    outputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """One dropout mask on one rank: where it is, what it should be, and a digest of what it is."""

    sharded: bool
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A layout's training, from all ranks.

    Attributes:
        mesh: The layout.
        micro_batches: Per step and replica.
        clipping: Largest norm; 0 for none.
        ranks: By rank.
    """

    mesh: Mesh
    micro_batches: int
    clipping: float
    ranks: Sequence[RankSeen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """All that one launch of ranks brings home.

    Attributes:
        passes: Training without clipping, and if the config clips, with it.
        masks: Rank -> dropout module -> mask; empty for a model without dropout.
    """

    passes: Sequence[Seen]
    masks: Sequence[dict[str, Mask]] = field(default_factory=tuple)
