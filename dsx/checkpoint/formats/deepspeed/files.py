"""Which files a stock DeepSpeed checkpoint has, for which rank, and that none is missing.

Names (deepspeed 0.19.8, runtime/engine.py:4319-4381 and pipe/module.py, ``ckpt_layer_path``), with D the
data-parallel rank, M the model-parallel rank (pipeline stage slowest, tensor fastest), L the global layer:

- ``mp_rank_M_model_states.pt``, at ZeRO-3 ``zero_pp_rank_D_mp_rank_M_model_states.pt``
- ``[bf16_]zero_pp_rank_D_mp_rank_M_optim_states.pt``
- of a PipelineModule: ``layer_L[-model_T]-model_states.pt``
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.checkpoint.formats.deepspeed.types import check_model, check_optimizer, config_of
from dsx.checkpoint.formats.torch_file import TorchFile, read_torch_file
from dsx.errors import CheckpointError
from dsx.parallel.mesh import Mesh

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d+)(?:-model_(\d+))?-model_states\.pt")
_EXPERT = re.compile(r"(?:layer_\d+_)?expert_\d+_mp_rank_\d+_model_states\.pt|expp_rank_.*\.pt")
_COMPLETE = "complete the checkpoint: all ranks' files of one save belong into this folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class StockFiles:
    """The files of one checkpoint, read but for their tensors.

    Attributes:
        root: The folder.
        models: By (model-parallel rank, data-parallel rank); below ZeRO-3 only data-parallel rank 0.
        optimizers: By the same; none without ZeRO.
        layers: By (global layer, tensor-parallel rank).
        mesh: Over how many ranks of which axes the model was.
        zero_stage: ZeRO stage.
    """

    root: Path
    models: Mapping[tuple[int, int], TorchFile]
    optimizers: Mapping[tuple[int, int], TorchFile]
    layers: Mapping[tuple[int, int], TorchFile]
    mesh: Mesh
    zero_stage: int

    @property
    def ranks(self) -> range:
        """Model-parallel ranks: pipeline stage slowest, tensor fastest."""
        return range(self.mesh.num_parts)

    @property
    def shards(self) -> range:
        """Tensor-parallel ranks."""
        return range(self.mesh.tp)

    @property
    def replicas(self) -> range:
        """Data-parallel ranks."""
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
        """Every file."""
        return (*self.models.values(), *self.optimizers.values(), *self.layers.values())


def looks_stock(root: Path) -> bool:
    """Whether a folder has files by DeepSpeed's names."""
    return root.is_dir() and any(_MODEL.fullmatch(path.name) for path in root.iterdir())


def open_stock(root: Path, *, universal: bool = False) -> StockFiles:
    """Read the structure of every file of a stock checkpoint.

    Args:
        root: The folder of one tag.
        universal: It is of the universal format, which has neither optimizers' nor layers' files.

    Raises:
        CheckpointError: No such checkpoint, a file missing or unreadable, or one that dsx cannot use: of
            experts, or with states swapped out to NVMe.
    """
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    _refuse(root, names)
    models = _read(root, names, _MODEL)
    if (0, 0) not in models:
        raise CheckpointError(
            str(root), "it has no mp_rank_00_model_states.pt or its like", "give the folder of one tag"
        )
    optimizers, layers = _read(root, names, _OPTIMIZER), _read(root, names, _LAYER)
    layers = {(layer, rank): file for (rank, layer), file in layers.items()}
    for file in models.values():
        check_model(file)
    for file in optimizers.values():
        check_optimizer(file)
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
        mesh=Mesh.of(
            pp=degree // tensor,
            dp=int(first.get("dp_world_size") or max((rank for _, rank in optimizers), default=0) + 1),
            tp=tensor,
        ),
        zero_stage=_zero_stage(first, optimizers, models),
    )
    _check_complete(files, universal=universal)
    return files


def _refuse(root: Path, names: list[str]) -> None:
    experts = next((name for name in names if _EXPERT.fullmatch(name)), None)
    if experts is not None:
        raise CheckpointError(
            str(root / experts), "a mixture of experts' file, which dsx cannot read", "use a dense model"
        )
    if "offloaded_tensors" in names:
        raise CheckpointError(
            str(root / "offloaded_tensors"),
            "optimizer states that were swapped out to NVMe, in files without names",
            "load it with DeepSpeed, offloading to cpu, and save it again",
        )


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
