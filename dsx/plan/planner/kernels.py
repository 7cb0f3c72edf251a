"""What the layers of :mod:`dsx.nn` compute and move through memory, on one tensor-parallel rank.

Products of matrices agree with :mod:`dsx.plan.flops` (a test holds them to it). Memory traffic counts what
each elementwise operation must read and write; w is the width of an activation in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dsx.plan.params import param_specs
from dsx.spec.model import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One micro-batch of a model on one rank.

    Attributes:
        model: The architecture.
        tensor: Tensor-parallel degree.
        sequence_parallel: Whether activations between linears are cut along the sequence.
        micro_batch: Sequences.
        sequence_length: Tokens per sequence.
        width: Bytes of a parameter or an activation.
        vocab_multiple: To which each rank's vocabulary rows are padded.
    """

    model: ModelSpec
    tensor: int
    sequence_parallel: bool
    micro_batch: int
    sequence_length: int
    width: int
    vocab_multiple: int = 64

    @property
    def tokens(self) -> int:
        """Of the micro-batch."""
        return self.micro_batch * self.sequence_length

    @property
    def cuts_sequence(self) -> bool:
        """Whether sequence parallelism does anything."""
        return self.sequence_parallel and self.tensor > 1

    @property
    def boundary_bytes(self) -> int:
        """A whole tensor between layers, [B, S, H]."""
        return self.tokens * self.model.hidden_size * self.width

    @property
    def stream_bytes(self) -> float:
        """This rank's part of it."""
        return self.boundary_bytes / (self.tensor if self.cuts_sequence else 1)

    @property
    def vocabulary(self) -> int:
        """This rank's rows, padding included."""
        table = param_specs(replace(self.model, num_layers=1), pad_multiple=self.vocab_multiple)[0]
        return table.local_extent(self.tensor)


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products of [m, k] and [k, n] matrices."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def elements(self) -> float:
        """Read and written."""
        return float(self.m * self.n + self.m * self.k + self.n * self.k) * self.count


def linears(shape: Shape) -> tuple[Product, ...]:
    """Forward of a block's linears: queries, keys and values; output; MLP up; MLP down."""
    model, tp, tokens = shape.model, shape.tensor, shape.tokens
    up = (2 if model.gated_mlp else 1) * model.ffn_size
    return (
        Product(tokens, (model.query_size + 2 * model.kv_size) // tp, model.hidden_size),
        Product(tokens, model.hidden_size, model.query_size // tp),
        Product(tokens, up // tp, model.hidden_size),
        Product(tokens, model.hidden_size, model.ffn_size // tp),
    )


def attention(shape: Shape) -> tuple[Product, Product]:
    """Forward of the attention core over the whole square: queries x keys, and scores x values."""
    model, length = shape.model, shape.sequence_length
    heads = shape.micro_batch * model.num_heads // shape.tensor
    return (
        Product(length, length, model.head_dim, heads),
        Product(length, model.head_dim, length, heads),
    )


def head(shape: Shape) -> Product:
    """Forward of the head."""
    return Product(shape.tokens, shape.vocabulary, shape.model.hidden_size)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that elementwise operations read and write, and how many kernels that is."""

    num_bytes: float
    kernels: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.num_bytes + other.num_bytes, self.kernels + other.kernels)


def block_traffic(shape: Shape) -> Traffic:
    """Forward of a block without its attention core: norms, residual sums, dropout, activation.

    A norm reads and writes the stream, a sum reads it twice and writes it, dropout besides writes a mask; an
    activation reads and writes, and a gate reads two more and writes one.
    """
    model, w = shape.model, shape.width
    passes, kernels = 2 * 2 + 2 * 3.0, 4
    if model.residual_dropout:
        passes, kernels = passes + 2 * (2 + 1 / w), kernels + 2
    wide = (5 if model.gated_mlp else 2) * shape.tokens * model.ffn_size / shape.tensor * w
    return Traffic(passes * shape.stream_bytes + wide, kernels + (2 if model.gated_mlp else 1))


def core_traffic(shape: Shape, *, masked: bool = False) -> Traffic:
    """Forward of the attention core, fused or not: heads brought together and apart, normed, rotated.

    ``masked``: its window is shorter than the sequence, so that keys and values are repeated for the kernel
    (dsx/nn/attention.py _attend).
    """
    model, per = shape.model, shape.tokens * shape.width / shape.tensor
    moved = 2 * (model.query_size + 2 * model.kv_size) + 2 * model.query_size
    kernels = 2
    if model.rope is not None:
        moved, kernels = moved + 2 * (model.query_size + model.kv_size), kernels + 2
    if model.qk_norm:
        moved, kernels = moved + 2 * (model.query_size + model.kv_size), kernels + 2
    if masked and model.num_kv_heads < model.num_heads:
        moved, kernels = moved + 2 * (model.query_size + model.kv_size), kernels + 2
    return Traffic(moved * per, kernels)


def score_traffic(shape: Shape) -> Traffic:
    """Forward of stored scores: softmax reads and writes them, dropout does too, with a byte of mask."""
    model, w = shape.model, shape.width
    scores = shape.micro_batch * model.num_heads / shape.tensor * shape.sequence_length**2
    dropout = 2 * w + 1 if model.attention_dropout else 0
    return Traffic((2 * w + dropout) * scores, 2 if dropout else 1)


def loss_traffic(shape: Shape) -> tuple[Traffic, Traffic]:
    """Forward and backward of the cross entropy, dsx/nn/loss.py: each step on logits in float32."""
    logits, w = shape.tokens * shape.vocabulary, shape.width
    return Traffic((w + 4 + 4 + 4) * logits, 6), Traffic((w + 4 + 8 + 8 + 4 + w) * logits, 6)
