"""What pipeline transfers, ZeRO and the optimizer add to a rank's computing."""

from __future__ import annotations

from dsx.plan.cluster import Group
from dsx.plan.planner.collectives import Kind
from dsx.plan.planner.kernels import Shape
from dsx.plan.planner.layer_times import Machine
from dsx.plan.planner.layout import Layout, Task

_FP32_BYTES = 4


class Wire:
    """Pipeline transfers: what an action takes longer for one, and the delay until it has arrived."""

    def __init__(self, machine: Machine, shape: Shape, layout: Layout) -> None:
        self.action = self.delay = 0.0
        if layout.pipeline == 1:
            return
        network, software = machine.network, machine.software
        group = Group(layout.tensor)
        shares = layout.tensor if shape.cuts_sequence or software.shards_transfers else 1
        leaves = layout.gpus > network.cluster.gpus_per_node
        seconds = network.transfer_seconds(shape.boundary_bytes / shares, leaves_node=leaves)
        if shares > 1 and not shape.cuts_sequence:
            self.action = network.seconds("all_gather", shape.boundary_bytes, group)
        if software.hides_transfers and machine.hides:
            self.delay = seconds
        else:
            self.action += seconds


class ZeroActions:
    """Actions of a chunk with what ZeRO communicates during them.

    Stage 3 gathers parameters for each forward and each backward and reduces gradients after each backward,
    beside computation (dsx/adr/0009). Stage 2 with a reduction per micro-batch waits for it (dsx/adr/0008).
    """

    def __init__(self, task: Task, layout: Layout) -> None:
        self._machine, self._group = task.machine, Group(layout.data, layout.tensor)
        self._width, self._share = task.width, task.machine.software.gather_share
        self._stage, self._each = layout.zero_stage, layout.reduces_micro_batches
        self._layers = task.machine.network.efficiency.gather_seconds if layout.zero_stage == 3 else 0.0
        self._action = task.machine.network.efficiency.action_seconds

    def forward(self, seconds: float, elements: int, layers: int) -> float:
        """A forward."""
        return self._beside(seconds, self._gather(elements), layers * self._layers)

    def backward(self, seconds: float, elements: int, layers: int, *, reduces: bool = True) -> float:
        """A whole backward, or the first part of one."""
        beside = self._gather(elements) + (self._reduce(elements) if reduces else 0.0)
        after = self._reduce_after(elements) if reduces else 0.0
        return self._beside(seconds, beside, 2 * layers * self._layers) + after

    def weights(self, seconds: float, elements: int) -> float:
        """The second part of a divided backward."""
        return self._beside(seconds, self._reduce(elements), 0.0) + self._reduce_after(elements)

    def _beside(self, seconds: float, wire: float, hooks: float) -> float:
        return self._machine.host(self._machine.beside(seconds, wire), self._action + hooks)

    def _gather(self, elements: int) -> float:
        return self._collective("all_gather", elements) if self._stage == 3 else 0.0

    def _reduce(self, elements: int) -> float:
        return self._collective("reduce_scatter", elements) if self._stage == 3 else 0.0

    def _reduce_after(self, elements: int) -> float:
        if not self._each or self._stage != 2:
            return 0.0
        return self._machine.network.seconds("all_reduce", elements * self._width, self._group)

    def _collective(self, kind: Kind, elements: int) -> float:
        return self._machine.network.seconds(kind, elements * self._width, self._group, self._share)


def update_bytes(width: int) -> int:
    """Memory traffic of an AdamW step per parameter.

    Gradient read, written in fp32, read for the norm and for clipping, written; parameter and two moments
    read and written; in bf16 the new parameter copied.
    """
    gradient = width + 4 * _FP32_BYTES
    return gradient + (3 + 1 + 3) * _FP32_BYTES + (0 if width == _FP32_BYTES else _FP32_BYTES + width)
