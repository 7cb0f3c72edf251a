"""``dsx.initialize``: a PipelineModule and a config to an engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import deepspeed
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from torch.utils.data import DistributedSampler

from dsx.config.run import RunConfig
from dsx.config.schema import ZeroConfig
from dsx.config.shipped import newer_than_tested
from dsx.errors import ModelError
from dsx.runtime.engine import PipelineEngine
from dsx.runtime.groups import Grid, Groups
from dsx.runtime.learning_rates import require_drives, schedule_of
from dsx.runtime.parameter_groups import prepare
from dsx.runtime.pipeline_block import apply_block
from dsx.runtime.pipeline_module import PipelineModule
from dsx.runtime.settings import Config, Settings, settings_of
from dsx.runtime.zero_adapters import given_optimizer_kept, require_supported, scope_consistency_checks


def initialize(  # noqa: PLR0917 (stock DeepSpeed's arguments in its order)
    args: Any = None,
    model: PipelineModule | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Config | None = None,
    mesh_param: Any = None,
    config_params: Config | None = None,
    *,
    zero: ZeroConfig | None = None,
) -> tuple[PipelineEngine, Any, Any, Any]:
    """``deepspeed.initialize`` for a :class:`~dsx.PipelineModule`. A collective call over all ranks.

    Args:
        args: Its ``deepspeed_config`` is the config if there is no ``config``.
        model: The pipeline.
        optimizer: A torch optimizer or a callable that makes one from parameter groups; the config's by
            default.
        model_parameters: Parameters or parameter groups to optimize; all by default.
        training_data: A torch Dataset, in order, split over data-parallel ranks.
        lr_scheduler: A scheduler or a callable that makes one from an optimizer; the config's by default.
        distributed_port: Taken for stock DeepSpeed's sake: the ranks are there already, as a PipelineModule
            needs them.
        mpu: Refused, as by stock pipelines: the groups are the PipelineModule's.
        dist_init_required: Taken for stock DeepSpeed's sake, like ``distributed_port``.
        collate_fn: For ``training_data``.
        config: A resolved dsx config (:func:`dsx.load_config`), or an ordinary DeepSpeed config as a dict or
            path.
        mesh_param: Refused, like ``mpu``.
        config_params: Stock DeepSpeed's old name of ``config``.
        zero: When ZeRO communicates; the config's ``dsx.zero`` by default.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)`` as DeepSpeed returns them.

    Raises:
        VersionError: A DeepSpeed that dsx has not been checked against.
        ConfigError: A setting that cannot work with a pipeline.
        LayoutError: A rank has nothing to train.
        ModelError: ``model`` is no dsx.PipelineModule, or has groups of its own and is given others.
    """
    del distributed_port, dist_init_required
    require_supported()
    if mpu is not None or mesh_param is not None:
        raise ModelError(
            "dsx.initialize(mpu=)" if mesh_param is None else "dsx.initialize(mesh_param=)",
            "a PipelineModule has its groups already",
            "leave it out; give the degrees to PipelineModule (num_stages, topology or groups)",
        )
    config = config_params if config is None else config
    if not isinstance(model, PipelineModule):
        raise ModelError(
            f"model of type {type(model).__name__}", "not a dsx.PipelineModule", "build one from the layers"
        )
    if model.program.divides and model.split is None and model.groups.rank == 0:
        warnings.warn(
            f"schedule {model.program.name} divides the backward, and these layers do not: their weight "
            "gradients come with the input's. Build layers and pipeline with one WeightGradients (split=).",
            stacklevel=2,
        )
    if model.groups.rank == 0:
        for newer in newer_than_tested():
            warnings.warn(newer, stacklevel=2)
    settings = settings_of(config, args, model.groups.mesh)
    apply_block(settings.deepspeed.get("pipeline", {}), model, settings.zero_stage)
    _check_build(model, settings)
    lr_scheduler = schedule_of(settings.deepspeed.get("scheduler"), lr_scheduler)
    parameters = prepare(
        model,
        zero_stage=settings.zero_stage,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        model_parameters=model_parameters,
    )
    if settings.zero_stage == 3:
        scope_consistency_checks(model.groups)
    if model.partitioner is not None:
        model.partitioner.hand_over(model.chunks)
    with given_optimizer_kept():
        engine, wrapped, _, scheduler = deepspeed.initialize(
            model=model.chunks,
            config=settings.deepspeed,
            model_parameters=parameters,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            mpu=Grid(model.groups),
            dist_init_required=False,
        )
    require_drives(scheduler, engine.basic_optimizer)
    run = config if isinstance(config, RunConfig) else None
    pipeline = PipelineEngine(
        model,
        engine,
        clipping=settings.clipping,
        config=run,
        zero=zero or (ZeroConfig() if run is None else run.dsx.zero),
    )
    loader = None if training_data is None else _loader(engine, training_data, model.groups)
    if loader is not None:
        pipeline.set_dataloader(loader)
    return pipeline, wrapped, loader, scheduler


def _check_build(model: PipelineModule, settings: Settings) -> None:
    """Refuse layers partitioned for another config; warn of layers built whole for ZeRO-3."""
    if model.partitioner is not None:
        model.partitioner.require(settings)
        return
    whole = any(not hasattr(parameter, "ds_id") for parameter in model.chunks.parameters())
    if settings.zero_stage == 3 and model.groups.mesh.dp > 1 and whole and model.groups.rank == 0:
        warnings.warn(
            "ZeRO-3: the layers were built before the config was known, and each rank holds all of its own "
            "whole. Give dsx.PipelineModule the config too (config=), and they are partitioned one by one.",
            stacklevel=3,
        )


def _loader(engine: Any, dataset: Any, groups: Groups) -> Any:
    """As stock PipelineEngine's (deepspeed/runtime/pipe/engine.py, _build_data_iter): in order."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=groups.mesh.dp, rank=groups.dp_rank, shuffle=False
    )
    return engine.deepspeed_io(dataset, data_sampler=sampler)
