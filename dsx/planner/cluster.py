"""A cluster as the planner sees it: a GPU's rate and memory, and the links between GPUs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from math import ceil, gcd
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from dsx.config.load import explain, raise_all, read
from dsx.config.schema_block import Positive, SchemaBlock
from dsx.config.wording import plain
from dsx.errors import ConfigError
from dsx.models.flops import Precision, peak_flops
from dsx.terminal import amount

_GIB = 1 << 30
_GIGA = 1e9
_PCIE_4 = 32  # GB/s of 16 lanes, each way


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
        gpus_per_node: GPUs that the inner links join.
        gpus_per_host: GPUs of a node's part that fails by itself; 0 for all of them.
        memory_bytes_per_second: Nominal rate of a GPU's memory.
        flops: Precision -> dense peak FLOP/s of a GPU.
        between: Link between nodes, each GPU's share of its node's network.
        sites: Places that have so many nodes each, with slow links between them.
        across: The link of a whole site to the others, which its GPUs share; None if there is one site.
        gpus_per_site: GPUs that a run has in each site, if it is one run over all of them; 0 for one that
            stays in a site.
        generation: Whose shares of nominal rates are reached (:class:`~dsx.planner.costs.Efficiency`).
        is_host: Whether the "GPUs" are CPU processes, where nothing runs beside a rank's computation.
        host_bytes_per_second: Nominal rate, each way, between a GPU and its host's memory.
        reserved_bytes: What device context, communication libraries and the allocator's gaps take of a GPU's
            memory. An allowance, not a measurement.
        failures: How its nodes fail, if somebody has said so.

    Raises:
        ConfigError: A size that cannot be.
    """

    name: str
    gpus_per_node: int
    gpus_per_host: int = 0
    nodes: int | None = None
    memory_bytes: int
    memory_bytes_per_second: float
    host_bytes_per_second: float = _PCIE_4 * _GIGA
    flops: Mapping[Precision, float]
    inside: Link
    between: Link
    sites: int = 1
    across: Link | None = None
    gpus_per_site: int = 0
    generation: str = ""
    is_host: bool = False
    reserved_bytes: int = 0
    failures: FailuresConfig | None = None

    def __post_init__(self) -> None:
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

    def hosts(self, gpus: int) -> int:
        """How many that can fail by themselves ``gpus`` GPUs are on."""
        return ceil(gpus / min(self.gpus_per_host or self.gpus_per_node, self.gpus_per_node))

    def _step(self, gpus: int) -> int:
        """What the GPUs of a run must be a multiple of: of each node it has all, or as many whole hosts."""
        node = self.gpus_per_node
        return gcd(self.gpus_per_host or node, node) * ceil(gpus / node)

    def holding(self, gpus: int) -> Cluster:
        """It with nodes of as many GPUs as a run of ``gpus`` has of each. Raises like :meth:`check_gpus`."""
        self.check_gpus(gpus)
        count = ceil(gpus / self.gpus_per_node)
        return self if count == 1 else replace(self, gpus_per_node=gpus // count)

    def check_gpus(self, gpus: int) -> None:
        """Raise a ConfigError that names ``--gpus``, unless the cluster has so many, in equal nodes."""
        key, node, step = f"--gpus {gpus}", self.gpus_per_node, self._step(gpus)
        if gpus < 1:
            raise ConfigError(key, "not a number of GPUs", "use 1 or more")
        if gpus > node and gpus % step:
            near, above = max(gpus // step * step, gpus // node * node), (gpus // step + 1) * step
            which = "whole nodes" if step % node == 0 else "as many hosts of each node"
            raise ConfigError(
                key, f"nodes of {self.name} have {node} GPUs each", f"use {which}: {near} or {above}"
            )
        if self.nodes is not None and gpus > self.sites * self.nodes * node:
            most = self.sites * self.nodes * node
            whole = f"{self.sites} sites of " if self.sites > 1 else ""
            raise ConfigError(
                key,
                f"{self.name} has {whole}{self.nodes} node{'s' * (self.nodes > 1)} of {node}",
                f'use at most {most}, or a cluster\'s file with "nodes" and "between" that joins more',
            )

    def site(self, gpus: int) -> Cluster:
        """One of its sites, with its part of ``gpus``."""
        each, node = gpus // self.sites, self.gpus_per_node
        if gpus < 1 or gpus % self.sites or (each > node and each % self._step(each)):
            raise ConfigError(
                f"--gpus {gpus}",
                f"each of the {self.sites} sites of {self.name} has as many, in whole nodes of {node}",
                f"use a multiple of {self.sites * (node if each > node else 1)}",
            )
        self.joined(gpus).check_gpus(gpus)
        return replace(self, sites=1, across=None).holding(each)

    def joined(self, gpus: int) -> Cluster:
        """All of its sites for one run of ``gpus`` GPUs, as :meth:`site` allows them."""
        each = gpus // self.sites
        return replace(self, gpus_per_site=each, gpus_per_node=each // ceil(each / self.gpus_per_node))


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
        return ceil(self.size / self.members_per_node(gpus_per_node))


def allowance(memory_bytes: int) -> int:
    """The usual reserve of a GPU's memory: 2 GiB and a twenty-fifth of all."""
    return 2 * _GIB + memory_bytes // 25


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """The memory of a GPU, and what a run's tensors may take of it.

    >>> str(GpuMemory(80 << 30, allowance(80 << 30))), str(GpuMemory(4 << 30, 0))
    ("80 GiB less 5.20 for the device's context, libraries and gaps", '4 GiB')
    """

    memory_bytes: int
    reserved_bytes: int

    @property
    def usable_bytes(self) -> int:
        return self.memory_bytes - self.reserved_bytes

    def __str__(self) -> str:
        whole = f"{self.memory_bytes / _GIB:g} GiB"
        less = f" less {self.reserved_bytes / _GIB:.2f} for the device's context, libraries and gaps"
        return whole + less if self.reserved_bytes else whole


def gpu_memory(gib: float, cluster: Cluster | None = None) -> GpuMemory:
    """The memory that ``--gpu-memory`` leaves to tensors, with the reserve of a GPU of ``cluster``.

    ``gib`` is all memory of a GPU. The cluster's own reserve stays; the usual one, and that of any GPU
    (None), depends on ``gib``, and CPU processes have none.
    """
    memory_bytes = int(gib * _GIB)
    is_usual = cluster is None or cluster.reserved_bytes == allowance(cluster.memory_bytes)
    reserved = allowance(memory_bytes) if cluster is None or is_usual else cluster.reserved_bytes
    if reserved >= memory_bytes:
        raise ConfigError(
            f"--gpu-memory {gib:g}",
            f"the device's context, libraries and gaps take {amount(reserved)}, and nothing is left",
            "give all the memory of one GPU, as nvidia-smi says it, in GiB",
        )
    return GpuMemory(memory_bytes, reserved)


PositiveNumber = Annotated[float, Field(gt=0)]


_MEANT_OF_LINKS: dict[str, Any] = {
    "latency_microseconds": ".*(latency|delay|rtt|alpha|microsec).*",
    "gigabytes_per_second": ".*(bandwidth|bw|rate|speed|throughput|[gmt]i?b|giga).*",
}
_MEMORY, _MANY = "(gpu|device)?(memory|mem|hbm|v?ram)", "(n|num|max|numberof)?"
_MEANT: dict[str, Any] = {
    "memory_gigabytes_per_second": f"{_MEMORY}.*(bandwidth|bw|rate|speed|persec|[gt]bp?s).*",
    "reserved_gib": ".*(reserve|overhead|headroom).*",
    "memory_gib": f"{_MEMORY}(size|capacity|total|[gm]i?b|bytes|gigabytes|pergpu)*",
    "teraflops": ".*flops.*",
    "failures": "(gpu|node|host)?(mtbf|mttf|mtti|mttr|fail).*",
    "across": "(wan|dcn|(inter|between|across)(site|region|dc|datacenter|cluster|net)).*",
    "inside": "(within|intra|in(ner|ternal|side)|local|nvlink|nvswitch|xgmi|pcie|scaleup|innode).*",
    "between": "(inter(?!nal)|outer|between|net|infiniband|ib|ethernet|roce|rdma|fabric|nic|scaleout|efa).*",
    "gpus_per_node": f"{_MANY}(gpu|device|accelerator|proc)s?((per|in)(node|host|machine))?(count)?",
    "nodes": f"{_MANY}(node|host|machine|server)s?(count)?",
    "sites": f"{_MANY}(site|region|datacenter|zone|place|location)s?(count)?",
    "gpu": "(gpu|device|accelerator|card)?(type|model|kind|sku|preset|base)|gpuname|card",
    "generation": "(micro)?arch(itecture)?",
}
"""Key -> a pattern of what others call it, without case and punctuation, the narrower ones first."""


class LinkConfig(SchemaBlock):
    """What a GPU sends through at one level."""

    model_config = ConfigDict(json_schema_extra={"meant_by": _MEANT_OF_LINKS})

    gigabytes_per_second: PositiveNumber | None = Field(
        default=None,
        description="Nominal, one way, of a GPU (across: a site), 10**9 bytes/s: 8 Gbit/s are 1.",
    )
    latency_microseconds: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Of one step of a collective, one way: half a round trip; 1 ms is 1000."
    )

    @property
    def link(self) -> Link:
        return Link((self.gigabytes_per_second or 0) * _GIGA, (self.latency_microseconds or 0) / 1e6)


_MEANT_OF_FAILURES: dict[str, Any] = {
    "per_thousand_gpu_days": ".*gpu.*mt(bf|tf|ti).*|.*mt(bf|tf|ti).*gpu.*",
    "per_thousand_node_days": ".*(mt(bf|tf|ti)|meantime).*",
}
_UNITS = ": gigabytes_per_second (10**9 bytes a second: 8 Gbit/s are 1), latency_microseconds."
_Some = Annotated[float, Field(ge=0, le=1e9)] | None
_Rate = Annotated[float, Field(ge=0.001, le=1e9)] | None


class FailuresConfig(SchemaBlock):
    """How nodes fail and what a failure or a save costs; for what is left out there are published figures."""

    model_config = ConfigDict(json_schema_extra={"meant_by": _MEANT_OF_FAILURES})

    per_thousand_gpu_days: _Some = Field(None, description="By GPUs: 24,000 / the mean hours of a GPU.")
    per_thousand_node_days: _Some = Field(None, description="All others: 24,000 / the mean hours of a node.")
    lost_share: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Share, 0 to 1, of the failures after which a node has to be repaired."
    )
    repair_hours: _Some = Field(None, description="Until such a node is there again.")
    spare_nodes: Annotated[int, Field(ge=0, le=1 << 20)] | None = Field(
        None, description="Nodes that wait for such failures."
    )
    notice_seconds: _Some = Field(None, description="Until a failure is noticed.")
    start_seconds: _Some = Field(None, description="From there to the first step, but for reading.")
    other_layout_seconds: _Some = Field(None, description="What a start in another layout takes longer.")
    save_seconds: _Some = Field(None, description="Time that a save stops training for: perf/save_seconds.")
    host_gigabytes_per_second: _Rate = Field(None, description="From each GPU to its host's memory.")
    storage_gigabytes_per_second: _Rate = Field(None, description="Of the storage, for all nodes together.")
    days: _Rate = Field(None, description="How long the run lasts.")


class ClusterConfig(SchemaBlock):
    """A cluster: a known GPU with what differs, or everything."""

    model_config = ConfigDict(json_schema_extra={"meant_by": _MEANT})

    gpu: str | None = Field(
        default=None,
        description="A known cluster (A100-80, H100, H200, B200, GB200, L40S, RTX-4090, RTX-3090, MI300X, "
        "CPU) that gives what is left out.",
    )
    name: str | None = Field(default=None, min_length=1, description="What to call it.")
    generation: Literal["A100", "H100"] | None = Field(
        default=None,
        description="Whose shares of their rates the GPUs reach. Left out: those of gpu, else the H100's.",
    )
    gpus_per_node: Positive | None = Field(default=None, description="GPUs that the inner links join.")
    gpus_per_host: Positive | None = Field(None, description="Of a host, if inner links join several hosts.")
    nodes: Positive | None = Field(default=None, description="How many; left out: as many as are asked for.")
    memory_gib: PositiveNumber | None = Field(None, description="Memory of a GPU; 1024 MiB are 1 GiB.")
    reserved_gib: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="What a run's tensors cannot have of it: the device's context, libraries, gaps. "
        "Left out: on GPUs 2 GiB and a twenty-fifth of memory_gib, on CPUs nothing.",
    )
    memory_gigabytes_per_second: PositiveNumber | None = Field(
        default=None, description="Nominal rate of a GPU's memory, in 10**9 bytes a second: 1 TB/s is 1000."
    )
    host_gigabytes_per_second: PositiveNumber | None = Field(
        default=None,
        description="Nominal rate, each way, between a GPU and its host's memory. Left out: 32, that of 16 "
        "lanes of PCI Express 4.",
    )
    teraflops: dict[Precision, PositiveNumber] | None = Field(
        default=None, description='Dense peak of a GPU (1 PFLOP/s is 1000), e.g. {"bf16": 989.4}.'
    )
    is_host: bool | None = Field(
        default=None, description="Whether these are CPU processes, which do nothing beside computing."
    )
    inside: LinkConfig = Field(default=LinkConfig(), description=f"Between GPUs of a node{_UNITS}")
    between: LinkConfig = Field(default=LinkConfig(), description=f"Between nodes, each GPU's share{_UNITS}")
    sites: Positive = Field(
        default=1, description="Places with so many nodes each, and slow links between them."
    )
    across: LinkConfig | None = Field(
        default=None, description=f"Of a whole site to the others, which its GPUs share{_UNITS}"
    )
    failures: FailuresConfig | None = Field(
        default=None, description="How its nodes fail; a plan then says how often to save, as with --goodput."
    )


_PRESETS: dict[str, dict[str, Any]] = tomllib.loads(
    (files("dsx.planner") / "clusters.toml").read_text(encoding="utf-8")
)

PRESETS = tuple(_PRESETS)
"""Names that :func:`preset` knows; their figures and whose these are stand in ``clusters.toml``."""


def preset(name: str) -> Cluster:
    """A cluster of usual nodes, of any size, by :data:`PRESETS` name, whose case and marks do not matter.

    >>> preset("h200").memory_bytes >> 30
    139
    """
    known = _known(name)
    return _cluster(known, known, ClusterConfig.model_validate(_PRESETS[known] | {"gpu": known}))


def read_cluster(name: str) -> Cluster:
    """The cluster that ``--cluster`` names."""
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
    return described(name, config, name=Path(name).stem)


def described(file: str, config: ClusterConfig, *, name: str | None = None) -> Cluster:
    """The cluster that ``config`` describes.

    A known GPU gives what is left out. ``file`` is where it stands, for messages, and its name if neither it
    nor ``name`` has one.
    """
    if config.gpu is not None:
        known = _known(config.gpu)
        base, given = _PRESETS[known], config.model_dump(exclude_none=True) | {"gpu": known}
        links = {level: base[level] | given.get(level, {}) for level in ("inside", "between")}
        config = ClusterConfig.model_validate(base | given | links)
    return _cluster(file, file if name is None else name, config)


def _known(name: str) -> str:
    word = plain(name).removeprefix("nvidia").removeprefix("geforce").removeprefix("rtx")
    found = next((each for each in PRESETS if plain(each).removeprefix("rtx") == word), None)
    if found is None:
        raise ConfigError(
            f"cluster {name!r}",
            "neither a known cluster nor a file",
            f"use one of {', '.join(PRESETS)}, or the path of a JSON file",
        )
    return found


def _cluster(file: str, name: str, config: ClusterConfig) -> Cluster:
    rates: dict[Precision, float | None] = {"bf16": None, "fp16": None, "fp32": None}
    if config.teraflops is not None:
        rates = {precision: 1e12 * rate for precision, rate in config.teraflops.items()}
    elif config.gpu is not None:
        rates = {precision: peak_flops(config.gpu, precision) for precision in rates}
    flops = {precision: rate for precision, rate in rates.items() if rate is not None}
    needed = {
        "gpus_per_node": config.gpus_per_node,
        "memory_gib": config.memory_gib,
        "memory_gigabytes_per_second": config.memory_gigabytes_per_second,
        "teraflops": flops,
        "inside.gigabytes_per_second": config.inside.gigabytes_per_second,
        "between.gigabytes_per_second": config.between.gigabytes_per_second,
    }
    for key in (key for key, value in needed.items() if not value):
        raise ConfigError(
            f"{file}: {key}",
            "it is left out, and no gpu is named to take it from",
            'add it, or name a known one, e.g. "gpu": "H100"',
        )
    if (config.sites > 1) != (config.across is not None and bool(config.across.gigabytes_per_second)):
        raise ConfigError(
            f"{file}: sites = {config.sites}",
            "several sites have a link between them (across.gigabytes_per_second), and one has none",
            'write e.g. "sites": 2, "across": {"gigabytes_per_second": 0.125, "latency_microseconds": 20000}',
        )
    memory_bytes, is_host = int((config.memory_gib or 0) * _GIB), bool(config.is_host)
    reserved_bytes = 0 if is_host else allowance(memory_bytes)
    if config.reserved_gib is not None:
        reserved_bytes = int(config.reserved_gib * _GIB)
    return Cluster(
        name=config.name or name,
        gpus_per_node=config.gpus_per_node or 1,
        gpus_per_host=config.gpus_per_host or 0,
        nodes=config.nodes,
        memory_bytes=memory_bytes,
        memory_bytes_per_second=(config.memory_gigabytes_per_second or 0) * _GIGA,
        host_bytes_per_second=(config.host_gigabytes_per_second or _PCIE_4) * _GIGA,
        flops=flops,
        inside=config.inside.link,
        between=config.between.link,
        sites=config.sites,
        across=None if config.across is None else config.across.link,
        generation=config.generation or "",
        is_host=is_host,
        reserved_bytes=reserved_bytes,
        failures=config.failures,
    )
