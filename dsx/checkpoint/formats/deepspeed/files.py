"""Which files a stock DeepSpeed checkpoint has, for which rank, and that none is missing.

Names (deepspeed 0.19.8, runtime/engine.py:4319-4381 and pipe/module.py, ``ckpt_layer_path``), with D the
data-parallel rank, M the model-parallel rank (pipeline stage slowest, tensor fastest), L the global layer:

- ``mp_rank_M_model_states.pt``, at ZeRO-3 ``zero_pp_rank_D_mp_rank_M_model_states.pt``
- ``[bf16_]zero_pp_rank_D_mp_rank_M_optim_states.pt``
- of a PipelineModule: ``layer_L[-model_T]-model_states.pt``
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, InstanceOf, Strict, TypeAdapter, ValidationError

from dsx.checkpoint.catalog import unusable
from dsx.checkpoint.formats.torch_file import PickledObject, TensorRef, TorchFile, read_torch_file
from dsx.errors import CheckpointError
from dsx.parallel.mesh import Mesh

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d+)_expert_(\d+)_mp_rank_00_model_states\.pt")
_ANY_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt")
AUTOEP_LAYERS = "ds_autoep_layers"
"""Key of a model file under which AutoEP describes its layers of experts."""

OUTER = "dsx_outer"
"""Key of a model file under which dsx keeps the fact ``outer``: DeepSpeed takes it for the client's."""

_COMPLETE = "complete the checkpoint: all ranks' files of one save belong into this folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class StockFiles:
    """The files of one checkpoint, read but for their tensors.

    Attributes:
        models: By (model-parallel rank, data-parallel rank); below ZeRO-3 only data-parallel rank 0.
        optimizers: By the same; none without ZeRO.
        layers: By (global layer, tensor-parallel rank).
        experts: By (layer, expert), the weights of one expert each; none but of AutoEP below ZeRO-3.
        mesh: Over how many ranks of which axes the model was.
    """

    root: Path
    models: Mapping[tuple[int, int], TorchFile]
    optimizers: Mapping[tuple[int, int], TorchFile]
    layers: Mapping[tuple[int, int], TorchFile]
    experts: Mapping[tuple[int, int], TorchFile]
    mesh: Mesh
    zero_stage: int

    @property
    def ranks(self) -> range:
        """Model-parallel ranks: pipeline stage slowest, tensor fastest."""
        return range(self.mesh.num_parts)

    @property
    def shards(self) -> range:
        return range(self.mesh.tp)

    @property
    def replicas(self) -> range:
        return range(self.mesh.num_replicas)

    @property
    def degrees(self) -> dict[str, int]:
        """How many data-parallel and tensor-parallel ranks there are."""
        return {"replicas": len(self.replicas), "shards": len(self.shards)}

    def place(self, rank: int) -> tuple[int, int]:
        """Pipeline stage and tensor-parallel rank of a model-parallel rank."""
        return divmod(rank, self.mesh.tp)

    def stages_of(self, shard: int = 0) -> range:
        """Model-parallel ranks, stage by stage, of one tensor-parallel rank."""
        return self.ranks[shard :: self.mesh.tp]

    @property
    def first(self) -> Mapping[str, Any]:
        """What the model file of the first rank holds."""
        content: Mapping[str, Any] = self.models[0, 0].content
        return content

    @property
    def all(self) -> tuple[TorchFile, ...]:
        return tuple(
            file
            for held in (self.models, self.optimizers, self.layers, self.experts)
            for file in held.values()
        )


def looks_stock(root: Path) -> bool:
    """Whether a folder has files by DeepSpeed's names."""
    return root.is_dir() and any(_MODEL.fullmatch(path.name) for path in root.iterdir())


def open_stock(root: Path, *, universal: bool = False) -> StockFiles:
    """Read the structure of every file of a stock checkpoint, the folder of one tag.

    One of the ``universal`` format has neither optimizers' nor layers' files.
    """
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    mixed = [name for name in names if _ANY_EXPERT.fullmatch(name)]
    if stray := next((name for name in mixed if universal or not _EXPERT.fullmatch(name)), None):
        raise CheckpointError(
            str(root / stray),
            "an expert's file, which dsx reads of AutoEP alone, without tensor parallelism",
            "save with DeepSpeed without its MoE layers, or give the folder that its engine saved",
        )
    if "offloaded_tensors" in names:
        raise CheckpointError(
            str(root / "offloaded_tensors"),
            "optimizer states that were swapped out to NVMe, in files without names",
            "load it with DeepSpeed, offloading to cpu, and save it again",
        )
    models = _read(root, names, _MODEL)
    if (0, 0) not in models:
        raise CheckpointError(
            str(root), "it has no mp_rank_00_model_states.pt or its like", "give the folder of one tag"
        )
    optimizers, layers = _read(root, names, _OPTIMIZER), _read(root, names, _LAYER)
    layers = {(layer, rank): file for (rank, layer), file in layers.items()}
    experts = {(layer, expert): file for (expert, layer), file in _read(root, names, _EXPERT).items()}
    for file in models.values():
        _check(file, file.content, _MODEL_TYPES, "")
        if AUTOEP_LAYERS in file.content and not experts:  # at ZeRO-3 experts have no files of their own
            what = "of AutoEP, whose experts are divided over other ranks than the rest: dsx cannot read it"
            raise CheckpointError(f"{file.path}: {AUTOEP_LAYERS}", what, "save with DeepSpeed without AutoEP")
    for file in optimizers.values():
        _check(file, file.content, {"optimizer_state_dict": TypeAdapter(_Dict)}, "")
        states = file.content.get("optimizer_state_dict", {})
        _check(file, states, _OPTIMIZER_TYPES, "optimizer_state_dict.")
    first = models[0, 0].content
    degree = int(first.get("mp_world_size") or max(rank for rank, _ in models) + 1)
    tensor = _tensor_degree(first, layers, degree)
    if degree % tensor:
        raise CheckpointError(
            str(root),
            f"{degree} model-parallel ranks, tensor-parallel degree {tensor}",
            "use the files of one save",
        )
    files = StockFiles(
        root=root,
        models=models,
        optimizers=optimizers,
        layers=layers,
        experts=experts,
        mesh=Mesh.of(
            pp=degree // tensor,
            dp=int(first.get("dp_world_size") or max((rank for _, rank in optimizers), default=0) + 1),
            tp=tensor,
        ),
        zero_stage=_zero_stage(first, optimizers, models),
    )
    _check_complete(files, universal=universal)
    return files


def _read(root: Path, names: list[str], pattern: re.Pattern[str]) -> dict[tuple[int, int], TorchFile]:
    """Files by (second number, first number) of their names; a missing number is 0."""
    found: dict[tuple[int, int], TorchFile] = {}
    for name in names:
        match = pattern.fullmatch(name)
        if match is None:
            continue
        first, second = (int(number or 0) for number in match.groups())
        if (second, first) in found:
            raise CheckpointError(
                str(root / name),
                f"{found[second, first].name} is of the same rank: two checkpoints lie in one folder",
                "remove the files that do not belong to it",
            )
        found[second, first] = read_torch_file(root, name)
    return found


def _tensor_degree(first: Mapping[str, Any], layers: Mapping[tuple[int, int], Any], degree: int) -> int:
    if layers:
        return max(rank for _, rank in layers) + 1
    dims = first.get("checkpoint_parallel_dimensions") or {}
    pipeline = int(dims.get("pp_degree") or 1)
    return int(dims.get("tp_degree") or degree // pipeline)


def _zero_stage(first: Mapping[str, Any], optimizers: Mapping[Any, TorchFile], models: Any) -> int:
    for file in optimizers.values():
        stage = file.content.get("optimizer_state_dict", {}).get("zero_stage")
        if stage is not None:
            return int(stage)
    if any(rank for _, rank in models):
        return 3
    settings = config_of(first).get("zero_optimization")
    if isinstance(settings, dict):  # stage 0 with BF16_Optimizer has optimizer files too
        return int(settings.get("stage", 0))
    return int(bool(settings))


def _check_complete(files: StockFiles, *, universal: bool) -> None:
    copies = files.replicas if files.zero_stage == 3 else range(1)
    _require(files.root, files.models, files.ranks, copies, "model_states")
    if (files.zero_stage or files.optimizers) and not universal:
        _require(files.root, files.optimizers, files.ranks, files.replicas, "optim_states")
    numbers = {layer for layer, _ in files.layers}
    _require(files.root, files.layers, numbers, files.shards, "layer")
    tags = {
        (file.content.get("global_steps"), file.content.get("ds_version")) for file in files.models.values()
    }
    if len(tags) > 1:
        raise CheckpointError(
            str(files.root),
            f"its model files are of several saves (step, version): {sorted(tags)}",
            _COMPLETE,
        )


def _require(
    root: Path, found: Mapping[tuple[int, int], Any], rows: Collection[int], columns: range, kind: str
) -> None:
    """Prove that there is a file of every row and column. There may be said to be 10^15: none is counted."""
    extra = [key for key in found if key[0] not in rows or key[1] not in columns]
    lacking = len(rows) * len(columns) - (len(found) - len(extra))
    missing = next(((row, column) for row in rows for column in columns if (row, column) not in found), None)
    what = {"layer": ("layer", "tensor-parallel rank")}.get(
        kind, ("model-parallel rank", "data-parallel rank")
    )
    if missing is not None:
        raise CheckpointError(
            str(root),
            f"the {kind} file of {what[0]} {missing[0]}, {what[1]} {missing[1]} is missing"
            + (f", and {lacking - 1} more" if lacking > 1 else ""),
            _COMPLETE,
        )
    if extra:
        raise CheckpointError(
            str(root / found[extra[0]].name),
            f"the checkpoint has no {what[0]} {extra[0][0]}, {what[1]} {extra[0][1]}",
            "remove the files that do not belong to it",
        )


_ESCAPED_OR_CLASS = re.compile(r"\\.|\[\^?\]?[^\]]*\]")
_MOST_REPEATS, _LONGEST_PATTERN = 3, 1000


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
    """Raise CheckpointError unless a file's content is a dict whose values are of DeepSpeed's types."""
    if not isinstance(content, dict):
        raise unusable(str(file.path), "it is no file of DeepSpeed: it holds no dict")
    for key, kind in types.items():
        value = content.get(key)
        try:
            if value is not None:
                kind.validate_python(value)
        except ValidationError:
            raise unusable(
                f"{file.path}: {head}{key}",
                f"a {type(value).__name__} that cannot be this: {str(value)[:80]}"
                if isinstance(value, bool | int | float | str)
                else f"a {type(value).__name__} of another form than DeepSpeed's",
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
_MODEL_TYPES: Mapping[str, TypeAdapter[Any]] = {
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
_OPTIMIZER_TYPES: Mapping[str, TypeAdapter[Any]] = {
    "zero_stage": TypeAdapter(Annotated[int, Strict(), Field(ge=0, le=3)]),
    "fp32_flat_groups": TypeAdapter(_Tensors),
    "single_partition_of_fp32_groups": TypeAdapter(_Tensors),
    "base_optimizer_state": TypeAdapter(_States),
    "optimizer_state_dict": TypeAdapter(_States),
    "group_paddings": TypeAdapter(_Counts),
    "param_alignment_paddings": TypeAdapter(Sequence[_Counts]),
    "param_slice_mappings": TypeAdapter(Sequence[Annotated[dict[Any, _Place], Strict()]]),
}
