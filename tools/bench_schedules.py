"""Every engine's pipeline schedules beside each other: measured, simulated, in theory.

    python tools/bench_schedules.py [--ranks 4,8] [--micro-batches p,2p,4p] [--wire 0.25] [--only zbv,torch]
    python tools/bench_schedules.py --real [--ranks 2,4]
    python tools/bench_schedules.py --parts 1,1.4,1,1.4,1,1.4,1,1.4 --micro-batches 8 --files best.csv
    python tools/bench_schedules.py --ranks 2 --parts 4,5 --micro-batches 4 --files best.csv@2:2:2:3

Layers sleep instead of computing (a micro-batch takes a rank FORWARD ms forward, as long again for the input
gradient and for the weight gradient), so that many ranks fit on few cores and what is measured is schedule
and engine. Each sleep is shortened by what the latest ones overshot, in the median. With --wire every engine
also runs with messages that arrive late, by that share of FORWARD. With --parts stages differ, and FORWARD is
the mean; with --files schedules from CSV files run as well, such as those of dsx schedule search, each with
its own cut of the model if that follows an @. With --real a small GPT-2 computes in place of sleeping.

The engines are dsx's, stock DeepSpeed's (1F1B, DualPipeV) and torch.distributed.pipelining's. They take turns
in the same processes, round by round, each round beginning with another one. A step ends when the last rank
is done, with its optimizer's step. With --real all train the same blocks, transformers' own.

Columns: the median step and its spread (slowest less fastest); the processor time of all ranks for a step
(the lower quartile of the rounds, which a busy machine disturbs least); by the published formula; simulated
with free transfers in the engine's own order of actions; how much longer than that the engine took
(excess); bubble over ideal time, measured and simulated; speed over stock DeepSpeed's 1F1B, measured and
simulated. With --wire: the median step, what it grew by in delays per micro-batch, measured and simulated,
and the speed over stock; and dsx's schedules also with the options that hide such delays ("wide"). With
--real nothing can be simulated but bubble and speed, for three parts of equal length.

--check ends with 1 if a size misses a bound of schedule_bench/thresholds.py, and prints every bound.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def main() -> int:
    """Start the ranks of each pipeline degree and print their tables; or be one of those ranks."""
    arguments = _arguments()
    if arguments.worker is not None:
        work(arguments)
        return 0
    ranks = arguments.ranks or [2 if arguments.real else 4]
    load = os.getloadavg()[0]
    tables = [table for count in ranks for table in launch(count)]
    options = {"rounds": arguments.rounds, "forward_ms": arguments.forward_ms, "wire": arguments.wire}
    report = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *sys.argv]),
        "cores": os.cpu_count(),
        "load_average_before": load,
        **{package: metadata.version(package) for package in ("torch", "deepspeed", "dsx")},
        **options,
        "tables": tables,
    }
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return _print(report, options, check=arguments.check)


def _print(report: dict[str, Any], options: dict[str, Any], *, check: bool) -> int:
    from schedule_bench import table, thresholds

    print(", ".join(f"{key} {report[key]}" for key in ("date", "cores", "load_average_before", "torch")))
    for part in report["tables"]:
        print(f"\n{table.as_text(part, options)}")
    if not check:
        return 0
    outcomes = [
        outcome for part in report["tables"] for outcome in thresholds.outcomes(part, options["wire"])
    ]
    print("", *outcomes, sep="\n")
    return 0 if all(outcome.met for outcome in outcomes) else 1


def launch(ranks: int) -> list[dict[str, Any]]:
    """Run this program's own arguments on so many ranks; rank 0's tables."""
    with tempfile.TemporaryDirectory() as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        command += [__file__, *sys.argv[1:], f"--ranks={ranks}", f"--worker={result}"]
        with log.open("w") as file:
            done = subprocess.run(  # noqa: S603
                command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=file, stderr=file, check=False
            )
        if done.returncode != 0:
            sys.stderr.write(log.read_text())
            raise SystemExit(done.returncode)
        return list(json.loads(result.read_text()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--ranks", type=_numbers, metavar="P,...", help="pipeline degrees (default 4; with --real 2)")
    add(
        "--micro-batches",
        type=_sizes,
        metavar="M,...",
        help="per step: numbers, or p, 2p, 4p for multiples of the degree (default p,2p; with --real 2,4,8)",
    )
    add("--forward-ms", type=float, default=16.0, metavar="MS", help="a rank's forward (default 16)")
    add("--wire", type=float, default=0.0, metavar="SHARE", help="a message's delay in forwards (default 0)")
    add(
        "--parts",
        type=_times,
        default=(),
        metavar="T,...",
        help="where stages differ: relative times of the model's parts, equally many to every virtual stage",
    )
    add(
        "--files",
        type=lambda text: tuple(map(_file, text.split(","))),
        default=(),
        metavar="CSV[@T:...],...",
        help="schedules from files, as dsx schedule search writes them, all for the one size that runs, and "
        "their own parts",
    )
    add("--rounds", type=int, default=5, metavar="N", help="turns of every engine (default 5)")
    add(
        "--only",
        type=lambda text: text.split(","),
        default=[],
        metavar="NAME,...",
        help="engines: whole names or words of them, as in 'zbv,torch interleaved'; stock 1F1B always runs",
    )
    add("--real", action="store_true", help="compute instead of sleeping, on two ranks")
    add("--hidden", type=int, default=128, metavar="N", help="width of the real model (default 128)")
    add("--sequence-length", type=int, default=96, metavar="N", help="its tokens per sample (default 96)")
    add("--json", type=Path, metavar="FILE", help="write every figure there")
    add("--check", action="store_true", help="hold the figures against schedule_bench/thresholds.py")
    add("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.real and arguments.wire:
        parser.error("--wire delays by a share of a sleeping forward: leave it out with --real")
    if arguments.real and (arguments.parts or arguments.files):
        parser.error("--parts and --files are for sleeping layers: leave them out with --real")
    if arguments.micro_batches is None:
        arguments.micro_batches = _sizes("2,4,8" if arguments.real else "p,2p")
    return arguments


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _times(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


def _file(text: str) -> tuple[str, tuple[float, ...]]:
    name, _, parts = text.partition("@")
    return name, _times(parts.replace(":", ",")) if parts else ()


def _sizes(text: str) -> list[tuple[int, int]]:
    """Each size as (factor of the pipeline degree, constant): "8" is (0, 8), "2p" is (2, 0)."""
    sizes = []
    for word in text.split(","):
        match = re.fullmatch(r"(\d*)(p?)", word)
        if match is None or not word:
            raise argparse.ArgumentTypeError(f"{word!r} is neither a number nor a multiple of p")
        sizes.append((int(match[1] or 1), 0) if match[2] else (0, int(match[1])))
    return sizes


def work(arguments: argparse.Namespace) -> None:
    """Be one rank; rank 0 writes the tables."""
    from schedule_bench import measure, real

    (ranks,) = arguments.ranks
    job = measure.Job(
        ranks=ranks,
        micro_batches=tuple(factor * ranks + number for factor, number in arguments.micro_batches),
        forward_seconds=arguments.forward_ms / 1000,
        wire_share=arguments.wire,
        rounds=arguments.rounds,
        only=tuple(arguments.only),
        parts=arguments.parts,
        files=arguments.files,
        real=real.Sizes(hidden=arguments.hidden, sequence_length=arguments.sequence_length)
        if arguments.real
        else None,
    )
    tables = measure.work(job, arguments.worker.parent)
    if int(os.environ["RANK"]) == 0:
        arguments.worker.write_text(json.dumps(tables))


if __name__ == "__main__":
    sys.exit(main())
