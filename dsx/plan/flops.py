"""Floating-point operations of training, by the convention of model FLOPs utilisation (MFU).

PaLM, arXiv:2204.02311, appendix B: 6 per token and parameter used in a matrix multiplication (2 forward, 4
backward) plus 12 * layers * query size * sequence length for attention, which counts the full square of
query-key pairs although a causal mask needs half. In a block whose sliding window is shorter than the
sequence, the window takes the sequence's place: no token has more keys. Embedding look-ups, norms, biases,
softmax and activations count nothing; the head counts, tied or not; recomputation counts nothing (it is the
hardware's work, not the model's).
"""

from __future__ import annotations

from dsx.plan.params import layer_kinds
from dsx.spec.model import ModelSpec


def flops_per_token(model: ModelSpec, sequence_length: int) -> float:
    """FLOPs of one forward and backward, per token of a sequence of ``sequence_length`` tokens."""
    return sum(layer_flops(model, sequence_length))


def layer_flops(model: ModelSpec, sequence_length: int) -> tuple[float, ...]:
    """:func:`flops_per_token`, layer by layer of the layer list."""
    hidden, query, ffn = model.hidden_size, model.query_size, model.ffn_size
    projections = hidden * (query + 2 * model.kv_size) + query * hidden
    mlp = (3 if model.gated_mlp else 2) * hidden * ffn
    kinds = layer_kinds(model)
    flops = [0.0] * len(kinds)
    for block in range(model.num_layers):
        keys = model.window(block, sequence_length) or sequence_length
        # Scores and their product with V: 2 * 2 * keys * query_size forward, thrice that in all.
        flops[kinds.index("Block") + block] = 6.0 * (projections + mlp) + 12.0 * query * keys
    flops[-1] = 6.0 * model.vocab_size * hidden
    return tuple(flops)
