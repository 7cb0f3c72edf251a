"""Every family trains in parallel like one process of the Hugging Face model; the guide's table of them.

GPT-2 and Llama have longer lists of layouts (test_hugging_face_parity.py, test_schedule_parity.py). Each
other family is trained here with pipeline and tensor parallelism and under ZeRO, so that each of its
peculiarities meets sequence parallelism and its absence, recomputation, a divided backward and partitioned
weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch

import ranks
from dsx.models.presets import presets
from dsx.models.spec import Family
from often import often
from parity import dsx_run, families_table, oracle
from parity.dsx_run import Case

STEPS = 4
PAGE = Path(__file__).parents[2] / "docs/guides/models.md"

CASES = [
    Case(family="mistral", tp=2, pp=2, chunks=2, zero=3, schedule="interleaved_zb", recompute="selective"),
    Case(family="qwen2", tp=2, pp=2, zero=2, schedule="zbv", chunks=2, recompute="full"),
    Case(family="qwen2", tp=2, dp=2, zero=3, sequence_parallel=False, accumulation=2),
    Case(family="qwen3", tp=2, pp=2, zero=0, sequence_parallel=False, schedule="zb_h1", accumulation=4),
    Case(family="qwen3", tp=2, dp=2, zero=3, recompute="selective", accumulation=2),
    Case(family="gemma2", tp=2, pp=2, chunks=2, zero=2, schedule="interleaved_zb", recompute="selective"),
    Case(family="gemma2", tp=2, dp=2, zero=3, sequence_parallel=False, accumulation=2),
    Case(family="gpt_neox", tp=2, pp=2, chunks=2, zero=1, accumulation=4, recompute="full"),
]


def check(case: Case, folder: Path, steps: int) -> None:
    """Losses and norms within 1e-5 relative, weights within 1e-5 after the first step."""
    oracle.save_model(case.family, folder)
    run = ranks.run(dsx_run.train, case.world_size, case, folder, steps)[0]
    expected = oracle.train(case.family, rows=case.rows, steps=steps)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    assert min(expected.norms) > oracle.CLIPPING
    tied = oracle.CONFIGS[case.family]["tie_word_embeddings"]
    assert expected.first_update.keys() - run.first_update.keys() == ({"lm_head.weight"} if tied else set())
    for name, tensor in run.first_update.items():
        assert torch.allclose(tensor, expected.first_update[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize("case", often(CASES, 2), ids=str)
def test_training_equals_one_process(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path / "model", STEPS)


def test_every_family_is_trained() -> None:
    """No family without a case, and none without its own preset."""
    trained = {case.family for case in families_table.all_cases()}
    assert trained == set(get_args(Family)) == {preset.family for preset in presets()}


def test_the_guide_has_the_table_of_these_cases() -> None:
    """``python -m parity.families_table`` in tests/ prints it."""
    table = families_table.table(families_table.all_cases())
    assert table in PAGE.read_text(encoding="utf-8"), f"the table of families in {PAGE} should be\n{table}"
