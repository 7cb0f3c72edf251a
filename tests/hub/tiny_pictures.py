"""Tiny composite models of six families, and micro-batches with pictures as their processors make them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from all_families import parity, tiny

SIX = ["gemma3", "qwen2_5_vl", "qwen3_vl", "llama4", "mistral3", "internvl"]
VOCABULARY, IMAGE, SEQUENCE, ROWS, MICRO_BATCHES = 300, 298, 24, 2, 2
_SIDE, _BEGIN = 64, 297


def model_of(family: str, **text: Any) -> Any:
    """A random model; a picture of 64 x 64 pixels is four of its tokens, or one on a grid of 2 x 2."""
    config = tiny.tiny_composite(family, vocab_size=VOCABULARY, **text)
    for name in ("image_token_index", "image_token_id"):
        if hasattr(config, name):
            setattr(config, name, IMAGE)
    if family.startswith("qwen"):
        config.vision_start_token_id = _BEGIN
    vision = config.vision_config
    if hasattr(vision, "image_size"):
        vision.image_size = [_SIDE, _SIDE] if family == "internvl" else _SIDE
    if family == "internvl":
        vision.patch_size = [16, 16]
    if family == "llama4":
        vision.intermediate_size = 256  # four patches of 64 numbers are one token's
    config.mm_tokens_per_image = 4
    return parity.random_model(config)


def pictures_of(family: str, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """What a processor makes of so many pictures: pixels, and their sizes or grids."""
    if family.startswith("qwen"):
        grids = torch.tensor([[1, 4, 4]] * count)
        return {
            "pixel_values": torch.randn(16 * count, 3 * 2 * 16 * 16, generator=generator),
            "image_grid_thw": grids,
        }
    pixels = torch.randn(count, 3, _SIDE, _SIDE, generator=generator)
    sizes = {"image_sizes": torch.tensor([[_SIDE, _SIDE]] * count)} if family == "mistral3" else {}
    return {"pixel_values": pixels, **sizes}


def micro_batches(
    family: str, step: int, rows: tuple[int, ...] = (ROWS,) * MICRO_BATCHES
) -> Iterator[tuple[Any, Any]]:
    """((ids, what the processor gives beside them), labels); ``rows`` have a picture, two tokens in."""
    generator = torch.Generator().manual_seed(100 + step)
    for shown in rows:
        ids = torch.randint(3, _BEGIN, (ROWS, SEQUENCE + 1), generator=generator)
        for row in range(shown):
            ids[row, 2 + row] = _BEGIN
            ids[row, 3 + row : 7 + row] = IMAGE
        given, labels = ids[:, :-1].contiguous(), ids[:, 1:].clone()
        labels[(labels == IMAGE) | (labels == _BEGIN)] = -100
        labels[:, :3] = -100
        extra = pictures_of(family, shown, generator) if shown else {}
        kinds = (given == IMAGE).long()
        if family == "gemma3":
            extra["token_type_ids"] = kinds
        if family.startswith("qwen"):
            extra["mm_token_type_ids"] = kinds
        yield (given, extra), labels
