"""Layers over virtual stages, by the config's ``partition`` block."""

from __future__ import annotations

from collections.abc import Sequence

from dsx.config.schema import DsxConfig
from dsx.config.wording import at
from dsx.errors import ConfigError, LayoutError
from dsx.models.flops import layer_flops
from dsx.models.param import ParamSpec
from dsx.models.params import layer_kinds
from dsx.models.spec import ModelSpec
from dsx.parallel.partition import partition
from dsx.parallel.stages import StageMap


def cut_layers(
    dsx: DsxConfig, model: ModelSpec, specs: Sequence[ParamSpec], *, num_ranks: int, num_chunks: int
) -> StageMap:
    """Stage map for this many ranks and chunks; ``time``, before anything is measured, goes by FLOPs.

    Raises:
        ConfigError: The method cannot cut the model so.
    """
    method, names = dsx.partition.method, layer_kinds(model)
    key = at("dsx.partition.method", method)
    if isinstance(method, list) and len(method) != num_ranks * num_chunks:
        stages = num_ranks * num_chunks
        raise ConfigError(
            key,
            f"it lists {len(method)} stages, and pipeline {num_ranks} x chunks {num_chunks} has {stages}",
            f"list {stages} numbers, or set dsx.parallel.pipeline and chunks to match",
        )
    parameters = [0] * len(names)
    for spec in specs:
        parameters[spec.layer] += spec.numel
        if spec.tie is not None:
            parameters[-1] += spec.numel  # the head's stage holds a copy of the tied table
    try:
        return partition(
            "flops" if method == "time" else method,
            num_ranks * num_chunks,
            num_ranks,
            parameters=parameters,
            costs=layer_flops(model, dsx.data.sequence_length),
            names=names,
        )
    except LayoutError as error:
        raise ConfigError(key, f"{error.where}: {error.what}", error.fix) from None
