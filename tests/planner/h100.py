"""Records and times of small models' layers on H100s."""

from __future__ import annotations

from typing import Any

from dsx.memory.layer_record import Shape
from dsx.models.spec import Model
from dsx.planner.cluster import preset
from dsx.planner.costs import Efficiency, Network, Software
from dsx.planner.layer_times import Machine

NETWORK = Network(preset("H100"), Efficiency())
MACHINE = Machine(network=NETWORK, software=Software(), precision="bf16")


def shape_of(model: Model, tokens: int, **others: Any) -> Shape:
    """Two rows of so many tokens in bf16 on one rank, but for what ``others`` say."""
    one: dict[str, Any] = {"tensor": 1, "sequence_parallel": False, "micro_batch": 2, "width": 2}
    return Shape(**{"model": model, "sequence_length": tokens} | one | others)
