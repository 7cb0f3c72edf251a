"""Cross entropy over logits that are cut along the vocabulary; nobody ever gathers them.

:func:`linear_cross_entropy` is the head and the loss in one, a chunk of tokens at a time, so that a
micro-batch's logits never exist. While a chunk's logits do, their gradient and with it those of the hidden
states and of the head's weight are computed, in the forward: backward multiplies these by the gradient of the
loss. That takes the products of an undivided head and no more. (DeepSpeed's
sequence/linear_cross_entropy.py computes the logits once more in backward; torch's linear_cross_entropy knows
no cut vocabulary, no caps and no divisor.)

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden; N = B S tokens, n
those of a chunk, V this rank's columns of the padded vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsx.errors import ModelError
from dsx.models.flops import head_chunk
from dsx.nn import collectives
from dsx.nn.embedding import check_ids
from dsx.nn.linear import start_reduce
from dsx.nn.parallel import TensorParallel, uncompiled

IGNORED = -100
"""Label of tokens that the loss skips, as torch's cross_entropy has it."""

_ELEMENTS_AT_ONCE = 1 << 23
"""Logits in float32 at a time: 32 MiB, whatever the vocabulary and the micro-batch."""


class _CrossEntropy(torch.autograd.Function):
    """Saves the logits as they are and one float32 per token, the log-sum-exp over all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_BSV: Tensor,
        labels_BS: Tensor,
        tp: TensorParallel,
        overwrite: bool,
        num_tokens: Tensor | None,
    ) -> Tensor:
        logits_NV = logits_BSV.flatten(0, -2)
        labels = _Labels.of(labels_BS, logits_NV.shape[1], tp, num_tokens)
        log_sum_N, loss_N = _losses(logits_NV, labels, tp)
        ctx.save_for_backward(logits_BSV, log_sum_N, labels.column, labels.mine, labels.share)
        ctx.overwrite = overwrite
        return loss_N.sum() / labels.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits_BSV, log_sum_N, column_N, mine_N, share_N = ctx.saved_tensors
        d_logits_BSV = logits_BSV.detach() if ctx.overwrite else torch.empty_like(logits_BSV)
        labels = _Labels(column_N, mine_N, share_N * dloss, dloss)
        _differentiate(logits_BSV.flatten(0, -2), d_logits_BSV.flatten(0, -2), log_sum_N, labels)
        return d_logits_BSV, None, None, None, None


@dataclass(frozen=True, slots=True)
class _Labels:
    """Labels as a rank that holds some columns sees them; tensors of N tokens.

    Attributes:
        column: The label's column here, or any if it is another rank's.
        mine: Whether it is this rank's.
        share: What a token's loss is multiplied by: 1 / ``count``, or 0 where it is ignored.
        count: What the sum over the tokens is divided by.
    """

    column: Tensor
    mine: Tensor
    share: Tensor
    count: Tensor

    @classmethod
    def of(cls, labels_BS: Tensor, columns: int, tp: TensorParallel, num_tokens: Tensor | None) -> _Labels:
        labels_N = labels_BS.flatten()
        column_N = labels_N - tp.rank * columns
        mine_N = (column_N >= 0) & (column_N < columns)
        valid_N = labels_N != IGNORED
        count = valid_N.sum().clamp_(min=1) if num_tokens is None else num_tokens
        return cls(column_N.clamp_(0, columns - 1), mine_N, valid_N / count, count)

    def __getitem__(self, at: slice) -> _Labels:
        return _Labels(self.column[at], self.mine[at], self.share[at], self.count)


def _losses(logits_NV: Tensor, labels: _Labels, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over all ranks' columns, and each token's loss, 0 where it is ignored."""
    statistics = [_statistics(z, labels.column[at]) for at, z in _chunks(logits_NV)]
    log_sum_N, target_N = (torch.cat(parts) for parts in zip(*statistics, strict=True))
    target_N.masked_fill_(~labels.mine, 0.0)
    log_sum_N, target_N = _combine(log_sum_N, target_N, tp)
    return log_sum_N, (log_sum_N - target_N).masked_fill_(labels.share == 0, 0.0)


def _differentiate(logits_NV: Tensor, d_logits_NV: Tensor, log_sum_N: Tensor, labels: _Labels) -> None:
    """Write the gradient of the sum of the tokens' shares; both tensors may be the same."""
    for at, z_nV in _chunks(logits_NV):
        # d loss / d logit = (softmax - one-hot of the label) / number of labels.
        p_nV = (z_nV - log_sum_N[at, None]).exp_()
        p_nV.scatter_add_(1, labels.column[at, None], -labels.mine[at, None].to(p_nV.dtype))
        d_logits_NV[at] = p_nV.mul_(labels.share[at, None])


def _losses_differentiated(logits_NV: Tensor, d_logits_NV: Tensor, labels: _Labels) -> Tensor:
    """Both of the above where one rank has all columns: a chunk of logits is read once, by fused kernels."""
    found = []
    for at, z_nV in _chunks(logits_NV):
        log_p_nV, column_n1 = torch.log_softmax(z_nV, dim=1), labels.column[at, None]
        del z_nV
        found.append(-log_p_nV.gather(1, column_n1).squeeze(1))
        p_nV = log_p_nV.exp_()
        p_nV.scatter_add_(1, column_n1, -labels.mine[at, None].to(p_nV.dtype))
        torch.mul(p_nV, labels.share[at, None], out=d_logits_NV[at])
    return torch.cat(found).masked_fill_(labels.share == 0, 0.0)


def _chunks(logits_NV: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the tokens with their logits, at least in float32."""
    dtype = torch.promote_types(logits_NV.dtype, torch.float32)
    step = max(1, _ELEMENTS_AT_ONCE // logits_NV.shape[1])
    for start in range(0, logits_NV.shape[0], step):
        at = slice(start, start + step)
        yield at, logits_NV[at].to(dtype)


def _statistics(z_nV: Tensor, column_n: Tensor) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over this rank's columns, and the logit at ``column``."""
    return torch.logsumexp(z_nV, dim=1), z_nV.gather(1, column_n[:, None]).squeeze(1)


def _combine(log_sum_N: Tensor, target_N: Tensor, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Log-sum-exp and target logit over all ranks: one max of N elements and one sum of 2 N."""
    if tp.size == 1:
        return log_sum_N, target_N
    highest_N = collectives.all_reduce(log_sum_N.clone(), tp, "max")
    sums_2N = torch.stack(((log_sum_N - highest_N).exp_(), target_N))
    sum_N, target_N = collectives.all_reduce(sums_2N, tp)
    return highest_N + sum_N.log(), target_N


def cross_entropy(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    *,
    tp: TensorParallel,
    vocab_size: int,
    overwrite_logits: bool = False,
    num_tokens: Tensor | None = None,
) -> Tensor:
    """Mean cross entropy over the labels that are not -100; 0 if there are none.

    The logits at each place are compared with the label there: labels come shifted (``tokens[:, 1:]`` for the
    inputs ``tokens[:, :-1]``).

    Args:
        logits_BSV: This rank's columns, contiguous, any float dtype; padding columns at -inf.
        labels_BS: int64, whole vocabulary, equal on all ranks.
        tp: The tensor-parallel ranks.
        vocab_size: Logical vocabulary.
        overwrite_logits: Write the gradient over the logits in backward, which saves a tensor of their size.
            Only for a caller that lets go of them; a second backward through them raises.
        num_tokens: A scalar by which the sum over the labels is divided instead of by their number.

    Returns:
        A scalar, float32 (float64 for float64 logits), equal on all ranks.

    Raises:
        ModelError: On CPU, a label outside the vocabulary (a device assertion elsewhere).
    """
    check_ids(labels_BS, vocab_size, "label", ignored=IGNORED)
    loss: Tensor = _CrossEntropy.apply(logits_BSV, labels_BS, tp, overwrite_logits, num_tokens)
    return loss


Logits: TypeAlias = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]
"""``logits(x, linear)``: what a head makes of hidden states with its linear, such as capped logits."""


class _ChunkLinear(torch.autograd.Function):
    """The head's linear for a chunk, whose backward adds to the weight's gradient instead of giving it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: _Head) -> Tensor:
        ctx.save_for_backward(x)
        ctx.head = head
        return head.product(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return ctx.head.differentiate(x, dy), None


class _Head:
    """The linear of a head, and the gradients of its parameters as the chunks add to them.

    Attributes:
        weight: This rank's rows; some families ask a linear for it.
        gradients: Of the weight and of the bias; None for one that is not wanted or has not come.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None, num_valid: int | None, wanted: list[bool]
    ) -> None:
        self.weight, self._bias, self._num_valid, self._wanted = weight, bias, num_valid, wanted
        self.gradients: list[Tensor | None] = [None, None]

    def __call__(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.product(x)
        y: Tensor = _ChunkLinear.apply(x, self)
        return y

    def product(self, x: Tensor) -> Tensor:
        """[..., H] to [..., V], padding at -inf."""
        x_nH, weight_HV = x.flatten(0, -2), self.weight.t()
        y = x.new_empty(*x.shape[:-1], weight_HV.shape[1])  # no view, as the gradient is written over it
        y_nV = y.flatten(0, -2)
        if self._bias is None:
            torch.mm(x_nH, weight_HV, out=y_nV)
        else:
            torch.addmm(self._bias, x_nH, weight_HV, out=y_nV)
        if self._num_valid is not None:
            y_nV[:, self._num_valid :] = -torch.inf
        return y

    def differentiate(self, x: Tensor, dy: Tensor) -> Tensor:
        """The gradient of ``x``; those of the parameters are added."""
        x_nH, dy_nV = x.flatten(0, -2), dy.flatten(0, -2)
        wants_weight, wants_bias = self._wanted
        dweight, dbias = self.gradients
        if wants_weight:
            dy_Vn = dy_nV.t()
            self.gradients[0] = dy_Vn.mm(x_nH) if dweight is None else dweight.addmm_(dy_Vn, x_nH)
        if wants_bias:
            self.gradients[1] = dy_nV.sum(0) if dbias is None else dbias.add_(dy_nV.sum(0))
        return dy_nV.mm(self.weight).view(x.shape)


_HALF_UNIT = 0.125
"""Factor of a trained token's gradient in float16 until the loss's own gradient, with its scale, is known: a
token's share of the mean would be below float16's range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chunked:
    """What :func:`linear_cross_entropy` is told besides tensors; ``trains``: whether gradients are wanted."""

    tp: TensorParallel
    chunk_tokens: int
    num_tokens: Tensor | None
    num_valid: int | None
    logits: Logits | None
    trains: bool

    def run(self, x_NH: Tensor, labels: _Labels, head: _Head, dx_NH: Tensor | None) -> Tensor:
        """Every token's loss [N]; ``dx_NH`` is filled with the gradient of their shares."""
        found = []
        for start in range(0, x_NH.shape[0], self.chunk_tokens):
            at = slice(start, start + self.chunk_tokens)
            x_1nH = x_NH[None, at].detach().requires_grad_(self.trains)
            with torch.set_grad_enabled(self.trains):
                y = head(x_1nH) if self.logits is None else self.logits(x_1nH, head)
            y_nV = y.detach().flatten(0, -2)
            if not self.trains:
                found.append(_losses(y_nV, labels[at], self.tp)[1])
                continue
            # What a function has made of the logits, its backward may still need.
            dy_nV = y_nV if self.logits is None else torch.empty_like(y_nV)
            if self.tp.size == 1:
                found.append(_losses_differentiated(y_nV, dy_nV, labels[at]))
            else:
                log_sum_n, loss_n = _losses(y_nV, labels[at], self.tp)
                found.append(loss_n)
                _differentiate(y_nV, dy_nV, log_sum_n, labels[at])
            (dx_1nH,) = torch.autograd.grad(y, x_1nH, dy_nV.view_as(y))
            if dx_NH is not None:
                dx_NH[at] = dx_1nH[0]
        return torch.cat(found)


class _LinearCrossEntropy(torch.autograd.Function):
    """Saves the gradients themselves; nothing of the weight, which ZeRO-3 may let go of after the forward."""

    @staticmethod
    def forward(
        ctx: Any, x_BsH: Tensor, weight: Tensor, bias: Tensor | None, labels_BS: Tensor, how: _Chunked
    ) -> Tensor:
        needs_x, *wanted = (needs and how.trains for needs in ctx.needs_input_grad[:3])
        tp = how.tp
        x_BSH = collectives.all_gather(x_BsH, tp, collectives.SEQUENCE) if tp.sequence else x_BsH
        x_NH = x_BSH.reshape(-1, x_BSH.shape[-1])
        labels, unit = _Labels.of(labels_BS, weight.shape[0], tp, how.num_tokens), None
        if x_NH.dtype == torch.float16:
            unit = labels.count * _HALF_UNIT
            labels = _Labels(labels.column, labels.mine, labels.share * unit, labels.count)
        head = _Head(weight, bias, how.num_valid, wanted)
        dx_NH = torch.empty_like(x_NH) if needs_x else None
        loss_N = how.run(x_NH, labels, head, dx_NH)
        dx = None if dx_NH is None else start_reduce(dx_NH.view(x_BSH.shape), tp).wait()
        ctx.save_for_backward(dx, *head.gradients, unit)
        return loss_N.sum() / labels.count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        *gradients, unit = ctx.saved_tensors
        factor = dloss if unit is None else dloss / unit
        return (*(None if each is None else each.mul_(factor) for each in gradients), None, None)


def linear_cross_entropy(
    x_BsH: Tensor,
    weight: Tensor,
    labels_BS: Tensor,
    *,
    tp: TensorParallel,
    vocab_size: int,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    num_tokens: Tensor | None = None,
    num_valid: int | None = None,
    logits: Logits | None = None,
) -> Tensor:
    """A head's linear and :func:`cross_entropy` of its outputs, a chunk of tokens at a time.

    Gradients are computed in the forward, in the dtype of their tensors; the sum over the chunks of the
    weight's is rounded to it with each. Backward multiplies them in place, so that a second one raises.

    Args:
        x_BsH: Hidden states, equal on all ranks; under sequence parallelism this rank's slice.
        weight: This rank's rows [V, H]. One that wants no gradient costs none.
        labels_BS: int64, whole vocabulary, shifted, -100 where nothing is trained, equal on all ranks.
        tp: The tensor-parallel ranks.
        vocab_size: Logical vocabulary.
        bias: This rank's part [V], or None.
        chunk_tokens: Tokens whose logits exist at a time; None for :func:`dsx.models.flops.head_chunk`'s.
        num_tokens: A scalar by which the sum over the labels is divided instead of by their number.
        num_valid: Rows of ``weight`` from this one on are padding.
        logits: ``logits(x, linear)`` with what a head does before and after its linear to each token by
            itself, soft caps and scales, on [1, n, H]; None for the linear alone.

    Returns:
        A scalar as of :func:`cross_entropy`.

    Raises:
        ModelError: On CPU, a label outside the vocabulary (a device assertion elsewhere).
    """
    check_ids(labels_BS, vocab_size, "label", ignored=IGNORED)
    if chunk_tokens is None:
        chunk_tokens = head_chunk(labels_BS.numel(), weight.shape[1], weight.shape[0])
    wanted = any(each is not None and each.requires_grad for each in (x_BsH, weight, bias))
    how = _Chunked(
        tp=tp,
        chunk_tokens=max(1, min(chunk_tokens, labels_BS.numel())),
        num_tokens=num_tokens,
        num_valid=num_valid,
        logits=logits,
        trains=torch.is_grad_enabled() and wanted,
    )
    loss: Tensor = uncompiled(_LinearCrossEntropy.apply, x_BsH, weight, bias, labels_BS, how)
    return loss


OfHead: TypeAlias = Callable[..., Tensor]
"""``loss(x, weight, *, bias=None, num_valid=None, logits=None)``: :func:`linear_cross_entropy` of a
micro-batch's labels, which the last layer is given as ``loss=``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLoss:
    """A pipeline's loss, :func:`cross_entropy`, that the last layer can compute itself, with its head in one.

    Where nobody asks for logits, the last layer is called as ``layer(x, loss=loss)``, an :data:`OfHead`, and
    gives the loss in the place of the logits. Elsewhere it is called as ever.

    Attributes:
        tp: The tensor-parallel ranks.
        vocab_size: Logical vocabulary.
        chunk_tokens: Tokens whose logits exist at a time; None for a number by the sizes. With 0 the head
            gives logits.
        overwrite_logits: As of :func:`cross_entropy`.
    """

    tp: TensorParallel
    vocab_size: int
    chunk_tokens: int | None = None
    overwrite_logits: bool = False

    def __call__(self, outputs: Tensor, labels: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """The loss of logits, or, where the head has computed it, of the loss itself, a scalar."""
        if not outputs.dim():
            return outputs
        return cross_entropy(
            outputs,
            labels,
            tp=self.tp,
            vocab_size=self.vocab_size,
            overwrite_logits=self.overwrite_logits,
            num_tokens=num_tokens,
        )

    def of(self, labels: Tensor, num_tokens: Tensor | None = None) -> OfHead:
        """What the last layer is given as ``loss=``."""
        return partial(
            linear_cross_entropy,
            labels_BS=labels,
            tp=self.tp,
            vocab_size=self.vocab_size,
            chunk_tokens=self.chunk_tokens,
            num_tokens=num_tokens,
        )


def of_head(loss_fn: Any) -> HeadLoss | None:
    """The part of a pipeline's loss that the last layer is to compute; None if ``loss_fn`` wants logits.

    It may be a :class:`HeadLoss`, a :class:`TokenMean` of one, or what has one as its ``of_logits`` and takes
    the loss in the place of the logits as well.
    """
    loss = loss_fn.loss if isinstance(loss_fn, TokenMean) else loss_fn
    loss = getattr(loss, "of_logits", loss)
    return loss if isinstance(loss, HeadLoss) and loss.chunk_tokens != 0 else None


def loss_of(loss_fn: Any, layer: Callable[..., Any], value: Any, *labels: Any) -> Any:
    """``loss_fn`` of what the last layer makes of ``value``, in one with its head if it can be."""
    head = of_head(loss_fn)
    return loss_fn(layer(value) if head is None else layer(value, loss=head.of(*labels)), *labels)


def trained_tokens(labels: Tensor) -> Tensor:
    """How many labels are not -100: an int64 scalar."""
    return (labels != IGNORED).sum()


@dataclass(frozen=True, slots=True)
class TokenMean:
    """A loss that the engine makes the mean over all trained tokens of the global batch.

    Micro-batches hold different numbers of trained tokens, so that the mean of their means would weigh a
    token by its neighbours. Before the first backward of a step the engine counts the trained tokens of all
    micro-batches and data-parallel ranks, and every micro-batch's sum is divided by the same number: the
    tokens of an average micro-batch. Called without that number, it is the mean of one micro-batch.

    Attributes:
        loss: ``loss(outputs, labels, num_tokens=)``, a scalar: the sum over the micro-batch's trained tokens
            divided by ``num_tokens``, a scalar tensor, or by their own number for None.
        count: ``count(labels)``: the micro-batch's number of trained tokens, an int64 scalar.

    Raises:
        ModelError: ``loss`` takes no ``num_tokens``.
    """

    loss: Callable[..., Tensor]
    count: Callable[[Any], Tensor] = trained_tokens

    def __post_init__(self) -> None:
        called = self.loss.forward if isinstance(self.loss, nn.Module) else self.loss
        parameters = inspect.signature(called).parameters
        if "num_tokens" not in parameters and all(p.kind is not p.VAR_KEYWORD for p in parameters.values()):
            raise ModelError(
                f"TokenMean({getattr(self.loss, '__name__', type(self.loss).__name__)})",
                "it does not take num_tokens, by which the sum over a micro-batch's tokens is divided",
                "wrap a function of (outputs, labels, num_tokens=None), such as one around torch's "
                'cross_entropy(..., reduction="sum"), or dsx.nn.cross_entropy',
            )

    def __call__(self, outputs: Any, labels: Any, num_tokens: Tensor | None = None) -> Tensor:
        """The loss of a micro-batch."""
        return self.loss(outputs, labels, num_tokens=num_tokens)
