"""Layers that tensor parallelism cuts, for models of your own, and the model families made of them.

Every module takes the whole sizes and a :class:`TensorParallel` (``groups.tensor_parallel``), holds this
rank's part, and initialises and tags it: the same whole weights for every tensor-parallel degree. With a
degree of 1 none communicates. ``init`` gives the initial values of the whole weight (a bias starts at zero),
or None leaves them to :func:`initialise`; ``dtype`` and ``device`` are the parameters'; ``split`` takes their
gradients while it defers, and None never splits the backward. ``docs/guides/own_model.md`` builds a model of
them.

Shapes: B micro-batch, S sequence, s = S/tp under sequence parallelism, else S; H hidden; V this rank's
columns of the vocabulary.

| | takes | gives |
|---|---|---|
| :class:`VocabParallelEmbedding` | ids [B, S] | [B, s, H] |
| :func:`as_head` of one | [B, s, H] | logits [B, S, V] |
| :class:`LearnedPositions` | [B, s, H] | the same |
| :class:`LayerNorm`, :class:`RMSNorm` | [B, s, H] | the same |
| :class:`ColumnParallelLinear` | [B, s, in] | [B, S, out/tp], or [B, S, out] with ``gather_output`` |
| :class:`RowParallelLinear` | [B, S, in/tp] | [B, s, out] |
| :class:`Dropout` | any | the same |
| :func:`cross_entropy` | logits [B, S, V], labels [B, S] | the mean loss, a scalar |
| :func:`linear_cross_entropy` | [B, s, H], weight [V, H], labels [B, S] | head and loss in one, no logits |
| :class:`HeadLoss` | as :func:`cross_entropy` | a pipeline's loss, which its last layer computes so |
| :class:`TokenMean` of either | the same | the mean over the trained tokens of the global batch |

:func:`copy_to`, :func:`reduce_from`, :func:`gather_from`, :func:`scatter_to` and :func:`gather_sequence` are
the communications between regions, as functions with a gradient; :func:`copy_parameters` sums the gradients
of parameters that each rank applies to its own slice. On a context axis every rank has its part of each row,
as its :class:`ContextParallel` (``groups.context_parallel``) says, and :func:`gather_rows` makes whole rows
of the parts. :mod:`dsx.models.families` has the models as layer
lists and is the only part that needs DeepSpeed.
"""

from dsx.models.param import Init
from dsx.nn.collectives import (
    copy_parameters,
    copy_to,
    gather_from,
    gather_rows,
    gather_sequence,
    reduce_from,
    scatter_to,
)
from dsx.nn.context import ContextParallel
from dsx.nn.dropout import Dropout
from dsx.nn.embedding import LearnedPositions, VocabParallelEmbedding, as_head
from dsx.nn.linear import ColumnParallelLinear, RowParallelLinear
from dsx.nn.loss import HeadLoss, TokenMean, cross_entropy, linear_cross_entropy
from dsx.nn.norm import LayerNorm, RMSNorm
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Initialiser, Weights, initialise
from dsx.nn.split import WeightGradients

__all__ = [
    "ColumnParallelLinear",
    "ContextParallel",
    "Dropout",
    "HeadLoss",
    "Init",
    "Initialiser",
    "LayerNorm",
    "LearnedPositions",
    "RMSNorm",
    "RowParallelLinear",
    "TensorParallel",
    "TokenMean",
    "VocabParallelEmbedding",
    "WeightGradients",
    "Weights",
    "as_head",
    "copy_parameters",
    "copy_to",
    "cross_entropy",
    "gather_from",
    "gather_rows",
    "gather_sequence",
    "initialise",
    "linear_cross_entropy",
    "reduce_from",
    "scatter_to",
]
