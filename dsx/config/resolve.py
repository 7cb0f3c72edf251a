"""From a config and a world size to a :class:`RunConfig`, before any process group exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsx.config import programs
from dsx.config.batch import resolve_batch
from dsx.config.deepspeed_checks import deepspeed_problems, is_bf16, optimizer_notes, zero_stage
from dsx.config.degrees import Degrees, resolve_degrees
from dsx.config.load import load
from dsx.config.model_source import read_model
from dsx.config.problems import at, raise_all
from dsx.config.run import RunConfig
from dsx.config.run_checks import Facts, run_notes, run_problems
from dsx.config.schema import DsxConfig
from dsx.errors import ConfigError, LayoutError
from dsx.plan.flops import layer_flops
from dsx.plan.params import layer_kinds, param_specs
from dsx.plan.partition import partition
from dsx.spec.model import ModelSpec
from dsx.spec.param import ParamSpec
from dsx.spec.stages import StageMap

__all__ = ["RunConfig", "resolve"]

_DEFAULT_CLIPPING = 1.0  # deepspeed/runtime/constants.py, GRADIENT_CLIPPING_DEFAULT.


def resolve(
    source: str | Path | Mapping[str, Any], *, world_size: int, overrides: Sequence[str] = ()
) -> RunConfig:
    """Everything that a run of ``source`` on ``world_size`` ranks needs.

    Args:
        source: A DeepSpeed JSON (HJSON comments allowed) with a ``dsx`` block: its path, or its content.
        world_size: Number of ranks.
        overrides: ``key=value`` items that replace or add keys, as ``--set`` takes them.

    Raises:
        ConfigError: Keys that are unknown, wrong, or do not go together; each with its fix.
        ModelError: A Hugging Face config that dsx cannot build.
    """
    if world_size < 1:
        raise ConfigError(f"world size {world_size}", "a run has at least 1 rank", "use 1 or more")
    deepspeed, dsx = load(source, overrides)
    name = "config" if isinstance(source, Mapping) else str(source)
    raise_all(name, deepspeed_problems(deepspeed))
    model = read_model(dsx)
    dsx = dsx.model_copy(update={"data": dsx.data.model_copy(update={"tokenizer": model.tokenizer})})
    dsx, written = programs.read_file(dsx)
    layers = layer_kinds(model.spec)
    degrees = resolve_degrees(dsx, model.spec, num_layers=len(layers), world_size=world_size)
    batch = resolve_batch(deepspeed, degrees.mesh.dp)
    facts = Facts(
        deepspeed=deepspeed, dsx=dsx, model=model.spec, mesh=degrees.mesh, chunks=degrees.chunks, batch=batch
    )
    raise_all(name, run_problems(facts))
    size = {"pp": degrees.mesh.pp, "chunks": degrees.chunks, "accumulation": batch.accumulation}
    if written is not None:
        programs.check_file(dsx, written, **size)
    program = written or programs.choose(dsx, degrees.schedule_name, **size)
    specs = param_specs(model.spec, pad_multiple=dsx.model.vocab_multiple)
    clipping = float(deepspeed.get("gradient_clipping", _DEFAULT_CLIPPING))
    return RunConfig(
        deepspeed=deepspeed | batch.keys() | {"gradient_clipping": clipping},
        dsx=dsx,
        mesh=degrees.mesh,
        model=model.spec,
        hf_config=model.hf_config,
        weights=model.weights,
        chunks=degrees.chunks,
        program=program,
        stage_map=replace(_stages(dsx, model.spec, specs, degrees), placement=program.placement),
        param_specs=specs,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        global_batch_size=batch.train,
        zero_stage=zero_stage(deepspeed),
        precision="bf16" if is_bf16(deepspeed) else "fp32",
        gradient_clipping=clipping,
        notes=(*model.notes, *degrees.notes, *run_notes(facts), *optimizer_notes(deepspeed)),
    )


def _stages(dsx: DsxConfig, model: ModelSpec, specs: Sequence[ParamSpec], degrees: Degrees) -> StageMap:
    method, pp, chunks = dsx.partition.method, degrees.mesh.pp, degrees.chunks
    names = layer_kinds(model)
    key = at("dsx.partition.method", method)
    if isinstance(method, list) and len(method) != pp * chunks:
        raise ConfigError(
            key,
            f"it lists {len(method)} stages, and pipeline {pp} x chunks {chunks} has {pp * chunks}",
            f"list {pp * chunks} numbers, or set dsx.parallel.pipeline and chunks to match",
        )
    parameters = [0] * len(names)
    for spec in specs:
        parameters[spec.layer] += spec.numel
        if spec.tie is not None:
            parameters[-1] += spec.numel  # the head's stage holds a copy of the tied table
    try:
        return partition(
            method,
            pp * chunks,
            pp,
            parameters=parameters,
            costs=layer_flops(model, dsx.data.sequence_length),
            names=names,
        )
    except LayoutError as error:
        raise ConfigError(key, f"{error.where}: {error.what}", error.fix) from None
