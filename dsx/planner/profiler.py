"""Measure layers, links and the device, so that schedule, chunks, recompute and cut can be simulated."""

from __future__ import annotations

import copy
import gc
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

import dsx
from dsx.config.run import RunConfig
from dsx.engine.chunks import Loss
from dsx.errors import ModelError
from dsx.memory.layer_record import Shape
from dsx.models import families
from dsx.models.flops import Precision, layer_flops, peak_flops
from dsx.models.params import layer_kinds
from dsx.models.spec import HubModel, Recompute
from dsx.nn.embedding import TiedUse
from dsx.nn.loss import loss_of
from dsx.nn.parallel import TensorParallel
from dsx.nn.parameters import DTYPES
from dsx.nn.split import WeightGradients
from dsx.parallel.groups import Groups
from dsx.planner.cluster import Cluster, Link
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.inputs import Calibration
from dsx.planner.layer_times import Machine, layer_times
from dsx.planner.measured import conditions_of, recompute_modes
from dsx.planner.profile import RECOMPUTE, Conditions, LayerCost, Profile
from dsx.terminal import amount
from dsx.train.monitor import device_name

_DROPPED = 2  # The first: kernels are chosen, memory is taken, connections are made for the first time.
_WHERE = (0, 0)  # Any (virtual stage, micro-batch).


@dataclass(frozen=True, slots=True)
class LayerKey:
    """Layers with equal keys cost the same.

    Attributes:
        inputs: Shapes and dtypes that it gets.
        is_last: Whether the loss follows.
    """

    kind: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBench:
    """Measures layers, each kind once.

    Args:
        split: What the layers were built with; None for layers that do not divide their backward.
        micro_batches: How many count.
        loss: Called with the last layer and its input, gives a scalar.
        wire_share: Ranks that share the sending of an output.
    """

    device: torch.device
    split: WeightGradients | None
    micro_batches: int
    loss: Callable[[Callable[..., Any], Any], Any]
    wire_share: int = 1
    _known: dict[LayerKey, tuple[LayerCost, Any]] = field(default_factory=dict)

    @property
    def costs(self) -> dict[LayerKey, LayerCost]:
        return {key: cost for key, (cost, _) in self._known.items()}

    def output(self, key: LayerKey, spec: Any, inputs: Any) -> Any:
        """What the layer gives, without graph; the layer is measured if none of its key was."""
        if key not in self._known:
            self._known[key] = self._measure(spec, inputs, key)
        return self._known[key][1]

    def _measure(self, spec: Any, inputs: Any, key: LayerKey) -> tuple[LayerCost, Any]:
        layer, parameters = _built(spec, self.device)

        def forward(x: Any) -> Any:
            return self.loss(layer, x) if key.is_last else layer(x)

        fresh = _fresh(inputs)
        saved, output = _saved(forward, fresh, parameters)
        strange = [type(t).__name__ for t in _tensors(output) if not isinstance(t, Tensor)]
        if strange:
            raise ModelError(key.kind, f"it returned a {strange[0]}", "return a tensor or a tuple of tensors")
        if key.is_last and (isinstance(output, tuple) or output.numel() != 1):
            raise ModelError(
                key.kind, "no loss comes of the last layer", "give a loss_fn that returns a scalar"
            )
        _backward(output)
        sent = 0 if key.is_last else sum(t.numel() * t.element_size() for t in _tensors(output))
        output = tuple(t.detach() for t in output) if isinstance(output, tuple) else output.detach()
        kept_bytes = _kept_bytes(saved, fresh, output)
        rounds = [self._round(forward, inputs) for _ in range(_DROPPED + self.micro_batches)]
        forwards, wholes, firsts, seconds, pending = zip(*rounds[_DROPPED:], strict=True)
        cost = LayerCost(
            forward_seconds=median(forwards),
            backward_seconds=median(wholes),
            backward_input_seconds=median(firsts),
            backward_weight_seconds=median(seconds),
            kept_bytes=kept_bytes,
            pending_bytes=max(pending),
            boundary_bytes=-(-sent // self.wire_share),
        )
        return cost, output

    def _round(self, forward: Callable[[Any], Any], inputs: Any) -> tuple[float, float, float, float, int]:
        """One micro-batch with a whole backward, one with a divided backward."""
        clock, split = _Clock(self.device), self.split or WeightGradients()
        x = _fresh(inputs)
        with clock.lap():
            y = forward(x)
        with clock.lap():
            _backward(y)
        y = forward(_fresh(inputs))
        with clock.lap(), split.deferring(_WHERE):
            _backward(y)
        pending = split.kept_bytes()
        with clock.lap(), split.delivering(_WHERE) as rest:
            if rest is not None:
                _backward(rest)
        first, whole, one, two = clock.seconds()
        return first, whole, one, two, pending


def walk(bench: LayerBench, specs: Sequence[Any], kinds: Sequence[str] | None, inputs: Any) -> list[LayerKey]:
    """Key of every layer of a list, all measured: each on the output of the one before.

    ``kinds`` tell layers apart; by default a LayerSpec's class and arguments, and else the place.

    Raises:
        ModelError: A layer gives no tensors, or the last one no scalar.
    """
    keys, value = [], inputs
    for index, spec in enumerate(specs):
        kind = _kind(spec, index) if kinds is None else kinds[index]
        signature = tuple((tuple(t.shape), str(t.dtype)) for t in _tensors(value))
        keys.append(LayerKey(kind, signature, index == len(specs) - 1))
        value = bench.output(keys[-1], spec, value)
    return keys


class _Clock:
    """Laps of work on a device, without waiting for it in between."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps: list[tuple[Any, Any]] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        start = self._mark()
        yield
        self._laps.append((start, self._mark()))

    def seconds(self) -> list[float]:
        """Of every lap; waits for the device."""
        if not self._cuda:
            return [end - start for start, end in self._laps]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in self._laps]

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _built(spec: Any, device: torch.device) -> tuple[Callable[..., Any], list[Tensor]]:
    if isinstance(spec, LayerSpec):
        module: nn.Module = spec.build().to(device)
    elif isinstance(spec, nn.Module):
        module = copy.deepcopy(spec).to(device)
    else:
        return spec, []
    owned = [*module.parameters(), *module.buffers()]
    use = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
    return module if use is None else TiedUse(module, use), owned


def _kind(spec: Any, index: int) -> str:
    if not isinstance(spec, LayerSpec):
        return f"layer {index}: {type(spec).__name__}"
    # Arguments that print alike are alike, except objects that print no values.
    arguments = repr((spec.module_args, sorted(spec.module_kwargs.items())))
    place = f"layer {index}: " if "..." in arguments or " at 0x" in arguments else ""
    return f"{place}{spec.typename.__qualname__}{arguments}"


def _saved(
    forward: Callable[[Any], Any], inputs: Any, parameters: list[Tensor]
) -> tuple[dict[StorageWeakRef, int], Any]:
    """Bytes of every storage that autograd saves of a forward, parameters excepted; and the output."""
    own, saved = {StorageWeakRef(t.untyped_storage()) for t in parameters}, dict[StorageWeakRef, int]()

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if (place := StorageWeakRef(storage)) not in own:
            saved[place] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        return saved, forward(inputs)


def _kept_bytes(saved: Mapping[StorageWeakRef, int], *ends: Any) -> int:
    """Bytes of what has gone with the backward, and of the forward's ends, as far as autograd had saved them.

    What is still there is kept for all micro-batches, such as rotary tables.
    """
    gc.collect()  # recomputation makes circles
    held = {StorageWeakRef(t.untyped_storage()) for end in ends for t in _tensors(end)}
    return sum(count for place, count in saved.items() if place.expired() or place in held)


def _backward(y: Any) -> None:
    """With gradients of ones, for whatever has one to give."""
    outputs = [t for t in _tensors(y) if t.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(t) for t in outputs])


def _fresh(inputs: Any) -> Any:
    """A stage's inputs as its first layer gets them: wanting gradients, and no leaves."""
    if isinstance(inputs, tuple):
        return tuple(map(_fresh, inputs))
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return inputs
    return inputs.detach().requires_grad_().clone()


def _tensors(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


_SMALL_BYTES = 1024
_LEAST_LARGE_BYTES = 1 << 16


def link_of(small: tuple[int, float], large: tuple[int, float]) -> Link:
    """The line through two measured (bytes, seconds), the small one no faster than free.

    A transfer of n bytes takes ``latency_seconds + n / bytes_per_second``.

    >>> link_of((1000, 1e-3), (101_000, 2e-3))
    Link(bytes_per_second=100000000.0, latency_seconds=0.00099)
    """
    more_bytes, more_seconds = large[0] - small[0], large[1] - small[1]
    if more_seconds <= 0:  # the noise is larger than the difference
        return Link(large[0] / large[1], 0.0)
    rate = more_bytes / more_seconds
    return Link(rate, max(0.0, small[1] - small[0] / rate))


def measure_link(groups: Groups, device: torch.device, *, num_bytes: int, rounds: int) -> Link | None:
    """What neighbours need for transfers of up to ``num_bytes``; None without a pipeline.

    A collective call over all ranks. Every pair of neighbours plays ping-pong with a small and a large
    message, pairs that share no rank at the same time; all ranks agree on the median. The way from the last
    rank back to the first, which chunks take, is taken to be like the others.
    """
    if groups.mesh.pp == 1:
        return None
    sizes = (_SMALL_BYTES, max(num_bytes, _LEAST_LARGE_BYTES))
    mine: list[tuple[float, ...]] = []
    for parity in (0, 1):
        first = groups.pp_rank - (groups.pp_rank + parity) % 2
        if first >= 0 and first + 1 < groups.mesh.pp:
            times = [_ping_pong(groups, device, first, size, rounds) for size in sizes]
            if first == groups.pp_rank:
                mine.append(tuple(times))
    everyone: list[list[tuple[float, ...]]] = [[] for _ in range(groups.mesh.size)]
    dist.all_gather_object(everyone, mine)
    small, large = (median(t) for t in zip(*(pair for pairs in everyone for pair in pairs), strict=True))
    return link_of((sizes[0], small), (sizes[1], large))


def _ping_pong(groups: Groups, device: torch.device, first: int, num_bytes: int, rounds: int) -> float:
    """Seconds of one way, between pipeline ranks ``first`` and ``first + 1``."""
    message = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    up, down = groups.channels["F_up"], groups.channels["B_down"]
    leads = groups.pp_rank == first
    peer = groups.pipe_peer(first + 1 if leads else first)
    times = []
    for _ in range(_DROPPED + rounds):
        get_accelerator().synchronize()
        start = time.perf_counter()
        if leads:
            dist.send(message, peer, group=up)
            dist.recv(message, peer, group=down)
        else:
            dist.recv(message, peer, group=up)
            dist.send(message, peer, group=down)
        get_accelerator().synchronize()
        times.append((time.perf_counter() - start) / 2)
    return median(times[_DROPPED:])


_MOST_FLOPS = {"cpu": 1e11}  # Of one block's forward and backward; longer sequences are cut.
_MOST_FLOPS_ON_DEVICES = 2e15
_SHORTEST = 16
_MATRIX = {"cpu": 1024}
_MATRIX_ON_DEVICES = 8192
_COPY_BYTES = {"cpu": 1 << 27}
_COPY_BYTES_ON_DEVICES = 1 << 31
_ROUNDS = 5
_LEAST, _MOST = 0.01, 1.5


def measure_compute(run: RunConfig, cluster: Cluster) -> Calibration:
    """Calibrate the planner's compute on this process's device.

    Measured are a large product of matrices, a copy, and a block of ``run.model`` forward and backward. The
    share of matrix multiplications is then such that the planner predicts the block's time. Links are not
    measured: one process has none. On CPUs the product and the copy replace the cluster's nominal rates,
    which are those of no machine in particular.

    ``run`` is resolved for one rank; its model, precision and sequence length count.
    """
    device = torch.device(get_accelerator().current_device_name())
    dtype, kind = DTYPES[run.precision], device.type
    rate = _matmul_rate(device, dtype, _MATRIX.get(kind, _MATRIX_ON_DEVICES))
    moved = _copy_rate(device, _COPY_BYTES.get(kind, _COPY_BYTES_ON_DEVICES))
    length = _length(run, _MOST_FLOPS.get(kind, _MOST_FLOPS_ON_DEVICES))
    cost = _block(run, device, dtype, length)
    efficiency = Efficiency.of(cluster)
    if cluster.is_host:
        cluster = replace(cluster, flops=dict.fromkeys(cluster.flops, rate), memory_bytes_per_second=moved)
        efficiency = replace(efficiency, memory=1.0)
    else:
        efficiency = replace(efficiency, memory=min(1.0, moved / cluster.memory_bytes_per_second))
    efficiency = replace(_fitted(run, cluster, efficiency, length, cost), evidence=None)
    block = f"a block of 1 x {length} tokens {1000 * cost.seconds:.4g} ms forward and backward"
    return Calibration(
        cluster=cluster,
        efficiency=efficiency,
        text=f"measured on {device_name()}, {run.precision}: products of matrices {rate / 1e12:.3g} TFLOP/s, "
        f"copies {moved / 1e9:.3g} GB/s, {block}; matrix multiplications reach {efficiency.matmul:.1%} of "
        f"{cluster.peak(run.precision) / 1e12:.3g} TFLOP/s{_unlike(device, cluster, run.precision)}",
    )


_ALIKE = 0.06  # Drivers report a little less memory than others of the same GPU.


def _unlike(device: torch.device, cluster: Cluster, precision: Precision) -> str:
    """What to add where this machine's device is not the cluster's; empty where it may be."""
    here, differs = device_name(), ""
    if (device.type == "cpu") != cluster.is_host:
        differs = "is no GPU" if device.type == "cpu" else "is no CPU"
    elif device.type != "cpu":
        peak, wanted = peak_flops(here, precision), cluster.peak(precision)
        held = torch.cuda.get_device_properties(device).total_memory
        if peak is not None and abs(peak / wanted - 1) > _ALIKE:
            differs = f"has a peak of {peak / 1e12:.4g} TFLOP/s"
        elif abs(held / cluster.memory_bytes - 1) > _ALIKE:
            differs = f"has {amount(held)}"
    if not differs:
        return ""
    return (
        f"\nnot a machine of {cluster.name}: this {here} {differs}; the plan goes by what it reaches, with "
        f"the memory and links of {cluster.name}"
    )


def _fitted(
    run: RunConfig, cluster: Cluster, efficiency: Efficiency, length: int, cost: LayerCost
) -> Efficiency:
    """The share of matrix multiplications with which the planner's block takes as long, by bisection."""
    low, high = _LEAST, _MOST
    for _ in range(40):
        middle = (low + high) / 2
        is_slow = _predicted(run, cluster, replace(efficiency, matmul=middle), length).seconds > cost.seconds
        low, high = (middle, high) if is_slow else (low, middle)
    return replace(efficiency, matmul=(low + high) / 2)


def _predicted(run: RunConfig, cluster: Cluster, efficiency: Efficiency, length: int) -> LayerCost:
    shape = Shape(
        model=run.model,
        tensor=1,
        sequence_parallel=False,
        micro_batch=1,
        sequence_length=length,
        width=DTYPES[run.precision].itemsize,
    )
    machine = Machine(network=Network(cluster, efficiency), software=Software(), precision=run.precision)
    return layer_times(machine, shape)[_place(run)]


def _place(run: RunConfig) -> int:
    return layer_kinds(run.model).index("Block")


def _length(run: RunConfig, most_flops: float) -> int:
    """Tokens of a sequence that takes no longer than it should."""
    length = run.sequence_length
    while length > _SHORTEST and length * layer_flops(run.model, length)[_place(run)] > most_flops:
        length //= 2
    return length


def _block(run: RunConfig, device: torch.device, dtype: torch.dtype, length: int) -> LayerCost:
    split = WeightGradients()
    layers = families.layers(run.model, TensorParallel(), dtype=dtype, device=device, split=split)
    bench = LayerBench(device=device, split=split, micro_batches=_ROUNDS, loss=lambda layer, x: layer(x))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        x = torch.randn(1, length, *run.model.stream, device=device, dtype=dtype)
        key = LayerKey("Block", ((tuple(x.shape), str(dtype)),), is_last=False)
        bench.output(key, layers[_place(run)], x)
    return bench.costs[key]


def _matmul_rate(device: torch.device, dtype: torch.dtype, size: int) -> float:
    a, b = (torch.ones(size, size, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * size**3 / _seconds(device, lambda: torch.mm(a, b))


def _copy_rate(device: torch.device, num_bytes: int) -> float:
    a = torch.zeros(num_bytes, device=device, dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2.0 * num_bytes / _seconds(device, lambda: b.copy_(a))


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    """Median of a few rounds, each waited for, after two that do not count."""
    laps = []
    for _ in range(2 + _ROUNDS):
        _wait(device)
        start = time.perf_counter()
        work()
        _wait(device)
        laps.append(time.perf_counter() - start)
    return median(laps[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_model(config: RunConfig, groups: Groups) -> Profile:
    """Profile of the config's own model. A collective call over all ranks, before the model is built.

    One layer of each kind is built, on its real tensor-parallel ranks, run for a few micro-batches of the
    run's size, and freed: forward, whole backward, and both parts of a divided one. All ranks take part, as
    busy as they will be, and agree on medians. Random states are as before afterwards.

    Not measured: DeepSpeed's and the engine's own work per action, gradient traffic over data-parallel ranks,
    ZeRO-3's gathers of parameters, the all-gather after a sharded transfer, transfers between others than
    neighbours, the optimizer.
    """
    settings, kinds, split = config.dsx, layer_kinds(config.model), WeightGradients()
    tp, device = groups.tensor_parallel, torch.device(get_accelerator().current_device_name())
    loss = families.loss(config.model, tp, overwrite_logits=True, chunk_tokens=config.loss_chunk)
    keys: dict[Recompute, list[LayerKey]] = {}
    with _apart(device):
        shape = (config.micro_batch_size, config.sequence_length)
        ids = torch.randint(config.model.vocab_size, shape, device=device)
        one_document = torch.arange(config.sequence_length, device=device).expand(shape)
        inputs = (ids, one_document) if settings.data.keeps_apart else ids
        bench = LayerBench(
            device=device,
            split=split,
            micro_batches=settings.profile_micro_batches,
            loss=lambda layer, x: loss_of(loss, layer, x, ids),
            wire_share=1 if tp.sequence else tp.size,
        )
        for mode in recompute_modes(config):
            specs = families.layers(
                config.model,
                tp,
                dtype=DTYPES[config.precision],
                device=device,
                seed=settings.train.seed,
                recompute=mode,
                pad_multiple=settings.model.vocab_multiple,
                split=split,
                mlp_tiles=config.mlp_tiles,
            )
            # Only blocks compute anything again or have windows.
            named, first = list(kinds), kinds.index("Block")
            for block in range(config.model.num_layers):
                if isinstance(config.model, HubModel):
                    named[first + block] = f"Block like {config.model.alike[block]}, recompute {mode}"
                    continue
                window = config.model.window(block, config.sequence_length)
                named[first + block] = f"Block, recompute {mode}" + (f", window {window}" if window else "")
            keys[mode] = walk(bench, specs, named, inputs)
        costs = _agreed(bench.costs)
        link = _link(costs, groups, device, rounds=settings.profile_micro_batches)
    conditions = conditions_of(config, device=device_name(), version=dsx.__version__)
    return _profile(conditions, {mode: [costs[key] for key in keys[mode]] for mode in keys}, link)


def profile_layers(
    layers: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    loss_fn: Loss | None = None,
    groups: Groups | None = None,
    split: WeightGradients | None = None,
    micro_batches: int = 5,
) -> Profile:
    """Profile of a layer list as :class:`dsx.PipelineModule` takes it: what DeepSpeed's "profile" was to be.

    With :func:`dsx.planner.choose.choose` it gives a cut and a schedule to build the pipeline with::

        profile = profile_layers(layers, (inputs, labels), loss_fn=loss_fn)
        best = choose(profile, num_ranks=4, num_micro_batches=8, space=Space()).chosen.cut
        cut = {"stage_map": best.stage_map, "schedule": best.program}
        model = dsx.PipelineModule(layers, num_stages=4, loss_fn=loss_fn, **cut)

    Each layer is built, or copied, measured on the output of the one before, and freed; equal LayerSpecs
    whose inputs have equal shapes are measured once. With process groups this is a collective call over all
    ranks, which agree on medians, and transfers are measured too. For what is not, see
    :func:`measure_model`.

    Args:
        layers: LayerSpecs, modules and functions.
        batch: One micro-batch, ``(inputs, labels)``.
        loss_fn: ``loss_fn(outputs, labels)``; None if the last layer gives the loss.
        groups: Process groups, in a run that has them.
        split: What the layers were built with, if they divide their backward.
        micro_batches: How many to measure per layer, after two that do not count.

    Raises:
        ModelError: A layer gives something that cannot cross between stages, or the last one no scalar.
    """
    device = torch.device(get_accelerator().current_device_name())
    inputs, labels = (_to(part, device) for part in batch)
    bench = LayerBench(
        device=device,
        split=split,
        micro_batches=micro_batches,
        loss=lambda layer, x: layer(x) if loss_fn is None else loss_of(loss_fn, layer, x, labels),
    )
    with _apart(device):
        keys = walk(bench, layers, None, inputs)
        costs = bench.costs if groups is None else _agreed(bench.costs)
        link = None if groups is None else _link(costs, groups, device, rounds=micro_batches)
    first = inputs[0] if isinstance(inputs, tuple) else inputs
    conditions = Conditions(
        model=hashlib.sha256(repr([key.kind for key in keys]).encode()).hexdigest()[:16],
        micro_batch_size=len(first),
        sequence_length=0,
        tensor=1 if groups is None else groups.mesh.tp,
        sequence_parallel=False,
        precision=str(first.dtype).removeprefix("torch."),
        device=device_name(),
        dsx=dsx.__version__,
    )
    return _profile(conditions, {"none": [costs[key] for key in keys]}, link)


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Leave no trace of what happens inside: random states, memory, the count of its peak."""
    cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if cuda else []):
        yield
    gc.collect()
    get_accelerator().empty_cache()
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)


def _agreed(mine: Mapping[LayerKey, LayerCost]) -> dict[LayerKey, LayerCost]:
    """The same on every rank: medians of times, largest of bytes."""
    everyone: list[dict[LayerKey, LayerCost]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, dict(mine))
    return {key: _middle([costs[key] for costs in everyone]) for key in everyone[0]}


def _middle(costs: Sequence[LayerCost]) -> LayerCost:
    values = {}
    for each in fields(LayerCost):
        found = [getattr(cost, each.name) for cost in costs]
        values[each.name] = median(found) if each.name.endswith("_seconds") else max(found)
    return LayerCost(**values)


def _link(
    costs: Mapping[LayerKey, LayerCost], groups: Groups, device: torch.device, *, rounds: int
) -> Link | None:
    largest = max(cost.boundary_bytes for cost in costs.values())
    return measure_link(groups, device, num_bytes=largest, rounds=rounds)


def _profile(
    conditions: Conditions, modes: Mapping[Recompute, Sequence[LayerCost]], link: Link | None
) -> Profile:
    """Modes as measured, with what follows from comparing them.

    What a mode computes again at once is what it keeps less than the mode that keeps everything. Computing
    more never takes less time: a measurement that says so is noise.
    """
    layers: dict[Recompute, tuple[LayerCost, ...]] = {}
    least: Sequence[LayerCost] = modes["none"]
    for mode in sorted(modes, key=RECOMPUTE.index):
        least = layers[mode] = tuple(
            replace(_no_faster(cost, other), working_bytes=max(0, whole.kept_bytes - cost.kept_bytes))
            for cost, other, whole in zip(modes[mode], least, modes["none"], strict=True)
        )
    return Profile(
        conditions=conditions,
        layers=layers,
        latency_seconds=0.0 if link is None else link.latency_seconds,
        bytes_per_second=None if link is None else link.bytes_per_second,
    )


def _no_faster(cost: LayerCost, other: LayerCost) -> LayerCost:
    names = (field.name for field in fields(LayerCost) if field.name.endswith("_seconds"))
    return replace(cost, **{name: max(getattr(cost, name), getattr(other, name)) for name in names})


def _to(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_to(item, device) for item in value)
    return value.to(device) if isinstance(value, torch.Tensor) else value
