"""What PipelineModule keeps for stock DeepSpeed's sake: a file per layer, names that it explains, and hooks.

Names and contents of the files are those of deepspeed/runtime/pipe/module.py (save_state_dict,
load_state_dir): ``layer_LL[-model_TT]-model_states.pt`` with the layer's state_dict. Checkpoints of a run,
with its optimizer and in any layout, are the engine's (:meth:`dsx.PipelineEngine.save_checkpoint`).

Programs change stock's pipeline in subclasses, or by assigning to its classes. A method that dsx asks too is
taken from there. Any other change would be lost in silence, since dsx has a pipeline of its own, and is
refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Protocol

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import engine as stock_pipe_engine
from deepspeed.runtime.pipe import module as stock_pipe
from deepspeed.runtime.pipe import p2p, topology
from deepspeed.runtime.pipe import schedule as stock_schedule
from torch import nn

from dsx.checkpoint import store
from dsx.engine.chunks import Chunks, Tie
from dsx.errors import CheckpointError, ConfigError, ModelError, UnavailableError
from dsx.nn.embedding import TiedUse
from dsx.parallel.groups import Grid, Groups
from dsx.schedules.builders import one_f_one_b
from dsx.schedules.schedule import Op


class HasLayers(Protocol):
    """What reading and writing layer files asks of a PipelineModule."""

    groups: Groups
    chunks: Chunks
    ties: tuple[Tie, ...]
    weights_changed: Callable[[], None] | None

    def mpu(self) -> Grid:
        """The process groups, under DeepSpeed's names."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of this rank's layers."""

    def ckpt_layer_path(self, ckpt_dir: str, local_layer_idx: int) -> str:
        """The file of one of this rank's layers; a subclass may name it otherwise."""

    def ckpt_layer_path_list(self, ckpt_dir: str, local_layer_idx: int) -> list[str]:
        """The files there are of that layer, of all tensor-parallel ranks."""


def save_layers(
    model: HasLayers, folder: str | Path, engine: Any = None, *, exclude_frozen: bool = False
) -> None:
    """Write this rank's layers, on the first data-parallel rank alone.

    At any moment a file has all of its old or all of its new content, unless ``engine`` writes after it
    returns.

    ``folder`` is made if it is missing. ``engine``, a DeepSpeed CheckpointEngine, writes; by default
    torch.save. Parameters that want no gradient are left out with ``exclude_frozen``.

    Raises:
        ModelError: ZeRO-3 holds the weights in parts.
        CheckpointError: A file cannot be written.
    """
    _require_whole(model, "save_state_dict")
    if model.groups.replica != 0:
        return
    root = Path(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        for local, layer in _modules(model):
            state = layer.state_dict()
            if exclude_frozen:
                frozen = {name for name, p in layer.named_parameters() if not p.requires_grad}
                state = type(state)((name, value) for name, value in state.items() if name not in frozen)
            path = Path(model.ckpt_layer_path(str(root), local))
            _write(path, clone_tensors_for_torch_save(state), engine)
        store.sync_file(root)
    except (OSError, RuntimeError) as error:  # torch.save's own, on a full disk
        fix = "make room, or choose another folder"
        raise CheckpointError(str(root), f"it cannot be written ({error})", fix) from error


def load_layers(model: HasLayers, folder: str | Path, engine: Any = None, *, strict: bool = True) -> None:
    """Fill this rank's layers from :func:`save_layers`'s files or stock DeepSpeed's. Collective.

    The model's stages may be cut elsewhere than those that wrote the files. ``engine`` is a DeepSpeed
    CheckpointEngine that reads. Files of torch.save are read without one, and no code in them is executed.
    ``strict``: every tensor of a layer must be in its file, and no other.

    Raises:
        ModelError: ZeRO-3 holds the weights in parts.
        CheckpointError: A file is missing, damaged, of another layer or of another tensor-parallel degree.
    """
    _require_whole(model, "load_state_dir")
    for local, layer in _modules(model):
        path = _find(model, folder, local)
        try:
            layer.load_state_dict(_read(path, engine), strict=strict)
        except CheckpointError:
            raise
        except Exception as error:  # pickle, zip and torch have many ways to say that a file is no such thing
            raise CheckpointError(
                str(path),
                f"layer {index_of(model, local)} cannot be filled from it ({error})",
                "save it again",
            ) from error
    synchronize_ties(model)
    if model.weights_changed is not None:
        model.weights_changed()


def synchronize_ties(model: HasLayers) -> None:
    """Give every copy of a tied weight the value of the first. Collective over its ranks."""
    for tie in model.ties:
        for parameter in tie.parameters:
            dist.broadcast(parameter.data, dist.get_global_rank(tie.group, 0), group=tie.group)


def _modules(model: HasLayers) -> Iterator[tuple[int, nn.Module]]:
    """This rank's layers that have a file; a tied weight's file is that of the use without a function."""
    for local, layer in enumerate(model.chunks.layers.values()):
        if isinstance(layer, nn.Module) and not isinstance(layer, TiedUse):
            yield local, layer


def index_of(model: HasLayers, local: int) -> int:
    """Index in the layer list of this rank's ``local``-th layer."""
    return list(model.chunks.layers)[local]


def _require_whole(model: HasLayers, call: str) -> None:
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelError(
            f"PipelineModule.{call}()",
            "under ZeRO-3 no rank has a layer's weights whole",
            "use engine.save_checkpoint() and load_checkpoint(); dsx reshard writes layer files",
        )


def _find(model: HasLayers, folder: str | Path, local: int) -> Path:
    files = model.ckpt_layer_path_list(str(folder), local)
    wanted = model.groups.mesh.tp
    if len(files) == wanted:
        return Path(files[model.groups.tp_rank])
    what = f"layer {index_of(model, local)} has {len(files)} files there, for {wanted} tensor-parallel ranks"
    fix = "convert it with dsx reshard" if files else "give the folder that save_state_dict wrote"
    raise CheckpointError(str(folder), what, fix)


def _write(path: Path, state: Any, engine: Any) -> None:
    if engine is not None and engine.is_decoupled():
        engine.save(state_dict=state, path=str(path))
        return
    aside = path.with_name(f".{path.name}.partial")
    save: Callable[..., Any] = torch.save if engine is None else engine.save
    save(state, str(aside))
    store.sync_file(aside)
    aside.replace(path)


def _read(path: Path, engine: Any) -> Any:
    if engine is None or isinstance(engine, TorchCheckpointEngine):
        return torch.load(path, map_location="cpu", weights_only=True)
    return engine.load(str(path), map_location="cpu")


_ASKED = "which layers are recomputed is asked anew at each forward: is_checkpointable_results"
_LAYERS = "with several chunks a rank's layers are no range: use stage_map.layers_of(groups.pp_rank)"

NOT_HERE = {
    "is_checkpointable_results_interval": _ASKED,
    "interval_was_zero": _ASKED,
    "_local_start": _LAYERS,
    "_local_stop": _LAYERS,
}
"""Name of stock DeepSpeed's -> what to use."""


def unavailable(owner: str, name: str, instead: str) -> UnavailableError:
    """The error for a name that is not here."""
    return UnavailableError(f"{owner}.{name}", "dsx has no such thing", instead)


class OfRecompute:
    """An attribute of a PipelineModule that belongs to its :class:`~dsx.engine.chunks.Recompute`."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, model: HasLayers | None, _owner: Any = None) -> Any:
        return self if model is None else getattr(model.chunks.recompute, self._field)

    def __set__(self, model: HasLayers, value: Any) -> None:
        # A subclass may set it before there are layers; then the constructor's argument counts, as in stock.
        if "chunks" in vars(model):
            changed = {self._field: check_recompute(self._field, value)}
            model.chunks.recompute = replace(model.chunks.recompute, **changed)


def check_recompute(field: str, value: Any) -> Any:
    """Check a value for one field of Recompute. Raises ConfigError for one that cannot be meant."""
    if field == "interval" and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise ConfigError(
            f"activation_checkpoint_interval = {value!r}",
            "not a number of layers",
            "use a positive integer, or 0 for no recomputation",
        )
    if field == "function" and not callable(value):
        raise ConfigError(
            f"activation_checkpoint_func = {value!r}", "it cannot be called", "give func(run, *inputs)"
        )
    if field == "layer_names" and value is not None:
        if isinstance(value, str) or not all(isinstance(name, str) for name in value):
            raise ConfigError(
                f"checkpointable_layers = {value!r}", "not a list of class names", 'write ["Block"]'
            )
        return list(value)
    return value


TAKEN = ("_partition_layers", "_count_layer_params", "_find_layer_type", "_is_checkpointable")
"""Methods of PipelineModule that are asked wherever they are changed."""

_OF_SUBCLASSES = {
    *TAKEN, "allreduce_tied_weight_gradients", "ckpt_layer_path", "ckpt_layer_path_list", "ckpt_prefix",
    "compile", "get_additional_losses", "num_pipeline_stages", "partitions", "set_checkpoint_interval",
    "topology",
}  # fmt: skip
"""What a subclass may override besides: dsx calls them too, or in stock only programs do."""

_PASSED_BY = (
    "forward", "backward", "allreduce_gradients", "allreduce_bucket", "allreduce_and_copy",
    "allreduce_no_retain", "buffered_allreduce_fallback", "_get_gradients_for_reduction",
    "_reduce_non_expert_gradients",
    "_scale_loss_by_gas", "_backward_prologue_per_tensor", "is_gradient_accumulation_boundary",
    "save_checkpoint", "_save_checkpoint", "load_checkpoint", "_load_checkpoint",
)  # fmt: skip
"""Methods of DeepSpeedEngine that stock pipelines call, and dsx's do not."""

ENGINE_HOOKS = frozenset(
    name
    for name in vars(stock_pipe_engine.PipelineEngine)
    if name.startswith("_") and not name.startswith("__")
) - {"_reentrant_activation_checkpointing"}
"""Private names of stock's PipelineEngine, which runs its instructions with them."""

_FIX = (
    "dsx runs pipelines by schedules of its own, which never call it: take the change out (docs/guides/"
    "dropin.md says what is taken, and what to use), or train this program with stock DeepSpeed"
)
_OURS = tuple(str(Path(package.__file__ or "").parent) for package in (deepspeed, torch))


def no_hook(owner: str, name: str) -> UnavailableError:
    """The error for a private name of stock's engine."""
    return UnavailableError(f"{owner}.{name}", "it is a hook of stock DeepSpeed's pipeline", _FIX)


class NoHook:
    """A class attribute that stock's class has: reading it raises."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, _instance: Any, owner: type) -> Any:
        raise no_hook(owner.__name__, self._name)


def require_kept(kind: type, base: type, stock: type, taken: Sequence[str] | set[str]) -> None:
    """Refuse a subclass of dsx's that overrides what only stock DeepSpeed calls, or dsx's class patched so.

    ``stock`` is stock DeepSpeed's class of the same name as dsx's, ``base``. Names that are ``taken`` may be
    overridden; names with two underscores always may.
    """
    for each in kind.mro()[: kind.mro().index(base) + 1]:
        for name, value in vars(each).items():
            if name.startswith("__") or name not in vars(stock) or name in taken:
                continue
            if each is not base or (callable(value) and not _is_own(value, base)):
                what = f"it overrides a method of stock DeepSpeed's {stock.__name__}"
                raise ModelError(f"{each.__name__}.{name}", what, _FIX)


def require_layers_unpatched(kind: type, base: type) -> None:
    """Refuse what a program has changed of stock's PipelineModule, or overrides, and dsx never asks."""
    require_kept(kind, base, stock_pipe.PipelineModule, _OF_SUBCLASSES)
    changes = [name for name in _changed(stock_pipe.PipelineModule) if name not in TAKEN]
    _refuse("deepspeed.pipe.PipelineModule", changes)


def require_engine_unpatched(num_stages: int, stage_id: int, micro_batches: int) -> None:
    """Refuse what a program has changed of how stock's engine runs a step.

    Patched schedules pass if they compute in stock's order: when transfers and data are due is dsx's own.
    """
    _refuse("deepspeed.runtime.pipe.engine.PipelineEngine", _changed(stock_pipe_engine.PipelineEngine))
    table = stock_pipe_engine.PipelineEngine._INSTRUCTION_MAP  # noqa: SLF001
    entries = [key.__name__ for key, value in table.items() if not _is_stock(value, "PipelineEngine._exec_")]
    _refuse("deepspeed.runtime.pipe.engine.PipelineEngine._INSTRUCTION_MAP", entries)
    _refuse("deepspeed.DeepSpeedEngine", [n for n in _changed(DeepSpeedEngine) if n in _PASSED_BY])
    _refuse("deepspeed.runtime.pipe.topology.PipelineParallelGrid", _changed(topology.PipelineParallelGrid))
    _refuse("deepspeed.runtime.pipe.p2p", _changed(p2p))
    for kind, expected in (
        (stock_schedule.TrainSchedule, lambda: _one_f_one_b(num_stages, stage_id, micro_batches)),
        (stock_schedule.InferenceSchedule, lambda: ["ForwardPass"] * micro_batches),
    ):
        changes = _changed(kind)
        if changes and _computes(kind(micro_batches, num_stages, stage_id)) != expected():
            _refuse(f"deepspeed.runtime.pipe.schedule.{kind.__name__}", changes)


def clips_by_itself() -> bool:
    """Whether a program has given DeepSpeedEngine a ``clip_fp32_gradients`` of its own."""
    return "clip_fp32_gradients" in _changed(DeepSpeedEngine)


def asked(model: Any, base: type, name: str) -> Callable[..., Any] | None:
    """A method of stock's that a program has changed, bound to ``model``; None if it is stock's own rule.

    ``base`` is dsx's class, whose own method is stock's rule; ``name`` is one of :data:`TAKEN`.
    """
    if not _is_own(getattr(type(model), name), base):
        bound: Callable[..., Any] = getattr(model, name)
        return bound
    if name in _changed(stock_pipe.PipelineModule):
        return partial(vars(stock_pipe.PipelineModule)[name], model)
    return None


def _is_own(value: Any, base: type) -> bool:
    """Whether a function was written where dsx's class was."""
    return getattr(value, "__module__", None) == base.__module__


def _refuse(where: str, names: Sequence[str]) -> None:
    if names:
        raise ModelError(where, f"this program has changed {', '.join(sorted(names))}", _FIX)


def _changed(owner: type | ModuleType) -> list[str]:
    """Names of a class or module of stock's under which there is a function that is not stock's."""
    prefix = f"{owner.__name__}." if isinstance(owner, type) else ""
    return [name for name, value in _functions(owner) if not _is_stock(value, prefix)]


def _functions(owner: type | ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        each = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        each = each.fget if isinstance(each, property) else each
        if callable(each) and not inspect.isclass(each):
            yield name, each


def _is_stock(value: Any, prefix: str) -> bool:
    """Whether a function's code is DeepSpeed's or torch's, under its own name unless it is decorated."""
    if not isinstance(value, FunctionType) or not value.__code__.co_filename.startswith(_OURS):
        return False
    return value.__qualname__.startswith(prefix) or "<locals>" in value.__qualname__


class _Schedule(Protocol):
    """A schedule of stock's, as one rank runs it."""

    def steps(self) -> Iterator[list[Any]]:
        """Instructions, step by step."""


def _computes(schedule: _Schedule) -> list[str]:
    """The instructions of a rank that compute, in order, and any that is not stock's."""
    names = [type(each) for instructions in schedule.steps() for each in instructions]
    known = vars(stock_schedule).values()
    return [n.__name__ for n in names if n not in known or n.__name__ in ("ForwardPass", "BackwardPass")]


def _one_f_one_b(num_stages: int, stage_id: int, micro_batches: int) -> list[str]:
    row = one_f_one_b(num_stages, 1, micro_batches).rows[stage_id]
    return ["ForwardPass" if action.op is Op.FORWARD else "BackwardPass" for action in row]
