"""Records layers: runs each once on fake tensors and notes what it allocates, frees and computes."""

from __future__ import annotations

import gc
import json
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from dsx.memory import device as paper
from dsx.memory.layer_record import (
    Event,
    Kept,
    LayerRecord,
    PictureInput,
    RecordedParameter,
    RecordedUse,
    TensorForm,
)
from dsx.memory.ledger import Label
from dsx.memory.meter import ADD, would_be_in_place
from dsx.memory.module_gathers import GATHERED, ModuleGathers, linear_of_zero3
from dsx.nn import collectives
from dsx.nn.context import ContextParallel
from dsx.nn.documents import PerMicroBatch
from dsx.nn.loss import loss_of
from dsx.nn.split import WeightGradients

KEY = (0, 0)
"""Under which the recorded micro-batch keeps its weight gradients."""

_aten = torch.ops.aten
_PRODUCTS = frozenset((_aten.mm, _aten.addmm, _aten.addmm_, _aten.bmm, _aten.baddbmm, _aten.baddbmm_))
"""Of two matrices, which come last; what they are added to is only written."""

_ATTENTION = {
    getattr(_aten, f"_scaled_dot_product_{kernel}_attention{rest}"): f"sdpa{way}"
    for kernel, of in (("flash", ""), ("efficient", ""), ("flash", "_for_cpu"))
    for way, rest in (("", of), ("_backward", f"{of}_backward"))
}
_CONVOLUTIONS = frozenset((_aten.convolution, _aten.convolution_backward))
"""Those of one filter for each channel, of which reading and writing is what takes time."""

_OVERWRITES = frozenset((_aten.copy_, _aten.bernoulli_, _aten.zero_, _aten.fill_))
"""These do not read what they write to."""

_LOOKS_UP = frozenset((_aten.embedding, _aten.gather, _aten.index, _aten.index_select))
"""These read of their first tensor only what they write."""

_WRITES_NOTHING = frozenset(
    (
        _aten.empty,
        _aten.empty_like,
        _aten.new_empty,
        _aten.empty_strided,
        _aten.new_empty_strided,
        _aten._unsafe_view,  # noqa: SLF001 (an operator)
    )
)
_MASK_ARGUMENT = 3  # of the memory-efficient kernel; the backward's comes after the gradient


class LayerRecorder(paper.UncompiledMode):
    """Notes events of storages and operators on one kind of device, in order.

    Attributes:
        events: The list that events go to, which may be replaced at any time. None drops them.
        numbers: How many numbers storages have.
    """

    def __init__(self, device_type: str, category: str) -> None:
        super().__init__()
        self._device_type, self._category = device_type, category
        self.events: list[Event] | None = None
        self.labels: dict[Label, int] = {}
        self._ids: dict[int, int | str] = {}
        self._sizes: dict[int | str, int] = {}
        self.numbers = 0
        self._paused = 0
        self._path: list[str] = []
        self._paths: list[tuple[int, str]] = []
        self._collectives = 0

    # What goes on besides operators

    def emit(self, *event: Any) -> None:
        if self.events is not None and not self._paused:
            self.events.append(event)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing but the end of what counts is noted, and no new storage counts."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def restart(self) -> None:
        """Number anew; of what has been made before, and may go now, nothing is noted."""
        self.numbers = self._collectives = 0
        self._ids |= {key: GATHERED for key, known in self._ids.items() if isinstance(known, int)}

    @property
    def live(self) -> list[int | str]:
        """Ids of the storages that live."""
        return list(self._ids.values())

    def size_of(self, number: int) -> int:
        """Bytes of a numbered storage."""
        return self._sizes[number]

    def external(self, tensor: Tensor, name: str) -> None:
        """Follow a storage of the caller's under a name of its own."""
        storage = tensor.untyped_storage()
        key = storage._cdata  # noqa: SLF001 (as in StorageMeter.add)
        if self._ids.get(key) != name:
            self._ids[key] = name
            weakref.finalize(storage, self._gone, key)

    def id_of(self, tensor: Tensor) -> int | str | None:
        """The storage's id; None for one that is not followed."""
        return self._ids.get(tensor.untyped_storage()._cdata)  # noqa: SLF001

    def renumbered(self, key: int) -> int | None:
        """A number for a storage that was followed under a name; None if it is gone."""
        if key not in self._ids:
            return None
        number, self.numbers = self.numbers, self.numbers + 1
        self._ids[key], self._sizes[number] = number, 1
        return number

    def enter(self, path: str) -> None:
        self._path.append(path)
        self._paths.append((torch._C._autograd._get_sequence_nr(), path))  # noqa: SLF001 (no public one)

    def leave(self) -> None:
        self._path.pop()
        path = self._path[-1] if self._path else ""
        self._paths.append((torch._C._autograd._get_sequence_nr(), path))  # noqa: SLF001

    # Operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operator and note what it computes, allocates and frees."""
        del types
        kwargs = kwargs or {}
        replaced = None
        if func is ADD and would_be_in_place(args):
            replaced = self.id_of(args[0])
        if func.overloadpacket is _aten.convolution and args[1].shape[1] != 1 and not _of_patches(args):
            # That of one filter for each channel takes nothing besides its result (DepthwiseConv2d.cu).
            raise NotImplementedError("dsx does not know what the kernels of convolutions over channels take")
        result = func(*args, **kwargs)
        if self._paused or func.is_view:
            return result
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        made = [leaf for leaf in made if leaf.device.type == self._device_type]
        if made:
            self._compute(func, args, kwargs, made)
        for leaf in made:
            self._add(leaf, func, replaced)
        return result

    def _compute(self, func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> None:
        if self.events is None:
            return
        packet = func.overloadpacket
        if packet in _WRITES_NOTHING:
            return
        if packet in _PRODUCTS:
            left, right = args[-2:]
            sizes = left.shape[-2], right.shape[-1], left.shape[-1], prod(left.shape[:-2])
            self.emit("mm", *sizes, made[0].element_size())
        elif packet is _aten._grouped_mm:  # noqa: SLF001 (an operator)
            self._grouped(args[:2], made[0])
        elif packet in _ATTENTION:
            self._attention(func, args, kwargs)
        else:
            given = args[1:] if packet in _OVERWRITES else args
            named = [value for name, value in kwargs.items() if name != "out"]
            read = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor)]
            moved = sum(map(_stored_bytes, read)) + sum(map(_bytes, made))
            name = packet.__name__
            if packet in _LOOKS_UP:
                moved = 2 * sum(map(_bytes, made))
            elif packet is _aten.scatter_add_:
                moved = 3 * _bytes(read[-1])
            if packet in flop_registry and packet not in _CONVOLUTIONS:
                self.emit("flops", name, moved, flop_registry[packet](*args, **kwargs, out_val=made[0]))
            else:
                self.emit("op", name, moved)

    def _grouped(self, sides: Sequence[Tensor], made: Tensor) -> None:
        """Products of experts, each taken to get its share of the rows."""
        left, right = sides
        rows, columns, inner = left.shape[-2], right.shape[-1], left.shape[-1]
        count = right.shape[0] if right.dim() > left.dim() else made.shape[0]
        if made.dim() > left.dim():  # weights' gradients: the rows are what is summed over
            inner = max(1, inner // count)
        else:
            rows = max(1, rows // count)
        self.emit("mm", rows, columns, inner, count, made.element_size())

    def _attention(self, func: Any, args: Any, kwargs: Any) -> None:
        kind = _ATTENTION[func.overloadpacket]
        names = (each.name for each in func._schema.arguments)  # noqa: SLF001 (no public one)
        causal = {**dict(zip(names, args, strict=False)), **kwargs}.get("is_causal", False)
        tensors = args[1:] if kind == "sdpa_backward" else args
        query, key = tensors[0], tensors[1]
        mask = kwargs.get("attn_mask", kwargs.get("attn_bias"))
        if mask is None and len(tensors) > _MASK_ARGUMENT and isinstance(tensors[3], Tensor):
            mask = None if kind == "sdpa_backward" and tensors[3].shape == query.shape else tensors[3]
        dropout = next((each for each in tensors[3:] if isinstance(each, float)), 0.0)
        heads = query.shape[0] * query.shape[1]
        whole = () if mask is not None or causal else (True,)
        self.emit(kind, heads, query.shape[2], *key.shape[2:], mask is not None, dropout > 0.0, *whole)

    def _add(self, tensor: Tensor, func: Any, replaced: int | str | None) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()  # noqa: SLF001 (as in StorageMeter.add)
        if key in self._ids:
            known = self._ids[key]
            if isinstance(known, int) and self._sizes[known] != size:
                # Made anew in another size, as out= and resize_ do.
                if self._sizes[known]:
                    self.emit("-", known)
                if size:
                    self.emit("+", known, size, self._label(tensor, func))
                self._sizes[known] = size
            return
        number, self.numbers = self.numbers, self.numbers + 1
        self._ids[key] = number
        self._sizes[number] = size
        weakref.finalize(storage, self._gone, key)
        if not size:
            return
        if replaced is not None:
            self.emit("sum", number, size, self._label(tensor, func), replaced)
        else:
            self.emit("+", number, size, self._label(tensor, func))

    def _gone(self, key: int) -> None:
        known = self._ids.pop(key)
        if self.events is not None and known != GATHERED and (isinstance(known, str) or self._sizes[known]):
            self.events.append(("-", known))  # in a pause too: a hook's gradient takes the place of another

    def _label(self, tensor: Tensor, func: Any) -> int:
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001 (no public one)
        operator, path = func.overloadpacket.__name__, self._path[-1] if self._path else ""
        form = f"{' x '.join(map(str, tensor.shape)) or '1'} {str(tensor.dtype).removeprefix('torch.')}"
        if node is None:
            what = Label(self._category, path or operator, form, operator)
        else:
            if not self._path:
                path = self._path_at(node._sequence_nr())  # noqa: SLF001
            name = f"gradient in {path}" if path else "gradient"
            what = Label(self._category, name, form, f"{node.name().removesuffix('Backward0')}, {operator}")
        return self.labels.setdefault(what, len(self.labels))

    def _path_at(self, sequence: int) -> str:
        place = bisect_right(self._paths, sequence, key=lambda entry: entry[0])
        return self._paths[place - 1][1] if place else ""

    def with_gradients(
        self, events: Sequence[Event], until: Sequence[Event] | None = None
    ) -> tuple[Event, ...]:
        """The events with the gradients labelled as such that parameters get in them, or ``until`` then."""
        names = {event[2]: event[1] for event in until or events if event[0] == "grad"}
        labels, found = list(self.labels), []
        for event in events:
            if event[0] in ("+", "sum") and event[1] in names:
                what = labels[event[3]]
                what = what._replace(category="gradients", name=f"gradient of {names[event[1]]}")
                found.append((*event[:3], self.labels.setdefault(what, len(self.labels)), *event[4:]))
            else:
                found.append(event)
        return tuple(found)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block, collectives of :mod:`dsx.nn.collectives` are noted instead of run."""

        def start_all_reduce(x: Tensor, ranks: collectives.Ranks, _: str = "sum") -> collectives.Pending:
            work = self._collective("all_reduce", _bytes(x), ranks) if ranks.size > 1 else None
            return collectives.Pending(x, work, lambda y: y)

        def _all_gather(output: Tensor, _: Tensor, ranks: collectives.Ranks) -> Any:
            return self._collective("all_gather", _bytes(output), ranks)

        def _messages(*ways: Any) -> Any:
            largest = max(sum(_bytes(each) for _, each in way) for way in ways[:2])
            return [self._collective("messages", largest, ways[2])]

        def send(x: Tensor, cp: ContextParallel, _: int, what: str) -> Any:
            self._collective(f"{what}_sent", _bytes(x), cp)
            return collectives.done(x)  # it has been received when somebody asks

        def receive(room: Tensor, cp: ContextParallel, _: int, what: str) -> Any:
            return self._collective(what, _bytes(room), cp)

        def start_exchange(found: Tensor, x: Tensor, _: Any, received: Any, *__: Any) -> collectives.Pending:
            if received is not None:
                self.emit("exchange")  # not of counts
            work = self._collective("all_to_all", max(_bytes(found), _bytes(x)), None)
            return collectives.Pending(found, work, lambda y: y)

        stand_ins = (start_all_reduce, _all_gather, start_exchange, _messages, send, receive)
        noted: dict[str, Any] = {each.__name__: each for each in stand_ins}
        for kind in ("reduce_scatter", "all_to_all"):
            noted[f"_{kind}"] = lambda _, x, ranks, kind=kind: self._collective(kind, _bytes(x), ranks)
        with ExitStack() as stack:
            for name, stand_in in noted.items():
                stack.enter_context(paper.swapped(collectives, name, stand_in))
            yield

    def _collective(self, kind: str, size_bytes: int, ranks: collectives.Ranks | None) -> Any:
        axis = ("expert",) if ranks is None else ("context",) * isinstance(ranks, ContextParallel)
        number, self._collectives = self._collectives, self._collectives + 1
        self.emit("begin", number, kind, size_bytes, *axis)
        return _Work(self, number)


class _Work:
    """A collective under way, as ``torch.distributed`` gives it."""

    def __init__(self, recorder: LayerRecorder, number: int) -> None:
        self._recorder, self._number = recorder, number

    def wait(self) -> None:
        """What follows needs the result."""
        self._recorder.emit("wait", self._number)


def _of_patches(given: Sequence[Any]) -> bool:
    """Whether a convolution goes from one patch to the next, none of them padded: a matrix product."""
    _, weight, _, stride, padding, dilation = given[:6]
    return [*weight.shape[2:]] == [*stride] and not any(padding) and {*dilation} == {1}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _stored_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; those that an expanded tensor repeats count once."""
    return tensor.element_size() * prod(
        size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride
    )


class _Entry(torch.autograd.Function):
    """Makes a layer's inputs, and takes their gradients."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, layer: _LayerTracing) -> tuple[Tensor, ...]:
        del leaf
        ctx.layer = layer
        ctx.set_materialize_grads(False)
        return tuple(layer.input(place) for place in layer.differentiable)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        recorder = ctx.layer.recorder
        ids: list[Any] = [None] * len(ctx.layer.forms)
        for place, gradient in zip(ctx.layer.differentiable, gradients, strict=True):
            ids[place] = None if gradient is None else recorder.id_of(gradient)
        recorder.emit("in", ids)
        return None, None


class _Exit(torch.autograd.Function):
    """Takes a layer's outputs, and makes their gradients, which autograd alone then holds."""

    @staticmethod
    def forward(ctx: Any, layer: _LayerTracing, *outputs: Tensor) -> Tensor:
        ctx.layer = layer
        ctx.forms = [(y.shape, y.dtype, y.device) if y.requires_grad else None for y in outputs]
        return outputs[0].new_zeros((), dtype=torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        recorder = ctx.layer.recorder
        gradients: list[Tensor | None] = []
        with recorder.paused():
            for place, form in enumerate(ctx.forms):
                if form is None:
                    gradients.append(None)
                    continue
                shape, dtype, device = form
                gradients.append(torch.empty(shape, dtype=dtype, device=device))
                recorder.external(gradients[-1], f"d{place}")
        del ctx.layer
        return None, *gradients


Layer = Callable[..., Any]


def _leaves_of(held: Any) -> Iterator[Any]:
    """What an attribute holds, in containers and in modules of its own."""
    for leaf in tree_leaves(held):
        if isinstance(leaf, nn.Module):
            for inner in leaf.modules():
                yield from (*inner.buffers(recurse=False), *vars(inner).values())
        else:
            yield leaf


class _LayerTracing:
    """One layer under one recorder.

    Args:
        forms: The forms of its inputs, which it gets as one tensor or one tuple.
        more: Forms of further arguments, which get no gradient: a loss's labels.
        loss_fn: The pipeline's loss, if the layer computes it, to which the labels then go.
        pictures: What the inputs are where they have pictures.
    """

    def __init__(
        self,
        layer: Layer,
        forms: Sequence[TensorForm],
        device: str,
        category: str,
        more: Sequence[TensorForm],
        loss_fn: Layer | None,
        pictures: Sequence[PictureInput],
    ) -> None:
        self.layer, self.device, self.loss_fn, self._pictures = layer, device, loss_fn, pictures
        self.recorder = LayerRecorder(device, category)
        self.forms = (*forms, *more)
        self._first = len(forms)
        self.differentiable = [place for place, form in enumerate(self.forms) if form.differentiable]
        self.module = layer if isinstance(layer, nn.Module) else None
        self.owner: nn.Module | None = getattr(layer, "tied_module", self.module)
        self.outputs: tuple[TensorForm, ...] = ()
        self.output_ids: tuple[int | str, ...] = ()
        self._gathers: ModuleGathers | None = None
        self._positions: dict[int, Tensor] = {}
        self._stays: list[int] = []
        self._numbers = 0

    def input(self, place: int) -> Tensor:
        form = self.forms[place]
        with self.recorder.paused():
            made = self._positions.get(place)
            if made is None and self._pictures and self._pictures[place].values:
                values = json.loads(self._pictures[place].values)
                made = torch.tensor(values, dtype=getattr(torch, form.dtype)).to(self.device)
            if made is None:
                made = torch.empty(form.shape, dtype=getattr(torch, form.dtype), device=self.device)
            if 0 < place < self._first and not form.differentiable:
                # What a layer makes of positions it keeps for the next that is given the same.
                self._positions[place] = made
        self.recorder.external(made, f"x{place}")
        return made

    def call(self, inputs: Sequence[Tensor]) -> Any:
        first: Any = inputs[0] if self._first == 1 else tuple(inputs[: self._first])
        labels = inputs[self._first :]
        if self._pictures:
            names = (each.name for each in self._pictures[1:])
            first = inputs[0], dict(zip(names, inputs[1:], strict=True))
        return (
            self.layer(first, *labels)
            if self.loss_fn is None
            else loss_of(self.loss_fn, self.layer, first, *labels)
        )

    def record(self, *, hooked: bool, divided: WeightGradients | None) -> LayerRecord:
        named = [] if self.owner is None else list(self.owner.named_parameters())
        known = tuple(
            RecordedParameter(name, tuple(p.shape), p.element_size(), p.requires_grad) for name, p in named
        )
        buffers = 0 if self.owner is None else sum(map(_bytes, self.owner.buffers()))
        buffers += getattr(self.owner, "tower_bytes", 0)
        names = {id(parameter): name for name, parameter in named}
        with self.recorder, self.recorder.alone(), ExitStack() as hooks:
            if hooked and self.owner is not None:
                hooks.enter_context(linear_of_zero3(self.owner))
            if hooked and self.module is not None and self.owner is not None:
                self._gathers = ModuleGathers(self.recorder, self.module, self.owner, names)
            warm = self._warm_up()
            for handle in self._watch(names):
                hooks.callback(handle.remove)  # a tied module is recorded again with its next layer
            if self._gathers is not None:
                self._gathers.begin()
            forward, backward = self._pass(None)
            self._stays = self._left()
            backward += tuple(("-", number) for number in self._stays)
            kept = tuple(self._settled(warm))
            second: tuple[Event, ...] | None = None
            uses: tuple[RecordedUse, ...] = ()
            if divided is not None:
                again, second = self._pass(divided)
                assert [event[:3] for event in again] == [event[:3] for event in forward]
                uses = self._weights(divided, names)
                second += tuple(("-", number) for number in self._left())
        return LayerRecord(
            inputs=tuple(self.forms),
            outputs=self.outputs,
            output_ids=self.output_ids,
            parameters=known,
            buffer_bytes=buffers,
            kept=kept,
            labels=tuple(self.recorder.labels),
            forward=forward,
            backward=backward,
            backward_input=second,
            weights=uses,
            num_labels=len(self.forms) - self._first,
        )

    def _warm_up(self) -> list[tuple[int, Kept]]:
        """Run a forward without gradients; gives what it leaves behind, by storage."""
        recorder, found = self.recorder, list[Event]()
        recorder.events = found
        with torch.no_grad():
            inputs = [self.input(place) for place in range(len(self.forms))]
            outputs = self.call(inputs)
            del outputs, inputs
        sizes = {event[1]: event[2:4] for event in found if event[0] == "+"}
        if any(number in sizes for number in recorder.live):
            gc.collect(1)  # an error that torch caught while it loaded itself holds frames and their tensors
        labels, owners = list(recorder.labels), self._owners()
        kept = []
        for key, number in recorder._ids.items():  # noqa: SLF001 (by storage)
            if number in sizes:
                size, label = sizes[number]
                owner, remade = owners.get(number, (None, False))
                name = f"kept by {type(self.layer if owner is None else owner).__name__}"
                what, by = labels[label]._replace(name=name), "" if owner is None else repr(owner)
                kept.append((key, Kept(by, what, size, remade)))
        recorder.events = None
        recorder.labels.clear()
        return kept

    def _settled(self, kept: Sequence[tuple[int, Kept]]) -> Iterator[Kept]:
        """What stays for good, and of what a pass replaced, as a state that was sent, what that leaves."""
        left = iter([self.recorder.size_of(number) for number in self._stays])
        for key, each in kept:
            stays = each.owner or self.recorder._ids.get(key) == GATHERED  # noqa: SLF001 (by storage)
            yield each if stays else each._replace(size_bytes=next(left, 0))

    def _owners(self) -> dict[int | str | None, tuple[Any, bool]]:
        """Objects that hold storages and are no modules of the layer, so that others may share them.

        And whether a storage is made of positions.
        """
        found: dict[int | str | None, tuple[Any, bool]] = {}
        for inner in () if self.owner is None else self.owner.modules():
            for value in vars(inner).values():
                if isinstance(value, nn.Module | Tensor) or not hasattr(value, "__dict__"):
                    continue
                for held in vars(value).values():
                    remade = isinstance(held, PerMicroBatch)
                    for leaf in _leaves_of(list(held.values()) if remade else held):
                        if isinstance(leaf, Tensor):
                            found[self.recorder.id_of(leaf)] = value, remade
        return found

    def _watch(self, names: Mapping[int, str]) -> Iterator[Any]:
        """Note modules as they run, and gradients as they come; gives the handles of the hooks that do."""
        recorder = self.recorder
        for path, module in () if self.owner is None else self.owner.named_modules():
            yield module.register_forward_pre_hook(lambda *_, path=path: recorder.enter(path))
            yield module.register_forward_hook(lambda *_: recorder.leave(), always_call=True)
        for parameter in () if self.owner is None else self.owner.parameters():
            if not parameter.requires_grad:
                continue

            def came(gradient: Tensor | None, name: str = names[id(parameter)]) -> None:
                if gradient is not None:
                    recorder.emit("grad", name, recorder.id_of(gradient))
                    recorder._paused += 1  # noqa: SLF001 (until `taken`; autograd's copies are no layer's)

            def taken(parameter: Tensor) -> None:
                if parameter.grad is not None:
                    recorder._paused -= 1  # noqa: SLF001
                    parameter.grad = None

            yield parameter.register_hook(came)
            yield parameter.register_post_accumulate_grad_hook(taken)

    def _pass(self, divided: WeightGradients | None) -> tuple[tuple[Event, ...], tuple[Event, ...]]:
        recorder, forward = self.recorder, list[Event]()
        recorder.restart()
        recorder.events = forward
        end = self._forward()
        recorder.numbers = max(recorder.numbers, self._numbers)  # no storage of two backwards has the same
        recorder.events = backward = list[Event]()
        if end is not None:
            with nullcontext() if divided is None else divided.deferring(KEY):
                with recorder.paused():
                    seed = torch.zeros((), device=self.device)
                end.backward(seed)
            del end
        if self._gathers is not None:
            self._gathers.rest()
        recorder.events = None
        self._numbers = recorder.numbers
        return recorder.with_gradients(forward, backward), recorder.with_gradients(backward)

    def _left(self) -> list[int]:
        """Storages, as of a state that was sent, that stay until the next micro-batch: they are ``kept``."""
        recorder = self.recorder
        return [known for known in recorder.live if isinstance(known, int) and recorder.size_of(known)]

    def _forward(self) -> Tensor | None:
        recorder = self.recorder
        with recorder.paused():
            inputs: list[Any] = [None] * len(self.forms)
            if self.differentiable:
                leaf = torch.empty((), device=self.device, requires_grad=True)
                made = _Entry.apply(leaf, self)
                for place, x in zip(self.differentiable, made, strict=True):
                    inputs[place] = x
                del made, leaf
            for place, form in enumerate(self.forms):
                if not form.differentiable:
                    inputs[place] = self.input(place)
            x = None
        value = self.call(inputs)
        outputs = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(y, Tensor) for y in outputs):
            what = type(value).__name__
            raise TypeError(f"it returns {what}, where stages exchange tensors and tuples of them")
        self.outputs = tuple(
            TensorForm(
                tuple(y.shape), str(y.dtype).removeprefix("torch."), y.element_size(), bool(y.requires_grad)
            )
            for y in outputs
        )
        ids = [recorder.id_of(y) for y in outputs]
        assert None not in ids, "an output that the layer did not compute"
        self.output_ids = tuple(ids)  # type: ignore[arg-type]
        recorder.emit("out")
        end = None
        if any(y.requires_grad for y in outputs):
            with recorder.paused():
                end = _Exit.apply(self, *outputs)
        del value, x, inputs, outputs
        return end

    def _weights(self, divided: WeightGradients, names: Mapping[int, str]) -> tuple[RecordedUse, ...]:
        """The second part of a divided backward, each use's communication begun during the one before."""
        recorder, found = self.recorder, []
        queue = [(names[id(parameter)], use) for parameter, uses in divided.taken(KEY) for use in uses]
        begins: list[list[Event]] = [[] for _ in queue]

        def begin(place: int) -> None:
            recorder.events = begins[place]
            queue[place][1].begin()

        with torch.no_grad():
            for place in range(len(queue)):
                name = queue[place][0]
                begin(place)
                if place + 1 < len(queue):
                    begin(place + 1)
                finish: list[Event] = []
                recorder.events = finish
                gradient = queue[place][1].finish()
                recorder.emit("grad", name, recorder.id_of(gradient))
                del gradient
                recorder.events = None
                found.append(RecordedUse(name, (), recorder.with_gradients(finish)))
        # What a use holds on to may go while the next one's communication begins.
        return tuple(use._replace(begin=tuple(begin)) for use, begin in zip(found, begins, strict=True))


def record_layer(
    layer: Layer,
    inputs: Sequence[TensorForm],
    *,
    device: str,
    category: str = "activations",
    more: Sequence[TensorForm] = (),
    divided: WeightGradients | None = None,
    hooked: bool = False,
    loss_fn: Layer | None = None,
    pictures: Sequence[PictureInput] = (),
) -> LayerRecord:
    """Record a layer. Call it inside :func:`fake_build`, where the layer was built too.

    Args:
        layer: A module, or a function of one tensor or tuple and of ``more``.
        inputs: The forms of its inputs.
        device: ``paper`` for a GPU, or ``cpu``.
        category: The category of its storages.
        more: Further arguments: the labels of a loss.
        divided: Takes the weight gradients of a layer that was built with it; None to divide no backward.
        hooked: Whether ZeRO-3 gathers parameters module by module.
        loss_fn: The pipeline's loss, if the layer computes it with its head: it gets ``more`` then.
        pictures: What the inputs are where they have pictures: ids first, and then what goes by name.
    """
    tracing = _LayerTracing(layer, inputs, device, category, more, loss_fn, pictures)
    return tracing.record(hooked=hooked, divided=divided)
