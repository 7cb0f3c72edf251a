"""tools/bench_proof.py: a few draws, which are proved, and what it says of them."""

from __future__ import annotations

import json
import os
import random

import bench_proof
import pytest


@pytest.mark.slow
def test_draws_are_proved_and_counted(capsys, monkeypatch) -> None:
    monkeypatch.setenv("HOME", os.environ["HOME"])  # restored: the tool takes another
    chance = random.Random(3)
    drawn = {number: (2, bench_proof.draw(chance, 2, ["qwen3", "mamba2"])) for number in range(4)}
    for _, content in drawn.values():
        content["dsx"]["data"].pop("documents", None)  # which recurrent blocks do not keep apart
    assert any("mamba2" in str(content) and "Infinity" in str(content) for _, content in drawn.values())
    # Its latent attention makes keys and values for every head, whatever the config says.
    sizes = bench_proof.tiny.tiny_config("axk2", num_key_value_heads=2)
    broken = json.loads(json.dumps(drawn[0][1]))
    broken["dsx"] |= {
        "model": {"config": json.loads(sizes.to_json_string(use_diff=False))},
        "parallel": {"tensor": 2, "pipeline": 1},
        "data": {"source": "own", "sequence_length": 24, "documents": "apart"},
        "schedule": {"name": "auto"},
    }
    found = bench_proof.proved({**drawn, 4: (2, broken)})
    refused = found.pop(4)
    assert refused["result"] == "refused"
    assert "transformers itself does not run what it is compared with (RuntimeError" in refused["said"]
    assert {row["result"] for row in found.values()} == {"proved"}
    text = bench_proof.as_text(drawn, found)
    assert text.startswith("4 proved\n")
    assert sum(int(line[39:45]) for line in text.splitlines()[3:]) == 4
    assert capsys.readouterr().out.count(" as one process: loss ") == 4
