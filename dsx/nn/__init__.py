"""Tensor-parallel modules: linears, embedding, norms, attention, MLP, block, loss; and model families.

:mod:`dsx.nn.families` has the models as layer lists and is the only part that needs DeepSpeed.
"""

from dsx.nn.embedding import VocabParallelEmbedding
from dsx.nn.linear import ColumnParallelLinear, RowParallelLinear
from dsx.nn.loss import cross_entropy
from dsx.nn.norm import LayerNorm, RMSNorm
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import Weights, initialise
from dsx.nn.split import WeightGradients

__all__ = [
    "ColumnParallelLinear",
    "LayerNorm",
    "RMSNorm",
    "RowParallelLinear",
    "TensorParallel",
    "VocabParallelEmbedding",
    "WeightGradients",
    "Weights",
    "cross_entropy",
    "initialise",
]
