"""GPT-2 (Radford et al. 2019): learned positions, LayerNorm before attention and MLP, GELU, ties."""

from __future__ import annotations

from dsx.nn.families.builder import Layer, LayerListBuilder


def gpt2(build: LayerListBuilder) -> list[Layer]:
    """Word embedding, positions, blocks, final norm, head."""
    num_blocks = build.model.num_layers
    return [
        build.word_embedding(),
        build.positions(1),
        *build.blocks(2),
        build.final_norm(2 + num_blocks),
        build.head(3 + num_blocks),
    ]
