"""What every tensor-parallel rank holds whole: gradients that differ are noticed as soon as they count."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ranks
from dsx import nn as parallel
from dsx.engine.zero.replica_check import GradientPart, ReplicaGradients, _projection
from dsx.errors import ModelError

WIDTH, STEPS = 8, 6


class Swish(nn.Module):
    """A learned slope on this rank's units, as ReZero starts it: behind a gate of zero.

    Args:
        kind: What is done to the slope: "right" sums its gradient over the ranks; "plain" does not;
            "frozen" has it frozen in the first two steps, its gate open; "faint" has it behind a gate so
            small that its gradient is some 1e-5 of the others'; "turned" and "swapped" give the
            ranks gradients of one norm that are not the same; "uneven" has each rank cut something else.
    """

    def __init__(self, kind: str, tp: parallel.TensorParallel) -> None:
        super().__init__()
        xavier: parallel.Initialiser = nn.init.xavier_uniform_
        self.kind, self.tp = kind, tp
        self.up = parallel.ColumnParallelLinear(WIDTH, 4 * WIDTH, tp, init=xavier)
        self.down = parallel.RowParallelLinear(4 * WIDTH, WIDTH, tp, init=xavier)
        start = {"frozen": 1.0, "faint": 1e-4}.get(kind, 0.0)
        self.gate = nn.Parameter(torch.full((1,), start), requires_grad=kind != "faint")
        self.slope = nn.Parameter(torch.ones(1), requires_grad=kind != "frozen")
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        if kind == "uneven":
            self.mine = nn.Parameter(torch.zeros(3 + 4 * tp.rank))
            self.mine.tensor_model_parallel = True  # type: ignore[attr-defined]
        if kind == "turned" and tp.rank:
            self.shift.register_hook(torch.neg)
        if kind == "swapped" and tp.rank:
            self.shift.register_hook(lambda gradient: gradient.flip(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slope = self.slope
        if self.kind not in ("plain", "frozen", "faint"):
            (slope,) = parallel.copy_parameters(self.tp, slope, cut=True)
        y = self.up(x)
        y = x + self.gate * self.down(y * torch.sigmoid(slope * y)) + self.shift
        return y + self.mine.mean() if self.kind == "uneven" else y


def _config(stage: int, bf16: bool, dp: int) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4 // dp,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


def _train(rank: int, world_size: int, cases: list[tuple[str, int, bool]], dp: int = 1) -> list[Any]:
    """(step that was refused and why, or None; slopes and gates at the end)."""
    from deepspeed import init_distributed

    import dsx
    from dsx.parallel.groups import make_groups

    init_distributed()
    groups = make_groups(dsx.Mesh.of(tp=world_size // dp, dp=dp))
    data = torch.Generator().manual_seed(1)
    x = torch.randn(4, WIDTH, generator=data)
    rows = slice(groups.dp_rank * 4 // dp, (groups.dp_rank + 1) * 4 // dp)
    out: list[Any] = []
    for kind, stage, bf16 in cases:
        torch.manual_seed(5)
        layers = [nn.Linear(WIDTH, WIDTH), *(Swish(kind, groups.tensor_parallel) for _ in range(2))]
        layers += [
            nn.Linear(WIDTH, 8 * WIDTH),
            nn.Linear(8 * WIDTH, WIDTH),
        ]  # in which ZeRO's intervals begin
        module = dsx.PipelineModule(layers, groups=groups, loss_fn=F.mse_loss)
        engine = dsx.initialize(model=module, config=_config(stage, bf16, dp))[0]
        error, step = None, 0
        try:
            for step in range(1, STEPS + 1):
                if step == 3:
                    module.requires_grad_(True)
                batch = x[rows], torch.sin(3 * x[rows])
                engine.train_batch(iter([tuple(t.bfloat16() if bf16 else t for t in batch)]))
        except ModelError as refused:
            error = step, str(refused)
        ends = {
            n: p.detach().float().clone() for n, p in module.named_parameters() if "slope" in n or "gate" in n
        }
        out.append((error, ends))
    return out


WRONG = {
    # The gate opens in the first step, so that the slope counts in the second.
    **{("plain", stage, False): 2 for stage in range(4)},
    **{("plain", stage, True): 2 for stage in (0, 1)},
    ("frozen", 0, False): 3,
    ("faint", 0, False): 1,
    ("turned", 0, False): 1,
    ("swapped", 0, False): 1,
    ("swapped", 1, False): 1,
}


def test_a_replica_that_drifts_ends_the_run_in_the_step_in_which_it_first_counts() -> None:
    for found in ranks.run(_train, 2, list(WRONG)):
        steps = {case: error and error[0] for case, (error, _) in zip(WRONG, found, strict=True)}
        assert steps == WRONG
        for (kind, *_), (error, _) in zip(WRONG, found, strict=True):
            name = "shift" if kind in ("turned", "swapped") else "slope"
            assert f".{name}" in error[1]
            assert "differs between tensor-parallel ranks" in error[1]


def test_summed_over_the_ranks_it_trains_as_in_one_process() -> None:
    cases = [("right", stage, False) for stage in range(4)]
    (alone,) = ranks.run(_train, 1, cases[:1])
    for found in ranks.run(_train, 2, [*cases, ("right", 0, True), ("right", 1, True)]):
        assert [error for error, _ in found] == [None] * 6
        for _, ends in found[:2]:
            for name, end in ends.items():
                torch.testing.assert_close(end, alone[0][1][name], rtol=1e-4, atol=1e-5)


def test_ranks_that_cut_parameters_in_other_places_are_not_mistaken() -> None:
    """ZeRO's intervals follow the sizes of a rank's own parts."""
    cases = [("uneven", stage, False) for stage in (1, 2, 3)]
    for found in ranks.run(_train, 4, cases, 2):
        assert [error for error, _ in found] == [None] * 3


def test_the_projection_is_the_same_however_a_gradient_is_cut() -> None:
    gradient = torch.randn(5000, generator=torch.Generator().manual_seed(0))
    whole, swapped = _projection(gradient, 0), gradient.clone()
    cuts = (0, 1, 1237, 4000, 5000)
    parts = [_projection(gradient[a:b], a) for a, b in pairwise(cuts)]
    assert sum(parts).item() == pytest.approx(whole.item(), rel=1e-4, abs=1e-3)  # type: ignore[union-attr]
    swapped[:2000], swapped[2000:4000] = gradient[2000:4000], gradient[:2000]
    assert abs(_projection(swapped, 0) - whole) > 1
    # Signs, as many of each, so that a gradient whose sum is zero shows too.
    assert abs(_projection(torch.ones(100_000), 0)) < 1500


def _faint(rank: int, world_size: int) -> tuple[list[bool], list[str], str]:
    """Whether ranks told each other in each step, what was warned of, and how it ended."""
    from deepspeed import init_distributed

    import dsx
    from dsx.parallel.groups import make_groups

    init_distributed()
    groups = make_groups(dsx.Mesh.of(tp=2))
    large, faint = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    replicas = ReplicaGradients(groups, {large: "large", faint: "faint"})
    told, cpu, error = [], torch.device("cpu"), ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (1e-9, 1e-9, 1e-9, 1e-9, 1e-8, 1e-8, 1e-3):
            noise = torch.tensor([size * (1 + rank), 0.0, 0.0])
            parts = [GradientPart(large, torch.ones(3)), GradientPart(faint, noise)]
            told.append(replicas.begin())
            asked = replicas.asks(parts, cpu)
            torch.distributed.all_reduce(asked)
            told[-1] = bool(asked)
            try:
                replicas.answer(bool(asked), parts, among=groups.model, partitioned=False, device=cpu)
            except ModelError as refused:
                error = str(refused)
    return told, [str(w.message) for w in caught], error


def test_what_may_be_rounding_is_warned_of_once_and_refused_when_it_grows() -> None:
    """Compared in steps 1, 2 and 4, in 5 and 7 because it has grown, and not in between."""
    (told, said, error), (_, elsewhere, same) = ranks.run(_faint, 2)
    assert told == [True, True, False, True, True, False, True]
    assert len(said) == 1
    assert said[0].startswith("faint: the gradient differs between tensor-parallel ranks")
    assert "gradient of faint in step 7" in error
    assert (elsewhere, same) == ([], error)
