"""ZeRO-1 and 2 with the optimizer on the host, as :mod:`.partitioned` sees it without."""

from __future__ import annotations

from dsx.plan.memory.partitioned import Partitioned


class PartitionedOffload(Partitioned):
    """DeepSpeedZeroOptimizer with ``offload_optimizer``."""
