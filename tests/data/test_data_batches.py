"""The order of samples depends on the seed and the global sample index alone; keyed permutations."""

from __future__ import annotations

import math
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.data.batches import Batches, EvaluationBatches, Shuffled
from dsx.data.corpus import Sequences
from dsx.data.order import is_held_out, keyed_hash, permute
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


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 400), key=st.integers(0, 2**64 - 1))
def test_permute_is_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


@pytest.mark.parametrize("size", [5, 12, 37])
def test_permutations_are_uniform(size: int) -> None:
    """Every (index, image) pair is about as frequent over keys as under numpy's permutations (chi-square)."""
    draws = 3000
    counts = np.zeros((size, size))
    reference = np.zeros((size, size))
    generator = np.random.default_rng(0)
    for key in range(draws):
        counts[np.arange(size), [permute(i, size, key) for i in range(size)]] += 1
        reference[np.arange(size), generator.permutation(size)] += 1

    def chi_square(table: np.ndarray) -> float:
        return float(((table - draws / size) ** 2 / (draws / size)).sum())

    degrees = (size - 1) ** 2
    bound = degrees + 5 * math.sqrt(2 * degrees)  # 5 sigma of the chi-square distribution
    assert chi_square(reference) < bound
    assert chi_square(counts) < bound


def test_permutations_of_neighbouring_keys_are_unrelated() -> None:
    size = 5000
    one, other = ([permute(i, size, key) for i in range(size)] for key in (1, 2))
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.06  # 4 sigma
    assert abs(np.corrcoef(one, range(size))[0, 1]) < 0.06
    assert sum(a == b for a, b in zip(one, other, strict=True)) < 10  # a Poisson variable of mean 1


def test_permute_refuses_an_index_outside() -> None:
    with pytest.raises(IndexError, match="7 is outside"):
        permute(7, 7, 0)


@settings(max_examples=60, deadline=None)
@given(fraction=st.floats(0, 0.99), seed=st.integers(0, 1000), first=st.integers(0, 10**9))
def test_held_out_share_of_any_run_of_documents(fraction: float, seed: int, first: int) -> None:
    chosen = sum(is_held_out(i, fraction, seed) for i in range(first, first + 300))
    assert abs(chosen - 300 * fraction) < 1.001
    if fraction == 0:
        assert chosen == 0


def test_held_out_depends_on_the_seed() -> None:
    choices = {tuple(i for i in range(100) if is_held_out(i, 0.05, seed)) for seed in range(200)}
    assert len(choices) == 20  # every phase of one in twenty occurs


def test_order_is_part_of_the_checkpoint_format() -> None:
    """A resumed run continues the order that it began with: these values must never change."""
    key = keyed_hash("train", 0, 0)
    assert key == 7817523544103016155
    assert [permute(i, 1_000_003, key) for i in range(5)] == [43031, 215348, 502490, 710979, 897917]
