"""Time and memory of single layers: forward, whole backward, divided backward."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsx.errors import ModelError
from dsx.nn.split import WeightGradients
from dsx.plan.profile import LayerCost

_DROPPED = 2  # First micro-batches: kernels are chosen, memory is taken for the first time.
_WHERE = (0, 0)  # Any (virtual stage, micro-batch).


@dataclass(frozen=True, slots=True)
class Key:
    """Layers with equal keys cost the same.

    Attributes:
        kind: Of the layer.
        inputs: Shapes and dtypes that it gets.
        is_last: Whether the loss follows.
    """

    kind: str
    inputs: tuple[tuple[tuple[int, ...], str], ...]
    is_last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """Measures layers, each kind once.

    Args:
        device: Where.
        split: What the layers were built with; None for layers that do not divide their backward.
        micro_batches: How many count.
        loss: From the last layer's output to a scalar; a part of the last layer's forward.
        wire_share: Ranks that share the sending of an output.
    """

    device: torch.device
    split: WeightGradients | None
    micro_batches: int
    loss: Callable[[Any], Any]
    wire_share: int = 1
    _known: dict[Key, tuple[LayerCost, Any]] = field(default_factory=dict)

    @property
    def costs(self) -> dict[Key, LayerCost]:
        """Everything measured so far."""
        return {key: cost for key, (cost, _) in self._known.items()}

    def output(self, key: Key, spec: Any, inputs: Any) -> Any:
        """What the layer gives, without graph; the layer is measured if none of its key was."""
        if key not in self._known:
            self._known[key] = self._measure(spec, inputs, key)
        return self._known[key][1]

    def _measure(self, spec: Any, inputs: Any, key: Key) -> tuple[LayerCost, Any]:
        layer, parameters = _built(spec, self.device)

        def forward(x: Any) -> Any:
            return self.loss(layer(x)) if key.is_last else layer(x)

        kept_bytes, output = _kept_bytes(forward, _fresh(inputs), parameters)
        _check(output, key)
        sent = 0 if key.is_last else sum(t.numel() * t.element_size() for t in _tensors(output))
        output = _detached(output)
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


def walk(bench: Bench, specs: Sequence[Any], kinds: Sequence[str] | None, inputs: Any) -> list[Key]:
    """Key of every layer of a list, all measured: each on the output of the one before.

    Args:
        bench: Measures.
        specs: LayerSpecs, modules and functions.
        kinds: What tells layers apart; by default a LayerSpec's class and arguments, and else the place.
        inputs: Of the first layer.

    Raises:
        ModelError: A layer gives no tensors, or the last one no scalar.
    """
    keys, value = [], inputs
    for index, spec in enumerate(specs):
        kind = _kind(spec, index) if kinds is None else kinds[index]
        signature = tuple((tuple(t.shape), str(t.dtype)) for t in _tensors(value))
        keys.append(Key(kind, signature, index == len(specs) - 1))
        value = bench.output(keys[-1], spec, value)
    return keys


class _Clock:
    """Laps of work on a device, without waiting for it in between."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._laps: list[tuple[Any, Any]] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Time what is inside."""
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


def _built(spec: Any, device: torch.device) -> tuple[Callable[[Any], Any], list[Tensor]]:
    """A layer to call, and its parameters and buffers."""
    if isinstance(spec, LayerSpec):
        module: nn.Module = spec.build().to(device)
    elif isinstance(spec, nn.Module):
        module = copy.deepcopy(spec).to(device)
    else:
        return spec, []
    owned = [*module.parameters(), *module.buffers()]
    forward_fn = spec.forward_fn if isinstance(spec, TiedLayerSpec) else None
    if forward_fn is None:
        return module, owned
    return lambda x: forward_fn(module, x), owned


def _kind(spec: Any, index: int) -> str:
    if not isinstance(spec, LayerSpec):
        return f"layer {index}: {type(spec).__name__}"
    # Arguments that print alike are alike, except objects that print no values.
    arguments = repr((spec.module_args, sorted(spec.module_kwargs.items())))
    place = f"layer {index}: " if "..." in arguments or " at 0x" in arguments else ""
    return f"{place}{spec.typename.__qualname__}{arguments}"


def _kept_bytes(forward: Callable[[Any], Any], inputs: Any, parameters: list[Tensor]) -> tuple[int, Any]:
    """Bytes that autograd keeps of a forward, parameters excepted, what is shared once; and the output."""
    own = {t.untyped_storage().data_ptr() for t in parameters}
    kept: dict[int, Tensor] = {}  # Tensors, not numbers: a place must not be taken twice.

    def note(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = forward(inputs)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()), output


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


def _detached(output: Any) -> Any:
    return tuple(t.detach() for t in output) if isinstance(output, tuple) else output.detach()


def _tensors(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _check(output: Any, key: Key) -> None:
    """Raise ModelError for what no stage may end with."""
    strange = [type(t).__name__ for t in _tensors(output) if not isinstance(t, Tensor)]
    if strange:
        raise ModelError(key.kind, f"it returned a {strange[0]}", "return a tensor or a tuple of tensors")
    if key.is_last and (isinstance(output, tuple) or output.numel() != 1):
        raise ModelError(key.kind, "no loss comes of the last layer", "give a loss_fn that returns a scalar")
