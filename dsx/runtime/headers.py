"""Headers of messages whose shapes vary: they travel apart from the messages, from host to host.

A receiver has to know a message's shape before it can post the receive. In the channel of the messages
themselves a header could be waited for only where its message is posted, and on a GPU reading it waits for
the device. So headers have a group of their own on the hosts (gloo), in which they are received as they come.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from dsx.runtime.groups import Groups


def header_group(groups: Groups) -> dist.ProcessGroup:
    """A group of the pipe ranks' hosts. A collective call over those ranks alone."""
    ranks = list(groups.mesh.group_of(groups.rank, "pp"))
    group: dist.ProcessGroup | None = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    assert group is not None
    return group


class Headers:
    """The headers that one rank sends this one in a step, in order.

    A thread takes them in: gloo has no way to ask whether a receive is done without waiting for it.

    Args:
        count: How many will come.
        numel: Elements of each, int64.
        source: Global rank of the sender.
        group: :func:`header_group`.
    """

    def __init__(self, *, count: int, numel: int, source: int, group: dist.ProcessGroup) -> None:
        self._numel, self._source, self._group = numel, source, group
        self._arrived: SimpleQueue[torch.Tensor | Exception] = SimpleQueue()
        threading.Thread(target=self._receive, args=(count,), daemon=True).start()

    def next(self, *, wait: bool) -> torch.Tensor | None:
        """The next header; None if it has not come and must not be waited for.

        Raises:
            RuntimeError: The connection to the sender broke.
        """
        try:
            found = self._arrived.get(block=wait)
        except Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def _receive(self, count: int) -> None:
        try:
            for _ in range(count):
                header = torch.empty(self._numel, dtype=torch.int64)
                dist.recv(header, self._source, group=self._group)
                self._arrived.put(header)
        except Exception as error:  # noqa: BLE001 - raised where the header is wanted
            self._arrived.put(error)
