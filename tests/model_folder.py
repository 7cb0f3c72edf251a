"""A small Hugging Face model folder for tests: random weights, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def write_model_folder(folder: Path) -> Path:
    """GPT-2 with two layers, 300 rows of vocabulary and 64 positions."""
    torch.manual_seed(0)
    sizes = GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    GPT2LMHeadModel(sizes).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: i for i, letter in enumerate([*alphabet, "<end>"])}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(folder)
    return folder
