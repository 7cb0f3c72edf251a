"""A run goes on from what ``dsx reshard`` made of its checkpoint: tp, pp, chunks, dp and ZeRO change at once."""

from __future__ import annotations

import pytest

import ranks
from dsx.checkpoint.compare import compare
from dsx.checkpoint.open import open_checkpoint
from parity import dsx_run
from parity.dsx_run import Case

COMMAND = ("reshard",)
STEPS = 10


def _train(engine, case: Case, first: int, count: int) -> list[float]:
    return [
        engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank)).item()
        for step in range(first, first + count)
    ]


def begin(rank: int, world_size: int, case: Case, folder: str) -> list[float]:
    """Two steps, a save, and the rest of the run without any interruption."""
    engine, _ = dsx_run.build(case, None)
    _train(engine, case, 0, 2)
    engine.save_checkpoint(folder, tag="saved")
    return _train(engine, case, 2, STEPS)


def go_on(rank: int, world_size: int, case: Case, folder: str, again: str) -> list[float]:
    engine, _ = dsx_run.build(case, None)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 2
    engine.save_checkpoint(again, tag="again")
    return _train(engine, case, engine.global_steps, STEPS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            Case(family="llama", dp=2, zero=1, accumulation=2),
            Case(family="llama", tp=2, pp=2, chunks=2, zero=3, accumulation=4),
        ),
        (
            Case(family="gpt2", pp=2, zero=3, accumulation=4),
            Case(family="gpt2", tp=2, dp=2, zero=2, accumulation=2),
        ),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_layout(dsx, tmp_path, before, after):
    expected = ranks.run(begin, before.world_size, before, str(tmp_path / "run"))[0]
    to = f"tp={after.tp},pp={after.pp},chunks={after.chunks},dp={after.dp},zero={after.zero}"
    code, out, err = dsx(tmp_path / "run", tmp_path / "other" / "saved", "--to", to)
    assert (code, err) == (0, "")
    assert "nothing" not in out.rpartition("checked")[2]
    assert "stays behind" not in out
    again = tmp_path / "again"
    found = ranks.run(go_on, after.world_size, after, str(tmp_path / "other"), str(again))[0]
    assert found == pytest.approx(expected, rel=2e-5)
    # What the engine held after loading is what the first one had saved, moments and all.
    same = list(compare(open_checkpoint(tmp_path / "run"), open_checkpoint(again)))
    assert {one.state for one in same} == {"weight", "exp_avg", "exp_avg_sq"}
    assert all(one.equal for one in same)
