"""Time of collectives: ring algorithms, a latency per step and a rate per level (alpha-beta).

As NCCL's own model (src/graph/tuning.cc, ring): of a ring's steps those that leave a node take the network's
latency, the others the node's; and bytes go at the rate of the slowest hop. A ring enters and leaves a node
once, and a group with several members there runs as many rings, each through another member's adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dsx.plan.cluster import Cluster, Group
from dsx.plan.planner.efficiency import Efficiency

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
