"""Values of a Hugging Face config, each of which is checked as it is read.

Every function raises a ModelError that names the key, its value and what would be right. A config.json is
small whatever sizes it claims, and everything is laid out by these sizes, so each has a maximum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dsx.errors import ModelError
from dsx.models.param import PRECISIONS
from dsx.models.spec import Rope
from dsx.terminal import shortened

MOST = 2**31 - 1
"""The largest size: kernels number the elements of a dimension by such integers."""

MOST_LAYERS = 2048
"""Twice the layers of the deepest published transformer, DeepNet (arXiv:2203.00555)."""

_FLOATS = frozenset(
    (
        "initializer_range",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "rms_norm_eps",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    )
)
_SHOWN_CHARACTERS = 120


def with_floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with floats where transformers refuses whole numbers.

    DeepSpeed's way to read JSON makes 30.0 a 30, and what dsx writes is to be read by transformers.
    """
    return {
        key: float(value) if key in _FLOATS and type(value) is int else value for key, value in config.items()
    }


def at(key: str, value: object) -> str:
    """``key = value``, the place of an error; a long value is shortened to its beginning."""
    return f"{key} = {shortened(repr(value), _SHOWN_CHARACTERS)}"


def size(config: Mapping[str, object], key: str, default: int, *, most: int = MOST) -> int:
    """A whole number of at least 1."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(at(key, value), "not a whole number of at least 1", "write a number, unquoted")
    if value > most:
        raise ModelError(at(key, value), f"dsx takes at most {most:,}", "write the model's own size")
    return value


def size_or(config: Mapping[str, object], key: str, default: int) -> int:
    """A size for which transformers also takes null, meaning the default."""
    return default if config.get(key) is None else size(config, key, default)


def size_or_none(config: Mapping[str, object], key: str, default: int | None) -> int | None:
    """A size that may be null, or have no default."""
    return None if config.get(key, default) is None else size(config, key, default or 0)


def padding(config: Mapping[str, object], default: int | None, rows: int) -> int | None:
    """The row of a table of ``rows`` that ``pad_token_id`` names; below zero it counts from the end.

    So does ``torch.nn.Embedding``, which transformers gives it to.
    """
    value = config.get("pad_token_id", default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not -rows <= value < rows:
        what = f"no token of the vocabulary, whose {rows:,} have the numbers 0 to {rows - 1}"
        raise ModelError(at("pad_token_id", value), what, "write the padding token's number, or null")
    return value % rows


def number(config: Mapping[str, object], key: str, default: float | None) -> float:
    """A number; None as default means that the key is needed."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        what = "is missing" if value is None else "is not a number"
        raise ModelError(at(key, value), what, "write a number, unquoted")
    try:
        return float(value)
    except OverflowError:
        raise ModelError(at(key, value), "beyond 1e308, which nothing can hold", "write a number") from None


def positive(config: Mapping[str, object], key: str, default: float | None) -> float:
    """A finite number above 0; None as default means that the key is needed."""
    value = number(config, key, default)
    if not 0.0 < value < float("inf"):
        raise ModelError(at(key, value), "not a finite number above 0", "use a positive number")
    return value


def probability(config: Mapping[str, object], key: str, default: float) -> float:
    """A dropout probability; null means the default."""
    value = default if config.get(key) is None else number(config, key, default)
    if not 0.0 <= value < 1.0:
        raise ModelError(at(key, value), "a dropout probability is in 0 <= p < 1", "use such a number")
    return value


def flag(config: Mapping[str, object], key: str, *, default: bool) -> bool:
    """True or false."""
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise ModelError(at(key, value), "neither true nor false", "write true or false, unquoted")
    return value


def check_divides(whole_key: str, whole: int, part_key: str, part: int) -> None:
    """Refuse a whole that does not divide by its part."""
    if whole % part:
        small = [n for n in range(1, math.isqrt(whole) + 1) if whole % n == 0]
        legal = sorted({*small, *(whole // n for n in small)})
        raise ModelError(
            f"{part_key} = {part}", f"{whole_key} = {whole} does not divide by it", f"use one of {legal}"
        )


def check_even(key: str, value: int) -> None:
    """Refuse an odd part of a head that is to be rotated."""
    if value % 2 or not value:
        raise ModelError(f"{key} = {value}", "rotary embeddings turn pairs of elements", "use an even one")


_KINDS = ("default", "linear", "llama3", "yarn")


_ROPE_NAMES = frozenset({
    "rope_type", "type", "rope_theta", "factor", "partial_rotary_factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate",
    "attention_factor", "attn_factor", "finetuned",
})  # fmt: skip
"""Names of rotary parameters. transformers reads neither "attn_factor" nor "finetuned", which published YaRN
models have."""


def read_rope(
    config: Mapping[str, object],
    max_positions: int,
    *,
    share: str | None = None,
    usual: float = 1.0,
) -> Rope:
    """Rotary embedding of ``config``.

    Args:
        config: Content of config.json.
        max_positions: The model's positions; also those before scaling, unless the config says otherwise.
        share: Key of the rotated part of each head; None for a family that rotates whole heads.
        usual: That part, unless the config says otherwise.

    Raises:
        ModelError: A value that is missing or wrong, or a kind of scaling that dsx does not have.
    """
    # rope_scaling (transformers 4) wins over rope_parameters, as in convert_rope_params_to_dict.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(at(key, given), "not one flat set of rope parameters", "give one object or null")
    strange = next((name for name in given if name not in _ROPE_NAMES and given[name] is not None), None)
    if strange is not None:
        fix = f"remove it if it changes nothing; dsx knows {', '.join(sorted(_ROPE_NAMES))}"
        raise ModelError(at(f"{key}.{strange}", given[strange]), "dsx does not know what it means", fix)
    values = {"rope_theta": config.get("rope_theta", 10000.0), **given}
    # The place in messages is the key inside the nested object.
    rope = {f"{key}.{name}": value for name, value in values.items()}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _KINDS:
        raise ModelError(
            at(f"{key}.rope_type", kind), f"dsx has {', '.join(_KINDS)}", "use one of these types"
        )
    found: dict[str, Any] = {
        "theta": positive(rope, f"{key}.rope_theta", 10000.0),
        "share": _share(config, rope, key, share, usual),
    }
    original = _original_positions(config, rope, key, max_positions)
    if kind == "linear":
        found |= {"kind": kind, "factor": positive(rope, f"{key}.factor", None)}
    elif kind == "llama3":
        found |= _llama3(rope, key, original)
    elif kind == "yarn":
        found |= _yarn(rope, key, original)
    return Rope(**found)


def _share(
    config: Mapping[str, object], rope: Mapping[str, object], key: str, name: str | None, usual: float
) -> float:
    """The rotated part of each head."""
    nested = f"{key}.partial_rotary_factor"
    if name is None:
        value = positive(rope, nested, 1.0)
        if value != 1.0:
            raise ModelError(
                at(nested, value), "dsx rotates whole heads of this family", "use 1.0 or leave it out"
            )
        return value
    value = positive(rope, nested, None) if nested in rope else positive(config, name, usual)
    if value > 1.0:
        raise ModelError(at(name, value), "more than the whole head", "use a number up to 1")
    return value


def _llama3(rope: Mapping[str, object], key: str, original: int) -> dict[str, Any]:
    """Arguments of _compute_llama3_parameters."""
    low = positive(rope, f"{key}.low_freq_factor", None)
    high = positive(rope, f"{key}.high_freq_factor", None)
    if high <= low:
        raise ModelError(
            f"{key}.high_freq_factor = {high}", f"not above low_freq_factor = {low}", "use a larger one"
        )
    return {
        "kind": "llama3",
        "factor": positive(rope, f"{key}.factor", None),
        "low_frequency_factor": low,
        "high_frequency_factor": high,
        "original_positions": original,
    }


def _yarn(rope: Mapping[str, object], key: str, original: int) -> dict[str, Any]:
    """Arguments of _compute_yarn_parameters, whose null or 0 means the default too."""

    def optional(name: str, default: float) -> float:
        place = f"{key}.{name}"
        return positive(rope, place, None) if rope.get(place) else default

    fast, slow = optional("beta_fast", 32.0), optional("beta_slow", 1.0)
    if fast <= slow:
        raise ModelError(f"{key}.beta_fast = {fast}", f"not above beta_slow = {slow}", "use a larger one")
    factor = positive(rope, f"{key}.factor", None)
    one, all_dims = optional("mscale", 0.0), optional("mscale_all_dim", 0.0)
    usual = _attention_factor(factor, 1.0)
    if one and all_dims:
        usual = _attention_factor(factor, one) / _attention_factor(factor, all_dims)
    place = f"{key}.attention_factor"
    return {
        "kind": "yarn",
        "factor": factor,
        "original_positions": original,
        "beta_fast": fast,
        "beta_slow": slow,
        "truncate": flag(rope, f"{key}.truncate", default=True),
        "attention_factor": usual if rope.get(place) is None else positive(rope, place, None),
    }


def _attention_factor(factor: float, scale: float) -> float:
    """YaRN, arXiv:2309.00071, equation 22: the square root of 1/t."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _original_positions(
    config: Mapping[str, object], rope: Mapping[str, object], key: str, max_positions: int
) -> int:
    """Positions before scaling: the top-level key, else the nested one, else the model's positions."""
    name = "original_max_position_embeddings"
    return size(config, name, 0) if name in config else size_or(rope, f"{key}.{name}", max_positions)


def layer_types(config: Mapping[str, object], num_layers: int, window: int) -> tuple[bool, ...] | None:
    """Whether each layer's attention slides, where the config names each layer's; ``window`` 0 means none."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(kinds, list | tuple)
        or len(kinds) != num_layers
        or not all(kind in known for kind in kinds)
    ):
        raise ModelError(
            at("layer_types", kinds),
            f"not {' or '.join(known)} for each of {num_layers} layers",
            "name each layer's attention, or leave it out",
        )
    if known[1] in kinds and not window:
        raise ModelError(
            at("layer_types", kinds),
            "there is no window to slide",
            "set use_sliding_window and sliding_window",
        )
    return tuple(kind == known[1] for kind in kinds)


Activation = Literal["gelu", "gelu_new", "silu", "relu"]

# transformers/activations.py, ACT2CLS: several names, one function.
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_fast": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
}


def activation(config: Mapping[str, object], key: str, default: str) -> Activation:
    """An activation, by any name that transformers has for it."""
    value = config.get(key, default)
    if not isinstance(value, str) or value not in _ACTIVATIONS:
        raise ModelError(
            at(key, value),
            "dsx does not implement this activation",
            f"use one of {sorted(_ACTIVATIONS)}",
        )
    return _ACTIVATIONS[value]


_QUANTIZATION = "quantization_config"
_PLAIN = "give the model before it was quantised; if its weights are plain, remove the key"


@dataclass(frozen=True, slots=True)
class FolderQuantization:
    """What a config.json says of it.

    Attributes:
        method: ``fp8``, ``mxfp4`` or ``bitsandbytes``: transformers' ``quant_method``.
        block: Rows and columns of ``fp8`` that share a scale; None where a matrix has one.
        dtype: Of the matrices once they are plain, by torch's name: the config's, else bfloat16.
    """

    method: str
    block: tuple[int, int] | None
    dtype: str


def quantization_of(config: Mapping[str, Any]) -> FolderQuantization | None:
    """How a config.json's folder is quantised; None if it is not. Raises ModelError if dsx cannot read it."""
    told = config.get(_QUANTIZATION)
    if not told:
        return None
    method = told.get("quant_method") if isinstance(told, Mapping) else None
    if method not in ("fp8", "mxfp4", "bitsandbytes"):
        what = "dsx reads folders in fp8 (by blocks or whole), mxfp4 and bitsandbytes' int8, nf4 and fp4"
        raise ModelError(at(f"{_QUANTIZATION}.quant_method", method), what, _PLAIN)
    block = told.get("weight_block_size")
    sizes = tuple(block) if isinstance(block, list | tuple) else ()
    wrong = len(sizes) != 2 or any(type(size) is not int or size < 1 for size in sizes)
    if block is not None and wrong:
        raise ModelError(
            at(f"{_QUANTIZATION}.weight_block_size", block), "no numbers of rows and columns", _PLAIN
        )
    dtype = str(config.get("dtype") or config.get("torch_dtype"))
    return FolderQuantization(method, sizes or None, dtype if dtype in PRECISIONS.values() else "bfloat16")


def unquantized(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the same model with plain weights, as dsx reads it. Raises ModelError as above."""
    quantization_of(config)
    return {key: value for key, value in config.items() if key != _QUANTIZATION}
