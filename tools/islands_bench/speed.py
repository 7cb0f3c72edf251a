"""Tokens/s and bytes of systems that train over a slow link, in turn."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from islands_bench.links import ADDRESSES, Pace, connected, inside

TOOLS = Path(__file__).parents[1]
_WARM = 4  # PowerSGD begins after two


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What every system computes in a step: ``rows`` samples of ``length`` tokens at each of two ends."""

    model: dict[str, Any]
    rows: int
    length: int


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """Which of :data:`islands_bench.systems.SYSTEMS`, and its options."""

    name: str
    options: dict[str, Any]

    @classmethod
    def of(cls, text: str) -> System:
        """``name:key=value,...`` as it stands on the command line.

        >>> System.of("islands:every=10,wire=int8").options
        {'every': 10, 'wire': 'int8'}
        """
        name, _, rest = text.partition(":")
        pairs = [word.partition("=") for word in rest.split(",") if word]
        return cls(name=name, options={key: int(v) if v.isdigit() else v for key, _, v in pairs})

    def __str__(self) -> str:
        return ", ".join([self.name, *(f"{key} {value}" for key, value in self.options.items())])

    def steps(self, fewest: int, fewest_synchronous: int) -> tuple[int, int]:
        """Steps before the time is taken, and those that are measured: whole rounds."""
        every = self.options.get("every")
        if every is None:
            return _WARM, fewest_synchronous
        return every + self.options.get("delay", 0), every * -(-fewest // every)


def measured(
    system: System, load: Load, pace: Pace, steps: tuple[int, int], extra_path: Path | None
) -> dict[str, Any]:
    """The figures of a system over a link.

    Args:
        system: Which.
        load: What it computes.
        pace: Of the link.
        steps: As :meth:`System.steps` gives them.
        extra_path: A folder of packages besides.

    Returns:
        tokens_per_second of both ends together; undisturbed, the same from the fastest quarter of steps;
        bytes, that an end sends for a step, and cpu, processor seconds of an end for a step, means of both;
        median, a step's seconds; rounds, those that end 0 reports; losses, of end 0.
    """
    path = [str(folder) for folder in (TOOLS.parent, TOOLS, extra_path) if folder is not None]
    path += [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    environ = os.environ | {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environ.pop(name, None)
    warm, count = steps
    with tempfile.TemporaryDirectory() as folder, connected(pace) as spaces:
        running, files = [], [Path(folder, f"{rank}.json") for rank in range(2)]
        for rank, (space, file) in enumerate(zip(spaces, files, strict=True)):
            job = asdict(load) | {"system": system.name, "options": system.options, "rank": rank}
            job |= {"warm": warm, "steps": count}
            command = [sys.executable, "-m", "islands_bench.systems", json.dumps(job), str(file)]
            with file.with_suffix(".log").open("w") as log:
                running.append(
                    subprocess.Popen(  # noqa: S603
                        inside(space, ADDRESSES[rank], command),
                        stdout=log,
                        stderr=log,
                        env=environ,
                        cwd=folder,
                    )
                )
        try:
            codes = [process.wait() for process in running]
        finally:
            for process in running:
                process.kill()
        if any(codes):
            raise RuntimeError("\n".join(file.with_suffix(".log").read_text() for file in files))
        ends = [json.loads(file.read_text()) for file in files]
    return _summary(ends, 2 * load.rows * load.length, count, system.options.get("every", 1))


def _summary(ends: list[Mapping[str, Any]], tokens: int, steps: int, every: int) -> dict[str, Any]:
    return {
        "tokens_per_second": tokens * steps / max(end["wall"] for end in ends),
        "undisturbed": tokens / min(_undisturbed(end["seconds"], every) for end in ends),
        "bytes": statistics.fmean(end["sent_bytes"] for end in ends) / steps,
        "cpu": statistics.fmean(end["cpu"] for end in ends) / steps,
        "median": statistics.median(ends[0]["seconds"]),
        "rounds": ends[0]["rounds"],
        "losses": ends[0]["losses"],
    }


def _undisturbed(seconds: list[float], every: int) -> float:
    """Seconds of a step where other programs disturb least: the first quartile of steps of its kind.

    Steps are of two kinds: the slowest of each round, which waits for the link, and the others.
    """
    rounds = [sorted(seconds[at : at + every]) for at in range(0, len(seconds), every)]
    slowest, others = [its[-1] for its in rounds], [one for its in rounds for one in its[:-1]]
    return (_fast(slowest) + (every - 1) * (_fast(others) if others else 0.0)) / every


def _fast(seconds: list[float]) -> float:
    return sorted(seconds)[len(seconds) // 4]
