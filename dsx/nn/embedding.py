"""The vocabulary table, cut along the vocabulary, as word embedding and as head; learned positions.

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden; V this rank's rows
of the padded vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dsx.errors import ModelError
from dsx.models.spec import ModelSpec
from dsx.nn import collectives
from dsx.nn.context import WHOLE, ContextParallel
from dsx.nn.documents import Given, Stream, hidden_of
from dsx.nn.linear import column_linear
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import NORMAL, Initialiser, Weights, fresh_parameter
from dsx.nn.split import Finish, WeightGradients, late


def check_ids(ids: Tensor, vocab_size: int, what: str, *, ignored: int | None = None) -> None:
    """Refuse token ids outside the vocabulary, which padding and the cut would otherwise hide.

    Args:
        ids: int64, any shape.
        vocab_size: Logical size, without padding.
        what: Names the ids in the message.
        ignored: An id to let pass.

    Raises:
        ModelError: An id is outside, on a CPU. On an accelerator a device assertion fails, without a wait.
    """
    if ids.device.type == "cpu" and ids.numel() and not torch.compiler.is_compiling():
        least, most = ids.aminmax()
        if least >= 0 and most < vocab_size:
            return
    good = (ids >= 0) & (ids < vocab_size)
    if ignored is not None:
        good |= ids == ignored
    if ids.device.type == "cpu":
        if not good.all():
            raise ModelError(
                f"{what} = {int(ids[~good][0])}",
                f"the vocabulary has {vocab_size} tokens",
                "use the tokenizer that belongs to the model, or a larger vocab_size",
            )
    else:
        torch._assert_async(good.all(), f"{what} outside the vocabulary of {vocab_size}")  # noqa: SLF001 (no public one)


class _Lookup(torch.autograd.Function):
    """Rows of a table whose gradient can be computed later."""

    @staticmethod
    def forward(
        ctx: Any, row_BS: Tensor, weight: Tensor, split: WeightGradients, padding: int | None
    ) -> Tensor:
        ctx.save_for_backward(row_BS)
        ctx.parameter, ctx.shape, ctx.split, ctx.padding = weight, weight.shape, split, padding
        return F.embedding(row_BS, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None, None]:
        (row_BS,) = ctx.saved_tensors
        start = partial(_start_table_gradient, rows=ctx.shape[0], padding=ctx.padding)
        if ctx.split.takes(ctx.parameter):
            ctx.split.keep(ctx.parameter, ctx.shape, start, row_BS, dy)
            return None, None, None, None
        return None, start(row_BS, dy)(None), None, None


def _start_table_gradient(row_BS: Tensor, dy: Tensor, *, rows: int, padding: int | None) -> Finish:
    def finish(total: Tensor | None) -> Tensor:
        # The operator behind F.embedding's backward, without scaling by frequency; -1 is no row.
        backward = torch.ops.aten.embedding_dense_backward
        none = -1 if padding is None else padding
        gradient: Tensor = backward(dy, row_BS, rows, none, scale_grad_by_freq=False)
        return gradient if total is None else total.add_(gradient)

    return finish


def _look_up(row_BS: Tensor, weight: Tensor, split: WeightGradients | None, padding: int | None) -> Tensor:
    if split is None or not split.divides or not weight.is_leaf:
        return F.embedding(row_BS, weight, padding)
    y: Tensor = _Lookup.apply(row_BS, weight, split, padding)
    return y


def own_rows(size: int, rows: int, tp: TensorParallel) -> tuple[int, int | None]:
    """The first of a rank's ``rows`` of a table, and how many of them are no padding; None for all."""
    first = tp.rank * rows
    valid = min(max(size - first, 0), rows)
    return first, valid if valid < rows else None


def looked_up(
    ids_BS: Tensor,
    look_up: Callable[[Tensor], Tensor],
    size: int,
    rows: int,
    tp: TensorParallel,
    *,
    fill: Callable[..., Tensor] = Tensor.masked_fill,
) -> Tensor:
    """Vectors [B, s, H] of a table of ``size``, of which each rank looks its own ``rows`` up."""
    check_ids(ids_BS, size, "token id")
    if tp.size == 1:
        return look_up(ids_BS)
    row_BS = ids_BS - tp.rank * rows
    elsewhere_BS = (row_BS < 0) | (row_BS >= rows)
    partial_BSH = look_up(row_BS.masked_fill(elsewhere_BS, 0))
    return collectives.reduce_from(fill(partial_BSH, elsewhere_BS.unsqueeze(-1), 0.0), tp)


class VocabParallelEmbedding(nn.Module):
    """Rows of a vocabulary table on this rank, used as embedding or, ``as_head``, as output linear.

    Both uses are this module's own forward, so hooks that gather its weight (DeepSpeed's ZeRO-3) see them.

    Args:
        vocab_size: Logical rows.
        hidden_size: H.
        pad_multiple: Each rank's rows are rounded up to a multiple of this (64 suits GPUs); rows past
            ``vocab_size`` are zero and stay so, and their logits are -inf.
        padding_idx: The row to which a look-up gives no gradient, as ``torch.nn.Embedding`` has it; the head
            of a tied table gives it one.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tp: TensorParallel,
        *,
        pad_multiple: int = 1,
        padding_idx: int | None = None,
        init: Initialiser | None = NORMAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size, self.tp, self.split = vocab_size, tp, split
        self.weight = fresh_parameter(
            (vocab_size, hidden_size),
            tp,
            init,
            split=0,
            pad_multiple=pad_multiple,
            dtype=dtype,
            device=device,
        )
        rows = self.weight.shape[0]
        self.first, self.num_valid = own_rows(vocab_size, rows, tp)
        here = padding_idx is not None and self.first <= padding_idx < self.first + rows
        self.padding = padding_idx - self.first if padding_idx is not None and here else None

    def forward(
        self, x: Tensor, *, as_head: bool = False, loss: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """Token ids [B, S] to [B, s, H]; ``as_head`` [B, s, H] to logits [B, S, V], padding at -inf.

        With ``loss``, which :data:`dsx.nn.loss.OfHead` describes, to the loss in the place of the logits.
        """
        if loss is not None:
            return loss(x, self.weight, num_valid=self.num_valid)
        if as_head:
            return column_linear(x, self.weight, None, self.tp, num_valid=self.num_valid, split=self.split)
        look_up = partial(_look_up, weight=self.weight, split=self.split, padding=self.padding)
        fill = Tensor.masked_fill_  # of a tensor that nobody else has
        return looked_up(x, look_up, self.vocab_size, self.weight.shape[0], self.tp, fill=fill)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        return f"{self.vocab_size}, rows {self.first}..{self.first + self.weight.shape[0] - 1}"


def as_head(table: nn.Module, x: Given, loss: Callable[..., Tensor] | None = None) -> Tensor:
    """A vocabulary table as the output linear, [B, s, H] to [B, S, V]: a tied layer's ``forward_fn``.

    Args:
        table: The table, or a layer that has it as ``word``.
        x: Hidden states, with what comes beside them, which ends here.
        loss: What a pipeline with a :class:`dsx.nn.HeadLoss` gives, for the loss in the place of logits.
    """
    logits_BSV: Tensor = getattr(table, "word", table)(hidden_of(x), as_head=True, loss=loss)
    return logits_BSV


class TiedUse(nn.Module):
    """One use of a tied module through a function of its own, e.g. an embedding used as the output head.

    It is a module of its own, so that ZeRO-3's hooks, which fire on modules, gather the weight here too.
    """

    def __init__(self, module: nn.Module, forward_fn: Callable[..., Any]) -> None:
        super().__init__()
        # A tuple, so that the tied module keeps its one place (and name) in tied_modules.
        self._tied = (module,)
        self.forward_fn = forward_fn

    @property
    def tied_module(self) -> nn.Module:
        return self._tied[0]

    def forward(self, inputs: Any, **loss: Any) -> Any:
        """``forward_fn(tied_module, inputs)``, and ``loss=`` where the last layer computes it."""
        return self.forward_fn(self.tied_module, inputs, **loss)


class WordEmbedding(nn.Module):
    """The word embedding as a layer of the layer list: token ids to vectors."""

    def __init__(self, model: ModelSpec, weights: Weights) -> None:
        super().__init__()
        self.word = VocabParallelEmbedding(
            model.vocab_size,
            model.hidden_size,
            weights.tp,
            pad_multiple=weights.specs["word.weight"].pad_multiple or 1,
            padding_idx=model.pad_token_id,
            init=None,
            **weights.form,
        )
        weights.initialise(self)

    def forward(self, given: Given) -> Given:
        """int64 [B, S] to [B, s, H]."""
        stream = Stream.first(given)
        return stream.then(self.word(stream.hidden))


class Head(WordEmbedding):
    """The head as a layer of the layer list: vectors to this rank's slice of the logits, or to the loss."""

    forward = as_head  # type: ignore[assignment]  # its table is a word embedding's, used as one that is tied


class LearnedPositions(nn.Module):
    """A table with one vector per position, replicated over the tensor-parallel ranks.

    Args:
        max_positions: Rows.
        hidden_size: H.
        cp: The ranks that share a sequence, of which each has a part.
    """

    def __init__(
        self,
        max_positions: int,
        hidden_size: int,
        tp: TensorParallel,
        *,
        init: Initialiser | None = NORMAL,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        split: WeightGradients | None = None,
        cp: ContextParallel = WHOLE,
    ) -> None:
        super().__init__()
        self.tp, self.cp, self.split = tp, cp, split
        self.weight = fresh_parameter((max_positions, hidden_size), tp, init, dtype=dtype, device=device)

    def forward(self, x_BsH: Tensor, positions: Tensor | None = None) -> Tensor:
        """Add the positions' vectors: [B, s, H] to the same.

        Args:
            x_BsH: Vectors of tokens.
            positions: int64 [B, S] of whole rows, below S; None counts from 0 in every row.

        Raises:
            ModelError: A sequence longer than the table.
        """
        length = x_BsH.shape[1] * (self.tp.size if self.tp.sequence else 1) * self.cp.size
        if length > self.weight.shape[0]:
            raise ModelError(
                f"sequence length {length}",
                f"the model has {self.weight.shape[0]} positions",
                "use shorter sequences or a model with more positions",
            )
        position_SH = late(self.weight, self.split)[:length]
        # The sequence's dim, in which the gradient is gathered over the ranks: S x H elements of one row, or
        # B x S x H, instead of a sum over the whole table.
        dim = 0
        if positions is not None:
            position_SH, dim = F.embedding(self.cp.cut(positions), position_SH), 1
        else:
            position_SH = self.cp.cut(position_SH, dim=0)
        if self.tp.sequence:
            position_SH = collectives.scatter_to(position_SH, self.tp, dim=dim)
        return x_BsH + position_SH
