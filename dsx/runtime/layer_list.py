"""What a list of layers says before any of them is built for good: names, sizes, ties, shared objects."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from dsx.errors import ModelError
from dsx.plan.partition import partition
from dsx.spec.placement import Placement
from dsx.spec.stages import StageMap


def require_layers(layers: Sequence[Any]) -> None:
    """Raise the same ModelError on every rank, whichever builds the layer."""
    for index, layer in enumerate(layers):
        if not isinstance(layer, LayerSpec) and not callable(layer):
            raise ModelError(
                f"layer {index} ({type(layer).__name__})",
                "it is neither a LayerSpec, a module nor a function",
                "give each layer as a LayerSpec, a torch.nn.Module or a callable",
            )


def tied_layers(layers: Sequence[Any]) -> dict[str, list[tuple[int, Any]]]:
    """Tie key -> (index, spec) of its uses. Raises ModelError when the uses name different weights."""
    tied: dict[str, list[tuple[int, Any]]] = {}
    for index, spec in enumerate(layers):
        if isinstance(spec, TiedLayerSpec):
            tied.setdefault(spec.key, []).append((index, spec))
    for key, uses in tied.items():
        names = {tuple(spec.tied_weight_attr) for _, spec in uses}
        if len(names) > 1:
            raise ModelError(
                f"tied layers {key!r}",
                f"their tied_weight_attr differ: {sorted(names)}",
                "name the same weights in every TiedLayerSpec of a key",
            )
    return tied


def cut_layers(
    layers: Sequence[Any],
    method: str | Sequence[int],
    num_ranks: int,
    num_chunks: int,
    placement: Placement,
    *,
    as_stock_draws: bool,
) -> StageMap:
    """The layers as virtual stages.

    Args:
        layers: The whole list.
        method: See :func:`dsx.plan.partition.partition`; the case of a name does not matter, as in DeepSpeed.
        num_ranks: Pipeline degree.
        num_chunks: Virtual stages per pipeline rank.
        placement: Which rank has which virtual stage.
        as_stock_draws: Where parameters are counted, build each layer for real, and so move the random
            generators on as stock DeepSpeed does. Without it nothing is allocated.
    """
    if isinstance(method, str) and not method.lower().startswith("type:"):
        method = method.lower()
    needs_counts = method == "parameters"
    stages = partition(
        method,
        num_ranks * num_chunks,
        num_ranks,
        parameters=[_count_parameters(layer, as_stock_draws) if needs_counts else 0 for layer in layers],
        costs=None,
        names=[layer_name(layer) for layer in layers],
    )
    return replace(stages, placement=placement)


def layer_name(layer: Any) -> str:
    """Class name of a spec or module, name of a function."""
    if isinstance(layer, LayerSpec):
        return str(layer.typename.__name__)
    return type(layer).__name__ if isinstance(layer, nn.Module) else getattr(layer, "__name__", "")


def warn_of_copies(layers: Sequence[Any], stages: StageMap) -> None:
    """Warn of weights that layers of several pipeline ranks share as one Python object.

    Each rank is a process of its own, and so has a copy, which gets the gradients of its own layers alone:
    stock DeepSpeed trains them apart as well, without a word.
    """
    users: dict[int, list[int]] = {}
    for index, layer in enumerate(layers):
        for weight in {id(p) for m in _modules_in(layer) for p in m.parameters() if p.requires_grad}:
            users.setdefault(weight, []).append(index)
    shared = {
        tuple(indices): sorted({stages.rank_of(stages.stage_of(index)) for index in indices})
        for indices in users.values()
    }
    apart = {indices: ranks for indices, ranks in shared.items() if len(ranks) > 1}
    if apart:
        named = "; ".join(
            f"layers {', '.join(f'{index} ({layer_name(layers[index])})' for index in indices)} "
            f"on pipeline ranks {', '.join(map(str, ranks))}"
            for indices, ranks in sorted(apart.items())
        )
        warnings.warn(
            f"PipelineModule: {named} hold the same weights as one object in this script. Each rank trains a "
            "copy of its own (stock DeepSpeed does too), and the copies drift apart. To train them as one, "
            "list each use as a TiedLayerSpec of one key.",
            stacklevel=3,
        )


def _modules_in(layer: Any) -> Iterator[nn.Module]:
    """A layer that is a module, and the modules that a function carries: bound, partial or closed over."""
    if isinstance(layer, LayerSpec):
        return
    held: list[Any] = [layer, getattr(layer, "__self__", None)]
    if isinstance(layer, partial):
        held += [layer.func, getattr(layer.func, "__self__", None), *layer.args, *layer.keywords.values()]
    held += [cell.cell_contents for cell in getattr(layer, "__closure__", None) or () if _is_filled(cell)]
    held += getattr(layer, "__defaults__", None) or ()
    yield from (item for item in held if isinstance(item, nn.Module))


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that is assigned later
        return False


def _count_parameters(layer: Any, as_stock_draws: bool) -> int:
    """Trainable elements of a layer; of a spec's, by building it (see :func:`cut_layers`)."""
    if isinstance(layer, LayerSpec):
        layer = layer.build() if as_stock_draws else _build_empty(layer.build)
    if isinstance(layer, nn.Module):
        return sum(p.numel() for p in layer.parameters() if p.requires_grad)
    return 0


def _build_empty(build: Callable[[], nn.Module]) -> nn.Module:
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # noqa: BLE001 - a user's constructor may need values, which meta tensors lack
        return build()
