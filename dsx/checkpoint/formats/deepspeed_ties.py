"""Which layers of a stock pipeline are copies of a tied module: by what the files say, or by the user's word.

A layer's file names its tensors without the layer, and only layers that call the module itself have one:
those with a ``forward_fn`` have none (pipe/module.py, ``save_state_dict``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from math import prod
from typing import Any

from dsx.checkpoint.file_io import crc32_of_file
from dsx.checkpoint.formats.deepspeed_files import StockFiles
from dsx.checkpoint.formats.deepspeed_flat import mapped
from dsx.checkpoint.formats.deepspeed_order import TIED, Ties
from dsx.checkpoint.formats.torch_file import TorchFile
from dsx.checkpoint.formats.unpickle import TensorRef
from dsx.errors import CheckpointError


def tied_layers(files: StockFiles, ties: Ties | None) -> dict[int, str]:
    """Key of the tied module that a layer is, for the layers that are one and have a file.

    The optimizer has a layer's tensors as ``<layer>.<path>``, or as ``tied_modules.<key>.<path>``. So a tied
    layer is one that the optimizer does not know by its number, and its key is that of the tied module with
    the same tensors; without ZeRO the optimizer has no names, and only the user can say it.

    Raises:
        CheckpointError: Two tied modules have the same tensors, or the user's word does not fit the files.
    """
    known: dict[str, int] = {}
    for rank in range(0, files.pp * files.tp, files.tp):
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
    for dp in range(files.dp if files.optimizers else 0):
        for name, numel in mapped(files.optimizers[rank, dp]):
            found[name] += numel
    return found


def buffers_of(files: StockFiles, rank: int) -> Sequence[str]:
    """Names of a rank's buffers."""
    return [str(name) for name in files.models[rank, 0].content.get("buffer_names") or ()]


def layer_tensors(file: TorchFile) -> list[tuple[str, TensorRef]]:
    """Tensors of a layer's file, by their names within the layer."""
    if not isinstance(file.content, dict):
        raise CheckpointError(str(file.path), "it is no layer of a PipelineModule", "use another checkpoint")
    return [(str(key), ref) for key, ref in file.content.items() if isinstance(ref, TensorRef)]
