"""Feed-forwards computed for some of a rank's tokens at a time, and again in backward, tile by tile.

A feed-forward treats each token by itself, and what it makes inside is several times as wide as what it is
given. Of these activations one tile's exist at a time, in forward and in backward (ALST: Bekman et al. 2025,
arXiv:2506.13996, "Sequence Tiling"; TiledMLP in deepspeed/runtime/sequence_parallel/ulysses_sp.py).

Shapes: B micro-batch, s this rank's part of a sequence, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import get_device_states, set_device_states

from dsx.nn.collectives import SEQUENCE
from dsx.nn.parallel import uncompiled
from dsx.nn.split import WeightGradients


def tile(module: nn.Module, tiles: int, split: WeightGradients | None) -> None:
    """Have a module compute ``tiles`` parts of each sequence one after the other; in place.

    Its hooks run once, around all tiles, and ZeRO-3 gathers its parameters once for a forward and once for a
    backward. Weight gradients are summed over tiles, in float32, before anybody sees them. Its backward is
    never divided: what a tile's weight gradients need goes with the tile.

    Args:
        module: Takes hidden states [B, s, H] alone, gives as many, and computes each token by itself.
        tiles: How many; 1 leaves the module as it is.
        split: What its linears' weight gradients wait in when the backward is divided.
    """
    if tiles > 1:
        module.forward = _Tiled(module, module.forward, tiles, split)
        module._z3_leaf = True  # type: ignore[assignment]  # noqa: SLF001 (deepspeed/utils/z3_leaf_module.py)


@dataclass(frozen=True)
class _Tiled:
    """The forward of a module, tile by tile."""

    module: nn.Module
    function: Callable[[Tensor], Tensor]
    tiles: int
    split: WeightGradients | None

    def __call__(self, x_BsH: Tensor) -> Tensor:
        """[B, s, H] to the same."""
        y: Tensor = uncompiled(self._run, x_BsH)
        return y

    def _run(self, x_BsH: Tensor) -> Tensor:
        tiles = replace(self, tiles=min(self.tiles, x_BsH.shape[SEQUENCE]))
        y: Tensor = _TileByTile.apply(tiles, x_BsH, *self.module.parameters())
        return y

    @contextmanager
    def using(self, parameters: Sequence[Tensor], others: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the module has ``others`` in the place of ``parameters``.

        A parameter's hooks are thus called for the sum alone, and not for each tile's gradient.
        """
        stand_ins = dict(zip(map(id, parameters), others, strict=True))
        places = [
            (owner._parameters, name, each)  # noqa: SLF001 (setattr takes Parameters alone)
            for owner in self.module.modules()
            for name, each in owner._parameters.items()  # noqa: SLF001
            if id(each) in stand_ins
        ]
        try:
            for held, name, each in places:
                held[name] = stand_ins[id(each)]  # type: ignore[assignment]
            yield
        finally:
            for held, name, each in places:
                held[name] = each


class _TileByTile(torch.autograd.Function):
    """Keeps the inputs alone, and the state of random numbers where a module that trains may draw some.

    Parameters are saved for recomputation, which makes backward one of what ZeRO-3 has gathered and let go.
    """

    @staticmethod
    def forward(ctx: Any, tiled: _Tiled, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.tiled, ctx.parameters = tiled, parameters
        ctx.states = _states(x) if tiled.module.training else None
        y = None
        for at in _tiles(x, tiled.tiles):
            part = tiled.function(x[:, at].contiguous())
            y = part.new_empty(x.shape) if y is None else y
            y[:, at] = part
            del part  # before the next one is made
        assert y is not None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x, *saved), tiled = ctx.saved_tensors, ctx.tiled
        _, needs_x, *needed = ctx.needs_input_grad
        others = [each.detach().requires_grad_(needs) for each, needs in zip(saved, needed, strict=True)]
        wanted = [each for each in others if each.requires_grad]
        dx, totals = torch.empty_like(x) if needs_x else None, dict[int, Tensor]()
        whole = nullcontext() if tiled.split is None else tiled.split.undivided()
        with _drawing(x, ctx.states), tiled.using(ctx.parameters, others), whole:
            for at in _tiles(x, tiled.tiles):
                part = x[:, at].detach().contiguous().requires_grad_(needs_x)
                with torch.enable_grad():
                    y = tiled.function(part)
                inputs = [part, *wanted] if needs_x else wanted
                found = [*torch.autograd.grad(y, inputs, dy[:, at].contiguous(), allow_unused=True)]
                del y
                if dx is not None:
                    dx[:, at] = found.pop(0)
                _add(totals, found)
        sums = [totals.pop(place, None) for place in range(len(wanted))]
        given = (None if each is None else each.to(wanted[place].dtype) for place, each in enumerate(sums))
        return None, dx, *(next(given) if needs else None for needs in needed)


def _tiles(x: Tensor, count: int) -> Iterator[slice]:
    """Where each of ``count`` tiles stands in a sequence, whose sizes differ by 1 at most."""
    length = x.shape[SEQUENCE]
    for place in range(count):
        yield slice(place * length // count, (place + 1) * length // count)


def _add(totals: dict[int, Tensor], gradients: list[Tensor]) -> None:
    """Add a tile's gradients to the sums, which bfloat16 would round away as they grow."""
    for place in reversed(range(len(gradients))):
        gradient: Tensor | None = gradients.pop()
        if gradient is None:  # an expert that no token of the tile goes to
            continue
        if place in totals:
            totals[place].add_(gradient)
        else:  # a copy, as autograd may hand out one tensor for two parameters
            totals[place] = gradient.to(torch.float32, copy=True)
        del gradient


States = tuple[Tensor, list[int], list[Tensor]]
"""Of random numbers: the CPU's, and those of devices by their numbers."""


def _states(x: Tensor) -> States:
    devices, states = get_device_states(x) if x.is_cuda else ([], [])
    return torch.get_rng_state(), devices, states


def _draw_from(states: States) -> None:
    torch.set_rng_state(states[0])
    set_device_states(*states[1:], device_type="cuda")


@contextmanager
def _drawing(x: Tensor, then: States | None) -> Iterator[None]:
    """Inside, random numbers are drawn as in the forward."""
    if then is None:
        yield
        return
    now = _states(x)
    _draw_from(then)
    try:
        yield
    finally:
        _draw_from(now)
