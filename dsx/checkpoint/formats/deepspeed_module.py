"""The model's own tensors in a stock checkpoint: weights, frozen ones, buffers, and which names are ties."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from dsx.checkpoint.formats.deepspeed_files import StockFiles
from dsx.checkpoint.formats.deepspeed_flat import Fragment, whole
from dsx.checkpoint.formats.deepspeed_order import TIED, Ties
from dsx.checkpoint.formats.deepspeed_partition import over_all_ranks, part_numel
from dsx.checkpoint.formats.deepspeed_ties import buffers_of, layer_tensors, tied_layers
from dsx.checkpoint.formats.unpickle import TensorRef
from dsx.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """What one model-parallel rank says about the model.

    Attributes:
        weights: Whole tensors, and ZeRO-3's parts of frozen ones.
        names: Of all its tensors, in the model's order, those included that it does not store.
        order: Names of all parameters in the model's order, with local shapes; none at ZeRO-3.
        buffers: Names of buffers.
        ties: Names that stand for the same tensor, the model's first name first.
    """

    weights: tuple[Fragment, ...]
    names: tuple[str, ...]
    order: Mapping[str, tuple[int, ...]]
    buffers: frozenset[str]
    ties: tuple[tuple[str, ...], ...]


def modules_of(files: StockFiles, ties: Ties | None = None) -> dict[int, Module]:
    """The model's tensors by model-parallel rank. A pipeline's layers are all listed at its first stage.

    Args:
        files: The checkpoint.
        ties: A pipeline's tied modules, where the user says which there are.
    """
    ranks = range(files.pp * files.tp)
    if files.layers:
        tied = tied_layers(files, ties)
        return {rank: _pipeline(files, rank, tied) for rank in ranks}
    return {rank: _plain(files, rank) for rank in ranks}


def _plain(files: StockFiles, rank: int) -> Module:
    file = files.models[rank, 0]
    module = file.content.get("module")
    if not isinstance(module, dict):
        raise CheckpointError(
            str(file.path),
            "it holds no module, and there are no layer files",
            "complete the checkpoint; under ZeRO-3 DeepSpeed cannot save the layers of a PipelineModule",
        )
    refs = {str(name): ref for name, ref in module.items() if isinstance(ref, TensorRef)}
    sharded = files.zero_stage == 3
    held = {name: ref for name, ref in refs.items() if ref.numel or not sharded}
    buffers = frozenset(map(str, file.content.get("buffer_names") or ()))
    ties = _ties(held, file.content.get("shared_params") or {})
    others = {name for names in ties for name in names[1:]}
    weights = [whole(ref, file, name, "weight") for name, ref in held.items() if name not in others]
    known = {one.name for one in weights}
    if sharded:
        weights += [one for one in _frozen_parts(files, rank) if one.name not in known]
    order = {n: ref.shape for n, ref in held.items() if n not in buffers and n not in others}
    return Module(weights=tuple(weights), names=tuple(refs), order=order, buffers=buffers, ties=ties)


def _ties(refs: Mapping[str, TensorRef], shared: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
    """Names of equal bytes of one storage, and those that DeepSpeed lists as shared."""
    home = dict(shared)
    same: dict[Any, list[str]] = defaultdict(list)
    for name, ref in refs.items():
        if ref.numel:
            same[ref.offset, ref.shape, ref.strides, ref.dtype].append(name)
    for names in same.values():
        for name in names[1:]:
            home.setdefault(name, names[0])
    found: dict[str, list[str]] = defaultdict(list)
    for name, first in home.items():
        seen = {name}
        while first in home and first not in seen:
            seen.add(first)
            first = home[first]  # noqa: PLW2901 (to the end of the chain)
        if first in seen:
            raise CheckpointError(
                f"tensor {name}", "shared_params says that it is shared with itself", "use another checkpoint"
            )
        found[first].append(name)
    return tuple((first, *names) for first, names in found.items())


def _frozen_parts(files: StockFiles, rank: int) -> Iterator[Fragment]:
    """ZeRO-3's parts of parameters that the optimizer does not have."""
    shapes = files.models[rank, 0].content.get("frozen_param_shapes") or {}
    first = files.models[rank, 0].content.get("frozen_param_fragments") or {}
    sizes = [ref.numel if isinstance(ref := first.get(name), TensorRef) else 0 for name in shapes]
    everywhere = over_all_ranks(sizes, [[shape] for shape in shapes.values()], dp=files.dp, tp=files.tp)
    own = [files.models[rank, dp] for dp in range(files.dp)]
    world = [files.models[mp, dp] for dp in range(files.dp) for mp in range(files.tp)]
    for (name, shape), over_all in zip(shapes.items(), everywhere, strict=True):
        holders = world if over_all else own
        size = part_numel(shape, len(holders))
        for at, file in enumerate(holders):
            ref = (file.content.get("frozen_param_fragments") or {}).get(name)
            start, stop = at * size, min((at + 1) * size, prod(shape))
            if start >= stop:
                continue
            if not isinstance(ref, TensorRef) or ref.numel < stop - start:
                raise CheckpointError(
                    f"{file.path}: tensor {name}", "its part of this frozen tensor is missing", "save again"
                )
            part = whole(ref, file, name, "weight")
            yield replace(part, shape=tuple(shape), start=start, stop=stop, over_all=over_all)


def _pipeline(files: StockFiles, rank: int, tied: Mapping[int, str]) -> Module:
    """The layers; which stage has which is not written, and only their order matters."""
    stage, tensor = divmod(rank, files.tp)
    model = files.models[rank, 0]
    buffers = frozenset(map(str, model.content.get("buffer_names") or ()))
    if stage:
        return Module(weights=(), names=(), order={}, buffers=buffers, ties=())
    everywhere = {name for at in range(files.pp) for name in buffers_of(files, at * files.tp + tensor)}
    weights: list[Fragment] = []
    order: dict[str, tuple[int, ...]] = {}
    ties: dict[str, list[str]] = defaultdict(list)
    for (layer, owner), file in sorted(files.layers.items()):
        if owner != tensor:
            continue
        for key, ref in layer_tensors(file):
            prefix = f"{TIED}.{tied[layer]}" if layer in tied else str(layer)
            name = f"{prefix}.{key}"
            if layer in tied:
                ties[name].append(f"{layer}.{key}")
            weights.append(whole(ref, file, name, "weight"))
            if name not in everywhere:
                order.setdefault(name, ref.shape)
    return Module(
        weights=tuple(weights),
        names=tuple(one.name for one in weights),
        order=order,
        buffers=buffers,
        ties=tuple((name, *others) for name, others in ties.items()),
    )
