"""Samples of a user's own: their shapes, their order, and ranks that have different ones."""

from __future__ import annotations

from itertools import islice
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, StackDataset, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

import ranks
from dsx.config.schema import DataConfig
from dsx.data.batches import Batches, Shuffled
from dsx.data.corpus import Sequences
from dsx.data.own import OwnCorpus, OwnText, require_same_everywhere
from dsx.errors import DataError

S = 6
DATA = DataConfig(sequence_length=S, source="own", tokenizer="none", seed=3)


class Own(Dataset):
    """Whatever ``samples`` holds."""

    def __init__(self, samples: Any, digest: Any = "v1", **more: Any) -> None:
        self.samples, self.digest = samples, digest
        vars(self).update(more)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def batches(corpus: OwnCorpus, *, dp: int = 1, dp_rank: int = 0, micro: int = 2) -> Batches:
    samples = OwnText(corpus, DATA).samples()
    return Batches(samples, micro_batch_size=micro, accumulation=1, dp=dp, dp_rank=dp_rank)


TOKENS = torch.arange(20 * (S + 1)).reshape(20, S + 1)


def test_the_order_is_a_texts_of_as_many_sequences() -> None:
    """The same permutation, in every layout: two ranks of two rows see what one rank of four does."""
    text = Shuffled(Sequences(np.arange(20 * S + 1, dtype=np.uint32), S), seed=3)
    whole = [inputs[:, 0] // (S + 1) for inputs, _ in islice(batches(Own(TOKENS), micro=4), 10)]
    assert torch.cat(whole).tolist() == [int(text.take(g)[0][0]) // S for g in range(40)]
    halves = [islice(batches(Own(TOKENS), dp=2, dp_rank=rank), 10) for rank in range(2)]
    for four, left, right in zip(whole, *halves, strict=True):
        assert torch.cat([left[0], right[0]])[:, 0].floor_divide(S + 1).tolist() == four.tolist()


def rows_of(corpus: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """All samples in their own order."""
    sequences = OwnText(corpus, DATA)._train
    found = [sequences.window(index) for index in range(len(sequences))]
    return torch.stack([one for one, _ in found]), torch.stack([two for _, two in found])


@pytest.mark.parametrize(
    "samples",
    [
        TOKENS,
        TOKENS.tolist(),
        TOKENS.numpy().astype(np.int32),
        TOKENS.numpy().astype(np.uint16),
        StackDataset(input_ids=TOKENS),
        StackDataset(input_ids=TOKENS, labels=TOKENS, text=["..."] * 20),
        TensorDataset(TOKENS[:, :-1], TOKENS[:, 1:]),
        datasets.Dataset.from_dict({"input_ids": TOKENS.tolist()}),
        datasets.Dataset.from_dict({"input_ids": TOKENS.tolist(), "attention_mask": [[1] * (S + 1)] * 20}),
        datasets.Dataset.from_dict({"input_ids": TOKENS.tolist()}).with_format("torch"),
    ],
    ids=lambda samples: type(samples).__name__,
)
def test_samples_of_every_shape_are_the_same_batches(samples: Any) -> None:
    inputs, labels = rows_of(Own(samples))
    assert inputs.dtype == labels.dtype == torch.int64
    assert torch.equal(inputs, TOKENS[:, :-1])
    assert torch.equal(labels, TOKENS[:, 1:])


def test_labels_of_a_dict_are_those_that_transformers_shifts() -> None:
    """Masked prompts: the loss of transformers' model, which shifts them itself."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    ids = TOKENS[:4] % 256
    labels = ids.masked_fill(torch.arange(S + 1) < 3, LabelSmoother.ignore_index)
    inputs, shifted = rows_of(Own(StackDataset(input_ids=ids, labels=labels)))
    loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), shifted.flatten())
    assert loss.item() == pytest.approx(model(ids, labels=labels).loss.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        (torch.arange(S), rf"its token ids are int64 \[{S}\], not integers \[{S + 1}\]"),
        (torch.zeros(S + 1), "its token ids are float32"),
        (torch.zeros(1, S + 1, dtype=torch.long), r"its token ids are int64 \[1, 7\]"),
        ((torch.arange(S), torch.arange(S + 1)), r"its labels are int64 \[7\], not integers \[6\]"),
        ({"tokens": torch.arange(S + 1)}, r"no input_ids among \['tokens'\]"),
        ("text", "its token ids: "),
        (None, "its token ids: "),
        ({"input_ids": TOKENS[0], "attention_mask": [0] + [1] * S}, "leaves out positions that are trained"),
        ({"input_ids": TOKENS[0], "attention_mask": [1] * S + [0]}, "leaves out positions that are trained"),
    ],
)
def test_a_sample_of_another_shape_is_refused_with_its_number(sample: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as error:
        OwnText(Own([TOKENS[0], sample], name="mine"), DATA)._train.window(1)
    assert error.value.where == "sample 1 of mine"


APART = DATA.model_copy(update={"documents": "apart"})
POSITIONS = torch.tensor([0, 1, 2, 0, 1, 0, 1])


@pytest.mark.parametrize(
    "sample",
    [
        (TOKENS[0, :-1], TOKENS[0, 1:], POSITIONS[:-1]),
        {"input_ids": TOKENS[0], "position_ids": POSITIONS.tolist()},
    ],
)
def test_documents_apart_by_positions_of_ones_own(sample: Any) -> None:
    samples = OwnText(Own([sample] * 2), APART).samples()
    (ids, positions), labels = next(Batches(samples, micro_batch_size=2, accumulation=1, dp=1, dp_rank=0))
    assert torch.equal(ids, TOKENS[[0, 0], :-1])
    assert torch.equal(labels, TOKENS[[0, 0], 1:])
    assert positions.tolist() == [POSITIONS[:-1].tolist()] * 2


@pytest.mark.parametrize("sample", [TOKENS[0], (TOKENS[0, 1:], TOKENS[0, 1:]), {"input_ids": TOKENS[0]}])
def test_documents_apart_need_positions(sample: Any) -> None:
    with pytest.raises(DataError, match=r'it has no positions, and dsx.data.documents is "apart"'):
        OwnText(Own([sample]), APART)._train.window(0)


def test_padding_at_the_end_that_is_not_trained_on_is_taken() -> None:
    labels = TOKENS[0].masked_fill(torch.arange(S + 1) > 4, -100)
    sample = {"input_ids": TOKENS[0], "labels": labels, "attention_mask": [1] * 5 + [0] * 2}
    assert torch.equal(rows_of(Own([sample]))[1][0], labels[1:])


@pytest.mark.parametrize(
    ("corpus", "says"),
    [
        (TOKENS, "data set Tensor: a run needs its length, a sample at each index, and its digest"),
        (Own(TOKENS, digest=None), "its digest, a string"),
        (SimpleNamespace(digest="v1"), "a run needs its length"),
        (Own([]), "it has no samples"),
        (Own(TOKENS, held_out=Own([])), "data set Own, held out: it has no samples"),
    ],
)
def test_what_is_no_corpus(corpus: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        OwnText(corpus, DATA)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"streaming": True}, "streaming has no meaning"),
        ({"text_column": "content"}, "text_column has no meaning"),
        ({"source": "text.jsonl"}, 'tokenizer "none" is for samples that are ids'),
        (
            {"source": "python-stdlib", "sources": [{"source": "own"}], "tokenizer": "bytes"},
            "cannot be mixed",
        ),
    ],
)
def test_settings_that_only_text_has(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        DataConfig(**({"sequence_length": S, "source": "own", "tokenizer": "none"} | more))


def differing(rank: int, world_size: int, kind: str) -> str:
    del world_size
    digest = f"v{rank}" if kind == "digest" else "v1"
    samples = TOKENS[: 20 - rank] if kind == "length" else TOKENS
    samples = torch.zeros(3, S) if kind == "shape" and rank == 1 else samples
    try:
        require_same_everywhere(OwnText(Own(samples, digest), DATA))
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("same", ""),
        ("digest", 'rank 1 has (\'digest "v1"'),
        ("length", "rank 1 has ('digest \"v1\"', '19 samples')"),
        ("shape", "sample 0 of Own: its token ids are float32 [6]"),
    ],
)
def test_ranks_with_other_data_all_say_so(kind: str, says: str) -> None:
    found = ranks.run(differing, 2, kind)
    assert found[0] == found[1]
    assert says in found[0] if says else found[0] == ""
