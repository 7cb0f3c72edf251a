"""What recomputed blocks keep, their inputs, copied to the host's memory and back beside other work.

A block's input leaves while the block computes, and has the whole of its forward for it. It comes back while
the block behind it goes backward, and the last one of a stage while the rank does what its schedule has
before that backward (:mod:`dsx.schedules.host_copies`). Of a micro-batch under way a stage then keeps nothing
on the device but what its last block is about to need. (ALST: Bekman et al. 2025, arXiv:2506.13996,
"activation checkpoint offloading to CPU".)

On a GPU copies go to page-locked memory, on streams of their own. A run on CPUs copies too: the host's memory
is then its own, and nothing is gained by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dsx.errors import ModelError

T = TypeVar("T")
Key = tuple[int, int]
"""(virtual stage, micro-batch)."""


class HostCopies:
    """The copies of one rank's blocks.

    Blocks that run outside of :meth:`forward` all send their inputs away, and fetch them when they need them.
    """

    def __init__(self) -> None:
        self._before: _Kept | None = None
        self._leaving: _Kept | None = None
        self._left: int | None = None
        # Of what nothing goes backward of nobody else holds anything, and it is not to be fetched.
        self._last = WeakValueDictionary[Key, _Kept]()
        self._streams: dict[torch.device, tuple[Any, Any]] = {}
        self._coming: set[_Kept] = set()

    def begin(self) -> None:
        """At the begin of a step: let go of what one that an error ended was about to fetch."""
        for kept in self._coming:
            kept.wait()
        self._coming.clear()

    @contextmanager
    def forward(self, key: Key, leave: int) -> Iterator[None]:
        """Around the forward of a stage with a micro-batch, of whose blocks the inputs of ``leave`` leave.

        They are the first ones; those of the others stay where they are.
        """
        self._before, self._left = None, leave
        try:
            yield
            self._settle()
            self._note(key)
        finally:
            if self._leaving is not None:  # an error came before the next block
                self._leaving.wait()
            self._before = self._leaving = self._left = None

    def _note(self, key: Key) -> None:
        if self._before is not None and self._before.is_away:
            self._last[key] = self._before

    def fetch(self, key: Key) -> None:
        """Begin to fetch what the last block of a stage kept of a micro-batch, whose backward is near."""
        kept = self._last.pop(key, None)
        if kept is not None:
            kept.come()

    def recomputed(self, function: Callable[..., T], x: Tensor, *others: Any, random: bool) -> T:
        """``function(x, *others)``, of which backward keeps the inputs alone, and ``x`` on the host.

        Args:
            function: A block.
            x: Its input [B, s, ...], which nobody may write to until the block is done.
            others: More inputs, which stay.
            random: Whether it draws numbers.
        """
        if not torch.is_grad_enabled():
            return function(x, *others)
        keep = partial(self._keep, like=(x.shape, x.dtype), goes_on=x.requires_grad)
        with saved_tensors_hooks(keep, _taken):
            y: T = checkpoint(function, x, *others, use_reentrant=False, preserve_rng_state=random)
        return y

    def _keep(self, saved: Tensor, *, like: tuple[Any, ...], goes_on: bool) -> Any:
        """What is saved in the place of an input of a block; torch gives an alias of it.

        Args:
            saved: The input.
            like: Shape and dtype of the one that leaves.
            goes_on: Whether the block before it goes backward too.
        """
        if (saved.shape, saved.dtype) != like:
            return saved
        self._settle()
        stays = self._left is not None and self._left <= 0
        kept = _Kept(saved, self._before if goes_on else None, self._ways(saved.device), self._coming)
        if not stays:
            kept.leave()
            self._leaving = kept
        if self._left is not None:
            self._left -= 1
            self._before = kept
        return kept

    def _settle(self) -> None:
        """Let go of what has been copied. Its memory is used again by what the device does from now on."""
        leaving, self._leaving = self._leaving, None
        if leaving is not None:
            leaving.gone()

    def _ways(self, device: torch.device) -> tuple[Any, Any]:
        """The streams of copies to the host and back; None where copies are made at once."""
        if device.type != "cuda":
            return None, None
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)
        return self._streams[device]


class _Kept:
    """The input of one block, which is on the device, on the host, or on its way.

    Args:
        x: The input.
        before: That of the block before it, whose backward is next.
        ways: The streams to the host and back.
        coming: Has those on their way back, so that none goes while its memory is written to.
    """

    def __init__(self, x: Tensor, before: _Kept | None, ways: tuple[Any, Any], coming: set[_Kept]) -> None:
        self._coming = coming
        self._there: Tensor | None = x
        self._before, self._ways, self._device = before, ways, x.device
        self._host: Tensor | None = None
        self._done: Any = None
        self._version = x._version  # noqa: SLF001 (no public one)

    def wait(self) -> None:
        """Have the device do what comes next after the copy that is under way, if one is."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)
            self._done = None

    @property
    def is_away(self) -> bool:
        """Whether it is on the host."""
        return self._host is not None

    def leave(self) -> None:
        """Begin the copy to the host."""
        x, (way, _) = self._there, self._ways
        assert x is not None
        host = "meta" if x.is_meta else "cpu"
        self._host = torch.empty_like(x, device=host, pin_memory=way is not None)
        if way is None:
            self._host.copy_(x)
            return
        way.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(way):
            self._host.copy_(x, non_blocking=True)
            self._done = way.record_event()

    def gone(self) -> None:
        """Let go of the input, whose copy is made by the time that the device has come so far."""
        x = self._there
        if x is None:  # a backward has come before anything else
            return
        if self._done is not None and x._version != self._version:  # noqa: SLF001
            self.wait()
            raise ModelError(
                "the input of a block",
                "it was written to while it was copied to the host",
                'use dsx.recompute "full" for this model',
            )
        self.wait()
        self._there = None

    def come(self) -> None:
        """Begin the copy to the device, unless it is there or on its way."""
        if self._there is not None or self._host is None:
            return
        self._there = x = torch.empty_like(self._host, device=self._device)
        _, way = self._ways
        if way is None:
            x.copy_(self._host)
            return
        # The memory may be what the device still works on for somebody else.
        way.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(way):
            x.copy_(self._host, non_blocking=True)
            self._done = way.record_event()
        self._coming.add(self)

    def take(self) -> Tensor:
        """The input, for its backward; that of the block before it begins to come."""
        self.come()
        x = self._there
        assert x is not None
        self.wait()
        self._coming.discard(self)
        if self._host is not None:
            self._there = None  # with the backward the caller's alone
        if self._before is not None:
            self._before.come()
            self._before = None
        return x


def _taken(saved: Any) -> Tensor:
    x: Tensor = saved.take() if isinstance(saved, _Kept) else saved
    return x
