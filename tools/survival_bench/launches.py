"""Launch recipes under torchrun, hurt them at given steps, and watch their memory and handles."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_MARK = "DSX_SURVIVAL"
_SAMPLE_SECONDS = 2.0
_LOOK_SECONDS = 0.1


@dataclass
class Lifetime:
    """What one process held, sample by sample: resident bytes and open files."""

    rss_bytes: list[int] = field(default_factory=list)
    handles: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Hurt:
    """Once a step is logged: SIGKILL to one rank, or another signal to the launcher."""

    step: int
    signal: int


class Launch:
    """``torchrun`` and all that it has started, until it ends."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.lifetimes: dict[int, Lifetime] = {}
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(  # noqa: S603
                command,
                cwd=ROOT,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | {_MARK: self._mark, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def ranks(self) -> list[int]:
        """Processes that train: the recipe's, not the launcher's nor W&B's."""
        return [pid for pid, words in self._processes() if "gpt_3d.py" in words and "torchrun" not in words]

    def left_over(self) -> list[int]:
        """Processes of this launch that still run."""
        return [pid for pid, _ in self._processes()]

    def kill_all(self) -> None:
        """End everything that is left."""
        for pid in self.left_over():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _processes(self) -> list[tuple[int, str]]:
        mark, found = f"{_MARK}={self._mark}".encode(), []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found.append((int(folder.name), words))
        return found

    def _sample(self) -> None:
        while self.process.poll() is None:
            for pid in self.ranks():
                with suppress(OSError):
                    status = Path(f"/proc/{pid}/status").read_text()
                    resident = re.search(r"VmRSS:\s+(\d+) kB", status)
                    if resident is not None:
                        life = self.lifetimes.setdefault(pid, Lifetime())
                        life.rss_bytes.append(int(resident[1]) << 10)
                        life.handles.append(sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir()))
            time.sleep(_SAMPLE_SECONDS)


def command(ranks: int, settings: Mapping[str, Any], *, restarts: int = 0) -> list[str]:
    """A launcher with the recipe and ``--set`` for each of ``settings``; plain Python for one rank."""
    start = [sys.executable]
    if ranks > 1:
        start = [str(Path(sys.executable).parent / "torchrun"), "--standalone", f"--nproc_per_node={ranks}"]
        start += [f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    words = [*start, "recipes/gpt_3d.py", "configs/zero1.json"]
    for key, value in settings.items():
        words += ["--set", f"{key}={value if isinstance(value, str | Path) else json.dumps(value)}"]
    return words


def attend(launch: Launch, metrics: Path, hurts: Sequence[Hurt], chance: random.Random) -> list[int]:
    """Send each signal at its step, SIGKILL to a rank drawn by ``chance``; wait for the end.

    Returns:
        The last step that was logged when each signal was sent.
    """
    sent = []
    for hurt in hurts:
        while last_step(metrics) < hurt.step and launch.process.poll() is None:
            time.sleep(_LOOK_SECONDS)
        alive = launch.ranks()
        if launch.process.poll() is not None or not alive:
            break
        sent.append(last_step(metrics))
        kills = hurt.signal == signal.SIGKILL
        with suppress(ProcessLookupError):
            os.kill(chance.choice(alive) if kills else launch.process.pid, hurt.signal)
        if kills:
            _await_end_of(alive)
    launch.process.wait()
    return sent


def _await_end_of(pids: Sequence[int]) -> None:
    """Until every process of the start that was hurt is gone: a step logged later is of the next one."""
    while any(Path(f"/proc/{pid}/stat").exists() and not _is_zombie(pid) for pid in pids):
        time.sleep(_LOOK_SECONDS)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def last_step(metrics: Path) -> int:
    """The last step in a run's metrics.jsonl; 0 before there is one."""
    try:
        lines = metrics.read_text().splitlines()
    except OSError:
        return 0
    for line in reversed(lines):
        with suppress(ValueError, KeyError):  # torn by a kill in mid-write
            return int(json.loads(line)["train/step"])
    return 0


def losses(metrics: Path) -> dict[int, float]:
    """Training loss by step."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return {row["train/step"]: row["train/loss"] for row in rows if "train/loss" in row}
