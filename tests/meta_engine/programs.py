"""The engine on paper in processes of their own, because it changes torch and DeepSpeed for good."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import ranks
from dsx.config.resolve import resolve

if TYPE_CHECKING:
    from meta_engine.run import TracedPeaks


def alone(function: Callable[..., Any], *given: Any) -> Any:
    """What ``function(*given)`` returns in such a process."""
    return ranks.run(_alone, 1, function, given)[0]


def _alone(rank: int, world_size: int, function: Callable[..., Any], given: Sequence[Any]) -> Any:
    del rank, world_size
    warnings.filterwarnings("ignore")
    dist.destroy_process_group()  # a trace makes its own, of ranks that are not there
    return function(*given)


def traced(
    config: Mapping[str, Any], rank: int, world_size: int, sets: Sequence[str] = (), **options: Any
) -> TracedPeaks:
    """:func:`meta_engine.run.trace` of a config with keys set, in such a process."""
    return alone(trace_here, config, rank, world_size, sets, options)


def trace_here(
    config: Mapping[str, Any], rank: int, world_size: int, sets: Sequence[str], options: Mapping[str, Any]
) -> TracedPeaks:
    """The same in this process."""
    from meta_engine.run import trace

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    return trace(resolve(config, world_size=world_size, overrides=sets), rank, **options)
