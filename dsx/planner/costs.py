"""Time of collectives (alpha-beta), and what hardware gives of its nominal rates: the model's only constants.

Time of collectives: ring algorithms, a latency per step and a rate per level (alpha-beta).

As NCCL's own model (src/graph/tuning.cc, ring): of a ring's steps those that leave a node take the network's
latency, the others the node's; and bytes go at the rate of the slowest hop. A ring enters and leaves a node
once, and a group with several members there runs as many rings, each through another member's adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from dsx.planner.cluster import Cluster, Group

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True)
class Network:
    """A cluster's links and what is reached of their rates."""

    cluster: Cluster
    efficiency: Efficiency

    def seconds(self, kind: Kind, num_bytes: float, group: Group, share: float = 1.0) -> float:
        """One collective over ``group``.

        Args:
            kind: Which.
            num_bytes: Of the whole tensor, on each rank before an all-reduce or a reduce-scatter and after
                an all-gather.
            group: Who takes part.
            share: What is reached of the usual rate.
        """
        if group.size == 1:
            return 0.0
        passes = 2 if kind == "all_reduce" else 1
        steps, node = group.size - 1, self.cluster.gpus_per_node
        hops = group.nodes(node) - 1
        latency = (steps - hops) * self.cluster.inside.latency_seconds
        latency += hops * self.cluster.between.latency_seconds
        return passes * (latency + num_bytes * steps / group.size / (share * self.rate(group)))

    def rate(self, group: Group) -> float:
        """Bytes per second at which each member of a ring sends."""
        node, cluster = self.cluster.gpus_per_node, self.cluster
        rate = cluster.inside.bytes_per_second
        if group.nodes(node) > 1:
            rate = min(rate, cluster.between.bytes_per_second * group.members_per_node(node))
        return rate * self.efficiency.link

    def transfer_seconds(self, num_bytes: float, *, leaves_node: bool) -> float:
        """A message from one rank to another."""
        link = self.cluster.between if leaves_node else self.cluster.inside
        return link.latency_seconds + num_bytes / (link.bytes_per_second * self.efficiency.link)


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

    matmul: float = 0.781
    memory: float = 0.776
    link: float = 0.771
    tile: int = 128
    attention: float = 0.75
    beside: float = 0.353
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
            (arXiv:2104.04473, section 4.1; docs/adr/0010).
        gradients: When gradients are reduced: ``chunk``, each chunk's at its last backward (docs/adr/0008);
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
