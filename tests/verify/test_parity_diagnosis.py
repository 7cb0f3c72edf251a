"""The likely cause, from numbers alone: each rule, what it must not be taken for, and where rules meet."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from dsx.models.param import Init, ParamSpec
from dsx.parallel.mesh import Mesh
from dsx.verify import diagnosis
from dsx.verify.compare import judge_masks
from dsx.verify.diagnosis import (
    AxisSizes,
    Fit,
    GradientFacts,
    LossFacts,
    NormFacts,
    Shares,
    UpdateFacts,
    diagnose_clipping,
    diagnose_gradients,
    diagnose_loss,
    diagnose_norm,
    diagnose_updates,
)
from dsx.verify.observation import Mask, RankObservation, RunObservation, TensorInfo, built_weights

DEGREES = AxisSizes(mesh=Mesh.of(tp=2, pp=2, dp=3), micro_batches=5)
BAD = Fit(0.7, 0.5)


def gradient(**changes: Any) -> GradientFacts:
    plain: dict[str, Any] = {
        "name": "3.w", "error": 0.5, "max_abs": 0.1, "stage": 1, "replicated": False, "holders": 1,
        "fit": BAD,
    }  # fmt: skip
    return GradientFacts(**plain | changes)


def shares(change: dict[tuple[int, int], float], default: float = 1.0) -> Shares:
    return tuple(tuple(change.get((j, d), default) for d in range(3)) for j in range(5))


@pytest.mark.parametrize(
    ("facts", "right", "loss_equal", "cause", "says"),
    [
        (gradient(fit=Fit(3.0, 1e-6)), [], True, diagnosis.DATA_SUMMED, "3 data-parallel ranks"),
        (gradient(fit=Fit(5.0, 1e-6)), [], True, diagnosis.MICRO_BATCHES_SUMMED, "5 micro-batches"),
        (gradient(fit=Fit(15.0, 1e-6)), [], True, diagnosis.DATA_SUMMED, "neither averaged"),
        (gradient(fit=Fit(1 / 5, 1e-6)), [], True, diagnosis.DIVIDED_TWICE, "micro-batches, 5, twice"),
        (gradient(fit=Fit(7.5, 1e-6)), [], True, diagnosis.SCALED, "7.5 times"),
        (
            gradient(shares=shares({(1, 0): 0, (1, 1): 0, (1, 2): 0})),
            [],
            True,
            diagnosis.MICRO_BATCH_MISSING,
            "1",
        ),
        (
            gradient(shares=shares({(4, d): 1.0 for d in range(3)}, default=0.0)),
            [],
            True,
            diagnosis.MICRO_BATCH_OVERWRITTEN,
            "only 4",
        ),
        (
            gradient(shares=shares({(0, d): 2.0 for d in range(3)})),
            [],
            True,
            diagnosis.MICRO_BATCH_TWICE,
            "0",
        ),
        (
            gradient(shares=shares({(4, d): 1.5 for d in range(3)})),
            [],
            True,
            diagnosis.LAST_MICRO_BATCH,
            "1.5",
        ),
        (
            gradient(shares=shares({(j, 1): 3.0 for j in range(5)}, default=0.0)),
            [],
            True,
            diagnosis.DATA_NOT_AVERAGED,
            "rank 1 alone",
        ),
        (
            gradient(shares=shares({(j, 1): 3.0 for j in range(5)}, default=0.0)),
            [],
            False,
            diagnosis.SAME_DATA,
            "rank 1's micro-batches",
        ),
        (gradient(shares=shares({(2, 1): 0.0, (2, 0): 2.0})), [], False, diagnosis.DATA_ORDER, "[2, 0, 1]"),
        (gradient(previous=Fit(0.5, 1e-5)), [], True, diagnosis.STALE, "0.5 times"),
        (gradient(padding=0.3), [], True, diagnosis.PADDING, "pad the vocabulary"),
        (
            gradient(holders=2, holder_spread=0.9, holder_sum=Fit(1.0, 1e-6)),
            ["1.w"],
            True,
            diagnosis.TIE_NOT_SUMMED,
            "2 stages",
        ),
        (gradient(holders=2, fit=Fit(2.0, 1e-6)), ["1.w"], True, diagnosis.TIE_SUMMED_TWICE, "twice"),
        (
            gradient(replicated=True, tensor_spread=0.9, tensor_sum=Fit(1.0, 1e-6)),
            ["1.w"],
            True,
            diagnosis.TENSOR_NOT_SUMMED,
            "all-reduced",
        ),
        (
            gradient(replicated=True, fit=Fit(2.0, 1e-6)),
            ["1.w"],
            True,
            diagnosis.TENSOR_SUMMED_TWICE,
            "once more",
        ),
        # Nothing explains it: say where to look, and do not guess.
        (gradient(shares=shares({}), shares_residual=0.4), ["1.w"], True, diagnosis.UNKNOWN, "3.w"),
        (gradient(holders=2, holder_spread=0.9, holder_sum=BAD), ["1.w"], True, diagnosis.UNKNOWN, "3.w"),
        (
            gradient(replicated=True, tensor_spread=0.9, tensor_sum=BAD),
            ["1.w"],
            True,
            diagnosis.UNKNOWN,
            "3.w",
        ),
    ],
)
def test_gradients(facts: GradientFacts, right: list[str], loss_equal: bool, cause: str, says: str) -> None:
    found = diagnose_gradients([facts], right, DEGREES, step=2, loss_equal=loss_equal)
    assert (found.cause, found.tensor, found.step) == (cause, "3.w", 2)
    assert says in found.why
    assert f"1 of {1 + len(right)} gradients" in found.what


def test_a_factor_on_everything_is_no_tie_and_no_tensor_parallel_mistake() -> None:
    """Degrees of 2 everywhere: what else is wrong tells them apart."""
    degrees = AxisSizes(mesh=Mesh.of(tp=2, pp=2, dp=2), micro_batches=4)
    tied = gradient(name="0.w", holders=2, fit=Fit(2.0, 1e-6))
    norm = gradient(name="4.norm", replicated=True, fit=Fit(2.0, 1e-6))
    cut = gradient(name="3.w", fit=Fit(2.0, 1e-6))
    assert (
        diagnose_gradients([norm, cut, tied], [], degrees, step=1, loss_equal=True).cause
        == diagnosis.DATA_SUMMED
    )
    assert (
        diagnose_gradients([norm], ["3.w"], degrees, step=1, loss_equal=True).cause
        == diagnosis.TENSOR_SUMMED_TWICE
    )
    assert (
        diagnose_gradients([tied], ["3.w"], degrees, step=1, loss_equal=True).cause
        == diagnosis.TIE_SUMMED_TWICE
    )


def test_equal_degrees_are_both_named() -> None:
    degrees = AxisSizes(mesh=Mesh.of(tp=1, pp=1, dp=4), micro_batches=4)
    found = diagnose_gradients([gradient(fit=Fit(4.0, 0.0))], [], degrees, step=1, loss_equal=True)
    assert "data-parallel" in found.why
    assert "micro-batches" in found.why


@pytest.mark.parametrize(
    ("factor", "cause", "says"),
    [
        (3.0, diagnosis.DATA_SUMMED, "3 context-parallel ranks instead"),
        (6.0, diagnosis.DATA_SUMMED, "2 data-parallel ranks and 3 context-parallel ranks, neither"),
        (1 / 3, diagnosis.DIVIDED_TWICE, "context-parallel ranks, 3, twice"),
    ],
)
def test_ranks_that_share_rows_are_named(factor: float, cause: str, says: str) -> None:
    degrees = AxisSizes(mesh=Mesh.of(dp=2, cp=3), micro_batches=5)
    found = diagnose_gradients([gradient(fit=Fit(factor, 0.0))], [], degrees, step=1, loss_equal=True)
    assert (found.cause, says in found.why) == (cause, True)
    facts = LossFacts(seen=6.0, expected=2.0)
    assert "over 3 context-parallel ranks" in diagnose_loss(facts, degrees, 1e-4, step=1).why
    masks = [{"0": Mask(sharded=False, digest=digest, scale_off=0.0)} for digest in ("a", "b", "c", "c")]
    (found,) = judge_masks(masks, Mesh.of(dp=2, cp=2))
    assert "context-parallel ranks drop the same elements" in found.what


NORM = NormFacts(
    seen=None,
    expected=math.sqrt(10.0),
    squares={"tied": 4.0, "norm": 1.0, "cut": 5.0},
    stages={"tied": 0, "norm": 0, "cut": 1},
    holders={"tied": 2, "norm": 1, "cut": 1},
    replicated=frozenset({"norm"}),
    first_shard={"tied": 1.5, "norm": 1.0, "cut": 2.0},
)


@pytest.mark.parametrize(
    ("square", "cause", "says"),
    [
        (5.0, diagnosis.NORM_OF_ONE_STAGE, "stage"),
        (14.0, diagnosis.NORM_TIED, "tied"),
        (11.0, diagnosis.NORM_REPLICATED, "once per rank"),
        (15.0, diagnosis.NORM_TIED, "per copy"),
        (4.5, diagnosis.NORM_OF_ONE_TENSOR_RANK, "rank 0's shards"),
        (30.0, diagnosis.NORM, "counts 3 times"),
        (123.0, diagnosis.NORM, "times the norm"),
    ],
)
def test_norms(square: float, cause: str, says: str) -> None:
    found = diagnose_norm(replace(NORM, seen=math.sqrt(square)), DEGREES, step=1)
    assert found.cause == cause
    assert says in found.why


def test_clipping_tells_whose_norm_it_used() -> None:
    """A scale of 1 / sqrt(5) at a clipping of 1: one stage's norm, as stock DeepSpeed in fp32 takes it."""
    found = diagnose_clipping(NORM, {0: 1 / math.sqrt(5.0), 1: 1 / math.sqrt(5.0)}, 1.0, DEGREES, step=1)
    assert found.cause == diagnosis.NORM_OF_ONE_STAGE
    assert "clipped as if the norm were 2.23" in found.what
    never = diagnose_clipping(NORM, {0: 1.0, 1: 1.0}, 1.0, DEGREES, step=1)
    assert (never.cause, never.why) == (diagnosis.CLIPPING, "nothing is clipped")
    each = diagnose_clipping(NORM, {0: 0.4, 1: 0.5}, 1.0, DEGREES, step=1)
    assert "norms of their own" in each.why


@pytest.mark.parametrize(
    ("seen", "cause"),
    [
        (2.5, diagnosis.BIAS_PER_RANK),
        (2.25, diagnosis.PADDING),
        (6.0, diagnosis.LOSS_SCALED),
        (0.4, diagnosis.LOSS_SCALED),
        (2.1, diagnosis.FORWARD),
    ],
)
def test_losses(seen: float, cause: str) -> None:
    supposed = {diagnosis.BIAS_PER_RANK: 2.5, diagnosis.PADDING: 2.25}
    facts = LossFacts(seen=seen, expected=2.0, supposed=supposed, first_layer=("3", 0.1))
    found = diagnose_loss(facts, DEGREES, 1e-4, step=1)
    assert found.cause == cause
    assert found.tensor == "output of layer 3"


def test_a_model_that_is_not_its_reference_is_not_the_layouts_fault() -> None:
    facts = LossFacts(seen=2.1, expected=2.0, other_family=True)
    assert diagnose_loss(facts, DEGREES, 1e-4, step=1).cause == diagnosis.FAMILY


def update(**changes: Any) -> UpdateFacts:
    plain: dict[str, Any] = {
        "name": "3.w", "error": 0.5, "max_abs": 0.1, "fit": BAD, "decay": BAD, "learning_rate": 0.01,
        "weight_decay": 0.1,
    }  # fmt: skip
    return UpdateFacts(**plain | changes)


@pytest.mark.parametrize(
    ("facts", "cause", "says"),
    [
        (update(fit=Fit(2.0, 1e-5)), diagnosis.LEARNING_RATE, "0.02 instead of 0.01"),
        (update(decay=Fit(0.001, 1e-4)), diagnosis.DECAY, "decay of 0 instead of 0.1"),
        (update(decay=Fit(-0.001, 1e-4)), diagnosis.DECAY, "decay of 0.2 instead of 0.1"),
        (update(), diagnosis.OPTIMIZER, "elsewhere"),
    ],
)
def test_updates(facts: UpdateFacts, cause: str, says: str) -> None:
    found = diagnose_updates([facts], ["1.w"], step=1)
    assert found.cause == cause
    assert says in found.why
    assert "the wrong parameter group" in found.why or cause == diagnosis.OPTIMIZER


def test_copies_of_experts_on_tensor_parallel_ranks_are_compared_whole() -> None:
    """A bias behind experts' sum is whole over tensor parallelism, and cut over the ranks of experts."""
    mesh, whole = Mesh.of(tp=2, dp=2, ep=2), torch.randn(4, 3)
    spec = ParamSpec(name="1.b", layer=1, shape=(4, 3), init=Init(kind="zeros"), hf=("b",), experts=0)
    known, nothing = (
        {"1.b": TensorInfo(shape=(2, 3), spec=spec, copy=False)},
        dict.fromkeys(["weights", "biases", "steps"], ()),
    )
    ranks = []
    for rank in range(mesh.size):
        (_, at), (_, tp) = (mesh.at(rank).along(axis) for axis in ("ep", "tp"))
        own = {"1.b": whole[2 * at : 2 * at + 2] + 0.5 * tp * at}  # the second one's copy has drifted
        ranks.append(RankObservation(rank=rank, known=known, built=own, outputs={}, **nothing))
    found = built_weights(RunObservation(mesh=mesh, micro_batches=1, clipping=0.0, ranks=ranks))["1.b"]
    first, second = found.shards
    assert torch.equal(found.values, whole)
    assert torch.equal(first, whole)
    assert torch.equal(second, torch.cat([whole[:2], whole[2:] + 0.5]))
