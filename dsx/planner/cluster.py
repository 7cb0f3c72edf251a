"""A cluster as the planner sees it: a GPU's rate and memory, and the links between GPUs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from dsx.config.load import explain, raise_all, read
from dsx.config.schema import Positive, SchemaBlock
from dsx.errors import ConfigError
from dsx.models.flops import peak_flops

Precision = Literal["bf16", "fp32"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Link:
    """The link of a GPU at one level.

    Attributes:
        bytes_per_second: Nominal rate of one GPU in one direction.
        latency_seconds: Latency of one step of a collective.
    """

    bytes_per_second: float
    latency_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Nodes of equal GPUs (or of CPU processes, which count as GPUs).

    Attributes:
        name: The name, for people.
        gpus_per_node: GPUs that the inner links join.
        nodes: Number of nodes; None for as many as a run asks for.
        memory_bytes: Memory of a GPU.
        memory_bytes_per_second: Nominal rate of a GPU's memory.
        flops: Precision -> dense peak FLOP/s of a GPU.
        inside: Link between GPUs of a node.
        between: Link between nodes, each GPU's share of its node's network.
        is_host: Whether the "GPUs" are CPU processes, where nothing runs beside a rank's computation.
        reserved_bytes: What device context, communication libraries and the allocator's gaps take of a GPU's
            memory. An allowance, not a measurement.

    Raises:
        ConfigError: A size that cannot be.
    """

    name: str
    gpus_per_node: int
    nodes: int | None = None
    memory_bytes: int
    memory_bytes_per_second: float
    flops: Mapping[Precision, float]
    inside: Link
    between: Link
    is_host: bool = False
    reserved_bytes: int = 0

    def __post_init__(self) -> None:
        figures = {
            "gpus_per_node": self.gpus_per_node,
            "nodes": 1 if self.nodes is None else self.nodes,
            "memory_bytes": self.memory_bytes,
            "memory_bytes_per_second": self.memory_bytes_per_second,
            "inside.bytes_per_second": self.inside.bytes_per_second,
            "between.bytes_per_second": self.between.bytes_per_second,
            **{f"flops.{precision}": rate for precision, rate in self.flops.items()},
        }
        for key, value in figures.items():
            if not value > 0:
                raise ConfigError(
                    f"cluster {self.name}: {key} = {value}", "not above 0", "give its real size"
                )
        least = {
            "inside.latency_seconds": self.inside.latency_seconds,
            "between.latency_seconds": self.between.latency_seconds,
            "reserved_bytes": self.reserved_bytes,
        }
        for key, value in least.items():
            if value < 0:
                raise ConfigError(f"cluster {self.name}: {key} = {value}", "below 0", "give 0 or more")
        if self.reserved_bytes >= self.memory_bytes:
            raise ConfigError(
                f"cluster {self.name}: reserved_bytes = {self.reserved_bytes}",
                f"nothing is left of memory_bytes = {self.memory_bytes}",
                "reserve less (reserved_gib in a file)",
            )

    @property
    def usable_bytes(self) -> int:
        """Memory of a GPU that a run's tensors may take."""
        return self.memory_bytes - self.reserved_bytes

    def peak(self, precision: Precision) -> float:
        """Peak FLOP/s. Raises ConfigError for a precision that the cluster has no figure for."""
        if precision not in self.flops:
            raise ConfigError(
                f"cluster {self.name}: flops.{precision}",
                "it is not given",
                f"add it, or train in {' or '.join(self.flops)}",
            )
        return self.flops[precision]

    def check_gpus(self, gpus: int) -> None:
        """Raise a ConfigError that names ``--gpus``, unless the cluster has so many, in whole nodes."""
        key, node = f"--gpus {gpus}", self.gpus_per_node
        if gpus < 1:
            raise ConfigError(key, "not a number of GPUs", "use 1 or more")
        if gpus > node and gpus % node:
            near = gpus // node * node
            raise ConfigError(
                key,
                f"nodes of {self.name} have {node} GPUs each",
                f"use whole nodes: {near} or {near + node}",
            )
        if self.nodes is not None and gpus > self.nodes * node:
            most = self.nodes * node
            raise ConfigError(key, f"{self.name} has {self.nodes} nodes of {node}", f"use at most {most}")


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate: ``size`` of them, ``stride`` apart, ranks of a node being consecutive.

    >>> Group(size=4, stride=8).members_per_node(8), Group(size=4, stride=2).members_per_node(8)
    (1, 4)
    """

    size: int
    stride: int = 1

    def members_per_node(self, gpus_per_node: int) -> int:
        """Members on a node that is full of them."""
        return max(1, min(self.size, gpus_per_node // self.stride))

    def nodes(self, gpus_per_node: int) -> int:
        """Nodes that the group lies on."""
        return ceil(self.size / self.members_per_node(gpus_per_node))


PRESETS = ("A100-80", "H100", "H200", "B200", "MI300X", "CPU")
"""Names that :func:`preset` knows."""


def preset(name: str) -> Cluster:
    """A cluster of usual nodes of eight, of any size, by :data:`PRESETS` name (case does not matter).

    Peak rates are :func:`dsx.models.flops.peak_flops`'s. The rest, per GPU:

    - A100-80: NVIDIA A100 80GB SXM datasheet: 80 GB, 2,039 GB/s, NVLink 600 GB/s both ways together. Network:
      DGX A100 has eight HDR InfiniBand adapters of 200 Gb/s for eight GPUs, as arXiv:2104.04473 section 5.
    - H100, H200: NVIDIA H100 and H200 SXM datasheets: 80 GB at 3.35 TB/s and 141 GB at 4.8 TB/s, NVLink 900
      GB/s. Network: DGX H100 and H200 have eight 400 Gb/s adapters.
    - B200: NVIDIA DGX B200 datasheet: 1,440 GB and 64 TB/s of eight GPUs, NVLink 14.4 TB/s of eight; eight
      400 Gb/s adapters.
    - MI300X: AMD Instinct MI300X and MI300X platform data sheets: 192 GB, 5.3 TB/s, seven links of 128 GB/s
      both ways together, which a ring over all eight uses. Network: eight 400 Gb/s adapters, as usual.
    - CPU: a stand-in for eight processes of a desktop machine in fp32: two 3 GHz cores with two 256-bit fused
      multiply-adds each (192 GFLOP/s), 4 of 32 GiB, an eighth of two channels DDR4-3200, gloo through memory.
      ``dsx plan --measure`` puts the machine's own rates in place of these.

    Memory sizes are what the drivers report, rounded down to whole GiB: the data sheets' "GB" are GiB here,
    less what the device keeps. On GPUs 2 GiB and a twenty-fifth of the rest are reserved. Latencies are the
    ring steps of the Simple protocol, NCCL 2.10, src/graph/tuning.cc, hwLat: 3.4 us over NVLink and 9.6 us
    over a network.

    Raises:
        ConfigError: No such cluster.

    >>> preset("h200").memory_bytes >> 30
    139
    """
    known = {each.name.upper(): each for each in _all()}
    if name.upper() not in known:
        raise ConfigError(
            f"cluster {name!r}",
            "neither a known cluster nor a file",
            f"use one of {', '.join(PRESETS)}, or the path of a JSON file",
        )
    return known[name.upper()]


def _all() -> tuple[Cluster, ...]:
    return (
        _gpus("A100-80", "A100", 79 * _GIB, 2.039e12, 300e9, 25e9),
        _gpus("H100", "H100", 79 * _GIB, 3.35e12, 450e9, 50e9),
        _gpus("H200", "H200", 139 * _GIB, 4.8e12, 450e9, 50e9),
        _gpus("B200", "B200", 178 * _GIB, 8e12, 900e9, 50e9),
        _gpus("MI300X", "MI300X", 191 * _GIB, 5.3e12, 448e9, 50e9),
        Cluster(
            name="CPU",
            gpus_per_node=8,
            memory_bytes=4 * _GIB,
            memory_bytes_per_second=6.4e9,
            flops={"bf16": 192e9, "fp32": 192e9},
            inside=Link(2e9, 50e-6),
            between=Link(1.25e8, 100e-6),
            is_host=True,
        ),
    )


def allowance(memory_bytes: int) -> int:
    """The usual reserve of a GPU's memory: 2 GiB and a twenty-fifth of all."""
    return 2 * _GIB + memory_bytes // 25


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU, and what a run's tensors may take of it.

    >>> str(GpuMemory(80 << 30, allowance(80 << 30))), str(GpuMemory(4 << 30, 0))
    ('80 GiB less 5.20 for context, libraries and gaps', '4 GiB')
    """

    memory_bytes: int
    reserved_bytes: int

    @property
    def usable_bytes(self) -> int:
        """What is left."""
        return self.memory_bytes - self.reserved_bytes

    def __str__(self) -> str:
        whole = f"{self.memory_bytes / _GIB:g} GiB"
        less = f" less {self.reserved_bytes / _GIB:.2f} for context, libraries and gaps"
        return whole + less if self.reserved_bytes else whole


def gpu_memory(gib: float, cluster: Cluster | None = None) -> GpuMemory:
    """The memory that ``--gpu-memory`` leaves to tensors, with the reserve of a GPU of ``cluster``.

    Args:
        gib: All memory of a GPU.
        cluster: The cluster of these GPUs; None for any GPU. Its own reserve stays, the usual one depends on
            ``gib``, and CPU processes have none.

    Raises:
        ConfigError: Nothing is left.
    """
    memory_bytes = int(gib * _GIB)
    is_usual = cluster is None or cluster.reserved_bytes == allowance(cluster.memory_bytes)
    reserved = allowance(memory_bytes) if cluster is None or is_usual else cluster.reserved_bytes
    if reserved >= memory_bytes:
        raise ConfigError(
            f"--gpu-memory {gib:g}",
            f"context, libraries and gaps take {reserved / _GIB:.2f} GiB, and nothing is left",
            "give all the memory of one GPU, as nvidia-smi says it, in GiB",
        )
    return GpuMemory(memory_bytes, reserved)


def _gpus(name: str, device: str, memory: int, rate: float, inside: float, between: float) -> Cluster:
    half, single = peak_flops(device, "bf16"), peak_flops(device, "fp32")
    assert half is not None
    assert single is not None
    return Cluster(
        name=name,
        gpus_per_node=8,
        memory_bytes=memory,
        memory_bytes_per_second=rate,
        flops={"bf16": half, "fp32": single},
        inside=Link(inside, 3.4e-6),
        between=Link(between, 9.6e-6),
        reserved_bytes=allowance(memory),
    )


_GIGA = 1e9

PositiveNumber = Annotated[float, Field(gt=0)]


class LinkConfig(SchemaBlock):
    """What a GPU sends through at one level."""

    gigabytes_per_second: PositiveNumber | None = Field(
        default=None, description="Nominal rate of one GPU in one direction, in 10**9 bytes."
    )
    latency_microseconds: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Of one step of a collective."
    )


class ClusterConfig(SchemaBlock):
    """A cluster: a known GPU with what differs, or everything."""

    gpu: str | None = Field(
        default=None,
        description="A known cluster (A100-80, H100, H200, B200, MI300X, CPU) that gives what is left out.",
    )
    name: str | None = Field(default=None, min_length=1, description="What to call it.")
    gpus_per_node: Positive | None = Field(default=None, description="GPUs that the inner links join.")
    nodes: Positive | None = Field(default=None, description="How many; left out: as many as are asked for.")
    memory_gib: PositiveNumber | None = Field(default=None, description="Memory of a GPU.")
    reserved_gib: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="What a run's tensors cannot have of it: context, libraries, gaps. Left out: on GPUs "
        "2 GiB and a twenty-fifth of memory_gib, on CPUs nothing.",
    )
    memory_gigabytes_per_second: PositiveNumber | None = Field(
        default=None, description="Nominal rate of a GPU's memory."
    )
    teraflops: dict[Precision, PositiveNumber] | None = Field(
        default=None, description='Dense peak of a GPU, e.g. {"bf16": 989.4}.'
    )
    is_host: bool | None = Field(
        default=None, description="Whether these are CPU processes, which do nothing beside computing."
    )
    inside: LinkConfig = Field(default=LinkConfig(), description="Between GPUs of a node.")
    between: LinkConfig = Field(default=LinkConfig(), description="Between nodes, each GPU's share.")


def read_cluster(name: str) -> Cluster:
    """The cluster that ``--cluster`` names.

    Raises:
        ConfigError: Neither a preset nor a readable file, or a file with unknown, missing or senseless keys.
    """
    path = Path(name)
    if path.suffix != ".json" and not path.exists():
        return preset(name)
    if not path.is_file():
        raise ConfigError(
            f"cluster {name!r}", "there is no such file", f"write one, or use one of {', '.join(PRESETS)}"
        )
    content = read(path)
    try:
        config = ClusterConfig.model_validate_json(json.dumps(content))
    except ValidationError as error:
        problems = explain(error, content, ClusterConfig)
        raise_all(name, [ConfigError(f"{name}: {p.where}", p.what, p.fix) for p in problems])
        raise
    return _cluster(name, config)


def _cluster(file: str, config: ClusterConfig) -> Cluster:
    given = _given(config)
    if config.gpu is not None:
        base = preset(config.gpu)
        links = {
            level: replace(getattr(base, level), **_link(getattr(config, level)))
            for level in ("inside", "between")
        }
        reserved = _reserved(
            given.get("memory_bytes", base.memory_bytes), is_host=given.get("is_host", base.is_host)
        )
        return replace(base, **{"name": Path(file).stem} | reserved | given | links)
    links = {level: _link(getattr(config, level)) for level in ("inside", "between")}
    needed = {
        "gpus_per_node": config.gpus_per_node,
        "memory_gib": config.memory_gib,
        "memory_gigabytes_per_second": config.memory_gigabytes_per_second,
        "teraflops": config.teraflops,
        **{f"{level}.gigabytes_per_second": getattr(config, level).gigabytes_per_second for level in links},
    }
    missing = [key for key, value in needed.items() if not value]
    if missing:
        raise ConfigError(
            f"{file}: {missing[0]}",
            "it is left out, and no gpu is named to take it from",
            'add it, or name a known one, e.g. "gpu": "H100"',
        )
    made = {level: Link(**{"latency_seconds": 0.0} | link) for level, link in links.items()}
    reserved = _reserved(given["memory_bytes"], is_host=given.get("is_host", False))
    return Cluster(**{"name": Path(file).stem} | reserved | given | made)


def _reserved(memory_bytes: int, *, is_host: bool) -> dict[str, int]:
    """The usual reserve for so much memory, not that of the GPU whose other fields are taken."""
    return {"reserved_bytes": 0 if is_host else allowance(memory_bytes)}


def _given(config: ClusterConfig) -> dict[str, Any]:
    """Fields of a Cluster that the file gives, links apart."""
    found = {
        "name": config.name,
        "gpus_per_node": config.gpus_per_node,
        "nodes": config.nodes,
        "is_host": config.is_host,
        "memory_bytes": _whole(_scaled(config.memory_gib, _GIB)),
        "reserved_bytes": _whole(_scaled(config.reserved_gib, _GIB)),
        "memory_bytes_per_second": _scaled(config.memory_gigabytes_per_second, _GIGA),
        "flops": config.teraflops and {key: 1e12 * value for key, value in config.teraflops.items()},
    }
    return {key: value for key, value in found.items() if value is not None}


def _link(config: LinkConfig) -> dict[str, float]:
    found = {
        "bytes_per_second": _scaled(config.gigabytes_per_second, _GIGA),
        "latency_seconds": _scaled(config.latency_microseconds, 1e-6),
    }
    return {key: value for key, value in found.items() if value is not None}


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
