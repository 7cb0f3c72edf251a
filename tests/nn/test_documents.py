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
from dsx.nn.documents import joined, parted
from dsx.nn.parallel import TensorParallel

LENGTHS = (5, 1, 7, 3)


def pack(seed: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (1, sum(LENGTHS)), generator=generator)
    return ids, torch.cat([torch.arange(length) for length in LENGTHS])[None]


def calls(model: Model, recompute: Any) -> list[Any]:
    """The layer list on one rank."""
    listed = families.LayerListBuilder(
        model=model,
        tp=TensorParallel(),
        dtype=torch.float32,
        device="cpu",
        seed=3,
        recompute=recompute,
        pad_multiple=1,
    ).entries()
    found: list[Any] = []
    for entry in listed:
        module = found[0] if entry.tied and found else entry.build()
        use = entry.forward_fn
        found.append(module if use is None else lambda given, use=use, module=module: use(module, given))
    return found


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral", "qwen3", "gpt_neox", "gemma2"])
@pytest.mark.parametrize("implementation", ["dsx", "transformers"])
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
        x, beside, _ = parted(first((inputs, positions)))
        x = x.detach().requires_grad_()
        value: Any = joined(x, beside, positions)
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
