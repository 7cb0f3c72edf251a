"""What one document of a pack computes never depends on another, to the last bit and in every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
from torch import Tensor

from dsx.hub.read import hub_model
from dsx.models import families
from dsx.models.spec import HubModel, Model
from dsx.nn.attention import CausalMask
from dsx.nn.documents import PerMicroBatch, Places, Stream
from dsx.nn.parallel import TensorParallel

LENGTHS = (5, 1, 7, 3)


def pack(seed: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (1, sum(LENGTHS)), generator=generator)
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


def calls(model: Model, recompute: Any) -> list[Any]:
    """The layer list on one rank."""
    how: Any = {"dtype": torch.float32, "device": "cpu", "seed": 3, "recompute": recompute}
    listed = families.layers(model, TensorParallel(), pad_multiple=1, **how)
    found: list[Any] = []
    for entry in listed:
        use = getattr(entry, "forward_fn", None)
        module = entry.build() if use is None else found[0]
        found.append(module if use is None else lambda given, use=use, module=module: use(module, given))
    return found


@pytest.mark.parametrize(
    ("family", "implementation"),
    [
        *((family, "dsx") for family in ("llama", "mistral", "qwen3")),
        *((family, "transformers") for family in ("llama", "gpt2", "mistral", "qwen3", "gpt_neox", "gemma2")),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_another_document_changes_nothing(family: str, implementation: str, recompute: str) -> None:
    config = tiny_models.reference(family).config.to_dict()
    model: Model = hub_model(config) if implementation == "transformers" else tiny_models.Model(family).spec
    assert isinstance(model, HubModel) == (implementation == "transformers")
    first, *rest = calls(model, recompute)
    ids, positions = pack(0, model.vocab_size)
    others, _ = pack(1, model.vocab_size)
    begin, end = LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3])
    seen = []
    for change in (False, True):
        inputs = ids.clone()
        if change:
            inputs[:, :begin], inputs[:, end:] = others[:, :begin], others[:, end:]
        stream = Stream.of(first((inputs, positions)))
        assert stream.places is not None
        x = stream.hidden.detach().requires_grad_()
        value: Any = stream.then(x)
        for call in rest:
            value = call(value)
        logits = value[0] if isinstance(value, tuple) else value
        loss = F.cross_entropy(logits[0, begin:end].float(), ids[0, begin:end])
        loss.backward()
        assert x.grad is not None
        seen.append((logits[0, begin:end].detach(), x.grad[0]))
    (logits, gradient), (changed_logits, changed_gradient) = seen
    assert torch.equal(logits, changed_logits)
    assert torch.equal(gradient, changed_gradient)
    assert not gradient[:begin].any()
    assert not gradient[end:].any()
    assert gradient[begin:end].any()


def test_a_part_of_a_row_keeps_apart_what_the_row_does() -> None:
    """Documents are numbered in whole rows: their first parts need not hold a position 0."""
    _, positions = pack(0, 10)
    whole, cpu = Places.of_packs(positions), torch.device("cpu")
    row = CausalMask()(positions.shape[1], torch.float32, cpu, whole)
    assert row is not None
    part = slice(LENGTHS[0] - 2, sum(LENGTHS) - 1)
    places = Places(*(each[:, part] for each in whole if each is not None))
    assert places.positions[0, 0]
    mask = CausalMask()(places.positions.shape[1], torch.float32, cpu, places)
    assert mask is not None
    assert torch.equal(mask, row[..., part, part])


def test_positions_alone_keep_nothing_apart() -> None:
    _, positions = pack(0, 10)
    assert CausalMask()(positions.shape[1], torch.float32, torch.device("cpu"), Places(positions)) is None


@pytest.mark.parametrize("sums", [None, torch.ones(3, 2)])
@pytest.mark.parametrize("numbered", [None, False, True])
def test_what_crosses_a_boundary_is_read_as_it_was(sums: Tensor | None, numbered: bool | None) -> None:
    _, positions = pack(0, 10)
    places = None if numbered is None else Places.of_packs(positions) if numbered else Places(positions)
    stream = Stream(torch.zeros(1, 16, 4), sums, places)
    flat = stream.flat()
    assert isinstance(flat, Tensor) or all(isinstance(each, Tensor) for each in flat)
    assert Stream.of(flat, sums=sums is not None) == stream


def test_micro_batches_that_are_cut_of_one_tensor_are_told_apart() -> None:
    whole, kept = torch.arange(8).view(2, 4), PerMicroBatch()
    sums = [kept.of(each, "sum", lambda each=each: int(each.sum())) for each in whole.split(1)]
    assert sums == [6, 22]
    assert kept.of(whole[1:].view(1, 4), "sum", lambda: 0) == 22, "a view, as hooks hand it on"
