"""A user's own pipeline model, as DeepSpeed's pipeline tutorial writes them. Nothing of dsx."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

VOCAB, WIDTH = 50, 16


class Embedding(nn.Module):
    """Ids [B, S] to (hidden [B, S, H], mask [B, S])."""

    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Embedding(VOCAB, WIDTH)

    @property
    def weight(self) -> torch.Tensor:
        return self.word.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.word(ids), ids % 5 != 0


class Layer(nn.Module):
    """Masked mixing over the sequence, then an MLP; passes the mask on."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, mask = inputs
        kept = self.norm(hidden) * mask.unsqueeze(-1)
        return hidden + self.down(torch.tanh(self.up(kept + kept.mean(1, keepdim=True)))), mask


class Final(nn.Module):
    """Drops the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, inputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.norm(inputs[0])


def logits(embedding: Embedding, hidden: torch.Tensor) -> torch.Tensor:
    """The tied head."""
    return F.linear(hidden, embedding.word.weight)


def loss_fn(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def layers(count: int = 4) -> list[Any]:
    return [
        TiedLayerSpec("word", Embedding, tied_weight_attr="word.weight"),
        *(LayerSpec(Layer, WIDTH) for _ in range(count)),
        LayerSpec(Final),
        TiedLayerSpec("word", Embedding, forward_fn=logits, tied_weight_attr="word.weight"),
    ]


def config(zero: int, micro_batches: int, micro_batch_size: int = 2) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-5, "torch_adam": True}},
    }


def batches(step: int, dp: int, dp_rank: int, micro_batches: int, *, dynamic: bool, size: int = 2) -> Any:
    """This replica's micro-batches; with ``dynamic`` each has a length of its own."""
    for j in range(micro_batches):
        generator = torch.Generator().manual_seed(100 * step + j)
        length = 5 + (3 * j + step) % 4 if dynamic else 7
        ids = torch.randint(0, VOCAB, (dp * size, length + 1), generator=generator)
        mine = ids[dp_rank * size : (dp_rank + 1) * size]
        yield mine[:, :-1], mine[:, 1:]
