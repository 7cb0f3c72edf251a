"""From a config and a world size to a :class:`RunConfig`, before any process group exists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from dsx.config import elastic, measured, programs
from dsx.config.batch import resolve_batch
from dsx.config.cuts import cut_layers
from dsx.config.deepspeed_checks import deepspeed_problems, is_bf16, optimizer_notes, zero_stage
from dsx.config.degrees import resolve_degrees
from dsx.config.load import load
from dsx.config.model_source import read_model
from dsx.config.problems import raise_all
from dsx.config.run import RunConfig
from dsx.config.run_checks import Facts, run_notes, run_problems
from dsx.config.schema import DsxConfig
from dsx.errors import ConfigError
from dsx.plan.params import layer_kinds, param_specs

__all__ = ["RunConfig", "resolve"]

Precision = Literal["fp32", "bf16"]

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
    if dsx.elastic is None:
        return _resolve(name, deepspeed, dsx, world_size)
    return elastic.lay_out(deepspeed, dsx, world_size, partial(_resolve, name))


def _resolve(name: str, deepspeed: dict[str, Any], dsx: DsxConfig, world_size: int) -> RunConfig:
    """The run on exactly ``world_size`` ranks."""
    model = read_model(dsx)
    dsx = dsx.model_copy(update={"data": dsx.data.model_copy(update={"tokenizer": model.tokenizer})})
    dsx, written = programs.read_file(dsx)
    layers = layer_kinds(model.spec)
    degrees = resolve_degrees(dsx, model.spec, num_layers=len(layers), world_size=world_size)
    batch = resolve_batch(deepspeed, degrees.mesh.dp)
    facts = Facts(
        deepspeed=deepspeed, dsx=dsx, model=model.spec, mesh=degrees.mesh, chunks=degrees.chunks, batch=batch
    )
    raise_all(name, [*run_problems(facts), *measured.problems(dsx)])
    size = {"pp": degrees.mesh.pp, "chunks": degrees.chunks, "accumulation": batch.accumulation}
    if written is not None:
        programs.check_file(dsx, written, **size)
    program = written or programs.choose(dsx, degrees.schedule_name, **size)
    precision: Precision = "bf16" if is_bf16(deepspeed) else "fp32"
    if measured.is_wanted(dsx, degrees.mesh.pp):
        measured.check_saved(
            dsx,
            measured.conditions(
                dsx, model.spec, mesh=degrees.mesh, micro_batch_size=batch.micro, precision=precision
            ),
        )
    specs = param_specs(model.spec, pad_multiple=dsx.model.vocab_multiple)
    stage_map = cut_layers(dsx, model.spec, specs, num_ranks=degrees.mesh.pp, num_chunks=degrees.chunks)
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
        stage_map=replace(stage_map, placement=program.placement),
        param_specs=specs,
        micro_batch_size=batch.micro,
        accumulation=batch.accumulation,
        global_batch_size=batch.train,
        zero_stage=zero_stage(deepspeed),
        precision=precision,
        gradient_clipping=clipping,
        notes=(
            *model.notes,
            *degrees.notes,
            *measured.notes(dsx, degrees.mesh.pp),
            *run_notes(facts),
            *optimizer_notes(deepspeed),
        ),
    )
