"""How long training waits for data: dsx's streaming beside torch's DataLoader over the same transform.

    python tools/bench_data.py [--compute-ms 40] [--steps 150] [--rounds 3] [--json FILE]

The text is the source of Python's standard library as JSON lines, tokenised by a byte-level BPE of 8,192 ids
trained on it, packed into sequences of 1,024 and shuffled in a buffer of 512. A step takes a micro-batch of 4
and then computes for about ``--compute-ms`` (a matrix product on this process's thread). Each loader gives
two figures, after 20 steps that do not count:

- stall: the share of the steps' time that was spent waiting for the loader;
- free: micro-batches per second when nothing is computed, so how fast it can go.

The peers read, tokenise and pack the same documents: DataLoader with no worker, 1 and 2 worker processes,
prefetch_factor 8. dsx runs without prefetching and with 8 micro-batches ahead. Rounds rotate the order;
figures are medians.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from dsx.config.schema import DataConfig
from dsx.data.batches import Batches, Prefetched
from dsx.data.files import documents
from dsx.data.lanes import open_stream
from dsx.data.text import Text, prepare_text

S, ROWS, BUFFER, WARM_UP = 1024, 4, 512, 20


class Peer(IterableDataset[torch.Tensor]):
    """What one writes for torch: documents -> tokens -> packed sequences -> a shuffle buffer, in a worker."""

    def __init__(self, data: DataConfig) -> None:
        self._source = open_stream(data, "bench")

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        count, index = (1, 0) if worker is None else (worker.num_workers, worker.id)
        draw, buffer = random.Random(index), []  # noqa: S311
        for sequence in self._packed(index, count):
            buffer.append(sequence)
            if len(buffer) > BUFFER // count:
                place = draw.randrange(len(buffer))
                buffer[place], buffer[-1] = buffer[-1], buffer[place]
                yield torch.from_numpy(buffer.pop().astype(np.int64))

    def _packed(self, index: int, count: int) -> Iterator[Any]:
        held = np.empty(0, np.uint16)
        while True:
            for batch in self._batches(index, count):
                ids = self._source.tokenizer.encode(batch)
                parts = [np.append(document, self._source.tokenizer.end_id) for document in ids]
                held = np.concatenate([held, *parts]).astype(np.uint16)
                while len(held) > S:
                    yield held[: S + 1].copy()
                    held = held[S:]

    def _batches(self, index: int, count: int) -> Iterator[list[str]]:
        batch, length = [], 0
        for unit in self._source.units[index::count]:
            for _, text in unit.documents(None):
                batch.append(text)
                length += len(text)
                if length >= 64 << 10:
                    yield batch
                    batch, length = [], 0
        yield batch


def main() -> None:
    """Measure every loader in turn and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--compute-ms", type=float, default=40.0, help="a step's computation (default 40)")
    parser.add_argument("--steps", type=int, default=150, help="steps that count (default 150)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        figures = bench(Path(name), arguments.compute_ms / 1000, arguments.steps, arguments.rounds)
    medians = {
        loader: {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        for loader, rows in figures.items()
    }
    print(as_text(medians, arguments.compute_ms))
    if arguments.json is not None:
        about = {
            "machine": platform.platform(),
            "torch": torch.__version__,
            "dsx": metadata.version("dsx"),
            "compute_ms": arguments.compute_ms,
            "steps": arguments.steps,
        }
        arguments.json.write_text(
            json.dumps({**about, "medians": medians, "rounds": figures}, indent=2) + "\n"
        )


def bench(folder: Path, compute_seconds: float, steps: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    """Figures of every round, by loader."""
    data = make(folder)
    text = Text.open(prepare_text(data, folder / "cache", held_out_tokens=1), data)

    def batches() -> Batches:
        return Batches(text.samples(), micro_batch_size=ROWS, accumulation=1, dp=1, dp_rank=0)

    def peer(workers: int) -> Iterable[Any]:
        ahead = {"prefetch_factor": 8} if workers else {}
        return DataLoader(Peer(data), batch_size=ROWS, num_workers=workers, **ahead)

    loaders: dict[str, Callable[[], Iterable[Any]]] = {
        "dsx, prefetch 0": batches,
        "dsx, prefetch 8": lambda: Prefetched(batches(), depth=8, pin=False),
        "DataLoader, no worker": lambda: peer(0),
        "DataLoader, 1 worker": lambda: peer(1),
        "DataLoader, 2 workers": lambda: peer(2),
    }
    compute = computation(compute_seconds)
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
    names = list(loaders)
    for number in range(rounds):
        for name in names[number:] + names[:number]:
            stall, _ = measure(loaders[name](), steps, compute)
            _, rate = measure(loaders[name](), steps, lambda: None)
            figures[name].append({"stall_percent": 100 * stall, "free_per_second": rate})
    return figures


def measure(loader: Iterable[Any], steps: int, compute: Callable[[], None]) -> tuple[float, float]:
    """Share of the time that was waited, and steps per second."""
    source, waited, began = iter(loader), 0.0, 0.0
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            waited, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        next(source)
        waited += time.perf_counter() - asked
        compute()
    seconds = time.perf_counter() - began
    if isinstance(loader, Prefetched):
        loader.close()
    return waited / seconds, steps / seconds


def computation(seconds: float) -> Callable[[], None]:
    """A matrix product, repeated for about so long; without Python's lock, as kernels run."""
    x = torch.randn(512, 512)
    times = []
    for _ in range(20):
        began = time.perf_counter()
        x @ x
        times.append(time.perf_counter() - began)
    repeats = max(1, round(seconds / statistics.median(times)))

    def compute() -> None:
        for _ in range(repeats):
            x @ x

    return compute


def make(folder: Path) -> DataConfig:
    """The text as JSON lines and the tokenizer, in ``folder``."""
    from transformers import GPT2Tokenizer

    plain = DataConfig(tokenizer="bytes", sequence_length=S, max_bytes=20_000_000)
    texts = [text for text in documents(plain) if len(text) < 200_000]
    with (folder / "text.jsonl").open("w") as file:
        file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
    GPT2Tokenizer().train_new_from_iterator(texts[:200], 8192).save_pretrained(folder / "tokenizer")
    return DataConfig(
        source=str(folder / "text.jsonl"),
        tokenizer=str(folder / "tokenizer"),
        sequence_length=S,
        streaming=True,
        shuffle_buffer=BUFFER,
        lanes=16,
        held_out=0.0,
    )


def as_text(medians: dict[str, dict[str, float]], compute_ms: float) -> str:
    """A table, with each loader's stall beside that of the best peer."""
    best = min(row["stall_percent"] for name, row in medians.items() if name.startswith("DataLoader"))
    lines = [
        f"micro-batches of {ROWS} x {S} tokens, {compute_ms:g} ms of computation a step",
        f"{'loader':<24}{'stall':>9}{'of best peer':>14}{'free':>12}",
    ]
    for name, row in medians.items():
        ratio = row["stall_percent"] / best if best else float("inf")
        free = f"{row['free_per_second']:.1f}/s"
        lines.append(f"{name:<24}{row['stall_percent']:>8.2f}%{ratio:>13.2f}x{free:>12}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
