"""Time, bytes and memory of ``dsx reshard`` beside a raw copy and beside DeepSpeed's ds_to_universal.

    python tools/bench_reshard.py [--parameters 250e6] [--runs 5] [--folder DIR] [--json FILE]

Writes a checkpoint with stock DeepSpeed (bf16, ZeRO-1 over 2 ranks, AdamW: 14 bytes per parameter), then, in
turns whose order rotates from round to round:

- copy: every file of it, copied and flushed to the disk, in this process;
- dsx: ``dsx reshard`` into dsx's own format for 4 ranks of ZeRO-3, checksums read, taken and written;
- dsx-universal: ``dsx reshard --to universal``, if this version writes that format;
- ds_to_universal: DeepSpeed's program, which does not flush; what it wrote is flushed after it, on its time.

Times are of whole processes, imports included. Of dsx's also: bytes read and written as the system counts
them against the tensors' own, peak memory (resident, shared libraries included), and disk taken beyond the
output.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

Json = dict[str, Any]

RANKS = 2


def main() -> None:
    """Make the checkpoint, run the rounds, print; or be one of the processes of that."""
    arguments = _arguments()
    if arguments.make is not None:
        make(arguments.make, int(arguments.parameters), arguments.width)
        return
    if arguments.measured is not None:
        measured(arguments.measured, arguments.rest)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-reshard-") as name:
        report = bench(Path(name), int(arguments.parameters), arguments.width, arguments.runs)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    print(as_text(report))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--parameters", type=float, default=250e6, metavar="N", help="default 250e6")
    parser.add_argument("--width", type=int, default=1024, metavar="N", help="of its layers (default 1024)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="rounds (default 5)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="disk to measure (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--measured", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


def bench(folder: Path, parameters: int, width: int, runs: int) -> Json:
    """All rounds in ``folder``."""
    run_checked(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={RANKS}"),
            *(__file__, "--make", str(folder / "saved"), "--parameters", str(parameters)),
            *("--width", str(width)),
        ]
    )
    source = folder / "saved" / "tag"
    contenders: dict[str, Callable[[Path], Json]] = {
        "copy": lambda out: copied(source, out),
        "dsx": lambda out: resharded(source, out, ["--to", "tp=1,pp=1,dp=4,zero=3"]),
        "dsx-universal": lambda out: resharded(source, out, ["--to", "universal"]),
        "ds_to_universal": lambda out: stock_universal(source, out),
    }
    skipped = {}
    figures: dict[str, list[Json]] = {name: [] for name in contenders}
    order = list(contenders)
    for _ in range(runs):
        for name in [name for name in order if name not in skipped]:
            out = folder / "out"
            try:
                figures[name].append(timed(contenders[name], out))
            except subprocess.CalledProcessError as error:
                skipped[name] = str(error.stderr).strip().splitlines()[-1]
            shutil.rmtree(out, ignore_errors=True)
        order = order[1:] + order[:1]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "arguments": {"parameters": parameters, "width": width, "runs": runs},
        "source_bytes": size_of(source),
        "rounds": {name: rows for name, rows in figures.items() if name not in skipped},
        "skipped": skipped,
        "summary": summary({name: rows for name, rows in figures.items() if name not in skipped}),
    }


def timed(contender: Callable[[Path], Json], out: Path) -> Json:
    """One turn: seconds until everything is on the disk, and what the contender says of itself."""
    os.sync()
    with watched(out.parent) as disk:
        began = time.perf_counter()
        told = contender(out)
        seconds = time.perf_counter() - began
    written = size_of(out)
    return told | {
        "seconds": seconds,
        "output_bytes": written,
        "temporary_fraction": max(0.0, (disk["peak"] - disk["before"] - written) / written),
    }


def copied(source: Path, out: Path) -> Json:
    """Copy every file and flush it."""
    shutil.copytree(source, out)
    flush(out)
    return {}


def resharded(source: Path, out: Path, options: Sequence[str]) -> Json:
    """``dsx reshard`` in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        notes = Path(name, "notes.json")
        command = [sys.executable, __file__, "--measured", str(notes), "--"]
        run_checked([*command, str(source), str(out), *options, "--no-latest", "--format", "json"])
        return dict(json.loads(notes.read_text()))


def stock_universal(source: Path, out: Path) -> Json:
    """DeepSpeed's own conversion, one worker per core, then a flush."""
    count = str(os.cpu_count() or 1)
    run_checked(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"),
            *("--input_folder", str(source), "--output_folder", str(out)),
            *("--num_extract_workers", count, "--num_merge_workers", count),
        ]
    )
    flush(out)
    return {}


def measured(notes: Path, arguments: Sequence[str]) -> None:
    """Be ``dsx reshard``, and leave behind what the system counted."""
    import io
    from contextlib import redirect_stdout

    from dsx.cli.app import build

    output = io.StringIO()
    with redirect_stdout(output):
        build()(["reshard", *arguments], prog_name="dsx", standalone_mode=False)
    told = json.loads(output.getvalue())
    counted = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    status = Path("/proc/self/status").read_text().splitlines()
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    notes.write_text(
        json.dumps(
            {
                "ideal_read_bytes": told["read_bytes"],
                "ideal_write_bytes": told["write_bytes"],
                "read_fraction": int(counted["rchar"]) / told["read_bytes"],
                "write_fraction": int(counted["wchar"]) / told["write_bytes"],
                "peak_mib": peak_kib / 1024,
                "checks": told["report"]["sums_checked"] + told["report"]["tiles_checked"],
            }
        )
    )


def make(folder: Path, parameters: int, width: int) -> None:
    """On every rank: train one step with stock DeepSpeed and save."""
    import deepspeed
    import torch
    from torch import nn

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    shapes = [(width, 4 * width), (4 * width, width)]
    pairs = max(1, round(parameters / sum(rows * columns for rows, columns in shapes)))
    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes * pairs))
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, dist_init_required=True)
    x = torch.randn(1, width, dtype=torch.bfloat16)
    engine.backward(engine(x).float().square().mean())
    engine.step()
    engine.save_checkpoint(str(folder), tag="tag")


def run_checked(command: Sequence[str]) -> None:
    """Run a program; its error output is in the exception if it fails."""
    # A thread per process: programs here use several processes or threads of their own.
    environ = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run(command, env=environ, check=True, capture_output=True, text=True)  # noqa: S603


def flush(folder: Path) -> None:
    """Bring every file below ``folder`` to the disk."""
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def size_of(folder: Path) -> int:
    """Bytes of all files below ``folder``."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextmanager
def watched(folder: Path) -> Iterator[dict[str, int]]:
    """The most disk that files below ``folder`` take meanwhile, looked at ten times a second."""
    found = {"before": _taken(folder), "peak": 0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.1):
            found["peak"] = max(found["peak"], _taken(folder))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def _taken(folder: Path) -> int:
    total = 0
    try:
        entries = list(os.scandir(folder))
    except FileNotFoundError:  # it was renamed or removed since
        return 0
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            total += _taken(Path(entry.path))
            continue
        with suppress(FileNotFoundError):
            total += entry.stat(follow_symlinks=False).st_blocks * 512
    return total


def summary(rounds: dict[str, list[Json]]) -> Json:
    """Medians, and medians of the ratios within a round."""
    found: Json = {}
    for name, rows in rounds.items():
        against = {
            f"seconds_over_{other}": statistics.median(
                mine["seconds"] / theirs["seconds"] for mine, theirs in zip(rows, rounds[other], strict=True)
            )
            for other in ("copy", "ds_to_universal")
            if other in rounds and other != name
        }
        keys = [key for key in rows[0] if isinstance(rows[0][key], int | float)]
        found[name] = {key: statistics.median(row[key] for row in rows) for key in keys} | against
    return found


def machine() -> Json:
    """Where this ran."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    names = [line for line in text.splitlines() if line.startswith("model name")]
    return {
        "processor": names[0].split(":", 1)[1].strip() if names else platform.processor(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in ("torch", "deepspeed", "numpy", "xxhash")},
    }


def as_text(report: Json) -> str:
    """The figures as a table."""
    count = report["arguments"]
    gib = report["source_bytes"] / 2**30
    load = f"load {report['machine']['load']:.1f}"
    lines = [
        f"{count['parameters']:,} parameters, {gib:.2f} GiB, median of {count['runs']} rounds, {load}",
        f"{'':<17}{'seconds':>9}{'/ copy':>8}{'/ stock':>9}{'read':>8}{'written':>9}{'MiB':>7}{'disk':>8}",
    ]
    for name, row in report["summary"].items():
        cells = [
            f"{row['seconds']:>9.2f}",
            _cell(row.get("seconds_over_copy"), 8, ".3f"),
            _cell(row.get("seconds_over_ds_to_universal"), 9, ".3f"),
            _cell(row.get("read_fraction"), 8, ".4f"),
            _cell(row.get("write_fraction"), 9, ".4f"),
            _cell(row.get("peak_mib"), 7, ".0f"),
            f"{row['temporary_fraction']:>8.2%}",
        ]
        lines.append(f"{name:<17}{''.join(cells)}")
    lines += [f"{name}: left out ({reason})" for name, reason in report["skipped"].items()]
    return "\n".join(lines)


def _cell(value: float | None, width: int, style: str) -> str:
    return f"{'':>{width}}" if value is None else f"{format(value, style):>{width}}"


if __name__ == "__main__":
    main()
