"""Tiny models of transformers' families by sizes that all of them have, under one name for each."""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

_GPT2 = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
}


def tiny(
    family: str,
    *,
    vocabulary: int,
    width: int,
    heads: int,
    layers: int,
    ffn: int | None = None,
    kv_heads: int | None = None,
    **options: Any,
) -> PretrainedConfig:
    """The family's config of these sizes and further options of transformers; its defaults otherwise."""
    sizes = {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "num_key_value_heads": kv_heads,
    }
    names = _GPT2 if family == "gpt2" else {}
    given = {names.get(name, name): size for name, size in sizes.items() if size is not None}
    return AutoConfig.for_model(family, vocab_size=vocabulary, **given, **options)
