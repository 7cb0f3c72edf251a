"""A rank's end of the links between islands: where it listens, or whom it connects with, and their loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from dsx.errors import ConfigError
from dsx.islands.keys import context_of
from dsx.islands.links import Header, Listener, PeerLink, own_address
from dsx.launch.entry import local_world_size
from dsx.parallel.islands import Islands, is_loopback, place_of

T = TypeVar("T")

CONNECT_SECONDS = 5.0
_LOOK_SECONDS = 0.02


class IslandNode:
    """A rank's side of it, for as long as the run lasts.

    Rank r of an island talks to rank r of the first one. The first rank has one link more, for as long as it
    trains, by which either side knows that the other is there.

    Args:
        islands: Which island this is of.
        rank: Rank in the island.
        shared: ``set`` and ``get`` of the launcher's store, by which ranks of one launch find the first
            island; None if each island has a launcher of its own.
        launcher: Host and port at which ranks of one launch have met.

    Attributes:
        islands: The same.
        address: Where this rank listens, if it is one of the first island.
        traffic: Bytes and signs of life that have come and gone so far.

    Raises:
        ConfigError: The address of ``dsx.outer.meet`` cannot be had, or whoever reaches it could read and
            change the weights.
    """

    def __init__(self, islands: Islands, rank: int, *, shared: Any = None, launcher: str = "") -> None:
        self.islands, self.traffic, self.address = islands, 0, ""
        meet, leads = islands.meet, islands.index == 0
        if islands.together:
            one_machine = local_world_size() >= islands.count * islands.ranks
            host, port = "127.0.0.1" if one_machine else own_address(launcher), 0
        else:
            host, port = place_of(meet)
        if not (islands.keys or islands.insecure or is_loopback(host)):
            raise ConfigError(
                f"dsx.outer, which meets at {host}",
                "whoever reaches that address could read the weights and change them",
                "make keys (dsx islands keys FOLDER) and name them as dsx.outer.keys, or say insecure: true",
            )
        folder = None if islands.keys is None else Path(islands.keys)
        self._keys = None if folder is None else context_of(folder, islands.index, serves=leads)
        self._listener: Listener | None = None
        self.meet = meet
        if leads:
            if rank and meet and not is_loopback(host):  # it may be on another machine than the first rank
                host = own_address(meet)
            self._listener = Listener(
                host, 0 if rank else port, self._keys, islands.patience_seconds, self.moved
            )
            self.address = self._listener.address
            if islands.together and rank == 0:
                shared.set("outer/meet", self.address)
        elif islands.together and rank == 0:
            self.meet = shared.get("outer/meet").decode()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="islands", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """What comes of work on links, which is done in their loop; or what it raises."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin work on links, which ends with this node."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def soon(self, action: Callable[[], None]) -> None:
        """Have something done in the loop, and do not wait for it."""
        self._loop.call_soon_threadsafe(action)

    def serve(self, served: Callable[[PeerLink, Header], Awaitable[None]]) -> None:
        """Begin to take connections, on a rank of the first island."""
        assert self._listener is not None, "it is of the first island"
        self.call(self._listener.start(served))

    async def linked(self, address: str) -> PeerLink:
        """A new link with a rank of the first island. Raises LinkError."""
        return await PeerLink.to(
            address,
            self._keys,
            patience_seconds=self.islands.patience_seconds,
            connect_seconds=CONNECT_SECONDS,
            moved=self.moved,
        )

    def moved(self, count: int) -> None:
        """Bytes have come or gone."""
        self.traffic += count

    def close(self, patience_seconds: float | None = None) -> None:
        """Take leave. The first island stays until the others have left it, or for that long."""
        patience = self.islands.patience_seconds if patience_seconds is None else patience_seconds
        deadline = time.monotonic() + patience
        while self._listener is not None and self._listener.connected and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)
        self.call(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        if self._listener is not None:
            self._listener.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
