"""The run that computes: a small GPT-2 on two ranks.

All train the same blocks, transformers' own; torch puts its own modules around them.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from schedule_bench.workload import Workload
from torch import nn
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from dsx.checkpoint.claims import model_of
from dsx.models import families
from dsx.models.spec import Model
from dsx.nn import TensorParallel
from dsx.nn.split import WeightGradients

VOCABULARY = 256
"""Small, so that its ends make no rank slower; a multiple of dsx's padding, so that all models are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the model and its micro-batches.

    Attributes:
        hidden: Width.
        blocks: Transformer blocks, a multiple of the number of virtual stages.
        heads: Attention heads.
        sequence_length: Tokens per sample.
        rows: Samples per micro-batch.
    """

    hidden: int = 128
    blocks: int = 8
    heads: int = 4
    sequence_length: int = 96
    rows: int = 2


def spec(sizes: Sizes) -> Model:
    """The model, untied so that torch's stages need no exchange of gradients, without dropout."""
    return model_of({"model_type": "gpt2", **_settings(sizes)})


def _settings(sizes: Sizes) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "n_embd": sizes.hidden,
        "n_layer": sizes.blocks,
        "n_head": sizes.heads,
        "n_positions": sizes.sequence_length,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "tie_word_embeddings": False,
    }


def workload(sizes: Sizes, num_micro_batches: int) -> Workload:
    """The model for every engine, and random tokens."""
    model, alone = spec(sizes), TensorParallel()
    generator = torch.Generator().manual_seed(1)
    shape = (num_micro_batches * sizes.rows, sizes.sequence_length + 1)
    ids = torch.randint(VOCABULARY, shape, generator=generator)

    def layers(num_chunks: int, split: WeightGradients | None) -> list[LayerSpec]:
        del num_chunks
        return list(families.layers(model, alone, dtype=torch.float32, seed=7, split=split))

    return Workload(
        layers=layers,
        loss_fn=families.loss(model, alone),
        partition_method="type:block",
        module=lambda stage, num_stages: _stage(sizes, stage, num_stages),
        inputs=ids[:, :-1].contiguous(),
        labels=ids[:, 1:].contiguous(),
        num_micro_batches=num_micro_batches,
    )


def alone_seconds(sizes: Sizes, num_micro_batches: int, tries: int = 5) -> float:
    """Forward and backward of all micro-batches through the plain model on one rank, while all ranks do."""
    load = workload(sizes, num_micro_batches)
    net = load.module(0, 1)
    spent = []
    for _ in range(tries):
        begun = time.perf_counter()
        for inputs, labels in load.batches():
            load.loss_fn(net(inputs), labels).backward()
        spent.append(time.perf_counter() - begun)
    return statistics.median(spent)


class _Embeddings(nn.Module):
    """Words and learned positions: ids [B, S] to [B, S, H]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCABULARY, sizes.hidden)
        self.position = nn.Embedding(sizes.sequence_length, sizes.hidden)

    def forward(self, ids_BS: torch.Tensor) -> torch.Tensor:
        x_BSH: torch.Tensor = self.word(ids_BS) + self.position.weight[: ids_BS.shape[1]]
        return x_BSH


class _Block(nn.Module):
    """A block of transformers' GPT-2, [B, S, H] to the same."""

    def __init__(self, model: Any, number: int) -> None:
        super().__init__()
        self.block = GPT2Block(model, layer_idx=number)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        y = self.block(x_BSH, use_cache=False)
        found: torch.Tensor = y[0] if isinstance(y, tuple) else y
        return found


def _stage(sizes: Sizes, stage: int, num_stages: int) -> nn.Module:
    """Virtual stage ``stage`` of ``num_stages``, an equal share of the blocks."""
    parts: list[nn.Module] = [_Embeddings(sizes)] if stage == 0 else []
    model = GPT2Config(**_settings(sizes), attn_implementation="sdpa")
    each = sizes.blocks // num_stages
    parts += [_Block(model, number) for number in range(stage * each, (stage + 1) * each)]
    if stage == num_stages - 1:
        parts += [nn.LayerNorm(sizes.hidden), nn.Linear(sizes.hidden, VOCABULARY, bias=False)]
    return nn.Sequential(*parts)
