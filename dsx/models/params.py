"""The parameters of a model: name, shape, tensor-parallel cut, init and Hugging Face home of each.

The layer list, which is what a pipeline is cut into, for L blocks:

- GPT-2: 0 word embedding, 1 positions, 2 .. L+1 blocks, L+2 final norm, L+3 head.
- All others: 0 word embedding, 1 .. L blocks, L+1 final norm, L+2 head.

The head of a model with tied embeddings is the word embedding once more and adds no parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt

from dsx.models.param import Init, ParamSpec
from dsx.models.spec import Family, ModelSpec

TIE = "word"
"""Key of the tie group, and of the TiedLayerSpec, of tied word embeddings."""

# Hugging Face module names by dsx's; {} is the block's number.
_HF_GPT2: dict[str, tuple[str, ...]] = {
    "word": ("transformer.wte",),
    "position": ("transformer.wpe",),
    "norm_1": ("transformer.h.{}.ln_1",),
    "attention.qkv": ("transformer.h.{}.attn.c_attn",),
    "attention.out": ("transformer.h.{}.attn.c_proj",),
    "norm_2": ("transformer.h.{}.ln_2",),
    "mlp.up": ("transformer.h.{}.mlp.c_fc",),
    "mlp.down": ("transformer.h.{}.mlp.c_proj",),
    "norm": ("transformer.ln_f",),
    "head": ("lm_head",),
}
_HF_LLAMA: dict[str, tuple[str, ...]] = {
    "word": ("model.embed_tokens",),
    "norm_1": ("model.layers.{}.input_layernorm",),
    "attention.qkv": (
        "model.layers.{}.self_attn.q_proj",
        "model.layers.{}.self_attn.k_proj",
        "model.layers.{}.self_attn.v_proj",
    ),
    "attention.out": ("model.layers.{}.self_attn.o_proj",),
    "attention.q_norm": ("model.layers.{}.self_attn.q_norm",),
    "attention.k_norm": ("model.layers.{}.self_attn.k_norm",),
    "norm_2": ("model.layers.{}.post_attention_layernorm",),
    "mlp.gate_up": ("model.layers.{}.mlp.gate_proj", "model.layers.{}.mlp.up_proj"),
    "mlp.down": ("model.layers.{}.mlp.down_proj",),
    "norm": ("model.norm",),
    "head": ("lm_head",),
}
_HF_GPT_NEOX: dict[str, tuple[str, ...]] = {
    "word": ("gpt_neox.embed_in",),
    "norm_1": ("gpt_neox.layers.{}.input_layernorm",),
    "attention.qkv": ("gpt_neox.layers.{}.attention.query_key_value",),
    "attention.out": ("gpt_neox.layers.{}.attention.dense",),
    "norm_2": ("gpt_neox.layers.{}.post_attention_layernorm",),
    "mlp.up": ("gpt_neox.layers.{}.mlp.dense_h_to_4h",),
    "mlp.down": ("gpt_neox.layers.{}.mlp.dense_4h_to_h",),
    "norm": ("gpt_neox.final_layer_norm",),
    # Its name in files; transformers 5 calls the parameter lm_head (conversion_mapping.py).
    "head": ("embed_out",),
}
_HF_NAMES: dict[Family, dict[str, tuple[str, ...]]] = {
    "gpt2": _HF_GPT2,
    "llama": _HF_LLAMA,
    "mistral": _HF_LLAMA,
    "qwen2": _HF_LLAMA,
    "qwen3": _HF_LLAMA,
    "gpt_neox": _HF_GPT_NEOX,
}


def layer_kinds(model: ModelSpec) -> tuple[str, ...]:
    """Kind of every layer of the layer list, as a ``type:<regex>`` partition matches it."""
    positions = () if model.rope else ("Positions",)
    return ("WordEmbedding", *positions, *["Block"] * model.num_layers, "FinalNorm", "Head")


def param_specs(model: ModelSpec, *, pad_multiple: int = 64) -> tuple[ParamSpec, ...]:
    """Every parameter of ``model``, in layer order and, within a layer, in its module's order.

    Args:
        model: The architecture.
        pad_multiple: Each tensor-parallel rank's vocabulary rows are rounded up to a multiple of this.
    """
    kinds = layer_kinds(model)
    specs = [*_table(model, 0, "word", pad_multiple)]
    for layer, kind in enumerate(kinds):
        if kind == "Positions":
            specs += _positions(model, layer)
        elif kind == "Block":
            specs += _block(model, layer, layer - kinds.index("Block"))
        elif kind == "FinalNorm":
            specs += _norm(model, layer, 0, "norm")
        elif kind == "Head" and not model.tied_embeddings:
            specs += _table(model, layer, "head", pad_multiple)
    return tuple(specs)


def num_parameters(model: ModelSpec) -> int:
    """Elements of all parameters; tied ones count once, vocabulary padding not at all."""
    return sum(spec.numel for spec in param_specs(model))


def _hf(model: ModelSpec, block: int, module: str, leaf: str) -> tuple[str, ...]:
    return tuple(f"{name.format(block)}.{leaf}" for name in _HF_NAMES[model.family][module])


def _normal(model: ModelSpec) -> Init:
    return Init(kind="normal", std=model.init_std)


def _table(model: ModelSpec, layer: int, role: str, pad_multiple: int) -> Iterator[ParamSpec]:
    """A vocabulary table: the word embedding, or the untied head (the same module class)."""
    yield ParamSpec(
        name=f"{layer}.word.weight",
        layer=layer,
        shape=(model.vocab_size, model.hidden_size),
        init=_normal(model),
        hf=_hf(model, 0, role, "weight"),
        split=0,
        pad_multiple=pad_multiple,
        tie=TIE if model.tied_embeddings else None,
    )


def _positions(model: ModelSpec, layer: int) -> Iterator[ParamSpec]:
    yield ParamSpec(
        name=f"{layer}.position.weight",
        layer=layer,
        shape=(model.max_positions, model.hidden_size),
        init=_normal(model),
        hf=_hf(model, 0, "position", "weight"),
    )


def _block(model: ModelSpec, layer: int, block: int) -> Iterator[ParamSpec]:
    qkv: tuple[int, ...] = (model.query_size, model.kv_size, model.kv_size)
    if model.interleaved_qkv:  # cut head by head, it is one part
        qkv = (sum(qkv),)
    up = ("mlp.gate_up", (model.ffn_size,) * 2) if model.gated_mlp else ("mlp.up", (model.ffn_size,))
    yield from _norm(model, layer, block, "norm_1")
    yield from _column(model, layer, block, "attention.qkv", qkv, bias=model.attention_bias)
    yield from _row(model, layer, block, "attention.out", model.query_size, bias=model.attention_out_bias)
    if model.qk_norm:
        yield from _norm(model, layer, block, "attention.q_norm", size=model.head_dim)
        yield from _norm(model, layer, block, "attention.k_norm", size=model.head_dim)
    yield from _norm(model, layer, block, "norm_2")
    yield from _column(model, layer, block, *up, bias=model.mlp_bias)
    yield from _row(model, layer, block, "mlp.down", model.ffn_size, bias=model.mlp_bias)


def _norm(
    model: ModelSpec, layer: int, block: int, module: str, *, size: int | None = None
) -> Iterator[ParamSpec]:
    """Weight, and bias of a LayerNorm: replicated over tp. ``size`` is the hidden size unless given."""
    leaves = {"weight": Init(kind="ones"), "bias": Init(kind="zeros")}
    for leaf in ("weight", "bias") if model.norm == "layernorm" else ("weight",):
        yield ParamSpec(
            name=f"{layer}.{module}.{leaf}",
            layer=layer,
            shape=(size or model.hidden_size,),
            init=leaves[leaf],
            hf=_hf(model, block, module, leaf),
        )


def _column(
    model: ModelSpec, layer: int, block: int, module: str, parts: Sequence[int], *, bias: bool
) -> Iterator[ParamSpec]:
    """A linear cut along its outputs, with its fused parts."""
    fused = tuple(parts) if len(parts) > 1 else ()
    shapes = {"weight": (sum(parts), model.hidden_size), "bias": (sum(parts),)}
    for leaf in ("weight", "bias") if bias else ("weight",):
        yield ParamSpec(
            name=f"{layer}.{module}.{leaf}",
            layer=layer,
            shape=shapes[leaf],
            init=_normal(model) if leaf == "weight" else Init(kind="zeros"),
            hf=_hf(model, block, module, leaf),
            split=0,
            parts=fused,
            hf_transposed=leaf == "weight" and model.family == "gpt2",
        )


def _row(
    model: ModelSpec, layer: int, block: int, module: str, inputs: int, *, bias: bool
) -> Iterator[ParamSpec]:
    """A linear cut along its inputs; its bias is replicated and added once, after the reduction."""
    std = model.init_std / sqrt(2 * model.num_layers) if model.scaled_output_init else model.init_std
    yield ParamSpec(
        name=f"{layer}.{module}.weight",
        layer=layer,
        shape=(model.hidden_size, inputs),
        init=Init(kind="normal", std=std),
        hf=_hf(model, block, module, "weight"),
        split=1,
        hf_transposed=model.family == "gpt2",
    )
    if bias:
        yield ParamSpec(
            name=f"{layer}.{module}.bias",
            layer=layer,
            shape=(model.hidden_size,),
            init=Init(kind="zeros"),
            hf=_hf(model, block, module, "bias"),
        )
