"""A context axis in any layout: rows that ranks share train as in one process, whole or packed.

The reference runs every document by itself, so that it has no row that anybody could cut wrongly. SGD without
momentum shows a gradient of the wrong size, which Adam would hide. In every second step some ranks train no
token at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ranks
from parity import dsx_run, oracle
from parity.dsx_run import Case
from parity.oracle import CLIPPING, MICRO_BATCH, Run

STEPS, SEQUENCE, RATE = 5, 16, 0.3
Document = tuple[torch.Tensor, ...]
"""Ids and labels, int64 [length] each, and positions if documents are not kept apart."""
HYBRIDS = ("lfm2-conv", "qwen3_next-delta", "bamba-mamba", "nemotron_h-mamba")
"""Families whose mixers go on from one document of a pack to the next, as in transformers."""


def documents(step: int, row: int, packed: bool) -> list[Document]:
    """The documents of one row; a single one unless it is packed."""
    generator = torch.Generator().manual_seed(1_000 * step + row)
    ids = torch.randint(0, 261, (SEQUENCE + 1,), generator=generator)
    trained = torch.rand(SEQUENCE, generator=generator) < (0.3, 0.9)[row % 2]
    if step % 2:  # of two ranks the second one has the middle, and the first one what is around it
        trained[: SEQUENCE // 4] = False
        trained[-SEQUENCE // 4 :] = False
    trained[SEQUENCE // 2] = True
    labels = ids[1:].where(trained, torch.tensor(-100))
    sizes = [3, 6, 1, 5, 1] if packed else [SEQUENCE]  # two of which are in parts of several ranks
    return list(zip(ids[:-1].split(sizes), labels.split(sizes), strict=True))


def micro_batch(step: int, first: int, packed: bool) -> tuple[Any, torch.Tensor]:
    rows = [documents(step, first + row, packed) for row in range(MICRO_BATCH)]
    ids = torch.stack([torch.cat([each for each, _ in row]) for row in rows])
    labels = torch.stack([torch.cat([each for _, each in row]) for row in rows])
    if not packed:
        return ids, labels
    positions = torch.stack([torch.cat([torch.arange(len(each)) for each, _ in row]) for row in rows])
    return (ids, positions), labels


@cache
def reference(family: str, rows: int, packed: bool) -> tuple[Run, float]:
    """The run, and its held-out loss over the rows of the step after the last."""
    model = oracle.hf_model(family)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def pack(step: int, row: int) -> list[Document]:
        found = documents(step, row, packed)
        if not packed or family not in HYBRIDS:
            return found
        ids, labels = (torch.cat(each) for each in zip(*found, strict=True))
        return [(ids, labels, torch.cat([torch.arange(len(each)) for each, _ in found]))]

    return oracle.apart(model, optimizer, STEPS, rows, pack)


def build(case: Case, folder: Path, packed: bool) -> Any:
    import dsx
    from dsx.parallel.groups import make_groups

    content = dsx_run.config(case, folder)
    content["optimizer"] = {"type": "SGD", "params": {"lr": RATE}}
    content["zero_allow_untested_optimizer"] = True
    content["dsx"]["data"] |= {"sequence_length": SEQUENCE, "documents": "apart" if packed else "joined"}
    config = dsx.load_config(content, world_size=case.world_size)
    groups = make_groups(config.mesh, sequence_parallel=config.dsx.parallel.sequence_parallel)
    return dsx.recipe.build_engine(config, groups)


def train(rank: int, world_size: int, case: Case, folder: Path, packed: bool) -> tuple[Run, float]:
    engine = build(case, folder, packed)

    def batches(step: int) -> Iterator[Any]:
        for index in range(case.accumulation):
            number = index * case.dp + engine.groups.share
            yield micro_batch(step, number * MICRO_BATCH, packed)

    losses, norms = [], []
    for step in range(STEPS):
        losses.append(float(engine.train_batch(batches(step))))
        norms.append(engine.get_global_grad_norm())
    return Run(losses, norms, {}), float(engine.eval_batch(batches(STEPS)))


GATHERED = {"zero": 3, "zero_keys": (("stage3_param_persistence_threshold", 0),), "accumulation": 2}
"""Under ZeRO-3 the smallest parameter is gathered too."""
LATER = {"pp": 2, "recompute": "offload", "schedule": "zb_h1"}
ULYSSES, RING = {"context_method": "ulysses"}, {"context_method": "ring"}
CASES = [
    (Case(cp=2, zero=1), True),
    (Case(cp=4, accumulation=2, **ULYSSES), False),
    (Case(cp=2, pp=2, chunks=2, schedule="interleaved_zb", zero=1), True),
    (Case(cp=2, dp=2, zero=3, accumulation=2), False),
    (Case(cp=2, pp=2, chunks=2, schedule="interleaved_zb", zero=1, **RING), True),
    (Case(cp=2, family="qwen3_next-delta", **LATER, **GATHERED), True),
]
MORE = [
    (Case(cp=2, tp=2, zero=1, recompute="full"), False),
    (Case(cp=4, family="bamba-mamba", recompute="full", **GATHERED), False),
    *[(Case(cp=2, family=family, **LATER, **GATHERED), True)
      for family in HYBRIDS if family != "qwen3_next-delta"],
    *[(Case(cp=4, family=family, keep_gathered=20_000, **GATHERED), False) for family in HYBRIDS],
    *[(Case(cp=2, family=family, **shape, **GATHERED), packed)
      for family in HYBRIDS for shape, packed in (
          ({"dp": 2}, False), ({"pp": 2}, False))],
    *[(Case(cp=2, tp=2, family=family, recompute="full", **GATHERED), True)
      for family in HYBRIDS if family != "bamba-mamba"],  # for which transformers has no plan
    (Case(cp=2, pp=2, chunks=2, schedule="interleaved_zb", family="lfm2-conv", **GATHERED), True),
    (Case(cp=2, compile="blocks", family="lfm2-conv", **GATHERED), False),
    (Case(cp=2, tp=2, zero=1, family="lfm2-conv", recompute="full"), False),
    (Case(cp=4, zero=1, family="llama-one-head", recompute="full", **RING), True),
    (Case(cp=2, tp=2, pp=2, zero=3, accumulation=2), True),
    (Case(cp=2, tp=2, pp=2, zero=3, accumulation=2, recompute="selective", **ULYSSES), False),
    (Case(cp=2, dp=2, zero=2, **ULYSSES), True),
    (Case(cp=2, pp=2, chunks=2, schedule="zbv", zero=0, **ULYSSES), False),
    (Case(cp=4, family="llama-one-head", zero=2, accumulation=2), True),
    (Case(cp=4, family="llama-one-head", zero=3, accumulation=2, **ULYSSES), True),
    (Case(cp=2, tp=2, sequence_parallel=False, zero=2, recompute="selective", **ULYSSES), True),
    (Case(cp=2, pp=2, chunks=2, schedule="interleaved_zb", zero=1, family="lfm2-conv"), False),
    (Case(cp=2, zero=1, compile="blocks", family="lfm2-conv"), False),
    *[(Case(cp=2, zero=3, accumulation=2, family="qwen3_next-delta", **shape, **ULYSSES), False)
      for shape in ({"dp": 2}, {"tp": 2})],
    (Case(cp=2, dp=2, zero=3, accumulation=2, **RING), True),
    (Case(cp=2, tp=2, pp=2, zero=3, accumulation=2, recompute="selective", **RING), False),
    (Case(cp=2, tp=2, sequence_parallel=False, zero=2, **RING), True),
    (Case(cp=4, accumulation=2, **RING), False),
    (Case(cp=2, zero=1, compile="blocks", **RING), True),
    (Case(cp=2, zero=3, accumulation=2, compile="blocks", family="mistral", **RING), True),
    (Case(cp=2, zero=1, family="lfm2-conv", **RING), False),
    *[(Case(cp=2, family=family, zero=1, **RING), True) for family in ("mistral", "qwen3", "gpt2")],
    *[(Case(cp=2, family=family, zero=1), packed) for family in oracle.CONFIGS if "-" not in family
      for packed in (False, True)],
    *[(Case(cp=2, family=family, tp=2, zero=1, **ULYSSES), False) for family in ("mistral", "qwen3", "gpt2")],
]  # fmt: skip


SLOWLY = [pytest.param(*each, marks=pytest.mark.slow) for each in MORE]


@pytest.mark.parametrize(("case", "packed"), [*CASES, *SLOWLY], ids=str)
def test_ranks_that_share_rows_train_like_one_process(case: Case, packed: bool, tmp_path: Path) -> None:
    folder = oracle.save_model(case.family, tmp_path / "model")
    expected, held_out = reference(case.family, case.rows, packed)
    for run, own_held_out in ranks.run(train, case.world_size, case, folder, packed):
        assert run.losses == pytest.approx(expected.losses, rel=1e-5)
        assert run.norms == pytest.approx(expected.norms, rel=1e-5)
        assert own_held_out == pytest.approx(held_out, rel=1e-5)
    assert min(expected.norms) > CLIPPING, "clipping must be at work for the comparison to mean it"
