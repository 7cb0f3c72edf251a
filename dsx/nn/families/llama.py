"""Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783): RoPE, RMSNorm, SwiGLU, GQA."""

from __future__ import annotations

from dsx.nn.families.builder import Layer, LayerListBuilder


def llama(build: LayerListBuilder) -> list[Layer]:
    """Word embedding, blocks, final norm, head."""
    num_blocks = build.model.num_layers
    return [
        build.word_embedding(),
        *build.blocks(1),
        build.final_norm(1 + num_blocks),
        build.head(2 + num_blocks),
    ]
