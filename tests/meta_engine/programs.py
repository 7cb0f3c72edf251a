"""Programs that run the engine on paper, each in a process: it changes torch and DeepSpeed for good."""

import json
import os
import subprocess
import sys
from pathlib import Path

_BEGIN = """
import json, os, sys, warnings
warnings.filterwarnings("ignore")
import torch
torch.set_num_threads(1)
given = json.loads(sys.argv[1])
"""

_END = """
print(json.dumps(found))
sys.stdout.flush()
os._exit(0)  # fake tensors outlive their mode
"""


def start(program, *given):
    """Start a program: text that makes ``found`` of ``given``, or a file that prints lines of JSON."""
    what = [str(program)] if isinstance(program, Path) else ["-c", _BEGIN + program + _END]
    return subprocess.Popen(
        [sys.executable, *what, *map(json.dumps, given)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "LOCAL_RANK": "0",
            "PYTHONPATH": str(Path(__file__).parents[1]),
        },
    )


def results(process):
    """What a program printed."""
    try:
        printed, complaints = process.communicate(timeout=300)
    finally:
        process.kill()
    assert not process.returncode, complaints[-3000:]
    return [json.loads(line) for line in printed.splitlines() if line.startswith(("{", "[["))]


def result(program, *given):
    """The one thing that a program prints."""
    return results(start(program, *given))[-1]
