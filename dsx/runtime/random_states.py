"""Random states of a run: a file per rank, which says what its bytes must hash to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from deepspeed.accelerator import get_accelerator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from dsx.checkpoint.catalog import Catalog, Checksum
from dsx.checkpoint.checksums import digest
from dsx.checkpoint.formats import dsx_native
from dsx.errors import CheckpointError
from dsx.runtime.arrays import as_numpy

if TYPE_CHECKING:
    from dsx.runtime.engine import PipelineEngine

_DIGEST = "xxh3_128"
_USE_ANOTHER = "use another checkpoint"


def save_random_states(folder: Path, rank: int) -> tuple[Checksum, ...]:
    """The states of the generators that layers draw from, in a file of this rank; and its checksum.

    Raises OSError.
    """
    states = {"cpu": torch.get_rng_state()}
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        states["accelerator"] = accelerator.get_rng_state()
    name, data = dsx_native.random_file(rank), save(states, {_DIGEST: _digest_of(states)})
    with (folder / name).open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return (Checksum(name, 0, len(data), "xxh3_128", digest(data)),)


def restore_random_states(engine: PipelineEngine, catalog: Catalog) -> None:
    """This rank's generators, or in another layout those of the saved rank in the corresponding place.

    Tensor-parallel ranks draw alike: all take those of their first.

    Raises:
        CheckpointError: The file is missing, cut short, or not what was written.
    """
    groups = engine.groups
    rank = dsx_native.corresponding(catalog.facts.get("mesh"), groups.mesh, groups.rank)
    if dsx_native.random_state(catalog, rank) is None:
        return
    file = catalog.facts["random_files"][str(rank)]
    states = _read(catalog.root / file, f"random states of rank {rank}")
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
