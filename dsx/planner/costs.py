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

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "messages"]


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
                an all-gather; of what each rank gives to all in an all-to-all, itself included; of what
                each gives to one other in messages, over the slowest link that any of them takes.
            group: Who takes part.
            share: What is reached of the usual rate.
        """
        if group.size == 1:
            return 0.0
        if kind == "all_to_all":
            return self._exchange(num_bytes / group.size, group, share)
        if kind == "messages":
            return self._exchange(num_bytes, group, share, most=1)
        passes = 2 if kind == "all_reduce" else 1
        steps, node = group.size - 1, self.cluster.gpus_per_node
        hops, far = group.nodes(node) - 1, self.sites(group) - 1
        latency = (steps - hops) * self.cluster.inside.latency_seconds
        latency += (hops - far) * self.cluster.between.latency_seconds
        if self.cluster.across is not None:
            latency += far * self.cluster.across.latency_seconds
        return passes * (latency + num_bytes * steps / group.size / (share * self.rate(group)))

    def _exchange(self, num_bytes: float, group: Group, share: float, most: int | None = None) -> float:
        """A message of so many bytes from each member to each: all at once, through the links that they take.

        Or to ``most`` others, wherever these are. A ring's rate would be too high: what leaves a node leaves
        it through the sender's own adapter, and goes no part of its way inside.
        """
        cluster, each = self.cluster, self.cluster.gpus_per_site
        node = group.members_per_node(cluster.gpus_per_node)
        site = group.members_per_node(each) if each else group.size
        ways = [(cluster.inside, node - 1), (cluster.between, site - node)]
        rates = [(link.latency_seconds, link.bytes_per_second, peers) for link, peers in ways]
        if cluster.across is not None and each:
            rates.append(
                (cluster.across.latency_seconds, cluster.across.bytes_per_second / each, group.size - site)
            )
        reached = share * self.efficiency.link
        return max(
            latency + min(peers, most or peers) * num_bytes / (rate * reached)
            for latency, rate, peers in rates
            if peers > 0
        )

    def rate(self, group: Group) -> float:
        """Bytes per second at which each member of a ring sends."""
        node, cluster = self.cluster.gpus_per_node, self.cluster
        rate = cluster.inside.bytes_per_second
        if group.nodes(node) > 1:
            rate = min(rate, cluster.between.bytes_per_second * group.members_per_node(node))
        if self.sites(group) > 1 and cluster.across is not None:
            each = cluster.gpus_per_site
            rate = min(rate, cluster.across.bytes_per_second / each * group.members_per_node(each))
        return rate * self.efficiency.link

    def transfer_seconds(self, num_bytes: float, *, leaves_node: bool) -> float:
        link = self.cluster.between if leaves_node else self.cluster.inside
        return link.latency_seconds + num_bytes / (link.bytes_per_second * self.efficiency.link)

    def crossing_seconds(self, num_bytes: float, senders: int) -> float:
        """Messages from so many ranks at once to another site, over the link that they share."""
        link = self.cluster.across
        assert link is not None, "there is another site"
        return link.latency_seconds + num_bytes * senders / (link.bytes_per_second * self.efficiency.link)

    def sites(self, group: Group) -> int:
        each = self.cluster.gpus_per_site
        return group.nodes(each) if each else 1


_HOST_TILE = 16


@dataclass(frozen=True, slots=True)
class Evidence:
    """How predictions compare with published runs that no constant is fitted to.

    Attributes:
        error: Nine of ten predicted step times are at most this share off, upwards or downwards;
            the rate of a single run is predicted so much too low.
        stands_in: Whether the constants only stand in for those of other GPUs, of which nothing was compared.
    """

    gpus: str
    error: float
    runs: int
    stands_in: bool = False

    def __str__(self) -> str:
        if self.stands_in:
            return f"rates are reached as on {self.gpus}; no run of these GPUs was compared"
        if self.runs == 1:
            faster = 1 / (1 - self.error) - 1
            return f"one published run on {self.gpus} was compared; it was {faster:.0%} faster than predicted"
        known = f"nine of ten of {self.runs} published runs on {self.gpus}"
        return f"{known} are predicted within {self.error:.0%}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of nominal rates.

    The defaults are those of an H100 or H200. What differs between generations of GPUs is fitted to a part
    of the published runs of a generation; tools/bench_planner.py shows how well the others are predicted.
    The other constants are the same for all, and are published figures unless they say otherwise.

    Attributes:
        matmul: Share of peak that a very large matrix multiplication reaches. Fitted.
        memory: Share of the memory's nominal rate that elementwise operations reach. Fitted.
        attention: Share of ``matmul`` that torch's fused attention reaches. Fitted on the H100; of the A100
            arXiv:2307.08691, section 4, has up to 73 % of peak forward, 63 % backward, where matrix
            multiplications reach 80 to 90 %.
        fusion: Share of the traffic of elementwise operations that is left in compiled blocks. Fitted on the
            H100.
        link: Share of a link's nominal rate that a collective reaches. Fitted to A100s of 2021, and beside
            what is known: NCCL 2.10, src/graph/tuning.cc, allows 235 of the A100's 300 GB/s; AMD gives 48 of
            64 GB/s per link of the MI300X (rocm.blogs.amd.com, "Understanding RCCL Bandwidth and xGMI
            Performance").
        tile: Elements by which each side of a multiplication seems longer than it is: time goes as
            (m + tile)(n + tile)(k + tile). A side of a tile's length gets half of the rate.
        beside: Computation and communication that run beside each other take the longer one's time and this
            share of the shorter one's. Fitted to two rows of table 2 of arXiv:2104.04473.
        kernel_seconds: Least time between two kernels that Python starts one by one.
        action_seconds: Least time of one action of the pipeline (tools/RESULTS.md: 0.25 to 0.35 ms of Python
            and autograd).
        gather_seconds: Least time of a layer's forward under ZeRO-3, whose hooks fetch and release it; a
            backward takes twice that (DeepSpeed 0.19.8 on a CPU: 0.33 and 0.84 ms a layer).
        evidence: How far predictions by these constants are known to be off; None if that is not known.
        adapters: The same of models of which adapters alone are trained.
        context: The same where ranks share sequences.
    """

    matmul: float = 0.686
    memory: float = 0.441
    attention: float = 0.354
    fusion: float = 0.397
    link: float = 0.771
    tile: int = 128
    beside: float = 0.377
    kernel_seconds: float = 5e-6
    action_seconds: float = 0.3e-3
    gather_seconds: float = 0.33e-3
    evidence: Evidence | None = None
    adapters: Evidence | None = None
    context: Evidence | None = None

    @classmethod
    def of(cls, cluster: Cluster) -> Self:
        """What is usual for a cluster: on CPUs a product's tile is that of their vector registers."""
        if cluster.is_host:
            return cls(tile=_HOST_TILE)
        if cluster.generation == "A100":
            return cls(matmul=0.817, memory=0.652, attention=0.75, evidence=Evidence("A100", 0.11, 33))
        return cls(
            evidence=Evidence("H100 and H200", 0.12, 53, stands_in=cluster.generation != "H100"),
            adapters=Evidence("H100 with LoRA", 0.30, 6),
            context=Evidence("H100 with ranks that share sequences", 0.125, 1),
        )


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
        gradients: When gradients are reduced: ``chunk``, each chunk's in its last backward (docs/adr/0008);
            ``backward``, during the last backward (torch's DistributedDataParallel); ``end``, after it all.
        gather_share: What ZeRO-3's gathers and reductions get of the rate that other collectives reach.
        attention_share: What its fused attention gets of the rate that torch's kernel reaches.
        compiled: Whether elementwise operators of a layer are compiled into few kernels.
    """

    attention: Literal["fused", "stored"] = "fused"
    hides_tensor_backward: bool = True
    hides_transfers: bool = True
    shards_transfers: bool = True
    gradients: Literal["chunk", "backward", "end"] = "chunk"
    gather_share: float = 1.0
    attention_share: float = 1.0
    compiled: bool = False


MEGATRON_2021 = Software(
    attention="stored", hides_tensor_backward=False, hides_transfers=False, gradients="end"
)
"""Megatron-LM as arXiv:2104.04473 measured it: its commit 6985e58 (examples/sc21/README.md)."""
