"""Packs beside trl's, beside a naive packing, and beside what each window must hold."""

from __future__ import annotations

from bisect import insort
from itertools import chain, pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st
from trl import pack_dataset

from dsx.data.batches import Batches, EvaluationBatches, Mixed, Prefetched, Shuffled
from dsx.data.order import Shares
from dsx.data.packs import Packs, Sequences, kept_apart, pack

PAD = 65535

documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=40)


def packed(masks: list[list[bool]], length: int, *, drop: bool = False) -> Packs:
    """Documents whose tokens are numbered, so that each is known again wherever it lies."""
    trained = np.array(list(chain.from_iterable(masks)), np.uint8)
    sizes = np.array([[len(mask), sum(mask[1:])] for mask in masks])
    return Packs(np.arange(len(trained)), trained, sizes, length, pad_id=PAD, drop=drop)


def pieces(packs: Packs) -> list[tuple[list[int], list[int]]]:
    """Every document of every pack, padding too: its ids and labels, found by its positions alone."""
    found = []
    for index in range(len(packs)):
        ids, labels, positions = packs.window(index)
        assert ids.shape == labels.shape == positions.shape == (packs.sequence_length,)
        assert ids.dtype == labels.dtype == positions.dtype == torch.int64
        begins = [*(positions == 0).nonzero().flatten().tolist(), packs.sequence_length]
        for begin, end in pairwise(begins):
            assert positions[begin:end].tolist() == list(range(end - begin))
            found.append((ids[begin:end].tolist(), labels[begin:end].tolist()))
    return found


@given(documents, st.integers(2, 12), st.booleans())
def test_every_document_is_in_one_pack_once(masks: list[list[bool]], length: int, drop: bool) -> None:
    packs, first, wanted, dropped, truncated = packed(masks, length, drop=drop), 0, {}, 0, 0
    for mask in masks:
        kept = mask[:length]
        long = len(mask) > length
        if any(kept[1:]) and not (drop and long):
            ids = list(range(first, first + len(kept)))
            labels = [at + 1 if on else -100 for at, on in zip(ids, kept[1:], strict=False)] + [-100]
            wanted[tuple(ids)] = labels
            truncated += long
        elif long:
            dropped += 1
        first += len(mask)
    found = pieces(packs)
    real = {tuple(ids): labels for ids, labels in found if ids[0] != PAD}
    assert real == wanted
    assert len(real) == sum(ids[0] != PAD for ids, _ in found)
    assert all({*ids} == {PAD} and {*labels} == {-100} for ids, labels in found if ids[0] == PAD)
    fill = packs.fill()
    assert (fill.documents, fill.truncated, fill.dropped) == (len(wanted), truncated, dropped)
    assert fill.tokens == sum(map(len, wanted))
    assert fill.trained == sum(label != -100 for labels in wanted.values() for label in labels)
    assert fill.places == fill.packs * length == len(packs) * length


@given(st.lists(st.integers(0, 12), max_size=60), st.integers(12, 40))
def test_packs_are_those_of_naive_best_fit(lengths: list[int], room: int) -> None:
    naive: list[list[int]] = []
    left: list[tuple[int, int, int]] = []  # room, when the pack came to have it, pack
    for turn, number in enumerate(sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))):
        if not lengths[number]:
            continue
        fits = next((one for one in left if one[0] >= lengths[number]), None)
        if fits is None:
            naive.append([])
            fits = (room, -1, len(naive) - 1)
        else:
            left.remove(fits)
        naive[fits[2]].append(number)
        insort(left, (fits[0] - lengths[number], turn, fits[2]))
    assert pack(np.array(lengths, int), room) == naive
    assert len(naive) <= 11 / 9 * -(-sum(lengths) // room) + 4


def test_as_many_packs_as_trl_makes() -> None:
    lengths = np.random.default_rng(0).lognormal(4, 1, 2000).astype(int).clip(1, 1024)
    rows = Dataset.from_dict({"input_ids": [[7] * int(length) for length in lengths]})
    assert len(pack(lengths, 1024)) == len(
        pack_dataset(rows, 1024, strategy="bfd", map_kwargs={"batch_size": 2000})
    )


MASKS = [[False] * (n % 3) + [True] * (2 + 7 * n % 11) for n in range(64)]


def taken(batches: Batches | Prefetched, count: int) -> list[torch.Tensor]:
    """Rows of ids, positions and labels."""
    rows = []
    for _ in range(count):
        (ids, positions), labels = next(batches)
        rows += list(torch.stack([ids, positions, labels], 1))
    return rows


def test_the_same_order_in_every_layout_and_after_a_resume() -> None:
    packs = packed(MASKS, 16)
    steps, samples = len(packs) // 4 + 3, Shuffled(packs, seed=5)  # into the second epoch
    whole = taken(Batches(samples, micro_batch_size=4, accumulation=1, dp=1, dp_rank=0), steps)
    for dp in (2, 4):
        ranks = [
            Batches(samples, micro_batch_size=1, accumulation=4 // dp, dp=dp, dp_rank=rank)
            for rank in range(dp)
        ]
        rows = [taken(rank, steps * 4 // dp) for rank in ranks]
        together = list(chain.from_iterable(zip(*rows, strict=True)))
        assert torch.equal(torch.stack(together), torch.stack(whole))
    resumed = Batches(samples, micro_batch_size=2, accumulation=2, dp=1, dp_rank=0, cursor=12)
    ahead = Prefetched(resumed, depth=2, pin=False)
    assert torch.equal(torch.stack(taken(ahead, 4)), torch.stack(whole[12:20]))
    ahead.close()


@pytest.mark.parametrize("most", [None, 5 * 16, 1])
def test_evaluations_are_of_the_same_packs_in_every_layout(most: int | None) -> None:
    """Fewer packs than one micro-batch on every rank are enough: what is added has no label."""
    packs, found = packed(MASKS[:40], 16), []
    for dp, rows in ((1, 1), (1, 2), (2, 4), (4, 16)):
        ranks = [
            EvaluationBatches(packs, micro_batch_size=rows, dp=dp, dp_rank=rank, max_tokens=most)
            for rank in range(dp)
        ]
        assert len({len(rank) for rank in ranks}) == 1
        batches = [batch for rank in ranks for batch in rank]
        assert all(labels.shape == ids.shape == (rows, 16) for (ids, _), labels in batches)
        labels = torch.cat([labels for _, labels in batches])
        trained = labels[(labels != -100).any(1)]
        found.append(sorted(map(tuple, trained.tolist())))
    assert all(one == found[0] for one in found)
    assert len(found[0]) == {None: len(packs), 80: 5, 1: 1}[most]


def test_packs_and_text_are_mixed_with_positions() -> None:
    tokens = np.array([1, 2, 3, 0, 4, 5, 0] * 20)
    parts = {"text": Sequences(tokens, 16, end_id=0), "chat": packed(MASKS, 16)}
    batches = Batches(
        Mixed(parts, Shares([1, 1], seed=0), seed=0), micro_batch_size=4, accumulation=1, dp=1, dp_rank=0
    )
    (ids, positions), labels = next(batches)
    assert ids.shape == positions.shape == labels.shape == (4, 16)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20))
def test_text_apart_has_positions_from_every_end(tokens: list[int]) -> None:
    ids, labels, positions = kept_apart(torch.tensor(tokens), 0)
    wanted, at = [], 0
    for token in tokens[:-1]:
        wanted.append(at)
        at = 0 if token == 0 else at + 1
    assert positions.tolist() == wanted
    assert ids.tolist() == tokens[:-1]
    assert labels.tolist() == [-100 if now == 0 else then for now, then in pairwise(tokens)]


@pytest.mark.parametrize("index", [-1, 99])
def test_no_such_pack(index: int) -> None:
    with pytest.raises(IndexError):
        packed(MASKS, 16).window(index)
