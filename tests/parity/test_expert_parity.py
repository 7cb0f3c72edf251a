"""Experts that several ranks hold together train like one process of transformers, in any layout.

Losses, gradient norms before clipping, and the exported folder, as tools/families.py compares them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from all_families import parity
from all_families.parity import Layout

from often import often

LAYOUTS = {
    "ep 2 x pp 2, 2 chunks": Layout(dp=2, ep=2, pp=2, chunks=2, schedule="interleaved", zero=2),
    "ep 2 of dp 4, ZeRO-3": Layout(dp=4, ep=2, zero=3),
    "ep 2 x tp 2": Layout(dp=2, ep=2, tp=2, zero=1),
    "ep 2 over cp 2": Layout(cp=2, ep=2, zero=1),
    "ep 2 x pp 2, zero-bubble": Layout(dp=2, ep=2, pp=2, schedule="zb_h1", zero=1),
    "ep 4 over cp 2 x dp 2, ZeRO-3": Layout(dp=2, cp=2, ep=4, zero=3),
    "ep 4": Layout(dp=4, ep=4, zero=0),
    "ep 2 of dp 4, ZeRO-1": Layout(dp=4, ep=2, zero=1),
    "ep 2 of dp 4, ZeRO-2": Layout(dp=4, ep=2, zero=2),
    "ep 2 x pp 2, rows hidden": Layout(dp=2, ep=2, pp=2, schedule="zb_h1", zero=3, recompute="full"),
    "ep 2 x pp 2, DualPipeV": Layout(dp=2, ep=2, pp=2, chunks=2, schedule="dualpipev", zero=2),
}
FAMILIES = (
    "mixtral",
    "qwen3_next",  # a hybrid, which also hands states on where sequences are shared
    "gpt_oss",  # biases, matrices the other way round, gate and up interleaved
    "deepseek_v3",  # a router with a bias that is no parameter, shared experts beside
    "glm4_moe",
    "olmoe",
    "minimax_m2",
    "qwen3_moe",
)
CASES = [
    (family, name)
    for turn in range(len(LAYOUTS))
    for at, family in enumerate(FAMILIES)
    for name in [list(LAYOUTS)[(at + turn) % len(LAYOUTS)]]
]


@pytest.mark.parametrize(("family", "name"), often(CASES, 36))
def test_experts_over_ranks_train_like_transformers(family: str, name: str, tmp_path: Path) -> None:
    found = dict(parity.prove(family, {name: LAYOUTS[name]}, folder=tmp_path))
    assert "failed" not in found.pop("")
    assert found[name]["result"] == "ok", json.dumps(found, indent=1)
