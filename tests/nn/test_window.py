"""Masks of sliding windows against transformers' own rule, and attention with them at odd lengths."""

import pytest
import tiny_models
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from dsx.nn.attention import CausalMask


@pytest.mark.parametrize(("length", "size"), [(13, 5), (16, 1), (9, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_is_that_of_transformers(length, size, dtype):
    mask = CausalMask(size)(length, dtype, torch.device("cpu"))
    sees = sliding_window_causal_mask_function(size)
    place = torch.arange(length)
    allowed = sees(0, 0, place[:, None], place[None])
    expected = torch.zeros(length, length, dtype=dtype).masked_fill_(~allowed, -torch.inf)
    assert torch.equal(mask, expected)
    assert allowed.sum(-1).max() == size
    # As the memory-efficient kernel wants it, which else makes a copy.
    assert mask.stride(0) % 8 == 0


def test_a_window_that_holds_the_sequence_needs_no_mask():
    assert CausalMask(8)(8, torch.float32, torch.device("cpu")) is None


def test_the_mask_is_made_once_and_again_for_another_length():
    window, cpu = CausalMask(4), torch.device("cpu")
    with torch.inference_mode():
        first = window(12, torch.float32, cpu)
    assert not first.is_inference()
    assert window(12, torch.float32, cpu) is first
    assert window(11, torch.float32, cpu).shape == (11, 11)
    assert window(11, torch.bfloat16, cpu).dtype == torch.bfloat16


@pytest.mark.parametrize("length", [9, 10, 11, 21])
def test_attention_at_lengths_about_the_window(length):
    """Mistral's window is 10 here: without a mask, and with one whose rows are padded in memory."""
    hf = tiny_models.reference("mistral")
    model = tiny_models.Model("mistral").load(hf.state_dict())
    ids, _ = tiny_models.batch("mistral", 2, length)
    vocab = hf.config.vocab_size
    torch.testing.assert_close(model(ids)[..., :vocab], hf(ids).logits, atol=2e-5, rtol=1e-5)
