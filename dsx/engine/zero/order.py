"""ZeRO-3's replicas gather parameters together: they must run the same modules in the same order.

A layer that is skipped at random, by replicas whose generators differ, has each compute with parts of what
the others gather. Where they run as many modules nobody notices; where they do not, they wait for each other.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero import partitioned_param_coordinator
from deepspeed.runtime.zero.partitioned_param_coordinator import iter_params
from deepspeed.utils import z3_leaf_module
from torch import nn

from dsx.errors import LayoutError
from dsx.parallel.groups import Groups
from dsx.terminal import printable

_LOOK_SECONDS = 2.0


class FetchOrder:
    """The modules that this rank's step has gathered parameters for, beside the other replicas'.

    DeepSpeed compares all ranks, of which pipeline ranks rightly differ, by numbers that count the modules of
    every engine that a process has had; that goes.

    Args:
        coordinator: DeepSpeed's, of ZeRO-3.
        module: What it gathers for.
        groups: This rank's process groups.
        varies: Whether layers may run other modules from step to step, as no layer of dsx's families does.
            A thread then looks at replicas that do not go on. Making it is a collective call over them.
    """

    def __init__(self, coordinator: Any, module: nn.Module, groups: Groups, *, varies: bool) -> None:
        partitioned_param_coordinator.assert_ints_same_as_other_ranks = lambda _: None
        self._groups, self._varies = groups, varies
        self._names = {inner: name for name, inner in module.named_modules()}
        self._step, self._run = 0, list[str]()
        fetch = coordinator.fetch_sub_module

        def noted(submodule: nn.Module, forward: bool) -> None:
            if any(True for _ in iter_params(submodule, recurse=z3_leaf_module(submodule))):
                self._run.append(self._names.get(submodule, ""))
            fetch(submodule, forward)

        coordinator.fetch_sub_module = noted
        if varies and groups.mesh.num_replicas > 1:
            token = [os.urandom(8).hex()]
            ranks = dist.get_process_group_ranks(groups.data)
            dist.broadcast_object_list(token, src=ranks[0], group=groups.data)
            given = (weakref.ref(self), token[0], ranks.index(groups.rank), len(ranks))
            threading.Thread(target=_look, args=given, name="dsx ZeRO-3 order", daemon=True).start()

    def begin(self, *, known: bool) -> None:
        """A step begins; ``known``: whether DeepSpeed has a recording that all replicas have.

        A collective call over replicas unless it is, or where layers vary.

        Raises:
            LayoutError: The step before ran other modules on other replicas. On each of them.
        """
        run = self._run.copy()
        self._run.clear()
        self._step += 1
        size = self._groups.mesh.num_replicas
        if size == 1 or (known and not self._varies):
            return
        digest = int.from_bytes(hashlib.blake2b("\n".join(run).encode(), digest_size=7).digest(), "little")
        ends = torch.tensor([digest, -digest], device=get_accelerator().current_device_name())
        dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._groups.data)
        if int(ends.sum()):
            everywhere: list[list[str]] = [[]] * size
            dist.all_gather_object(everywhere, run, group=self._groups.data)
            raise _apart(next(pair for names in everywhere if (pair := _first(everywhere[0], names))), size)

    def told(self) -> tuple[int, list[str]]:
        """The number of the step, and its modules so far."""
        return self._step, self._run.copy()


Difference = tuple[int, str, str]
"""(place in the step, module that one replica ran there, that another one ran)."""


def _first(one: Sequence[str], other: Sequence[str]) -> Difference | None:
    pairs = enumerate(zip_longest(one, other, fillvalue="nothing more"), 1)
    return next(((place, *pair) for place, pair in pairs if pair[0] != pair[1]), None)


def _apart(found: Difference, size: int) -> LayoutError:
    place, one, other = found
    return LayoutError(
        f"ZeRO-3 over {size} replicas",
        f"replicas ran different layers in a step, as module {place} of it {one} and {other}: each gathers a "
        "part of what the others compute with",
        "have layers that are skipped at random skipped by all replicas together (seed their generators "
        "alike), or use zero_optimization.stage 2",
    )


def _look(watched: weakref.ref[FetchOrder], token: str, replica: int, size: int) -> None:
    """End this process once it waits for a replica that has run other modules in the same step."""
    store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
    before, wait = None, threading.Event()
    while not wait.wait(_LOOK_SECONDS) and (order := watched()) is not None:
        now = order.told()
        del order  # which may end
        stands, before = now == before, now
        if not stands or not dist.is_initialized():
            continue
        keys = [f"dsx ZeRO-3 order {token} {number}" for number in range(size)]
        store.set(keys[replica], json.dumps(now))
        for number, key in enumerate(keys):
            if number == replica or not store.check([key]):
                continue
            step, run = json.loads(store.get(key))
            both = min(len(run), len(now[1]))
            if step == now[0] and (found := _first(now[1][:both], run[:both])):
                sys.stderr.write(f"error: {printable(str(_apart(found, size)))}\n")
                sys.stderr.flush()
                os._exit(1)
