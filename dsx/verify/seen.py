"""The record of a layout's training, as it travels between processes, and put together to whole tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsx.checkpoint.formats import slices
from dsx.models.param import ParamSpec
from dsx.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What a rank knows of one of its parameters.

    Attributes:
        shape: Shape of the rank's tensor, whole over data parallelism.
        spec: The logical tensor that it is a part of; None for layers that are not dsx's, where it is whole.
        copy: Whether an earlier pipeline rank holds the same tensor.
    """

    shape: tuple[int, ...]
    spec: ParamSpec | None
    copy: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPiece:
    """A part of a flattened parameter that a rank's optimizer updates, fp32, around one step.

    Attributes:
        name: Logical tensor.
        start: First element.
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
        norm: The norm that the engine reports; None if it reports none.
        pieces: What the optimizer updates.
        spread: Tensor -> largest difference of its gradient between data-parallel ranks that hold it all.
        not_finite: Tensors whose gradients are not finite, which no optimizer is given.
    """

    loss: float
    norm: float | None
    pieces: Sequence[SeenPiece]
    spread: dict[str, float]
    not_finite: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSeen:
    """Everything that one rank has seen.

    Attributes:
        rank: Its number in the mesh.
        known: Its parameters by logical name.
        built: Weights as the model was built, before anything was put into them.
        weights: Weights before each step, and after the last; empty on data-parallel ranks but the first.
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
    """One dropout mask on one rank: where it is, what it should be, and a digest of it."""

    sharded: bool
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A layout's training, from all ranks.

    Attributes:
        micro_batches: Micro-batches per step and replica.
        clipping: Largest norm; 0 for none.
    """

    mesh: Mesh
    micro_batches: int
    clipping: float
    ranks: Sequence[RankSeen]


@dataclass(frozen=True, slots=True, kw_only=True)
class Witness:
    """The results of one launch of ranks.

    Attributes:
        passes: Training without clipping and, if the config clips, with it.
        masks: Rank -> dropout module -> mask; empty for a model without dropout.
    """

    passes: Sequence[Seen]
    masks: Sequence[dict[str, Mask]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """One logical tensor, and every copy of it.

    Attributes:
        values: The tensor of the first pipeline rank that holds it, tensor-parallel parts put together (the
            first rank's copy where each holds all).
        shards: That pipeline rank's tensors by tensor-parallel rank, whole each if it is replicated.
        copies: The same of the other pipeline ranks that hold it.
        padding: Largest element in rows that only pad the vocabulary.
    """

    values: Tensor
    shards: Sequence[Tensor]
    copies: Sequence[Tensor]
    padding: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeStep:
    """One step of a layout in whole tensors.

    Attributes:
        losses: The losses by rank.
        norms: The norms by rank; None where none is reported.
        weights: The weights before the step, as the model computes with them.
        gradients: What the optimizer was given; tensors that got none are left out.
        next_weights: The weights after the step, as the model computes with them.
        data_spread: Tensor -> largest difference between data-parallel ranks, of gradients.
        weight_spread: The same of the weights before the step.
        not_finite: Tensors whose gradients are not finite on some rank.
    """

    losses: Sequence[float]
    norms: Sequence[float | None]
    weights: dict[str, Whole]
    gradients: dict[str, Whole]
    before: dict[str, Whole]
    after: dict[str, Whole]
    next_weights: dict[str, Whole]
    data_spread: dict[str, float]
    weight_spread: dict[str, float]
    not_finite: Sequence[str]


Local = dict[tuple[int, int], Tensor]
"""(pipeline rank, tensor-parallel rank) -> that rank's tensor."""


def known(seen: Seen) -> dict[str, Known]:
    """Every parameter of the layout by logical name, as its first holder knows it."""
    found: dict[str, Known] = {}
    for rank in seen.ranks:
        for name, item in rank.known.items():
            if name not in found or not item.copy:
                found[name] = item
    return found


def holders(seen: Seen) -> dict[str, tuple[int, ...]]:
    """Logical name -> pipeline ranks that hold it, the first holder first."""
    found: dict[str, dict[int, bool]] = {}
    for rank in seen.ranks:
        for name, item in rank.known.items():
            found.setdefault(name, {})[seen.mesh.coords(rank.rank)["pp"]] = item.copy
    return {name: tuple(sorted(places, key=lambda pp: (places[pp], pp))) for name, places in found.items()}


def built_weights(seen: Seen) -> dict[str, Whole]:
    """Weights as the model was built."""
    locals_: dict[str, Local] = {}
    for rank in _first_replica(seen):
        at = seen.mesh.coords(rank.rank)
        for name, values in rank.built.items():
            locals_.setdefault(name, {})[at["pp"], at["tp"]] = values
    return _wholes(seen, locals_)


def whole_steps(seen: Seen) -> Iterator[WholeStep]:
    """The layout's steps."""
    weights = [_weights(seen, index) for index in range(len(seen.ranks[0].steps) + 1)]
    for index in range(len(seen.ranks[0].steps)):
        steps = [rank.steps[index] for rank in seen.ranks]
        spread: dict[str, float] = {}
        for step in steps:
            for name, value in step.spread.items():
                spread[name] = max(value, spread.get(name, 0.0))
        yield WholeStep(
            losses=[step.loss for step in steps],
            norms=[step.norm for step in steps],
            weights=weights[index][0],
            weight_spread=weights[index][1],
            gradients=_pieces(seen, index, "gradient"),
            before=_pieces(seen, index, "before"),
            after=_pieces(seen, index, "after"),
            next_weights=weights[index + 1][0],
            data_spread=spread,
            not_finite=list(dict.fromkeys(name for step in steps for name in step.not_finite)),
        )


def _first_replica(seen: Seen) -> list[RankSeen]:
    return [rank for rank in seen.ranks if seen.mesh.replica(rank.rank) == 0]


def _weights(seen: Seen, index: int) -> tuple[dict[str, Whole], dict[str, float]]:
    locals_: dict[str, Local] = {}
    spread: dict[str, float] = {}
    for rank in _first_replica(seen):
        at = seen.mesh.coords(rank.rank)
        for name, weight in rank.weights[index].items():
            locals_.setdefault(name, {})[at["pp"], at["tp"]] = weight.values
            spread[name] = max(weight.spread, spread.get(name, 0.0))
    return _wholes(seen, locals_), spread


def _pieces(seen: Seen, index: int, field: str) -> dict[str, Whole]:
    locals_: dict[str, Local] = {}
    for rank in seen.ranks:
        at = seen.mesh.coords(rank.rank)
        for piece in rank.steps[index].pieces:
            values: Tensor | None = getattr(piece, field)
            if values is None:
                continue
            place, shape = (at["pp"], at["tp"]), rank.known[piece.name].shape
            flat = locals_.setdefault(piece.name, {}).setdefault(place, torch.full(shape, torch.nan))
            flat.view(-1)[piece.start : piece.start + values.numel()] = values
    return _wholes(seen, locals_)


def _wholes(seen: Seen, locals_: dict[str, Local]) -> dict[str, Whole]:
    items, places = known(seen), holders(seen)
    return {name: _whole(items[name], places[name], parts, seen.mesh.tp) for name, parts in locals_.items()}


def _whole(item: Known, places: Sequence[int], parts: Local, tp: int) -> Whole:
    there = [pp for pp in places if (pp, 0) in parts]
    spec = item.spec
    values, padding = [], 0.0
    for pp in there:
        shards = [parts[pp, rank] for rank in range(tp) if (pp, rank) in parts]
        values.append(shards[0] if spec is None else slices.merge(spec, shards))
        if spec is not None and spec.pad_multiple is not None and spec.split is not None:
            for rank, shard in enumerate(shards):
                boxes = spec.boxes(Mesh.of(tp=tp).at(rank))
                real = sum(hi - lo for lo, hi in (box[spec.split] for box in boxes))
                rest = shard.narrow(spec.split, real, shard.shape[spec.split] - real)
                padding = max(padding, float(rest.abs().max()) if rest.numel() else 0.0)
    first = [parts[there[0], rank] for rank in range(tp) if (there[0], rank) in parts]
    return Whole(values=values[0], shards=first, copies=values[1:], padding=padding)
