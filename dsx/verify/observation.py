"""The record of a layout's training, as it travels between processes, and put together to whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsx.checkpoint.formats import slices
from dsx.models.param import ParamSpec
from dsx.parallel.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
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
class ObservedShard:
    """A part of a flattened parameter that a rank's optimizer updates, fp32, around one step.

    Attributes:
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
    pieces: Sequence[ObservedShard]
    spread: dict[str, float]
    not_finite: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankObservation:
    """Everything that one rank has observed.

    Attributes:
        known: Its parameters by logical name.
        built: Weights as the model was built, before anything was put into them.
        weights: Weights before each step, and after the last; empty on data-parallel ranks but the first.
        biases: Of routers, by block and path, before each step and after the last.
        outputs: Layer -> its output for the first micro-batch of the first step.
    """

    rank: int
    known: dict[str, TensorInfo]
    built: dict[str, Tensor]
    weights: Sequence[dict[str, Weight]]
    biases: Sequence[dict[str, Tensor]]
    steps: Sequence[RankStep]
    outputs: dict[str, Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """A dropout mask on a rank: where it is, what it should be, a digest, and how far its scale is off."""

    sharded: bool
    digest: str
    scale_off: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunObservation:
    """A layout's training, from all ranks.

    Attributes:
        micro_batches: Micro-batches per step and replica.
        clipping: Largest norm; 0 for none.
    """

    mesh: Mesh
    micro_batches: int
    clipping: float
    ranks: Sequence[RankObservation]


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """The results of one launch of ranks.

    Attributes:
        passes: Training without clipping and, if the config clips, with it.
        masks: Rank -> dropout module -> mask; empty for a model without dropout.
    """

    passes: Sequence[RunObservation]
    masks: Sequence[dict[str, Mask]] = field(default_factory=tuple)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullTensor:
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
class ObservedStep:
    """One step of a layout in whole tensors.

    Attributes:
        norms: The norms by rank; None where none is reported.
        weights: The weights before the step, as the model computes with them.
        gradients: What the optimizer was given; tensors that got none are left out.
        next_weights: The weights after the step, as the model computes with them.
        data_spread: Tensor -> largest difference between data-parallel ranks, of gradients.
        weight_spread: The same of the weights before the step.
        next_spread: The same of the weights after it.
        not_finite: Tensors whose gradients are not finite on some rank.
    """

    losses: Sequence[float]
    norms: Sequence[float | None]
    weights: dict[str, FullTensor]
    gradients: dict[str, FullTensor]
    before: dict[str, FullTensor]
    after: dict[str, FullTensor]
    next_weights: dict[str, FullTensor]
    data_spread: dict[str, float]
    weight_spread: dict[str, float]
    next_spread: dict[str, float]
    not_finite: Sequence[str]


Local = dict[tuple[int, int, int], Tensor]
"""(pipeline rank, tensor-parallel rank, of experts expert-parallel rank, else 0) -> that rank's tensor."""


def tensor_infos(run: RunObservation) -> dict[str, TensorInfo]:
    """Every parameter of the layout by logical name, as its first holder knows it."""
    found: dict[str, TensorInfo] = {}
    for rank in run.ranks:
        for name, item in rank.known.items():
            if name not in found or not item.copy:
                found[name] = item
    return found


def holders(run: RunObservation) -> dict[str, tuple[int, ...]]:
    """Logical name -> pipeline ranks that hold it, the first holder first."""
    found: dict[str, dict[int, bool]] = {}
    for rank in run.ranks:
        for name, item in rank.known.items():
            found.setdefault(name, {})[run.mesh.coords(rank.rank)["pp"]] = item.copy
    return {name: tuple(sorted(places, key=lambda pp: (places[pp], pp))) for name, places in found.items()}


def built_weights(run: RunObservation) -> dict[str, FullTensor]:
    """Weights as the model was built."""
    return _of_first_replica(run, lambda rank: rank.built)


def observed_steps(run: RunObservation) -> Iterator[ObservedStep]:
    """The layout's steps."""
    weights = [_weights(run, index) for index in range(len(run.ranks[0].steps) + 1)]
    for index in range(len(run.ranks[0].steps)):
        steps = [rank.steps[index] for rank in run.ranks]
        spread: dict[str, float] = {}
        for step in steps:
            for name, value in step.spread.items():
                spread[name] = max(value, spread.get(name, 0.0))
        yield ObservedStep(
            losses=[step.loss for step in steps],
            norms=[step.norm for step in steps],
            weights=weights[index][0],
            weight_spread=weights[index][1],
            gradients=_pieces(run, index, "gradient"),
            before=_pieces(run, index, "before"),
            after=_pieces(run, index, "after"),
            next_weights=weights[index + 1][0],
            next_spread=weights[index + 1][1],
            data_spread=spread,
            not_finite=list(dict.fromkeys(name for step in steps for name in step.not_finite)),
        )


def _of_first_replica(
    run: RunObservation, of_rank: Callable[[RankObservation], Mapping[str, Tensor]]
) -> dict[str, FullTensor]:
    locals_: dict[str, Local] = {}
    for rank in run.ranks:
        for name, values in of_rank(rank).items():
            experts = _of_experts(rank.known[name])
            if run.mesh.replica_of(rank.rank, experts=experts) == 0:
                locals_.setdefault(name, {})[_place(run.mesh, rank.rank, experts=experts)] = values
    return _full_tensors(run, locals_)


def _of_experts(item: TensorInfo) -> bool:
    return item.spec is not None and item.spec.experts is not None


def _place(mesh: Mesh, rank: int, *, experts: bool) -> tuple[int, int, int]:
    (_, pp), (_, tp), (_, ep) = (mesh.at(rank).along(axis) for axis in ("pp", "tp", "ep"))
    return pp, tp, ep if experts else 0


def _weights(run: RunObservation, index: int) -> tuple[dict[str, FullTensor], dict[str, float]]:
    """Weights before a step, and the largest difference of each between data-parallel ranks."""
    found = _of_first_replica(
        run, lambda rank: {name: each.values for name, each in rank.weights[index].items()}
    )
    spread = dict.fromkeys(found, 0.0)
    for rank in run.ranks:
        for name, weight in rank.weights[index].items():
            spread[name] = max(weight.spread, spread[name])
    return found, spread


def _pieces(run: RunObservation, index: int, field: str) -> dict[str, FullTensor]:
    locals_: dict[str, Local] = {}
    for rank in run.ranks:
        for piece in rank.steps[index].pieces:
            values: Tensor | None = getattr(piece, field)
            if values is None:
                continue
            item = rank.known[piece.name]
            place, shape = _place(run.mesh, rank.rank, experts=_of_experts(item)), item.shape
            flat = locals_.setdefault(piece.name, {}).setdefault(place, torch.full(shape, torch.nan))
            flat.view(-1)[piece.start : piece.start + values.numel()] = values
    return _full_tensors(run, locals_)


def _full_tensors(run: RunObservation, locals_: dict[str, Local]) -> dict[str, FullTensor]:
    items, places = tensor_infos(run), holders(run)
    return {name: _full_tensor(items[name], places[name], parts, run.mesh) for name, parts in locals_.items()}


def _full_tensor(item: TensorInfo, places: Sequence[int], parts: Local, mesh: Mesh) -> FullTensor:
    there = [pp for pp in places if (pp, 0, 0) in parts]
    spec, expert = item.spec, mesh.ep if _of_experts(item) else 1
    one = Mesh.of(tp=mesh.tp, dp=expert, ep=expert)  # a replica of a stage
    stands = [_place(one, at, experts=True)[1:] for at in range(one.size)]

    def held(pp: int, ranks: Sequence[int]) -> list[tuple[int, Tensor]]:
        """The parts of some tensor-parallel ranks of a stage, each with its number in ``one``."""
        keys = ((at, (pp, *place)) for at, place in enumerate(stands) if place[0] in ranks)
        return [(at, parts[key]) for at, key in keys if key in parts]

    def whole(own: Sequence[tuple[int, Tensor]]) -> Tensor:
        shards = [each for _, each in own]
        return shards[0] if spec is None else slices.merge(spec, shards, [one.at(at) for at, _ in own])

    cut = spec is not None and spec.split is not None
    values, padding = [], 0.0
    for pp in there:
        own = held(pp, range(mesh.tp) if cut else (0,))
        values.append(whole(own))
        if spec is not None and spec.pad_multiple is not None and spec.split is not None:
            for rank, shard in own:
                boxes = spec.boxes(one.at(rank))
                real = sum(hi - lo for lo, hi in (box[spec.split] for box in boxes))
                rest = shard.narrow(spec.split, real, shard.shape[spec.split] - real)
                padding = max(padding, float(rest.abs().max()) if rest.numel() else 0.0)
    by_rank = filter(None, (held(there[0], (rank,)) for rank in range(mesh.tp)))
    shards = [own[0][1] if cut else whole(own) for own in by_rank]  # ranks of experts have parts of a copy
    return FullTensor(values=values[0], shards=shards, copies=values[1:], padding=padding)
