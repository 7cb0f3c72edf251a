"""The layout that a checkpoint shall get: from degrees and what the source says of itself. Pure data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

from dsx.checkpoint.catalog import Catalog, Entry
from dsx.checkpoint.claims import check_layers
from dsx.errors import CheckpointError, ConfigError
from dsx.plan.partition import balanced
from dsx.spec.layout import Layout
from dsx.spec.mesh import Mesh
from dsx.spec.param import Init, ParamSpec
from dsx.spec.stages import StageMap

_NAMES = {
    "tp": "tensor",
    "tensor": "tensor",
    "pp": "pipeline",
    "pipeline": "pipeline",
    "dp": "data",
    "data": "data",
    "chunks": "chunks",
    "zero": "zero",
}
_MOST_DIGITS = 6  # of a layer's number


@dataclass(frozen=True, slots=True, kw_only=True)
class Degrees:
    """What of a layout is asked for; None leaves it as the source has it.

    Attributes:
        tensor: Tensor-parallel degree.
        pipeline: Pipeline degree.
        data: Data-parallel degree.
        chunks: Virtual stages per pipeline rank.
        zero: ZeRO stage.
    """

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    chunks: int | None = None
    zero: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """``tp=2,pp=2,chunks=2,dp=2,zero=1``, any of them. Raises ConfigError.

        >>> Degrees.parse("tp=2,zero=3")
        Degrees(tensor=2, pipeline=None, data=None, chunks=None, zero=3)
        """
        found: dict[str, int] = {}
        for item in text.split(","):
            key, _, value = (part.strip() for part in item.partition("="))
            name = _NAMES.get(key)
            if name is None or name in found or not value.isdecimal():
                raise ConfigError(
                    f"--to {text}",
                    f"{item!r} says nothing about a layout" if name not in found else f"{key} comes twice",
                    "write for example tp=2,pp=2,chunks=2,dp=2,zero=1 (any of them), or dsx, hf, universal, "
                    "deepspeed",
                )
            found[name] = int(value)
        return cls(**found)

    def over(self, other: Degrees) -> Degrees:
        """These, and where they say nothing, ``other``."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in given.items() if value is not None})


def layout_like(source: Catalog, wanted: Degrees) -> Layout:
    """The source's own model in another layout.

    Stages keep the source's cut where their number stays; else layers are cut so that parameters balance.

    Raises:
        CheckpointError: The source does not say how tensor parallelism cuts its tensors, or has not layers
            enough.
        LayoutError: Degrees that do not fit the model.
    """
    mesh = source.facts.get("mesh") or {}
    tp = _or(wanted.tensor, mesh.get("tp", 1))
    pp = _or(wanted.pipeline, mesh.get("pp", 1))
    chunks = _or(wanted.chunks, source.facts.get("chunks", 1))
    params = specs_of(source)
    known = {spec.name for spec in source.specs}
    unknown = [spec.name for spec in params if spec.name not in known]
    if unknown and tp > 1:
        raise CheckpointError(
            f"{source.root}: tensor {unknown[0]}",
            f"the checkpoint does not say how tensor parallelism of degree {tp} cuts it",
            "ask for tensor 1, or name a CONFIG of the model",
        )
    return Layout(
        mesh=Mesh.of(pp=pp, dp=_or(wanted.data, mesh.get("dp", 1)), tp=tp),
        stages=_stages(source, params, pp, chunks),
        params=params,
        zero_stage=_or(wanted.zero, source.facts.get("zero_stage", 0)),
    )


def specs_of(source: Catalog) -> tuple[ParamSpec, ...]:
    """Every tensor of a checkpoint; one of which no cut is known is whole everywhere.

    Its layer is the number that its name begins with, as in every pipeline's; 0 if there is none, or one that
    no pipeline has.
    """
    known = {spec.name: spec for spec in source.specs}
    names = {entry.name: entry for entry in reversed(source.entries)}
    rest = [_uncut(names[name]) for name in reversed(names) if name not in known]
    return (*source.specs, *rest)


def is_guess(spec: ParamSpec) -> bool:
    """Whether a spec only says that nothing is known, as :func:`specs_of` makes them."""
    return spec.split is None and spec.hf == (spec.name,)


def _uncut(entry: Entry) -> ParamSpec:
    first = entry.name.partition(".")[0]
    return ParamSpec(
        name=entry.name,
        layer=int(first) if first.isdecimal() and len(first) <= _MOST_DIGITS else 0,
        shape=entry.shape,
        init=Init(kind="zeros"),
        hf=(entry.name,),
    )


def _stages(source: Catalog, params: Sequence[ParamSpec], pp: int, chunks: int) -> StageMap:
    facts: Mapping[str, object] = source.facts
    bounds, placement = facts.get("stage_bounds"), facts.get("placement", "loop")
    known = tuple(bounds) if isinstance(bounds, list | tuple) else None
    layers = known[-1] if known else num_layers(params)
    check_layers(source, layers, "its layers")
    if known is not None and len(known) - 1 == pp * chunks:
        return StageMap(known, pp, "v" if placement == "v" and chunks == 2 else "loop")
    if pp * chunks > layers:
        raise CheckpointError(
            str(source.root),
            f"its {layers} layers cannot be cut into pipeline {pp} x chunks {chunks} stages",
            f"ask for {layers} stages or fewer",
        )
    weights = [0] * layers
    for spec in params:
        weights[spec.layer] += spec.numel
        if spec.tie is not None:
            weights[-1] += spec.numel  # the head's stage holds a copy of the tied table
    return StageMap(balanced(weights, pp * chunks), pp)


def num_layers(specs: Sequence[ParamSpec]) -> int:
    """Layers of the model of these tensors: the head of one with tied embeddings has none of its own."""
    return max((spec.layer for spec in specs), default=0) + 1 + any(spec.tie is not None for spec in specs)


def _or(value: int | None, other: int) -> int:
    return other if value is None else value
