"""What one layer and one micro-batch take on one rank: computing, memory, and tensor-parallel ranks.

What the layers of :mod:`dsx.nn` compute and move through memory, on one tensor-parallel rank.

Products of matrices agree with :mod:`dsx.models.flops` (a test holds them to it). Memory traffic counts what
each elementwise operation must read and write; w is the width of an activation in bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from dsx.models.params import layer_kinds, param_specs
from dsx.models.spec import ModelSpec, Recompute
from dsx.planner.cluster import Group, Precision
from dsx.planner.costs import Kind, Network, Software


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


def matrix_products(shape: Shape) -> tuple[Product, ...]:
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
    (dsx/nn/attention.py, scaled_dot_product).
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


_BACKWARD_TRAFFIC = 2.0  # An operation's backward reads its input and two gradients, or writes two.
_FUSED_BACKWARD = 2.5  # arXiv:2307.08691, section 3.1: five products where the forward has two.


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTime:
    """Seconds. A whole backward is recomputation, input and weight part, and ``backward_wait``.

    Attributes:
        forward: Computing forward.
        again: Computing forward again in backward.
        grad_input: Computing the input's gradient.
        grad_weight: Computing the weights' gradients and adding them up.
        forward_wait: Communication that a forward waits for.
        again_wait: The same of the forward done again.
        backward_wait: The same of a whole backward.
        input_wait: The same of the first part of a divided backward.
        weight_wait: The same of its second part.
    """

    forward: float = 0.0
    again: float = 0.0
    grad_input: float = 0.0
    grad_weight: float = 0.0
    forward_wait: float = 0.0
    again_wait: float = 0.0
    backward_wait: float = 0.0
    input_wait: float = 0.0
    weight_wait: float = 0.0

    @classmethod
    def total(cls, times: Iterable[Self]) -> Self:
        """Of several layers, one after the other."""
        times = list(times)
        return cls(**{f.name: sum(getattr(time, f.name) for time in times) for f in fields(cls)})

    @property
    def forward_seconds(self) -> float:
        """A whole forward."""
        return self.forward + self.forward_wait

    @property
    def backward_seconds(self) -> float:
        """A whole backward."""
        return self.again + self.again_wait + self.grad_input + self.grad_weight + self.backward_wait

    @property
    def input_seconds(self) -> float:
        """The first part of a divided backward."""
        return self.again + self.again_wait + self.grad_input + self.input_wait

    @property
    def weight_seconds(self) -> float:
        """The second part of a divided backward."""
        return self.grad_weight + self.weight_wait

    @property
    def seconds(self) -> float:
        """Forward and whole backward."""
        return self.forward_seconds + self.backward_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware, what is reached of it, and the software that runs on it."""

    network: Network
    software: Software
    precision: Precision

    def product(self, product: Product, width: int) -> float:
        """Seconds of a product of matrices: bound by arithmetic, or by memory."""
        efficiency, cluster = self.network.efficiency, self.network.cluster
        padded = 2.0 * product.count
        for side in (product.m, product.n, product.k):
            padded *= side + efficiency.tile
        arithmetic = padded / (cluster.peak(self.precision) * efficiency.matmul)
        return max(arithmetic, self.traffic(product.elements * width))

    def traffic(self, num_bytes: float) -> float:
        """Seconds of reading or writing so many bytes."""
        return num_bytes / (self.network.cluster.memory_bytes_per_second * self.network.efficiency.memory)

    @property
    def hides(self) -> bool:
        """Whether communication runs beside computing."""
        return not self.network.cluster.is_host

    def beside(self, computing: float, wire: float) -> float:
        """Both at once."""
        if not self.hides:
            return computing + wire
        share = self.network.efficiency.beside
        return max(computing, wire) + share * min(computing, wire)

    def tensor_beside(self, product: float, collective: float) -> float:
        """What a linear's backward takes longer for a collective beside one of its products."""
        if not self.software.hides_tensor_backward:
            return collective
        return self.beside(product, collective) - product

    def host(self, seconds: float, host_seconds: float) -> float:
        """``seconds`` of a device that a host keeps busy, or of a host that has its own work besides."""
        return max(seconds, host_seconds) if self.hides else seconds + host_seconds

    def at_least(self, seconds: float, num_kernels: int) -> float:
        """``seconds``, unless starting the kernels takes longer; on a host, both."""
        return self.host(seconds, num_kernels * self.network.efficiency.kernel_seconds)


def layer_times(machine: Machine, shape: Shape, recompute: Recompute) -> tuple[LayerTime, ...]:
    """Times of every layer of the layer list."""
    model, kinds = shape.model, layer_kinds(shape.model)
    makers: dict[str, Callable[[], LayerTime]] = {
        "WordEmbedding": lambda: _embedding(machine, shape),
        "Positions": lambda: _stream(machine, shape, passes=3),
        "FinalNorm": lambda: _stream(machine, shape, passes=2),
        "Head": lambda: _head(machine, shape),
    }
    masked = [bool(model.window(block, shape.sequence_length)) for block in range(model.num_layers)]
    blocks = {mask: _block(machine, shape, recompute, masked=mask) for mask in set(masked)}
    of_blocks = iter(masked)
    return tuple(blocks[next(of_blocks)] if kind == "Block" else makers[kind]() for kind in kinds)


def _block(machine: Machine, shape: Shape, recompute: Recompute, *, masked: bool) -> LayerTime:
    width, linears = shape.width, matrix_products(shape)
    matmuls = sum(machine.product(each, width) for each in linears)
    around = block_traffic(shape)
    moved = machine.traffic(around.num_bytes)
    core, core_backward, core_kernels = _core(machine, shape, masked=masked)
    count = around.kernels + len(linears) + core_kernels
    forward = machine.at_least(matmuls + moved + core, count)
    added = sum(3.0 * each.n * each.k for each in linears) * width  # to the gradients so far
    grad_input = machine.at_least(matmuls + core_backward + _BACKWARD_TRAFFIC * moved, 2 * count)
    collective, wait = _tensor_wait(machine, shape), _BlockWait(machine, shape, linears)
    again = {"none": 0.0, "selective": core, "full": forward}[recompute]
    return LayerTime(
        forward=forward,
        again=again,
        grad_input=grad_input,
        grad_weight=machine.at_least(matmuls + machine.traffic(added), 2 * len(linears)),
        forward_wait=(4 if shape.cuts_sequence else 2) * collective,
        again_wait=(4 if shape.cuts_sequence else 2) * collective if recompute == "full" else 0.0,
        backward_wait=wait.whole,
        input_wait=wait.input,
        weight_wait=wait.weight,
    )


def _core(machine: Machine, shape: Shape, *, masked: bool) -> tuple[float, float, int]:
    """Attention core: seconds forward, seconds backward, kernels forward."""
    products, moved = attention(shape), core_traffic(shape, masked=masked)
    around = machine.traffic(moved.num_bytes)
    if machine.software.attention == "fused":
        rate = machine.network.cluster.peak(machine.precision) * machine.network.efficiency.matmul
        # Half of the square is masked and skipped, unless the mask is a tensor.
        share = 1.0 if masked else 0.5
        fused = share * sum(each.flops for each in products) / (rate * machine.network.efficiency.attention)
        return around + fused, _BACKWARD_TRAFFIC * around + _FUSED_BACKWARD * fused, moved.kernels + 1
    scores = score_traffic(shape)
    stored = machine.traffic(scores.num_bytes)
    matmuls = sum(machine.product(each, shape.width) for each in products)
    backward = 2 * matmuls + _BACKWARD_TRAFFIC * around + stored
    return around + matmuls + stored, backward, moved.kernels + scores.kernels + 2


def _tensor_wait(machine: Machine, shape: Shape) -> float:
    """One tensor-parallel collective on the tensor between layers."""
    kind: Kind = "all_gather" if shape.cuts_sequence else "all_reduce"
    return machine.network.seconds(kind, shape.boundary_bytes, Group(shape.tensor))


class _BlockWait:
    """What a block's backward waits for.

    dsx/nn/linear.py: with sequence parallelism a column-parallel linear gathers its input again, beside its
    input gradient's product, and scatters that gradient beside its weight gradient's; a row-parallel one
    gathers its output's gradient first. Without, the gradient of a column-parallel linear's input is
    all-reduced beside its weight gradient's product. A divided backward has nothing to hide these behind, and
    its second part gathers both once more.
    """

    def __init__(self, machine: Machine, shape: Shape, linears: Sequence[Product]) -> None:
        one = _tensor_wait(machine, shape)
        columns = [machine.product(each, shape.width) for each in (linears[0], linears[2])]
        left = sum(machine.tensor_beside(product, one) for product in columns)
        if shape.cuts_sequence:
            self.whole, self.input, self.weight = 2 * one + 2 * left, 4 * one, 4 * one
        else:
            self.whole, self.input, self.weight = left, 2 * one, 0.0


def _head(machine: Machine, shape: Shape) -> LayerTime:
    """Head and loss. The loss's own collectives, a few numbers per token, count nothing."""
    product, collective = head(shape), _tensor_wait(machine, shape)
    matmul = machine.product(product, shape.width)
    forward, backward = (machine.traffic(each.num_bytes) for each in loss_traffic(shape))
    left = machine.tensor_beside(matmul, collective)
    gathers = collective if shape.cuts_sequence else 0.0
    return LayerTime(
        forward=matmul + forward,
        grad_input=matmul + backward,
        grad_weight=matmul + machine.traffic(3.0 * product.n * product.k * shape.width),
        forward_wait=gathers,
        backward_wait=left * (2 if shape.cuts_sequence else 1),
        input_wait=collective,
        weight_wait=gathers,
    )


def _embedding(machine: Machine, shape: Shape) -> LayerTime:
    """Look-up and sum over the ranks; backward writes the whole table and adds it."""
    collective = _tensor_wait(machine, shape)
    table = shape.vocabulary * shape.model.hidden_size * shape.width
    back = collective if shape.cuts_sequence else 0.0
    return LayerTime(
        forward=machine.traffic(2.0 * shape.boundary_bytes),
        grad_weight=machine.traffic(4.0 * table + 2.0 * shape.boundary_bytes),
        forward_wait=collective,
        backward_wait=back,
        weight_wait=back,
    )


def _stream(machine: Machine, shape: Shape, *, passes: int) -> LayerTime:
    """A layer that goes over the stream ``passes`` times."""
    moved = Traffic(passes * shape.stream_bytes, 1)
    forward = machine.at_least(machine.traffic(moved.num_bytes), moved.kernels)
    return LayerTime(forward=forward, grad_input=_BACKWARD_TRAFFIC * forward)
