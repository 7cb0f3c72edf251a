"""Options of a family: what its config class has and its code reads, found from the two sources.

A field is an option if its type says so (a boolean, None or a value, a list with an entry per layer, a rope's
type) or if the code compares it with words, looks it up in a table or counts key/value heads by it. The sizes
of the tiny model are no options.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from all_families import tiny
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Json = dict[str, Any]

_SHARED = (
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.modeling_utils",
    "transformers.configuration_utils",
    "transformers.integrations.moe",
)
"""What reads configs of all families."""

_KV_HEADS = re.compile(r"(key_value|kv)_heads|kv_n_heads")
_SIZE = re.compile(r"heads?$|layers?$|_dim$|size$|rank$")
_NO_OPTION = re.compile(
    r"_token_id$|drop|jitter|^(output_(attentions|hidden_states)|return_dict|use_cache|id2label|label2id|"
    r"problem_type|dtype|architectures|transformers_version|chunk_size_feed_forward|pretraining_tp|"
    r"use_mamba_kernels|initializer_range|.*_std|mamba_proj_kernel|.*_kernel(_dtype)?|num_hidden_layers|"
    r"max_position_embeddings|vocab_size|bos|eos)$"
)
"""Special tokens, what is drawn at random, starting values, kernels, and what training does not look at."""

_ACTIVATIONS = ("gelu", "relu2", "prelu", "xielu")  # the last two have parameters
_SMALL = 8
"""Counts up to here are options (groups, chosen experts, first dense layers), larger ones are sizes."""

_ROPES: dict[str, Json] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 32},
    "longrope": {"factor": 2.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


@dataclasses.dataclass(frozen=True)
class Option:
    """Some fields of a tiny model's config, and what they are set to."""

    changes: Json

    def __str__(self) -> str:
        return ", ".join(f"{name} = {_short(value)}" for name, value in self.changes.items())


def _short(value: Any) -> str:
    ropes = (
        [own for own in (value, *value.values()) if isinstance(own, dict) and "rope_type" in own]
        if isinstance(value, dict)
        else []
    )
    if ropes:
        rotated = ropes[0].get("partial_rotary_factor", 1.0)
        return f"{ropes[0]['rope_type']} rope" + f" of {rotated}" * (rotated != 1.0)
    if isinstance(value, list | tuple) and len(set(map(str, value))) == 1 and len(value) > 1:
        return f"{value[0]} everywhere"
    return str(value)


def options_of(family: str) -> list[Option]:
    """Every option of a family beside its tiny config, the most usual ones first."""
    config = tiny.tiny_config(family)
    reads = _reads(type(config))
    found: dict[str, Option] = {}
    for field in dataclasses.fields(type(config)):
        if field.name in reads.names and not _NO_OPTION.search(field.name):
            for value in _values(config, field.name, reads):
                option = Option({field.name: value})
                found.setdefault(str(option), option)
    for changes in (*_ties(config), *_by_layer(config), *_given(config, reads)):
        option = Option(changes)
        found.setdefault(str(option), option)
    return list(found.values())


class _Reads(ast.NodeVisitor):
    """What code does with a config.

    Attributes:
        names: What it reads.
        words: What it compares each with, or looks up by it.
        activations: What it looks up among activations.
        given: Keyword arguments beside the fields, with their defaults.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.words: dict[str, set[Any]] = {}
        self.activations: set[str] = set()
        self.given: Json = {}
        self._objects: tuple[str, ...] = ()
        self._tables: dict[str, set[Any]] = {}

    def read(self, source: str, objects: tuple[str, ...]) -> None:
        """Read a module's source, in which ``objects`` end the names of configs."""
        tree = ast.parse(source)
        self._objects, self._tables = objects, {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
                keys = {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
                self._tables |= {name.id: keys for name in node.targets if isinstance(name, ast.Name)}
        self.visit(tree)

    def generic_visit(self, node: ast.AST) -> None:
        """Note a field that a node reads: ``config.x``, ``self.x``, ``x[i]`` of these, ``getattr``."""
        if (name := self._field(node)) is not None:
            self.names.add(name)
        super().generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """Note ``kwargs.get`` and its like."""
        if ast.unparse(node.func) in ("kwargs.get", "kwargs.setdefault", "kwargs.pop"):
            name, default = (*node.args, ast.Constant(None))[:2]
            if isinstance(name, ast.Constant) and isinstance(default, ast.Constant):
                self.names.add(str(name.value))
                self.given[str(name.value)] = default.value
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Note the words that a field is compared with."""
        sides = [node.left, *node.comparators]
        for name in filter(None, map(_attribute, sides)):
            self.words.setdefault(name, set()).update(_words(sides))
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Note the words of a table in which a field is looked up."""
        key = self._field(node.slice) or _attribute(node.slice)
        if key is not None and isinstance(node.value, ast.Name):
            if node.value.id == "ACT2FN":
                self.activations.add(key)
            self.words.setdefault(key, set()).update(self._tables.get(node.value.id, ()))
        self.generic_visit(node)

    def _field(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Subscript):
            return self._field(node.value)
        if isinstance(node, ast.Attribute):
            return node.attr if ast.unparse(node.value).endswith(self._objects) else None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
            owner, name = ast.unparse(node.args[0]), node.args[1]
            return (
                str(name.value) if owner.endswith(self._objects) and isinstance(name, ast.Constant) else None
            )
        return None


@cache
def _read_shared() -> _Reads:
    found = _Reads()
    for module in map(import_module, _SHARED):
        found.read(inspect.getsource(module), ("config",))
    return found


def _modeling(config_class: Any) -> str:
    """The source of a family's model, which is not imported if its file has the usual name."""
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config_class.model_type)
    spec = find_spec(config_class.__module__.replace(".configuration_", ".modeling_"))
    if spec is not None and spec.origin is not None and spec.name != config_class.__module__:
        source = Path(spec.origin).read_text(encoding="utf-8")
        if f"class {name}(" in source:
            return source
    return inspect.getsource(inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[config_class]))


@cache
def _reads(config_class: Any) -> _Reads:
    found = copy.deepcopy(_read_shared())
    found.read(_modeling(config_class), ("config",))
    found.given.clear()
    found.read(inspect.getsource(sys.modules[config_class.__module__]), ("config", "self"))
    aliases = dict(config_class.attribute_map)
    found.names.update(aliases[name] for name in list(found.names) if name in aliases)
    for name, words in list(found.words.items()):
        found.words.setdefault(aliases.get(name, name), set()).update(words)
    return found


def _attribute(node: ast.AST) -> str | None:
    """``x`` of ``anything.x`` or ``anything.x[i]``: modules keep what they read under the same name."""
    if isinstance(node, ast.Subscript):
        return _attribute(node.value)
    return node.attr if isinstance(node, ast.Attribute) else None


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Tuple | ast.List | ast.Set):
            yield from _words(node.elts)


def _values(config: Any, name: str, reads: _Reads) -> Iterator[Any]:
    """What a field may be set to instead of its value in the tiny config."""
    now = tiny.value_of(config, name)
    if name.startswith("rope_"):
        yield from _ropes(config, now)
        return
    kinds, literals = _kinds(type(config), name)
    if bool in kinds:
        yield from (not now,) if isinstance(now, bool) else (True, False)
    words = {word for word in reads.words.get(name, ()) if re.fullmatch(r"[\w.-]+", word)} | literals
    if name in reads.activations:
        words |= {*_ACTIVATIONS}
    if str in kinds or literals:
        yield from sorted(words - {now})
    if types.NoneType in kinds and now is not None and list not in kinds:
        yield None
    if int in kinds:
        yield from _counts(name, now, kinds)
    elif float in kinds and now is None:
        yield 1.5
    if list in kinds:
        yield from _lists(config, now, words)


def _counts(name: str, now: Any, kinds: set[Any]) -> Iterator[Any]:
    small = type(now) is int and 0 <= now <= _SMALL and not _SIZE.search(name)
    if _KV_HEADS.search(name) and "shared" not in name:
        yield from (count for count in (1, 2, tiny.HEADS) if count != now)
        if list in kinds:
            yield [1, 2, tiny.HEADS, 2]
    elif small:
        yield from (count for count in (0, 1, 2) if count != now)
    elif name == "head_dim":
        yield 3 * tiny.HEAD // 2
    elif now is None and types.NoneType in kinds:
        yield tiny.size_of(name, tiny.HEAD)


def _kinds(config_class: Any, name: str) -> tuple[set[Any], set[str]]:
    """The types that a field may have, and the words among them."""
    hint = typing.get_type_hints(config_class, localns={"torch": torch})[name]
    kinds, literals, waiting = set(), set(), [hint]
    while waiting:
        each = waiting.pop()
        origin = typing.get_origin(each)
        if origin in (typing.Union, types.UnionType):
            waiting += typing.get_args(each)
        elif origin is typing.Literal:
            literals |= {word for word in typing.get_args(each) if isinstance(word, str)}
        else:
            kinds.add({tuple: list}.get(origin or each, origin or each))
    return kinds, literals


def _lists(config: Any, now: Any, words: set[str]) -> Iterator[list[Any]]:
    """A list with an entry per layer: every kind everywhere, and the other way round."""
    layers = config.num_hidden_layers
    if not now:
        yield [1]
    elif not isinstance(now, list | tuple):
        yield [now, 2 * now] * (layers // 2)
    elif len(now) == layers and all(isinstance(each, str) for each in now):
        kinds = list(dict.fromkeys([*now, *sorted(words)]))
        yield from ([kind] * layers for kind in kinds if [kind] * layers != list(now))
        if list(now)[::-1] != list(now):
            yield list(now)[::-1]
    elif len(now) == layers:
        yield list(now)[::-1]
        yield [
            each if number else (not each if isinstance(each, bool) else 0) for number, each in enumerate(now)
        ]


def _ropes(config: Any, now: Any) -> Iterator[Json]:
    """Every type of rope, in the layers' own form; nothing where the family has none."""
    if not isinstance(now, dict):
        return
    by_type = {key: own for key, own in now.items() if isinstance(own, dict)}
    size = tiny.rotated(config)
    for kind, more in _ROPES.items():
        factors = {key: [scale] * (size // 2) for key, scale in (("short_factor", 1.0), ("long_factor", 2.0))}
        said = {"rope_type": kind, **more, **(factors if kind == "longrope" else {})}
        made = {key: {**own, **said} for key, own in by_type.items()}
        yield made or {**now, **said}
    if not by_type and now.get("partial_rotary_factor", 1.0) == 1.0:
        yield {**now, "partial_rotary_factor": 0.5}


def _ties(config: Any) -> Iterator[Json]:
    yield {"tie_word_embeddings": not getattr(config, "tie_word_embeddings", False)}


def _by_layer(config: Any) -> Iterator[Json]:
    """Sizes that are others in the layers of the last one's type, as any config may say it."""
    kinds = tiny.value_of(config, "layer_types") or [None, None, None, "last"]
    layers = [str(number) for number, kind in enumerate(kinds) if kind == kinds[-1]]
    own = config.to_dict().get("per_layer_config") or {}
    heads = [("num_key_value_heads", count) for count in (1, tiny.HEADS)]
    for name, value in (*heads, ("intermediate_size", 48)):
        if name in config.to_dict():
            yield {"per_layer_config": {layer: {**own.get(layer, {}), name: value} for layer in layers}}


def _given(config: Any, reads: _Reads) -> Iterator[Json]:
    """What a config class takes beside its fields."""
    for name, default in reads.given.items():
        if name in config.to_dict() or _NO_OPTION.search(name) or name.startswith("rope_"):
            continue
        if isinstance(default, bool):
            yield {name: not default}
        elif _KV_HEADS.search(name):
            yield from ({name: count} for count in (1, 2, tiny.HEADS) if count != default)
