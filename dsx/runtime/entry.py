"""The edge of a launched process: its place among the ranks, and how it ends. Imports nothing heavy."""

from __future__ import annotations

import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable

from dsx.errors import DsxError

AGREED = "every rank raises this error"
"""Note on an error that all ranks share, so that one of them reports it."""


def rank() -> int:
    """This process's rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK", "0"))


def local_rank() -> int:
    """This process's index on its machine as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def world_size() -> int:
    """How many ranks the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def run(main: Callable[[], None]) -> None:
    """Run a recipe's ``main`` and end the process with the right exit code.

    A :class:`~dsx.DsxError` becomes one message and exit code 2. While no process group exists every rank
    finds the same error, and rank 0 alone reports it; afterwards a rank reports its own. Whatever else goes
    wrong is a traceback with the rank, and exit code 1. Either way the process ends at once, so that a peer
    in a collective sees the connection close, and the launcher ends the rest.
    """
    _quiet()
    try:
        main()
    except DsxError as error:
        together = not _grouped() or AGREED in getattr(error, "__notes__", ())
        if rank() == 0 or not together:
            prefix = "" if rank() == 0 else f"[rank {rank()}] "
            sys.stderr.write(f"{prefix}error: {error}\n")
        _leave(2)
    except KeyboardInterrupt:
        _leave(130)
    except Exception:  # noqa: BLE001 - the last line of defence reports everything
        sys.stderr.write(f"[rank {rank()}] {traceback.format_exc()}\n")
        _leave(1)


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    if _grouped():
        os._exit(code)  # a normal exit would wait for peers in NCCL's and gloo's destructors
    sys.exit(code)


def _grouped() -> bool:
    """Whether this process is in a process group; without importing torch to find out."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


def _quiet() -> None:
    """One rank speaks: DeepSpeed and its neighbours report problems only."""
    for name in ("DeepSpeed", "torch.distributed", "transformers", "datasets", "filelock"):
        # A filter, because these packages set their loggers' levels when they are imported.
        logging.getLogger(name).addFilter(_is_problem)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(\.|$)")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|deepspeed)(\.|$)")


def _is_problem(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
