"""The cluster to plan for: a preset's name, or a JSON file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from dsx.config.block import Block, Positive
from dsx.config.load import read
from dsx.config.problems import explain, raise_all
from dsx.errors import ConfigError
from dsx.plan.cluster import PRESETS, Cluster, Link, Precision, allowance, preset

_GIB = 1 << 30
_GIGA = 1e9

PositiveNumber = Annotated[float, Field(gt=0)]


class LinkConfig(Block):
    """What a GPU sends through at one level."""

    gigabytes_per_second: PositiveNumber | None = Field(
        default=None, description="Nominal rate of one GPU in one direction, in 10**9 bytes."
    )
    latency_microseconds: Annotated[float, Field(ge=0)] | None = Field(
        default=None, description="Of one step of a collective."
    )


class ClusterConfig(Block):
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
        problems = [
            ConfigError(_plain(p.where), p.what, p.fix) for p in explain(error, content, ClusterConfig)
        ]
        raise_all(name, [ConfigError(f"{name}: {p.where}", p.what, p.fix) for p in problems])
        raise
    return _cluster(name, config)


def _plain(where: str) -> str:
    """A key as the file has it: :func:`explain` writes keys of the ``dsx`` block."""
    return where.removeprefix("dsx.")


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
    """The usual reserve of so much memory, not that of the GPU whose other fields are taken."""
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
