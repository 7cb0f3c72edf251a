"""The rotary embedding of a Hugging Face config, by the rules of transformers' modeling_rope_utils.py."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dsx.errors import ModelError
from dsx.plan import hf_values as read
from dsx.spec.model import Rope

_KINDS = ("default", "linear", "llama3", "yarn")


def read_rope(
    config: Mapping[str, object],
    max_positions: int,
    *,
    theta: str = "rope_theta",
    share: str | None = None,
    usual: float = 1.0,
) -> Rope:
    """Rotary embedding of ``config``.

    Args:
        config: Content of config.json.
        max_positions: Of the model; those before scaling where nothing says another.
        theta: Its key for the base, outside the nested object.
        share: Its key for the rotated part of each head; None for a family that rotates whole heads.
        usual: That part where nothing says another.

    Raises:
        ModelError: A value that is missing or wrong, or a kind of scaling that dsx does not have.
    """
    # rope_scaling (transformers 4) wins over rope_parameters, as in convert_rope_params_to_dict.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    given = config.get(key) or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise ModelError(
            read.at(key, given), "not one flat set of rope parameters", "give one object or null"
        )
    values = {"rope_theta": config.get(theta, 10000.0), **given}
    # The place in messages is the key inside the nested object.
    rope = {f"{key}.{name}": value for name, value in values.items()}
    kind = values.get("rope_type", values.get("type", "default"))
    if kind not in _KINDS:
        raise ModelError(
            read.at(f"{key}.rope_type", kind), f"dsx has {', '.join(_KINDS)}", "use one of these types"
        )
    found: dict[str, Any] = {
        "theta": read.positive(rope, f"{key}.rope_theta", 10000.0),
        "share": _share(config, rope, key, share, usual),
    }
    original = _original_positions(config, rope, key, max_positions)
    if kind == "linear":
        found |= {"kind": kind, "factor": read.positive(rope, f"{key}.factor", None)}
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
        value = read.positive(rope, nested, 1.0)
        if value != 1.0:
            raise ModelError(
                read.at(nested, value), "dsx rotates whole heads of this family", "use 1.0 or leave it out"
            )
        return value
    value = read.positive(rope, nested, None) if nested in rope else read.positive(config, name, usual)
    if value > 1.0:
        raise ModelError(read.at(name, value), "more than the whole head", "use a number up to 1")
    return value


def _llama3(rope: Mapping[str, object], key: str, original: int) -> dict[str, Any]:
    """Arguments of _compute_llama3_parameters."""
    low = read.positive(rope, f"{key}.low_freq_factor", None)
    high = read.positive(rope, f"{key}.high_freq_factor", None)
    if high <= low:
        raise ModelError(
            f"{key}.high_freq_factor = {high}", f"not above low_freq_factor = {low}", "use a larger one"
        )
    return {
        "kind": "llama3",
        "factor": read.positive(rope, f"{key}.factor", None),
        "low_frequency_factor": low,
        "high_frequency_factor": high,
        "original_positions": original,
    }


def _yarn(rope: Mapping[str, object], key: str, original: int) -> dict[str, Any]:
    """Arguments of _compute_yarn_parameters, whose null or 0 means the default too."""

    def optional(name: str, default: float) -> float:
        place = f"{key}.{name}"
        return read.positive(rope, place, None) if rope.get(place) else default

    fast, slow = optional("beta_fast", 32.0), optional("beta_slow", 1.0)
    if fast <= slow:
        raise ModelError(f"{key}.beta_fast = {fast}", f"not above beta_slow = {slow}", "use a larger one")
    factor = read.positive(rope, f"{key}.factor", None)
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
        "truncate": read.flag(rope, f"{key}.truncate", default=True),
        "attention_factor": usual if rope.get(place) is None else read.positive(rope, place, None),
    }


def _attention_factor(factor: float, scale: float) -> float:
    """YaRN, arXiv:2309.00071, equation 22: the square root of 1/t."""
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _original_positions(
    config: Mapping[str, object], rope: Mapping[str, object], key: str, max_positions: int
) -> int:
    """Positions before scaling: the top-level key, else the nested one, else the model's positions."""
    name = "original_max_position_embeddings"
    return (
        read.size(config, name, 0) if name in config else read.size_or(rope, f"{key}.{name}", max_positions)
    )
