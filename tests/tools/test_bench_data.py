"""The benchmark of data loading: its peer's transform, its clock and its table."""

from __future__ import annotations

import json
from pathlib import Path

import bench_data
import numpy as np
import pytest

from dsx.config.schema import DataConfig


def test_the_peer_packs_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    texts = [f"document {i} " * (1 + i % 9) for i in range(400)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    monkeypatch.setattr(bench_data, "S", 50)
    monkeypatch.setattr(bench_data, "BUFFER", 8)
    data = DataConfig(
        source=str(path), tokenizer="bytes", sequence_length=50, streaming=True, lanes=1, held_out=0
    )
    peer = bench_data.Peer(data)
    tokens = np.array([token for text in texts for token in [*text.encode(), 256]])
    packed = peer._packed(0, 1)
    for start in range(0, len(tokens) - 51, 50):
        assert next(packed).tolist() == tokens[start : start + 51].tolist()
    shuffled = iter(peer)
    taken = {tuple(next(shuffled).tolist()) for _ in range(100)}
    windows = {tuple(tokens[start : start + 51].tolist()) for start in range(0, 109 * 50, 50)}
    assert len(taken) == 100
    assert taken <= windows


def test_waiting_is_timed_after_the_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr(bench_data, "time", clock)

    def loader():
        for number in range(1000):
            clock.now += 100.0 if number < bench_data.WARM_UP else 1.0
            yield number

    def compute() -> None:
        clock.now += 3.0

    stall, rate = bench_data.measure(loader(), 10, compute)
    assert stall == pytest.approx(0.25)
    assert rate == pytest.approx(0.25)


def test_the_table_compares_with_the_best_peer() -> None:
    text = bench_data.as_text(
        {
            "dsx": {"stall_percent": 1.0, "free_per_second": 40.0},
            "DataLoader, a": {"stall_percent": 8.0, "free_per_second": 9.0},
            "DataLoader, b": {"stall_percent": 4.0, "free_per_second": 8.0},
        },
        40,
    )
    assert [line.split()[-2] for line in text.splitlines()[2:]] == ["0.25x", "2.00x", "1.00x"]
