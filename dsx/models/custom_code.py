"""Code that comes with a model or a tokenizer is named and refused, unless the user says to trust it.

A ``config.json`` or ``tokenizer_config.json`` may name Python files beside it, or on the hub, under
``auto_map``; a config may also name a kernel of the hub as its attention. Where ``trust_remote_code`` is not
given, transformers asks on the terminal whether to run such code (dynamic_module_utils.py,
``resolve_trust_remote_code``). dsx gives it in every call, so that nobody is ever asked.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsx.checkpoint.json_text import parsed
from dsx.errors import CheckpointError, DataError

TOKENIZER_CONFIG = "tokenizer_config.json"
_MODEL_CLASSES = ("AutoConfig", "AutoModelForCausalLM")
_ATTENTION = ("attn_implementation", "_attn_implementation")


def check_model_code(config: Mapping[str, Any], file: str) -> None:
    """Refuse a model that transformers can make only by running code which its config names.

    Where transformers has a class of its own for the ``model_type``, that one is used, and an ``auto_map``
    beside it means nothing.

    Raises:
        CheckpointError: With the key that names the code.
    """
    found = next(_hub_kernels(config, ""), None)
    if found is None and not _is_known(config.get("model_type")):
        named = config.get("auto_map")
        held = named if isinstance(named, Mapping) else {}
        found = next(((f"auto_map.{one}", held[one]) for one in _MODEL_CLASSES if one in held), None)
    if found is not None:
        raise CheckpointError(
            f"{file}: {found[0]} = {json.dumps(found[1])}",
            "the model needs this code of its own, which would run on this machine",
            "read that code and, if you trust it, pass --trust-remote-code (in Python: "
            "trust_remote_code=True); or give a model that transformers has",
        )


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of one of dsx's families without the keys that name code, which such a model never needs."""
    return {key: value for key, value in config.items() if key not in ("auto_map", *_ATTENTION)}


def tokenizer_code(name: str) -> DataError:
    """The error that refuses a tokenizer which transformers can make only by running code."""
    file = Path(name).expanduser() / TOKENIZER_CONFIG
    try:
        content = parsed(file.read_bytes())
        where = f"{file}: auto_map = {json.dumps(content['auto_map'])}"
    except (OSError, ValueError, LookupError, TypeError):  # on the hub
        where = f"{name}: auto_map in {TOKENIZER_CONFIG}"
    return DataError(
        where,
        "the tokenizer needs this code of its own, which would run on this machine",
        "read that code and, if you trust it, set dsx.data.trust_remote_code to true (generate.py: "
        "--trust-remote-code, in Python: trust_remote_code=True); or name another tokenizer",
    )


def _is_known(kind: object) -> bool:
    """Whether transformers has a causal language model of a ``model_type``, or the caller registered one."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return (
        isinstance(kind, str)
        and kind in CONFIG_MAPPING
        and CONFIG_MAPPING[kind] in MODEL_FOR_CAUSAL_LM_MAPPING
    )


def _hub_kernels(config: Mapping[str, Any], path: str) -> Iterator[tuple[str, str]]:
    """Attentions, of the config or one of its parts, that are repositories of the hub (hub_kernels.py)."""
    for key, value in config.items():
        if key in _ATTENTION:
            told = value.values() if isinstance(value, Mapping) else (value,)
            yield from ((f"{path}{key}", one) for one in told if isinstance(one, str) and "/" in one)
        elif isinstance(value, Mapping):
            yield from _hub_kernels(value, f"{path}{key}.")
