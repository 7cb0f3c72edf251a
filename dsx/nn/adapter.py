"""Low-rank adapters of dsx's linears: LoRA (arXiv:2106.09685) and DoRA (arXiv:2402.09353), as PEFT has them.

A linear's adapter is parameters of the linear's module, so that ZeRO-3 gathers all of them together, and a
:class:`LowRank`, which the linear calls. What travels between ranks has the adapter's rank as its size:

- A column-parallel linear's A is whole on every rank and its B cut as the linear's outputs are.
- A row-parallel linear's A is cut as its inputs are and its B is whole.

Shapes: R rank times the number of transformers' modules in one linear; O this rank's outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dsx.errors import ModelError
from dsx.models.adapters import IN_FILES, MAGNITUDE, A, B, combined, is_targeted_stack, modules_of, targeted
from dsx.models.param import ParamSpec
from dsx.models.spec import Adapter
from dsx.nn import collectives
from dsx.nn.dropout import dropped
from dsx.nn.parallel import TensorParallel
from dsx.nn.quantized import picked, whole
from dsx.nn.split import WeightGradients, late
from dsx.parallel.mesh import Coordinates

_MATRIX = 2  # dims

Base: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""A linear without its adapter: inputs and a bias to outputs."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of a linear.

    Attributes:
        start: What its name and those of its adapter's parameters begin with.
        whole: Whether every rank holds all of its outputs.
        modules: This rank's outputs of each of transformers' modules that it is made of, and whether that
            module has an adapter.
    """

    start: str
    whole: bool
    modules: tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True)
class LowRank:
    """How the adapter of a linear is computed.

    Attributes:
        settings: The adapter.
        matrices: Of the linear, one behind the other along its outputs.
        cut: What of the linear is cut over ranks: its outputs, with the communication that this takes or
            inside a region whose ends communicate; its inputs; nothing.
        tp: The ranks.
        split: Takes weight gradients while it defers.
    """

    settings: Adapter
    matrices: tuple[_Matrix, ...]
    cut: Literal["column", "region", "row", "none"]
    tp: TensorParallel
    split: WeightGradients | None

    def __call__(
        self,
        linear: nn.Module,
        x: Tensor,
        base: Base,
        bias: Tensor | None,
        rows: slice | None = None,
    ) -> Tensor:
        """The linear's outputs with what the adapter adds.

        Args:
            linear: The module that holds the parameters.
            x: Its inputs.
            base: The linear.
            bias: Its bias.
            rows: Of a matrix that is whole, the outputs that this rank computes, in each of transformers'
                modules; None for all.
        """
        given = x
        if linear.training and self.settings.dropout:
            sharded = self.cut == "row" or (self.cut == "column" and self.tp.sequence)
            given = dropped(x, self.settings.dropout, self.tp, sharded=sharded)
        factors = tuple(self._factors(linear, rows))
        if self.settings.type == "lora":
            return base(x, bias) + self._product(given, factors)
        plain = base(given, None)
        scaled = (plain + self._product(given, factors)) * self._scales(linear, factors, rows)
        if given is not x:
            scaled = scaled + (base(x, None) - plain)
        return scaled if bias is None else scaled + bias

    def begin(self, linear: nn.Module) -> None:
        """Give magnitudes their first values, the norms of rows. A collective call over the ranks."""
        for matrix in self.matrices:
            held = [has for _, has in matrix.modules]
            if any(held) and not getattr(linear, matrix.start + MAGNITUDE).is_meta:
                weight = whole(getattr(linear, f"{matrix.start}weight"))
                parts = weight.split([size for size, _ in matrix.modules])
                target = torch.cat([part for part, has in zip(parts, held, strict=True) if has])
                norms = self._summed(_squared_norms(target))
                getattr(linear, matrix.start + MAGNITUDE).copy_(norms.sqrt_())

    def _factors(self, linear: Any, rows: slice | None) -> Iterator[tuple[int, _Factors | None]]:
        """For each of transformers' modules its outputs on this rank, and the adapter's parameters if any."""
        for matrix in self.matrices:
            picked = rows if matrix.whole else None
            count = sum(has for _, has in matrix.modules)
            held = iter(self._held(linear, matrix, picked, count) if count else ())
            for size, has in matrix.modules:
                yield size if picked is None else picked.stop - picked.start, next(held) if has else None

    def _held(self, linear: Any, matrix: _Matrix, rows: slice | None, count: int) -> list[_Factors]:
        def own(name: str, *, part: bool, cut: bool = False) -> Tensor:
            """A parameter; its gradient is summed where each rank computes a part of it."""
            parameter = late(getattr(linear, matrix.start + name), self.split)
            return collectives.copy_parameters(self.tp, parameter, cut=cut)[0] if part else parameter

        in_region = self.cut == "region"
        a = own(A, part=in_region or self.cut == "column", cut=in_region)
        names = (B, MAGNITUDE) if self.settings.type == "dora" else (B,)
        picks = rows is not None
        outer = [own(name, part=picks or self.cut == "row", cut=picks) for name in names]
        if rows is not None:
            outer = [picked(each, count, rows) for each in outer]
            sizes = [rows.stop - rows.start] * count
        else:
            sizes = [size for size, has in matrix.modules if has]
        parts = [each.split(sizes) for each in outer]
        return [_Factors(*each) for each in zip(a.split(self.settings.rank), *parts, strict=True)]

    def _product(self, x: Tensor, factors: tuple[tuple[int, _Factors | None], ...]) -> Tensor:
        """``scale * B A x`` [..., O], zeros where a module has no adapter."""
        inner = [each.a for _, each in factors if each is not None]
        low = F.linear(x, inner[0] if len(inner) == 1 else torch.cat(inner)) * self.settings.scale
        if self.cut == "row":
            low = collectives.reduce_from(low, self.tp)
        elif self.cut == "column":
            gathers = collectives.gather_sequence if self.tp.sequence else collectives.copy_to
            low = gathers(low, self.tp)
        ranks = iter(low.split(self.settings.rank, dim=-1))
        made = [
            low.new_zeros(*low.shape[:-1], size) if each is None else F.linear(next(ranks), each.b)
            for size, each in factors
        ]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def _scales(
        self, linear: nn.Module, factors: tuple[tuple[int, _Factors | None], ...], rows: slice | None
    ) -> Tensor:
        """Magnitudes over the norms of what they scale [O], which get no gradient (DoRA, section 4.3)."""
        weights = [whole(getattr(linear, f"{matrix.start}weight")).detach() for matrix in self.matrices]
        if rows is not None:
            weights = [
                picked(weight, len(matrix.modules), rows) if matrix.whole else weight
                for weight, matrix in zip(weights, self.matrices, strict=True)
            ]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        parts = weight.split([size for size, _ in factors])
        pairs = [(part, each) for part, (_, each) in zip(parts, factors, strict=True) if each is not None]
        with torch.no_grad():
            squares = self._summed(torch.cat([self._squares(part, each) for part, each in pairs]))
            norms = iter(squares.sqrt_().to(weight.dtype).split([len(part) for part, _ in pairs]))
        found = [
            weight.new_ones(size) if each is None else each.magnitude / next(norms) for size, each in factors
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _squares(self, weight: Tensor, factors: _Factors) -> Tensor:
        """Squares of the norms of ``W + scale * B A``, by rows, without another matrix of the size of W."""
        a, b = factors.a.float(), factors.b.float() * self.settings.scale
        mixed = 2.0 * F.linear(weight, factors.a).float() + b @ (a @ a.t())
        return _squared_norms(weight) + (mixed * b).sum(1)

    def _summed(self, squares: Tensor) -> Tensor:
        """Sums over the ranks that each have a part of the inputs."""
        return collectives.all_reduce(squares, self.tp) if self.cut == "row" else squares


def _squared_norms(weight: Tensor) -> Tensor:
    """Of its rows, in float32."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32)
    return norms.square_()


@dataclass(frozen=True, slots=True)
class _Factors:
    """The parameters of an adapter of one of transformers' modules: [rank, in], [O, rank] and [O]."""

    a: Tensor
    b: Tensor
    magnitude: Tensor | None = None


def attach(
    layer: nn.Module,
    specs: Mapping[str, ParamSpec],
    adapter: Adapter,
    tp: TensorParallel,
    split: WeightGradients | None,
    at: Coordinates | None = None,
) -> None:
    """Give the linears of a layer the parameters of their adapters, which have no values yet.

    Args:
        layer: A layer of a model with an adapter.
        specs: Its parameters by path.
        adapter: The model's adapter.
        tp: The tensor-parallel ranks.
        split: Takes weight gradients while it defers.
        at: Where this rank stands, if other axes cut parameters too.

    Raises:
        ModelError: A matrix that is to be adapted is in a module that is no linear of dsx.
    """
    owners: dict[str, list[tuple[str, ParamSpec]]] = {}
    for path, spec in specs.items():
        owners.setdefault(path.rpartition(".")[0], []).append((path.rpartition(".")[2], spec))
    for path, held in owners.items():
        if not any(spec.adapts for _, spec in held):
            continue
        linear: Any = layer.get_submodule(path)
        bases = [(name, spec) for name, spec in held if spec.linear]
        stacks = [
            _Stack(name, spec, adapter, tp, split) for name, spec in bases if is_targeted_stack(adapter, spec)
        ]
        if not stacks and not hasattr(linear, "adapter"):
            raise ModelError(
                held[0][1].name,
                f"dsx cannot put an adapter on a {type(linear).__name__}",
                "leave it out of dsx.adapter.targets",
            )
        like = next(linear.parameters(recurse=False))
        for name, spec in held:
            if spec.adapts:
                empty = torch.empty(spec.local_shape(at or tp.at), dtype=like.dtype, device=like.device)
                linear.register_parameter(name, nn.Parameter(empty))
        if stacks:
            linear.forward = partial(_with_stacks, linear, linear.forward, stacks)
            continue
        matrices = tuple(_matrix(name, spec, adapter, tp.size) for name, spec in bases)
        linear.adapter = LowRank(adapter, matrices, *_cut(linear, bases[0][1], tp), split)


@dataclass(frozen=True, slots=True)
class _Stack:
    """The adapter of experts' matrices [experts, out, in], which are used with what it adds to them.

    Whoever multiplies by them computes a part of the result where they are cut, so that each rank has a part
    of the gradient of what is not.
    """

    name: str
    base: ParamSpec
    settings: Adapter
    tp: TensorParallel
    split: WeightGradients | None

    def sums(self, module: nn.Module) -> Tensor:
        """``W + scale * B A`` of every expert."""
        a, b = (late(getattr(module, f"{self.name}_{leaf}"), self.split) for leaf in (A, B))
        if self.base.split == 1:
            (a,) = collectives.copy_parameters(self.tp, a, cut=True)
        elif self.base.split is not None:
            (b,) = collectives.copy_parameters(self.tp, b, cut=True)
        by_expert: Tensor = b.unflatten(1, (self.settings.rank, -1)).permute(2, 0, 1)
        return torch.baddbmm(
            getattr(module, self.name),
            by_expert,
            a.unflatten(0, (-1, self.settings.rank)),
            alpha=self.settings.scale,
        )


def _with_stacks(
    module: nn.Module, forward: Callable[..., Any], stacks: list[_Stack], *args: Any, **named: Any
) -> Any:
    """The forward of a module of experts, which finds the sums under the names of its matrices."""
    seen = vars(module)  # comes before parameters
    try:
        seen |= {stack.name: stack.sums(module) for stack in stacks}
        return forward(*args, **named)
    finally:
        for stack in stacks:
            seen.pop(stack.name, None)


def left(adapter: Adapter, weight: Tensor) -> Tensor:
    """What the start of a module's adapter leaves of its matrix [outputs, inputs], in its dtype.

    See pissa_init and olora_init in peft/tuners/lora/layer.py.
    """
    if adapter.start == "none":
        return weight
    wide, rank = weight.float(), adapter.rank
    taken: Tensor
    if adapter.start == "pissa":
        u, sizes, v = torch.linalg.svd(wide, full_matrices=False)
        taken = (u[:, :rank] * sizes[:rank]) @ v[:rank]
    else:
        q, r = torch.linalg.qr(wide)
        taken = adapter.scale * (q[:, :rank] @ r[:rank])
    return (wide - taken).to(weight.dtype)


def merged(adapter: Adapter, weight: Tensor, held: Mapping[str, Tensor], start: str) -> Tensor:
    """A matrix and its adapter in one: :func:`dsx.models.adapters.combined`. Autograd passes through.

    Args:
        adapter: The adapter.
        weight: [outputs, inputs], or of experts [E, outputs, inputs].
        held: The adapter's tensors by PEFT's names; experts' A is [E rank, inputs], B [outputs, rank E].
        start: As :func:`dsx.models.adapters.homes` gives it.
    """
    a, b = held[start + IN_FILES[A]], held[start + IN_FILES[B]]
    if weight.dim() > _MATRIX:
        experts = len(weight)
        a, b = a.view(experts, -1, a.shape[1]), b.view(len(b), -1, experts).permute(2, 0, 1)
    dora = None
    if adapter.type == "dora":
        dora = held[start + IN_FILES[MAGNITUDE]], lambda whole: whole.detach().norm(dim=1)
    whole: Tensor = combined(adapter.scale, weight, a, b, dora)
    return whole


@torch.no_grad()
def begin(layer: nn.Module) -> None:
    """Give the magnitudes in a layer their first values, which are those of its matrices.

    A collective call over the tensor-parallel ranks. Without their process group nothing happens.
    """
    for linear in layer.modules():
        adapter = getattr(linear, "adapter", None)
        if not isinstance(adapter, LowRank) or adapter.settings.type != "dora":
            continue
        if adapter.tp.size == 1 or dist.is_initialized():
            adapter.begin(linear)


def _cut(linear: Any, base: ParamSpec, tp: TensorParallel) -> tuple[Any, TensorParallel]:
    """What of a linear is cut, and over which ranks."""
    if base.split == 1:
        return "row", getattr(linear, "tp", TensorParallel())
    if hasattr(linear, "tp"):
        return "column", linear.tp
    return ("none", TensorParallel()) if base.split is None else ("region", tp)


def _matrix(name: str, base: ParamSpec, adapter: Adapter, tp: int) -> _Matrix:
    ranks = tp if base.split == 0 else 1
    held = dict(targeted(adapter, base))
    sizes = ((stop - first) // ranks for _, (first, stop) in modules_of(base))
    found = tuple((size, module in held) for size, (module, _) in zip(sizes, modules_of(base), strict=True))
    return _Matrix(name.removesuffix("weight"), base.split is None, found)
