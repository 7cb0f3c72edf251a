"""``dsx.json``: what a checkpoint is of, in which layout, and how far the run had come.

Plain JSON, so that a person, ``jq`` and a program without torch can read it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dsx.errors import CheckpointError
from dsx.spec.param import ParamSpec

FORMAT = 1
_NOT_COMPARED = {  # of ModelSpec: a run may change these and go on from the same weights
    "max_positions",  # where it matters to weights (learned positions), a tensor's shape has it
    "embedding_dropout",
    "attention_dropout",
    "residual_dropout",
    "init_std",
    "scaled_output_init",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    """One logical (global) tensor. ``split`` to ``tie`` are as in :class:`dsx.spec.param.ParamSpec`.

    Attributes:
        dtype: Of the weights that the model computes with, as torch names it: ``bfloat16``.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: int | None = None
    parts: tuple[int, ...] = ()
    pad_multiple: int = 1
    tie: str | None = None

    @classmethod
    def of(cls, spec: ParamSpec, dtype: str) -> Self:
        """The entry of a parameter that is described by ``spec``."""
        return cls(
            name=spec.name,
            shape=spec.shape,
            dtype=dtype,
            split=spec.split,
            parts=spec.parts,
            pad_multiple=spec.pad_multiple,
            tie=spec.tie,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of ``dsx.json``.

    Attributes:
        versions: Package -> version that wrote the checkpoint: dsx, deepspeed, torch.
        mesh: Axis -> degree, outermost first, as :class:`dsx.spec.mesh.Mesh` orders them.
        chunks: Virtual stages per pipeline rank.
        placement: How virtual stages are dealt to ranks, ``loop`` or ``v``.
        stage_bounds: Layer at which each virtual stage begins, then the number of layers.
        precision: Compute dtype, ``fp32`` or ``bf16``.
        schedule: Name of the pipeline schedule.
        tensors: Every tensor of the whole model.
        step: Optimizer steps done.
        global_batch_size: Sequences per step, over all ranks.
        tokens: Tokens trained on.
        data_cursor: Global index of the next training sequence.
        seed: Of initialisation and data order; None if the caller did not say.
        model: Fields of :class:`dsx.spec.model.ModelSpec` as JSON; None for a layer list of the user's own.
        wandb_run_id: The W&B run that a resumed run continues.
        format: Version of this description.
        source: The file it was read from; not part of it.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    versions: dict[str, str]
    mesh: dict[str, int]
    chunks: int
    stage_bounds: tuple[int, ...]
    zero_stage: int
    precision: str
    schedule: str
    tensors: tuple[TensorEntry, ...]
    step: int
    global_batch_size: int
    tokens: int = 0
    data_cursor: int = 0
    seed: int | None = None
    placement: str = "loop"
    model: dict[str, Any] | None = None
    wandb_run_id: str | None = None
    format: int = FORMAT
    source: str = field(default="this run", compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return prod(self.mesh.values())

    @property
    def model_digest(self) -> str:
        """SHA-256 (hex) of the tensors' names and shapes; equal for every layout of one model."""
        shapes = sorted([entry.name, list(entry.shape)] for entry in self.tensors)
        return hashlib.sha256(json.dumps(shapes, separators=(",", ":")).encode()).hexdigest()

    def to_json(self) -> str:
        """JSON text, one tensor per line, that :meth:`from_json` reads back as an equal manifest."""
        content = {name: value for name, value in asdict(self).items() if name not in {"tensors", "source"}}
        head = json.dumps(content | {"model_digest": self.model_digest}, indent=1, allow_nan=False)
        rows = ",\n".join(f"  {json.dumps(asdict(entry))}" for entry in self.tensors)
        return f'{head.removesuffix("}").rstrip()},\n "tensors": [\n{rows}\n ]\n}}\n'

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """The manifest in file ``path``. Raises CheckpointError if it is missing or not one."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise CheckpointError(
                str(path), "there is no such file", "give a checkpoint that dsx wrote, in its parent folder"
            ) from None
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(str(path), f"cannot be read ({error})", _USE_ANOTHER) from None
        return cls.from_json(text, source=str(path))

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Manifest:
        """Parse what :meth:`to_json` wrote.

        Raises:
            CheckpointError: Truncated or not JSON, not a manifest, a key missing, unknown or of the wrong
                type, a digest that its tensors do not have, or a format that this version does not know.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise CheckpointError(source, f"not JSON, or cut short ({error})", _USE_ANOTHER) from None
        if not isinstance(content, dict) or "format" not in content:
            raise CheckpointError(source, "not a description of a dsx checkpoint", _USE_ANOTHER)
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{source}: format = {content['format']!r}",
                f"this dsx reads format {FORMAT}",
                f"load it with the dsx that wrote it: {content.get('versions')}",
            )
        digest = content.pop("model_digest", None)
        try:
            manifest = TypeAdapter(Manifest).validate_json(json.dumps(content), strict=True)
        except ValidationError as error:
            raise CheckpointError(source, _first_problem(error), _USE_ANOTHER) from None
        if manifest.model_digest != digest:
            raise CheckpointError(
                f"{source}: model_digest = {digest!r}",
                "its tensors have another: it was changed",
                _USE_ANOTHER,
            )
        return replace(manifest, source=source)

    def require_same_model(self, other: Manifest) -> None:
        """Raise CheckpointError unless ``other`` (the run that loads this) has the same tensors and model."""
        differences = [*_model_differences(self.model, other.model), *_tensor_differences(self, other)]
        if differences:
            more = f"; and {len(differences) - 3} more differences" if len(differences) > 3 else ""
            raise CheckpointError(
                self.source,
                f"the checkpoint is of another model: {'; '.join(differences[:3])}{more}",
                "give the model that the checkpoint was trained with (dsx.model), or another checkpoint",
            )

    def require_same_layout(self, other: Manifest) -> None:
        """Raise CheckpointError unless ``other`` places every tensor and optimizer state on the same rank."""
        mine, theirs = self._layout(), other._layout()
        differs = [key for key in mine if mine[key] != theirs.get(key)]
        if differs:
            wanted = ", ".join(f"{key} = {mine[key]}" for key in differs)
            given = ", ".join(f"{key} = {theirs.get(key)}" for key in differs)
            raise CheckpointError(
                self.source,
                f"it was saved with {wanted}; this run has {given}",
                f"resharding at load is not part of this version: start with {wanted}, or export the "
                "checkpoint to Hugging Face and start from its weights",
            )

    def _layout(self) -> dict[str, object]:
        """What must agree, by the name under which a user sets it."""
        axes = {"tp": "dsx.parallel.tensor", "pp": "dsx.parallel.pipeline", "dp": "data-parallel ranks"}
        padding = sorted({entry.pad_multiple for entry in self.tensors})
        return {axes.get(axis, axis): degree for axis, degree in self.mesh.items()} | {
            "dsx.parallel.chunks": self.chunks,
            "placement of the stages (dsx.schedule)": self.placement,
            "first layers of the stages (dsx.partition)": self.stage_bounds,
            "zero_optimization.stage": self.zero_stage,
            "precision": self.precision,
            "vocabulary padding": padding,
        }


_USE_ANOTHER = "use another checkpoint, or save this one again"


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    return f"key {'.'.join(map(str, problem['loc']))}: {problem['msg']}"


def _tensor_differences(saved: Manifest, here: Manifest) -> Iterator[str]:
    theirs = {entry.name: entry for entry in here.tensors}
    for entry in saved.tensors:
        other = theirs.pop(entry.name, None)
        if other is None:
            yield f"{entry.name} {entry.shape} is in the checkpoint alone"
        elif entry.shape != other.shape:
            yield f"{entry.name} has shape {entry.shape} in the checkpoint, {other.shape} here"
        elif (entry.parts, entry.tie) != (other.parts, other.tie):
            yield (
                f"{entry.name} has parts {entry.parts} and tie {entry.tie} in the checkpoint, "
                f"{other.parts} and {other.tie} here"
            )
    for entry in theirs.values():
        yield f"{entry.name} {entry.shape} is in this run's model alone"


def _model_differences(saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> Iterator[str]:
    if saved is None or here is None:
        return
    for key in sorted({*saved, *here} - _NOT_COMPARED):
        if saved.get(key) != here.get(key):
            yield f"{key} is {saved.get(key)!r} in the checkpoint, {here.get(key)!r} here"
