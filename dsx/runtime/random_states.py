"""Random states of a run: a file per rank, which says what its bytes must hash to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.accelerator import get_accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dsx.checkpoint.checksums import digest
from dsx.errors import CheckpointError
from dsx.runtime.arrays import as_numpy
from dsx.spec.mesh import Mesh

if TYPE_CHECKING:
    from dsx.runtime.engine import PipelineEngine

_DIGEST = "xxh3_128"
_USE_ANOTHER = "use another checkpoint"


def random_file(rank: int) -> str:
    """The file with a rank's random states."""
    return f"dsx_random_{rank}.safetensors"


def save_random_states(folder: Path, rank: int) -> None:
    """The states of the generators that layers draw from, in a file of this rank. Raises OSError."""
    states = {"cpu": torch.get_rng_state()}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        states["accelerator"] = accelerator.get_rng_state()
    with (folder / random_file(rank)).open("wb") as file:
        file.write(save(states, {_DIGEST: _digest_of(states)}))
        file.flush()
        os.fsync(file.fileno())


def restore_random_states(engine: PipelineEngine, folder: Path, facts: Mapping[str, Any]) -> None:
    """This rank's generators, or in another layout those of the saved rank in the corresponding place.

    Tensor-parallel ranks draw alike: all take those of their first.

    Raises:
        CheckpointError: The file is missing, cut short, or not what was written.
    """
    mesh, saved = engine.groups.mesh, {axis: int(size) for axis, size in facts.get("mesh", {}).items()}
    rank = engine.groups.rank
    if saved != dict(mesh.axes) and saved:
        at = mesh.coords(rank)
        place = Mesh(tuple(saved.items()))
        wanted = {axis: at.get(axis, 0) % size for axis, size in saved.items()} | {"tp": 0}
        rank = next(r for r in range(place.size) if place.coords(r) == {axis: wanted[axis] for axis in saved})
    name = facts.get("random_files", {}).get(str(rank))
    if name is None:
        return
    states = _read(folder / Path(name).name, f"random states of rank {rank}")
    torch.set_rng_state(states["cpu"])
    if "accelerator" in states and get_accelerator().device_name() != "cpu":
        get_accelerator().set_rng_state(states["accelerator"])


def _read(path: Path, what: str) -> dict[str, torch.Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            states = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
            known = (file.metadata() or {}).get(_DIGEST)
    except (OSError, SafetensorError) as error:
        said = "the file is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise CheckpointError(f"{path}: {what}", said, _USE_ANOTHER) from error
    # Older checkpoints say nothing of their bytes.
    if "cpu" not in states or known not in (None, _digest_of(states)):
        raise CheckpointError(
            f"{path}: {what}", "they are not what was written: their checksum is another", _USE_ANOTHER
        )
    return states


def _digest_of(states: Mapping[str, torch.Tensor]) -> str:
    parts = [
        f"{name} {state.dtype} ".encode() + as_numpy(state).tobytes()
        for name, state in sorted(states.items())
    ]
    return digest(b"".join(parts))
