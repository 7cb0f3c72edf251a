"""The language model inside a composite one: text beside a vision tower or another one.

No family is known by name. transformers says which part of a config is the text's and under which names a
folder may have its tensors; a small one of both, the same weights in each, shows whether the composite class
does with text what the language model alone does. The tower is of NaN, and has no memory: a forward of text
that needs it shows so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsx.errors import ModelError
from dsx.hub.disk_names import DiskForm, FolderNames, disk_forms
from dsx.hub.model_structure import ModelStructure, hf_config_of, structure_of
from dsx.hub.on_meta import parameters_on_meta
from dsx.hub.shrunk import random_model, shrunk
from dsx.models.adapters import placed
from dsx.models.config_values import at
from dsx.models.param import TOWER, Init, ParamSpec
from dsx.models.spec import HubModel
from dsx.models.transformers_settings import first_line, quiet_transformers, torch_forms

_OF_ALL = ("quantization_config", "auto_map")
"""Keys of a composite config that are about its language model too."""

_AGREED = 1e-5
_MATRIX = 2  # dims
_SAMPLES, _TOKENS = 2, 12


def text_key(config: Mapping[str, Any]) -> str | None:
    """Which part of a config is its language model's; None if it is of one model, or none of transformers."""
    with suppress(ModelError, ValueError):
        described = _described(config)
        text = described.get_text_config(decoder=True)
        for name in described.sub_configs:
            if "text" in name and getattr(described, name, None) is text:
                return str(name)
    return None


def language_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the language model in a composite one; the config as it is if it is of one model.

    Raises:
        ModelError: The composite model's language model cannot be trained by itself; names the reason.
    """
    if text_key(config) is None:
        return dict(config)
    text: dict[str, Any] = json.loads(_looked_at(json.dumps(dict(config), sort_keys=True))[0])
    return text | {key: config[key] for key in _OF_ALL if config.get(key)}


def modules_in(config: Mapping[str, Any]) -> dict[str, str]:
    """Paths of modules of a language model by itself, and where the composite model of a config has them.

    Empty where the config is of one model.
    """
    return {} if text_key(config) is None else dict(_looked_at(json.dumps(dict(config), sort_keys=True))[1])


def _described(config: Mapping[str, Any]) -> Any:
    return hf_config_of({key: value for key, value in config.items() if key not in _OF_ALL})


@lru_cache(maxsize=8)
def _looked_at(text: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    config = json.loads(text)
    described, key = _described(config), str(text_key(config))
    part = getattr(described, key)
    own = json.loads(json.dumps({**part.to_diff_dict(), "model_type": part.model_type}))
    own = {
        name: value for name, value in own.items() if name not in ("transformers_version", "architectures")
    }
    own["tie_word_embeddings"], modules = _tried(described, key, own)
    return json.dumps(own), tuple(modules.items())


@torch_forms()
def _tried(described: Any, key: str, own: dict[str, Any]) -> tuple[bool, dict[str, str]]:
    """Whether a composite model ties its head, and where it has the modules of its language model.

    Raises:
        ModelError: It does with text what its language model does not, or cannot be tried.
    """
    small, inner = shrunk(own, vocab_size=512), deepcopy(described)
    setattr(inner, key, hf_config_of(small))
    whole = _empty(inner)
    structure = structure_of(json.dumps(small, sort_keys=True))
    modules = _modules(whole, structure)
    _homes(structure.model, whole, modules)
    tied = whole.get_submodule(list(modules.values())[1]).weight is whole.get_input_embeddings().weight
    text = random_model(small | {"tie_word_embeddings": tied}).eval()
    special = {
        value
        for name, value in described.to_dict().items()
        if isinstance(value, int) and name.endswith(("_token_id", "_token_index"))
    }
    ids = torch.tensor([n for n in range(small["vocab_size"]) if n not in special])
    ids = ids[torch.arange(_SAMPLES * _TOKENS).reshape(_SAMPLES, _TOKENS) * 7 % len(ids)]
    held = {placed(name, modules): tensor for name, tensor in text.state_dict().items()}
    others = {name: torch.full((), torch.nan).expand(p.shape) for name, p in whole.named_parameters()}
    try:
        strange = whole.load_state_dict(others | held, strict=False, assign=True).unexpected_keys
        with torch.no_grad(), quiet_transformers():
            there, here = (each(input_ids=ids, use_cache=False).logits for each in (whole.eval(), text))
    except Exception as error:  # noqa: BLE001 - each family's forward asks for something else
        raise _refusal(described, f"its forward needs more than text ({first_line(error)})") from None
    apart = float((there - here).abs().max() / here.abs().max())
    if strange or not apart < _AGREED:
        why = (
            f"has no place for {strange[0]}" if strange else f"computes something else of text ({apart:.0e})"
        )
        raise _refusal(described, f"the composite class {why}")
    return tied, modules


def _refusal(described: Any, why: str) -> ModelError:
    return ModelError(
        at("model_type", described.model_type),
        f"it is composed of several models, and its language model cannot be trained by itself: {why}",
        "use a model whose text model is a causal language model",
    )


def _empty(described: Any) -> Any:
    """A composite model without weights."""
    from transformers.models.auto import modeling_auto as known

    mappings = (
        known.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        known.MODEL_FOR_MULTIMODAL_LM_MAPPING,
        known.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,  # where transformers has some of audio and text
    )
    kind = next((mapping[type(described)] for mapping in mappings if type(described) in mapping), None)
    if kind is None:
        raise _refusal(described, "transformers has no class of it that makes text of images or sound")
    try:
        with quiet_transformers(), parameters_on_meta():
            return kind._from_config(described, dtype=torch.float32)  # noqa: SLF001 - as its Auto classes do
    except Exception as error:  # noqa: BLE001 - each family checks in its own way
        raise _refusal(described, f"transformers cannot make it ({first_line(error)})") from None


def _modules(whole: Any, text: ModelStructure) -> dict[str, str]:
    """Paths of a language model's stack and head, and where a composite model has them."""
    stack = type(text.model.get_submodule(text.base))
    stacks = [path for path, each in whole.named_modules() if type(each) is stack]
    inner = [each for each in whole.modules() if type(each) is type(text.model)]
    head = (inner or [whole])[0].get_output_embeddings()
    heads = [path for path, each in whole.named_modules() if each is head]
    if len(stacks) != 1 or len(heads) != 1:
        raise _refusal(whole.config, f"it has {len(stacks)} {stack.__name__} inside, and {len(heads)} heads")
    return {text.base: stacks[0], text.head: heads[0]}


@lru_cache(maxsize=8)
def tower_of(config: str) -> tuple[ParamSpec, ...]:
    """Every tensor of a composite model, by its config as JSON, that is not its language model's."""
    return CompositeNames(json.loads(config)).tower


def with_tower(model: HubModel, config: str, trained: Sequence[str]) -> HubModel:
    """A language model with the tower of the composite one, of which ``trained`` names what is trained."""
    patterns = [re.compile(each) for each in trained]
    params = tuple(
        replace(
            spec,
            trained=any(pattern.search(name) for pattern in patterns for name in (*spec.hf, spec.hf_whole)),
        )
        for spec in tower_of(config)
    )
    return replace(model, pictures=config, tower=tuple(trained), tower_params=params)


def _homes(
    text: Any, whole: Any, modules: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str], tuple[ParamSpec, ...]]:
    """What a composite model stores a language model's tensors as, by their names there; and the inverse.

    The third are those that the composite model alone has in parts.
    """
    here, there = disk_forms(text), disk_forms(whole)
    apart = list[ParamSpec]()
    kept = {copy: name for name, form in there.items() for copy in form.copies}
    names = {name: placed(name, modules) for name in text.state_dict()}
    inside = {home: name for name, home in names.items()}
    for name, form in here.items():
        home = names[name]
        other = there[kept.get(home, home)]
        if replace(form, names=(), copies=()) != replace(other, names=(), copies=()):
            shape = tuple(text.get_parameter_or_buffer(name).shape)
            if not (_divides(form, other, shape) and names.keys().isdisjoint(other.names)):
                raise _refusal(whole.config, f"{home} is stored otherwise than {name} by itself")
            (own,) = form.names
            apart.append(ParamSpec(name=own, layer=0, shape=shape, init=Init(kind="zeros"), **other.in_spec))
            names |= {each: each for each in other.names}
            inside |= {home: own} | {each: each for each in other.names}
            continue
        names |= dict(zip(form.names, other.names, strict=True))
        inside |= dict(zip(other.names, form.names, strict=True))
    return names, inside, tuple(apart)


def _divides(form: DiskForm, other: DiskForm, shape: tuple[int, ...]) -> bool:
    """Whether a tensor that one form stores as it is comes in parts of the other, a matrix's by its rows."""
    as_it_is = replace(form, names=(), copies=()) == DiskForm(names=()) and len(form.names) == 1
    rows = len(shape) > _MATRIX or not (other.transposed or other.split)
    return as_it_is and other.exact and not other.buffer and rows


class CompositeNames:
    """Which tensors of a composite model's folder are its language model's.

    Args:
        config: Content of the folder's config.json.
        beside: Names, in the composite model, of the tower's that are read like the language model's.

    Attributes:
        whole: The composite model, without weights.
        architecture: Name of transformers' class of it.
        modules: As :func:`modules_in` gives them.
        names: What that stores each of the language model's tensors as, by its name in a folder of its own.
        apart: Those of which it stores parts, such as experts one by one: of that name, with what it has.

    Raises:
        ModelError: The language model cannot be trained by itself; names the reason.
    """

    def __init__(self, config: Mapping[str, Any], beside: Collection[str] = ()) -> None:
        self.whole, self.modules = _empty(_described(config)), modules_in(config)
        whole, modules = self.whole, self.modules
        text = structure_of(json.dumps(language_config(config), sort_keys=True)).model
        self.names, self._inside, self.apart = _homes(text, whole, modules)
        self.architecture, there = type(whole).__name__, disk_forms(whole)
        self._inside |= {each: each for name in beside for each in (name, *there[name].names)}
        inside = {*(placed(name, modules) for name in text.state_dict()), *beside}
        # What else is of the tower is not read, in whatever form it is stored.
        read = {name: replace(form, exact=form.exact or name not in inside) for name, form in there.items()}
        self._names, self._forms = FolderNames(whole, read), there

    @property
    def tower(self) -> tuple[ParamSpec, ...]:
        """Every tensor that is not the language model's, by its name in the composite model."""
        inside = set(self._inside)
        return tuple(
            ParamSpec(
                name=f"{TOWER}{name}",
                layer=0,
                shape=tuple(self.whole.get_parameter_or_buffer(name).shape),
                init=Init(kind="zeros"),
                hf_whole=name,
                buffer=form.buffer,
                tower=True,
                linear=self._is_matrix(name),
                **form.in_spec,
            )
            for name, form in self._forms.items()
            if name not in inside
        )

    def _is_matrix(self, name: str) -> bool:
        owner, _, leaf = name.rpartition(".")
        return leaf == "weight" and type(self.whole.get_submodule(owner)) is nn.Linear

    def of_tower(self, held: Collection[str], folder: str | Path) -> dict[str, str | None]:
        """As :meth:`FolderNames.of` for the tower; None for what is the language model's."""
        inside = set(self._inside)
        read = {name: replace(form, exact=form.exact or name in inside) for name, form in self._forms.items()}
        found = FolderNames(self.whole, read).of(held, folder)
        return {name: None if known in inside else known for name, known in found.items()}

    def of(self, held: Collection[str], folder: str | Path) -> dict[str, str | None]:
        """As :meth:`FolderNames.of` for the language model; None for what is the tower's."""
        found = self._names.of(held, folder)
        towers = self._names.known(name for name, known in found.items() if known not in self._inside)
        return {
            name: None if known is None or name in towers else self._inside.get(known, name)
            for name, known in found.items()
        }
