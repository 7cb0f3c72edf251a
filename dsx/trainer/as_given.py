"""Whether a model that was given is what its config makes.

dsx makes its layers of the config and takes the model's tensors. Whatever else was changed by hand would be
lost: it is found by comparing the model with one that its class makes of the config, and named.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dsx.config.wording import at
from dsx.errors import ModelError
from dsx.terminal import shortened

_OF_TORCH = frozenset(vars(nn.Module()))
# What has a meaning of its own elsewhere, as PEFT's settings, which are read of the adapter's folder, and
# what changes no figure: where a model came from, and whether its blocks are computed again.
_NEUTRAL = frozenset({
    "config", "generation_config", "gradient_checkpointing", "_gradient_checkpointing_func", "hf_device_map",
    "_is_hf_initialized", "is_parallelizable", "kwargs", "model_parallel", "name_or_path", "peft_config",
    "warnings_issued",
})  # fmt: skip
_READ_WHEN_MADE = frozenset({"padding_idx", "vocab_size"})  # of whole models: their tables have what counts
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_MOST_SHOWN = 60
_FIX = "say it in the config before the model is made, or give the model's folder"


def require_no_code_of_its_own(model: nn.Module, where: str) -> None:
    """Refuse hooks, and methods that were put in the place of a class's, on modules or tensors of a model."""
    for path, module in model.named_modules():
        hooks = chain.from_iterable(getattr(module, kind).values() for kind in _HOOKS)
        own = [name for name, value in vars(module).items() if _replaces_method(module, name, value)]
        if any(map(_is_foreign, hooks)) or own:
            what = f"a {own[0]} of its own" if own else "a hook"
            raise ModelError(
                f"{where}: {path or 'the model'}",
                f"it has {what}, and dsx makes layers of the class's own modules",
                "remove it, or give the model's folder",
            )
    for name, parameter in model.named_parameters():
        hooked = parameter._backward_hooks  # noqa: SLF001 - torch has no other way to ask
        if hooked or getattr(parameter, "_post_accumulate_grad_hooks", None):
            what = "it has a hook, and dsx trains another tensor in its place"
            raise ModelError(f"{where}: {name}", what, "remove it, or give the model's folder")


def _replaces_method(module: nn.Module, name: str, value: object) -> bool:
    return callable(value) and name not in _NEUTRAL and callable(getattr(type(module), name, None))


def _is_foreign(hook: Any) -> bool:
    """Whether a hook is none of those that transformers and PEFT leave, which change no value."""
    source = str(getattr(hook, "__module__", ""))
    return not source.startswith(("transformers.", "peft.")) or "neftune" in source


def require_classes_own_code(made: nn.Module, where: str) -> None:
    """Refuse classes whose forward is not the library's any more: dsx's own layers would not have it."""
    for kind, module in {type(each): each for each in made.modules()}.items():
        source = str(getattr(module.forward, "__module__", ""))
        if not source.startswith(("transformers.", "torch.", "peft.")):
            raise ModelError(
                f"{where}: {kind.__name__}.forward",
                f"{source or 'the program'} has replaced it, and dsx's own layers do not call it",
                'leave it as it is, or set dsx.model.implementation to "transformers"',
            )


def require_as_made(model: PreTrainedModel, made: nn.Module, where: str) -> None:
    """Refuse a model that is not what its class makes of its config, tensors that are stored aside.

    ``made`` is another of the same config, its parameters on the meta device and its buffers with values.
    Errors begin with ``where``.
    """
    for path, what in _differences(model, made):
        raise ModelError(f"{where}: {path}", f"{what}, and dsx makes its layers of the config", _FIX)


def _differences(model: nn.Module, made: nn.Module) -> Iterator[tuple[str, str]]:
    mine, wanted = (dict(each.named_modules(remove_duplicate=False)) for each in (model, made))
    configs: dict[tuple[int, int], bool] = {}
    for path in mine.keys() - wanted.keys():
        yield path, f"it is a {type(mine[path]).__name__} that the config does not make"
    for path, module in wanted.items():
        given = mine.get(path)
        if given is None or type(given) is not type(module):
            is_now = "it is missing" if given is None else f"it is a {_kind(given)}"
            yield path, f"{is_now}, where the config makes a {_kind(module)}"
            continue
        for name, what in chain(_of_attributes(given, module, configs), _of_tensors(given, module)):
            yield f"{path}.{name}".removeprefix("."), what
    shared, tied = _sharing(model), _sharing(made)
    for one, other in sorted(shared ^ tied):
        is_tied = (one, other) in tied
        yield one, f"it is {'another' if is_tied else 'one'} tensor {'than' if is_tied else 'with'} {other}"


def _kind(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _of_attributes(
    given: nn.Module, module: nn.Module, configs: dict[tuple[int, int], bool]
) -> Iterator[tuple[str, str]]:
    """Attributes of one module that differ; those that no class of its knows are nobody's business."""
    held, wanted = vars(given), vars(module)
    skipped = _OF_TORCH | _NEUTRAL
    if isinstance(module, PreTrainedModel):
        skipped |= _READ_WHEN_MADE
    for name in (held.keys() | wanted.keys()) - skipped:
        missing = name not in held
        if name not in wanted and name != "_loss_function" and not hasattr(type(module), name):
            continue
        other = wanted[name] if name in wanted else getattr(type(module), name, None)
        if missing or not _same(held[name], other):
            now = "it is missing" if missing else f"it is {_shown(held[name])}"
            yield name, f"{now}, where the config makes {_shown(other)}"
    one, other = getattr(given, "config", None), getattr(module, "config", None)
    if isinstance(one, PreTrainedConfig) and isinstance(other, PreTrainedConfig):
        key = id(one), id(other)
        if not configs.setdefault(key, _same(one, other)):
            yield "config", "it is another than the model's config"
        own = ALL_ATTENTION_FUNCTIONS.get(str(one._attn_implementation))  # noqa: SLF001
        if own is not None and not str(getattr(own, "__module__", "")).startswith("transformers."):
            how = at("attn_implementation", one._attn_implementation)  # noqa: SLF001
            yield "config", f"{how} is a function of the program's own"


def _of_tensors(given: nn.Module, module: nn.Module) -> Iterator[tuple[str, str]]:
    """Buffers that are computed, and shapes, of one module that differ."""
    computed = module._non_persistent_buffers_set  # noqa: SLF001
    for name, other in chain(module._buffers.items(), module._parameters.items()):  # noqa: SLF001
        own = getattr(given, name, None)
        if own is None or other is None:
            if own is not other:
                yield name, f"it is {_shown(own)}, where the config makes {_shown(other)}"
        elif own.shape != other.shape:
            yield name, f"its shape is {tuple(own.shape)}, where the config makes {tuple(other.shape)}"
        elif name in computed and not _same_values(own, other):
            rounded = own.dtype != other.dtype and _same_values(own, other.to(own.dtype))
            cast = f"it was cast to {own.dtype}, as from_pretrained(dtype={own.dtype}) does not do"
            yield name, cast if rounded else "its values are not those that are computed from the config"
    for name in given._buffers.keys() - module._buffers.keys():  # noqa: SLF001
        yield name, "it is a buffer that the config does not make"


def _sharing(model: nn.Module) -> set[tuple[str, str]]:
    """Pairs of names of parameters that are one tensor."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return {(first, other) for first, *others in names.values() for other in others}


def _same_values(one: Tensor, other: Tensor) -> bool:
    if one.is_meta or other.is_meta:  # nothing is known of it
        return True
    one = one.detach().to(other.device)
    if one.dtype.is_floating_point and other.dtype.is_floating_point:
        return torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-8, equal_nan=True)
    return one.dtype == other.dtype and torch.equal(one, other)


def _same(one: Any, other: Any, depth: int = 0) -> bool:
    """Whether two values of an attribute mean the same. Modules inside are looked at by their own paths."""
    if one is other or (isinstance(one, nn.Module) and type(one) is type(other)):
        return True
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and _same_values(one, other)
    parts, others = _parts(one, depth), _parts(other, depth)
    if parts is None or others is None:
        compares: Any = type(one).__eq__
        alike = type(one) is type(other) and compares is object.__eq__  # nothing tells them apart
        return alike or repr(one) == repr(other) or bool(one == other)
    return len(parts) == len(others) and all(map(partial(_same, depth=depth + 1), parts, others))


def _parts(value: Any, depth: int) -> list[Any] | None:
    """What makes up a value; None for one that is compared as it is."""
    if depth > _DEEPEST or isinstance(value, type):
        return None
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, Mapping):
        return [part for key in sorted(value, key=str) for part in (key, value[key])]
    if isinstance(value, partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, MethodType):
        return [value.__func__]
    if isinstance(value, PreTrainedConfig):
        return [{key: each for key, each in value.to_dict().items() if key not in _OF_CONFIG_NEUTRAL}]
    if hasattr(value, "__code__"):
        return [value.__code__]
    return [type(value), dict(vars(value))] if hasattr(value, "__dict__") else None


_DEEPEST = 6
_OF_CONFIG_NEUTRAL = frozenset({
    "_name_or_path", "architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id", "torch_dtype",
    "transformers_version",
})  # fmt: skip


def _shown(value: Any) -> str:
    kind = type(value)
    text = kind.__name__ if isinstance(value, nn.Module | Tensor) else repr(value)
    return shortened(text, _MOST_SHOWN)
