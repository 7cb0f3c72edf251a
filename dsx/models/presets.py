"""Built-in models as Hugging Face configs: one or two sizes for a laptop per family, and published models.

The published ones repeat the ``config.json`` of the model on the Hugging Face hub that their name points to.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dsx.config.load import at, either, suggest
from dsx.errors import ConfigError
from dsx.models.spec import Family

BYTES_VOCABULARY = 257
"""Token ids of the byte tokenizer: 256 bytes and the end of a document."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A named model.

    Attributes:
        family: Architecture.
        name: What ``dsx.model.preset`` says.
        about: Where its numbers come from.
        config: Hugging Face config. Copy it before changing it.
    """

    family: Family
    name: str
    about: str
    config: dict[str, Any] = field(repr=False)


def presets() -> tuple[Preset, ...]:
    """Every built-in model, smallest first within a family."""
    return (
        *_gpt2_presets(),
        *_llama_presets(),
        *_mistral_presets(),
        *_qwen2_presets(),
        *_qwen3_presets(),
        *_gpt_neox_presets(),
    )


def find_preset(family: Family | None, name: str) -> Preset:
    """The preset called ``name``, of ``family`` when that is given. Raises ConfigError."""
    named = [preset for preset in presets() if preset.name == name]
    found = [preset for preset in named if family in (None, preset.family)]
    if len(found) == 1:
        return found[0]
    if found:
        fix = f"set dsx.model.family to {either([preset.family for preset in found])}"
        raise ConfigError(at("dsx.model.preset", name), "several families have it", fix)
    if named:
        of = named[0].family
        raise ConfigError(
            at("dsx.model.family", family),
            f'preset "{name}" is of family "{of}"',
            f'use "{of}" or leave it out',
        )
    names = [preset.name for preset in presets() if family in (None, preset.family)]
    raise ConfigError(
        at("dsx.model.preset", name),
        f"there is no such preset; there are {', '.join(dict.fromkeys(names))}",
        suggest(name, names, otherwise="name one of these"),
    )


def config_keys(family: str) -> frozenset[str]:
    """Hugging Face config keys that a preset of ``family`` may be overridden with."""
    known = {key for preset in presets() if preset.family == family for key in preset.config}
    if family != "gpt2":
        known |= {"rope_scaling", "rope_parameters"}
    if family in ("qwen2", "qwen3"):
        known |= {"head_dim", "layer_types"}
    return frozenset(known)


def _gpt2_presets() -> tuple[Preset, ...]:
    laptop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "vocab_size": BYTES_VOCABULARY}
    return (
        Preset("gpt2", "tiny", "dsx, for seconds on a CPU", _gpt2(4, 128, 8, n_positions=512) | laptop),
        Preset("gpt2", "small", "dsx, for minutes on a CPU", _gpt2(8, 320, 8) | laptop),
        Preset("gpt2", "gpt2", "hub: openai-community/gpt2", _gpt2(12, 768, 12)),
        Preset("gpt2", "gpt2-medium", "hub: openai-community/gpt2-medium", _gpt2(24, 1024, 16)),
        Preset("gpt2", "gpt2-large", "hub: openai-community/gpt2-large", _gpt2(36, 1280, 20)),
        Preset("gpt2", "gpt2-xl", "hub: openai-community/gpt2-xl", _gpt2(48, 1600, 25)),
    )


def _gpt2(layers: int, hidden: int, heads: int, *, n_positions: int = 1024) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_inner": None,
        "n_positions": n_positions,
        "vocab_size": 50257,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "initializer_range": 0.02,
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    }


def _llama_presets() -> tuple[Preset, ...]:
    llama_32_rope = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    small = {"vocab_size": BYTES_VOCABULARY, "max_position_embeddings": 1024, "rope_theta": 10000.0}
    return (
        Preset("llama", "tiny", "dsx, for seconds on a CPU", _llama(4, 128, 8, 4, 352) | small),
        Preset("llama", "small", "dsx, for minutes on a CPU", _llama(8, 320, 8, 4, 880) | small),
        Preset(
            "llama",
            "llama-3.2-1b",
            "hub: meta-llama/Llama-3.2-1B",
            _llama(16, 2048, 32, 8, 8192)
            | {
                "head_dim": 64,
                "max_position_embeddings": 131072,
                "rope_scaling": llama_32_rope,
                "tie_word_embeddings": True,
            },
        ),
        Preset("llama", "llama-3-8b", "hub: meta-llama/Meta-Llama-3-8B", _llama(32, 4096, 32, 8, 14336)),
        Preset("llama", "llama-3-70b", "hub: meta-llama/Meta-Llama-3-70B", _llama(80, 8192, 64, 8, 28672)),
    )


def _llama(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": ffn,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


_TINY = {"vocab_size": BYTES_VOCABULARY, "max_position_embeddings": 1024, "rope_theta": 10000.0}


def _like_llama(family: Family, name: str, about: str, *sizes: int, **rest: Any) -> Preset:
    """A preset of a family whose config has most keys of Llama's; ``sizes`` as :func:`_llama` takes them."""
    others = {"mlp_bias", "attention_bias"} | ({"head_dim"} if family == "qwen2" else set())
    config = {key: value for key, value in _llama(*sizes).items() if key not in others}
    return Preset(family, name, about, config | {"model_type": family} | rest)


def _mistral_presets() -> tuple[Preset, ...]:
    classes = {"architectures": ["MistralForCausalLM"]}
    return (
        _like_llama(
            "mistral",
            "tiny",
            "dsx, for seconds on a CPU; window of 128",
            *(4, 128, 8, 4, 352),
            **classes | _TINY | {"sliding_window": 128},
        ),
        _like_llama(
            "mistral",
            "mistral-7b",
            "hub: mistralai/Mistral-7B-v0.1",
            *(32, 4096, 32, 8, 14336),
            **classes,
            vocab_size=32000,
            max_position_embeddings=32768,
            rope_theta=10000.0,
            sliding_window=4096,
        ),
    )


def _qwen2_presets() -> tuple[Preset, ...]:
    classes = {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6, "use_sliding_window": False}
    return (
        _like_llama(
            "qwen2",
            "tiny",
            "dsx, for seconds on a CPU",
            *(4, 128, 8, 4, 352),
            **classes | _TINY | {"tie_word_embeddings": True, "sliding_window": 1024, "max_window_layers": 4},
        ),
        _like_llama(
            "qwen2",
            "qwen2.5-0.5b",
            "hub: Qwen/Qwen2.5-0.5B",
            *(24, 896, 14, 2, 4864),
            **classes,
            vocab_size=151936,
            max_position_embeddings=32768,
            rope_theta=1000000.0,
            sliding_window=32768,
            max_window_layers=24,
            tie_word_embeddings=True,
        ),
        _like_llama(
            "qwen2",
            "qwen2.5-7b",
            "hub: Qwen/Qwen2.5-7B",
            *(28, 3584, 28, 4, 18944),
            **classes,
            vocab_size=152064,
            max_position_embeddings=131072,
            rope_theta=1000000.0,
            sliding_window=131072,
            max_window_layers=28,
        ),
    )


def _qwen3_presets() -> tuple[Preset, ...]:
    classes = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "use_sliding_window": False,
        "sliding_window": None,
    }
    published = {
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000.0,
    }
    return (
        _like_llama(
            "qwen3",
            "tiny",
            "dsx, for seconds on a CPU",
            *(4, 128, 8, 4, 336),
            **classes | _TINY | {"head_dim": 32, "max_window_layers": 4},
        ),
        _like_llama(
            "qwen3",
            "qwen3-0.6b",
            "hub: Qwen/Qwen3-0.6B",
            *(28, 1024, 16, 8, 3072),
            **classes | published | {"max_window_layers": 28, "tie_word_embeddings": True},
        ),
        _like_llama(
            "qwen3",
            "qwen3-8b",
            "hub: Qwen/Qwen3-8B",
            *(36, 4096, 32, 8, 12288),
            **classes | published | {"max_window_layers": 36},
        ),
    )


def _gpt_neox_presets() -> tuple[Preset, ...]:
    laptop = {"vocab_size": BYTES_VOCABULARY, "max_position_embeddings": 512}
    return (
        Preset("gpt_neox", "tiny", "dsx, for seconds on a CPU", _gpt_neox(4, 128, 8) | laptop),
        Preset("gpt_neox", "pythia-160m", "hub: EleutherAI/pythia-160m", _gpt_neox(12, 768, 12)),
        Preset(
            "gpt_neox",
            "pythia-6.9b",
            "hub: EleutherAI/pythia-6.9b",
            _gpt_neox(32, 4096, 32) | {"vocab_size": 50432},
        ),
    )


def _gpt_neox(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt_neox",
        "architectures": ["GPTNeoXForCausalLM"],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "rotary_pct": 0.25,
        "rotary_emb_base": 10000,
        "initializer_range": 0.02,
        "attention_bias": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "use_parallel_residual": True,
        "tie_word_embeddings": False,
    }
