"""Small, deliberately odd models for the tests of dsx.nn, and the plain loop that runs a layer list."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from dsx.checkpoint.claims import model_of
from dsx.checkpoint.formats.slices import part_of
from dsx.models.families import layers, loss
from dsx.nn.parallel import TensorParallel

_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}

SINGLE = TensorParallel()


_SIZES = {
    "vocab_size": 1009,
    "hidden_size": 60,
    "num_attention_heads": 6,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "head_dim": 16}


def _llama(**changes):
    options = {"attention_bias": True, "mlp_bias": True, "rope_parameters": _LLAMA3}
    return LlamaConfig(**{**_GROUPED, **options, **changes})


def _gpt2(**changes):
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    dropout |= {"bos_token_id": 0, "eos_token_id": 0}  # transformers warns of its defaults here
    sizes = {"vocab_size": 1009, "n_embd": 60, "n_head": 6, "n_layer": 2, "n_positions": 64, "n_inner": 90}
    return GPT2Config(**{**dropout, **sizes, "initializer_range": 0.1, **changes})


def _gemma2(**changes):
    caps = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 40}
    options = {"tie_word_embeddings": True, "pad_token_id": 73, "sliding_window": 7}
    return Gemma2Config(**_GROUPED | options | caps | changes)


CONFIGS = {
    "llama": _llama(),
    "llama-tied": _llama(
        tie_word_embeddings=True,
        pad_token_id=774,  # batch() has each model's
        attention_bias=False,
        mlp_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "llama-linear": _llama(
        rope_parameters={"rope_type": "linear", "rope_theta": 1000.0, "factor": 2.0}, hidden_act="gelu"
    ),
    "llama-tp4": _llama(num_attention_heads=12, num_key_value_heads=4, vocab_size=65),
    "llama-dropout": _llama(attention_dropout=0.2),
    "gpt2": _gpt2(),
    "gpt2-untied": _gpt2(tie_word_embeddings=False, activation_function="relu"),
    "gpt2-dropout": _gpt2(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2),
    "mistral": MistralConfig(**_GROUPED, sliding_window=10),
    "mistral-full": MistralConfig(**_GROUPED, sliding_window=None),
    "qwen2": Qwen2Config(
        **_SIZES | {"num_key_value_heads": 2, "tie_word_embeddings": True, "pad_token_id": 33 - 1009}
    ),
    "qwen2-window": Qwen2Config(
        **_SIZES, num_key_value_heads=3, use_sliding_window=True, sliding_window=7, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**_GROUPED, rope_parameters=_YARN, pad_token_id=33),
    "qwen3-window": Qwen3Config(
        **_GROUPED | {"tie_word_embeddings": True},
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "qwen3-one-head": Qwen3Config(
        **_GROUPED | {"num_key_value_heads": 1, "tie_word_embeddings": True}, attention_bias=True
    ),
    "gpt_neox": GPTNeoXConfig(**_SIZES, rotary_pct=0.4),
    "gpt_neox-serial": GPTNeoXConfig(
        **_SIZES | {"tie_word_embeddings": True},
        rotary_pct=1.0,
        use_parallel_residual=False,
        attention_bias=False,
        hidden_act="gelu_fast",
    ),
    "gpt_neox-linear": GPTNeoXConfig(
        **_SIZES,
        rope_parameters={
            "rope_type": "linear",
            "rope_theta": 1000.0,
            "factor": 2.0,
            "partial_rotary_factor": 0.4,
        },
    ),
    "gemma2": _gemma2(),
    "gemma2-plain": _gemma2(
        tie_word_embeddings=False,
        attention_bias=True,
        layer_types=["full_attention"] * 2,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        query_pre_attn_scalar=16,
    ),
}


def reference(name):
    """The transformers model, randomly initialised, every vector too (fresh ones are all 0 or 1)."""
    torch.manual_seed(0)
    # transformers below 5.18 takes a kernel for Gemma 2 that leaves the soft cap out.
    kernel = "eager" if getattr(CONFIGS[name], "attn_logit_softcapping", None) else None
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32, attn_implementation=kernel)
    for p in model.parameters():
        if p.dim() == 1:
            nn.init.normal_(p, mean=0.5, std=0.3)
    return model.eval()


def in_files(name, tensors):
    """Tensors of a transformers model by the names that its files have."""
    head = {"lm_head.weight": "embed_out.weight"} if name.startswith("gpt_neox") else {}
    return {head.get(key, key): tensor for key, tensor in tensors.items()}


def batch(name, batch_size=2, length=24):
    """Token ids and labels [B, S], the labels shifted, some ignored."""
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(CONFIGS[name].vocab_size, (batch_size, length + 1), generator=g)
    labels = ids[:, 1:].clone()
    labels[0, :5] = -100
    return ids[:, :-1], labels


class Model(nn.Module):
    """A layer list run in sequence; parameters are named as in their specs."""

    def __init__(self, name, tp=SINGLE, dtype=torch.float32, **options):
        super().__init__()
        self.spec = model_of(CONFIGS[name].to_dict()).for_tensor(tp.size)
        self.loss_fn = loss(self.spec, tp)
        self.calls, tied = [], {}
        for index, entry in enumerate(layers(self.spec, tp, dtype=dtype, **options)):
            key = getattr(entry, "key", None)
            if key is None or key not in tied:
                module = entry.build()
                self.add_module(str(index), module)
                tied[key] = module
            fn = getattr(entry, "forward_fn", None)
            self.calls.append(partial(fn, tied[key]) if fn else module)

    def forward(self, ids):
        x = ids
        for call in self.calls:
            x = call(x)
        return x

    def load(self, tensors):
        """Take this rank's part of logical tensors by Hugging Face name."""
        tensors = in_files(self.spec.family, tensors)
        for p in self.parameters():
            spec, tp = p.dsx_spec, self.loss_fn.loss.tp
            parts = [tensors[name].t() if spec.hf_transposed else tensors[name] for name in spec.hf]
            p.data.copy_(part_of(spec, torch.cat(parts, spec.split or 0), tp.at))
        return self
