"""A config of any family made small, its structure unchanged: what is tried in seconds on a CPU.

Sizes follow from what families call them in their configs. What decides how a model is cut stays: kinds of
layers, whether heads share keys and values, more experts than a token is sent to, widths that tensor-parallel
ranks can share. Whether a family can be made at such sizes, transformers itself decides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from dsx.errors import ModelError
from dsx.hub.model_structure import ModelStructure, hf_config_of, structure_of, with_weights
from dsx.models.config_values import at
from dsx.models.transformers_settings import first_line, quiet_transformers, torch_forms

HEADS, HEAD = 4, 16

OF_RANKS = {
    "hidden_size n_embd d_model embedding_size emb_dim": HEADS * HEAD,
    "intermediate_size ffn_dim ffn_hidden_size decoder_ffn_dim n_inner d_inner": 96,
    "intermediate_size_mlp dense_intermediate_size": 96,
    "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size": 32,
    "shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size": 32,
    "mamba_d_ssm": 2 * HEADS * HEAD,
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads": HEADS,
    "swa_num_attention_heads mamba_n_heads mamba_num_heads linear_num_heads": HEADS,
    "linear_num_value_heads": HEADS,
    "linear_num_key_heads index_n_heads indexer_n_heads mamba_n_groups n_groups": HEADS // 2,
}
"""Sizes for two tensor-parallel ranks, by the keys that have them; more ranks get more."""

FIXED = {
    "head_dim swa_head_dim kv_channels v_head_dim swa_v_head_dim global_head_dim linear_head_dim": HEAD,
    "linear_key_head_dim linear_value_head_dim index_head_dim indexer_head_dim mamba_head_dim": HEAD,
    "query_pre_attn_scalar q_lora_rank kv_lora_rank o_lora_rank swa_q_lora_rank": HEAD,
    "swa_kv_lora_rank index_topk indexer_budget": HEAD,
    "mamba_d_head": 2 * HEAD,
    "qk_rope_head_dim qk_nope_head_dim swa_qk_nope_head_dim rotary_dim": HEAD // 2,
    "hidden_size_per_layer_input state_size ssm_state_size mamba_d_state": HEAD // 2,
    "num_experts num_local_experts n_routed_experts moe_num_experts": 4,
    "num_experts_per_tok num_experts_per_token moe_topk moe_top_k moe_k top_k_experts zero_expert_num": 2,
    "n_group num_expert_group": 2,
    "n_shared_experts num_shared_experts moe_num_shared_experts topk_group first_k_dense_replace": 1,
}
"""Sizes for any number of ranks."""

_PAIRS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "kv_n_heads": "n_heads",
}
"""Key/value heads, and the heads that share them."""

_HEADS_OF_OTHERS = frozenset((
    "swa_num_attention_heads", "mamba_d_ssm", "mamba_n_heads", "mamba_num_heads", "linear_num_heads",
    "linear_num_value_heads", "index_n_heads", "indexer_n_heads", "kv_lora_rank", "qk_rope_head_dim",
    "rotary_dim", "v_head_dim", "kv_channels", "global_head_dim", "linear_head_dim",
))  # fmt: skip
"""Keys of models whose blocks have heads of several kinds, or of several sizes."""

_WINDOWS = (
    "sliding_window", "sliding_window_size", "attention_window_size", "window_size", "attention_chunk_size",
)  # fmt: skip
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_ROPES = ("rope_scaling", "rope_parameters")
_VOCABULARIES = ("vocab_size", "vocab_size_per_layer_input")
_FAMILIES = {"mamba2": {"head_dim": 2 * HEAD}, "longcat_flash": {"head_dim": HEAD // 2}}
"""What keys alone do not tell."""

_AS_THEY_ARE = (
    (), ("head_dim",), ("v_head_dim",), ("hidden_size_per_layer_input",), ("n_group", "topk_group"),
    ("mamba_n_groups", "n_groups"),
)  # fmt: skip
"""Keys that are left alone, one attempt after another."""

_SMALL_ENOUGH, _LARGEST = 1 << 20, 1 << 24
_MOST_MORE_LAYERS = 12
_WIDE_HEADS, _MOST_HEADS = 16, 32  # with more of them, heads are a half and a quarter as wide
_INIT = 0.1


def shrunk(
    config: Mapping[str, Any],
    *,
    layers: int = 1,
    tensor: int = 2,
    vocab_size: int = 256,
    window: int = 8,
    small_too: bool = False,
) -> dict[str, Any]:
    """A small config of the same structure; the config with shorter windows if its model is small.

    Args:
        config: Content of the config.json of a causal language model that dsx can cut.
        layers: Fewest blocks. It gets more if it takes more to have every kind of block.
        tensor: Tensor-parallel ranks that shall be able to share it, if they can share ``config``.
        vocab_size: At most.
        window: Positions of a sliding window, at most.
        small_too: Whether a small model is made smaller, too.

    Raises:
        ModelError: dsx cannot cut the model, or transformers makes none of this family that is small.
    """
    text = json.dumps(dict(config), sort_keys=True)
    found: dict[str, Any] = json.loads(_shrunk(text, layers, tensor, vocab_size, window, small_too))
    return found


@lru_cache(maxsize=8)
def _shrunk(text: str, layers: int, tensor: int, vocab_size: int, window: int, small_too: bool) -> str:
    structure = structure_of(text)
    size = sum(parameter.numel() for parameter in structure.model.parameters())
    own = json.loads(text)
    if size <= _SMALL_ENOUGH and not small_too:
        windows = {key: min(own[key], window) for key in _WINDOWS if type(own.get(key)) is int}
        return json.dumps({**own, **windows}, sort_keys=True)
    made = hf_config_of(own)
    given, named = {**{key: own.get(key) for key in _ROPES}, **made.to_dict()}, made.attribute_map
    kinds = kinds_of(structure)
    most = {**dict.fromkeys(_VOCABULARIES, vocab_size), **dict.fromkeys(_WINDOWS, window)}
    told = "its layers are of too many kinds"
    for sizes in _attempts(given, tensor, most):
        for depth in range(_least(kinds, layers), min(len(kinds), layers + _MOST_MORE_LAYERS) + 1):
            changed = {**sizes, **_layers({**given, **sizes}, kinds, depth)}
            changed = {key: value for key, value in changed.items() if given.get(key) != value}
            kept = {key: value for key, value in own.items() if named.get(key) not in changed}
            small = json.dumps({**kept, **changed}, sort_keys=True)
            try:
                found = _tried(small)
            except Exception as error:  # noqa: BLE001 - each family refuses sizes in its own way
                told = first_line(error)
                break
            if set(found) >= set(kinds):
                return small
    raise ModelError(
        at("model_type", given["model_type"]),
        f"no small model of it can be made ({told})",
        "use its own size",
    )


def random_keys(config: Mapping[str, Any]) -> list[str]:
    """Keys of a config by which something is dropped or shaken at random; that blocks are is a difference."""
    given = hf_config_of(config).to_dict()
    floats = [key for key, value in given.items() if isinstance(value, float) and value]
    return [key for key in floats if "layer" not in key and ("drop" in key or "jitter" in key)]


def random_model(config: Mapping[str, Any]) -> Any:
    """Transformers' model of a config in training, in fp32, in which nothing is left at zero or one."""
    with torch.random.fork_rng(devices=[]), quiet_transformers(), torch.no_grad():
        torch.manual_seed(1)
        made = with_weights(config)
        for parameter in made.parameters():
            parameter.nan_to_num_().add_(_INIT / 2 * torch.randn(parameter.shape))
    return made


@torch_forms()
def _tried(small: str) -> list[Hashable]:
    """The kinds of a small model's blocks, after its forward has run once."""
    structure = structure_of(small)
    size = sum(parameter.numel() for parameter in structure.model.parameters())
    if size > _LARGEST:
        raise ValueError(f"{size:,} parameters are left")
    with torch.no_grad():
        random_model(json.loads(small))(input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False)
    return kinds_of(structure)


def kinds_of(structure: ModelStructure) -> list[Hashable]:
    """What each block is made of, whatever its sizes: a small model has blocks of every kind."""
    blocks = structure.list_of_blocks
    types = getattr(structure.model.config, "layer_types", None) or [None] * len(blocks)
    return [
        (kind, frozenset((re.sub(r"\d+", "*", path), type(part)) for path, part in block.named_modules()))
        for kind, block in zip(types, blocks, strict=False)
    ]


def _least(kinds: Sequence[Hashable], layers: int) -> int:
    """The fewest neighbouring blocks, ``layers`` at least, among which every kind is."""
    for depth in range(min(layers, len(kinds)), len(kinds)):
        if len(set(_window(kinds, kinds, depth))) == len(set(kinds)):
            return depth
    return len(kinds)


def _window(values: Sequence[Any], kinds: Sequence[Hashable], depth: int) -> list[Any]:
    """``depth`` neighbouring values, one per block, where most kinds of blocks are."""
    starts = range(len(kinds) - depth + 1)
    first = max(starts, key=lambda start: len(set(kinds[start : start + depth])))
    return list(values[first : first + depth])


def _by_number(value: Any) -> bool:
    """Whether a config's value says something of single layers, by their numbers."""
    return isinstance(value, dict) and all(
        str(name).isdecimal() and isinstance(each, dict) for name, each in value.items()
    )


def _layers(given: Mapping[str, Any], kinds: Sequence[Hashable], depth: int) -> dict[str, Any]:
    """Keys about single layers, for fewer of them."""
    found: dict[str, Any] = {key: depth for key in _DEPTHS if isinstance(given.get(key), int)}
    numbers = _window(range(len(kinds)), kinds, depth)
    for key, value in given.items():
        if isinstance(value, list) and len(value) == len(kinds):
            found[key] = _window(value, kinds, depth)
        elif _by_number(value):
            own = {int(name): each for name, each in value.items()}
            found[key] = {str(place): own[n] for place, n in enumerate(numbers) if n in own}
    if isinstance(without := given.get("max_window_layers"), int):  # blocks behind the first so many have one
        found["max_window_layers"] = min(without, depth - 1) if without < len(kinds) else depth
    return found


def _attempts(given: Mapping[str, Any], tensor: int, most: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Overrides of a config, the smallest first."""
    sizes = _sizes(given, tensor, most)
    if heads := _heads(given, tensor):
        yield _with_ropes(given, {**sizes, **heads})
    for kept in _AS_THEY_ARE:
        if not kept or not sizes.keys().isdisjoint(kept):
            yield _with_ropes(given, {key: value for key, value in sizes.items() if key not in kept})
    if tensor > 2:
        yield _with_ropes(given, _sizes(given, 2, most))


def _heads(given: Mapping[str, Any], tensor: int) -> dict[str, int]:
    """Sizes of attention, where all heads are of one kind, with the relations between the config's own.

    These are how many heads share keys and values, whether all heads together are wider or narrower than the
    hidden states, and whether a part of a head is not rotated.
    """
    width, number = (
        next((key for key in keys if given.get(key)), "")
        for keys in (("hidden_size", "n_embd"), ("num_attention_heads", "n_head"))
    )
    told: list[Any] = [given.get(key) for key in (number, width, "num_key_value_heads", "head_dim")]
    heads, hidden, pairs, own = told[0], told[1], told[2] or told[0], told[3] or 0
    if any(type(each) is not int for each in (heads, hidden, pairs, own)):
        return {}
    if any(given.get(key) for key in _HEADS_OF_OTHERS):
        return {}
    own = own or hidden // heads
    if heads % pairs or heads == pairs:
        few = min(heads, 2 * max(tensor, 2))
        sizes = {"num_key_value_heads": few}
    else:
        sizes = {"num_key_value_heads": pairs if pairs < tensor else min(pairs, max(tensor, 2))}
        few = sizes["num_key_value_heads"] * (heads // pairs)
    head = _head_dim(
        given, own, HEAD if few <= _WIDE_HEADS else HEAD // 2 if few <= _MOST_HEADS else HEAD // 4
    )
    across = head + 2 if heads * own < hidden else head // 2 if heads * own > hidden else head
    sizes |= {number: few, width: few * across, "head_dim": head}
    return {key: size for key, size in sizes.items() if type(given.get(key)) is int}


def _head_dim(given: Mapping[str, Any], own: int, least: int) -> int:
    """A small head with a whole number of pairs to rotate, and a part that is not rotated if there is one."""
    told = [given, *(given[key] for key in _ROPES if isinstance(given.get(key), dict))]
    told += [each for rope in told[1:] for each in rope.values() if isinstance(each, dict)]
    shares = (each.get(key) for each in told for key in ("partial_rotary_factor", "rotary_pct"))
    share = next((share for share in shares if type(share) in (int, float)), 0.0) or 1.0
    for head in range(min(own, least), own):
        rotated = int(head * share)
        if head % 2 == 0 < rotated and rotated % 2 == 0 and (share < 1) == (rotated < head):
            return head
    return own


def _sizes(given: Mapping[str, Any], tensor: int, most: Mapping[str, int]) -> dict[str, Any]:
    times = max(tensor, 2)
    small = {key: size * times // 2 for keys, size in OF_RANKS.items() for key in keys.split()}
    small |= {key: size for keys, size in FIXED.items() for key in keys.split()}
    small |= dict(most) | _FAMILIES.get(str(given.get("model_type")), {})
    found: dict[str, Any] = {
        key: min(small[key], value) for key, value in given.items() if key in small and type(value) is int
    }
    if "mamba_d_head" in found:  # often so small that many heads have it
        found["mamba_d_head"] = 2 * HEAD
    if given.get("head_dim") == given.get("qk_rope_head_dim"):
        found |= {"head_dim": found["qk_rope_head_dim"]} if "head_dim" in found else {}
    for key, heads in _PAIRS.items():
        pairs, queries = given.get(key), given.get(heads)
        if type(pairs) is int and type(queries) is int:
            shared = pairs if pairs < tensor else min(pairs, times)
            found[key] = found[heads] if pairs == queries else shared
    if "kv_lora_rank" in found:  # latent attention makes keys and values for every head
        found |= {key: found[heads] for key, heads in _PAIRS.items() if key in found}
    if isinstance(given.get("initializer_range"), float):
        found["initializer_range"] = max(given["initializer_range"], _INIT)
    return found | _nested(given, tensor, most)


def _nested(given: Mapping[str, Any], tensor: int, most: Mapping[str, int]) -> dict[str, Any]:
    """Special tokens, and the sizes of parts and of single layers."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        if key.endswith("_token_id"):
            rows = most["vocab_size"]  # numbers below zero count from the end
            found[key] = (
                None if value is None or isinstance(value, list) else max(-rows, min(value, rows - 1))
            )
        elif _by_number(value):  # sizes of single layers, beside those of all
            others = {name: each for name, each in given.items() if name != key}
            small = {name: _sizes({**others, **own}, tensor, most) for name, own in value.items()}
            found[key] = {
                name: {**own, **{each: small[name][each] for each in own if each in small[name]}}
                for name, own in value.items()
            }
        elif key.endswith("_config") and isinstance(value, dict):
            found[key] = {**value, **_sizes({"n_heads": given.get("n_heads"), **value}, tensor, most)}
    return found


def _with_ropes(given: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Overrides of a config with rotary parameters that fit its heads."""
    ropes = {key: given[key] for key in _ROPES if isinstance(given.get(key), dict)}
    return {**sizes, **_with_factors(ropes, _rotated(given), _rotated({**given, **sizes}))}


def _rotated(sizes: Mapping[str, Any]) -> int:
    """Size of the heads that are rotated, or of the part of them that has a key of its own; 1 if not told."""
    for key in ("qk_rope_head_dim", "rotary_dim", "head_dim"):
        if type(size := sizes.get(key)) is int:
            return size or 1
    width, heads = sizes.get("hidden_size"), sizes.get("num_attention_heads")
    return width // heads if type(width) is int and type(heads) is int and 0 < heads <= width else 1


def _with_factors(rope: Mapping[str, Any], whole: int, part: int) -> dict[str, Any]:
    """Rotary parameters, of each type of layer too, with as many factors as ``part`` of ``whole`` has."""
    found = dict(rope)
    for key, value in rope.items():
        if isinstance(value, dict):
            found[key] = _with_factors(value, whole, part)
        elif key in ("short_factor", "long_factor") and isinstance(value, list):
            found[key] = value[: len(value) * part // whole]
        elif key == "mrope_section" and isinstance(value, list):  # pairs for each of a position's numbers
            found[key] = [size * part // whole for size in value]
            found[key][-1] += sum(value) * part // whole - sum(found[key])
    return found
