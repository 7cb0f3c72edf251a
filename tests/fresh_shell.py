"""A reader's first hour: a clone, the environment of its first command, and one shell to paste into."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from recipes.launching import free_port

ROOT = Path(__file__).parents[1]
# Guides that go on from the README's first run: tests/test_readme.py pastes them behind it, in this order.
AFTER_THE_README = (
    "config.md",
    "planning.md",
    "pipelines.md",
    "dropin.md",
    "checkpoints.md",
    "models.md",
    "huggingface.md",
    "metrics.md",
    "commands.md",
    "troubleshooting.md",
)
FIRST = "source .venv/bin/activate"
LEFT_OUT = (
    ".git",
    ".venv",
    "runs",
    "wandb",
    "build",
    "dist",
    "*.egg-info",
    "__pycache__",
    ".*_cache",
    ".hypothesis",
)
# Where a login finds programs, and the python3 that these tests run with.
LOGIN_PATH = f"{sys.base_prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def blocks(text: str, language: str = "bash") -> list[str]:
    """Contents of the fenced blocks of a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


def clone(folder: Path, *, of: Path = ROOT) -> Path:
    """A copy of the project in ``folder``, as a clone has it."""
    shutil.copytree(of, folder, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
    return folder


def install(project: Path) -> None:
    """What the README's installation leaves in ``project``, in a second and without an index.

    dsx itself is installed by pip; the packages that it needs are those that these tests run with.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", project / ".venv"], check=True)
    new, tested = project / ".venv/bin", Path(sys.executable).parent
    (packages,) = (project / ".venv").glob("lib/*/site-packages")
    (packages / "tested.pth").write_text(sysconfig.get_path("purelib") + "\n")
    from_here = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
    command = [new / "python", "-m", "pip", "install", "-q", *from_here, "-e", project]
    subprocess.run(command, check=True, capture_output=True)
    for name in ("deepspeed", "torchrun"):
        _, program = (tested / name).read_text().split("\n", 1)
        (new / name).write_text(f"#!{new / 'python'}\n{program}")
        (new / name).chmod(0o755)


def change_configs(project: Path, changes: Mapping[str, Any], *, only: str = "*.json") -> None:
    """Put values over dotted keys of the configs, so that the commands that name these stay as they are."""
    for path in (project / "configs").glob(only):
        content = json.loads(path.read_text())
        for key, value in changes.items():
            node, *inner = content, *key.split(".")
            for name in inner[:-1]:
                node = node[name]
            node[inner[-1]] = value
        path.write_text(json.dumps(content))


@dataclass(frozen=True)
class Said:
    """What came of one command: its exit status and all that it printed."""

    code: int
    text: str


class Shell:
    """One interactive bash: what a block changes (folder, variables, the environment) holds for the next.

    It has what a login gives and nothing of the tests' own environment, a new home, and CPUs alone. A process
    computes on one of these: beside other workers' tests, torch's threads would mostly spin, waiting for each
    other. Launchers get a port of their own, as another worker's tests may be using theirs.

    Args:
        folder: Where it starts.
        home: The reader's.
        seconds: After which everything that runs in it is killed.
    """

    def __init__(self, folder: Path, home: Path, *, seconds: float = 500.0) -> None:
        home.mkdir(exist_ok=True)
        environment = {
            "HOME": str(home),
            "PATH": LOGIN_PATH,
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "OMP_NUM_THREADS": "1",
        }
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "--noediting", "-i"],
            cwd=folder,
            env=environment | {"CUDA_VISIBLE_DEVICES": "", "VIRTUAL_ENV_DISABLE_PROMPT": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._watchdog = threading.Timer(seconds, self._kill)
        self._watchdog.start()
        self._mark = uuid.uuid4().hex
        ported = (
            f'{name}() {{ command {name} --master_port {free_port()} "$@"; }}'
            for name in ("deepspeed", "torchrun")
        )
        self.paste("\n".join([f"PS1= PS2= PROMPT_COMMAND='printf \"\\n{self._mark} %s\\n\" $?'", *ported]))

    def paste(self, block: str) -> list[Said]:
        """What comes of each command of a block, in order.

        Raises:
            AssertionError: The shell has ended, or was killed for its time.
        """
        end = uuid.uuid4().hex
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{block.rstrip()}\necho {end}\n")
        self._process.stdin.flush()
        said, text = [], ""
        for line in self._process.stdout:
            if line.strip() == end:
                return said[1:]  # the first is what ended the block before
            if line.startswith(self._mark):
                said.append(Said(int(line.split()[1]), text.removesuffix("\n")))
                text = ""
            elif not line.startswith("... "):  # what it says while one waits
                text += line
        raise AssertionError(f"the shell is gone, in:\n{block}\n{text}")

    def close(self) -> None:
        """End it, and whatever it has left running."""
        self._watchdog.cancel()
        self._kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
