"""Which modules a program of its own process loads: what needs no tensors starts fast, without torch."""

from __future__ import annotations

import subprocess
import sys

from said import own_words

HEAVY = {"datasets", "deepspeed", "numpy", "torch", "transformers", "wandb"}
DSX = "from dsx.cli.app import main; main()"


def loaded_by(program: str, *arguments: object) -> tuple[str, set[str]]:
    """What ``program`` prints, and all modules that it has loaded at its end, which must be a good one."""
    code = f"import atexit, sys\natexit.register(lambda: print('\\n', *sys.modules))\n{program}"
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, own_words(done.stderr)) == (0, "")
    printed, _, modules = done.stdout.rstrip("\n").rpartition("\n")
    return printed, set(modules.split())
