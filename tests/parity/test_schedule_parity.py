"""Every schedule trains like one process of the Hugging Face model, at every ZeRO stage."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ranks
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

STEPS = 6

CASES = [
    Case(family=family, pp=2, chunks=chunks, zero=zero, accumulation=accumulation, schedule=schedule, **more)
    for schedule, family, chunks, zero, accumulation, more in (
        ("looped_bfs", "gpt2", 2, 1, 3, {}),
        ("looped_bfs", "llama", 3, 3, 4, {}),
        ("zb_h1", "llama", 1, 0, 4, {"tp": 2}),
        ("zb_h1", "gpt2", 1, 2, 3, {"dp": 2}),
        ("interleaved_zb", "gpt2", 2, 0, 4, {}),
        ("interleaved_zb", "llama", 2, 1, 3, {"recompute": "full"}),
        ("interleaved_zb", "gpt2", 3, 2, 5, {"recompute": "selective"}),
        ("interleaved_zb", "llama", 2, 3, 4, {"tp": 2, "dp": 2}),
        ("interleaved_zb", "gpt2", 2, 3, 1, {"tp": 2, "sequence_parallel": False}),
        ("zbv", "gpt2", 2, 0, 3, {}),
        ("zbv", "llama", 2, 1, 4, {"tp": 2}),
        ("zbv", "gpt2", 2, 2, 5, {"dp": 2}),
        ("zbv", "gpt2", 2, 3, 4, {"recompute": "full"}),
        ("v_half", "llama", 2, 0, 5, {"dp": 2}),
        ("v_half", "gpt2", 2, 3, 4, {"recompute": "selective"}),
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders of both families."""
    return {
        family: oracle.save_model(family, tmp_path_factory.mktemp(family)) for family in ("gpt2", "llama")
    }


@pytest.mark.parametrize("case", often(CASES + DEEPER, 4), ids=str)
def test_training_equals_one_process(case: Case, folders: dict[str, Path]) -> None:
    """Losses and norms within 1e-5 relative, weights within 1e-5 after the first step."""
    run = ranks.run(dsx_run.train, case.world_size, case, folders[case.family], STEPS)[0]
    expected = oracle.train(case.family, rows=case.rows, steps=STEPS)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    for name, tensor in run.first_update.items():
        assert torch.allclose(tensor, expected.first_update[name], rtol=0, atol=1e-5), name
