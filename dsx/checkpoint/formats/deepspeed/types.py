"""Types of what dsx looks into in a stock checkpoint's files: a value of another is named with its file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, InstanceOf, Strict, TypeAdapter, ValidationError

from dsx.checkpoint.catalog import USE_ANOTHER
from dsx.checkpoint.formats.torch_file import PickledObject, TensorRef, TorchFile
from dsx.errors import CheckpointError

_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?[^\]]*\]")
_MOST_REPEATS, _LONGEST_PATTERN = 3, 1000


def check_model(file: TorchFile) -> None:
    """Raise CheckpointError unless a model file is a dict whose values are of DeepSpeed's types."""
    _check(file, file.content, _MODEL, "")


def check_optimizer(file: TorchFile) -> None:
    """Raise CheckpointError unless an optimizer's file is a dict whose values are of DeepSpeed's types."""
    _check(file, file.content, {"optimizer_state_dict": TypeAdapter(_Dict)}, "")
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


def _check(file: TorchFile, content: Any, types: Mapping[str, TypeAdapter[Any]], head: str) -> None:
    if not isinstance(content, dict):
        raise CheckpointError(str(file.path), "it is no file of DeepSpeed: it holds no dict", USE_ANOTHER)
    for key, kind in types.items():
        value = content.get(key)
        try:
            if value is not None:
                kind.validate_python(value)
        except ValidationError:
            raise CheckpointError(
                f"{file.path}: {head}{key}",
                f"a {type(value).__name__} that cannot be this: {str(value)[:80]}"
                if isinstance(value, bool | int | float | str)
                else f"a {type(value).__name__} of another form than DeepSpeed's",
                USE_ANOTHER,
            ) from None


_Text = Annotated[str, Strict()]
_Count = Annotated[int, Strict(), Field(ge=0, lt=1 << 63)]
_Degree = Annotated[int, Strict(), Field(ge=1, lt=1 << 63)]
_Dict = Annotated[dict[Any, Any], Strict()]
_Names = (
    Annotated[list[_Text], Strict()]
    | Annotated[tuple[_Text, ...], Strict()]
    | Annotated[set[_Text], Strict()]
    | Annotated[frozenset[_Text], Strict()]
    | Annotated[dict[_Text, Any], Strict()]
)
_Counts = Annotated[list[_Count], Strict()] | Annotated[tuple[_Count, ...], Strict()]
_Shapes = Annotated[dict[_Text, _Counts], Strict()]
_Listed = Annotated[list[_Shapes], Strict()] | Annotated[tuple[_Shapes, ...], Strict()]
_Tensors = Annotated[list[InstanceOf[TensorRef]], Strict()]


class _Address(BaseModel):
    start: _Count
    numel: _Count


def _addressed(value: PickledObject) -> PickledObject:
    """An entry of ``param_slice_mappings``."""
    _Address.model_validate(value.state)
    return value


class _Group(BaseModel):
    params: _Counts = []


_Place = Annotated[InstanceOf[PickledObject], AfterValidator(_addressed)]


class _Base(BaseModel):
    """The optimizer's own state dict."""

    state: Annotated[dict[Any, _Dict], Strict()]
    param_groups: Annotated[list[_Group], Strict()]


_States = _Base | Annotated[list[_Dict], Strict()]  # in the elastic form a list of states
_MODEL: Mapping[str, TypeAdapter[Any]] = {
    "buffer_names": TypeAdapter(_Names),
    "shared_params": TypeAdapter(Annotated[dict[_Text, _Text], Strict()]),
    "param_shapes": TypeAdapter(_Shapes | _Listed),
    "frozen_param_shapes": TypeAdapter(_Shapes),
    "frozen_param_fragments": TypeAdapter(_Dict),
    "optimizer": TypeAdapter(_Dict),
    "ds_version": TypeAdapter(_Text),
    "ds_config": TypeAdapter(_Dict | _Text),
    "checkpoint_parallel_dimensions": TypeAdapter(Annotated[dict[Any, _Degree | None], Strict()]),
    **dict.fromkeys(("global_steps", "global_samples", "skipped_steps", "micro_steps"), TypeAdapter(_Count)),
    **dict.fromkeys(("dp_world_size", "mp_world_size"), TypeAdapter(_Degree)),
}
_OPTIMIZER: Mapping[str, TypeAdapter[Any]] = {
    "zero_stage": TypeAdapter(Annotated[int, Strict(), Field(ge=0, le=3)]),
    "fp32_flat_groups": TypeAdapter(_Tensors),
    "single_partition_of_fp32_groups": TypeAdapter(_Tensors),
    "base_optimizer_state": TypeAdapter(_States),
    "optimizer_state_dict": TypeAdapter(_States),
    "group_paddings": TypeAdapter(_Counts),
    "param_alignment_paddings": TypeAdapter(Sequence[_Counts]),
    "param_slice_mappings": TypeAdapter(Sequence[Annotated[dict[Any, _Place], Strict()]]),
}
