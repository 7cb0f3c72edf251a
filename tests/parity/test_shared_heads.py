"""Fewer key/value heads than tensor-parallel ranks: training equals one process of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ranks
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

STEPS = 3

CASES = [
    Case(family="llama-one-head", tp=2, zero=1),
    Case(tp=4, zero=2, recompute="selective", accumulation=2),
    Case(family="qwen3", tp=4, zero=3, sequence_parallel=False, recompute="full"),
    Case(family="llama-one-head", tp=2, dp=2, zero=3, accumulation=2),
    Case(family="llama-one-head", tp=2, pp=2, zero=2, schedule="zb_h1", accumulation=4),
    Case(family="qwen3", tp=4, zero=1),
    Case(family="qwen2", tp=4, zero=0, accumulation=2),
    Case(family="gemma2", tp=4, zero=1),
    Case(family="llama-one-head", tp=2, pp=2, chunks=2, zero=3, schedule="zbv", recompute="full"),
]


@pytest.mark.parametrize("case", often(CASES, 3), ids=str)
def test_training_equals_one_process(case: Case, tmp_path: Path) -> None:
    """Losses and norms within 1e-5 relative, weights within 1e-5 after the first step."""
    folder = oracle.save_model(case.family, tmp_path / "model")
    run = ranks.run(dsx_run.train, case.world_size, case, folder, STEPS)[0]
    expected = oracle.train(case.family, rows=case.rows, steps=STEPS)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    assert min(expected.norms) > oracle.CLIPPING
    for name, tensor in run.first_update.items():
        assert torch.allclose(tensor, expected.first_update[name], rtol=0, atol=1e-5), name
