"""dsx's operations as the ledger sees them, each after the source that it names.

Shapes: B micro-batch; S sequence; s the same, or this rank's slice under sequence parallelism; H hidden; w
bytes an element. Of this rank: I and O inputs and outputs of a linear; N and K heads, D head_dim,
P = (N + 2 K) D; F width of the MLP; V rows of the padded vocabulary.

Shapes as in :mod:`.ops`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dsx.memory.ledger import Label, Leaf, Ledger, Tape, Tensor

DeviceKind = Literal["cuda", "cpu"]
"""Whose kernels run: torch takes others on a CPU, and its allocator rounds nothing up."""

Start = Callable[..., Callable[[], Tensor]]


class Hooks(Protocol):
    """Who stands before and after each module (ZeRO-3)."""

    def fetch(self, module: tuple[Leaf, ...], *, forward: bool) -> None:
        """Before a module with these parameters of its own, maybe none, runs forward or backward."""

    def release(self, module: tuple[Leaf, ...], *, forward: bool) -> None:
        """After it. Not after the backward of a module whose input wants no gradient."""


def label(name: str, formula: str, source: str, category: str = "activations") -> Label:
    """A line of the ledger."""
    return Label(category, name, formula, source)


@dataclass(slots=True, kw_only=True)
class Later:
    """Weight gradients that wait (dsx/nn/split.py): for each parameter, how to start each of its uses."""

    active: bool = False
    kept: dict[Leaf, list[tuple[Start, tuple[Tensor, ...]]]] = field(default_factory=dict)

    def keep(self, parameter: Leaf, start: Start, *tensors: Tensor) -> None:
        """Hold on to what a gradient needs."""
        held = tuple(t.detach() for t in tensors)
        self.kept.setdefault(parameter, []).append((start, held))

    def deliver(self, tape: Tape) -> None:
        """Compute all, parameter by parameter, each one's communication begun during the one before."""
        queue = [(parameter, _Use(*use)) for parameter, uses in self.kept.items() for use in uses]
        self.kept.clear()
        token = tape.scratch(label("token", "8", "nn/split.py delivering"), 8)
        total: Tensor | None = None
        for place, (parameter, use) in enumerate(queue):
            following = queue[place + 1] if place + 1 < len(queue) else None
            use.begin()
            if following is not None:
                following[1].begin()
            gradient = use.finish()
            total = gradient if total is None else total
            del gradient
            if following is None or following[0] is not parameter:
                last, total = total, None
                parameter.receive(last)
                del last
        del token


class _Use:
    """dsx/nn/split.py _Use."""

    def __init__(self, start: Start, tensors: tuple[Tensor, ...]) -> None:
        self._start, self._tensors = start, tensors
        self._finish: Callable[[], Tensor] | None = None

    def begin(self) -> None:
        """Start its communication; what was kept goes, but for what that holds."""
        if self._finish is None:
            self._finish, self._tensors = self._start(*self._tensors), ()

    def finish(self) -> Tensor:
        """The gradient."""
        self.begin()
        assert self._finish is not None
        finish, self._finish = self._finish, None
        return finish()


@dataclass(slots=True, kw_only=True)
class Ops:
    """The operations of one rank.

    Attributes:
        tape: Where they are recorded.
        tp: Tensor-parallel degree.
        sequence: Whether sequence parallelism cuts what is between the tensor-parallel regions.
        width: Bytes an element of activations and parameters.
        later: Takes weight gradients; None if no backward is divided.
        hooks: ZeRO-3's; None if parameters are always whole.
        device: Whose kernels run.
    """

    tape: Tape
    tp: int
    sequence: bool
    width: int
    later: Later | None = None
    hooks: Hooks | None = None
    device: DeviceKind = "cuda"

    def module(
        self, parameters: Sequence[Leaf | None], x: Tensor, body: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """``body(x)`` of a module with ``parameters``, hooked as by zero/parameter_offload.py."""
        hooks = self.hooks
        if hooks is None:
            return body(x)
        held = tuple(leaf for leaf in parameters if leaf is not None)
        hooks.fetch(held, forward=True)

        def over(_: tuple[Tensor, ...], dx: Tensor) -> list[Tensor | None]:
            hooks.release(held, forward=False)
            return [dx.detach()]

        def coming(_: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
            hooks.fetch(held, forward=False)
            return [dy.detach()]

        inside = x.view()
        self.tape.record((x,), (inside,), over)
        y = body(inside)
        del inside
        hooks.release(held, forward=True)
        outside = y.detach()
        self.tape.record((y,), (outside,), coming)
        return outside

    @property
    def ledger(self) -> Ledger:
        """The tape's."""
        return self.tape.ledger

    def like(self, what: Label, x: Tensor) -> Tensor:
        """A new tensor of this rank's width and of the shape of ``x``."""
        return self.tape.new(what, x.width, *x.shape)

    def gather(self, x: Tensor) -> DeferredGradient:
        """Start an all-gather on the sequence: [B, s, I] to [B, S, I]."""
        batch, length, *rest = x.shape
        what = label("gathered", "B S I w", "nn/collectives.py start_all_gather")
        return DeferredGradient(self, self.tape.new(what, x.width, batch, length * self.tp, *rest), batch > 1)

    def scatter(self, x: Tensor) -> DeferredGradient:
        """Start a reduce-scatter on the sequence: [B, S, I] to [B, s, I]."""
        batch, length, *rest = x.shape
        what = label("ranks' parts", "B S I w", "nn/collectives.py start_reduce_scatter")
        parts = self.like(what, x) if batch > 1 else None
        what = label("reduced", "B s I w", "nn/collectives.py start_reduce_scatter")
        buffer = self.tape.new(what, x.width, batch, length // self.tp, *rest)
        del parts
        return DeferredGradient(self, buffer, False)

    def linear(self, x: Tensor, weight: Leaf, bias: Leaf | None, *, column: bool, name: str) -> Tensor:
        """``_Linear``: column gathers its input under sequence parallelism, row leaves the sum to others."""
        gathers = column and self.sequence
        whole = self.gather(x).wait() if gathers else x
        what = label(
            name, "B S O w", "nn/linear.py _Linear.forward", "logits" if name == "logits" else "activations"
        )
        y = self.tape.new(what, x.width, *whole.shape[:-1], weight.shape[0])
        del whole
        reduces = not column and self.tp > 1
        late = None if reduces or bias is None else self.late(bias)

        def backward(saved: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
            x, _ = saved
            deferred = self.later is not None and self.later.active
            finish = None
            if deferred:
                assert self.later is not None
                own = self._own_part(dy) if reduces and self.sequence else dy
                start = self._starter(gathers, reduces and self.sequence, weight)
                self.later.keep(weight, start, x, own)
                del own, start
            else:
                finish = self._starter(gathers, False, weight)(x, dy)
            what = label(f"gradient of {name}'s input", "B S I w", "nn/linear.py _Linear.backward")
            dx: Tensor | None = self.tape.new(what, x.width, *dy.shape[:-1], weight.shape[1])
            pending = None
            if gathers:
                assert dx is not None
                pending, dx = self.scatter(dx), None
            dweight = None if finish is None else finish()
            dbias = None
            if late is not None:
                what = label("bias gradient", "O w", "nn/linear.py _Linear.backward")
                dbias = self.tape.new(what, x.width, *late.shape)
            return [pending.wait() if pending is not None else dx, dweight, dbias]

        self.tape.record((x, weight, late), (y,), backward, saved=(x, weight))
        return y

    def late(self, parameter: Leaf) -> Tensor:
        """nn/split.py late: a small parameter; in divided backwards its gradient comes with the weights'."""
        if self.later is None:
            return parameter
        later, view = self.later, parameter.detach()

        def backward(_: tuple[Tensor, ...], gradient: Tensor) -> list[Tensor | None]:
            if not later.active:
                return [gradient.detach()]
            later.keep(parameter, self._cloned(), gradient)
            return [None]

        self.tape.record((parameter,), (view,), backward)
        return view

    def _own_part(self, dy: Tensor) -> Tensor:
        batch, length, *rest = dy.shape
        what = label("slice of an output's gradient", "B s O w", "nn/linear.py _own_part")
        return self.tape.new(what, dy.width, batch, length // self.tp, *rest)

    def _starter(self, gathers_x: bool, gathers_dy: bool, weight: Leaf) -> Start:
        def start(x: Tensor, dy: Tensor) -> Callable[[], Tensor]:
            whole_x = self.gather(x) if gathers_x else DeferredGradient(self, x, False)
            whole_dy = self.gather(dy) if gathers_dy else DeferredGradient(self, dy, False)

            def finish() -> Tensor:
                assert dy is not None  # what is kept stays until here, gathered or not
                first, second = whole_dy.wait(), whole_x.wait()
                gradient = self.tape.new(
                    Label("gradients", "weight gradient", "I O w", "nn/linear.py _start_weight_gradient"),
                    x.width,
                    *weight.shape,
                )
                del first, second
                return gradient

            return finish

        return start

    def _cloned(self) -> Start:
        what = Label("gradients", "late gradient", "O w", "nn/split.py _as_it_is")

        def start(gradient: Tensor) -> Callable[[], Tensor]:
            return lambda: self.like(what, gradient)

        return start

    def row_linear(self, x: Tensor, weight: Leaf, bias: Leaf | None, *, name: str) -> Tensor:
        """A row-parallel linear with its reduction (nn/collectives.py _ReduceFrom)."""
        late = None if bias is None or self.tp == 1 else self.late(bias)
        y = self.linear(x, weight, bias, column=False, name=name)
        return y if self.tp == 1 else self.reduce_from(y, late)

    def reduce_from(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Sum over the ranks, in place without sequence parallelism."""
        y = self.scatter(x).wait() if self.sequence else x.detach()

        def backward(saved: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
            del saved
            dy = self.gather(dy).wait() if self.sequence else dy
            dbias = None
            if bias is not None:
                what = label("bias gradient", "H w", "nn/collectives.py _ReduceFrom.backward")
                dbias = self.tape.new(what, dy.width, *bias.shape)
            return [dy.detach(), dbias]

        self.tape.record((x, bias), (y,), backward)
        return y

    def norm(self, x: Tensor, weight: Leaf, bias: Leaf | None, *, over_heads: bool = False) -> Tensor:
        """LayerNorm with a bias, else RMSNorm: float32 statistics of each token, or head, are saved.

        Heads are a view of their projection, of which the kernel makes a copy each time.
        """
        source = "nn/norm.py forward"
        parameters = self._copied([self.late(p) for p in (weight, bias) if p is not None], cut=over_heads)
        if bias is None and self.device == "cpu":
            return rms_norm(self, x, parameters[0])
        copied = label("norm's input, in order", "B S N D w", "torch layer_norm_kernel.cu")
        copy = self.like(copied, x) if over_heads else None
        y = self.like(label("norm", "B s H w", source), x)
        # A CPU's are as wide as the input (layer_norm.cpp).
        wide, formula = (self.width, "B s w") if self.device == "cpu" else (4, "4 B s")
        what = label("norm statistics", formula, source)
        statistics = [self.tape.new(what, wide, *x.shape[:-1]) for _ in parameters]
        del copy

        def backward(saved: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
            del dy
            copy = self.like(copied, saved[0]) if over_heads else None
            dx = self.like(label("gradient of norm's input", "B s H w", source), saved[0])
            what = Label("gradients", "norm gradient", "H w", source)
            gradients = [self.tape.new(what, self.width, *p.shape) for p in parameters]
            del copy
            return [dx, *gradients]

        self.tape.record((x, *parameters), (y,), backward, saved=(x, weight, *statistics))
        return y

    def _copied(self, parameters: Sequence[Tensor], *, cut: bool) -> Sequence[Tensor]:
        """nn/collectives.py copy_parameters: gradients are summed over the ranks in float32."""
        if not (self.sequence or (cut and self.tp > 1)):
            return parameters
        views = [parameter.detach() for parameter in parameters]

        def backward(_: tuple[Tensor, ...], *gradients: Tensor) -> list[Tensor | None]:
            source = "nn/collectives.py _CopyParameters"

            def new(formula: str, width: int, elements: int) -> Tensor:
                return self.tape.new(label("norm gradients", formula, source), width, elements)

            wide = [new("4 H", 4, g.numel) for g in gradients] if self.width < 4 else []
            flat = new("4 H of each", 4, sum(g.numel for g in gradients))
            del wide
            if self.width == 4:
                return [flat.view(g.numel) for g in gradients]
            return [self.like(label("norm gradient", "H w", source, "gradients"), g) for g in gradients]

        self.tape.record(parameters, views, backward)
        return views

    def add(self, x: Tensor, y: Tensor, *, name: str, source: str) -> Tensor:
        """``x + y``, one shape."""
        z = self.like(label(name, "B s H w", source), x)
        self.tape.record((x, y), (z,), lambda _, dz: [dz.detach(), dz.detach()])
        return z

    def dropout(self, x: Tensor, probability: float) -> Tensor:
        """nn/dropout.py _Dropout: a mask that becomes the result, made again in backward."""
        if probability == 0.0:
            return x
        what = label("dropout", "B s H w", "nn/dropout.py _scale")
        y = self.like(what, x)
        self.tape.record((x,), (y,), lambda _, dy: [self.like(what, dy)])
        return y

    def activation(self, x: Tensor) -> Tensor:
        """GELU and the like: the input is saved."""
        source = "nn/block.py Mlp.forward"
        y = self.like(label("activation", "B S F w", source), x)
        what = label("gradient of the activation's input", "B S F w", source)
        self.tape.record((x,), (y,), lambda saved, _: [self.like(what, saved[0])], saved=(x,))
        return y

    def gated(self, gate_up: Tensor) -> Tensor:
        """nn/block.py _Gated: the fused projection alone is saved."""
        *tokens, double = gate_up.shape
        source = "nn/block.py _Gated"

        def half(name: str) -> Tensor:
            return self.tape.new(label(name, "B S F w", source), gate_up.width, *tokens, double // 2)

        y = half("gate times up")
        width = gate_up.width

        def backward(saved: tuple[Tensor, ...], _: Tensor) -> list[Tensor | None]:
            def again(name: str) -> Tensor:
                return self.tape.new(label(name, "B S F w", source), width, *tokens, double // 2)

            activated = again("activated gate")
            d_gate_up = self.like(label("gradient of gate and up", "2 B S F w", source), saved[0])
            upstream = again("gradient times up")
            d_gate = again("gradient of the gate")
            del activated, upstream, d_gate
            return [d_gate_up]

        self.tape.record((gate_up,), (y,), backward, saved=(gate_up,))
        return y


class DeferredGradient:
    """A collective under way (nn/collectives.py Pending): its buffer, and whether its result is a copy."""

    def __init__(self, ops: Ops, buffer: Tensor, copies: bool) -> None:
        self._ops, self._buffer, self._copies = ops, buffer, copies

    def wait(self) -> Tensor:
        """The result."""
        if not self._copies:
            return self._buffer
        return self._ops.like(
            label("gathered, in order", "B S I w", "nn/collectives.py start_all_gather"), self._buffer
        )


_SOURCE = "torch layer_norm.cpp, rms_norm_composite"


@dataclass(frozen=True, slots=True)
class _Steps:
    """The float32 steps of one RMSNorm and their gradients."""

    ops: Ops
    stream: tuple[int, ...]

    def wide(self, name: str) -> Tensor:
        """As the stream, in float32."""
        return self.ops.tape.new(Label("activations", name, "4 B s H", _SOURCE), 4, *self.stream)

    def thin(self, name: str) -> Tensor:
        """A number for each token."""
        return self.ops.tape.new(Label("activations", name, "4 B s", _SOURCE), 4, *self.stream[:-1])

    def own(self, name: str) -> Tensor:
        """As the stream, as narrow as that."""
        what = Label("activations", name, "B s H w", _SOURCE)
        return self.ops.tape.new(what, self.ops.width, *self.stream)

    def of_squares(self, _: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
        """pow_backward: an expression whose temporaries live to its end."""
        del dy
        temporaries = [self.wide("input to the power 1"), self.wide("twice the input")]
        gradient = self.wide("gradient of the squares' input")
        temporaries.clear()
        return [gradient]

    def of_root(self, _: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
        """rsqrt_backward."""
        del dy
        temporaries = [self.thin("scale to the power 3"), self.thin("half of it")]
        gradient = self.thin("gradient of the mean")
        temporaries.clear()
        return [gradient]

    def of_scaling(self, _: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
        """The product with the scale, whose own gradient is summed up over the stream."""
        del dy
        product, gradient = self.wide("gradient times input"), self.wide("gradient of the scaled input")
        of_scale = self.thin("gradient of the scale")
        del product
        return [gradient, of_scale]

    def of_weight(self, saved: tuple[Tensor, ...], dy: Tensor) -> list[Tensor | None]:
        """The product with the weight, whose own gradient is summed up over the tokens."""
        del dy
        product, gradient = self.wide("gradient times normed"), self.wide("gradient of normed")
        shape, name = saved[1].shape, "norm gradient"
        summed = self.ops.tape.new(Label("gradients", name, "4 H", _SOURCE), 4, *shape)
        del product
        if self.ops.width < 4:
            summed = self.ops.tape.new(Label("gradients", name, "H w", _SOURCE), self.ops.width, *shape)
        return [gradient, summed]


def rms_norm(ops: Ops, x: Tensor, weight: Tensor) -> Tensor:
    """F.rms_norm as its steps, in float32; each step's autograd node keeps what it needs by itself."""
    tape, steps, narrow = ops.tape, _Steps(ops, x.shape), ops.width < 4
    upcast = x
    if narrow:
        upcast = steps.wide("input in float32")
        tape.record((x,), (upcast,), lambda *_: [steps.own("gradient of norm's input")])
    square = steps.wide("squares")
    tape.record((upcast,), (square,), steps.of_squares, saved=(upcast,))
    mean = steps.thin("mean of squares")
    tape.record((square,), (mean,), lambda *_: [steps.wide("gradient of the squares")])
    scale = steps.thin("scale")
    tape.record((mean,), (scale,), steps.of_root, saved=(scale,))
    del square, mean
    normed = steps.wide("normed")
    tape.record((upcast, scale), (normed,), steps.of_scaling, saved=(upcast, scale))
    y = steps.wide("norm")
    tape.record((normed, weight), (y,), steps.of_weight, saved=(normed, weight))
    del normed, scale, upcast
    if narrow:
        high, y = y, steps.own("norm")
        tape.record((high,), (y,), lambda *_: [steps.wide("gradient of norm's output")])
    return y
