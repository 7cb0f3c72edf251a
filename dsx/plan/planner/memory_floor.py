"""A bound that a rank's memory is above: cheap, to leave out what cannot fit before it is estimated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from dsx.plan.memory.layers import Layers
from dsx.plan.memory.ops import Ops, label
from dsx.plan.memory.tape import Leaf, Ledger, Tape
from dsx.plan.params import layer_kinds, param_specs
from dsx.plan.planner.layout import Layout
from dsx.plan.planner.step_time import Predictor

_ALL_LIVE = ("gpipe", "looped_bfs")  # Keep every micro-batch.


@dataclass(slots=True)
class MemoryFloor:
    """Bounds for the layouts of one task.

    Attributes:
        predictor: Of the task.
        update_bytes: What the optimizer keeps per parameter, the fp32 copy of a bf16 parameter included.
    """

    predictor: Predictor
    update_bytes: int = 12
    _kept: dict[object, int] = field(default_factory=dict)

    def of(self, layout: Layout) -> float:
        """Bytes that some rank of the layout holds at least."""
        return self.states(layout) + self.activations(layout)

    def states(self, layout: Layout) -> float:
        """Parameters, gradients and optimizer state of a mean pipeline rank (arXiv:1910.02054, section 5)."""
        width = self.predictor.task.width
        number = sum(self.predictor.elements(layout.tensor)) / layout.pipeline
        shares = [
            1 / layout.data if layout.zero_stage >= stage else 1.0
            for stage in (3, 2 if layout.reduces_micro_batches else 3, 1)
        ]
        return number * (width * shares[0] + width * shares[1] + self.update_bytes * shares[2])

    def activations(self, layout: Layout) -> float:
        """What the blocks of the first pipeline rank keep for the micro-batches under way."""
        count = layout.micro_batches(self.predictor.task.global_batch)
        live = count if layout.schedule in _ALL_LIVE else min(count, layout.pipeline)
        blocks = self.predictor.task.model.num_layers // layout.pipeline
        return float(live * blocks * self.kept_bytes(layout))

    def kept_bytes(self, layout: Layout) -> int:
        """What one block keeps of one micro-batch, from the ledger's own list of operations."""
        key = (layout.tensor, layout.sequence_parallel, layout.micro_batch, layout.recompute)
        if key not in self._kept:
            self._kept[key] = self._one_block(layout)
        return self._kept[key]

    def _one_block(self, layout: Layout) -> int:
        task, ledger = self.predictor.task, Ledger()
        model = replace(task.model, num_layers=1, windows=())  # with a window a block keeps more, if anything
        block = layer_kinds(model).index("Block")
        specs = [spec for spec in param_specs(model) if spec.layer == block]
        leaves = {spec.name: Leaf(spec.name, spec.local_shape(layout.tensor), task.width) for spec in specs}
        sequence = layout.sequence_parallel and layout.tensor > 1
        ops = Ops(tape=Tape(ledger), tp=layout.tensor, sequence=sequence, width=task.width, later=None)
        layers = Layers(model=model, ops=ops, weights=leaves, recompute=layout.recompute)
        length = task.sequence_length // layout.tensor if sequence else task.sequence_length
        shape = (layout.micro_batch, length, model.hidden_size)
        x = Leaf(
            "input", shape, task.width, storage=ops.tape.new(label("x", "", ""), task.width, *shape).storage
        )
        before = ledger.current_bytes
        y = layers.block(block, x)
        kept = ledger.current_bytes - before
        del y
        return kept
