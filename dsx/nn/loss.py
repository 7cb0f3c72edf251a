"""Cross entropy over logits that are cut along the vocabulary; nobody ever gathers them.

Shapes: B micro-batch, S sequence, N = B S tokens, V this rank's columns of the padded vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsx.errors import ModelError
from dsx.nn import collectives
from dsx.nn.embedding import check_ids
from dsx.nn.parallel import TensorParallel

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
        logits_NV, labels_N = logits_BSV.flatten(0, -2), labels_BS.flatten()
        num_columns = logits_NV.shape[1]
        column_N = labels_N - tp.rank * num_columns
        mine_N = (column_N >= 0) & (column_N < num_columns)
        column_N = column_N.clamp(0, num_columns - 1)
        statistics = [_statistics(z, column_N[at]) for at, z in _chunks(logits_NV)]
        log_sum_N, target_N = (torch.cat(parts) for parts in zip(*statistics, strict=True))
        target_N.masked_fill_(~mine_N, 0.0)
        log_sum_N, target_N = _combine(log_sum_N, target_N, tp)
        valid_N = labels_N != IGNORED
        count = valid_N.sum().clamp_(min=1) if num_tokens is None else num_tokens
        ctx.save_for_backward(logits_BSV, log_sum_N, column_N, mine_N, valid_N / count)
        ctx.overwrite = overwrite
        return (log_sum_N - target_N).masked_fill_(~valid_N, 0.0).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:
        logits_BSV, log_sum_N, column_N, mine_N, share_N = ctx.saved_tensors
        d_logits_BSV = logits_BSV.detach() if ctx.overwrite else torch.empty_like(logits_BSV)
        logits_NV, d_logits_NV = logits_BSV.flatten(0, -2), d_logits_BSV.flatten(0, -2)
        scale_N = share_N * dloss
        for at, z_nV in _chunks(logits_NV):
            # d loss / d logit = (softmax - one-hot of the label) / number of labels.
            p_nV = (z_nV - log_sum_N[at, None]).exp_()
            p_nV.scatter_add_(1, column_N[at, None], -mine_N[at, None].to(p_nV.dtype))
            d_logits_NV[at] = p_nV.mul_(scale_N[at, None])
        return d_logits_BSV, None, None, None, None


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
