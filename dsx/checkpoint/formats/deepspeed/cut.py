r"""How tensor parallelism cut the tensors of a stock checkpoint: read from what says so, never guessed.

In this order: the user's rules, DeepSpeed's ``universal_checkpoint_info`` (its geometric ``affine_map``, then
its categories of names). A tensor that none of them describes is an error. DeepSpeed's
own converter lays such a tensor's parts end to end, which for a fused QKV is wrong and looks right.

A rules file is JSON::

    {"tensors": {"regex": "replicate", "regex": "average", "regex": {"split": 0},
                 "regex": {"split": 0, "parts": [64, 32, 32]}, "regex": {"split": 0, "extent": 50257}},
     "groups": [["regex", ...], ...],
     "tied": {"embed": [0, 4]},
     "settings": [{"lr": 0.001, "betas": [0.9, 0.999], ...}, ...],
     "names": {"(\\d+)\\.up\\.weight": "blocks.\\1.up.weight"}}

A regular expression has to match the whole name; the first that does counts. ``parts`` are the fused blocks
of the whole tensor along the split dim, each cut on its own; ``extent`` is the true extent without padding;
``average`` says that the ranks' copies are meant to be equal but may have drifted (dsx takes them only if
they have not). ``groups`` names each optimizer group's tensors, for checkpoints without ZeRO. ``tied`` says
which layers of a pipeline use each TiedLayerSpec's module, ``{}`` that there is none.
``settings`` are each group's hyperparameters, for elastic checkpoints, which have none.
``names`` gives tensors other names (as :func:`re.sub` does), those of another model: a pipeline's are
``<layer>.<path>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from dsx.checkpoint.catalog import NO_SETTINGS
from dsx.checkpoint.formats.deepspeed.order import Ties
from dsx.checkpoint.formats.huggingface.names import read_json
from dsx.checkpoint.formats.torch_file import PickledObject
from dsx.checkpoint.pieces import Part, contiguous, corner_of, cut_parts
from dsx.errors import CheckpointError
from dsx.models.param import ParamSpec

UNIVERSAL_INFO = "universal_checkpoint_info"
Shape = tuple[int, ...]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """A logical tensor and what of it each tensor-parallel rank has.

    Attributes:
        dim: Dim that is cut; None if every rank has all of it.
        spans: Per rank, what it has along ``dim``: (start, stop) of each block in the order of its local
            tensor. Rows of the local tensor past them are padding.
        compare: The ranks' copies have to be compared before one of them is taken.
    """

    shape: Shape
    dim: int | None = None
    spans: tuple[Spans, ...] = ()
    compare: bool = False

    def parts(self, rank: int, local: Shape, start: int, stop: int) -> tuple[Part, ...]:
        """Elements ``start`` to ``stop`` of a rank's flattened local tensor as boxes of the logical one."""
        return cut_parts(local, {} if self.dim is None else {self.dim: self.spans[rank]}, start, stop)


def _no_states(settings: dict[str, Any]) -> dict[str, Any]:
    if not settings.keys().isdisjoint(NO_SETTINGS):
        raise ValueError(f"one of {NO_SETTINGS} is no hyperparameter")
    return settings


_Size = Annotated[int, Field(ge=1)]


class _Split(BaseModel):
    """The rule of a tensor that is cut."""

    model_config = ConfigDict(strict=True, extra="forbid")

    split: int
    parts: list[_Size] = []
    extent: _Size = 1


class _RulesFile(BaseModel):
    """The user's rules file."""

    model_config = ConfigDict(strict=True)

    tensors: dict[str, Literal["replicate", "average"] | _Split] = {}
    groups: list[list[str]] = []
    tied: dict[str, Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]] | None = None
    settings: list[Annotated[dict[str, Any], AfterValidator(_no_states)]] = []
    names: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Rules:
    """How tensors are cut, by name.

    Attributes:
        tensors: (regular expression, rule), the first that matches counts.
        groups: Per optimizer group, regular expressions of its tensors.
        settings: Per optimizer group, hyperparameters that the checkpoint does not have.
        maps: Of DeepSpeed's affine maps: (regular expression, map).
        names: (regular expression, new name), the first that matches counts.
        ties: Tied modules of a pipeline and the layers that use them; None if nothing is said.
        source: Where they were read, for messages.
    """

    tensors: tuple[tuple[str, Any], ...] = ()
    groups: tuple[tuple[str, ...], ...] = ()
    settings: tuple[Mapping[str, Any], ...] = ()
    maps: tuple[tuple[str, Any], ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    ties: Ties | None = None
    source: str = "the rules"

    @classmethod
    def read(cls, path: Path) -> Self:
        """The user's rules file. Raises CheckpointError with the key at fault."""
        content = read_json(path, _SEE_DOC)
        if content.keys() - _RulesFile.model_fields.keys():
            keys = sorted(_RulesFile.model_fields)
            raise CheckpointError(str(path), f"its keys are not of {keys}", _SEE_DOC)
        try:
            told = _RulesFile.model_validate(content)
        except ValidationError as error:
            key, *places = error.errors()[0]["loc"]
            where, what = str(path), f"the value of {key} is of the wrong type"
            if key == "tensors" and places:
                where, what = f"{path}: {places[0]}", f"no rule: {json.dumps(content[key][places[0]])}"
            raise CheckpointError(where, what, _SEE_DOC) from None
        for pattern in (*told.tensors, *told.names, *(one for group in told.groups for one in group)):
            try:
                re.compile(pattern)
            except re.error as error:
                raise CheckpointError(
                    f"{path}: {pattern}", f"no regular expression ({error})", _SEE_DOC
                ) from None
        return cls(
            tensors=tuple((pattern, content["tensors"][pattern]) for pattern in told.tensors),
            groups=tuple(map(tuple, told.groups)),
            settings=tuple(told.settings),
            names=tuple(told.names.items()),
            ties=None if told.tied is None else tuple((key, tuple(at)) for key, at in told.tied.items()),
            source=str(path),
        )

    def cut(self, name: str, shapes: Sequence[Shape], where: str) -> ShardLayout:
        """The cut of a tensor whose parts have ``shapes`` on the tensor-parallel ranks."""
        rule: Any = next((rule for pattern, rule in self.tensors if re.fullmatch(pattern, name)), None)
        affine = next((one for pattern, one in self.maps if re.fullmatch(pattern, name)), None)
        padded = isinstance(rule, dict) and "extent" in rule
        if len(shapes) == 1 and not padded:
            return ShardLayout(shapes[0])
        try:
            if affine is not None and not isinstance(rule, dict):
                return _of_affine(affine, shapes)
            if rule is not None:
                return _of_rule(rule, shapes)
        except ValueError as error:
            raise CheckpointError(
                f"{where}: tensor {name}", f"{self.source} do not fit it: {error}", "correct the rule for it"
            ) from None
        raise CheckpointError(
            f"{where}: tensor {name}",
            f"nothing says how its {len(shapes)} tensor-parallel parts of shape {shapes[0]} make one tensor: "
            "they may be equal copies, or cut along a dim, or in fused blocks",
            f'give a rules file: {{"tensors": {{"{re.escape(name)}": {{"split": 0}} or "replicate"}}}}',
        )


_SEE_DOC = (
    'write {"tensors": {"regex": "replicate" or "average" or {"split": dim, "parts": [...]}}, '
    '"groups": [["regex"]], "tied": {"key": [0, 4]}, "settings": [{"lr": 0.001}], '
    '"names": {"regex": "new name"}}, any of them'
)


def rules_of(info: Any, where: str) -> Rules:
    """What ``universal_checkpoint_info`` says; a category that cannot be followed is left out.

    (deepspeed/checkpoint/constants.py; ds_to_universal.py, ``merge_tp_slices``.)
    """
    if not isinstance(info, dict):
        return Rules()
    plain: dict[str, Any] = {
        "tp_replicated_parameter_patterns": "replicate",
        "parameter_to_average_patterns": "average",
        "parameter_with_2_sub_params_cat_dim_0": {"split": 0, "equal_parts": 2},
    }
    tensors = [(pattern, rule) for key, rule in plain.items() for pattern in info.get(key, ())]
    vocabulary = {"split": 0, "extent": info.get("original_vocab_size")}
    for sub in info.get("parameter_with_sub_params", ()):
        state = sub.state if isinstance(sub, PickledObject) else sub
        tensors += [(pattern, _sub_params(state)) for pattern in state.get("patterns", ())]
    if vocabulary["extent"]:
        tensors += [(pattern, vocabulary) for pattern in info.get("vocabulary_parameter_patterns", ())]
    rows = info.get("parameter_with_row_parallelism_patterns", ())
    tensors += [(pattern, {"split": 1}) for pattern in rows]
    maps = info.get("affine_map") or {}
    told = (maps.get("params") or {}).items() if maps.get("version") == 1 else ()
    # Under deepspeed.zero.Init a tensor that is not cut has the map of no elements: it was divided already.
    found = tuple((pattern, one) for pattern, one in told if 0 not in tuple(one.get("logical_shape", ())))
    return Rules(tuple(tensors), maps=found, source=f"universal_checkpoint_info of {where}")


def cut_info(specs: Sequence[ParamSpec]) -> dict[str, Any]:
    """``universal_checkpoint_info`` that says of every tensor how it is cut; empty if there are none.

    A tensor that is cut along its rows, for which DeepSpeed has no category because that is what it does with
    what is in none, is one of a single fused block, so that nothing is left to a default. The name of a
    category's tensor is its whole name: DeepSpeed matches beginnings.
    """
    tables = [spec for spec in specs if spec.pad_multiple is not None]
    cut = [spec for spec in specs if spec.split is not None and spec.pad_multiple is None]
    rows = [spec for spec in cut if spec.split == 1 and not spec.parts]
    fused = [spec for spec in cut if spec not in rows]
    if not specs:
        return {}
    return {
        "universal_checkpoint_version": 0.2,  # of the categories' form: blocks, each cut evenly
        "tp_replicated_parameter_patterns": [_exactly(spec) for spec in specs if spec.split is None],
        "parameter_with_row_parallelism_patterns": [_exactly(spec) for spec in rows],
        "vocabulary_parameter_patterns": [_exactly(spec) for spec in tables],
        "original_vocab_size": tables[0].shape[0] if tables else None,
        "parameter_with_sub_params": [
            {"patterns": [_exactly(spec)], "shape": _blocks(spec), "partition_dim": spec.split}
            for spec in fused
        ],
    }


def _exactly(spec: ParamSpec) -> str:
    return f"{re.escape(spec.name)}$"


def _blocks(spec: ParamSpec) -> tuple[Any, ...]:
    blocks = spec.parts or (spec.shape[spec.split or 0],)
    return tuple(blocks if dim == spec.split else extent for dim, extent in enumerate(spec.shape))


def _sub_params(state: Mapping[str, Any]) -> dict[str, Any]:
    """A fused tensor: shape with, in the place of the cut dim, the extents of its blocks."""
    dim = int(state["partition_dim"])
    blocks = state["shape"][dim]
    if isinstance(blocks, int):  # that many equal ones
        return {"split": dim, "equal_parts": blocks}
    return {"split": dim, "parts": [int(extent) for extent in blocks]}


def _of_rule(rule: Any, shapes: Sequence[Shape]) -> ShardLayout:
    if isinstance(rule, str):
        if len(set(shapes)) > 1:
            raise ValueError(f"copies of shapes {sorted(set(shapes))}")
        return ShardLayout(shapes[0], compare=rule == "average")
    dim = rule["split"]
    if not 0 <= dim < len(shapes[0]):
        raise ValueError(f"it has no dim {dim}")
    extents = [shape[dim] for shape in shapes]
    parts = rule.get("parts") or []
    if equal := rule.get("equal_parts"):
        if sum(extents) % equal:
            raise ValueError(f"{sum(extents)} is not {equal} equal blocks")
        parts = [sum(extents) // equal] * equal
    if parts:
        return _fused(shapes, dim, parts)
    ends = list(accumulate(extents, initial=0))
    extent = rule.get("extent") or ends[-1]
    if extent > ends[-1]:
        raise ValueError(f"the ranks have {ends[-1]} of {extent} rows")
    spans = tuple(((min(a, extent), min(b, extent)),) for a, b in pairwise(ends))
    return ShardLayout(_with(shapes[0], dim, extent), dim, spans)


def _fused(shapes: Sequence[Shape], dim: int, parts: Sequence[int]) -> ShardLayout:
    tp = len(shapes)
    local = sum(part // tp for part in parts)
    if any(part % tp for part in parts) or any(shape[dim] != local for shape in shapes):
        raise ValueError(f"blocks {list(parts)} over {tp} ranks are not {[shape[dim] for shape in shapes]}")
    starts = list(accumulate(parts, initial=0))
    spans = tuple(
        tuple(
            (a + rank * (part // tp), a + (rank + 1) * (part // tp))
            for a, part in zip(starts, parts, strict=False)
        )
        for rank in range(tp)
    )
    return ShardLayout(_with(shapes[0], dim, sum(parts)), dim, spans)


def _of_affine(entry: Mapping[str, Any], shapes: Sequence[Shape]) -> ShardLayout:
    """DeepSpeed's geometric map, if its pieces are blocks along one dim (all that 0.19.8 makes are)."""
    logical = tuple(int(extent) for extent in entry["logical_shape"])
    if len(entry["ranks"]) != len(shapes):
        raise ValueError(f"it is for {len(entry['ranks'])} ranks")
    boxes = []
    for rank, shape in enumerate(shapes):
        told = entry["ranks"].get(rank) or entry["ranks"][str(rank)]
        if tuple(told["shard_shape"]) != shape:
            raise ValueError(f"a part of shape {told['shard_shape']}")
        boxes.append([_affine_box(piece, logical, shape) for piece in told["pieces"]])
    cut = {d for box in boxes for at, size, _ in box for d, extent in enumerate(logical) if size[d] != extent}
    if not cut:
        return ShardLayout(logical)
    if len(cut) > 1:
        raise ValueError(f"cut along dims {sorted(cut)}")
    dim = cut.pop()
    spans = []
    for box in boxes:
        ordered = sorted(box, key=lambda one: one[2][dim])
        if [one[2][dim] for one in ordered] != list(
            accumulate((one[1][dim] for one in ordered[:-1]), initial=0)
        ):
            raise ValueError("pieces with gaps")
        spans.append(tuple((at[dim], at[dim] + size[dim]) for at, size, _ in ordered))
    return ShardLayout(logical, dim, tuple(spans))


def _affine_box(piece: Mapping[str, Any], logical: Shape, local: Shape) -> tuple[Shape, Shape, Shape]:
    """(corner in the tensor, extents, corner in the part) of a piece."""
    size = tuple(int(extent) for extent in piece["shape"])
    (here, strides), (there, local_strides) = piece["source"], piece["dest"]
    plain = len(size) == len(logical) and piece.get("scale", 1.0) == 1.0
    if not plain or tuple(strides) != contiguous(logical) or tuple(local_strides) != contiguous(local):
        raise ValueError(f"a piece that is no plain block: {dict(piece)}")
    return corner_of(int(here), logical), size, corner_of(int(there), local)


def _with(shape: Shape, dim: int, extent: int) -> Shape:
    return (*shape[:dim], extent, *shape[dim + 1 :])
