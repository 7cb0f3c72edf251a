"""kill -9 in the middle of conversions and saves, and single bits flipped: what is left, and what is noticed.

    python tools/bench_faults.py [--kills 100] [--saves 100] [--flips 1000] [--seed 0] [--json FILE]

- Conversions of a checkpoint (12 bytes per parameter, in dsx's format) to each format, in a process that
  kills itself at a random call of the system (of those that write, flush, rename, open or delete) or is
  killed after a random time. Then: is there no target, or a whole one, byte for byte that of an undisturbed
  conversion? The same is run again, beside what the kill left: is that whole?
- Saves of a training run of two ranks, which alternately overwrite a checkpoint and make a new one, in the
  foreground and the background; one rank kills itself, the other is killed after. Then: does the file
  `latest` name a checkpoint, whole by its checksums, with the states of the step that it says?
- Flips of one bit of a tensor in a small checkpoint of each format: does a conversion of it, or does
  `dsx inspect --verify`, notice and name the tensor? A conversion does not read what it has no use for, as
  the master of a weight that is fp32 itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from mmap import mmap
from pathlib import Path
from typing import Any

Json = dict[str, Any]

MODEL: Json = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
SMALL: Json = MODEL | {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 2}
CALLS = ("pwrite", "fsync", "fdatasync", "rename", "replace", "open", "unlink", "ftruncate", "mkdir")
TARGETS: dict[str, Json] = {
    "dsx": {"format": "dsx", "degrees": {"tensor": 2, "pipeline": 2, "data": 2, "zero": 3}},
    "deepspeed": {"format": "deepspeed", "degrees": {"data": 2, "zero": 1}},
    "deepspeed-3": {"format": "deepspeed", "degrees": {"data": 3, "zero": 3}},
    "deepspeed-pp": {"format": "deepspeed", "degrees": {"data": 1, "zero": 1, "pipeline": 2, "tensor": 2}},
    "universal": {"format": "universal", "degrees": {"data": 1, "zero": 1}},
    "dcp": {"format": "dcp", "degrees": {"data": 2}},
    "hf": {"format": "hf", "degrees": {}},
}


def main() -> None:
    """Run what is asked for, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--kills", type=int, default=100, metavar="N", help="of conversions (default 100)")
    parser.add_argument("--saves", type=int, default=100, metavar="N", help="kills of saves (default 100)")
    parser.add_argument("--flips", type=int, default=1000, metavar="N", help="bits (default 1000)")
    parser.add_argument("--seed", type=int, default=0, help="of everything random (default 0)")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="disk to use (default: the system's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    arguments = parser.parse_args()
    parts: dict[str, Callable[[Path, int, random.Random], Json]] = {
        "conversions": killed_conversions,
        "flips": flips,
        "saves": killed_saves,  # last: it loads torch, which forks would share
    }
    counts = {"conversions": arguments.kills, "saves": arguments.saves, "flips": arguments.flips}
    report: Json = {"seed": arguments.seed}
    for name, part in parts.items():
        if counts[name]:
            with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="bench-faults-") as folder:
                report[name] = part(Path(folder), counts[name], random.Random(arguments.seed))  # noqa: S311
            print(f"{name}: {json.dumps(report[name])}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")


class Disturbance:
    """Counts a process's calls of the system; may kill it at one of them."""

    def __init__(self) -> None:
        self._memory = mmap(-1, 8)

    def reset(self) -> None:
        """Forget what was counted."""
        self._memory[:] = bytes(8)

    @property
    def calls(self) -> int:
        """Calls so far, in all processes."""
        return int.from_bytes(self._memory[:8], "little")

    def watch(self, last: int | None) -> None:
        """From here on count this process's calls, and make call ``last`` its last."""
        for name in CALLS:
            setattr(os, name, self._counted(getattr(os, name), last))

    def _counted(self, call: Callable[..., Any], last: int | None) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            self._memory[:8] = (self.calls + 1).to_bytes(8, "little")
            if self.calls == last:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return counted


def started(work: Callable[[], None]) -> int:
    """A child that does ``work`` and nothing else."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def forked(work: Callable[[], None], *, seconds: float | None = None) -> int:
    """Run ``work`` in a child, killed after ``seconds``; the signal that ended it, or 0."""
    child = started(work)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise SystemExit("bench_faults: a process failed; see above")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def made(folder: Path, config: Json, chance: random.Random) -> Path:
    """A checkpoint in dsx's format: random bits in every state, and the facts of a run."""
    from dsx.checkpoint.catalog import Catalog, Entry, Piece
    from dsx.checkpoint.execute import ConversionOptions
    from dsx.checkpoint.pieces import contiguous
    from dsx.checkpoint.reshard import WantedTarget, prepare
    from dsx.models.hf_config import model_spec
    from dsx.models.params import param_specs

    specs = param_specs(model_spec(config))
    plain = folder / "plain"
    plain.mkdir()
    entries, at = [], 0
    with (plain / "bits").open("wb") as file:
        for spec in specs:
            for state in ("weight", "exp_avg", "exp_avg_sq"):
                piece = Piece("bits", at, (0,) * len(spec.shape), spec.shape, contiguous(spec.shape))
                entries.append(
                    Entry(name=spec.name, state=state, shape=spec.shape, dtype="float32", pieces=(piece,))
                )
                at += file.write(chance.randbytes(4 * spec.numel))
    group = {"names": [spec.name for spec in specs], "step": 5, "lr": 1e-3}
    facts = {"step": 5, "optimizer": "AdamW", "param_groups": [group], "hf_config": config, "zero_stage": 1}
    source = Catalog(root=plain, format="plain", entries=tuple(entries), facts=facts, specs=specs)
    prepare(source, folder / "source", WantedTarget()).run(ConversionOptions())
    shutil.rmtree(plain)
    return folder / "source"


def convert(source: Path, target: Path, wanted: Json) -> None:
    """``dsx reshard``, without its command line."""
    from dsx.checkpoint.execute import ConversionOptions
    from dsx.checkpoint.layouts import TargetDegrees
    from dsx.checkpoint.open import open_checkpoint
    from dsx.checkpoint.reshard import WantedTarget, prepare

    asked = WantedTarget(format=wanted["format"], degrees=TargetDegrees(**wanted["degrees"]))
    prepare(open_checkpoint(source), target, asked).run(ConversionOptions(workers=2, point_latest=False))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def killed_conversions(folder: Path, count: int, chance: random.Random) -> Json:
    """Kill conversions; see the module."""
    source, watcher = made(folder, MODEL, chance), Disturbance()
    reference: dict[str, tuple[dict[str, bytes], int, float]] = {}
    found: Counter[str] = Counter()
    for number in range(count):
        name = list(TARGETS)[number % len(TARGETS)]
        target, wanted = folder / "out", TARGETS[name]

        def work(last: int | None = None, target: Path = target, wanted: Json = wanted) -> None:
            watcher.watch(last)
            convert(source, target, wanted)

        if name not in reference:
            watcher.reset()
            began = time.monotonic()
            forked(work)
            seconds = time.monotonic() - began
            reference[name] = (contents(target), watcher.calls, seconds)
            shutil.rmtree(target)
        expected, calls, seconds = reference[name]
        watcher.reset()
        if number % 2:
            last = chance.randint(1, calls)
            forked(lambda last=last, work=work: work(last))  # type: ignore[misc]
        else:
            forked(work, seconds=chance.uniform(0, 1.1 * seconds))
        whole = target.exists() and contents(target) == expected
        found["torn" if target.exists() and not whole else "whole" if whole else "absent"] += 1
        if not target.exists():
            forked(work)
            found["again" if contents(target) == expected else "again, other bytes"] += 1
        shutil.rmtree(target)
        leftover = [path.name for path in folder.iterdir() if path != source]
        found["leftover"] += bool(leftover)
        for left in leftover:
            shutil.rmtree(folder / left)
    sizes = {name: sum(map(len, one[0].values())) for name, one in reference.items()}
    return {"kills": count, "found": dict(found), "bytes": sizes}


def flip(path: Path, at: int, chance: random.Random) -> Callable[[], None]:
    """Flip a bit of byte ``at`` and leave no other trace; a call that puts it back."""
    before, times = path.read_bytes(), path.stat()

    def write(data: bytes) -> None:
        path.write_bytes(data)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    write(before[:at] + bytes([before[at] ^ 1 << chance.randrange(8)]) + before[at + 1 :])
    return lambda: write(before)


def flips(folder: Path, count: int, chance: random.Random) -> Json:
    """Flip bits; see the module."""
    from dsx.checkpoint.execute import ConversionOptions
    from dsx.checkpoint.open import open_checkpoint
    from dsx.checkpoint.read import verify
    from dsx.checkpoint.reshard import WantedTarget, prepare
    from dsx.errors import CheckpointError
    from dsx.models.hf_config import model_spec
    from dsx.models.params import param_specs

    source = made(folder, SMALL, chance)
    homes = {name: spec.name for spec in param_specs(model_spec(SMALL)) for name in spec.hf}
    report: Json = {}
    for name, wanted in TARGETS.items():
        convert(source, folder / name, wanted)
        catalog = open_checkpoint(folder / name)
        blank = replace(catalog, facts={key: v for key, v in catalog.facts.items() if key != "param_groups"})
        found: Counter[str] = Counter()
        for number in range(-(-count // len(TARGETS))):
            entry = chance.choice([one for one in catalog.entries if one.pieces])
            piece = chance.choice([one for one in entry.pieces if one.replica == 0])
            used = {entry.key}
            restore = flip(
                folder / name / piece.file,
                chance.randrange(piece.offset, piece.stop(entry.item_bytes)),
                chance,
            )
            try:
                if number % 2:
                    conversion = prepare(blank, folder / "out", WantedTarget())
                    used = {job.source.key for job in conversion.plan.jobs}
                    conversion.run(ConversionOptions(workers=1))
                    shutil.rmtree(folder / "out")
                    said = ""
                else:
                    said = "; ".join(error.where for error in verify(catalog))
            except CheckpointError as error:
                said = error.where
            # Of Hugging Face's folders all is read, by a conversion under dsx's names.
            named = entry.name in said or (name == "hf" and f" {homes[entry.name]}" in said)
            missed = "not noticed" if entry.key in used or name == "hf" else "not read"
            found["named" if named else "noticed, among others" if said else missed] += 1
            restore()
            if (folder / "out").exists():
                raise SystemExit("bench_faults: a damaged checkpoint was converted into a visible one")
        report[name] = dict(found)
    return report


def killed_saves(folder: Path, count: int, chance: random.Random) -> Json:
    """Kill saves; see the module."""
    import torch
    import torch.distributed

    import dsx.train.recipe  # noqa: F401 - likewise
    from dsx.checkpoint.open import open_checkpoint
    from dsx.checkpoint.read import compare, verify

    torch.set_num_threads(1)
    watcher, found = Disturbance(), Counter[str]()
    reference = folder / "reference"
    kinds = [(tag, background) for tag in (None, "same") for background in (False, True)]
    calls: dict[tuple[str | None, bool], int] = {}
    for kind in reversed(kinds):  # the last one is that whose checkpoints are compared with
        watcher.reset()
        shutil.rmtree(reference, ignore_errors=True)
        train_on_ranks(reference, *kind, watcher, victim=0, last=None)
        calls[kind] = watcher.calls
    for number in range(count):
        kind = kinds[number % len(kinds)]
        watcher.reset()
        victim, last = chance.randrange(2), chance.randint(1, calls[kind])
        out = folder / "run"
        train_on_ranks(out, *kind, watcher, victim=victim, last=last)
        catalog = open_checkpoint(out)
        step = int(catalog.facts["step"])
        expected = open_checkpoint(reference / f"global_step{step}")
        whole = not list(verify(catalog)) and all(one.equal for one in compare(expected, catalog))
        found[f"step {step}, {'whole' if whole else 'not whole'}"] += 1
        shutil.rmtree(out)
    return {"kills": count, "found": dict(found), "calls": [calls[kind] for kind in kinds]}


def train_on_ranks(
    folder: Path, tag: str | None, background: bool, watcher: Disturbance, *, victim: int, last: int | None
) -> None:
    """Two ranks train and save twice; the ``victim`` dies at its call ``last`` of the second save."""
    folder.mkdir()
    children = [
        started(
            lambda rank=rank: train(  # type: ignore[misc]
                folder, rank, tag, background, watcher if rank == victim else None, last
            )
        )
        for rank in range(2)
    ]
    first, status = os.waitpid(-1, 0)
    (other,) = set(children) - {first}
    if os.WIFSIGNALED(status):
        time.sleep(0.1)  # what a launcher needs to notice
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    else:
        _, second = os.waitpid(other, 0)
        if status or (second and not os.WIFSIGNALED(second)):
            raise SystemExit("bench_faults: a rank failed; see above")
    (folder / "rendezvous").unlink()


def train(
    folder: Path, rank: int, tag: str | None, background: bool, watcher: Disturbance | None, last: int | None
) -> None:
    """One rank's part."""
    import torch

    import dsx
    from dsx.parallel.groups import make_groups
    from dsx.train.recipe import build_engine

    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}  # DeepSpeed looks there
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2
    )
    config = dsx.load_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": 2},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "dsx": {
                "model": {"config": SMALL},
                "data": {"tokenizer": "bytes", "sequence_length": 16},
                "train": {"steps": 4, "output": "unused"},
            },
        },
        world_size=2,
    )
    groups = make_groups(config.mesh, sequence_parallel=False)
    engine = build_engine(config, groups)
    for step in range(2):
        ids = torch.arange(17).view(1, 17) + 3 * step + rank
        engine.train_batch(iter([(ids[:, :-1], ids[:, 1:])]))
        if watcher is not None and step == 1:
            watcher.watch(last)
        engine.save_checkpoint(folder, tag=tag, background=background)
        if step == 0 or background:
            engine.wait_for_checkpoint()


if __name__ == "__main__":
    main()
