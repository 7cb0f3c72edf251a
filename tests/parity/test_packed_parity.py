"""Packs of documents kept apart, with masked labels: any layout trains like one process of transformers.

The reference runs every document by itself, unpadded, and divides by the trained tokens of the global batch:
so it has no pack whose documents could see each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from often import often
from parity import dsx_run, oracle
from parity.dsx_run import Case
from parity.oracle import ADAMW, MICRO_BATCH, SEQUENCE, Run

STEPS = 4
Document = tuple[torch.Tensor, torch.Tensor]
"""Ids and labels, int64 [length] each."""


def documents(step: int, row: int) -> list[Document]:
    """The documents of one row: lengths from 1 on that fill it, of which few tokens are trained."""
    generator = torch.Generator().manual_seed(1_000 * step + row)
    left, found = SEQUENCE, []
    while left:
        length = min(left, int(torch.randint(1, 7, (1,), generator=generator)))
        ids = torch.randint(0, 261, (length + 1,), generator=generator)
        trained = torch.rand(length, generator=generator) < 0.1 + 0.8 * (row % 3 == 0)
        found.append((ids[:-1], ids[1:].where(trained, torch.tensor(-100))))
        left -= length
    return found


def packed(step: int, rows: range) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """((ids, positions), labels) of a micro-batch."""
    ids, positions, labels = [], [], []
    for row in rows:
        own = documents(step, row)
        ids.append(torch.cat([each for each, _ in own]))
        positions.append(torch.cat([torch.arange(len(each)) for each, _ in own]))
        labels.append(torch.cat([each for _, each in own]))
    return (torch.stack(ids), torch.stack(positions)), torch.stack(labels)


def batches(case: Case, step: int, dp_rank: int) -> Iterator[Any]:
    for j in range(case.accumulation):
        start = (j * case.dp + dp_rank) * MICRO_BATCH
        yield packed(step, range(start, start + MICRO_BATCH))


@cache
def reference(family: str, rows: int) -> tuple[Run, float]:
    """The run, and its held-out loss over the rows of the step after the last."""
    model = oracle.hf_model(family)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return oracle.apart(model, optimizer, STEPS, rows, documents)


def train(rank: int, world_size: int, case: Case, folder: Path) -> tuple[Run, float, list[int]]:
    engine, _ = dsx_run.build(case, folder)
    losses, norms, counts = [], [], []
    for step in range(STEPS):
        losses.append(float(engine.train_batch(batches(case, step, engine.groups.dp_rank))))
        norms.append(engine.get_global_grad_norm())
        counts.append(engine.trained_tokens)
    held_out = engine.eval_batch(batches(case, STEPS, engine.groups.dp_rank))
    return Run(losses, norms, {}), float(held_out), counts


FAMILIES = ("llama", "gpt2", "mistral", "qwen2", "qwen3", "gpt_neox", "gemma2")
CASES = [
    Case(tp=2, zero=1),
    Case(pp=2, chunks=2, zero=2, recompute="full"),
    Case(dp=2, zero=3, recompute="selective"),
    Case(tp=2, pp=2, zero=2),
    Case(tp=2, pp=2, sequence_parallel=False, recompute="selective", zero=3),
    Case(tp=2, pp=2, schedule="zb_h1", zero=0),
    Case(pp=2, dp=2, schedule="zbv", chunks=2, zero=1, recompute="full"),
    *[Case(family=family, tp=2, pp=2, zero=1) for family in ("mistral", "qwen2", "qwen3")],
    *[Case(family=family, pp=2, zero=2, implementation="transformers") for family in FAMILIES],
    *[Case(family=family, tp=2, zero=3, implementation="transformers") for family in FAMILIES],
]


@pytest.mark.parametrize("case", often(CASES, 13), ids=str)
def test_packs_train_like_their_documents_alone(case: Case, tmp_path: Path) -> None:
    folder = oracle.save_model(case.family, tmp_path / "model")
    expected, held_out = reference(case.family, case.rows)
    for run, own_held_out, counts in ranks.run(train, case.world_size, case, folder):
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert run.norms == pytest.approx(expected.norms, rel=1e-5)
        assert own_held_out == pytest.approx(held_out, rel=1e-5)
        labels = [packed(step, range(case.rows))[1] for step in range(STEPS)]
        assert counts == [int((each != -100).sum()) for each in labels]
