"""Before a pipeline trains a layer, its parameters must have values and names, and be equal on replicas.

Layers of the caller's own must also be ones that may be given a part of every row, on a context axis.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsx.errors import ModelError
from dsx.models.param import ParamSpec
from dsx.nn.context import ContextParallel
from dsx.nn.embedding import TiedUse
from dsx.nn.loss import TokenMean
from dsx.nn.parallel import TensorParallel
from dsx.parallel.groups import Groups

_SHOWN = 3
_TILE = 1 << 22
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Facts:
    """What tensor-parallel ranks compare of one parameter or buffer.

    Attributes:
        cut: Whether each rank has a part of its own.
        shape: Shape of this rank's tensor, unless it is cut.
        seed: The seed of the whole tensor's values, if dsx.nn made it.
        values: Checksum of a tensor that all must hold alike and that dsx.nn has not made.
    """

    cut: bool
    shape: tuple[int, ...]
    seed: int | None
    values: int | None


def settle(layer: nn.Module, name: str, index: int, groups: Groups) -> dict[nn.Parameter, str]:
    """Check and name what a layer holds, and make replicas over tensor parallelism equal.

    A collective call over the tensor-parallel ranks. What no rank cuts must be the same on all of them, as in
    Megatron: a parameter counts as cut if it is marked ``tensor_model_parallel``, which dsx.nn's are.

    ``name`` is the layer's in the pipeline's module: its index in the layer list, or its place if it is tied.

    Returns:
        Names of the parameters that every tensor-parallel rank holds whole, those of dsx's families aside;
        empty without tensor parallelism.

    Raises:
        ModelError: Parameters without values, modules of other tensor-parallel ranks than the pipeline's,
            or ranks whose layers do not fit together.
    """
    where = f"layer {index} ({type(layer).__name__})"
    parameter: Any
    for path, parameter in layer.named_parameters():
        if parameter.is_meta or getattr(parameter, "dsx_spec", parameter) is None:
            raise ModelError(
                f"{where}: parameter {path}",
                "it has no values" + (" (it is on the meta device)" if parameter.is_meta else ""),
                "give it some: build it on a real device, without init=None",
            )
    for path, module in layer.named_modules():
        _require_ranks(module, f"{where}: {path or 'itself'}", groups)
    if groups.mesh.tp > 1:
        _make_alike(layer, where, groups)
    whole = {}
    for path, parameter in layer.named_parameters():
        spec, full = getattr(parameter, "dsx_spec", None), f"{name}.{path}"
        if isinstance(spec, ParamSpec) and spec.name:
            continue
        if isinstance(spec, ParamSpec):
            parameter.dsx_spec = replace(spec, name=full, layer=index, hf=(full,))
        if groups.mesh.tp > 1 and not getattr(parameter, "tensor_model_parallel", False):
            whole[parameter] = full
    return whole


def _require_ranks(module: nn.Module, where: str, groups: Groups) -> None:
    """Refuse a module of dsx.nn that would sum over ranks other than those that share this layer."""
    tp = getattr(module, "tp", None)
    if not isinstance(tp, TensorParallel) or tp.size == 1:
        return
    ours = groups.tensor_parallel
    theirs = tp.size, tp.rank, dist.get_process_group_ranks(tp.group)
    if theirs == (ours.size, ours.rank, dist.get_process_group_ranks(ours.group)):
        return
    raise ModelError(
        where,
        f"it was built for rank {tp.rank} of {tp.size} tensor-parallel ranks, and this is rank {ours.rank} "
        f"of {ours.size}, or its process group has other ranks",
        "build it with groups.tensor_parallel of the groups that dsx.PipelineModule gets",
    )


def _make_alike(layer: nn.Module, where: str, groups: Groups) -> None:
    """Make equal on all tensor-parallel ranks what none of them cuts."""
    tensors = dict(layer.named_parameters()) | dict(layer.named_buffers())
    mine = {path: _facts(tensor) for path, tensor in tensors.items()}
    if all(fact.seed is None and fact.values is None for fact in mine.values()):
        return
    everyone: list[dict[str, _Facts]] = [{} for _ in range(groups.mesh.tp)]
    dist.all_gather_object(everyone, mine, group=groups.tensor)
    first = everyone[0]
    for theirs in everyone[1:]:
        _require_fitting(first, theirs, where)
    different = [
        path for path, fact in first.items() if any(theirs[path].values != fact.values for theirs in everyone)
    ]
    source = groups.mesh.group_of(groups.rank, "tp")[0]
    for path in different:
        dist.broadcast(tensors[path].data, source, group=groups.tensor)
    if different and groups.tp_rank == 0:
        more = f" and {len(different) - _SHOWN} more" if len(different) > _SHOWN else ""
        warnings.warn(
            f"{where}: {', '.join(different[:_SHOWN])}{more} differed between tensor-parallel ranks, which "
            "must hold the same of what none of them cuts: all take the first rank's. Seed them alike, "
            "as dsx.distributed does; where the layer itself cuts a parameter, set "
            "parameter.tensor_model_parallel = True.",
            stacklevel=2,
        )


def _facts(tensor: Any) -> _Facts:
    cut = bool(getattr(tensor, "tensor_model_parallel", False))
    spec, seed = getattr(tensor, "dsx_spec", None), getattr(tensor, "dsx_seed", None)
    plain = not cut and spec is None
    return _Facts(
        cut=cut,
        shape=() if cut else tuple(tensor.shape),
        # Named already: dsx's families draw by name.
        seed=None if spec is not None and spec.name else seed,
        values=int(checksum(tensor)) if plain else None,
    )


def _require_fitting(first: dict[str, _Facts], theirs: dict[str, _Facts], where: str) -> None:
    strange = sorted(first.keys() ^ theirs.keys())
    shapes = [
        p for p in first if p in theirs and (first[p].cut, first[p].shape) != (theirs[p].cut, theirs[p].shape)
    ]
    if strange or shapes:
        path = (strange or shapes)[0]
        raise ModelError(
            f"{where}: {path}",
            "tensor-parallel ranks do not have it in the same shape, and it is not marked as cut",
            "where the layer cuts a parameter itself, set parameter.tensor_model_parallel = True",
        )
    seeds = [path for path, fact in first.items() if fact.seed != theirs[path].seed]
    if seeds:
        raise ModelError(
            f"{where}: parameter {seeds[0]}",
            "tensor-parallel ranks drew other random numbers: their parts would not be those of one tensor",
            "seed these ranks alike before they build: dsx.distributed does, as does seed_layers=True",
        )


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number made of a tensor's bits, int64 scalar on its device, which differs if any one element does.

    The elements' bits as integers are each multiplied by an odd number of their own and summed modulo 2**64:
    an odd factor loses no bit, and exchanged elements show.
    """
    bits = tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _TILE):
        tile = bits[start : start + _TILE].to(torch.int64)
        odd = torch.arange(2 * start + 1, 2 * (start + tile.numel()) + 1, 2, device=tile.device)
        total += (tile * odd).sum()
    return total


VOUCHED = "context_parallel"
"""An attribute of a layer that is true where its author says that it computes, of a part of each row, what
belongs to that part in the whole row's output."""

_BY_TOKEN = (
    nn.Embedding, nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Identity, nn.Dropout,
    nn.GELU, nn.ReLU, nn.SiLU, nn.Tanh, nn.Sigmoid,
)  # fmt: skip


def require_mean(loss_fn: Any, cp: ContextParallel) -> None:
    """Refuse a loss of parts of rows that is no mean over all trained tokens. Raises ModelError."""
    if cp.size > 1 and not isinstance(loss_fn, TokenMean):
        raise ModelError(
            f"loss_fn on {cp.size} context-parallel ranks",
            "ranks have different numbers of trained tokens, of which it would take means by rank",
            "wrap it in dsx.nn.TokenMean",
        )


def require_context(layers: Iterable[tuple[int, Any]], cp: ContextParallel) -> None:
    """Refuse layers that would train something else on a part of each row in silence.

    Raises:
        ModelError: A layer that is not dsx's, none of torch's that look at one token at a time, not built of
            dsx's attention, and for which its author does not vouch; or attention built for another context
            axis.
    """
    if cp.size == 1:
        return
    for index, layer in layers:
        name = f"layer {index} ({_name(layer)})"
        if other := next(
            (each for each in _told(layer) if (each.size, each.rank) != (cp.size, cp.rank)), None
        ):
            raise ModelError(
                name,
                f"its attention is built for {other.size} context-parallel ranks, and the mesh has {cp.size}",
                "build it with groups.context_parallel of the groups that dsx.PipelineModule gets",
            )
        if not _sees_to_it(layer):
            what = "its forward_fn's" if isinstance(layer, TiedUse) else "its"
            raise ModelError(
                f"{name} on {cp.size} context-parallel ranks",
                "it is given a part of each row, and whether it looks at one token at a time is not known",
                f"build its attention of dsx's modules; where it needs no other token, set {what} {VOUCHED}"
                " = True; or use context 1",
            )


def _sees_to_it(layer: Any) -> bool:
    """Whether a layer is known to compute, of a part of each row, that part of the whole row's output."""
    if getattr(layer, VOUCHED, False):
        return True
    if type(layer) is nn.Sequential:
        return all(map(_sees_to_it, layer))
    if any(True for _ in _told(layer)):
        return True
    if isinstance(layer, TiedUse):
        use = layer.forward_fn
        module = str(getattr(getattr(use, "func", use), "__module__", ""))
        vouched = bool(getattr(use, VOUCHED, False))
        return vouched or (module.startswith("dsx.") and _sees_to_it(layer.tied_module))
    return type(layer).__module__.startswith("dsx.") or type(layer) in _BY_TOKEN


def _name(layer: Any) -> str:
    if isinstance(layer, TiedUse):
        return f"{_name(layer.tied_module)} by {_name(layer.forward_fn)}"
    return str(getattr(layer, "__name__", type(layer).__name__))


def _told(layer: Any) -> Iterator[ContextParallel]:
    """What the modules of a layer were told of the context axis."""
    layer = layer.tied_module if isinstance(layer, TiedUse) else layer
    for module in layer.modules() if isinstance(layer, nn.Module) else ():
        yield from (each for each in vars(module).values() if isinstance(each, ContextParallel))
