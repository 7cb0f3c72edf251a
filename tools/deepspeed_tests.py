"""Run DeepSpeed's own pipeline tests on dsx, their bodies unchanged but for two lines, beside stock.

    python tools/deepspeed_tests.py /path/to/DeepSpeed [--json FILE] [-k EXPRESSION]

Needs a checkout of DeepSpeed's sources (its wheel has no tests), pytest 8 and, for half of the tests,
torchvision. The tests are copied to a temporary folder, once as they are and once with the import of
PipelineModule and the name of initialize changed, and both copies run on CPUs. The helpers of those tests
ask for ``torch.cpu.get_rng_state``, which torch does not have: without a GPU they get it from here, on both
sides, and ``--bare`` leaves it out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

PARTS = ("unit/pipe", "unit/runtime/pipe")
IMPORT = re.compile(
    r"^from deepspeed\.(?:runtime\.pipe\.module|pipe) import (.*\bPipelineModule\b.*)$", re.MULTILINE
)
# DeepSpeed compiles these at first use: inside a test that may take longer than the test is given.
BUILD = """
from deepspeed.accelerator import get_accelerator

for name in ("ShareMemCommBuilder", "FusedAdamBuilder"):
    get_accelerator().create_op_builder(name).load(verbose=False)
"""
ON_CPUS = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "LOCAL_SIZE": "4", "OMP_NUM_THREADS": "1"}
CPU_RNG = """
import torch

if not hasattr(torch.cpu, "get_rng_state"):
    torch.cpu.get_rng_state = lambda device=None: torch.get_rng_state()
    torch.cpu.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
"""


def main() -> int:
    """Both sides, and the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="a checkout of DeepSpeed")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--bare", action="store_true", help="do not add torch.cpu.get_rng_state")
    parser.add_argument("--only", choices=("stock", "dsx"), help="run one side alone")
    parser.add_argument("-k", default="", help="as pytest takes it")
    arguments = parser.parse_args()
    source = arguments.checkout / "tests"
    if not (source / "unit" / "pipe").is_dir():
        parser.error(f"{source}/unit/pipe is not there: give a checkout of DeepSpeed with its tests")
    subprocess.run([sys.executable, "-c", BUILD], env=os.environ | ON_CPUS, check=True)  # noqa: S603
    with tempfile.TemporaryDirectory() as folder:
        outcomes = {}
        for side in (arguments.only,) if arguments.only else ("stock", "dsx"):
            copy = Path(folder) / f"on_{side}"  # a folder called dsx would be taken for the package
            shutil.copytree(source, copy)
            if side == "dsx":
                print(f"changed lines: {change_two_lines(copy)}")
            outcomes[side] = run(copy, arguments.k, bare=arguments.bare)
    names = sorted(set().union(*outcomes.values()))
    for name in names:
        print(" ".join(f"{outcomes[side].get(name, ['absent'])[0]:8}" for side in outcomes), name)
        for side, found in outcomes.items():
            outcome, *reason = found.get(name, ["absent"])
            if reason:
                print(f"    {side} {outcome}: {reason[0]}")
    for side, found in outcomes.items():
        passed = sum(outcome[0] == "passed" for outcome in found.values())
        print(f"{side}: {passed} of {len(names)} pass")
    if arguments.json:
        arguments.json.write_text(json.dumps(outcomes, indent=1))
    return 0


def change_two_lines(tests: Path) -> int:
    """Import dsx's PipelineModule, and call dsx's initialize, wherever a pipeline is made. Lines changed."""
    changed = 0
    for path in tests.rglob("*.py"):
        text = path.read_text()
        imported = IMPORT.search(text)
        others = [] if imported is None else [n for n in imported[1].split(", ") if n != "PipelineModule"]
        builds = imported is not None or path.parts[-2:] == ("checkpoint", "common.py")
        if not builds:
            continue
        lines = "from dsx import PipelineModule"
        lines += f"\nfrom deepspeed.pipe import {', '.join(others)}" if others else ""
        text, imports = IMPORT.subn(lines, text)
        text, calls = re.subn(r"\bdeepspeed\.initialize\(", '__import__("dsx").initialize(', text)
        path.write_text(text)
        changed += imports + calls
    return changed


def run(tests: Path, expression: str, *, bare: bool) -> dict[str, list[str]]:
    """Test -> [outcome, reason]."""
    report = tests / "report.xml"
    if not bare:
        (tests / "sitecustomize.py").write_text(CPU_RNG)  # Python imports it in every process of a test
    environ = {
        **os.environ,
        **ON_CPUS,
        "PYTHONPATH": os.pathsep.join((str(tests), os.environ.get("PYTHONPATH", ""))),
    }
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "-q", f"--junitxml={report}", *PARTS]
    command += ["-k", expression] if expression else []
    done = subprocess.run(  # noqa: S603 (the tests that are asked for)
        command, cwd=tests, env=environ, capture_output=True, text=True, check=False
    )
    # DeepSpeed's tests end the whole session when one hangs; a report of what came before is then no count.
    if done.returncode not in (0, 1) or "_pytest.outcomes.Exit" in done.stdout or not report.exists():
        end = f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        raise SystemExit(f"pytest did not run to its end (exit code {done.returncode}):\n{end}")
    return dict(map(read_case, ET.parse(report).iter("testcase")))  # noqa: S314 (pytest's own)


def read_case(case: ET.Element) -> tuple[str, list[str]]:
    """A test's name and outcome in pytest's JUnit file."""
    name = f"{case.get('classname')}::{case.get('name')}"
    for kind, outcome in (("failure", "failed"), ("error", "failed"), ("skipped", "skipped")):
        found = case.find(kind)
        if found is not None:
            return name, [outcome, (found.get("message") or "").splitlines()[0][:200]]
    return name, ["passed"]


if __name__ == "__main__":
    sys.exit(main())
