"""Messages that take time: a delay on every point-to-point transfer of torch.distributed, for any engine.

A message may be used ``delay_seconds`` after it was sent. The sender is never held up, and the receiver
sleeps what is left of that time only when it waits for the message. When each message was sent travels
beside it, in memory that both processes map: the k-th send of a channel (group, source, destination, tag)
belongs to its k-th receive, which is the rule of gloo and NCCL alike.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from schedule_bench.virtual import Sleeper
from torch.distributed import distributed_c10d

_SLOTS = 1 << 14
"""Messages of a channel of which the times are kept: more than any engine has under way."""


@dataclass(slots=True)
class _Channel:
    """Usable-from times of one channel's messages, shared by its two ends; this end's count."""

    times: memoryview[float]
    count: int = 0

    def next(self) -> int:
        """Slot of this end's next message."""
        self.count += 1
        return (self.count - 1) % _SLOTS


@dataclass(slots=True)
class _Received:
    """A receive under way: ``wait()`` returns when the message is there and its time on the wire is over."""

    work: Any
    times: memoryview[float]
    slot: int
    sleeper: Sleeper

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """As torch.distributed.Work's."""
        result = self.work.wait(*args, **kwargs)
        left = self.times[self.slot] - time.monotonic() - self.sleeper.overshoot_seconds
        if left > 0:
            time.sleep(left)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@dataclass(slots=True)
class Wire:
    """This rank's end of every wire.

    Args:
        folder: Shared by all ranks; empty at the start.
        sleeper: How long sleeps overshoot here.

    Attributes:
        delay_seconds: What messages sent from now on take.
        sent: Messages sent so far.
    """

    folder: Path
    sleeper: Sleeper
    delay_seconds: float = 0.0
    sent: int = 0
    _channels: dict[tuple[str, int, int, int], _Channel] = field(default_factory=dict)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Delays everything that goes through torch.distributed's isend, irecv and what calls them.

        send, recv, batch_isend_irecv and the object transfers look these two up in distributed_c10d.
        """
        isend, irecv = distributed_c10d.isend, distributed_c10d.irecv

        def delayed_isend(
            tensor: Any, dst: int | None = None, group: Any = None, tag: int = 0, group_dst: int | None = None
        ) -> Any:
            channel = self._channel(group, tag, destination=_rank(group, dst, group_dst))
            channel.times[channel.next()] = time.monotonic() + self.delay_seconds
            self.sent += 1
            return isend(tensor, dst=dst, group=group, tag=tag, group_dst=group_dst)

        def delayed_irecv(
            tensor: Any, src: int | None = None, group: Any = None, tag: int = 0, group_src: int | None = None
        ) -> Any:
            channel = self._channel(group, tag, source=_rank(group, src, group_src))
            work = irecv(tensor, src=src, group=group, tag=tag, group_src=group_src)
            return _Received(work, channel.times, channel.next(), self.sleeper)

        _patch(delayed_isend, delayed_irecv)
        try:
            yield
        finally:
            _patch(isend, irecv)

    def _channel(
        self, group: Any, tag: int, *, source: int | None = None, destination: int | None = None
    ) -> _Channel:
        me = dist.get_rank()
        key = (
            _of(group).group_name,
            me if source is None else source,
            me if destination is None else destination,
            tag,
        )
        if key not in self._channels:
            self._channels[key] = _Channel(_shared(self.folder / "-".join(map(str, key))))
        return self._channels[key]


def _rank(group: Any, global_rank: int | None, group_rank: int | None) -> int:
    if global_rank is not None:
        return global_rank
    assert group_rank is not None, "torch allows a receive from anybody; no engine here does that"
    return dist.get_global_rank(_of(group), group_rank)


def _of(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    found = group or dist.group.WORLD
    assert found is not None, "torch.distributed is up"
    return found


def _shared(path: Path) -> memoryview[float]:
    """``_SLOTS`` float64 that every process which maps ``path`` sees; 0 at first."""
    with path.open("a+b") as file:
        file.truncate(8 * _SLOTS)
        return memoryview(mmap.mmap(file.fileno(), 8 * _SLOTS)).cast("d")


def _patch(isend: Any, irecv: Any) -> None:
    distributed_c10d.isend, distributed_c10d.irecv = isend, irecv
    dist.isend, dist.irecv = isend, irecv
