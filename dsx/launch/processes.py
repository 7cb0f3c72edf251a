"""From a launched process to process groups and back: where ranks meet, start, seeds, a clean end.

And what a start leaves out: compilers that nothing has asked for yet.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from dsx.errors import ConfigError, DsxError, RunError
from dsx.fault_tolerance.waits import clock, named
from dsx.launch.entry import (
    AGREED,
    ALONE,
    job_steps,
    local_rank,
    local_world_size,
    rank,
    refuse_alone,
    usable_cores,
)
from dsx.launch.spared import DYNAMO, LateDynamo, lean_on_cpu
from dsx.parallel.groups import Groups, make_groups
from dsx.parallel.islands import Islands
from dsx.parallel.mesh import Mesh
from dsx.terminal import complain, seconds

if TYPE_CHECKING:
    from dsx.islands.coordinator import IslandNode

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 0.05
_FAREWELL_SECONDS = 60.0
_PATIENCE_SECONDS = 5.0
_FAR_PATIENCE_SECONDS = 60.0

_ROUND = "dsx/round"
_DONE = "dsx/done"
_LEFT = "dsx/left"


def meet(timeout: timedelta) -> tuple[Any, int, int]:
    """A key-value store of this start's ranks alone, once all are there; this rank; their number.

    torchrun keeps one store over all restarts (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py,
    next_rendezvous), so that a new rank might read an address that a dead one has left
    (https://github.com/pytorch/pytorch/issues/135712). Rank 0 therefore names the start by a new word, and
    each rank greets with a word of its own and goes on when rank 0 has repeated it.

    Raises:
        ConfigError: The launcher's port is taken, or nothing says where the ranks are to meet.
    """
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        fix = "start it under torchrun or deepspeed, which set all of it; or unset WORLD_SIZE for one rank"
        raise ConfigError("WORLD_SIZE", f"it is set without {', '.join(missing)}", fix)
    address, given = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    port = int(given) if given.isdecimal() else -1
    if not 0 <= port < 1 << 16:
        raise ConfigError("MASTER_PORT", f"{given!r} is no port", "set a number below 65536")
    place, size = rank(), int(os.environ["WORLD_SIZE"])
    _await_listener(address, port, timeout)
    leads = place == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        # Not torch's rendezvous: on rank 0 it waits for the others without a word.
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address,
            port,
            size,
            leads,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            use_libuv=os.environ.get("USE_LIBUV", "1") == "1",  # as torch's rendezvous takes it
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {port}, where the ranks are to meet",
            "another program listens there, perhaps another run",
            "give this run a port of its own: deepspeed --master_port 29501, or torchrun --master_port 29501",
        ) from None
    store.set_timeout(timeout)
    word = _answer(store, place, timeout) if place else _call(store, size)
    return PrefixStore(f"dsx/{word}", store), place, size


def _call(store: Any, size: int) -> str:
    """On rank 0: name the start, hear every greeting, repeat them."""
    word = secrets.token_hex(8)
    store.set(_ROUND, word)
    greetings = [f"{word}/rank/{place}" for place in range(1, size)]
    if greetings:
        _await_all(store, greetings)
    store.set(f"{word}/heard", json.dumps(["", *(store.get(key).decode() for key in greetings)]))
    return word


def _await_all(store: Any, greetings: list[str]) -> None:
    """Wait for every rank, and say now and then which have not come: one that died cannot say so."""
    began, start, patience = time.time(), time.monotonic(), _PATIENCE_SECONDS
    while not store.check(greetings):  # not store.wait: torch warns, in two lines, of each that ends in vain
        waited, limit = time.monotonic() - start, store.timeout.total_seconds()
        if waited > min(patience, limit):
            missing = named([place for place, key in enumerate(greetings, 1) if not store.check([key])])
            if waited > limit:
                raise _never_met(missing, store.timeout)
            _say_waiting(missing, began, "if they have failed, their own machine's console says why")
            patience *= 2
        time.sleep(_ASK_SECONDS)


def _never_met(who: str, timeout: timedelta, where: str = "") -> RunError:
    after = f"not there{where} after {seconds(timeout.total_seconds())}"
    return RunError(who, after, "look at the console of its machine, at firewalls and at MASTER_ADDR")


def _say_waiting(missing: str, began: float, hint: str) -> None:
    why = f"to be started, or to read the data; {hint}"
    complain(f"[rank {rank()} on {socket.gethostname()}] waits for {missing} since {clock(began)}: {why}")


def _answer(store: Any, place: int, timeout: timedelta) -> str:
    """On another rank: greet whichever start is called, until rank 0 has repeated the greeting."""
    own = secrets.token_hex(8)
    deadline, pause = time.monotonic() + timeout.total_seconds(), _ASK_SECONDS
    while time.monotonic() < deadline:
        word = str(store.get(_ROUND).decode())
        store.set(f"{word}/rank/{place}", own)
        # The others are not all there yet; or never will be, and a new start's word is still to come.
        heard = f"{word}/heard"
        if store.check([heard]) and json.loads(store.get(heard))[place : place + 1] == [own]:
            return word
        time.sleep(pause)
        pause = min(2 * pause, _LOOK_SECONDS)
    raise _never_met("rank 0", timeout)


def _await_listener(address: str, port: int, timeout: timedelta) -> None:
    """Wait until rank 0, or torchrun, listens: torch itself soon looks only once a minute."""
    began, start, patience = time.time(), time.monotonic(), _FAR_PATIENCE_SECONDS
    while rank() != 0:
        with suppress(OSError), socket.create_connection((address, port), timeout=_LOOK_SECONDS):
            return
        waited = time.monotonic() - start
        silent = f"nothing answers at {address}, port {port}"
        if waited > timeout.total_seconds():
            raise _never_met("rank 0", timeout, f" ({silent})")
        if local_rank() == 0 and waited > patience:
            _say_waiting("rank 0", began, silent)
            patience *= 2
        time.sleep(_LOOK_SECONDS)


def stand_by(store: Any) -> None:
    """Let a spare rank wait for the end of the run, and end with it.

    Raises:
        SystemExit: Code 0 when the run is done; 1 when the store is gone, the run having failed.
    """
    try:
        while not store.check([_DONE]):
            time.sleep(_LOOK_SECONDS)
        store.add(_LEFT, 1)
    except dist.DistError:
        sys.exit(1)
    sys.exit(0)


def dismiss(store: Any, spare_ranks: int) -> None:
    """Let the spare ranks end; rank 0, whose process may hold the store, waits a while until they have."""
    store.set(_DONE, "1")
    deadline = time.monotonic() + _FAREWELL_SECONDS
    while store.add(_LEFT, 0) < spare_ranks and time.monotonic() < deadline:
        time.sleep(_ASK_SECONDS)


T = TypeVar("T")


@contextmanager
def distributed(
    mesh: Mesh,
    *,
    sequence_parallel: bool = False,
    seed: int = 0,
    start_timeout_seconds: float = 86_400,
    timeout_seconds: float = 1800,
    spare_ranks: int = 0,
    islands: Islands | None = None,
) -> Iterator[Groups]:
    """Process groups of ``mesh`` for the duration of a ``with`` block.

    Works under ``deepspeed``, ``torchrun`` and, for one rank, plain ``python``; NCCL on GPUs, gloo on CPUs.
    Where the process is in a process group already, which transformers' TrainingArguments make, that one is
    used, and left as it is at the end.
    Random generators are seeded from ``seed`` and the pipeline and data-parallel coordinates, equal over
    tensor parallelism, as dsx's dropout wants them.

    Args:
        mesh: Axes over the ranks that the launcher started, the spare ones aside.
        sequence_parallel: Split activations between tensor-parallel blocks along the sequence.
        seed: Base of every generator's seed.
        start_timeout_seconds: How long a rank waits for the others to come here, while one of them may be
            tokenising a large corpus. Launchers end the others when one fails.
        timeout_seconds: How long a collective may wait for a peer.
        spare_ranks: The last so many ranks take no part: they wait here, and end when the others have
            (:attr:`dsx.RunConfig.spare_ranks`).
        islands: Which island this process is of (:attr:`dsx.RunConfig.islands`). The groups are of its ranks
            alone, and the environment's ``RANK`` and ``WORLD_SIZE`` become those in the island.

    Raises:
        SystemExit: On a spare rank, at the end of the run.
        ConfigError: The launcher's port is taken, or that of ``dsx.outer.meet``; or the config was read for
            another island; there are fewer GPUs than ranks; or other launchers of the same job step know
            nothing of this one.
        LayoutError: The mesh does not have as many ranks as were started.
    """
    # Imported late: it takes seconds, and errors of the config should not wait for it.
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    if islands is None or islands.together:
        _refuse_strangers()
    lean_on_cpu()
    accelerator, timeout = get_accelerator(), timedelta(seconds=timeout_seconds)
    if accelerator.device_name() == "cpu":
        share_cores()
    else:
        _require_device(int(accelerator.device_count()))
    _warn_of_few_cores()
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeedEngine reads it
    accelerator.set_device(local_rank())
    backend = "gloo" if accelerator.device_name() == "cpu" else "nccl"
    if dist.is_initialized() and (islands is None or not islands.together):
        deepspeed.init_distributed(dist_backend=backend, verbose=False)
        load_compilers_late()
        with _island_node(islands, dist.get_rank(), None) as node:
            yield _groups(mesh, sequence_parallel, seed, node)
        return
    store = _join_world(backend, islands, spare_ranks, timedelta(seconds=start_timeout_seconds), timeout)
    deepspeed.init_distributed(dist_backend=backend, verbose=False)
    load_compilers_late()  # torch loads them with a process group where it finds them begun
    with _island_node(islands, dist.get_rank(), store) as node:
        groups = _groups(mesh, sequence_parallel, seed, node)
        yield groups
        dist.barrier()  # before the first rank takes leave of the other islands
    # Without this, ranks that end early tear down connections that others still use. An exception skips it:
    # the others would not come.
    dist.barrier()
    if spare_ranks and groups.rank == 0:
        dismiss(store, spare_ranks)
    dist.destroy_process_group()


def _join_world(
    backend: str, islands: Islands | None, spare_ranks: int, start_timeout: timedelta, timeout: timedelta
) -> Any:
    """Make the default process group of this job, or this island, and give the launch's store.

    Raises:
        SystemExit: On a spare rank, at the end of the run.
        ConfigError: As :func:`distributed`.
    """
    if "WORLD_SIZE" not in os.environ:
        refuse_alone()
        store: Any = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        return store
    if dist.is_initialized():
        # A group of all islands, which is of no use to any one of them.
        place, size = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        dist.destroy_process_group()
    else:
        store, place, size = meet(start_timeout)
    if spare_ranks and place >= size - spare_ranks:
        stand_by(store)
    size, meeting = size - spare_ranks, store
    if islands is not None and islands.together:
        place, size = _in_island(islands, place, size)
        meeting = PrefixStore(f"island{islands.index}", store)
    dist.init_process_group(backend, store=meeting, rank=place, world_size=size, timeout=timeout)
    return store


def _in_island(islands: Islands, place: int, size: int) -> tuple[int, int]:
    """Rank in the island and its ranks, which the environment then says as well."""
    if islands.ranks * islands.count != size or place // islands.ranks != islands.index:
        raise ConfigError(
            f"rank {place} of {size}, island {islands.index}",
            f"the config was read for another rank, or another number of them ({islands.ranks} an island)",
            "call dsx.load_config(..., world_size=dsx.world_size(), rank=dsx.rank())",
        )
    rank_in_island = place % islands.ranks
    os.environ.update(RANK=str(rank_in_island), WORLD_SIZE=str(islands.ranks))
    return rank_in_island, islands.ranks


@contextmanager
def _island_node(islands: Islands | None, place: int, shared: Any) -> Iterator[IslandNode | None]:
    """This rank's connections with other islands, closed in the end, whatever it is."""
    if islands is None:
        yield None
        return
    from dsx.islands.coordinator import IslandNode  # here: other runs have no islands

    launcher = f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{os.environ.get('MASTER_PORT', '29500')}"
    node = IslandNode(islands, place, shared=shared, launcher=launcher)
    try:
        yield node
    except BaseException:
        node.close(patience_seconds=0.0)
        raise
    node.close()


def _groups(mesh: Mesh, sequence_parallel: bool, seed: int, node: IslandNode | None = None) -> Groups:
    groups = make_groups(mesh, sequence_parallel=sequence_parallel, island=node)
    # Islands draw different masks of dropout, as data-parallel ranks do.
    seed_generators(groups, seed if node is None else seed + mesh.size * node.islands.index)
    return groups


def _refuse_strangers() -> None:
    """Raise ConfigError if other torchruns, or deepspeed launchers, know nothing of this one; or say it.

    One on the first task of each machine alone is legal; torchrun's ``--nnodes 2:4`` goes on without some.
    """
    where = "torchrun" if "GROUP_WORLD_SIZE" in os.environ else "deepspeed"
    launchers = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("CROSS_SIZE") or 0)
    for name, *others in job_steps() if launchers else ():
        said = (os.environ.get(each, "") for each in (name, *others))
        tasks, machines, here, place = (int(each) if each.isdecimal() else -1 for each in said)
        expected = tasks if place else machines if machines > 0 else -(-tasks // max(here, 1))
        if place < 0 or launchers >= expected:
            continue
        what = f"this run has {launchers} of the {expected} that {name}={tasks} lets expect"
        if launchers > 1 or _is_elastic():
            if rank() == 0:
                complain(f"warning: {where}: {what}; others, if there are any, wait or train by themselves")
            return
        fix = "start one on each machine (srun --ntasks-per-node=1), and tell it of the others, as --nnodes"
        fix = f"{fix} does (dsx guide launching); or unset {name} if there are no others"
        error = ConfigError(where, f"{what}: others would train by themselves", fix)
        error.add_note(AGREED)
        raise error


def _is_elastic() -> bool:
    """Whether torchrun was told a range of machines, as far as can be seen."""
    said = f"--nnodes={os.environ.get('PET_NNODES', '')}"
    with suppress(psutil.Error, OSError):
        said = " ".join([said, *(word for parent in psutil.Process().parents() for word in parent.cmdline())])
    return re.search(r"--nn\w*[= ]\d+:\d+|elastic_training", said) is not None


def _require_device(count: int) -> None:
    if local_rank() >= count:
        what = f"this process sees {count} GPU{'s' * (count != 1)}, numbered from 0"
        fix = "start no more ranks here than there are, and let each see all (no srun --gpus-per-task)"
        error = ConfigError(f"LOCAL_RANK {local_rank()}", what, fix)
        error.add_note(ALONE)
        raise error


def _warn_of_few_cores() -> None:
    """Say it where ranks are bound to a few of the cores, as by srun, which gives a task one by default."""
    ranks, cores, there = local_world_size(), usable_cores(), os.cpu_count() or 1
    if local_rank() == 0 and cores < min(ranks, there):
        fix = "if Slurm has bound them: srun --cpus-per-task N (dsx guide launching)"
        share = f"{ranks} ranks share {cores} of the {there} cores of {socket.gethostname()}"
        complain(f"warning: {share}. Fix: {fix}.")


def share_cores() -> None:
    """Give this rank's operators its part of the cores, as torchrun does and DeepSpeed's launcher does not.

    torch takes a thread for each core of the machine. Ranks that share the cores would wait for each other's
    threads in every matrix product: 4 ms in place of 10 us for small ones, 4 ranks on 2 cores.
    ``OMP_NUM_THREADS``, which also DeepSpeed's ``--bind_cores_to_rank`` sets, is left as it is, and so are
    fewer threads, as a program of the user's may have set.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        share = max(1, usable_cores() // local_world_size())
        torch.set_num_threads(min(torch.get_num_threads(), share))


def load_compilers_late() -> None:
    """Keep torch's compilers out of a start that compiles nothing, but for what is there already.

    torch's optimizers import ``torch._dynamo`` to say of a few functions that they are not to be compiled.
    And DeepSpeed's ZeRO imports its Muon to ask whether an optimizer is one: that module has three functions
    compiled, for which torch imports its inductor when the module is imported. Together they are two of the
    four seconds of processor time that a rank takes to its first step. Until something compiles there is
    nothing to be kept out of a graph, and a stand-in answers; whatever else is asked of ``torch._dynamo``
    loads it.

    Called when there is a process group, because torch asks ``torch._dynamo`` for more when it makes one.
    Where transformers has been imported, which loads ``torch._dynamo``, the inductor is still spared.
    """
    sys.modules.setdefault(DYNAMO, LateDynamo())
    # DeepSpeed's Muon is imported so that what it compiles is compiled at its first call.
    from deepspeed.runtime import compiler

    now = compiler.compile
    compiler.compile = _compiled_late
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = now


def _compiled_late(*args: Any, **options: Any) -> Any:
    """``deepspeed.runtime.compiler.compile``, a decorator factory, at the first call of what it decorates."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.cache
        def compiled() -> Callable[..., Any]:
            from deepspeed.runtime import compiler

            made: Callable[..., Any] = compiler.compile(*args, **options)(function)
            return made

        @functools.wraps(function)
        def call(*values: Any, **named: Any) -> Any:
            return compiled()(*values, **named)

        return call

    return decorate


def seed_generators(groups: Groups, seed: int) -> None:
    """Seed every generator with a stream of its own, alike where ranks compute the same activations."""
    torch.manual_seed(seed + 1 + groups.mesh.random_stream(groups.rank))


def agree(action: Callable[[], T]) -> T:
    """Run ``action`` on rank 0 and give its result, or its DsxError, to every rank."""
    outcome: list[T | DsxError | None] = [None]
    if dist.get_rank() == 0:
        try:
            outcome[0] = action()
        except DsxError as error:
            outcome[0] = error
    dist.broadcast_object_list(outcome, src=0)
    result = outcome[0]
    if isinstance(result, DsxError):
        result.add_note(AGREED)
        raise result
    return result  # type: ignore[return-value]
