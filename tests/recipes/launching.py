"""Start recipes as a user does, under real launchers, and look at all that they print and leave behind."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import torch

from dsx.data.batches import EvaluationBatches
from dsx.data.corpus import Corpus

REPOSITORY = Path(__file__).parents[2]
ZERO3 = REPOSITORY / "configs" / "zero3.json"
FINETUNE = REPOSITORY / "configs" / "finetune.json"

_BIN = Path(sys.executable).parent
_MARK = "DSX_TEST_LAUNCH"
_DEADLINE_SECONDS = 200.0
_GRACE_SECONDS = 10.0

# Lines that are not the run's: DeepSpeed's logger in the launcher's modules, torchrun's log, and what is said
# while one waits.
_LAUNCHERS_LINE = re.compile(
    r"\[\d{4}-.*\] \[[A-Z]+\] \[(runner|launch|real_accelerator)\.py:"
    r"|[WE]\d{4} [\d:.]+ \d+ torch/distributed/"
    r"|\.\.\. "
)
# What either prints last when a rank has failed, or when Ctrl-C has reached it.
_LAUNCHERS_TRACEBACK = re.compile(
    r'Traceback \(most recent call last\):\n  File "[^"]*/bin/(torchrun|deepspeed)"'
)

# Small enough for seconds.
SMALL: dict[str, Any] = {
    "train_batch_size": 8,
    "scheduler.params.warmup_num_steps": 2,
    "dsx.data.sequence_length": 64,
    "dsx.data.max_bytes": 600_000,
    "dsx.data.held_out": 0.1,
    "dsx.train.steps": 6,
    "dsx.train.eval_every": 0,
    "dsx.train.eval_tokens": 4096,
    "dsx.train.save_every": 0,
    "dsx.tracking.wandb.mode": "disabled",
}


def recipe(name: str) -> ModuleType:
    """A recipe's file as a module: its folder is no package, and tests/recipes has its name."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / "recipes" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Ended:
    """What came of a launch.

    Attributes:
        code: Exit code of the launcher.
        rank_code: Exit code of the rank that failed first, by the launcher's word; None if none did.
        lines: What the ranks printed, on either stream.
        text: The same with the launcher's own lines, for messages.
    """

    code: int
    rank_code: int | None
    lines: list[str]
    text: str


class Launch:
    """A launcher at work, with all that it has started."""

    def __init__(self, process: subprocess.Popen[str], mark: str, deadline_seconds: float) -> None:
        self._process, self._mark = process, f"{_MARK}={mark}".encode()
        self._read: list[str] = []
        self._deadline_seconds = deadline_seconds
        self._watchdog = threading.Timer(deadline_seconds, self._give_up)
        self._watchdog.start()
        self._late = False

    @property
    def pid(self) -> int:
        """The launcher's."""
        return self._process.pid

    def wait_for(self, start: str) -> None:
        """Until a line that begins so is printed."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._read.append(line)
            if line.startswith(start):
                return
        raise AssertionError(f"ended without a line {start!r}:\n{''.join(self._read)}")

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Until something outside it is so."""
        while not condition():
            assert self._process.poll() is None, f"ended before:\n{''.join(self._read)}"
            time.sleep(0.05)

    def kill(self) -> None:
        """What a machine's power cut does: SIGKILL to the launcher and all that it has started."""
        for process in self._processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def press_ctrl_c(self) -> None:
        """What a terminal does: SIGINT to all in its foreground."""
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> Ended:
        """Wait for the launcher and for all that it has started."""
        assert self._process.stdout is not None
        self._read.extend(self._process.stdout)  # to its end: when the last process has let go of it
        code = self._process.wait()
        text = "".join(self._read)
        assert not self._late, f"no end after {self._deadline_seconds} s:\n{text}"
        assert not self._left_over(), f"processes are left after:\n{text}"
        failed = re.search(r"exits with return code = (-?\d+)|failed \(exitcode: (-?\d+)\)", text)
        rank_code = int(failed[1] or failed[2]) if failed else None
        lines = _LAUNCHERS_TRACEBACK.split(text)[0].splitlines()
        return Ended(
            code, rank_code, [line for line in lines if line and not _LAUNCHERS_LINE.match(line)], text
        )

    def close(self) -> None:
        """Kill what still runs."""
        self._watchdog.cancel()
        self.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _give_up(self) -> None:
        self._late = True
        self.kill()

    def _left_over(self) -> list[int]:
        """Processes of this launch that do not end on their own, W&B's service among them."""
        left = []
        for process in self._processes():
            with suppress(ProcessLookupError):
                handle = os.pidfd_open(process)
                if not select.select([handle], [], [], _GRACE_SECONDS)[0]:
                    left.append(process)
                os.close(handle)
        return left

    def _processes(self) -> list[int]:
        """All that have inherited this launch's environment, whoever their parent is by now."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended, or is someone else's
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


@contextmanager
def started(
    launcher: str,
    recipe: str,
    config: Path | str,
    settings: Mapping[str, Any],
    *,
    ranks: int = 2,
    options: Sequence[str] = (),
    environment: Mapping[str, str] = MappingProxyType({}),
    deadline_seconds: float = _DEADLINE_SECONDS,
) -> Iterator[Launch]:
    """A recipe under ``deepspeed``, ``torchrun`` or ``python`` with --set for each of ``settings``.

    ``dsx`` is ``dsx train``, which finds the recipe itself. ``options`` are the launcher's, in place of a
    single machine's.
    """
    mark = uuid.uuid4().hex
    command = [
        *_launcher(launcher, ranks, options),
        *([] if launcher == "dsx" else [str(REPOSITORY / "recipes" / recipe)]),
        str(config),
    ]
    # Tests compare runs with one process themselves; tests/verify/test_proof.py proves at start.
    for key, value in {"dsx.proof": "off", **settings}.items():
        command += ["--set", f"{key}={value if isinstance(value, str | Path) else json.dumps(value)}"]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as of a job in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ
        | dict(environment)
        | {_MARK: mark, "PATH": f"{_BIN}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
        # Locks of builds in the usual folder are not the tests' business.
        | {"TORCH_EXTENSIONS_DIR": str(REPOSITORY / "no-extensions")},
        text=True,
        start_new_session=True,
    )
    running = Launch(process, mark, deadline_seconds)
    try:
        yield running
    finally:
        running.close()


def launch(
    launcher: str, recipe: str, config: Path | str, settings: Mapping[str, Any], *, ranks: int = 2
) -> Ended:
    """:func:`started`, to its end."""
    with started(launcher, recipe, config, settings, ranks=ranks) as running:
        return running.end()


def records(output: Path) -> list[dict[str, Any]]:
    """Records of a run's metrics.jsonl."""
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def series(output: Path, name: str) -> dict[int, float]:
    """One metric of a run, by step."""
    return {row["train/step"]: row[name] for row in records(output) if name in row}


def rows(lines: list[str], title: str) -> dict[str, str]:
    """Label -> value of the block under ``title``."""
    found = {}
    for line in lines[lines.index(title) + 1 :]:
        if not line.startswith("  "):
            break
        label, _, value = line.strip().partition("  ")
        found[label] = value.strip()
    return found


def held_out_loss(model: Any, output: Path) -> float:
    """Mean loss of a Hugging Face model over the held-out text that a run evaluates on."""
    (folder,) = (output / "data").iterdir()
    corpus = Corpus.open(folder, sequence_length=SMALL["dsx.data.sequence_length"])
    batches = EvaluationBatches(
        corpus.held_out, micro_batch_size=1, dp=1, dp_rank=0, max_tokens=SMALL["dsx.train.eval_tokens"]
    )
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten()).item()
            for inputs, labels in batches
        ]
    assert len(losses) > 10
    return sum(losses) / len(losses)


def free_port() -> int:
    """A port that nothing listens on, outside the range of which the kernel gives ports to connections.

    From there another program's connection could take it before the ranks are up. Workers of one test run,
    whose process ids are neighbours, look in places that are not.
    """
    for port in range(20000 + 97 * os.getpid() % 10000, 32000):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port of 20000 to 32000 is free")


def _launcher(name: str, ranks: int, options: Sequence[str]) -> list[str]:
    if name == "python":
        return [sys.executable]
    if name == "dsx":
        return [str(_BIN / name), "train", "--gpus", str(ranks)]
    if name == "torchrun":
        return [str(_BIN / name), *(options or ["--standalone"]), "--nproc_per_node", str(ranks)]
    return [str(_BIN / name), "--num_accelerators", str(ranks), "--master_port", str(free_port())]
