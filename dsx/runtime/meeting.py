"""Where the ranks of a run meet before there are process groups, and where spare ones wait."""

from __future__ import annotations

import json
import os
import secrets
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from dsx.errors import ConfigError
from dsx.plan.losses import clock
from dsx.plan.waits import named
from dsx.runtime.entry import rank

_LOOK_SECONDS = 1.0
_ASK_SECONDS = 0.05
_FAREWELL_SECONDS = 60.0
_PATIENCE_SECONDS = 60.0

_ROUND = "dsx/round"
_DONE = "dsx/done"
_LEFT = "dsx/left"


def meet(timeout: timedelta) -> tuple[Any, int, int]:
    """A key-value store of this start's ranks alone, when all of them are there; this rank; their number.

    torchrun keeps one store over all restarts (torch 2.13, elastic/rendezvous/dynamic_rendezvous.py,
    next_rendezvous), so that a new rank might read an address that a dead one has left
    (https://github.com/pytorch/pytorch/issues/135712). Rank 0 therefore names the start by a word that no
    earlier one had, each rank greets with a word of its own, and goes on when rank 0 has repeated it.

    Raises:
        ConfigError: The launcher's port is taken.
    """
    _await_listener(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout)
    try:
        store, place, size = next(rendezvous("env://", timeout=timeout))
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise ConfigError(
            f"port {os.environ['MASTER_PORT']}, where the ranks are to meet",
            "another program listens there, perhaps another run",
            "give this run a port of its own: deepspeed --master_port 29501, or torchrun --master_port 29501",
        ) from None
    store.set_timeout(timeout)
    word = _answer(store, place, timeout) if place else _call(store, size)
    return PrefixStore(f"dsx/{word}", store), place, size


def _call(store: Any, size: int) -> str:
    """Rank 0: name the start, hear everybody, repeat what they said."""
    word = secrets.token_hex(8)
    store.set(_ROUND, word)
    greetings = [_greeting(word, place) for place in range(1, size)]
    if greetings:
        _await_all(store, greetings)
    store.set(f"{word}/heard", json.dumps(["", *(store.get(key).decode() for key in greetings)]))
    return word


def _await_all(store: Any, greetings: list[str]) -> None:
    """Wait for every rank, and say now and then which have not come: one that died before cannot."""
    began = time.time()
    deadline, patience = time.monotonic() + store.timeout.total_seconds(), _PATIENCE_SECONDS
    while True:
        left = deadline - time.monotonic()
        try:
            store.wait(greetings, timedelta(seconds=max(_ASK_SECONDS, min(left, patience))))
        except dist.DistStoreError:
            if left <= patience:
                raise
        else:
            return
        missing = named([place for place, key in enumerate(greetings, 1) if not store.check([key])])
        sys.stderr.write(
            f"[rank 0 on {socket.gethostname()}] waits for {missing} since {clock(began)}: to be started, or "
            "to read the data; if they have failed, their own machine's console says why\n"
        )
        patience *= 2


def _answer(store: Any, place: int, timeout: timedelta) -> str:
    """Another rank: greet whichever start is called, until rank 0 has repeated the greeting."""
    own = secrets.token_hex(8)
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        word = str(store.get(_ROUND).decode())
        store.set(_greeting(word, place), own)
        try:
            store.wait([f"{word}/heard"], timedelta(seconds=_LOOK_SECONDS))
        except dist.DistStoreError:
            continue  # the others are not all there yet, or never will be: a start that failed
        if json.loads(store.get(f"{word}/heard"))[place] == own:
            return word
        time.sleep(_ASK_SECONDS)  # an earlier start's word: the new one is still to come
    raise TimeoutError(f"rank {place} has not met rank 0")


def _greeting(word: str, place: int) -> str:
    return f"{word}/rank/{place}"


def _await_listener(address: str, port: int, timeout: timedelta) -> None:
    """Wait until rank 0, or torchrun, listens. torch itself looks once a minute, after a while."""
    deadline = time.monotonic() + timeout.total_seconds()
    while rank() != 0 and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((address, port), timeout=_LOOK_SECONDS):
            return
        time.sleep(_LOOK_SECONDS)


def stand_by(store: Any) -> None:
    """What a spare rank does: wait for the end of the run, and end with it.

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
    """Let the spare ranks go; rank 0, whose process may hold the store, waits a while until they have."""
    store.set(_DONE, "1")
    deadline = time.monotonic() + _FAREWELL_SECONDS
    while store.add(_LEFT, 0) < spare_ranks and time.monotonic() < deadline:
        time.sleep(_ASK_SECONDS)
