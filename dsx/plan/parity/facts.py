"""What a comparison measures, as numbers, for the diagnosis to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Shares = tuple[tuple[float, ...], ...]
"""[micro-batch][data-parallel replica] -> how often its gradient is in a sum; 1.0 everywhere is right."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The factor that brings one tensor closest to another, and the largest difference then left.

    Attributes:
        factor: Least squares.
        residual: Relative to the larger tensor's largest element.
    """

    factor: float
    residual: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """The layout's numbers."""

    tp: int
    pp: int
    dp: int
    micro_batches: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientFacts:
    """One tensor's gradient in the layout against the reference's.

    Attributes:
        name: Logical tensor.
        error: Largest difference, relative to the reference's largest element.
        max_abs: Largest difference.
        stage: Pipeline rank that holds it first.
        replicated: Every tensor-parallel rank holds all of it.
        holders: Pipeline ranks that hold a copy (more than one for a tied weight).
        fit: Layout against reference.
        shares: What it is a sum of; None if no sum of micro-batches' gradients explains it.
        shares_residual: What is left unexplained, relative.
        tensor_spread: Largest relative difference between tensor-parallel ranks' copies.
        tensor_sum: The sum of those copies against the reference.
        holder_spread: The same between the pipeline ranks that hold it.
        holder_sum: The sum of those copies against the reference.
        previous: Difference to the reference against the previous step's gradient; None in the first step.
        padding: Largest element in the rows that pad the vocabulary.
    """

    name: str
    error: float
    max_abs: float
    stage: int
    replicated: bool
    holders: int
    fit: Fit
    shares: Shares | None = None
    shares_residual: float = 0.0
    tensor_spread: float = 0.0
    tensor_sum: Fit | None = None
    holder_spread: float = 0.0
    holder_sum: Fit | None = None
    previous: Fit | None = None
    padding: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """The loss of one step against the reference's, from the same weights.

    Attributes:
        seen: The layout's.
        expected: The reference's.
        supposed: Cause -> the loss that the reference has under it.
        first_layer: The first layer whose output differs, and by how much, relative; None if none does.
        other_family: The layout agrees with dsx's own layers in one process, and those do not with the
            reference.
    """

    seen: float
    expected: float
    supposed: Mapping[str, float] = field(default_factory=dict)
    first_layer: tuple[str, float] | None = None
    other_family: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFacts:
    """A gradient norm, or what clipping has made of one.

    Attributes:
        seen: The norm that the engine reports; None if it reports none.
        expected: The reference's.
        squares: Tensor -> sum of squares of the reference's gradient.
        stages: Tensor -> pipeline rank that holds it first.
        holders: Tensor -> number of pipeline ranks that hold it.
        replicated: Tensors that every tensor-parallel rank holds whole.
        first_shard: Tensor -> sum of squares of what tensor-parallel rank 0 holds.
    """

    seen: float | None
    expected: float
    squares: Mapping[str, float]
    stages: Mapping[str, int]
    holders: Mapping[str, int]
    replicated: frozenset[str]
    first_shard: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFacts:
    """One tensor's update against that of torch's optimizer, given the layout's own gradient.

    Attributes:
        error: Largest difference, relative to the largest update.
        fit: Update against expected update.
        decay: Difference of the two against the weights themselves.
        learning_rate: The one expected.
        weight_decay: The one expected.
    """

    name: str
    error: float
    max_abs: float
    fit: Fit
    decay: Fit
    learning_rate: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as in one process.

    Attributes:
        cause: A short name, one of :mod:`dsx.plan.parity.causes`.
        what: What differs, with its numbers.
        why: The likely cause, in words.
        step: Training step, from 1.
        tensor: The first tensor that differs, in the order of the backward; empty if it is none's.
    """

    cause: str
    what: str
    why: str
    step: int
    tensor: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """How near one step of one pass is to the reference.

    Attributes:
        clipping: Largest norm of the pass; 0 for none.
        step: From 1.
        loss: The layout's.
        expected_loss: The reference's, at the same weights.
        norm: As the engine reports it.
        expected_norm: The reference's.
        gradient: Largest relative difference of a gradient.
        gradient_of: Whose.
        update: Largest relative difference of an update; None if updates are not compared.
        update_of: Whose.
    """

    clipping: float
    step: int
    loss: float
    expected_loss: float
    norm: float | None
    expected_norm: float
    gradient: float
    gradient_of: str
    update: float | None
    update_of: str
