"""A run goes on in any layout from a checkpoint of any other, as if it had never stopped."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import pytest

import ranks
from often import often
from parity import dsx_run
from parity.dsx_run import Case

STEPS = 2  # in each layout
CHAINS = {
    "llama": [
        Case(accumulation=4),
        Case(tp=2, pp=2, chunks=2, dp=2, zero=3, accumulation=2),
        Case(dp=4, zero=1, accumulation=1),
        Case(tp=2, dp=2, zero=2, accumulation=2, zero_keys=(("round_robin_gradients", True),)),
        Case(pp=2, dp=2, zero=3, accumulation=2, zero_keys=(("sub_group_size", 3000),)),
        Case(pp=3, zero=0, accumulation=4),
    ],
    "gpt2": [
        Case(family="gpt2", pp=2, dp=2, zero=1, accumulation=2),
        Case(family="gpt2", tp=2, zero=3, accumulation=4),
        Case(family="gpt2", pp=2, chunks=2, tp=2, zero=2, accumulation=4, schedule="zbv"),
        Case(family="gpt2", dp=4, zero=3, accumulation=1),
        Case(family="gpt2", accumulation=4),
    ],
}


def train(engine: Any, case: Case, first: int, count: int) -> list[float]:
    found = []
    for step in range(first, first + count):
        found.append(engine.train_batch(dsx_run.batches(case, step, engine.groups.dp_rank)).item())
        found.append(engine.get_global_grad_norm())
    return found


def uninterrupted(rank: int, world_size: int, case: Case, steps: int) -> list[float]:
    engine, _ = dsx_run.build(case, None)
    return train(engine, case, 0, steps)


def link(rank: int, world_size: int, case: Case, place: int, folder: str) -> tuple[list[float], float]:
    """One layout's part: load what the one before saved, train, save. Also bytes read over bytes held."""
    from dsx.checkpoint.formats.native import read_manifest
    from dsx.checkpoint.run.stored import load_stored, stored_here

    engine, _ = dsx_run.build(case, None)
    share = 1.0
    if place:
        path, state = engine.load_checkpoint(folder)
        assert (path.name, state, engine.global_steps) == (f"at{place}", {"place": place}, place * STEPS)
        read = load_stored(engine, read_manifest(path / "dsx.json"))
        held = sum(
            prod(part.shape) * block.values.element_size()
            for block in stored_here(engine, everything=True)
            for part in block.parts
        )
        share = read / held
    losses = train(engine, case, place * STEPS, STEPS)
    engine.save_checkpoint(folder, tag=f"at{place + 1}", client_state={"place": place + 1})
    return losses, share


@pytest.mark.parametrize("family", often(CHAINS, 2))
def test_a_run_changes_its_layout_again_and_again(family: str, tmp_path: Path) -> None:
    chain = CHAINS[family]
    whole = chain[0] if chain[0].world_size == 1 else chain[-1]
    expected = ranks.run(uninterrupted, whole.world_size, whole, STEPS * len(chain))[0]
    found: list[float] = []
    for place, case in enumerate(chain):
        results = ranks.run(link, case.world_size, case, place, str(tmp_path))
        found += results[0][0]
        assert max(share for _, share in results) == pytest.approx(1.0)
    assert found == pytest.approx(expected, rel=2e-5)
