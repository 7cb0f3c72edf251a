"""From a Hugging Face ``config.json``, each value checked, to a :class:`~dsx.models.spec.ModelSpec`.

Absent keys take the defaults of transformers' config classes. A setting that would make the model compute
something else than dsx's is refused, never ignored. One difference remains on purpose: ``pad_token_id`` is
not read, so the padding token's embedding row is trained like any other (transformers' Llama and its likes
give that row no gradient, ``nn.Embedding(padding_idx=...)``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

from dsx.errors import ModelError
from dsx.models.config_values import at
from dsx.models.family import ModelFamily
from dsx.models.gemma2 import GEMMA2
from dsx.models.gpt2 import GPT2
from dsx.models.gpt_neox import GPT_NEOX
from dsx.models.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from dsx.models.spec import ModelSpec

FAMILIES: dict[str, ModelFamily] = {
    family.name: family for family in (GPT2, LLAMA, MISTRAL, QWEN2, QWEN3, GPT_NEOX, GEMMA2)
}
"""Every family of dsx's own, by its ``model_type``."""

_MOST_KEYS = 1000  # each key is compared with all known ones


def model_spec(config: Mapping[str, object]) -> ModelSpec:
    """The architecture that a Hugging Face config describes.

    Args:
        config: Content of ``config.json``, as written by transformers 4 (``rope_theta``, ``rope_scaling``) or
            5 (``rope_parameters``). Needs ``model_type``: a :data:`~dsx.models.spec.Family`.

    Raises:
        ModelError: A key that is missing, of a wrong type or value, misspelt, or not supported.
    """
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        raise ModelError(
            at("model_type", kind),
            f"dsx builds the families {', '.join(FAMILIES)}",
            "set model_type to one of them if the model is one",
        )
    _check_keys(config, family)
    _check_fixed(config, family)
    return family.read(config)


def own_keys(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """``values``, given under Llama's keys, under the keys that ``family`` has for them.

    Keys that a family does not have, such as GPT-NeoX's key/value heads, are left out.

    >>> own_keys("gpt2", {"hidden_size": 8, "intermediate_size": 32, "head_dim": 4})
    {'n_embd': 8, 'n_inner': 32}
    """
    record = FAMILIES[family]
    own = {record.own_names.get(key, key): value for key, value in values.items()}
    return {key: value for key, value in own.items() if key in record.keys}


def without_names_of(family: str, keys: Iterable[str], config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` without other names of ``keys``, which would contradict the new values."""
    general = {own: name for name, own in FAMILIES[family].own_names.items()}
    others = {general.get(key) for key in keys}
    return {key: value for key, value in config.items() if key not in others}


def _check_keys(config: Mapping[str, object], family: ModelFamily) -> None:
    """Refuse keys of other families and near misses of a known key: both would leave a default in silence.

    Another family's key that is null or false asks for nothing.
    """
    if len(config) > _MOST_KEYS:
        raise ModelError(f"{len(config):,} keys", f"a config has at most {_MOST_KEYS:,}", "use its own")
    known = family.keys
    foreign = set[str]().union(*(other.keys for other in FAMILIES.values())) - known
    for key, value in config.items():
        if key in known or (key in foreign and (value is None or value is False)):
            continue
        near = get_close_matches(key, sorted(known), n=1, cutoff=0.88)
        if key in foreign or near:
            raise ModelError(
                at(key, value),
                f"a {family.name} config has no such key",
                f"write {near[0]}" if near else f"remove it; {family.name} knows {', '.join(sorted(known))}",
            )


def _check_fixed(config: Mapping[str, object], family: ModelFamily) -> None:
    for key, accepted in family.fixed.items():
        if config.get(key, accepted) != accepted:
            raise ModelError(at(key, config[key]), "dsx does not implement it", f"only {accepted} works")
    for key in ("quantization_config", "pruned_heads"):
        if config.get(key):
            raise ModelError(at(key, config[key]), "dsx trains plain dense weights", "use such a model")
    names = config.get("architectures") or []
    if not isinstance(names, list | tuple) or not all(name in family.classes for name in names):
        raise ModelError(
            at("architectures", names),
            f"dsx builds {family.name} language models ({', '.join(sorted(family.classes))})",
            "use a language model; if it is one under another name, remove this key",
        )
