"""The edge of a launched process: its place among the ranks, and how it ends. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable

from dsx.errors import DsxError

AGREED = "every rank raises this error"
"""Note on an error that all ranks share, so that one of them reports it."""

ALONE = "this rank alone raises this error"
"""Note on an error that one rank of a machine finds before there is a process group."""


LAUNCHER_SECONDS = 20.0
"""deepspeed and torchrun look after their processes more often than that."""

_SPEAKER_SECONDS = 5.0

_PEER_GONE = re.compile(
    r"gloo/transport.*(Connection (closed|reset) by peer|Broken pipe)|ncclRemoteError", re.DOTALL
)


def lost_a_peer(error: BaseException | None) -> bool:
    """Whether an error says no more than that another rank has ended."""
    return _PEER_GONE.search(str(error)) is not None


def rank() -> int:
    """This process's rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's index on its machine as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many ranks the launcher started on this machine; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def world_size() -> int:
    """How many ranks the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run(main: Callable[[], int | None]) -> None:
    """Run a recipe's ``main`` and end the process with the right exit code.

    A :class:`~dsx.DsxError` becomes one message and exit code 2. While no process group exists every rank
    finds the same errors (but those noted as :data:`ALONE`), and rank 0 reports them; afterwards a rank
    reports its own (but those noted as :data:`AGREED`). Whatever else goes wrong is a traceback with the
    rank, and exit code 1. Either way the process ends at once, so that a peer in a collective sees the
    connection close, and the launcher ends the rest. What ``main`` returns is the exit code of a good end:
    None or 0, or 128 + the signal that asked it to stop.
    """
    quiet()
    try:
        code = _outcome(main)
    except KeyboardInterrupt:
        code = 130
    if code:
        _leave(code)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if _grouped():
        os._exit(code)  # a normal exit would wait for peers in NCCL's and gloo's destructors
    sys.exit(code)


def _outcome(main: Callable[[], int | None]) -> int:
    try:
        return main() or 0
    except DsxError as error:
        notes = getattr(error, "__notes__", ())
        together = AGREED in notes or not (_grouped() or ALONE in notes)
        if rank() == 0 or not together:
            prefix = "" if rank() == 0 else f"[rank {rank()}] "
            sys.stderr.write(f"{prefix}error: {error}\n")
        else:
            # A launcher ends all ranks at the first one's end: rank 0 gets to speak before.
            time.sleep(_SPEAKER_SECONDS)
        return 2
    except Exception as error:  # noqa: BLE001 - the last line of defence reports everything
        if lost_a_peer(error):
            # The peer says why it ended. The launcher sees its exit code, not this one's, and ends this rank.
            time.sleep(LAUNCHER_SECONDS)
        sys.stderr.write(f"[rank {rank()}] {traceback.format_exc()}\n")
        return 1


def _grouped() -> bool:
    """Whether this process is in a process group; without importing torch to find out."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def quiet() -> None:
    """One rank speaks: DeepSpeed and its neighbours report problems only."""
    for name in ("DeepSpeed", "torch.distributed", "transformers", "datasets", "filelock"):
        # A filter, because these packages set their loggers' levels when they are imported.
        logging.getLogger(name).addFilter(_is_problem)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(\.|$)")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|deepspeed)(\.|$)")


def _is_problem(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
