"""tools/bench_proof.py: a few draws, which are proved, and what it says of them."""

from __future__ import annotations

import os
import random

import bench_proof


def test_draws_are_proved_and_counted(capsys, monkeypatch) -> None:
    monkeypatch.setenv("HOME", os.environ["HOME"])  # restored: the tool takes another
    chance = random.Random(3)
    drawn = {number: (2, bench_proof.draw(chance, 2, ["qwen3", "mamba2"])) for number in range(4)}
    for _, content in drawn.values():
        content["dsx"]["data"].pop("documents", None)  # which recurrent blocks do not keep apart
    assert any("mamba2" in str(content) and "Infinity" in str(content) for _, content in drawn.values())
    found = bench_proof.proved(drawn)
    assert {row["result"] for row in found.values()} == {"proved"}
    text = bench_proof.as_text(drawn, found)
    assert text.startswith("4 proved\n")
    assert sum(int(line[39:45]) for line in text.splitlines()[3:]) == 4
    assert capsys.readouterr().out.count(" as one process: loss ") == 4
