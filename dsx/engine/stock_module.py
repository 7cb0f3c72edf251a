"""The names of ``deepspeed.pipe.PipelineModule`` that dsx.PipelineModule needs nowhere else.

The functions are its methods: the class takes them one by one. What stock DeepSpeed calls by a name of its
private kind, and public code outside of it is known to read (Megatron-DeepSpeed, GPT-NeoX), is there too.

A file per layer, as stock DeepSpeed's PipelineModule writes and reads them by itself.

Names and contents are those of deepspeed/runtime/pipe/module.py (save_state_dict, load_state_dir):
``layer_LL[-model_TT]-model_states.pt`` with the layer's state_dict. Checkpoints of a run, with its optimizer
and in any layout, are the engine's (:meth:`dsx.PipelineEngine.save_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed import comm
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.pipe import TiedLayerSpec
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import nn

from dsx.checkpoint import store
from dsx.engine.chunks import TiedUse
from dsx.errors import CheckpointError, ConfigError, LayoutError, ModelError, UnavailableError

if TYPE_CHECKING:
    from deepspeed.runtime.pipe.topology import ProcessTopology

    from dsx.engine.pipeline_module import PipelineModule
    from dsx.parallel.groups import Groups


def save_layers(
    model: PipelineModule, folder: str | Path, engine: Any = None, *, exclude_frozen: bool = False
) -> None:
    """Write this rank's layers, on the first data-parallel rank alone.

    A file holds all of its old or all of its new content at any moment, but where ``engine`` writes later
    than it returns.

    Args:
        model: The pipeline.
        folder: Where to; made if it is missing.
        engine: A DeepSpeed CheckpointEngine that writes; torch.save without.
        exclude_frozen: Leave out parameters that want no gradient.

    Raises:
        ModelError: ZeRO-3 holds the weights in parts.
        CheckpointError: A file cannot be written.
    """
    _require_whole(model, "save_state_dict")
    if model.groups.dp_rank != 0:
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
    except OSError as error:
        raise CheckpointError(
            str(root), f"it cannot be written ({error})", "choose another folder"
        ) from error


def load_layers(
    model: PipelineModule, folder: str | Path, engine: Any = None, *, strict: bool = True
) -> None:
    """Fill this rank's layers from :func:`save_layers`'s files or stock DeepSpeed's. Collective.

    Args:
        model: The pipeline; its stages may be cut elsewhere than those that wrote the files.
        folder: Where the files are.
        engine: A DeepSpeed CheckpointEngine that reads. Files of torch.save are read without one, and no code
            in them is executed.
        strict: Every tensor of a layer must be in its file, and no other.

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
                str(path), f"layer {_index(model, local)} cannot be filled from it ({error})", "save it again"
            ) from error
    synchronize_ties(model)
    if model.weights_changed is not None:
        model.weights_changed()


def synchronize_ties(model: PipelineModule) -> None:
    """Give every copy of a tied weight the value of the first. Collective over its ranks."""
    for tie in model.ties:
        for parameter in tie.parameters:
            dist.broadcast(parameter.data, dist.get_global_rank(tie.group, 0), group=tie.group)


def layer_path(model: PipelineModule, folder: str, local: int) -> str:
    """The file of this rank's ``local``-th layer."""
    shares = model.mpu().topology().get_rank_repr(rank=model.global_rank)
    name = f"layer_{_index(model, local):02d}{'-' + shares if shares else ''}-model_states.pt"
    return str(Path(folder) / name)


def layer_paths(model: PipelineModule, folder: str, local: int) -> list[str]:
    """The files there are of this rank's ``local``-th layer, of all tensor-parallel ranks, in their order."""
    found = Path(folder).glob(f"layer_{_index(model, local):02d}-*model_states.pt")
    return sorted(str(path) for path in found)


def rank_prefix(model: PipelineModule, folder: str, tag: str) -> str:
    """``folder/tag/module-pipe_PP[-model_TT]``."""
    topology = model.mpu().topology()
    at = topology.get_coord(rank=model.global_rank)
    axes = [axis for axis in topology.get_axis_names() if axis != "data"]
    name = "".join(f"-{axis}_{getattr(at, axis):02d}" for axis in axes)
    return str(Path(folder) / str(tag) / f"module{name}")


def _modules(model: PipelineModule) -> Iterator[tuple[int, nn.Module]]:
    """This rank's layers that have a file; a tied weight's is that of the use that has no function."""
    for local, layer in enumerate(model.forward_funcs):
        if isinstance(layer, nn.Module) and not isinstance(layer, TiedUse):
            yield local, layer


def _index(model: PipelineModule, local: int) -> int:
    return list(model.chunks.layers)[local]


def _require_whole(model: PipelineModule, call: str) -> None:
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise ModelError(
            f"PipelineModule.{call}()",
            "under ZeRO-3 no rank has a layer's weights whole",
            "use engine.save_checkpoint() and load_checkpoint(); dsx reshard writes layer files",
        )


def _find(model: PipelineModule, folder: str | Path, local: int) -> Path:
    files = model.ckpt_layer_path_list(str(folder), local)
    wanted = model.groups.mesh.tp
    if len(files) == wanted:
        return Path(files[model.groups.tp_rank])
    what = f"layer {_index(model, local)} has {len(files)} files there, for {wanted} tensor-parallel ranks"
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
    """An attribute of a PipelineModule that is one of its :class:`~dsx.engine.chunks.Recompute`."""

    def __init__(self, field: str) -> None:
        self._field = field

    def __get__(self, model: PipelineModule | None, _owner: Any = None) -> Any:
        return self if model is None else getattr(model.chunks.recompute, self._field)

    def __set__(self, model: PipelineModule, value: Any) -> None:
        # A subclass may set it before there are layers; then the constructor's argument counts, as in stock.
        if "chunks" in vars(model):
            changed = {self._field: check_recompute(self._field, value)}
            model.chunks.recompute = replace(model.chunks.recompute, **changed)


def check_recompute(field: str, value: Any) -> Any:
    """A value for one field of Recompute. Raises ConfigError for one that cannot be meant."""
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


def facts(groups: Groups, bounds: tuple[int, ...], layers: tuple[Any, ...]) -> dict[str, Any]:
    """What stock DeepSpeed's constructor sets as plain attributes.

    Args:
        groups: This rank's.
        bounds: First layer of each virtual stage, and the number of layers.
        layers: The list.
    """
    mesh = groups.mesh
    found = {
        "global_rank": groups.rank,
        "world_size": mesh.size,
        "local_rank": int(comm.get_local_rank()) if comm.is_initialized() else 0,
        "world_group": dist.group.WORLD,
        "num_stages": mesh.pp,
        "stage_id": groups.pp_rank,
        "parts": list(bounds),
        "_layer_specs": list(layers),
        "_num_layers": len(layers),
    }
    if len(bounds) == mesh.pp + 1:
        found |= {"_local_start": bounds[groups.pp_rank], "_local_stop": bounds[groups.pp_rank + 1]}
    return found


def topology(self: PipelineModule) -> ProcessTopology:
    """The DeepSpeed ProcessTopology of all ranks: the one that was given, if any."""
    return self.mpu().topology()


def num_pipeline_stages(self: PipelineModule) -> int:
    """Pipeline degree; virtual stages are ``stage_map.num_stages``."""
    return self.groups.mesh.pp


def partitions(self: PipelineModule) -> list[int]:
    """First layer of each virtual stage, and the number of layers. One chunk: a stage per pipeline rank."""
    return list(self.stage_map.bounds)


def stage_owner(self: PipelineModule, layer_idx: int) -> int:
    """Pipeline rank that holds a layer. Raises LayoutError for an index beyond the list."""
    if not 0 <= layer_idx < self.stage_map.num_layers:
        raise LayoutError(
            f"stage_owner({layer_idx})",
            f"there are {self.stage_map.num_layers} layers",
            f"use 0 to {self.stage_map.num_layers - 1}",
        )
    return self.stage_map.rank_of(self.stage_map.stage_of(layer_idx))


def set_checkpoint_interval(self: PipelineModule, interval: int) -> None:
    """Recompute runs of so many layers from the next forward on; 0 for none. Raises ConfigError."""
    self.activation_checkpoint_interval = interval


def forward_funcs(self: PipelineModule) -> list[Callable[..., Any]]:
    """This rank's layers, in order, as they are called."""
    return list(self.chunks.layers.values())


def fwd_map(self: PipelineModule) -> dict[str, int]:
    """Name of each layer that is a module of its own -> its place in ``forward_funcs``."""
    tied = [id(module) for module in self.chunks.tied_modules.values()]
    return {
        str(index): local
        for local, (index, layer) in enumerate(self.chunks.layers.items())
        if isinstance(layer, nn.Module) and not isinstance(layer, TiedUse) and id(layer) not in tied
    }


def tied_weight_attrs(self: PipelineModule) -> dict[str, list[str]]:
    """Key of each tied module of this rank -> the names of its tied weights."""
    specs = (spec for spec in self.layer_specs if isinstance(spec, TiedLayerSpec))
    attributes = {spec.key: list(spec.tied_weight_attr) for spec in specs}
    return {key: attributes[key] for key in self.chunks.tied_modules}


def tied_comms(self: PipelineModule) -> dict[str, dict[str, Any]]:
    """Key of each weight tied over several pipeline ranks -> where its copies are."""
    attributes = tied_weight_attrs(self)
    return {
        tie.key: {
            "ranks": dist.get_process_group_ranks(tie.group),
            "group": tie.group,
            "weight_attr": attributes[tie.key],
            "module": self.chunks.tied_modules[tie.key],
        }
        for tie in self.ties
    }


def get_tied_weights_and_groups(self: PipelineModule) -> list[tuple[nn.Parameter, Any]]:
    """This rank's copies of weights tied over several pipeline ranks, with the group that holds them."""
    return [(parameter, tie.group) for tie in self.ties for parameter in tie.parameters]


def allreduce_tied_weight_gradients(self: PipelineModule) -> None:
    """Sum ``.grad`` of tied weights over their copies. The engine does so by itself, in every step."""
    for weight, group in get_tied_weights_and_groups(self):
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        dist.all_reduce(weight.grad, group=group)


def get_additional_losses(self: PipelineModule) -> dict[str, torch.Tensor] | None:
    """Losses to report beside the one that is trained; a subclass may return some, by name.

    Asked on the last stage after each micro-batch's loss. ``engine.get_additional_losses()`` has their means
    over the step's micro-batches and all replicas, on every rank.
    """
    del self
    return None


def save_state_dict(
    self: PipelineModule, save_dir: Any, checkpoint_engine: Any = None, exclude_frozen_params: bool = False
) -> None:
    """Write a file per layer: see :func:`dsx.engine.stock_module.save_layers`."""
    save_layers(self, save_dir, checkpoint_engine, exclude_frozen=exclude_frozen_params)


def load_state_dir(
    self: PipelineModule, load_dir: Any, checkpoint_engine: Any = None, strict: bool = True
) -> None:
    """Read a file per layer: see :func:`dsx.engine.stock_module.load_layers`."""
    load_layers(self, load_dir, checkpoint_engine, strict=strict)


def ckpt_prefix(self: PipelineModule, checkpoints_path: str, tag: str) -> str:
    """Path that begins the names of this rank's files, data parallelism left out."""
    return rank_prefix(self, checkpoints_path, tag)


def ckpt_layer_path(self: PipelineModule, ckpt_dir: str, local_layer_idx: int) -> str:
    """File of this rank's ``local_layer_idx``-th layer; a subclass may name it otherwise."""
    return layer_path(self, ckpt_dir, local_layer_idx)


def ckpt_layer_path_list(self: PipelineModule, ckpt_dir: str, local_layer_idx: int) -> list[str]:
    """Files of a layer there are, of all tensor-parallel ranks."""
    return layer_paths(self, ckpt_dir, local_layer_idx)


def run_layers(self: PipelineModule, forward_input: Any) -> Any:
    """Call this rank's layers in order, outside of any engine, as stock DeepSpeed's forward does.

    Raises:
        ModelError: The rank's layers do not follow each other, or ZeRO-3 holds their weights in parts.
    """
    stages = self.stage_map.stages_of(self.groups.pp_rank)
    apart = any(after != before + 1 for before, after in pairwise(stages))
    if apart or any(hasattr(parameter, "ds_id") for parameter in self.parameters()):
        raise ModelError(
            "PipelineModule(...)",
            "a rank holds layers that do not follow each other"
            if apart
            else "under ZeRO-3 no rank has the weights",
            "use dsx.initialize, and train_batch or eval_batch",
        )
    for stage in stages:
        forward_input = self.chunks(forward_input, stage)
    return forward_input
