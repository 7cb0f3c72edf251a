"""What PipelineModule keeps for stock DeepSpeed's sake: a file per layer, and names that it explains.

Names and contents of the files are those of deepspeed/runtime/pipe/module.py (save_state_dict,
load_state_dir): ``layer_LL[-model_TT]-model_states.pt`` with the layer's state_dict. Checkpoints of a run,
with its optimizer and in any layout, are the engine's (:meth:`dsx.PipelineEngine.save_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import nn

from dsx.checkpoint import store
from dsx.engine.chunks import Chunks, Tie, TiedUse
from dsx.errors import CheckpointError, ConfigError, ModelError, UnavailableError
from dsx.parallel.groups import Grid, Groups


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

    Args:
        model: The pipeline.
        folder: Where to write; made if it is missing.
        engine: A DeepSpeed CheckpointEngine that writes; torch.save by default.
        exclude_frozen: Whether to leave out parameters that want no gradient.

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
    except OSError as error:
        raise CheckpointError(
            str(root), f"it cannot be written ({error})", "choose another folder"
        ) from error


def load_layers(model: HasLayers, folder: str | Path, engine: Any = None, *, strict: bool = True) -> None:
    """Fill this rank's layers from :func:`save_layers`'s files or stock DeepSpeed's. Collective.

    Args:
        model: The pipeline; its stages may be cut elsewhere than those that wrote the files.
        folder: Where the files are.
        engine: A DeepSpeed CheckpointEngine that reads. Files of torch.save are read without one, and no code
            in them is executed.
        strict: Whether every tensor of a layer must be in its file, and no other.

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
