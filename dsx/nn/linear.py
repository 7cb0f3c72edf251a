"""Linears cut over the tensor-parallel ranks, along their outputs (column) or inputs (row).

Weights are [out, in] as torch.nn.Linear's, so "column" is Shoeybi et al.'s word for a cut of dim 0
(arXiv:1909.08053, section 3). Shapes: N tokens (all leading dims), I inputs, O outputs, both local.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsx.errors import ModelError
from dsx.nn import collectives
from dsx.nn.parallel import TensorParallel, uncompiled
from dsx.nn.parameters import NORMAL, ZEROS, Initialiser, fresh_parameter
from dsx.nn.quantized import Matrix, Quantized, tiles, used
from dsx.nn.split import Finish, WeightGradients, late

if TYPE_CHECKING:
    from dsx.nn.adapter import Base, LowRank


class _Linear(torch.autograd.Function):
    """``y = gather(x) W^T + b``, with the gather only under sequence parallelism.

    It exists for what it saves: the sequence-parallel slice of x, gathered again in backward
    (arXiv:2205.05198, section 4.2.2), and the Parameter itself. DeepSpeed's ZeRO-3 frees a gathered weight by
    emptying the Parameter; a saved view such as ``weight.t()`` would keep the gathered copy alive for every
    micro-batch in flight.

    When the backward is split, it keeps slices for the weight's gradient, that of x where x was gathered, and
    of dy where :func:`~dsx.nn.collectives.reduce_from` gathered dy (``reduced``), and gathers both once more.

    ``shared`` has the weights of more outputs, which come last; it is no Parameter, and its gradient does not
    wait. Of a quantised matrix backward makes the whole once more.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Matrix,
        bias: Tensor | None,
        tp: TensorParallel | None,
        num_valid: int | None,
        split: WeightGradients | None,
        reduced: TensorParallel | None,
        shared: Matrix | None,
    ) -> Tensor:
        needs_x, needs_weight, *_, needs_shared = ctx.needs_input_grad
        kept = (weight, shared) if needs_x else (None, None)
        ctx.quantized = tuple(each if isinstance(each, Quantized) else None for each in kept)
        tensors = (None if isinstance(each, Quantized) else each for each in kept)
        ctx.save_for_backward(x if needs_weight or needs_shared else None, *tensors)
        ctx.tp, ctx.reduced, ctx.num_valid = tp, reduced, num_valid
        # Recompute hands backward a copy of the saved Parameter, which has no place for a gradient.
        is_leaf = isinstance(weight, Tensor) and weight.is_leaf
        ctx.split, ctx.parameter = split, weight if is_leaf else None
        if tp is not None and tp.sequence:
            x = collectives.all_gather(x, tp, collectives.SEQUENCE)
        # The result is no view, so that the reduction behind a row-parallel linear may overwrite it.
        matrices = (weight,) if shared is None else (weight, shared)
        ctx.shape = weight.shape
        sizes = [len(matrix) for matrix in matrices]
        y = x.new_empty(*x.shape[:-1], sum(sizes))
        x_NI, y_NO, first = x.reshape(-1, x.shape[-1]), y.view(-1, sum(sizes)), 0
        for matrix in chain.from_iterable(map(tiles, matrices)):
            rows = slice(first, first + len(matrix))
            if bias is None:
                torch.mm(x_NI, matrix.t(), out=y_NO[:, rows])
            else:
                torch.addmm(bias[rows], x_NI, matrix.t(), out=y_NO[:, rows])
            first = rows.stop
            del matrix  # before the next one is made
        if num_valid is not None:
            y_NO[:, num_valid:] = -torch.inf
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, shared = ctx.saved_tensors
        tp: TensorParallel | None = ctx.tp
        needs_x, needs_weight, needs_bias, *_, needs_shared = ctx.needs_input_grad
        dy_NO, rows = dy.reshape(-1, dy.shape[-1]), ctx.shape[0]
        later = needs_weight and ctx.parameter is not None and ctx.split is not None
        later = later and ctx.split.takes(ctx.parameter)
        if later:
            start = partial(_start_weight_gradient, tp=tp, reduced=ctx.reduced, num_valid=ctx.num_valid)
            ctx.split.keep(
                ctx.parameter, ctx.shape, start, x.detach(), _own_part(dy[..., :rows], ctx.reduced)
            )
        needs_weight = needs_weight and not later
        # Communication overlaps both matmuls: the gather of x hides behind dx, the reduction of dx behind dW.
        whole_x = _start_gather(x, tp) if needs_weight or needs_shared else None
        dx = None
        if needs_x:
            held = zip(ctx.quantized, (weight, shared), strict=True)
            matrices = [each for pair in held for each in pair if each is not None]
            dx = start_reduce(_input_gradient(dy_NO, matrices).view(*dy.shape[:-1], -1), tp)
        dweight = dshared = None
        if whole_x is not None:
            x = whole_x.wait()
            dweight = _weight_gradient(x, dy_NO[:, :rows], ctx.num_valid) if needs_weight else None
            dshared = _weight_gradient(x, dy_NO[:, rows:], None) if needs_shared else None
        dbias = dy_NO.sum(0) if needs_bias else None
        return None if dx is None else dx.wait(), dweight, dbias, *(None,) * 4, dshared


class _Divided(torch.autograd.Function):
    """``x W^T + b`` of whole parameters on one rank, for a backward that may be divided.

    It saves the Parameter itself, as :class:`_Linear` does and for the same reason.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, split: WeightGradients) -> Tensor:
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.split, ctx.parameter, ctx.shape, ctx.bias = split, weight, weight.shape, bias
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = dy.matmul(weight) if needs_x else None
        if not ctx.split.takes(ctx.parameter):
            dweight = _alone(x, dy)(None) if needs_weight else None
            return dx, dweight, _summed(dy)(None) if needs_bias else None, None
        if needs_weight:
            ctx.split.keep(ctx.parameter, ctx.shape, _alone, x.detach(), dy)
        if needs_bias:
            ctx.split.keep(ctx.bias, ctx.shape[:1], _summed, dy)
        return dx, None, None, None


def _alone(x: Tensor, dy: Tensor) -> Finish:
    return partial(_weight_gradient, x, dy.reshape(-1, dy.shape[-1]), None)


def _summed(dy: Tensor) -> Finish:
    def finish(total: Tensor | None) -> Tensor:
        gradient = dy.reshape(-1, dy.shape[-1]).sum(0)
        return gradient if total is None else total.add_(gradient)

    return finish


def _linear(x: Tensor, weight: Matrix, bias: Tensor | None, tp: TensorParallel | None, *more: Any) -> Tensor:
    """:class:`_Linear`, or what does the same with less Python where there is but one rank."""
    num_valid, split, reduced, shared = more
    plain = num_valid is shared is reduced is None and (tp is None or tp.size == 1)
    y: Tensor
    if plain and isinstance(weight, Tensor):
        if split is not None and split.divides:
            if weight.is_leaf and (bias is None or bias.is_leaf):
                y = uncompiled(_Divided.apply, x, weight, bias, split)
                return y
        elif torch.compiler.is_compiling() or not hasattr(weight, "ds_id"):
            return F.linear(x, weight, bias)
    y = uncompiled(_Linear.apply, x, weight, None if bias is None else late(bias, split), tp, *more)
    return y


def _input_gradient(dy_NO: Tensor, matrices: Iterable[Matrix]) -> Tensor:
    dx_NI, first = None, 0
    for matrix in chain.from_iterable(map(tiles, matrices)):
        part = dy_NO[:, first : first + len(matrix)]
        dx_NI = part.mm(matrix) if dx_NI is None else dx_NI.addmm_(part, matrix)
        first += len(matrix)
        del matrix  # before the next one is made
    assert dx_NI is not None
    return dx_NI


def _start_weight_gradient(
    x: Tensor, dy: Tensor, *, tp: TensorParallel | None, reduced: TensorParallel | None, num_valid: int | None
) -> Finish:
    """Start gathering x over ``tp`` or dy over ``reduced``; the result computes ``dy^T x``."""
    whole_x, whole_dy = _start_gather(x, tp), _start_gather(dy, reduced)

    def finish(total: Tensor | None) -> Tensor:
        dy = whole_dy.wait()
        return _weight_gradient(whole_x.wait(), dy.reshape(-1, dy.shape[-1]), num_valid, total)

    return finish


def _weight_gradient(x: Tensor, dy_NO: Tensor, num_valid: int | None, total: Tensor | None = None) -> Tensor:
    """``dy^T x``, whose rows of padding are zero, added to ``total`` if that is given."""
    x_NI = x.reshape(-1, x.shape[-1])
    if total is not None and num_valid is None and total.dtype == dy_NO.dtype:
        return total.addmm_(dy_NO.t(), x_NI)  # without another tensor of the weight's size
    dweight = dy_NO.t().mm(x_NI)
    if num_valid is not None:
        dweight[num_valid:] = 0
    return dweight if total is None else total.add_(dweight)


def _own_part(dy: Tensor, reduced: TensorParallel | None) -> Tensor:
    """The part of a row-parallel linear's dy to keep: 1/tp of it if it was gathered along the sequence."""
    if reduced is None or not reduced.sequence:
        return dy
    return collectives.own_slice(dy, reduced, collectives.SEQUENCE).clone(
        memory_format=torch.contiguous_format
    )


def _start_gather(x: Tensor, tp: TensorParallel | None) -> collectives.Pending:
    """The whole sequence of a linear's input or output gradient, from this rank's slice of it."""
    if tp is None or not tp.sequence:
        return collectives.done(x)
    return collectives.start_all_gather(x, tp, collectives.SEQUENCE)


def start_reduce(dx: Tensor, tp: TensorParallel | None) -> collectives.Pending:
    """Sum over the ranks of a column-parallel linear's input gradient."""
    if tp is None:
        return collectives.done(dx)
    if tp.sequence:
        return collectives.start_reduce_scatter(dx, tp, collectives.SEQUENCE)
    return collectives.start_all_reduce(dx, tp)


def column_linear(
    x: Tensor,
    weight: Matrix,
    bias: Tensor | None,
    tp: TensorParallel,
    *,
    num_valid: int | None = None,
    split: WeightGradients | None = None,
    shared: Matrix | None = None,
) -> Tensor:
    """``x W^T + b`` for this rank's rows of W: [..., in] to [..., out/tp].

    Args:
        x: Equal on all ranks; under sequence parallelism this rank's slice [B, S/tp, in], and the result is
            [B, S, out/tp].
        weight: This rank's rows, [out/tp, in].
        bias: This rank's part, [out/tp] (and of ``shared``), or None.
        tp: The gradient of ``x`` is summed over its ranks (scattered again under sequence parallelism).
        num_valid: Outputs from this one on are padding: they are -inf, and their rows of ``weight`` get no
            gradient.
        split: Takes the gradients of weight and bias while it defers.
        shared: More rows, [more, in], for outputs behind these: what this rank applies of a parameter that
            is not its own. Its gradient is left to the caller.
    """
    return _linear(x, weight, bias, tp, num_valid, split, None, shared)


def with_adapter(
    linear: Any, x: Tensor, base: Base, bias: Tensor | None, rows: slice | None = None
) -> Tensor:
    """``base(x, bias)``, with what the linear's adapter adds if it has one: see :class:`LowRank`."""
    adapter: LowRank | None = linear.adapter
    return base(x, bias) if adapter is None else adapter(linear, x, base, bias, rows)


class ColumnParallelLinear(nn.Module):
    """A linear whose outputs are cut over the ranks.

    Args:
        in_features: Inputs, whole on every rank.
        out_features: Outputs of all ranks together.
        bias: Whether to add a bias, cut as the outputs are.
        parts: Sizes of blocks fused along the outputs (Q, K and V; gate and up), each cut on its own; empty
            means one block.
        gather_output: Return all outputs on every rank, in the order of an uncut linear.

    Raises:
        ModelError: A block that does not divide by ``tp.size``, or blocks that do not fill the outputs.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        *,
        bias: bool = True,
        parts: tuple[int, ...] = (),
        gather_output: bool = False,
        init: Initialiser | None = NORMAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        parts = parts or (out_features,)
        if sum(parts) != out_features:
            raise ModelError(
                f"parts {parts}", f"they sum to {sum(parts)}, not {out_features}", "fix the sizes"
            )
        self.adapter: LowRank | None = None
        self.parts = tuple(_per_rank(part, tp, "outputs") for part in parts)
        self.tp, self.gather_output, self.split = tp, gather_output, split
        fresh = partial(fresh_parameter, tp=tp, split=0, parts=parts, dtype=dtype, device=device)
        self.weight = fresh((out_features, in_features), init=init)
        self.bias = fresh((out_features,), init=init and ZEROS) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out/tp], or [..., out] with ``gather_output``; see :func:`column_linear`."""
        y = with_adapter(self, x, self._base, self.bias)
        if not self.gather_output or self.tp.size == 1:
            return y
        y = collectives.gather_from(y, self.tp)
        if len(self.parts) == 1:
            return y
        blocks = y.unflatten(-1, (self.tp.size, -1)).split(self.parts, dim=-1)
        return torch.cat([block.flatten(-2) for block in blocks], dim=-1)

    def _base(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return column_linear(x, self.weight, bias, self.tp, split=self.split)


class RowParallelLinear(nn.Module):
    """A linear whose inputs are cut over the ranks; the partial outputs are summed, then the bias is added.

    Args:
        in_features: Inputs of all ranks together.
        out_features: Outputs, whole on every rank.
        bias: Whether to add a bias, which every rank holds whole.
        parts: Sizes of blocks fused along the inputs, each cut on its own; empty means one block.

    Raises:
        ModelError: Inputs that do not divide by ``tp.size``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        tp: TensorParallel,
        *,
        bias: bool = True,
        parts: tuple[int, ...] = (),
        init: Initialiser | None = NORMAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        for part in parts or (in_features,):
            _per_rank(part, tp, "inputs")
        self.tp, self.split = tp, split
        self.adapter: LowRank | None = None
        fresh = partial(fresh_parameter, tp=tp, dtype=dtype, device=device)
        self.weight = fresh((out_features, in_features), init=init, split=1, parts=parts)
        self.bias = fresh((out_features,), init=init and ZEROS) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in/tp] to [..., out]; under sequence parallelism [B, S, in/tp] to [B, S/tp, out]."""
        return with_adapter(self, x, self._base, self.bias)

    def _base(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self.tp.size == 1:
            return _linear(x, self.weight, bias, None, None, self.split, None, None)
        bias = None if bias is None else late(bias, self.split)
        partial_sum = _linear(x, self.weight, None, None, None, self.split, self.tp, None)
        return collectives.reduce_from(partial_sum, self.tp, bias)


class LocalLinear(nn.Module):
    """A linear of what this rank has, which communicates nothing: whole, or inside a region whose ends do.

    Args:
        in_features: Inputs on this rank.
        out_features: Outputs on this rank.
        bias: Whether to add a bias.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        init: Initialiser | None = NORMAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        self.split = split
        self.adapter: LowRank | None = None
        fresh = partial(fresh_parameter, tp=TensorParallel(), dtype=dtype, device=device)
        self.weight = fresh((out_features, in_features), init=init)
        self.bias = fresh((out_features,), init=init and ZEROS) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return with_adapter(self, x, self._base, self.bias)

    def _base(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _linear(x, self.weight, bias, None, None, self.split, None, None)


class KeyValueLinear(nn.Module):
    """A projection to keys or values with fewer heads than ranks: whole everywhere, one head's rows applied.

    Rank r of tp has query heads r/tp to (r+1)/tp, all of which share key/value head ``r * heads // tp``. The
    gradients of the weight, of which each rank has a part, are summed over the ranks, once per backward.

    With ``queries`` it is the projection to queries, keys and values in one: ``q_weight`` is cut as a
    :class:`ColumnParallelLinear`'s, ``kv_weight`` has all keys, then all values. The parameters are this one
    module's, so that ZeRO-3 gathers them together.

    Args:
        in_features: Inputs, whole on every rank.
        heads: Key/value heads, which divide the ranks or are divided by them.
        head_size: Outputs of one head.
        bias: Whether to add a bias.
        queries: Outputs of all ranks' queries.
    """

    q_weight: Tensor
    q_bias: Tensor

    def __init__(
        self,
        in_features: int,
        heads: int,
        head_size: int,
        tp: TensorParallel,
        *,
        bias: bool = True,
        queries: int = 0,
        init: Initialiser | None = NORMAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.split = tp, split
        self.adapter: LowRank | None = None
        first = tp.rank * heads // tp.size
        self.rows = slice(first * head_size, (first + max(1, heads // tp.size)) * head_size)
        self.modules_fused, self.start = (2, "kv_") if queries else (1, "")
        outputs = self.modules_fused * heads * head_size
        fresh = partial(fresh_parameter, dtype=dtype, device=device)
        for leaf, inputs in (("weight", (in_features,)), ("bias", ())):
            filled = init if leaf == "weight" else init and ZEROS
            held = bias or leaf == "weight"
            if queries:
                own = fresh((queries, *inputs), tp=tp, split=0, init=filled) if held else None
                self.register_parameter(f"q_{leaf}", own)
            shared = fresh((outputs, *inputs), tp=TensorParallel(), init=filled) if held else None
            self.register_parameter(f"{self.start}{leaf}", shared)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., head_size], or to this rank's [..., queries, keys and values].

        It is equal on all ranks; under sequence parallelism [B, s, in], and the result has [B, S].
        """
        held = (getattr(self, f"{self.start}{leaf}") for leaf in ("weight", "bias"))
        weight, bias = used(self.tp, self.split, self.modules_fused, self.rows, *held)
        if self.start and bias is not None:
            bias = torch.cat((late(self.q_bias, self.split), bias))

        def base(x: Tensor, bias: Tensor | None) -> Tensor:
            if not self.start:
                return column_linear(x, weight, bias, self.tp)
            return column_linear(x, self.q_weight, bias, self.tp, split=self.split, shared=weight)

        return with_adapter(self, x, base, bias, self.rows)


def _per_rank(features: int, tp: TensorParallel, what: str) -> int:
    if features % tp.size:
        raise ModelError(
            f"a linear with {features} {what}",
            f"they do not divide by the tensor-parallel size {tp.size}",
            f"use a tensor-parallel size that divides {features}",
        )
    return features // tp.size
