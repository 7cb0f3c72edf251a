"""The language model inside a composite one: text beside a vision tower or another one.

No family is known by name. transformers says which part of a config is the text's and under which names a
folder may have its tensors; a small one of both, the same weights in each, shows whether the composite class
does with text what the language model alone does. The tower is of NaN, and has no memory: a forward of text
that needs it shows so.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from dsx.errors import ModelError
from dsx.hub.disk_names import FolderNames, disk_forms
from dsx.hub.model_structure import ModelStructure, hf_config_of, structure_of
from dsx.hub.on_meta import parameters_on_meta
from dsx.hub.shrunk import random_model, shrunk
from dsx.models.config_values import at
from dsx.models.hf_config import FAMILIES
from dsx.models.transformers_settings import first_line, quiet_transformers, torch_forms

_CARRIED = ("quantization_config", "auto_map")
"""Keys of the composite config that are about its language model too."""

_AGREED = 1e-5
_TOKENS = (2, 12)


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language model in a composite one; the config as it is if it is of one model.

    Args:
        config: Content of a config.json.

    Raises:
        ModelError: The composite model's language model cannot be trained by itself; names the reason.
    """
    if config.get("model_type") in FAMILIES or text_key(config) is None:
        return dict(config)
    found: dict[str, Any] = json.loads(_language_config(json.dumps(dict(config), sort_keys=True)))
    return found | {key: config[key] for key in _CARRIED if config.get(key)}


def text_key(config: Mapping[str, Any]) -> str | None:
    """Which part of a config is its language model's; None if it is of one model, or none of transformers."""
    with suppress(ModelError, ValueError):
        described = hf_config_of(_plain(config))
        text = described.get_text_config(decoder=True)
        for name in described.sub_configs:
            if getattr(described, name, None) is text and "text" in name:
                return str(name)
    return None


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _CARRIED}


@lru_cache(maxsize=8)
def _language_config(text: str) -> str:
    config = _plain(json.loads(text))
    described, key = hf_config_of(config), text_key(config)
    assert key is not None
    part = getattr(described, key)
    own = {**part.to_diff_dict(), "model_type": part.model_type}
    own = {key: value for key, value in own.items() if key not in ("transformers_version", "architectures")}
    own["tie_word_embeddings"] = _tried(described, key, json.loads(json.dumps(own)))
    return json.dumps(own)


@torch_forms()
def _tried(described: Any, key: str, own: dict[str, Any]) -> bool:
    """Whether a composite model ties its head, having shown that it is its language model where text is read.

    Raises:
        ModelError: It is not, or cannot be tried.
    """
    kind, small, inner = described.model_type, shrunk(own, vocab_size=512), deepcopy(described)
    setattr(inner, key, hf_config_of(small))
    whole = _empty(inner)
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    small["tie_word_embeddings"] = tied
    text, homes = random_model(small).eval(), _homes(whole, structure_of(json.dumps(small, sort_keys=True)))
    ids = torch.tensor([n for n in range(small["vocab_size"]) if n not in _special(described)])
    ids = ids[torch.arange(_TOKENS[0] * _TOKENS[1]).reshape(_TOKENS) * 7 % len(ids)]
    try:
        held = {homes[name]: tensor for name, tensor in text.state_dict().items()}
        others = {n: torch.full((), torch.nan).expand(p.shape) for n, p in whole.named_parameters()}
        whole.load_state_dict(others | held, strict=False, assign=True)
        with torch.no_grad(), quiet_transformers():
            there, here = (each(input_ids=ids, use_cache=False).logits for each in (whole.eval(), text))
        apart = float((there - here).abs().max() / here.abs().max())
    except Exception as error:  # noqa: BLE001 - each family's forward asks for something else
        raise _refusal(kind, f"its forward needs more than text ({first_line(error)})") from None
    if not apart < _AGREED:
        raise _refusal(kind, f"of text it computes something else than its {own['model_type']} ({apart:.0e})")
    return tied


def _special(described: Any) -> set[int]:
    """Ids that stand for something else than text."""
    return {
        value
        for key, value in described.to_dict().items()
        if isinstance(value, int) and key.endswith(("_token_id", "_token_index"))
    }


def _refusal(kind: str, why: str) -> ModelError:
    return ModelError(
        at("model_type", kind),
        f"it is composed of several models, and its language model cannot be trained by itself: {why}",
        "use a model whose text model is a causal language model",
    )


def composite_class(described: Any) -> Any:
    """transformers' class of a composite config. Raises ModelError if there is none that gives logits."""
    from transformers.models.auto import modeling_auto as known

    for mapping in (known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, known.MODEL_FOR_MULTIMODAL_LM_MAPPING):
        if type(described) in mapping:
            found = mapping[type(described)]
            return found[0] if isinstance(found, tuple) else found
    raise _refusal(described.model_type, "transformers has no class of it that makes text of images or sound")


def _empty(described: Any) -> Any:
    """A composite model without weights."""
    try:
        with quiet_transformers(), parameters_on_meta():
            return composite_class(described)._from_config(described, dtype=torch.float32)  # noqa: SLF001
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001 - as above
        raise _refusal(described.model_type, f"transformers cannot make it ({first_line(error)})") from None


def _homes(whole: Any, text: ModelStructure) -> dict[str, str]:
    """Where a composite model in memory has each tensor of its language model, by its name in that."""
    kind, stack = whole.config.model_type, type(text.model.get_submodule(text.base))
    places = [path for path, each in whole.named_modules() if type(each) is stack]
    heads = [path for path, each in whole.named_modules() if each is whole.get_output_embeddings()]
    if len(places) != 1 or len(heads) != 1:
        raise _refusal(kind, f"it has {len(places)} {stack.__name__} in it, and {len(heads)} heads")
    inside, homes = {text.base: places[0], text.head: heads[0]}, dict[str, str]()
    for name in text.model.state_dict():
        path = next((path for path in inside if name.startswith(f"{path}.")), None)
        if path is None:
            raise _refusal(kind, f"it has no place for {name}")
        homes[name] = inside[path] + name.removeprefix(path)
    return homes


class CompositeNames:
    """Which tensors of a composite model's folder are its language model's.

    Args:
        config: Content of the folder's config.json.

    Attributes:
        architecture: Name of transformers' class of the composite model.
        names: What that stores each of the language model's tensors as, by its name in a folder of its own.

    Raises:
        ModelError: The language model's tensors are stored otherwise in a folder of its own.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        whole = _empty(hf_config_of(_plain(config)))
        text = structure_of(json.dumps(language_config(config), sort_keys=True))
        homes, there, here = _homes(whole, text), disk_forms(whole), disk_forms(text.model)
        kept = {copy: name for name, form in there.items() for copy in form.copies}
        self.architecture = type(whole).__name__
        self.names = dict(homes)
        for name, form in here.items():
            home = homes[name]
            other = there[kept.get(home, home)]
            if (form.in_spec | {"hf": ()}, form.exact) != (other.in_spec | {"hf": ()}, other.exact):
                raise _refusal(whole.config.model_type, f"{home} is stored otherwise than {name} of it")
            self.names |= dict(zip(form.names, other.names, strict=True))
        self._inside = {there: here for here, there in self.names.items()}
        inside = set(homes.values())
        # What is of the tower is not read, in whatever form it is stored.
        self._names = FolderNames(
            whole, {name: replace(form, exact=form.exact or name not in inside) for name, form in there.items()}
        )

    def of(self, held: Collection[str], folder: str | Path) -> dict[str, str | None]:
        """As :meth:`FolderNames.of` for the language model; None for what is the tower's."""
        found = self._names.of(held, folder)
        towers = self._names.known(name for name, known in found.items() if known not in self._inside)
        return {
            name: None if known is None or name in towers else self._inside.get(known, name)
            for name, known in found.items()
        }
