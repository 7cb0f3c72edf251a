"""A launched process: command line, place among the ranks, exit code. Imports nothing heavy."""

from __future__ import annotations

import argparse
import logging
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import EPIPE
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from dsx.config.wording import item_without_secrets
from dsx.errors import ConfigError, DsxError
from dsx.terminal import READER_GONE, complain, forget, lost_output, no_room, open_streams, printable

AGREED = "every rank raises this error"
"""Note on an error that all ranks share: one of them reports it."""

ALONE = "this rank alone raises this error"
"""Note on an error that one rank of a machine finds before there is a process group."""


_SPEAKER_SECONDS = 5.0
_FINALIZER_SECONDS = 0.05

_PEER_GONE = re.compile(
    r"(gloo/|TCPStore|ProcessGroupNCCL|DistBackendError|recvValue|sendBytes).*"
    r"(Connection (was likely |is )?(closed|reset|refused|timed out|aborted)|Broken pipe|pair closure"
    r"|No route to host|is unreachable|is down|Failed to recv|remote process exited)"
    r"|ncclRemoteError",
    re.DOTALL | re.IGNORECASE,
)


def lost_a_peer(error: BaseException | None) -> bool:
    """Whether an error says no more than that the connection to another rank broke."""
    return _PEER_GONE.search(str(error)) is not None


def launched() -> bool:
    """Whether a launcher has started this process."""
    return bool(os.environ.get("LOCAL_RANK") and os.environ.get("WORLD_SIZE"))


def job_steps() -> tuple[tuple[str, ...], ...]:
    """A step's variables: its tasks, its machines, tasks of this machine, and the task's number there."""
    if "SLURM_PTY_PORT" in os.environ:  # a shell for people, alone with the variables of a first task
        return ()
    return (  # not SLURM_NTASKS, which a batch script has, too, before it starts any
        ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES", "", "SLURM_LOCALID"),
        ("OMPI_COMM_WORLD_SIZE", "", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_SIZE", "", "MPI_LOCALNRANKS", "MPI_LOCALRANKID"),
    )


def refuse_many(where: str, what: str, fix: str, *also: str) -> None:
    """Raise ConfigError if this process is one of several, as launchers' variables say, and ``also``."""
    for name in (*(tasks for tasks, *_ in job_steps()), *also):
        count = os.environ.get(name, "")
        if count.isdecimal() and int(count) > 1:
            what = f"a launcher has started {count} of it ({name}), and {what}"
            raise ConfigError(where, what, f"{fix}; or unset {name} if it has not")


def refuse_alone() -> None:
    """Raise ConfigError if this process is one of several, and knows of none: each would train by itself."""
    if "WORLD_SIZE" not in os.environ:
        fix = "start it by torchrun, or by deepspeed with its own launcher (dsx guide launching)"
        refuse_many("this program", "each would run by itself", fix)


def boot_id() -> str:
    """This start of the machine, whose processes share one clock and one page cache; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        return ""


def rank() -> int:
    """This process's rank as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("RANK") or 0)


def local_rank() -> int:
    """This process's index on its machine as the launcher set it; 0 without a launcher."""
    return int(os.environ.get("LOCAL_RANK") or 0)


def local_world_size() -> int:
    """How many ranks the launcher started on this machine; 1 without a launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1")


def world_size() -> int:
    """How many ranks the launcher started; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def usable_cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a recipe was called with; ``overrides`` are ``key=value`` items for ``resolve``."""

    config: Path
    overrides: tuple[str, ...]


def parse_arguments(argv: Sequence[str] | None = None, *, description: str | None = None) -> Arguments:
    """Read ``CONFIG`` and any number of ``--set KEY=VALUE``.

    ``CONFIG`` may also stand behind ``--config``, ``--deepspeed_config`` or ``--deepspeed``, which may stand
    alone, too, as in DeepSpeed's examples. ``--local_rank``, which the deepspeed launcher inserts, is
    accepted and dropped: the environment says the same. ``--help`` ends the process.

    Args:
        argv: Arguments; those of the process by default.
        description: First lines of ``--help``.

    Raises:
        ConfigError: Anything else on the command line, no config, or two different ones.

    >>> parse_arguments(["--local_rank=1", "a.json", "--set", "dsx.train.steps=5"]).overrides
    ('dsx.train.steps=5',)
    >>> parse_arguments(["--deepspeed", "--deepspeed_config=a.json"]).config.name
    'a.json'
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s CONFIG [--set KEY=VALUE ...]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,  # argparse would print the usage, and every rank would
    )
    parser.add_argument(
        "--config",
        "--deepspeed_config",
        dest="named",
        action="append",
        default=[],
        metavar="CONFIG",
        help="DeepSpeed JSON with a dsx block, which may stand alone, too",
    )
    parser.add_argument(
        "--deepspeed",
        dest="named",
        nargs="?",
        action="append",
        metavar="CONFIG",
        help="the same, as programs of transformers have it; alone, as DeepSpeed's do, it says nothing",
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        type=_assignment,
        help="put a value over any key of the config, e.g. --set dsx.parallel.tensor=2; may be repeated",
    )
    parser.add_argument("--local_rank", "--local-rank", type=_number, help=argparse.SUPPRESS)
    try:
        found, rest = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:  # of these options, no value where one is needed
        flag = str(error.argument_name).partition("/")[0]
        value = {"--set": "KEY=VALUE", "--local_rank": "N"}.get(flag, "CONFIG")
        raise ConfigError(flag, "it needs a value", f"write {flag} {value}") from None
    unknown = next((word for word in rest if word.startswith("-") and word != "--"), None)
    if unknown is not None:
        raise ConfigError(
            unknown, "there is no such option", "write CONFIG, and --set KEY=VALUE for every key to change"
        )
    configs = [word for word in (*found.named, *rest) if word not in (None, "--")]
    if not configs:
        fix = "write CONFIG, a DeepSpeed JSON; or --config, --deepspeed_config or --deepspeed before it"
        raise ConfigError("command line", "no config is named", fix)
    other = next((word for word in configs if Path(word).absolute() != Path(configs[0]).absolute()), None)
    if other is not None:
        raise ConfigError(f"CONFIG {other}", f"another one is named, too: {configs[0]}", "name one of them")
    if argv is None:
        # What records the command line of this process, as W&B and Comet do, gets no secret with it.
        sys.argv[1:] = [_without_secrets(word) for word in sys.argv[1:]]
    return Arguments(config=Path(configs[0]), overrides=tuple(found.overrides))


def _assignment(text: str) -> str:
    if "=" not in text:
        raise ConfigError(f"--set {text}", "not KEY=VALUE", "write --set dsx.parallel.tensor=4")
    return text


def _without_secrets(word: str) -> str:
    option, is_set, item = word.rpartition("--set=")
    return f"{option}{is_set}{item_without_secrets(item)}" if "=" in item else word


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"--local_rank {text}", "not a whole number", "leave it to the launcher")
    return int(text)


def run(main: Callable[[], int | None]) -> None:
    """Run a recipe's ``main`` and end the process with the right exit code.

    A :class:`~dsx.DsxError` becomes one message and exit code 2. While no process group exists every rank
    finds the same errors, and the first rank of each machine reports them (each rank those noted as
    :data:`ALONE`); afterwards each rank reports its own (rank 0 those noted as :data:`AGREED`). Whatever else
    goes wrong is a traceback with the rank, and exit code 1 (for a full disk 2, and its file,
    where that is known). Either way the process ends at once, so that a peer in a collective sees the
    connection close, and the launcher ends the rest. What ``main`` returns is the exit code of a good end:
    None or 0, or 128 + the signal that asked it to stop.
    """
    open_streams()
    quiet()
    say_loading()
    program = Path(sys.argv[0])
    if rank() == 0 and program.is_file() and not {"-h", "--help"} & set(sys.argv):
        size = world_size()
        ranks = f" on {size} ranks" if size > 1 else ""
        announce(f"... starting {printable(program.name)}{ranks}")
    _keep_interrupts()
    try:
        code = _outcome(main)
    except KeyboardInterrupt:
        code = 130
    if code:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):  # nobody reads it, which must not keep the process
                forget(stream)
        if _grouped():
            os._exit(code)  # a normal exit would wait for peers in NCCL's and gloo's destructors
        sys.exit(code)


def _keep_interrupts() -> None:
    """Raise Ctrl-C again where Python drops it: in finalizers, which may run at any time and cannot raise."""
    report = sys.unraisablehook

    def look(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            # A moment later, when the finalizer has returned.
            main = threading.main_thread().ident
            threading.Timer(_FINALIZER_SECONDS, signal.pthread_kill, (main, signal.SIGINT)).start()
        else:
            report(unraisable)

    sys.unraisablehook = look


def announce(line: str) -> None:
    """Tell rank 0's console."""
    if rank() == 0:
        complain(line)


_SLOW = {
    **{name: name for name in ("torch", "transformers", "datasets", "peft", "matplotlib")},
    "accelerate": "Accelerate",
    "deepspeed": "DeepSpeed",
}
"""Packages that take a second or more to be loaded: module -> name."""


class _Speaking:
    """A loader that has its module's loading said; all else is the loader's own."""

    def __init__(self, loader: Any, package: str) -> None:
        self._loader, self._package = loader, package

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of one that pickle or copy is making
            raise AttributeError(name)
        return getattr(self._loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """See importlib. The module's loader is the other's from here on."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        announce(f"... loading {_SLOW[self._package]}")
        self._loader.exec_module(module)
        if self._package == "deepspeed":
            from dsx.launch.spared import lean_on_cpu  # here: others need nothing of it

            lean_on_cpu()


class _Loading(MetaPathFinder):
    """Finds the slow packages where they are, and has their loading said by rank 0 before it begins."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As of any other module, but that its loader speaks; who only asks for the spec hears nothing."""
        if fullname not in _SLOW:
            return None
        behind = sys.meta_path.index(self) + 1 if self in sys.meta_path else 0
        for finder in sys.meta_path[behind:]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find and find(fullname, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = cast("Loader", _Speaking(spec.loader, fullname))
                return spec
        return None


def say_loading() -> None:
    """From now on, rank 0's console says when a package is loaded that takes long.

    And on CPUs DeepSpeed is spared a build, whoever makes the process group: all ranks call this, or none.
    """
    if not any(isinstance(finder, _Loading) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Loading())


def _outcome(main: Callable[[], int | None]) -> int:
    try:
        refuse_alone()
        code = main()
        sys.stdout.flush()  # what cannot be written is found out here, and not at Python's end
    except DsxError as error:
        notes = getattr(error, "__notes__", ())
        together = AGREED in notes or not (_grouped() or ALONE in notes)
        if rank() != 0 and together:
            # A launcher ends all ranks when the first one ends: rank 0 gets the time to report before that;
            # and then the first rank of another machine, on which alone a file may be missing.
            time.sleep(_SPEAKER_SECONDS / 2)
            together = AGREED in notes or os.environ.get("LOCAL_RANK") != "0"
            time.sleep(_SPEAKER_SECONDS / 2 if together else 0)
        if rank() == 0 or not together:
            complain(f"{'' if rank() == 0 else f'{_name()} '}error: {error}")
        return 2
    except OSError as error:
        if not lost_output(error):
            return _unexpected(error)
        if error.errno == EPIPE:
            return READER_GONE
        full = ConfigError("standard output", error.strerror or str(error), "make room, or send it elsewhere")
        complain(f"error: {full}")
        return 2
    except Exception as error:  # noqa: BLE001 - the last line of defence reports everything
        return _unexpected(error)
    return code or 0


def _unexpected(error: Exception) -> int:
    if lost_a_peer(error):
        # Outside of a Guard nobody knows which rank was lost; it reports itself, and gets the time to.
        at = time.strftime("%H:%M:%S")
        time.sleep(_SPEAKER_SECONDS)
        line = printable(str(error).splitlines()[0])
        complain(f"{_name()} ended because its connection to another rank broke at {at}: {line}")
        return 1
    full = no_room(error)
    complain(f"{_name()} {full or printable(traceback.format_exc())}")
    return 2 if full else 1


def _name() -> str:
    """This rank and its machine, as the beginning of a line."""
    return f"[rank {rank()} on {socket.gethostname()}]"


def _grouped() -> bool:
    """Whether this process is in a process group; without importing torch to find out."""
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_initialized())


class _Printable(logging.LogRecord):
    """A log record of any package, whose message may quote a file of unknown origin."""

    def getMessage(self) -> str:  # noqa: N802 - logging's name
        return printable(super().getMessage())


def quiet() -> None:
    """Let DeepSpeed and its neighbours report problems alone, on one rank; a terminal obeys none of it."""
    # The last one wants a package for a kernel that dsx does not call.
    noisy = ("DeepSpeed", "torch.distributed", "transformers", "datasets", "filelock")
    for name in (*noisy, "bitsandbytes.backends.cpu.ops"):
        # A filter, because these packages set their loggers' levels when they are imported.
        logging.getLogger(name).addFilter(lambda record: record.levelno >= logging.ERROR)
    logging.setLogRecordFactory(_Printable)
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch(\.|$)")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"(torch|deepspeed)(\.|$)")
