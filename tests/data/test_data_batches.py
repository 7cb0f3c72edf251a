"""The order of samples depends on the seed and the global sample index alone."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.data.batches import Batches, EvaluationBatches, Shuffled
from dsx.data.corpus import Sequences
from dsx.errors import DataError

S = 3


def sequences(count: int) -> Sequences:
    """Sequence ``i`` begins with token ``i * S``."""
    return Sequences(np.arange(count * S + 1, dtype=np.uint32), S)


def rank_batches(
    count: int, layout: tuple[int, int, int], dp_rank: int, seed: int = 0, **keys: int
) -> Batches:
    dp, micro, accumulation = layout
    return Batches(
        Shuffled(sequences(count), seed=seed),
        micro_batch_size=micro,
        accumulation=accumulation,
        dp=dp,
        dp_rank=dp_rank,
        **keys,
    )


def global_order(count: int, layout: tuple[int, int, int], steps: int, **keys: int) -> list[list[int]]:
    """Sequence numbers of every step, in global order, as all dp ranks of a layout see them together."""
    dp, micro, accumulation = layout
    ranks = [rank_batches(count, layout, rank, **keys) for rank in range(dp)]
    out: list[list[int]] = []
    for _ in range(steps):
        step: list[int] = []
        for _ in range(accumulation):
            for batches in ranks:
                inputs, labels = next(batches)
                assert inputs.shape == labels.shape == (micro, S)
                assert inputs.dtype == labels.dtype == torch.int64
                assert torch.equal(inputs + 1, labels)  # this corpus counts upwards
                step += (inputs[:, 0] // S).tolist()
        out.append(step)
    return out


def factorisations(total: int) -> st.SearchStrategy[tuple[int, int, int]]:
    divisors = [d for d in range(1, total + 1) if total % d == 0]
    return st.sampled_from(
        [
            (dp, micro, total // dp // micro)
            for dp in divisors
            for micro in divisors
            if total % (dp * micro) == 0
        ]
    )


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(24, 100), seed=st.integers(0, 5))
def test_every_layout_sees_the_same_steps(data: st.DataObject, count: int, seed: int) -> None:
    total = data.draw(st.sampled_from([1, 2, 6, 8, 12, 24]))
    one, other = data.draw(factorisations(total)), data.draw(factorisations(total))
    steps = 2 * count // total + 2
    assert global_order(count, one, steps, seed=seed) == global_order(count, other, steps, seed=seed)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(24, 100), before=st.integers(0, 12))
def test_resume_continues_the_order_in_another_layout(data: st.DataObject, count: int, before: int) -> None:
    one, other = data.draw(factorisations(12)), data.draw(factorisations(12))
    first = rank_batches(count, one, 0)
    for _ in range(before * one[2]):
        next(first)
    assert first.cursor == before * 12
    resumed = global_order(count, other, 5, cursor=first.cursor)
    assert resumed == global_order(count, one, before + 5)[before:]


@settings(max_examples=30, deadline=None)
@given(count=st.integers(4, 60), seed=st.integers(0, 5))
def test_every_epoch_is_every_sequence_once(count: int, seed: int) -> None:
    stream = [index for step in global_order(count, (1, 1, 1), 3 * count, seed=seed) for index in step]
    epochs = [stream[epoch * count : (epoch + 1) * count] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(count)) for epoch in epochs)


def test_epochs_and_seeds_differ() -> None:
    stream = [index for step in global_order(50, (1, 1, 1), 100) for index in step]
    assert stream[:50] != stream[50:]
    assert stream[:50] != list(range(50))
    assert global_order(50, (1, 1, 1), 50, seed=1) != global_order(50, (1, 1, 1), 50, seed=2)


def test_cursor_is_settable() -> None:
    batches = rank_batches(40, (2, 2, 3), 1)
    third = list(islice(batches, 3))[2][0]
    batches.cursor = 8
    assert torch.equal(next(batches)[0], third)
    for wrong in (-4, 6):
        with pytest.raises(
            DataError, match=f"data cursor {wrong}: no micro-batch begins there with 2 sequences x 2"
        ):
            batches.cursor = wrong


def test_text_smaller_than_a_step() -> None:
    rank_batches(24, (2, 3, 4), 0)
    with pytest.raises(DataError) as error:
        rank_batches(23, (2, 3, 4), 0)
    assert str(error.value).startswith("train_batch_size: one step takes 24 sequences (3 per micro-batch x 4")
    assert "has 23 of 3 tokens" in str(error.value)


def evaluated(count: int, dp: int, **keys: int | None) -> list[list[int]]:
    return [
        [
            int(row[0]) // S
            for inputs, _ in EvaluationBatches(
                sequences(count), micro_batch_size=2, dp=dp, dp_rank=rank, **keys
            )
            for row in inputs
        ]
        for rank in range(dp)
    ]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(12, 90), dp=st.integers(1, 3))
def test_evaluation_is_disjoint_and_even(count: int, dp: int) -> None:
    ranks = evaluated(count, dp)
    flat = [index for rank in ranks for index in rank]
    assert len(set(flat)) == len(flat)
    unit = 2 * dp
    assert len(flat) == count // unit * unit
    assert {len(rank) for rank in ranks} == {len(flat) // dp}


def test_evaluation_is_the_same_in_every_layout_and_time() -> None:
    wanted = set(evaluated(100, 1, max_tokens=48 * S)[0])
    assert len(wanted) == 48
    for dp in (2, 3, 4, 6):
        ranks = evaluated(100, dp, max_tokens=48 * S)
        assert {index for rank in ranks for index in rank} == wanted
    assert min(wanted) < 25  # from all over the split, not its first documents
    assert max(wanted) > 75
    batches = EvaluationBatches(sequences(100), micro_batch_size=2, dp=2, dp_rank=1, max_tokens=48 * S)
    assert len(batches) == 12
    assert all(torch.equal(one[0], two[0]) for one, two in zip(batches, batches, strict=True))


def test_evaluation_takes_at_least_one_batch() -> None:
    assert [len(rank) for rank in evaluated(100, 2, max_tokens=1)] == [2, 2]
    with pytest.raises(DataError, match="has 3 sequences of 3 tokens, one evaluation takes 4"):
        evaluated(3, 2)
