"""The other side of parity: one process, the Hugging Face model, torch's AdamW. Nothing of dsx."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

SEQUENCE = 12
MICRO_BATCH = 2
CLIPPING = 0.5  # below every norm of these runs, so that clipping is always at work
# The first update is lr * g / (|g| + eps). With the usual eps of 1e-8 it is a coin toss wherever |g| is near
# the rounding of a sum in another order (about 1e-8 here), whoever computes it.
ADAMW = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.01}

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 261,
    "bos_token_id": 0,
    "eos_token_id": 256,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
    "torch_dtype": "float32",
}
GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 261,
    "bos_token_id": 0,
    "eos_token_id": 256,
    "n_embd": 24,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 32,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "initializer_range": 0.2,
    "torch_dtype": "float32",
}

# The other families with all that they have beside Llama: windows shorter than SEQUENCE, biases, head norms.
_OTHERS = {key: value for key, value in LLAMA.items() if key not in ("architectures", "head_dim")}
_GPT_NEOX = {key: value for key, value in _OTHERS.items() if key != "num_key_value_heads"}
CONFIGS = {
    "llama": LLAMA,
    "llama-one-head": LLAMA | {"num_key_value_heads": 1},
    "gpt2": GPT2,
    "mistral": _OTHERS
    | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "head_dim": 8,
        "sliding_window": 5,
        "pad_token_id": 79,  # tokens(0, ...) has each family's
    },
    "qwen2": _OTHERS
    | {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 2,
        "pad_token_id": 230 - 261,  # torch counts numbers below zero from the end
    },
    "qwen3": _OTHERS
    | {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        },
        "pad_token_id": 6,
    },
    "gpt_neox": _GPT_NEOX
    | {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "hidden_size": 32,
        "hidden_act": "gelu",
        "rotary_pct": 0.5,
        "use_parallel_residual": True,
    },
}
CONFIGS["gemma2"] = CONFIGS["mistral"] | {
    "model_type": "gemma2",
    "architectures": ["Gemma2ForCausalLM"],
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 6,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
    "pad_token_id": 32,
}
CONFIGS["qwen2_moe"] = CONFIGS["qwen2"] | {
    "model_type": "qwen2_moe",
    "architectures": ["Qwen2MoeForCausalLM"],
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
CONFIGS["lfm2-conv"] = _OTHERS | {
    "model_type": "lfm2",
    "architectures": ["Lfm2ForCausalLM"],
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
    "pad_token_id": 32,
}
CONFIGS["qwen3_next-delta"] = CONFIGS["qwen3"] | {
    "initializer_range": 0.06,  # the delta rule turns roundings into more where weights are large
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "rope_parameters": None,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
CONFIGS["bamba-mamba"] = _OTHERS | {
    "model_type": "bamba",
    "architectures": ["BambaForCausalLM"],
    "attn_layer_indices": [1, 3],
    "mamba_n_heads": 4,
    "mamba_d_head": 12,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 4,
    "pad_token_id": 32,
}
CONFIGS["nemotron_h-mamba"] = {key: _OTHERS[key] for key in _OTHERS if key != "num_hidden_layers"} | {
    "initializer_range": 0.1,
    "model_type": "nemotron_h",
    "architectures": ["NemotronHForCausalLM"],
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention"],
    "head_dim": 8,
    "mamba_num_heads": 4,
    "mamba_head_dim": 12,
    "ssm_state_size": 8,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
    "moe_latent_size": None,
    "pad_token_id": 32,
}
CONFIGS |= {  # whose rows, over two ranks too, are whole blocks of nf4
    f"{family}-wide": CONFIGS[family]
    | {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.1}
    for family in ("llama", "llama-one-head")
}
IN_FILES = {"gpt_neox": {"lm_head.weight": "embed_out.weight"}}
"""Families whose parameters have other names in files than in transformers' modules."""


@dataclass(frozen=True)
class Run:
    """What a training run leaves to compare."""

    losses: list[float]
    norms: list[float]
    first_update: dict[str, torch.Tensor]


def hf_model(family: str) -> Any:
    """A model with seeded weights, norms and biases away from their trivial values."""
    torch.manual_seed(17)
    config = AutoConfig.for_model(**CONFIGS[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def save_model(family: str, folder: Path) -> Path:
    """A Hugging Face folder with :func:`hf_model`'s weights."""
    hf_model(family).save_pretrained(folder)
    return folder


def tokens(step: int, rows: int, vocab: int = 261) -> torch.Tensor:
    """Rows of SEQUENCE + 1 ids for one step, int64 [rows, SEQUENCE + 1]."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randint(0, vocab, (rows, SEQUENCE + 1), generator=generator)


def train(
    family: str,
    *,
    rows: int,
    steps: int,
    dtype: torch.dtype = torch.float32,
    freeze: Sequence[str] = (),
) -> Run:
    """Loss, pre-clip gradient norm per step, and the weights after the first step."""
    model = hf_model(family).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(re.search(pattern, name) for pattern in freeze))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    losses, norms, first = [], [], {}
    for step in range(steps):
        batch = tokens(step, rows)
        logits = model(input_ids=batch[:, :-1]).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        losses.append(loss.item())
        if step == 0:
            names = IN_FILES.get(family, {})
            first = {names.get(name, name): tensor.clone() for name, tensor in model.state_dict().items()}
    return Run(losses, norms, first)


def apart(
    model: Any,
    optimizer: torch.optim.Optimizer,
    steps: int,
    rows: int,
    documents: Callable[[int, int], Iterable[tuple[torch.Tensor, ...]]],
) -> tuple[Run, float]:
    """A model trained on every document by itself, and its held-out loss over the step after the last.

    ``documents`` gives those of a step's row: ids and labels, int64 [length] each, and positions where they
    do not count from 0. A loss is the mean over the trained tokens of all ``rows``.
    """
    losses, norms = [], []

    def loss_of(step: int) -> torch.Tensor:
        alone = [document for row in range(rows) for document in documents(step, row)]
        count = sum(int((labels != -100).sum()) for _, labels, *_ in alone)
        sums = []
        for ids, labels, *positions in alone:
            places = positions[0][None] if positions else None
            y = model(input_ids=ids[None], position_ids=places, use_cache=False).logits[0]
            sums.append(F.cross_entropy(y, labels, reduction="sum"))
        return torch.stack(sums).sum() / count

    for step in range(steps):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return Run(losses, norms, {}), loss_of(steps).item()
