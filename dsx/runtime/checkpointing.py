"""Save and load a run: DeepSpeed's files, random states and a manifest, committed as one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from safetensors.torch import load_file, save_file

import dsx
from dsx.checkpoint import store
from dsx.checkpoint.manifest import Manifest, TensorEntry
from dsx.errors import CheckpointError
from dsx.runtime.entry import local_rank
from dsx.runtime.launch import agree
from dsx.spec.param import ParamSpec

if TYPE_CHECKING:
    from dsx.runtime.engine import PipelineEngine


def save(engine: PipelineEngine, root: Path, *, tag: str | None, client_state: Mapping[str, Any]) -> Path:
    """Write ``root/tag`` and point ``root/latest`` at it. A collective call over all ranks.

    Everything is written to a hidden folder beside, synced, and renamed into place; ``latest`` changes last.
    A run killed at any moment leaves the previous checkpoint as it was.

    Args:
        engine: The engine to save.
        root: Folder of checkpoints, on a file system that all ranks share.
        tag: Name; ``global_step<N>`` by default.
        client_state: What :func:`load` shall give back. ``tokens``, ``data_cursor`` and ``wandb_run_id`` also
            go into the manifest.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    tag = tag or f"global_step{engine.global_steps}"
    staged: Path = agree(lambda: store.stage(root, tag))
    try:
        engine.deepspeed_engine.save_checkpoint(
            str(staged.parent), tag=staged.name, client_state={"dsx": dict(client_state)}, save_latest=False
        )
        save_file(_random_states(), staged / _random_file(engine))
    except OSError as error:
        raise CheckpointError(
            str(staged), f"cannot be written ({error})", "free space or choose another folder"
        ) from error
    tensors = describe(engine)
    if engine.groups.rank == 0:
        store.write_atomically(
            staged / "dsx.json", manifest(engine, tensors, client_state).to_json().encode()
        )
    if local_rank() == 0:
        store.sync(staged)  # each machine flushes what its ranks wrote
    dist.barrier()
    return agree(lambda: _commit(root, tag))


def load(engine: PipelineEngine, root: Path, *, tag: str | None) -> tuple[Path, dict[str, Any]]:
    """Continue from ``root/tag`` (``root/latest`` by default) exactly. A collective call over all ranks.

    Weights, optimizer state, learning-rate scheduler, counters and random states are restored.

    Returns:
        The checkpoint's folder and the ``client_state`` it was saved with.

    Raises:
        CheckpointError: None there, incomplete, of another model or of another layout.
    """
    tensors = describe(engine)

    def check() -> Path:
        found = store.find(root, tag)
        saved, here = Manifest.read(found / "dsx.json"), manifest(engine, tensors, {})
        saved.require_same_model(here)
        saved.require_same_layout(here)
        missing = [f"dsx_random_{r}.safetensors" for r in range(here.world_size)]
        missing = [name for name in missing if not (found / name).is_file()]
        if missing:
            raise CheckpointError(str(found), f"files are missing: {missing}", "use another checkpoint")
        return found

    path = agree(check)
    loaded, client = engine.deepspeed_engine.load_checkpoint(str(path.parent), tag=path.name)
    if loaded is None:
        raise CheckpointError(str(path), "DeepSpeed could not load it", "use another checkpoint")
    _restore_random_states(path / _random_file(engine))
    dist.barrier()
    return path, dict(client.get("dsx", {}))


def describe(engine: PipelineEngine) -> tuple[TensorEntry, ...]:
    """Every tensor of the whole model, by name. A collective call over all ranks."""
    groups = engine.groups
    mine: dict[str, TensorEntry] = {}
    if groups.dp_rank == 0:
        for name, parameter in engine.pipeline.chunks.named_parameters():
            dtype = str(parameter.dtype).removeprefix("torch.")
            spec = getattr(parameter, "dsx_spec", None)
            if isinstance(spec, ParamSpec):
                mine[spec.name] = TensorEntry.of(spec, dtype)
                continue
            # A layer that is not dsx's: its local shape is all there is to know.
            name_here = name if groups.mesh.tp == 1 else f"{name}@tp{groups.tp_rank}"
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            mine[name_here] = TensorEntry(name=name_here, shape=shape, dtype=dtype)
    gathered: list[dict[str, TensorEntry]] = [{} for _ in range(groups.mesh.size)]
    dist.all_gather_object(gathered, mine)
    everything = {name: entry for part in gathered for name, entry in part.items()}
    return tuple(everything[name] for name in sorted(everything))


def manifest(
    engine: PipelineEngine, tensors: tuple[TensorEntry, ...], client_state: Mapping[str, Any]
) -> Manifest:
    """What a checkpoint of ``engine`` says about itself."""
    stages, config = engine.pipeline.stage_map, engine.config
    return Manifest(
        versions={"dsx": dsx.__version__, "deepspeed": deepspeed.__version__, "torch": torch.__version__},
        mesh=dict(engine.groups.mesh.axes),
        chunks=stages.num_chunks,
        placement=stages.placement,
        stage_bounds=tuple(stages.bounds),
        zero_stage=int(engine.zero_optimization_stage()),
        precision="bf16" if engine.bfloat16_enabled() else "fp32",
        schedule=engine.pipeline.program.name,
        tensors=tensors,
        step=int(engine.global_steps),
        global_batch_size=int(engine.train_batch_size()),
        tokens=int(client_state.get("tokens", 0)),
        data_cursor=int(client_state.get("data_cursor", 0)),
        seed=None if config is None else config.dsx.train.seed,
        model=None if config is None else json.loads(json.dumps(asdict(config.model))),
        wandb_run_id=client_state.get("wandb_run_id"),
    )


def _commit(root: Path, tag: str) -> Path:
    path = store.commit(root, tag)
    store.point_latest(root, tag)
    return path


def _random_file(engine: PipelineEngine) -> str:
    return f"dsx_random_{engine.groups.rank}.safetensors"


def _random_states() -> dict[str, torch.Tensor]:
    """States of the generators that layers draw from."""
    states = {"cpu": torch.get_rng_state()}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        states["accelerator"] = accelerator.get_rng_state()
    return states


def _restore_random_states(path: Path) -> None:
    states = load_file(path)
    torch.set_rng_state(states["cpu"])
    if "accelerator" in states:
        get_accelerator().set_rng_state(states["accelerator"])
