"""A file per layer, as stock DeepSpeed's PipelineModule writes and reads them by itself.

Names and contents are those of deepspeed/runtime/pipe/module.py (save_state_dict, load_state_dir):
``layer_LL[-model_TT]-model_states.pt`` with the layer's state_dict. Checkpoints of a run, with its optimizer
and in any layout, are the engine's (:meth:`dsx.PipelineEngine.save_checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.utils import clone_tensors_for_torch_save
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from torch import nn

from dsx.checkpoint import store
from dsx.errors import CheckpointError, ModelError
from dsx.runtime.chunks import TiedUse

if TYPE_CHECKING:
    from dsx.runtime.pipeline_module import PipelineModule


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
