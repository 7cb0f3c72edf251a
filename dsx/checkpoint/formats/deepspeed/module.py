"""The model's own tensors in a stock checkpoint: weights, frozen ones, buffers, and which names are ties.

``PipelineModule`` calls a tied layer's tensors ``tied_modules.<key>.<path>``, where dsx has
``<layer>.<path>``. Which layers of a stock pipeline are copies of a tied module, the files say or the user.
A layer's file names its tensors without the layer, and only layers that call the module itself have one:
those with a ``forward_fn`` have none (pipe/module.py, ``save_state_dict``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from dsx.checkpoint.catalog import Catalog, Entry, unusable
from dsx.checkpoint.file_io import crc32_of_file
from dsx.checkpoint.formats.deepspeed.files import StockFiles
from dsx.checkpoint.formats.deepspeed.flat import Fragment, mapped, over_all_ranks, whole
from dsx.checkpoint.formats.deepspeed.order import TIED, Ties
from dsx.checkpoint.formats.huggingface.catalog import as_dsx, renamed
from dsx.checkpoint.formats.torch_file import TensorRef, TorchFile
from dsx.checkpoint.pieces import clipped
from dsx.errors import CheckpointError
from dsx.models.param import ParamSpec
from dsx.parallel.mesh import ALONE
from dsx.parallel.zero import part_of


def tied_layers(files: StockFiles, ties: Ties | None) -> dict[int, str]:
    """Key of the tied module that a layer is, for the layers that are one and have a file.

    The optimizer has a layer's tensors as ``<layer>.<path>``, or as ``tied_modules.<key>.<path>``. So a tied
    layer is one that the optimizer does not know by its number, and its key is that of the tied module with
    the same tensors; without ZeRO the optimizer has no names, and only the user can say it.
    """
    known: dict[str, int] = {}
    for rank in files.stages_of():
        known.update(_trained(files, rank))
        known.update(dict.fromkeys(buffers_of(files, rank), 0))
    keys: dict[str, dict[str, int]] = defaultdict(dict)
    for name, numel in known.items():
        if name.startswith(f"{TIED}."):
            key, path = name.removeprefix(f"{TIED}.").split(".", 1)
            keys[key] |= {path: numel} if numel else {}
    if ties is not None:
        return _told(files, ties, set(known), set(keys))
    found = {}
    for (layer, tensor), file in files.layers.items():
        tensors = {key: ref.numel for key, ref in layer_tensors(file)}
        if tensor or any(f"{layer}.{key}" in known for key in tensors) or not tensors:
            continue
        fits = [key for key, held in keys.items() if held and held.items() <= tensors.items()]
        if len(fits) > 1:
            raise CheckpointError(
                str(file.path),
                f"it may be a copy of tied module {' or '.join(fits)}: their tensors have the same shapes",
                "say which layers use each: --tied KEY=LAYERS",
            )
        if fits:
            found[layer] = fits[0]
    return found


def _told(files: StockFiles, ties: Ties, known: set[str], keys: set[str]) -> dict[int, str]:
    """The user's word, held against the files."""
    found: dict[int, str] = {}
    lacking = sorted(keys - {key for key, _ in ties})
    if lacking:
        raise CheckpointError(
            f"{files.root}: tied module {lacking[0]}",
            "the checkpoint has it, and no layer is said to use it",
            f"add --tied {lacking[0]}=LAYERS",
        )
    prints = layer_prints(files)
    for key, layers in ties:
        where = f"--tied {key}={','.join(map(str, layers))}"
        held = [layer for layer in layers if layer in prints]
        own = next((one for one in known for layer in layers if one.startswith(f"{layer}.")), None)
        if not held or own is not None or any(layer in found for layer in layers):
            what = "no file has a tensor of one of these layers" if not held else "a layer has two keys"
            raise CheckpointError(
                where,
                what if own is None else f"the optimizer has {own}, which is of no tied module",
                "name the layers of the TiedLayerSpec, counted from 0",
            )
        other = next((layer for layer in held if prints[layer] != prints[held[0]]), None)
        if other is not None:
            raise CheckpointError(
                where,
                f"layers {held[0]} and {other} have other tensors, or not the same bytes",
                "name layers of one TiedLayerSpec, counted from 0",
            )
        found |= dict.fromkeys(held, key)
    return found


def layer_prints(files: StockFiles) -> dict[int, tuple[Any, ...]]:
    """For every layer that has tensors a value that layers of the same bytes have alike."""
    found: dict[int, tuple[Any, ...]] = {}
    for (layer, tensor), file in sorted(files.layers.items()):
        told = tuple(
            (tensor, key, ref.dtype, ref.shape, ref.strides, ref.start, _sum(file, ref))
            for key, ref in layer_tensors(file)
        )
        if told:
            found[layer] = (*found.get(layer, ()), *told)
    return found


def _sum(file: TorchFile, ref: TensorRef) -> int:
    storage = file.storages[ref.storage]
    if storage.crc32 is not None:
        return storage.crc32
    with file.path.open("rb") as opened:
        return crc32_of_file(opened.fileno(), storage.start, storage.stop)


def _trained(files: StockFiles, rank: int) -> dict[str, int]:
    """Elements of every parameter that the optimizer has a name for."""
    shapes = files.models[rank, 0].content.get("param_shapes")
    if shapes:
        return {str(name): prod(shape) for group in shapes for name, shape in group.items()}
    found: dict[str, int] = defaultdict(int)
    for replica in files.replicas if files.optimizers else ():
        for name, numel in mapped(files.optimizers[rank, replica]):
            found[name] += numel
    return found


def buffers_of(files: StockFiles, rank: int) -> Sequence[str]:
    """Names of a rank's buffers."""
    return [str(name) for name in files.models[rank, 0].content.get("buffer_names") or ()]


def layer_tensors(file: TorchFile) -> list[tuple[str, TensorRef]]:
    """Tensors of a layer's file, by their names within the layer."""
    if not isinstance(file.content, dict):
        raise unusable(str(file.path), "it is no layer of a PipelineModule")
    return [(str(key), ref) for key, ref in file.content.items() if isinstance(ref, TensorRef)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """What one model-parallel rank says about the model.

    Attributes:
        weights: Whole tensors, and ZeRO-3's parts of frozen ones.
        names: Of all its tensors, in the model's order, those included that it does not store.
        order: Names of all parameters in the model's order, with local shapes; none at ZeRO-3.
        ties: Names that stand for the same tensor, the model's first name first.
    """

    weights: tuple[Fragment, ...]
    names: tuple[str, ...]
    order: Mapping[str, tuple[int, ...]]
    buffers: frozenset[str]
    ties: tuple[tuple[str, ...], ...]


def modules_of(files: StockFiles, ties: Ties | None = None) -> dict[int, Module]:
    """The model's tensors by model-parallel rank. A pipeline's layers are all listed at its first stage."""
    if files.layers:
        tied = tied_layers(files, ties)
        return {rank: _pipeline(files, rank, tied) for rank in files.ranks}
    return {rank: _plain(files, rank) for rank in files.ranks}


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
            raise unusable(f"tensor {name}", "shared_params says that it is shared with itself")
        found[first].append(name)
    return tuple((first, *names) for first, names in found.items())


def _frozen_parts(files: StockFiles, rank: int) -> Iterator[Fragment]:
    """ZeRO-3's parts of parameters that the optimizer does not have."""
    shapes = files.models[rank, 0].content.get("frozen_param_shapes") or {}
    first = files.models[rank, 0].content.get("frozen_param_fragments") or {}
    sizes = [ref.numel if isinstance(ref := first.get(name), TensorRef) else 0 for name in shapes]
    everywhere = over_all_ranks(sizes, [[shape] for shape in shapes.values()], **files.degrees)
    own = [files.models[rank, replica] for replica in files.replicas]
    world = [files.models[shard, replica] for replica in files.replicas for shard in files.shards]
    for (name, shape), over_all in zip(shapes.items(), everywhere, strict=True):
        holders = world if over_all else own
        for at, file in enumerate(holders):
            ref = (file.content.get("frozen_param_fragments") or {}).get(name)
            start, stop = part_of(prod(shape), len(holders), at)
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
    stage, tensor = files.place(rank)
    model = files.models[rank, 0]
    buffers = frozenset(map(str, model.content.get("buffer_names") or ()))
    if stage:
        return Module(weights=(), names=(), order={}, buffers=buffers, ties=())
    everywhere = {name for at in files.stages_of(tensor) for name in buffers_of(files, at)}
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


def tied_names(specs: Sequence[ParamSpec]) -> dict[str, str]:
    """What PipelineModule calls the tensors that several layers use."""
    return {
        spec.name: f"tied_modules.{spec.tie}.{spec.name.partition('.')[2]}"
        for spec in specs
        if spec.tie is not None
    }


def under_names(source: Catalog, names: Mapping[str, str]) -> Catalog:
    """The same checkpoint with some tensors under other names, and without what is known of their cuts."""
    if not any(entry.name in names for entry in source.entries):
        return source
    entries = []
    for entry in source.entries:
        name = names.get(entry.name, entry.name)
        aliases = tuple(alias for alias in entry.aliases if alias != name)
        entries.append(replace(entry, name=name, aliases=aliases))
    return replace(
        source,
        entries=tuple(entries),
        tile_digests={(names.get(n, n), state): sums for (n, state), sums in source.tile_digests.items()},
        facts=renamed(source.facts, lambda name: (names.get(name, name),), str(source.root)),
        specs=(),
    )


def as_model(
    source: Catalog, specs: Sequence[ParamSpec], *, forms: Iterable[tuple[ParamSpec, ...]] = ()
) -> Catalog:
    """The same checkpoint under dsx's names, whatever engine of the model wrote it.

    A stock engine's checkpoint does not say in which form the tensors of ``specs`` are: ``forms`` has all
    that they can have (:func:`dsx.checkpoint.claims.forms_of`).
    """
    stock = {name: ours for ours, name in tied_names(specs).items()}
    source = under_names(source, stock)
    known = {spec.name: spec for spec in specs}
    entries = tuple(_unpadded(entry, known.get(entry.name)) for entry in source.entries)
    held = {entry.name for entry in entries}
    if not source.specs and not held.issuperset(known) and any(name[:1].isdecimal() for name in held):
        told = (form for form in forms if held.issuperset(spec.name for spec in form))
        source = replace(source, specs=next(told, ()))
    return as_dsx(replace(source, entries=entries), specs)


def _unpadded(entry: Entry, spec: ParamSpec | None) -> Entry:
    if spec is None or spec.pad_multiple is None or entry.shape != spec.local_shape(ALONE):
        return entry
    box = tuple((0, extent) for extent in spec.shape)
    return replace(entry, shape=spec.shape, pieces=clipped(entry, box))
