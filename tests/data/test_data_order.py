"""Keyed permutation and held-out choice."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsx.data.order import is_held_out, keyed_hash, permute


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
