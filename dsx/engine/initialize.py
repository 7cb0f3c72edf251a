"""``dsx.initialize`` makes an engine of a PipelineModule, a config, an optimizer and a schedule of its rate.

DeepSpeed's ``pipeline`` block of the config is applied to layers that are built already. Its keys are those
of deepspeed/runtime/config.py (get_pipeline_config), and ``use_reentrant``, which
deepspeed/runtime/pipe/engine.py reads besides. Stock DeepSpeed silently ignores ``stages``, ``partition``,
``seed_layers`` and every key that it does not know.
"""

from __future__ import annotations

import gc
import hashlib
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from traceback import walk_tb
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed import checkpointing
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from deepspeed.runtime import lr_schedules
from deepspeed.utils import set_z3_leaf_module
from torch import nn
from torch.optim import lr_scheduler as torch_schedules
from torch.utils.data import DistributedSampler

from dsx.config.deepspeed import precision
from dsx.config.run import RunConfig
from dsx.config.schema import ZeroConfig
from dsx.config.sources import newer_than_tested
from dsx.config.wording import at, suggest
from dsx.engine.chunks import checkpoint_non_reentrant
from dsx.engine.engine import PipelineEngine
from dsx.engine.optimizers import hide_spare, prepare
from dsx.engine.p2p import Shards
from dsx.engine.pipeline_module import PipelineModule
from dsx.engine.settings import Config, Settings, settings_of
from dsx.engine.stock_module import clips_by_itself, require_engine_unpatched
from dsx.engine.zero import given_optimizer_kept, require_supported
from dsx.engine.zero.experts import experts_apart
from dsx.engine.zero.float32 import float32_kept
from dsx.engine.zero.norm import require_precision
from dsx.errors import ConfigError, ModelError
from dsx.kept import cache_folder, code_version, keep
from dsx.launch.entry import AGREED
from dsx.launch.extension_locks import builds_said
from dsx.launch.processes import load_compilers_late
from dsx.models.transformers_settings import first_line
from dsx.nn.loss import of_head
from dsx.nn.parameters import DTYPES, Weights
from dsx.parallel.groups import Grid, Groups
from dsx.parallel.mesh import Mesh
from dsx.terminal import shortened
from dsx.waiting import Waiting


def apply_block(block: Mapping[str, Any], model: PipelineModule, zero_stage: int) -> None:
    """Apply the block to ``model``.

    Raises:
        ConfigError: A key that is unknown, or a value that is wrong or that contradicts the layers as built.
    """
    keys: dict[str, Callable[[Any], None]] = {
        "stages": lambda value: _stages(model, value),
        "partition": lambda value: _partition(model, value),
        "seed_layers": lambda value: _seed_layers(model, value),
        "activation_checkpoint_interval": lambda value: _interval(model, value),
        "use_reentrant": lambda value: _reentrant(model, value, zero_stage),
        "pipe_partitioned": lambda value: _boolean("pipe_partitioned", value),
        "grad_partitioned": lambda value: _boolean("grad_partitioned", value),
    }
    for key in block:
        if key not in keys:
            raise ConfigError(f"pipeline.{key}", "no such key", suggest(key, keys))
    for key, value in block.items():
        keys[key](value)
    if "pipe_partitioned" in block or "grad_partitioned" in block:
        _shards(model, block)


def _refuse(key: str, value: Any, what: str, fix: str) -> None:
    shown = str(value).lower() if isinstance(value, bool) else repr(value)
    raise ConfigError(f"pipeline.{key} = {shown}", what, fix)


def _boolean(key: str, value: Any) -> None:
    if not isinstance(value, bool):
        _refuse(key, value, "not a boolean", "use true or false")


def _stages(model: PipelineModule, value: Any) -> None:
    if value not in ("auto", model.num_stages):
        what = f"the layers are cut over {model.num_stages} pipeline ranks"
        _refuse("stages", value, what, 'leave it out, or write "auto": PipelineModule(num_stages=) says it')


def _partition(model: PipelineModule, value: Any) -> None:
    given = model.partition_method
    same = isinstance(value, str) and isinstance(given, str) and value.lower() == given.lower()
    if value == "best" or same:
        return
    what = f"the layers are cut already, by partition_method = {given!r}"
    _refuse("partition", value, what, "leave it out; PipelineModule(partition_method=) says it")


def _seed_layers(model: PipelineModule, value: Any) -> None:
    _boolean("seed_layers", value)
    if value == model.seed_layers:
        return
    if not value:
        what = "PipelineModule has seed_layers=True"
        _refuse("seed_layers", value, what, "leave it out, or say the same in both places")
    if any(isinstance(layer, LayerSpec) for layer in model.layer_specs):
        what = "the layers of the LayerSpecs were built, unseeded, before this config is read"
        _refuse("seed_layers", value, what, "pass seed_layers=True to PipelineModule")
    model.seed_layers = True


def _interval(model: PipelineModule, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        fix = "use a positive integer, or 0 to leave it to PipelineModule"
        _refuse("activation_checkpoint_interval", value, "not a number of layers", fix)
    if value > 0:
        model.set_checkpoint_interval(value)


def _reentrant(model: PipelineModule, value: Any, zero_stage: int) -> None:
    """DeepSpeed's function, which follows ``deepspeed.checkpointing.configure``; torch's at ZeRO-3."""
    if value is None:
        return
    _boolean("use_reentrant", value)
    if not value:
        non_reentrant = checkpointing.non_reentrant_checkpoint
        model.activation_checkpoint_func = checkpoint_non_reentrant if zero_stage == 3 else non_reentrant
    elif model.activation_checkpoint_func is checkpoint_non_reentrant:  # a user's own stays, as in stock
        model.activation_checkpoint_func = checkpointing.checkpoint


def _shards(model: PipelineModule, block: Mapping[str, Any]) -> None:
    """What tensor-parallel ranks share in a transfer: all that crosses a boundary, or nothing."""
    tensor_parallel = model.groups.tensor_parallel
    if tensor_parallel.size == 1:
        return
    wanted = {key: block.get(key, True) for key in ("pipe_partitioned", "grad_partitioned")}
    if len(set(wanted.values())) > 1:
        key, value = next(item for item in block.items() if item[0] in wanted)
        what = "dsx divides activations and gradients between stages alike, and the two keys differ"
        _refuse(key, value, f"{what} (DeepSpeed's default is true)", "set both to the same")
    model.shards = Shards.over(tensor_parallel) if wanted["pipe_partitioned"] else None


_DEEPSPEED = tuple(lr_schedules.VALID_LR_SCHEDULES)


def schedule_of(block: Mapping[str, Any] | None, given: Any) -> Any:
    """The user's schedule, or a callable that makes the schedule of a config's ``scheduler`` block.

    DeepSpeed would give the schedule its own wrapper of the optimizer, which torch's schedules refuse under
    ZeRO and in bf16, and in which it may have made the optimizer anew (deepspeed/runtime/engine.py,
    _scheduler_from_config; zero/stage3.py, initialize_optimizer_states). A callable gets the optimizer
    itself.

    Args:
        block: The config's block, if it has one.
        given: A schedule, or a callable that makes one from an optimizer; None leaves it to the config.

    Returns:
        ``given``, a callable, or None without a schedule.

    Raises:
        ConfigError: No such schedule, or one that wants a metric.
    """
    if given is not None:
        _require_no_metric(given)
        return given
    name, params = (block or {}).get("type"), (block or {}).get("params") or {}
    if name is None:
        return None
    kind = _kind(name)
    if kind is None:
        raise ConfigError(
            f"scheduler.type = {name!r}",
            "DeepSpeed and torch know no such schedule (names are case-sensitive)",
            f"use one of {', '.join(_DEEPSPEED)}, or a class of torch.optim.lr_scheduler",
        )
    if issubclass(kind, torch_schedules.ReduceLROnPlateau):
        raise _wants_a_metric(f"scheduler.type = {name!r}")

    def make(optimizer: Any) -> Any:
        try:
            return kind(optimizer, **params)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"scheduler.params = {params!r}",
                f"{name} of {type(optimizer).__name__} cannot be made: {error}",
                f"give {name} the parameters that it takes",
            ) from error

    return make


def require_drives(lr_scheduler: Any, optimizer: Any) -> None:
    """Refuse a schedule of another optimizer than the one that trains, whose rate would never change.

    Args:
        lr_scheduler: The schedule as it was made. One that does not name its optimizer passes.
        optimizer: The optimizer that trains, inside of DeepSpeed's wrapper; None if nothing trains.
    """
    _require_no_metric(lr_scheduler)
    own = getattr(lr_scheduler, "optimizer", None)
    own = own if hasattr(own, "step") else None
    if None not in (own, optimizer) and own is not optimizer:
        raise ConfigError(
            f"lr_scheduler = {type(lr_scheduler).__name__}(...)",
            f"it moves the learning rate of another optimizer ({type(own).__name__}), which does not train",
            "make it from the optimizer that is given to dsx.initialize, or pass a callable: "
            "lr_scheduler=lambda optimizer: ...",
        )


def _require_no_metric(lr_scheduler: Any) -> None:
    """Refuse a schedule that wants a metric: DeepSpeed would pass it the batch size (engine.py:3550)."""
    if isinstance(lr_scheduler, torch_schedules.ReduceLROnPlateau):
        raise _wants_a_metric("lr_scheduler = ReduceLROnPlateau(...)")


def _kind(name: Any) -> Any:
    """The class of a schedule that DeepSpeed or torch knows by this name."""
    if name in _DEEPSPEED:
        return getattr(lr_schedules, name)
    kind = getattr(torch_schedules, name, None) if isinstance(name, str) else None
    base = torch_schedules.LRScheduler
    known = isinstance(kind, type) and issubclass(kind, base) and kind is not base
    return kind if known else None


def _wants_a_metric(where: str) -> ConfigError:
    return ConfigError(
        where,
        "it wants a metric at every step, and DeepSpeed would give it the batch size",
        "leave it out; make ReduceLROnPlateau(engine.basic_optimizer) after dsx.initialize, and call its "
        "step(loss) yourself, on every rank",
    )


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
    compile_blocks: bool | None = None,
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
        distributed_port: Accepted as in stock DeepSpeed, and unused: a PipelineModule needs the ranks
            already.
        mpu: Refused, as by stock pipelines: the groups are the PipelineModule's.
        dist_init_required: Accepted and unused, like ``distributed_port``.
        collate_fn: Makes micro-batches of ``training_data``.
        config: A resolved dsx config (:func:`dsx.load_config`), or an ordinary DeepSpeed config as a dict or
            path.
        mesh_param: Refused, like ``mpu``.
        config_params: Stock DeepSpeed's old name of ``config``.
        zero: When ZeRO communicates; the config's ``dsx.zero`` by default.
        compile_blocks: Whether to compile dsx's blocks, and modules whose class stands more than once in the
            layer list; what the config's ``dsx.compile`` says by default.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)`` as DeepSpeed returns them.

    Raises:
        VersionError: A DeepSpeed that dsx has not been checked against.
        ConfigError: A setting that cannot work with a pipeline, or that ranks have differently.
        ModelError: ``model`` is no dsx.PipelineModule, has nothing to train, or has groups of its own and is
            given others.
    """
    del distributed_port, dist_init_required
    require_supported()
    load_compilers_late()  # of a program that has made its process group itself
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
    mesh = model.groups.mesh
    require_engine_unpatched(mesh.pp, model.groups.pp_rank, 2 * mesh.pp + 1)
    settings = _left_to_clip(settings_of(config, args, mesh))
    _require_parts(config, model)
    if not isinstance(config, RunConfig):  # whose ranks have compared it before they started
        _require_same_everywhere(settings.deepspeed, model)
    apply_block(settings.deepspeed.get("pipeline", {}), model, settings.zero_stage)
    _check_build(model, settings, optimizer)
    lr_scheduler = schedule_of(settings.deepspeed.get("scheduler"), lr_scheduler)
    if model.partitioner is not None:
        model.partitioner.hand_over(model.chunks)
    parameters, optimizer = prepare(
        model,
        zero_stage=settings.zero_stage,
        dtype=DTYPES[precision(settings.deepspeed)],
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        model_parameters=model_parameters,
    )
    run = config if isinstance(config, RunConfig) else None
    if model.proof is None and model.groups.rank == 0:
        say_once(model, settings, run)  # recipes prove their layouts, and have not come from stock
    blocks = _compile_blocks(model, settings.zero_stage, run, wanted=compile_blocks)
    require_precision(settings.deepspeed)
    with (
        Waiting("making the engine", quiet=model.groups.mute) as waiting,
        builds_said(waiting),
        given_optimizer_kept(),
        experts_apart(model.groups, model.chunks),
        float32_kept(DTYPES[precision(settings.deepspeed)]),
        _uncollected(),
        _named(settings.deepspeed),
    ):
        engine, wrapped, _, scheduler = deepspeed.initialize(
            model=model.chunks,
            config=settings.deepspeed,
            model_parameters=parameters,
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            mpu=Grid(model.groups, replicas=True),
            dist_init_required=False,
        )
    _keep_hooks_out(blocks, settings.zero_stage)
    hide_spare(model)
    require_drives(scheduler, engine.basic_optimizer)
    pipeline = PipelineEngine(
        model,
        engine,
        clipping=settings.clipping,
        config=run,
        zero=zero or (ZeroConfig() if run is None else run.dsx.zero),
        first_step=f"{'compiling the blocks, in ' if blocks else ''}the first step",
    )
    loader = None if training_data is None else _loader(pipeline, training_data, model.groups)
    if loader is not None:
        pipeline.set_dataloader(loader)
    return pipeline, wrapped, loader, scheduler


@contextmanager
def _named(config: Mapping[str, Any]) -> Iterator[None]:
    """Name what of the config DeepSpeed cannot make: an optimizer on CPUs, a monitor without its package."""
    try:
        yield
    except Exception as error:
        if "not been implemented on CPU" in str(error):  # deepspeed/ops/op_builder/cpu/no_impl.py
            where = at("optimizer.type", config["optimizer"]["type"])
            fix = 'use "AdamW" with "torch_adam": true'
            raise ConfigError(where, "DeepSpeed has none for CPUs", fix) from None
        modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
        found = {name.removeprefix("deepspeed.monitor.") for name in modules}
        for monitor in found & {"tensorboard", "wandb", "csv_monitor", "comet"}:
            what = f"this monitor of DeepSpeed's cannot start ({first_line(error)})"
            fix = "mend that (install its package, log in, or name another folder), or set it to false"
            raise ConfigError(at(f"{monitor}.enabled", True), what, fix) from error
        raise


@contextmanager
def _uncollected() -> Iterator[None]:
    """An engine of before, which imports as it ends, must not end amid an import: Python 3.11 fails there."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _left_to_clip(settings: Settings) -> Settings:
    """Leave clipping to DeepSpeedEngine's ``clip_fp32_gradients`` where a program has given it one."""
    called = settings.zero_stage == 0 and precision(settings.deepspeed) == "fp32"
    if not called or not clips_by_itself():
        return settings
    return replace(
        settings, clipping=0.0, deepspeed={**settings.deepspeed, "gradient_clipping": settings.clipping}
    )


def _require_parts(config: Config | None, model: PipelineModule) -> None:
    """Refuse a config's chunks and tiles where a loss, or layers, of the caller's own take all tokens."""
    if not isinstance(config, RunConfig):
        return
    wanted = config.dsx.loss.chunk_tokens
    if isinstance(wanted, int) and wanted and of_head(model.loss_fn) is None:
        raise ConfigError(
            at("dsx.loss.chunk_tokens", wanted),
            "the loss_fn of the PipelineModule is the caller's own, which takes whole logits",
            f"give loss_fn=dsx.nn.HeadLoss(..., chunk_tokens={wanted}), or remove the key",
        )
    given = (each for spec in model.layer_specs for each in getattr(spec, "module_args", ()))
    tiles = {each.mlp_tiles for each in given if isinstance(each, Weights)}
    if config.mlp_tiles > 1 and config.mlp_tiles not in tiles:
        raise ConfigError(
            at("dsx.mlp_tiles", config.mlp_tiles),
            "the layers of the PipelineModule are the caller's own, and none was built with it",
            f"build them by dsx.models.families.layers(..., mlp_tiles={config.mlp_tiles}), or remove the key",
        )


def _compile_blocks(
    model: PipelineModule, zero_stage: int, run: RunConfig | None, *, wanted: bool | None
) -> list[nn.Module]:
    if not (run is not None and run.dsx.compile == "blocks" if wanted is None else wanted):
        return []
    from dsx.nn.compiled import compile_blocks  # here: it loads the compiler

    if model.split is not None:
        model.split.divides = model.program.divides
    own = [each for each in model.layer_specs if not isinstance(each, TiedLayerSpec)]
    kinds = [getattr(each, "typename", type(each)) for each in own]
    blocks = compile_blocks(model.chunks.layers.values(), kinds)
    for block in blocks:
        if zero_stage == 3 and not model.program.divides:
            # Gathered whole before it runs, because hooks of modules inside would break its graph. Where the
            # backward is divided it is in parts anyway, and DeepSpeed would make zeros of missing gradients.
            set_z3_leaf_module(block, flag=True)
    return blocks


def _keep_hooks_out(blocks: Sequence[nn.Module], zero_stage: int) -> None:
    if zero_stage == 3 and blocks:
        from dsx.nn.compiled import hooks_between_graphs  # here: it loads the compiler

        hooks_between_graphs(blocks)


_SAME = (
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
    "bf16", "fp16", "data_types", "zero_optimization", "optimizer", "scheduler", "pipeline",
)  # fmt: skip
"""What ranks that differ in it would wait for each other over, or train wrong models with."""


def _require_same_everywhere(config: Mapping[str, Any], model: PipelineModule) -> None:
    """Raise on every rank if one rank has other settings or layers. Collective over all ranks."""
    mine = {key: config.get(key) for key in _SAME}
    mine["layers"] = [getattr(each, "typename", type(each)).__name__ for each in model.layer_specs]
    text = {key: json.dumps(value, sort_keys=True, default=repr) for key, value in mine.items()}
    digests: list[Any] = [hashlib.sha256(json.dumps(text).encode()).hexdigest()] * dist.get_world_size()
    dist.all_gather_object(digests, digests[0])
    if len(set(digests)) == 1:
        return
    texts: list[Any] = [text] * len(digests)
    dist.all_gather_object(texts, text)
    rank = next(rank for rank, digest in enumerate(digests) if digest != digests[0])
    key = next(key for key in text if texts[rank][key] != texts[0][key])
    error = ConfigError(
        f"{key} of rank {rank}",
        f"it is {shortened(texts[rank][key], 80)} there and {shortened(texts[0][key], 80)} on rank 0",
        "give every rank the same config and the same layers",
    )
    error.add_note(AGREED)
    raise error


def _check_build(model: PipelineModule, settings: Settings, optimizer: Any) -> None:
    """Refuse ZeRO without an optimizer, and layers partitioned for another config.

    Warns of layers built whole for ZeRO-3.
    """
    if settings.zero_stage and optimizer is None and not settings.deepspeed.get("optimizer"):
        raise ConfigError(
            at("zero_optimization.stage", settings.zero_stage),
            "there is no optimizer whose states it could partition, in the config or given to dsx.initialize",
            'add "optimizer" to the config, or give dsx.initialize one',
        )
    if model.partitioner is not None:
        model.partitioner.require(settings)
        return
    whole = any(not hasattr(parameter, "ds_id") for parameter in model.chunks.parameters())
    if settings.zero_stage == 3 and model.groups.mesh.num_replicas > 1 and whole and model.groups.rank == 0:
        warnings.warn(
            "ZeRO-3: the layers were built before the config was known, and each rank holds all of its own "
            "whole. Give dsx.PipelineModule the config too (config=), and they are partitioned one by one.",
            stacklevel=3,
        )


def _loader(engine: Any, dataset: Any, groups: Groups) -> Any:
    """The loader, in order as stock PipelineEngine's (deepspeed/runtime/pipe/engine.py, _build_data_iter)."""
    sampler: DistributedSampler[Any] = DistributedSampler(
        dataset, num_replicas=groups.mesh.num_shares, rank=groups.share, shuffle=False
    )
    return engine.deepspeed_io(dataset, data_sampler=sampler)


def say_once(model: PipelineModule, settings: Settings, run: RunConfig | None) -> None:
    """Say that the layout is unproved, and where the losses differ from stock DeepSpeed's on purpose.

    Programs with a resolved config, ``run``, have not come from stock.
    """
    mesh, off = model.groups.mesh, run is not None and run.dsx.proof == "off"
    place = _place(model.layer_specs, mesh, settings.zero_stage)
    if mesh.size > 1 and not off and (place is None or not place.exists()):
        how = "prove a small model of them"
        divided = [title for title, degree in (("tensor", mesh.tp), ("context", mesh.cp)) if degree > 1]
        if divided:
            how = f"without {' and '.join(divided)} parallelism a small model of them can be proved"
        sys.stdout.write(
            f"dsx: these layers are not proved to train over {mesh.words} as in one process; {how} "
            "before yours are built: dsx.prove(make_layers, config) (docs/guides/checking.md)\n"
        )
    plain = settings.zero_stage == 0 and precision(settings.deepspeed) == "fp32"
    if run is None and plain and settings.clipping > 0 and mesh.pp > 1 and not clips_by_itself():
        sys.stdout.write(
            f"dsx: gradient_clipping = {settings.clipping:g} holds for the norm of the whole model; stock "
            "DeepSpeed in fp32 without ZeRO takes the first stage's, so that losses differ once it clips\n"
        )
    sys.stdout.flush()


def keep_proof_of(layers: Sequence[Any], mesh: Mesh, zero_stage: int) -> None:
    """Remember that layers of these kinds were proved in this layout (:func:`dsx.prove`)."""
    place = _place(layers, mesh, zero_stage)
    if place is not None:
        keep(place, mesh.words)


def _place(layers: Sequence[Any], mesh: Mesh, zero_stage: int) -> Path | None:
    """By the kinds of layers in their order, with their code: a small model has fewer of each kind.

    None where a kind has no file, so that nothing vouches for its code.
    """
    kinds = [getattr(layer, "typename", layer) for layer in layers]
    kinds = [kind if hasattr(kind, "__qualname__") else type(kind) for kind in kinds]
    said: list[Any] = [mesh.axes, zero_stage]
    for kind in dict.fromkeys(kinds):
        try:
            code = Path(inspect.getfile(kind)).read_bytes()
        except (OSError, TypeError):
            return None
        said.append((kind.__module__, kind.__qualname__, hashlib.sha256(code).hexdigest()))
    version = code_version("**/*.py", "**/*.toml")
    name = f"layers-{hashlib.sha256(repr(said).encode()).hexdigest()[:32]}"
    return cache_folder("proofs") / version / name
