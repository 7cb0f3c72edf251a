"""One command for the day that a GPU is there: is dsx right on it, how fast, how large, how well predicted?

    python tools/gpu_day.py [--out DIR] [--resume DIR] [--only SECTION ...] [--again] [--minutes 9] [--dry]

Sections: machine, correctness, ranks, precision, memory, speed, kernels; --list names their cases. Each case
runs in a worker process with a time limit of its own, so that one that crashes, hangs or runs out of memory
costs its own figure alone. What is known is in DIR at any time: a JSON file per section, written aside and
renamed, and at the end report.md. A run ends before its minutes are over; the next one, with the same DIR or
with --resume and a copy of it, does what is left, and with --again what failed, too.

Several ranks share a GPU where there are not enough. NCCL refuses that within one host, so each rank says
that it is a host of its own (NCCL_HOSTID), and they talk through sockets. Where that does not work either,
gloo takes the place of NCCL, and pipelines, which gloo cannot run between GPUs, are left out and named.

A machine that is lent without a network brings Python, torch, transformers and triton. The rest travels as
wheels, which --wheels fetches: CONTRIBUTING.md has the commands. Exit codes: 0 when all is done, 1
when a case failed, 2 when packages are missing
or a folder is none to use, 3 when cases are left for the next run.

--dry runs all of it on the CPU with gloo, at sizes that say nothing about speed, as the tests do.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from gpu_sections.cases import EXCHANGES, FUSED_ADAM, all_cases  # noqa: E402 (found there)
from gpu_sections.report import as_markdown  # noqa: E402
from gpu_sections.worker import Case, work  # noqa: E402

Json = dict[str, Any]

SECTIONS = ("machine", "correctness", "ranks", "precision", "memory", "speed", "kernels")
WHEELS = (
    "annotated-types", "cffi", "cryptography", "datasets", "deepspeed", "dill", "hjson", "multiprocess",
    "pycparser", "pydantic", "pydantic_core", "typing_inspection",
)  # fmt: skip
"""What dsx and DeepSpeed need and such a machine lacks; constraints.txt says which versions."""

LOOK_SECONDS = 0.1
REPORT_SECONDS = 5.0
_START_SECONDS = 180.0
_TAIL = 4000
_BUILDING = frozenset({"speed", "kernels"})
_APART = (EXCHANGES, FUSED_ADAM)
"""Cases by which workers are told what they may use."""
_PLATFORMS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014", "manylinux1")


def main() -> int:
    """Run what is left, write the report; 1 if a case failed, 3 if some are left for the next run."""
    arguments = _arguments()
    if arguments.worker is not None:
        work(arguments.worker)
    if arguments.wheels is not None:
        return fetch_wheels(arguments.wheels)
    cases = _chosen(all_cases(dry=arguments.dry), arguments.only, arguments.matching)
    if arguments.list:
        for case in cases:
            print(f"{case.section}: {case.name}")
        return 0
    lacking = missing()
    if lacking:
        print(f"gpu_day: not installed here: {', '.join(lacking)}; --help says how to bring it")
        return 2
    wrong = _unusable(arguments.out, arguments.resume, dry=arguments.dry)
    if wrong:
        print(f"gpu_day: {wrong}")
        return 2
    arguments.out.mkdir(parents=True, exist_ok=True)
    day = Day(arguments.out, arguments.resume or arguments.out, dry=arguments.dry)
    began = time.time()
    left = day.left(cases, again=arguments.again)
    with tempfile.TemporaryDirectory(prefix="gpu-day-extensions-", ignore_cleanup_errors=True) as folder:
        # What an earlier run was building when it ended would be waited for, for ever.
        os.environ["TORCH_EXTENSIONS_DIR"] = folder
        run_cases(day, left, ends_at=began + 60 * arguments.minutes - REPORT_SECONDS)
    remaining = len(day.left(cases, again=False))
    text = as_markdown(day.sections, remaining=remaining, seconds=time.time() - began, command=sys.argv[1:])
    write(arguments.out / "report.md", text)
    print(text)
    return 1 if any("failed" in result for _, _, result in day.results()) else 3 if remaining else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_day"), help="(default runs/gpu_day)")
    parser.add_argument("--resume", type=Path, metavar="DIR", help="where an earlier run's files lie")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS, help="(default all)")
    parser.add_argument(
        "--matching", default="", metavar="PATTERN", help="only cases in whose name this is found"
    )
    parser.add_argument("--again", action="store_true", help="run cases again that failed")
    parser.add_argument("--minutes", type=float, default=9.0, help="end before so many (default 9)")
    parser.add_argument("--dry", action="store_true", help="on the CPU, at sizes of no meaning")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--wheels", type=Path, metavar="DIR", help="fetch what such a machine lacks, and end")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def _unusable(out: Path, resume: Path | None, *, dry: bool) -> str:
    """Why results would be lost or not found; nothing if all is well."""
    if resume is not None and not resume.is_dir():
        return f"--resume {resume}: not a folder; give the one where an earlier run's files lie"
    for file in (file for name in SECTIONS if (file := out / f"{name}.json").exists()):
        try:
            kept = json.loads(file.read_text())["dry"]
        except (OSError, ValueError, KeyError, TypeError):
            return f"{file}: not readable as results, and would be overwritten; give another --out"
        if kept != dry:
            kind = "dry" if kept else "real"
            return f"{file}: results of a {kind} run, which would be overwritten; give another --out"
    return ""


def _chosen(cases: Sequence[Case], sections: Sequence[str], pattern: str) -> list[Case]:
    """The cases of some sections whose names match, and the builds and exchanges that they need."""
    chosen = [case for case in cases if case.section in sections and re.search(pattern, case.name)]
    builds = any(case.section in _BUILDING for case in chosen)
    several = any(case.section == "ranks" for case in chosen)
    needed = {name for name, wanted in ((FUSED_ADAM, builds), (EXCHANGES, several)) if wanted}
    return [case for case in cases if case in chosen or case.name in needed]


def missing() -> list[str]:
    """What dsx needs and this Python lacks, of what the cases use: all but W&B. Others check versions.

    What comes as a wheel comes without what it needs, so that it is asked for that as well.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting, seen, found = list(project["dependencies"]), {"wandb"}, []
    brought = {name.replace("-", "_") for name in WHEELS}
    while waiting:
        needed = Requirement(waiting.pop(0))
        if needed.name in seen or (needed.marker is not None and not needed.marker.evaluate({"extra": ""})):
            continue
        seen.add(needed.name)
        try:
            needs = metadata.requires(needed.name) or ()
        except metadata.PackageNotFoundError:
            found.append(str(needed))
        else:
            waiting += needs if needed.name.replace("-", "_") in brought else ()
    return found


def fetch_wheels(folder: Path) -> int:
    """Wheels for Python 3.12 on x86-64 Linux; DeepSpeed, which is published as source, is built."""
    platforms = [word for name in _PLATFORMS for word in ("--platform", f"{name}_x86_64")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    pinned = ["-q", "--no-deps", "-c", str(ROOT / "constraints.txt")]
    target = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    others = [name for name in WHEELS if name != "deepspeed"]
    commands = (
        [*pip, "download", *pinned, "-d", str(folder), *target, *others],
        [*pip, "wheel", *pinned, "--no-build-isolation", "-w", str(folder), "deepspeed"],
    )
    for command in commands:
        code = subprocess.run(command, env={**os.environ, "DS_BUILD_OPS": "0"}, check=False).returncode  # noqa: S603
        if code:
            return code
    total = sum(file.stat().st_size for file in folder.glob("*.whl"))
    print(f"{len(list(folder.glob('*.whl')))} wheels, {total / 2**20:.1f} MiB, in {folder}")
    return 0


class Day:
    """The results so far, kept in files.

    Args:
        out: Where they are written.
        earlier: Where those of an earlier run are read from.
        dry: Results of a dry run and of a real one are never mixed.
    """

    def __init__(self, out: Path, earlier: Path, *, dry: bool) -> None:
        self._out, self.dry = out, dry
        self.sections: dict[str, dict[str, Json]] = {}
        for name in SECTIONS:
            with suppress(OSError, ValueError, KeyError):
                content = json.loads((earlier / f"{name}.json").read_text())
                if content["dry"] == dry:
                    self.sections[name] = content["cases"]
        for name in self.sections:
            self._save(name)

    def results(self) -> Iterator[tuple[str, str, Json]]:
        """Section, case and result."""
        for section, found in self.sections.items():
            for name, result in found.items():
                yield section, name, result

    def left(self, cases: Sequence[Case], *, again: bool) -> list[Case]:
        """The cases without a result; a build is done again for those that need it."""
        undone = [case for case in cases if self._undone(case, again)]
        builds = any(case.section in _BUILDING for case in undone)
        setup = [case for case in cases if case.name == FUSED_ADAM and builds and case not in undone]
        return undone if not setup else sorted([*undone, *setup], key=cases.index)

    def _undone(self, case: Case, again: bool) -> bool:
        result = self.sections.get(case.section, {}).get(case.name)
        return result is None or (again and "failed" in result)

    def add(self, section: str, name: str, result: Json) -> None:
        """Keep a result, on disk too."""
        self.sections.setdefault(section, {})[name] = result
        self._save(section)

    def _save(self, section: str) -> None:
        content = {"dry": self.dry, "cases": self.sections[section]}
        write(self._out / f"{section}.json", json.dumps(content, indent=1) + "\n")

    @property
    def backend(self) -> str | None:
        """What ranks that share a device use; None while it is not known."""
        result = self.sections.get("ranks", {}).get(EXCHANGES)
        return None if result is None or "failed" in result else str(result["backend"])


def write(path: Path, text: str) -> None:
    """Aside, and then renamed."""
    aside = path.with_name(f".{path.name}.aside")
    with aside.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)


def run_cases(day: Day, cases: Sequence[Case], *, ends_at: float) -> None:
    """Run cases in order, in a worker after the other."""
    for _, group in groupby(cases, key=lambda case: (case.ranks, case.name if case.name in _APART else "")):
        todo = list(group)
        if todo[0].name == EXCHANGES:
            _find_backend(day, todo[0], ends_at)
        elif todo[0].ranks > 1 and day.backend is None:
            for case in todo if EXCHANGES in day.sections.get("ranks", {}) else ():
                day.add(case.section, case.name, {"failed": f"needs what failed: {EXCHANGES}"})
        else:
            backend = ("gloo" if day.dry else "nccl") if todo[0].ranks == 1 else str(day.backend)
            _in_workers(day, todo, backend, ends_at)


def _find_backend(day: Day, case: Case, ends_at: float) -> None:
    """NCCL if ranks can use it here, gloo else."""
    for backend in ("gloo",) if day.dry else ("nccl", "gloo"):
        _in_workers(day, [case], backend, ends_at)
        if day.backend is not None:
            return


def _in_workers(day: Day, cases: Sequence[Case], backend: str, ends_at: float) -> None:
    todo = list(cases)
    if backend == "gloo" and not day.dry:
        for case in [case for case in todo if case.arguments.get("layout", {}).get("pp", 1) > 1]:
            todo.remove(case)
            day.add(case.section, case.name, {"not_here": "gloo sends nothing from a GPU, and NCCL refuses"})
    while todo and time.time() < ends_at:
        done = _one_worker(day, todo, backend, ends_at)
        if not done:
            return
        todo = [case for case in todo if case.name not in done]


def _one_worker(day: Day, cases: Sequence[Case], backend: str, ends_at: float) -> set[str]:
    """Start the ranks, follow them to their end; the names of the cases that have a result now."""
    with tempfile.TemporaryDirectory(prefix="gpu-day-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        job = {
            "dry": day.dry,
            "backend": backend,
            "ends_at": ends_at,
            "cases": [asdict(case) for case in cases],
            "fused_adam": "build_seconds" in day.sections.get("speed", {}).get(FUSED_ADAM, {}),
        }
        (folder / "job.json").write_text(json.dumps(job))
        ranks = cases[0].ranks
        processes = [_start(folder, rank, ranks, dry=job["dry"]) for rank in range(ranks)]
        try:
            return _follow(day, folder, cases, processes, ends_at)
        finally:
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _start(folder: Path, rank: int, ranks: int, *, dry: bool) -> subprocess.Popen[bytes]:
    environ = {
        **os.environ,
        "RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "CROSS_RANK": "0", "CROSS_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",  # DeepSpeed reads it; ranks meet in a file
        "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if dry:
        environ |= {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(folder / "job.json")]
    with (folder / f"rank{rank}.log").open("w") as log:
        return subprocess.Popen(  # noqa: S603
            command, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )


def _follow(
    day: Day,
    folder: Path,
    cases: Sequence[Case],
    processes: Sequence[subprocess.Popen[bytes]],
    ends_at: float,
) -> set[str]:
    """Take results as they come; a case that ends its worker, or that is late, has failed."""
    named = {case.name: case for case in cases}
    events, read, done = folder / "events", 0, set()
    current, late = None, time.time() + _START_SECONDS
    while True:
        codes = [process.poll() for process in processes]
        over = any(codes) or None not in codes
        text = events.read_text() if events.exists() else ""
        lines = text[: text.rfind("\n") + 1].splitlines()  # the last may still be being written
        for event in map(json.loads, lines[read:]):
            if "began" in event:
                current = named[event["began"]]
                late = event["at"] + current.seconds
                print(f"{time.strftime('%H:%M:%S')} {current.section}: {current.name}", file=sys.stderr)
            else:
                day.add(event["section"], event["ended"], event["result"])
                done.add(event["ended"])
                current, late = None, time.time() + _START_SECONDS
        read = len(lines)
        if over or time.time() > min(late, ends_at):
            break
        time.sleep(LOOK_SECONDS)
    failed = current
    if failed is None and not done and any(codes):
        failed = cases[0]  # not even begun
    if failed is not None and (over or time.time() > late):
        why = "its process died" if over else f"not done in {failed.seconds:.0f} s"
        day.add(failed.section, failed.name, {"failed": why, "trace": _logs(folder)})
        done.add(failed.name)
    return done


def _logs(folder: Path) -> str:
    logs = sorted(folder.glob("rank*.log"))
    return "\n".join(f"--- {log.stem}\n{log.read_text(errors='replace')[-_TAIL:]}" for log in logs)


if __name__ == "__main__":
    raise SystemExit(main())
