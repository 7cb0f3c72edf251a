"""What torch does on a CPU where a GPU has a fused kernel, as :mod:`.tape` sees it.

Shapes as in :mod:`.ops`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dsx.plan.memory.tape import Label, Tensor

if TYPE_CHECKING:
    from dsx.plan.memory.ops import Ops

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
