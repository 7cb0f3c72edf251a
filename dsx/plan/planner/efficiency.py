"""What hardware gives of its nominal rates, and how software uses it. The only constants of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from dsx.plan.cluster import Cluster

_HOST_TILE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of nominal rates.

    The first three were fitted to three rows of table 1 of arXiv:2104.04473 (tools/bench_planner.py, which
    also shows how the other seven come out); the others are published figures.

    Attributes:
        matmul: Share of peak that a very large matrix multiplication reaches.
        memory: Share of the memory's nominal rate that elementwise operations reach.
        link: Share of a link's nominal rate that a collective reaches. The fit stays beside what is known:
            NCCL 2.10, src/graph/tuning.cc, allows 235 of the A100's 300 GB/s; AMD gives 48 of 64 GB/s per
            link of the MI300X (rocm.blogs.amd.com, "Understanding RCCL Bandwidth and xGMI Performance").
        tile: Elements by which each side of a multiplication seems longer than it is: time goes as
            (m + tile)(n + tile)(k + tile). A side of a tile's length gets half of the rate.
        attention: Share of ``matmul`` that fused attention reaches. arXiv:2307.08691, section 4: up to 73 %
            of peak forward, 63 % backward, where matrix multiplications reach 80 to 90 %.
        beside: Computation and communication that run beside each other take the longer one's time and this
            share of the shorter one's. Fitted to two rows of table 2 of arXiv:2104.04473.
        kernel_seconds: Least time between two kernels that Python starts one by one.
        action_seconds: Least time of one action of the pipeline (tools/RESULTS.md: 0.25 to 0.35 ms of Python
            and autograd).
        gather_seconds: Least time of a layer's forward under ZeRO-3, whose hooks fetch and release it; a
            backward takes twice that (DeepSpeed 0.19.8 on a CPU: 0.33 and 0.84 ms a layer).
    """

    matmul: float = 0.777
    memory: float = 0.822
    link: float = 0.813
    tile: int = 128
    attention: float = 0.75
    beside: float = 0.347
    kernel_seconds: float = 5e-6
    action_seconds: float = 0.3e-3
    gather_seconds: float = 0.33e-3

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """What is usual for a cluster: on CPUs a product's tile is that of their vector registers."""
        return cls(tile=_HOST_TILE) if cluster.is_host else cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """How a training system uses the hardware; the defaults are dsx.

    Attributes:
        attention: ``fused`` keeps scores on the chip and skips what the mask hides; ``stored`` writes the
            matrix of scores, its softmax and its dropout to memory, and masks nothing out of the products.
        hides_tensor_backward: Whether tensor-parallel communication of a linear's backward runs beside its
            multiplications (dsx/nn/linear.py).
        hides_transfers: Whether a rank computes while its messages are under way.
        shards_transfers: Whether tensor-parallel ranks send 1/tp each of what all of them hold alike
            (arXiv:2104.04473, section 4.1; dsx/adr/0010).
        gradients: When gradients are reduced: ``chunk``, each chunk's at its last backward (dsx/adr/0008);
            ``backward``, during the last backward (torch's DistributedDataParallel); ``end``, after it all.
        gather_share: What ZeRO-3's gathers and reductions get of the rate that other collectives reach.
    """

    attention: Literal["fused", "stored"] = "fused"
    hides_tensor_backward: bool = True
    hides_transfers: bool = True
    shards_transfers: bool = True
    gradients: Literal["chunk", "backward", "end"] = "chunk"
    gather_share: float = 1.0


MEGATRON_2021 = Software(
    attention="stored", hides_tensor_backward=False, hides_transfers=False, gradients="end"
)
"""Megatron-LM as arXiv:2104.04473 measured it: its commit 6985e58 (examples/sc21/README.md)."""
