"""Start a recipe's ranks on this machine, under DeepSpeed's launcher and without what it says.

``python -m dsx.launch.start GPUS PROGRAM WORDS...`` is the launcher's process; :func:`start` waits for it.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from dsx.errors import ConfigError, DsxError
from dsx.launch.entry import announce, launched, quiet, refuse_many

_LEAST_KILLED = 256 - 64
"""DeepSpeed's launcher ends with the return code of the rank that failed; of one that signal s ended, -s."""


def start(program: Path, words: Sequence[str], *, gpus: int | None) -> int:
    """Run ``program`` on ``gpus`` ranks, by default one for each GPU, or one where there is none.

    Ctrl-C reaches the ranks and the launcher as this process; SIGTERM is passed on, and the launcher gives it
    to the ranks.

    Returns:
        The exit code of the run: that of the rank that failed first, or 128 + the signal that ended it.

    Raises:
        ConfigError: A launcher has started several of this process.
    """
    fix = "start it once, by itself; or give the launcher the recipe (dsx guide launching)"
    refuse_many("dsx train", "each would start a whole run", fix, *["WORLD_SIZE"] * launched())
    announce("... starting DeepSpeed's launcher")
    # Without the folder of the caller among the places of modules, which python -m would put first.
    command = [sys.executable, "-P", "-u", "-m", __name__, str(gpus or 0), str(program), *words]
    told = 0
    with _launcher(command) as launcher:

        def pass_on(number: int, _: object) -> None:
            nonlocal told
            told = number
            launcher.send_signal(number)

        before = signal.signal(signal.SIGTERM, pass_on)
        try:
            while launcher.poll() is None:
                try:
                    launcher.wait()
                except KeyboardInterrupt:  # which the ranks have heard as well: they end, or save and end
                    told = signal.SIGINT
        finally:
            signal.signal(signal.SIGTERM, before)
    code = launcher.returncode
    if told:
        return 128 + told
    killed = -code if code < 0 else 256 - code if code >= _LEAST_KILLED else 0
    if killed:
        name = signal.Signals(killed).name if killed in set(signal.Signals) else f"signal {killed}"
        why = ", as the system does when memory is short" if killed == signal.SIGKILL else ""
        sys.stderr.write(f"dsx: a rank was ended by {name}{why}\n")
    return 128 + killed if killed else code


def _launcher(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """The launcher's process. Ctrl-C waits, from its first moment, until ``main`` has a handler for it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        # This interpreter and the caller's own words.
        return subprocess.Popen(command, env=_environment())  # noqa: S603
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment() -> dict[str, str]:
    """This process's, with the folder that dsx was imported from where only ``python -m`` names it."""
    first, *others = map(os.path.realpath, sys.path)
    root = os.path.realpath(Path(__file__).parents[2])
    if root != first or root in others:
        return dict(os.environ)
    places = filter(None, (root, os.environ.get("PYTHONPATH")))
    return os.environ | {"PYTHONPATH": os.pathsep.join(places)}


def devices(gpus: int) -> list[str]:
    """What the launcher is to call the devices of the ranks: the machine's first ``gpus``; 0 for all.

    On CPUs ranks share the cores, and any number will do.

    Raises:
        ConfigError: There are GPUs, and fewer.
    """
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return [str(index) for index in range(gpus or 1)]
    count = int(accelerator.device_count())
    if gpus > count:
        what = f"this machine has {count}"
        fix = f"use at most {count}, or deepspeed --hostfile for several machines (dsx guide launching)"
        raise ConfigError(f"--gpus {gpus}", what, fix)
    # Those that this process may see keep their names.
    named = next(
        (
            value.split(",")
            for name in accelerator.visible_devices_envs()
            if (value := os.environ.get(name, ""))
        ),
        [str(index) for index in range(count)],
    )
    return named[: gpus or count]


def main() -> int:
    """DeepSpeed's launcher, with a free port for the ranks to meet at."""
    # Until the launcher sets handlers of its own: Ctrl-C while packages are loaded is told by no traceback.
    signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gpus, program, *words = sys.argv[1:]
    quiet()
    try:
        ranks = devices(int(gpus))
    except DsxError as error:
        sys.stderr.write(f"dsx: {error}\n")
        return 2
    from deepspeed.accelerator import get_accelerator
    from deepspeed.launcher import launch

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        # The launcher would name GPUs to the ranks by their numbers, also those that the user has hidden.
        os.environ["DS_ACCELERATOR"] = "cpu"
        accelerator.visible_devices_envs = list
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = base64.urlsafe_b64encode(json.dumps({"localhost": ranks}).encode()).decode()
    options = ["--world_info", world, "--master_port", str(port), "--log_level", "critical"]
    sys.argv = [launch.__name__, *options, program, *words]
    launch.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
