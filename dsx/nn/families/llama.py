"""Llama (Touvron et al. 2023, arXiv:2302.13971; Llama 3, arXiv:2407.21783): RoPE, RMSNorm, SwiGLU, GQA.

Also the layers of Mistral (arXiv:2310.06825: sliding window), Qwen2 (arXiv:2407.10671: biases on Q, K and V),
Qwen3 (arXiv:2505.09388: norms of query and key heads) and GPT-NeoX (arXiv:2204.06745: LayerNorm, parallel
residual, a part of each head rotated).
"""

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
