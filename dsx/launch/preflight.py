"""Before the first step on several machines: do they share folders, software and config?"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import torch.distributed as dist

from dsx.checkpoint import store
from dsx.config.run import RunConfig
from dsx.errors import DsxError, RunError
from dsx.fault_tolerance.keepalive import Peer, hosts_of
from dsx.fault_tolerance.waits import located
from dsx.kept import code_files
from dsx.launch.differences import Difference, MachineFacts, differences, short_of_space
from dsx.launch.entry import AGREED
from dsx.terminal import complain

_PACKAGES = ("dsx", "torch", "deepspeed", "transformers")
_OUTPUT = "dsx.train.output"
_NOTE = ".dsx-preflight-"
_SHARED_SECONDS = 10.0
"""The time a network file system may take to show a new file elsewhere: NFS caches names for seconds."""

_LOOK_SECONDS = 0.2


def check_machines(config: RunConfig, peers: Sequence[Peer], rank: int) -> None:
    """Compare the machines of a run, of one alone only the free space. A collective call over all ranks.

    The output folder, below which the data cache lies, must be the same for all of them, so rank 0 leaves a
    note there for the others to find, and each of the others one for rank 0. Versions of dsx, torch,
    DeepSpeed, transformers and Python, dsx's files and the resolved config must be the same. Clocks and free
    space are warned of, on rank 0's console.
    """
    leaders = {peer.machine: peer.rank for peer in reversed(peers)}
    if len(leaders) < 2:
        _warn(short_of_space("this machine", _free_bytes(config), _checkpoint_bytes(config)), rank)
        return
    nonce = [secrets.token_hex(8)]
    dist.broadcast_object_list(nonce, src=0)
    leads = rank in leaders.values()
    note = config.output / f"{_NOTE}{nonce[0]}-{rank}"
    if leads:
        with suppress(DsxError, OSError):  # then nobody sees it
            config.output.mkdir(parents=True, exist_ok=True)
            store.write_atomically(note, nonce[0].encode())
    dist.barrier()
    mine = _facts(config, peers, rank, nonce[0], tuple(leaders.values())) if leads else None
    told: list[tuple[MachineFacts, list[int]] | None] = [mine] * len(peers)
    dist.all_gather_object(told, mine)
    if leads:
        with suppress(OSError):
            note.unlink()
    found = {at: facts for at, facts in enumerate(told) if facts is not None}
    machines = [_seen_by_first(facts, at, found[0][1], config) for at, (facts, _) in found.items()]
    _judge(machines, config, rank)


def _facts(
    config: RunConfig, peers: Sequence[Peer], rank: int, nonce: str, leaders: Sequence[int]
) -> tuple[MachineFacts, list[int]]:
    """This machine's facts, and the ranks whose notes it misses: of all on rank 0, of rank 0's elsewhere."""
    now, folder = time.time(), config.output.absolute()
    wanted = [other for other in leaders if other != rank] if rank == 0 else [0]
    deadline = time.monotonic() + _SHARED_SECONDS
    while missing := [other for other in wanted if not _has(folder, f"{_NOTE}{nonce}-{other}")]:
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_SECONDS)
    versions = dict.fromkeys(_PACKAGES, "none") | {"Python": ".".join(platform.python_version_tuple()[:2])}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    here = [peer.rank for peer in peers if peer.machine == peers[rank].machine]
    text = json.dumps(config.recorded(), sort_keys=True, default=str)
    facts = MachineFacts(
        name=located(here, hosts_of(peers)),
        versions=versions,
        files=code_files("**/*.py", "**/*.toml"),
        config=hashlib.blake2b(text.encode(), digest_size=6).hexdigest(),
        clock=now,
        unseen={_OUTPUT: str(folder)} if rank != 0 and missing else {},
        free_bytes=_free_bytes(config),
    )
    return facts, missing if rank == 0 else []


def _seen_by_first(
    facts: MachineFacts, leader: int, unseen: Sequence[int], config: RunConfig
) -> MachineFacts:
    """Mark a machine whose note rank 0 misses as having another folder, though it may see rank 0's note."""
    if leader not in unseen or facts.unseen:
        return facts
    return replace(facts, unseen={_OUTPUT: f"{config.output.absolute()}, perhaps read-only"})


def _judge(machines: Sequence[MachineFacts], config: RunConfig, rank: int) -> None:
    """Raise or warn, alike on every rank."""
    found = list(differences(machines, checkpoint_bytes=_checkpoint_bytes(config)))
    stopping = [difference for difference in found if difference.stops]
    _warn((difference for difference in found if not difference.stops), rank)
    if stopping:
        first, *more = stopping
        what = "; ".join([first.what, *(f"{one.where}: {one.what}" for one in more)])
        error = RunError(first.where, what, first.fix)
        error.add_note(AGREED)
        raise error


def _warn(found: Iterable[Difference], rank: int) -> None:
    for difference in found if rank == 0 else ():
        complain(f"warning: {difference.where}: {difference.what}. Fix: {difference.fix}.")


def _free_bytes(config: RunConfig) -> dict[str, int]:
    """The output folder, or where it will be made -> what is free there; nothing where it cannot be asked."""
    folder = config.output.absolute()
    with suppress(OSError):
        there = next(place for place in (folder, *folder.parents) if place.exists())
        return {str(folder): shutil.disk_usage(there).free}
    return {}


def _has(folder: Path, name: str) -> bool:
    # Listing the folder asks the server; looking for the name may be answered from a cached "no".
    with suppress(OSError):
        return name in os.listdir(folder)  # noqa: PTH208 (no paths are needed)
    return False


def _checkpoint_bytes(config: RunConfig) -> int:
    """Bytes of weights, fp32 masters and two moments, as Adam has them: enough to recognise a full disk."""
    return config.num_trained * (12 if config.precision == "fp32" else 14)
