"""Any layout trains like one process of the Hugging Face model: losses, pre-clip norms, updated weights.

GPT-2 and Llama go through every degree, ZeRO stage and schedule. Each other family is trained with pipeline
and tensor parallelism and under ZeRO, so that each of its peculiarities meets sequence parallelism and its
absence, recomputation, a divided backward and partitioned weights; and where ranks share key/value heads.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import get_args

import pytest
import torch

import ranks
from dsx.models.presets import presets
from dsx.models.spec import PresetFamily
from often import often
from parity import dsx_run, families_table, oracle
from parity.dsx_run import Case

PAGE = Path(__file__).parents[2] / "docs/guides/models.md"

LAYOUTS = [
    Case(family=family, tp=tp, pp=pp, chunks=v, dp=dp, zero=zero)
    for family in ("gpt2", "llama")
    for tp, pp, v, dp, zero in (
        (1, 1, 1, 1, 0),
        (2, 1, 1, 1, 1),
        (1, 2, 1, 1, 1),
        (1, 2, 2, 1, 2),
        (1, 1, 1, 2, 3),
        (2, 2, 1, 1, 3),
        (2, 1, 1, 2, 3),
        (1, 2, 2, 2, 3),
        (2, 2, 2, 2, 1),
        (2, 2, 2, 2, 2),
        (2, 2, 2, 2, 3),
    )
]
VARIANTS = [
    Case(pp=2, chunks=2, zero=0, accumulation=4),
    Case(family="gpt2", pp=2, dp=2, zero=0, accumulation=1),
    Case(family="gpt2", pp=2, chunks=2, zero=3, accumulation=2, recompute="full"),
    Case(tp=2, pp=2, zero=1, sequence_parallel=False, recompute="selective"),
    Case(family="gpt2", tp=2, zero=2, sequence_parallel=False, recompute="full"),
    Case(tp=2, pp=2, chunks=1, zero=3, accumulation=5, partition=[2, 5]),
    Case(family="gpt2", pp=3, zero=2, partition=[4, 3, 1]),
    Case(pp=4, zero=1, accumulation=3, schedule="gpipe"),
    Case(pp=2, chunks=3, zero=3, accumulation=1, partition="uniform"),
    Case(tp=2, pp=2, dp=2, zero=0, accumulation=5, schedule="1f1b"),
]
SCHEDULES = [
    Case(family=family, pp=2, chunks=chunks, zero=zero, accumulation=accumulation, schedule=schedule, **more)
    for schedule, family, chunks, zero, accumulation, more in (
        ("looped_bfs", "gpt2", 2, 1, 3, {}),
        ("looped_bfs", "llama", 3, 3, 4, {}),
        ("zb_h1", "llama", 1, 0, 4, {"tp": 2}),
        ("zb_h1", "gpt2", 1, 2, 3, {"dp": 2}),
        ("interleaved_zb", "gpt2", 2, 0, 4, {}),
        ("interleaved_zb", "llama", 2, 1, 3, {"recompute": "full"}),
        ("interleaved_zb", "llama", 3, 2, 5, {"recompute": "selective"}),
        ("interleaved_zb", "llama", 2, 3, 4, {"tp": 2, "dp": 2}),
        ("interleaved_zb", "gpt2", 2, 3, 1, {"tp": 2, "sequence_parallel": False}),
        ("zbv", "gpt2", 2, 0, 3, {}),
        ("zbv", "llama", 2, 1, 4, {"tp": 2}),
        ("zbv", "gpt2", 2, 2, 5, {"dp": 2}),
        ("zbv", "gpt2", 2, 3, 4, {"recompute": "selective"}),
        ("v_half", "llama", 2, 0, 5, {"dp": 2}),
        ("v_half", "llama", 2, 3, 4, {"recompute": "selective"}),
        ("v_min", "gpt2", 2, 1, 4, {"tp": 2}),
        ("v_min", "llama", 2, 2, 3, {}),
        ("dualpipev", "llama", 2, 1, 4, {}),
        ("dualpipev", "gpt2", 2, 3, 6, {}),
    )
]
DEEPER = [
    Case(
        family="gpt2", pp=4, chunks=2, zero=1, accumulation=9, schedule="interleaved_zb", partition="uniform"
    ),
    Case(pp=3, chunks=2, zero=2, accumulation=4, schedule="zbv", partition="uniform"),
    Case(family="gpt2", pp=4, zero=3, accumulation=6, schedule="zb_h1"),
]
FAMILIES = [
    Case(family="mistral", tp=2, pp=2, chunks=2, zero=3, schedule="interleaved_zb", recompute="selective"),
    Case(family="qwen2", tp=2, pp=2, zero=2, schedule="zbv", chunks=2, recompute="full"),
    Case(family="qwen2", tp=2, dp=2, zero=3, sequence_parallel=False, accumulation=2),
    Case(family="qwen3", tp=2, pp=2, zero=0, sequence_parallel=False, schedule="zb_h1", accumulation=4),
    Case(family="qwen3", tp=2, dp=2, zero=3, recompute="selective", accumulation=2),
    Case(family="gemma2", tp=2, pp=2, chunks=2, zero=2, schedule="interleaved_zb", recompute="full"),
    Case(family="gemma2", tp=2, dp=2, zero=3, sequence_parallel=False, accumulation=2, recompute="selective"),
    Case(family="gpt_neox", tp=2, pp=2, chunks=2, zero=1, accumulation=4, recompute="full"),
]
SHARED_HEADS = [
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
TABLE = (*LAYOUTS, *VARIANTS, *SCHEDULES, *FAMILIES)
"""Of which the guide tells."""

reference = cache(oracle.train)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for those of the families."""
    return tmp_path_factory.mktemp("models")


def _cases(cases: list[Case], every: int, *, steps: int) -> list[object]:
    return often([(case, steps) for case in cases], every)


@pytest.mark.parametrize(
    ("case", "steps"),
    [
        *_cases(LAYOUTS + VARIANTS, 13, steps=10),
        *_cases(SCHEDULES + DEEPER, 10, steps=6),
        *_cases(FAMILIES, 5, steps=4),
        *_cases(SHARED_HEADS, 5, steps=3),
    ],
    ids=str,
)
def test_training_equals_one_process(case: Case, steps: int, models: Path) -> None:
    """Losses and norms within 1e-5 relative, weights within 1e-5 after the first step."""
    folder = models / case.family
    if not folder.exists():
        oracle.save_model(case.family, folder)
    run = ranks.run(dsx_run.train, case.world_size, case, folder, steps)[0]
    expected = reference(case.family, rows=case.rows, steps=steps)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    assert min(expected.norms) > oracle.CLIPPING, "clipping must be at work for the comparison to mean it"
    tied = oracle.CONFIGS[case.family].get("tie_word_embeddings", True)
    assert expected.first_update.keys() - run.first_update.keys() == ({"lm_head.weight"} if tied else set())
    for name, tensor in run.first_update.items():
        assert torch.allclose(tensor, expected.first_update[name], rtol=0, atol=1e-5), name


def test_every_family_is_trained() -> None:
    """No family without a case, and none without its own preset."""
    trained = {case.family for case in TABLE}
    assert trained == set(get_args(PresetFamily)) == {preset.family for preset in presets()}


def test_the_guide_has_the_table_of_these_cases() -> None:
    """``python -m parity.families_table`` in tests/ prints it."""
    table = families_table.table(TABLE)
    assert table in PAGE.read_text(encoding="utf-8"), f"the table of families in {PAGE} should be\n{table}"
