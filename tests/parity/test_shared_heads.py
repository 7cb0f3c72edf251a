"""Fewer key/value heads than tensor-parallel ranks: training equals one process of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_family_parity import check

from often import often
from parity.dsx_run import Case

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


@pytest.mark.parametrize("case", often(CASES, 5), ids=str)
def test_training_equals_one_process(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path / "model", steps=3)
