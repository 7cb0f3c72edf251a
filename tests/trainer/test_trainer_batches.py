"""Batches of collators as micro-batches, and which rank reads which, beside Accelerate's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from torch.utils.data import BatchSampler
from transformers import DataCollatorWithFlattening

from dsx.errors import DataError
from dsx.trainer.batches import Loading, ShareOfBatches, epoch, filler, micro_batch, tokens_in


def batch(ids, labels=None, mask=None, **more):
    made = {"input_ids": torch.tensor(ids), "labels": torch.tensor(ids if labels is None else labels), **more}
    return made if mask is None else made | {"attention_mask": torch.tensor(mask)}


def test_labels_are_shifted_and_padding_at_the_end_needs_no_mask():
    ids, labels = micro_batch(
        batch([[5, 6, 7, 0]], labels=[[5, 6, 7, -100]], mask=[[1, 1, 1, 0]]), multiple=1, needs_labels=True
    )
    assert ids.tolist() == [[5, 6, 7, 0]]
    assert labels.tolist() == [[6, 7, -100, -100]]


def test_lengths_are_rounded_up_with_tokens_that_train_nothing():
    ids, labels = micro_batch(batch([[5, 6, 7]]), multiple=4, needs_labels=True)
    assert ids.tolist() == [[5, 6, 7, 0]]
    assert labels.tolist() == [[6, 7, -100, -100]]


def test_documents_laid_end_to_end_keep_their_positions():
    made = DataCollatorWithFlattening(return_flash_attn_kwargs=True)(
        [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}]
    )
    (ids, positions), labels = micro_batch(made, multiple=4, needs_labels=True)
    assert ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert labels.tolist() == [[6, 7, -100, 9, -100, -100, -100, -100]]


def test_positions_of_one_document_are_left_out():
    ids, _ = micro_batch(batch([[5, 6]], position_ids=torch.tensor([[0, 1]])), multiple=1, needs_labels=True)
    assert ids.tolist() == [[5, 6]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (batch([[0, 5, 6]], mask=[[0, 1, 1]]), "padding_side"),
        (batch([[5, 0, 6]], mask=[[1, 0, 1]]), "leaves out tokens that others follow"),
        (batch([[5, 6]], mask=[[1, 0]], shift_labels=torch.tensor([[6, 7]])), "padding has labels"),
        (batch([[5, 6]], mask=[[[[1, 0], [1, 1]]]]), "4 dims"),
        (batch([[5, 6]], position_ids=torch.tensor([[3, 4]])), "do not count from 0"),
        (batch([[5, 6]], token_type_ids=torch.tensor([[0, 0]])), "token_type_ids"),
        ({"input_ids": torch.tensor([[5, 6]])}, "no labels"),
        ({"labels": torch.tensor([[5, 6]])}, "no input_ids"),
    ],
)  # fmt: skip
def test_batches_that_cannot_be_given_to_a_model(given, said):
    with pytest.raises(DataError) as caught:
        micro_batch(given, multiple=1, needs_labels=True)
    assert said in str(caught.value)


def test_a_filler_trains_nothing():
    ids, labels = filler(4)
    assert ids.shape == labels.shape == (1, 4)
    assert (labels == -100).all()


@pytest.mark.parametrize("size", [11, 12, 13])
@pytest.mark.parametrize("shares", [1, 2, 3])
def test_ranks_read_the_batches_that_accelerate_deals_them(size, shares):
    batches = BatchSampler(range(size), 2, drop_last=False)
    for index in range(shares):
        here = ShareOfBatches(batches, shares, index)
        assert list(here) == list(BatchSamplerShard(batches, shares, index, even_batches=False))
        assert len(here) == len(list(here))
        here.skip = 2 * shares
        assert list(here) == list(BatchSamplerShard(batches, shares, index, even_batches=False))[2:]


def loading(collate, shares, index):
    args = SimpleNamespace(
        per_device_train_batch_size=2, remove_unused_columns=False, dataloader_num_workers=0,
        dataloader_pin_memory=False, dataloader_persistent_workers=False, seed=3, data_seed=None,
        dataloader_multiprocessing_context=None, dataloader_prefetch_factor=None, dataloader_in_order=True,
        dataloader_drop_last=False, train_sampling_strategy="random", length_column_name="length",
    )  # fmt: skip
    return Loading(args=args, collate=collate, processing_class=None, columns=(), shares=shares, index=index)


def test_what_collators_draw_depends_on_the_batch_alone():
    """Not on the layout, nor on where training was resumed; and nothing else is drawn otherwise."""

    def noisy(samples):
        return {"input_ids": torch.tensor([samples]), "noise": torch.rand(1)}

    def read(shares, index, skip=0):
        how = loading(noisy, shares, index)
        return list(epoch(how.training(range(20), 8), how, 1, skip=skip))

    whole = read(1, 0)
    torch.manual_seed(99)
    before = torch.rand(1)
    torch.manual_seed(99)
    dealt = [read(2, 0), read(2, 1)]
    assert torch.rand(1) == before
    for number, wanted in enumerate(whole):
        found = dealt[number % 2][number // 2]
        assert torch.equal(found["input_ids"], wanted["input_ids"])
        assert found["noise"] == wanted["noise"]
    assert [each["noise"] for each in read(2, 1, skip=4)] == [each["noise"] for each in dealt[1][2:]]
    assert len({float(each["noise"]) for each in whole}) == len(whole)


def test_tokens_are_counted_with_and_without_padding():
    given = [batch([[5, 6, 0]], mask=[[1, 1, 0]]), batch([[5, 0, 0]])]
    assert tokens_in(given) == 6
    assert tokens_in(given, 0, all_of=False) == 3
