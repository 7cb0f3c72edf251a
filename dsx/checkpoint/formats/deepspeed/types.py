"""Types of what dsx looks into in a stock checkpoint's files: a value of another is named with its file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dsx.checkpoint.catalog import USE_ANOTHER
from dsx.checkpoint.formats.torch_file import PickledObject, TensorRef, TorchFile
from dsx.errors import CheckpointError

_MOST = 1 << 63
_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?[^\]]*\]")
_MOST_REPEATS, _LONGEST_PATTERN = 3, 1000


def check_model(file: TorchFile) -> None:
    """Raise CheckpointError unless a model file is a dict whose values are of DeepSpeed's types."""
    _check(file, file.content, _MODEL, "")


def check_optimizer(file: TorchFile) -> None:
    """Raise CheckpointError unless an optimizer's file is a dict whose values are of DeepSpeed's types."""
    _check(file, file.content, {"optimizer_state_dict": _is_dict}, "")
    _check(file, file.content.get("optimizer_state_dict", {}), _OPTIMIZER, "optimizer_state_dict.")


def config_of(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """``ds_config`` of a model file; empty where the engine was given the path of one: it saves no more."""
    config = content.get("ds_config")
    return config if isinstance(config, dict) else {}


def check_patterns(info: Any, where: str) -> None:
    """Raise CheckpointError for an expression in ``universal_checkpoint_info`` that could run for ever.

    Python's take time that doubles with each character where a repeated group repeats something, and both the
    expression and the names that it is held against are the file's. DeepSpeed's are names with a number.
    """
    for pattern in _patterns(info if isinstance(info, dict) else {}):
        bare = _ESCAPED_OR_CLASS.sub("", pattern)
        risky = re.search(r"\)[*+{]", bare) or len(re.findall("[*+{]", bare)) > _MOST_REPEATS
        try:
            re.compile("" if risky else pattern)
        except (re.error, OverflowError, RecursionError) as error:
            what = f"no regular expression ({error})"
        else:
            what = "a regular expression that could run for ever"
            if not risky and len(pattern) <= _LONGEST_PATTERN:
                continue
        place = f"{where}: universal_checkpoint_info: {pattern[:100]}"
        raise CheckpointError(place, what, "say in a rules file how tensors are cut, and leave it out there")


def _patterns(info: Mapping[str, Any]) -> Iterator[str]:
    maps = info.get("affine_map")
    params = maps.get("params") if isinstance(maps, dict) else None
    subs = info.get("parameter_with_sub_params")
    held = (
        [one.state if isinstance(one, PickledObject) else one for one in subs]
        if isinstance(subs, list)
        else []
    )
    lists = [one.get("patterns") for one in held if isinstance(one, dict)]
    for value in (*info.values(), *lists, params):
        if isinstance(value, list | tuple | dict):
            yield from (one for one in value if isinstance(one, str))


def _check(file: TorchFile, content: Any, types: Mapping[str, Callable[[Any], bool]], head: str) -> None:
    if not isinstance(content, dict):
        raise CheckpointError(str(file.path), "it is no file of DeepSpeed: it holds no dict", USE_ANOTHER)
    for key, fits in types.items():
        value = content.get(key)
        if value is not None and not fits(value):
            raise CheckpointError(
                f"{file.path}: {head}{key}",
                f"a {type(value).__name__} that cannot be this: {str(value)[:80]}"
                if isinstance(value, bool | int | float | str)
                else f"a {type(value).__name__} of another form than DeepSpeed's",
                USE_ANOTHER,
            )


def _is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_degree(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_stage(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 3


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset | dict) and all(isinstance(n, str) for n in value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(text, str) for pair in value.items() for text in pair)


def _is_shape(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(_is_count, value))


def _is_shapes(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(name, str) and _is_shape(one) for name, one in value.items()
    )


def _is_groups_of_shapes(value: Any) -> bool:
    return _is_shapes(value) or (isinstance(value, list | tuple) and all(map(_is_shapes, value)))


def _is_degrees(value: Any) -> bool:
    return isinstance(value, dict) and all(one is None or _is_degree(one) for one in value.values())


def _is_counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_count, value))


def _is_lists_of_counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(map(_is_counts, value))


def _is_tensors(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, TensorRef) for one in value)


def _is_mappings(value: Any) -> bool:
    """``param_slice_mappings``: per group, the place of each parameter."""
    return isinstance(value, list | tuple) and all(
        isinstance(group, dict) and all(map(_is_place, group.values())) for group in value
    )


def _is_place(value: Any) -> bool:
    state = value.state if isinstance(value, PickledObject) else None
    return isinstance(state, dict) and all(_is_count(state.get(key)) for key in ("start", "numel"))


def _is_base(value: Any) -> bool:
    """The optimizer's own state dict; or in the elastic form a list of states."""
    if isinstance(value, list):
        return all(map(_is_dict, value))
    return (
        isinstance(value, dict) and _is_states(value.get("state")) and _is_groups(value.get("param_groups"))
    )


def _is_states(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_dict, value.values()))


def _is_groups(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(group, dict) and _is_counts(group.get("params", ())) for group in value
    )


_MODEL: Mapping[str, Callable[[Any], bool]] = {
    "buffer_names": _is_names,
    "shared_params": _is_texts,
    "param_shapes": _is_groups_of_shapes,
    "frozen_param_shapes": _is_shapes,
    "frozen_param_fragments": _is_dict,
    "optimizer": _is_dict,
    "ds_version": lambda value: isinstance(value, str),
    "ds_config": lambda value: isinstance(value, dict | str),
    "checkpoint_parallel_dimensions": _is_degrees,
    **dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), _is_count),
    **dict.fromkeys(("dp_world_size", "mp_world_size"), _is_degree),
}
_OPTIMIZER: Mapping[str, Callable[[Any], bool]] = {
    "zero_stage": _is_stage,
    "fp32_flat_groups": _is_tensors,
    "single_partition_of_fp32_groups": _is_tensors,
    "base_optimizer_state": _is_base,
    "optimizer_state_dict": _is_base,
    "group_paddings": _is_counts,
    "param_alignment_paddings": _is_lists_of_counts,
    "param_slice_mappings": _is_mappings,
}
