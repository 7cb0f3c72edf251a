"""What one layer and one micro-batch take on one rank: the operators of its record, priced one by one.

A record (:mod:`dsx.memory.layer_record`) has every operator of a layer's forward and backward with its sizes,
and every collective of the ranks with which tensors, a sequence or experts are shared, with what runs between
its start and its end: nothing where these wait for keys and values, heads, or experts' rows. Memory traffic
counts what each operator must read and write.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from math import prod

from dsx.memory.layer_record import Event, LayerRecord, Shape, counted
from dsx.memory.record_cache import ModelRecords
from dsx.models.flops import Precision
from dsx.planner.cluster import Group
from dsx.planner.costs import Network, Software
from dsx.planner.profile import LayerCost


@dataclass(frozen=True, slots=True)
class Product:
    """``count`` products of [m, k] and [k, n] matrices."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def flops(self) -> float:
        return 2.0 * self.m * self.n * self.k * self.count

    @property
    def elements(self) -> float:
        """Read and written."""
        return float(self.m * self.n + self.m * self.k + self.n * self.k) * self.count


_OPAQUE = frozenset(("dequantize_4bit", "dequantize_blockwise"))
"""Kernels that no compiler fuses with others. These read numbers and scales once, and write what they make
(bitsandbytes 0.50.2, csrc/kernels.cu, kDequantizeBlockwise)."""

_FUSED_BACKWARD = 2.5  # arXiv:2307.08691, section 3.1: five products where the forward has two.


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Hardware, what is reached of it, and the software that runs on it."""

    network: Network
    software: Software
    precision: Precision

    def product(self, product: Product, width: int) -> float:
        """Seconds of a product of matrices: bound by arithmetic, or by memory."""
        efficiency = self.network.efficiency
        padded = 2.0 * product.count
        for side in (product.m, product.n, product.k):
            padded *= side + efficiency.tile
        arithmetic = padded / self.matmul_rate
        return max(arithmetic, self.traffic(product.elements * width))

    @property
    def matmul_rate(self) -> float:
        """Floating-point operations per second of a very large product of matrices."""
        return self.network.cluster.peak(self.precision) * self.network.efficiency.matmul

    def traffic(self, num_bytes: float) -> float:
        """Seconds of reading or writing so many bytes."""
        return num_bytes / (self.network.cluster.memory_bytes_per_second * self.network.efficiency.memory)

    def to_host(self, num_bytes: float) -> float:
        """Seconds of a copy between the device and page-locked memory, or within that of a CPU."""
        network = self.network
        if network.cluster.is_host:
            return self.traffic(2 * num_bytes)
        return num_bytes / (network.cluster.host_bytes_per_second * network.efficiency.link)

    @property
    def hides(self) -> bool:
        return not self.network.cluster.is_host

    def beside(self, computing: float, wire: float) -> float:
        if not self.hides:
            return computing + wire
        share = self.network.efficiency.beside
        return max(computing, wire) + share * min(computing, wire)

    def tensor_beside(self, computing: float, collective: float) -> float:
        """What computing takes longer for a tensor-parallel collective beside it."""
        if not self.software.hides_tensor_backward or not computing:
            return collective
        return self.exposed(computing, collective)

    def exposed(self, computing: float, wire: float) -> float:
        """What computing takes longer for what is sent beside it."""
        return self.beside(computing, wire) - computing

    def host(self, seconds: float, host_seconds: float) -> float:
        """``seconds`` of a device that a host keeps busy, or of a host that has its own work besides."""
        return max(seconds, host_seconds) if self.hides else seconds + host_seconds

    def at_least(self, seconds: float, num_kernels: int) -> float:
        """``seconds``, unless starting the kernels takes longer; on a host, both."""
        return self.host(seconds, num_kernels * self.network.efficiency.kernel_seconds)


@dataclass(frozen=True, slots=True)
class _Priced:
    """Seconds of computing, and of waiting for collectives, of which some are those of an axis by itself."""

    computing: float
    waiting: float
    context: float
    expert: float


class _Pricing:
    """Prices events of one layer in order."""

    def __init__(self, machine: Machine, tensor: int, width: int, context: int = 1, expert: int = 1) -> None:
        self._machine, self._group, self._width = machine, Group(tensor), width
        self._context = Group(context, tensor)  # which stands beside tensor in a mesh
        self._expert = Group(expert, tensor)  # laid over context, and over data beside it

    def price(self, events: Iterable[tuple[Event, int]]) -> _Priced:
        computing = waiting = context = expert = 0.0
        kernels = 0
        begun: dict[int, tuple[float, float, str, bool]] = {}
        states: set[int] = set()
        handed: float | None = None  # when this rank got a state that the next one waits for
        for event, times in events:
            match event:
                case ("begin", _, "edge_sent" | "state_sent" as kind, *_):
                    if kind == "state_sent" and handed is not None:
                        # All other ranks do the same in turn, and meanwhile this one waits.
                        turn = (self._context.size - 1) * (computing - handed)
                        waiting, context, handed = waiting + turn, context + turn, None
                case ("begin", number, "edge" | "state" as kind, size, *_):
                    apart = self._context.nodes(self._machine.network.cluster.gpus_per_node) > 1
                    seconds = self._machine.network.transfer_seconds(size, leaves_node=apart)
                    begun[number] = computing, seconds, "context", False
                    states |= {number} if kind == "state" else set()
                case ("begin", number, kind, size, *axis):
                    name = axis[0] if axis else ""
                    group = {"context": self._context, "expert": self._expert}.get(name, self._group)
                    taken = self._machine.network.seconds(kind, size, group)
                    begun[number] = computing, taken, name, kind == "messages"
                case ("wait", number):
                    start, collective, name, beside = begun.pop(number)
                    waits = self._machine.exposed if beside else self._machine.tensor_beside
                    seconds = waits(computing - start, collective)
                    waiting, context = waiting + seconds, context + seconds * (name == "context")
                    expert += seconds * (name == "expert")
                    handed = computing if number in states else handed
                case _:
                    seconds, count = self._operator(event)
                    computing, kernels = computing + times * seconds, kernels + times * count
        return _Priced(self._machine.at_least(computing, kernels), waiting, context, expert)

    def _operator(self, event: Event) -> tuple[float, int]:
        """Seconds and kernels of an operator; nothing for what is none."""
        machine = self._machine
        match event:
            case ("mm", m, n, k, count, width):
                return machine.product(Product(m, n, k, count), width), 1
            case ("op", name, size):
                fuses = machine.software.compiled and name not in _OPAQUE
                share = machine.network.efficiency.fusion if fuses else 1.0
                return share * machine.traffic(size), 1
            case ("flops", _, size, flops):
                return max(machine.traffic(size), flops / machine.matmul_rate), 1
            case ("sdpa", *shape):
                return self._attention(AttentionShape(*shape), backward=False)
            case ("sdpa_backward", *shape):
                return self._attention(AttentionShape(*shape), backward=True)
        return 0.0, 0

    def _attention(self, shape: AttentionShape, *, backward: bool) -> tuple[float, int]:
        machine = self._machine
        if machine.software.attention == "fused":
            share = machine.network.efficiency.attention * machine.software.attention_share
            rate = machine.matmul_rate * share
            # What is masked is skipped, unless the mask is a tensor: half of a square.
            seen = 1.0 if shape.masked or shape.whole else 1.0 - min(1.0, shape.queries / shape.keys) / 2
            seconds = seen * sum(each.flops for each in shape.products) / rate
            return seconds * (_FUSED_BACKWARD if backward else 1.0), 1
        products = sum(machine.product(each, self._width) for each in shape.products)
        # Softmax reads and writes the scores; dropout does too, with a byte of mask.
        w, dropout = self._width, 2 * self._width + 1 if shape.dropout else 0
        stored = machine.traffic((2 * w + dropout) * shape.heads * shape.queries * shape.keys)
        return (2 if backward else 1) * products + stored, 4 if shape.dropout else 3


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Fused attention, as a record has it.

    Attributes:
        heads: Query heads of all samples.
        queries: Tokens that ask.
        keys: Tokens that are asked.
        size: Of a head.
        masked: Whether the mask is a tensor.
        whole: Whether, without a mask, all are asked by all.
    """

    heads: int
    queries: int
    keys: int
    size: int
    masked: bool
    dropout: bool
    whole: bool = False

    @property
    def products(self) -> tuple[Product, Product]:
        """Forward over the whole square: queries x keys, and scores x values."""
        return (
            Product(self.queries, self.keys, self.size, self.heads),
            Product(self.queries, self.size, self.keys, self.heads),
        )


def layer_times(machine: Machine, shape: Shape) -> tuple[LayerCost, ...]:
    """Times of every layer of the layer list; the loss counts to the last one."""
    records, plain = ModelRecords(shape, many=True), ModelRecords(replace(shape, recompute="none"), many=True)
    once = plain if shape.mlp_tiles == 1 else ModelRecords(replace(plain.shape, mlp_tiles=1), many=True)
    pricing = _Pricing(machine, shape.tensor, shape.width, shape.context, shape.expert)
    known: dict[int, LayerCost] = {}
    found = []
    last = records.num_layers - 1
    for index in range(records.num_layers - bool(shape.loss_chunk)):
        record = records.layer(index, divided=True, hooked=False)
        if id(record) not in known:
            whole = plain.layer(index, divided=True, hooked=False)
            untiled = once.layer(index, divided=True, hooked=False)
            cost = _layer_time(machine, pricing, record, whole, untiled)
            if records.offloads(index):
                cost = _with_copies(cost, machine, record.inputs[0].size_bytes)
            known[id(record)] = cost
        found.append(known[id(record)])
    end = _end_time(machine, pricing, shape, last)
    if shape.loss_chunk:
        return (*found, end)
    return (*found[:-1], LayerCost.total((found[-1], end)))


def record_times(machine: Machine, record: LayerRecord, width: int) -> LayerCost:
    """A layer's time by its record alone, without tensor parallelism and recomputation."""
    return _layer_time(machine, _Pricing(machine, 1, width), record, record)


def recorded_flops(record: LayerRecord) -> float:
    """FLOPs of products and attention, forward and backward, by the convention of MFU.

    Of attention the whole square counts, and its backward is two forwards (arXiv:2104.04473, appendix).
    """
    total = 0.0
    for event, times in (*record.operators("forward"), *record.operators("backward")):
        match event:
            case ("mm", m, n, k, count, _):
                total += times * Product(m, n, k, count).flops
            case ("flops", _, _, flops):
                total += times * flops
            case ("sdpa" | "sdpa_backward" as kind, *shape):
                forward = sum(each.flops for each in AttentionShape(*shape).products)
                total += times * forward * (2.0 if kind == "sdpa_backward" else 1.0)
    return total


_LONG = 8192


def _end_time(machine: Machine, pricing: _Pricing, shape: Shape, head: int) -> LayerCost:
    """The time of the loss, or of the head with it. So many tokens at a time: many take in proportion.

    A long sequence counts as several short ones, because a record has every piece, and a rank's part of one
    as a sequence.
    """
    short = replace(shape, sequence_length=min(shape.length, _LONG), context=1)

    def time(micro_batch: int) -> LayerCost:
        records = ModelRecords(replace(short, micro_batch=micro_batch))
        record = records.loss() or records.layer(head, divided=True, hooked=False)
        return _layer_time(machine, pricing, record, record)

    one, two = time(1), time(2)
    more = shape.micro_batch * shape.length / short.sequence_length - 1
    return LayerCost(
        **{
            each.name: getattr(one, each.name) + more * (getattr(two, each.name) - getattr(one, each.name))
            for each in fields(LayerCost)
        }
    )


def _layer_time(
    machine: Machine,
    pricing: _Pricing,
    record: LayerRecord,
    plain: LayerRecord,
    untiled: LayerRecord | None = None,
) -> LayerCost:
    """A layer's time. What recomputation adds is the difference to ``plain``, the same layer without any.

    Of ``untiled``, whose feed-forward is in one, the same backward computes nothing again.
    """
    forward, whole = pricing.price(record.operators("forward")), pricing.price(plain.operators("backward"))
    divides = plain.backward_input is not None
    first = pricing.price(plain.operators("backward_input")) if divides else whole
    second = pricing.price(counted(_delivered(plain)))
    again = pricing.price(record.operators("backward"))
    anew, anew_wait = max(0.0, again.computing - whole.computing), max(0.0, again.waiting - whole.waiting)
    inputs = anew + anew_wait + first.computing
    once = pricing.price((untiled or plain).operators("backward"))
    # Every parameter's gradient is added to the one so far: two are read, and one is written.
    added = 3.0 * sum(prod(each.shape) * each.width for each in plain.parameters if each.trains)
    weights = second.computing + machine.traffic(added)
    rows = max(whole.expert, again.expert)
    return LayerCost(
        forward_seconds=forward.computing + forward.waiting,
        backward_seconds=inputs + weights + whole.waiting,
        backward_input_seconds=inputs + first.waiting,
        backward_weight_seconds=weights + second.waiting,
        again_seconds=anew + max(0.0, whole.computing - once.computing),
        forward_wait=forward.waiting,
        again_wait=anew_wait,
        backward_wait=whole.waiting,
        input_wait=first.waiting,
        weight_wait=second.waiting,
        context_wait=forward.context + max(whole.context, again.context),
        expert_wait=forward.expert + rows,
        expert_back_wait=rows,
        hidden_wait=rows - machine.exposed(weights, rows) if divides else 0.0,
    )


def _with_copies(cost: LayerCost, machine: Machine, size: int) -> LayerCost:
    """With what a layer waits for the copy of its input to the host, and of the one before back."""
    copy = machine.to_host(size)
    forward, backward, first = (
        max(0.0, copy - seconds) if machine.hides else copy
        for seconds in (cost.forward_seconds, cost.backward_seconds, cost.backward_input_seconds)
    )
    return replace(
        cost,
        forward_seconds=cost.forward_seconds + forward,
        backward_seconds=cost.backward_seconds + backward,
        backward_input_seconds=cost.backward_input_seconds + first,
        forward_wait=cost.forward_wait + forward,
        backward_wait=cost.backward_wait + backward,
        input_wait=cost.input_wait + first,
        host_wait=forward + backward,
    )


def _delivered(record: LayerRecord) -> Iterable[Event]:
    """The second part of a divided backward, each use's communication begun during the one before."""
    uses = record.weights
    for place, use in enumerate(uses):
        following: Sequence[Event] = uses[place + 1].begin if place + 1 < len(uses) else ()
        yield from chain(use.begin if not place else (), following, use.finish)
