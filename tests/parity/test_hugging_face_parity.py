"""Any layout trains like one process of the Hugging Face model: losses, pre-clip norms, updated weights."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

import ranks
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case

STEPS = 10

LAYOUTS = [  # tp, pp, chunks, dp, zero
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
]
CASES = [
    Case(family=family, tp=tp, pp=pp, chunks=v, dp=dp, zero=zero)
    for family in ("gpt2", "llama")
    for tp, pp, v, dp, zero in LAYOUTS
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


@cache
def reference(family: str, rows: int, steps: int) -> oracle.Run:
    """The oracle's run, shared by the layouts with the same global batch."""
    return oracle.train(family, rows=rows, steps=steps)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Hugging Face folders of both families."""
    return {
        family: oracle.save_model(family, tmp_path_factory.mktemp(family)) for family in ("gpt2", "llama")
    }


@pytest.mark.parametrize("case", often(CASES + VARIANTS, 5), ids=str)
def test_fp32_training_equals_one_process(case: Case, folders: dict[str, Path]) -> None:
    """Losses and norms within 1e-5 relative over 10 steps, weights within 1e-5 after the first."""
    run = ranks.run(dsx_run.train, case.world_size, case, folders[case.family], STEPS)[0]
    expected = reference(case.family, case.rows, STEPS)
    assert run.losses == pytest.approx(expected.losses, rel=1e-5)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    assert min(expected.norms) > oracle.CLIPPING, "clipping must be at work for the comparison to mean it"
    for name, tensor in run.first_update.items():
        assert torch.allclose(tensor, expected.first_update[name], rtol=0, atol=1e-5), name
    missing = set(expected.first_update) - set(run.first_update)
    assert all(name == "lm_head.weight" and case.family == "gpt2" for name in missing), missing
