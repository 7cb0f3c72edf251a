"""The layout that a checkpoint shall get, and which stock engine it is written for. Pure data."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Self

from dsx.checkpoint.catalog import NO_SETTINGS, Catalog
from dsx.checkpoint.claims import check_layers
from dsx.checkpoint.formats.deepspeed.module import tied_names, under_names
from dsx.checkpoint.formats.deepspeed.order import TIED, Ties
from dsx.checkpoint.formats.deepspeed.target import StockLayout
from dsx.errors import CheckpointError, ConfigError
from dsx.models.param import ParamSpec, layer_of
from dsx.parallel.layout import Layout
from dsx.parallel.limits import LayoutRequest, violations
from dsx.parallel.mesh import AXES, Mesh
from dsx.parallel.partition import balanced
from dsx.parallel.stages import StageMap


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """What is asked for of a PipelineModule.

    Attributes:
        partition: Its ``partition_method``, ``uniform`` or ``parameters``, or layers per stage: ``3,2``.
        tied: (key, layers that use it) of every TiedLayerSpec, where the checkpoint does not say; empty if
            there is none, None if nothing is said.
    """

    partition: str | None = None
    tied: Ties | None = None


def stock_layout(
    source: Catalog,
    degrees: TargetDegrees,
    pipeline: Pipeline,
    layout: StockLayout,
    *,
    universal: bool = False,
) -> tuple[Catalog, StockLayout]:
    """The engine of ``layout`` with the degrees asked for, and the source under the names that it has.

    Args:
        source: What there is.
        degrees: What they leave out is 1: a stock engine is no layout of dsx, whose degrees would stay.
        pipeline: Of the PipelineModule, if the pipeline degree is above 1 or a partition is given.
        layout: Everything but tensor parallelism and pipeline.
        universal: Only its names matter: files of the universal format are of no cut.
    """
    tp, pp = degrees.tensor or 1, degrees.pipeline or 1
    if (degrees.chunks or 1) > 1:
        raise CheckpointError(
            f"chunks = {degrees.chunks}", "DeepSpeed's pipelines have one stage per rank", "leave chunks out"
        )
    specs = tuple(spec for spec in source.specs if spec.hf != (spec.name,))
    layout = replace(layout, tp=tp, specs=specs)
    cut = pp > 1 or pipeline.partition is not None
    if pipeline.tied and not cut and not universal:
        raise CheckpointError("--tied", "there is no pipeline", "give --pipeline or --partition")
    # What the user said when the checkpoint, or one that it was made of, was read.
    known = source.facts.get("tied", {})
    tied = pipeline.tied or tuple((key, tuple(layers)) for key, layers in known.items())
    if (cut or universal) and not specs:
        source = _under_ties(source, tied)
    if not cut:
        return source, layout
    last = _num_layers(source, specs, tied)
    names = tied_names(specs)
    source = under_names(source, names)
    bounds = _bounds(source, specs, pipeline, pp, tp, last)
    for key, layers in tied:
        if max(layers) >= bounds[-1]:
            raise CheckpointError(
                f"--tied {key}={','.join(map(str, layers))}",
                f"the pipeline has {bounds[-1]} layers, numbered from 0",
                "name its layers, or say with --partition how many each stage gets",
            )
    return source, replace(
        layout,
        bounds=bounds,
        tied=tied or tuple((one.tie, (one.layer, last - 1)) for one in specs if one.tie and last is not None),
        specs=tuple(replace(spec, name=names.get(spec.name, spec.name)) for spec in specs),
        groups=merged_groups(source) if specs else layout.groups,
    )


def stock_mesh(layout: StockLayout) -> Mesh:
    """The ranks of a stock engine."""
    return Mesh.of(pp=max(1, len(layout.bounds) - 1), dp=layout.dp, tp=layout.tp)


def _under_ties(source: Catalog, ties: Ties) -> Catalog:
    """A pipeline's checkpoint with the tensors of tied modules under the names that PipelineModule has."""
    names: dict[str, str] = {}
    for key, layers in ties:
        held = [layer for layer in layers if _of_layer(source, layer)]
        known = any(entry.name.startswith(f"{TIED}.{key}.") for entry in source.entries)
        if len(held) + known != 1:
            what = (
                f"has tensors of layer {held[-1]} beside the tied module's"
                if held
                else "has none of its tensors"
            )
            raise CheckpointError(
                f"--tied {key}={','.join(map(str, layers))}",
                f"{source.root} {what}",
                "name the layers of the TiedLayerSpec, counted from 0, when the pipeline's own checkpoint is "
                "converted",
            )
        found = () if known else _of_layer(source, held[0])
        names |= {name: f"{TIED}.{key}.{name.partition('.')[2]}" for name in found}
    covered = {layer for _, layers in ties for layer in layers}
    open_ones = [layer for layer in source.facts.get("unnamed_ties", ()) if layer not in covered]
    if open_ones:
        raise CheckpointError(
            f"{source.root}: layer {open_ones[0]}",
            "several stages have it, so that it is a tied module, whose key no file says without ZeRO",
            f"say the key and all layers that use it: --tied KEY={open_ones[0]},LAYER",
        )
    return under_names(source, names)


def _of_layer(source: Catalog, layer: int) -> tuple[str, ...]:
    return tuple(dict.fromkeys(one.name for one in source.entries if one.name.startswith(f"{layer}.")))


def merged_groups(source: Catalog) -> tuple[tuple[str, ...], ...]:
    """Optimizer groups in the order of the model, which a stock engine of it numbers them by.

    Groups with the same hyperparameters become one: dsx's engine puts tied weights apart, and each pipeline
    rank has groups of its own.
    """
    order = {name: at for at, name in enumerate(dict.fromkeys(entry.name for entry in source.entries))}
    merged: dict[str, list[str]] = {}
    for group in source.facts.get("param_groups") or ():
        settings = {key: value for key, value in group.items() if key not in NO_SETTINGS}
        merged.setdefault(json.dumps(settings, sort_keys=True), []).extend(group["names"])
    return tuple(tuple(sorted(dict.fromkeys(names), key=order.__getitem__)) for names in merged.values())


def _num_layers(source: Catalog, specs: Sequence[ParamSpec], ties: Ties) -> int | None:
    """Layers of the model; None where only its files are known, which layers without tensors do not have."""
    told = int((source.facts.get("stage_bounds") or [0])[-1])
    if not told and not specs:
        return None
    # A conversion to dsx cannot count layers without tensors, as the head of tied embeddings is one.
    used = (layer + 1 for _, layers in ties for layer in layers)
    layers = max(told, num_layers(specs) if specs else 0, *used)
    check_layers(source, {"its layers": layers})
    return layers


def _bounds(
    source: Catalog,
    specs: Sequence[ParamSpec],
    pipeline: Pipeline,
    pp: int,
    tp: int,
    layers: int | None,
) -> tuple[int, ...]:
    """First layer of every stage, then the number of layers, as the PipelineModule will cut them."""
    method = pipeline.partition or "parameters"
    if method not in ("uniform", "parameters"):
        return _counted(method, pp, layers)
    if layers is None:
        raise CheckpointError(
            f"{source.root} as a pipeline of {pp} stages",
            "its files do not say how many layers the model has: those without tensors have no file",
            "say how many layers each stage gets: --partition 3,2",
        )
    for each in violations(LayoutRequest(layers=layers, pipeline=pp)):
        raise CheckpointError(f"pipeline = {pp}", each.why, each.fix)
    if method == "uniform":
        short, more = divmod(layers, pp)
        return tuple(accumulate((short + (stage < more) for stage in range(pp)), initial=0))
    return evenest([_elements(specs, layer, layers, tp) for layer in range(layers)], pp)


def _counted(method: str, pp: int, layers: int | None) -> tuple[int, ...]:
    counts = [int(count) if count.strip().isdecimal() else 0 for count in method.split(",")]
    if not all(counts) or len(counts) != pp or (layers is not None and sum(counts) != layers):
        told = "" if layers is None else f" of {layers} layers"
        raise CheckpointError(
            f"--partition {method}",
            f"it does not say how many layers each of {pp} stages{told} gets",
            "use uniform, parameters, or one number per stage: 3,2",
        )
    return tuple(accumulate(counts, initial=0))


def _elements(specs: Sequence[ParamSpec], layer: int, layers: int, tp: int) -> int:
    """Parameters of one rank's module of a layer, as PipelineModule counts them: tied ones in each layer."""
    mine = (spec for spec in specs if spec.layer == layer or (spec.tie and layer == layers - 1))
    at = Mesh.of(tp=tp).at()
    return sum(prod(spec.local_shape(at)) for spec in mine)


def evenest(weights: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Bounds of the cut that DeepSpeed's ``parameters`` method makes (runtime/utils.py, partition_balanced).

    It builds the cut of the first i layers into j stages from cuts of fewer, always the one with the least
    difference between heaviest and lightest stage and, of equal ones, the one whose last stage is shortest.
    That is not always the least difference of all, and here it has to be the same cut.

    >>> evenest([4, 1, 1, 1, 1, 4], 3)
    (0, 1, 5, 6)
    """
    if len(weights) <= num_stages:
        return tuple(range(len(weights) + 1))
    sums = [0, *accumulate(weights)]
    Best = tuple[float, float, tuple[int, ...]]  # heaviest, lightest, bounds
    best: dict[int, Best] = {0: (0.0, float("inf"), (0,))}
    for stage in range(1, num_stages + 1):
        now: dict[int, Best] = {}
        for stop in range(stage, len(weights) + 1):
            for start in (start for start in range(stop) if start in best):
                high, low, bounds = best[start]
                last = sums[stop] - sums[start]
                new = (max(high, last), min(low, last), (*bounds, stop))
                if stop not in now or new[0] - new[1] <= now[stop][0] - now[stop][1]:
                    now[stop] = new
        best = now
    return best[len(weights)][2]


def parse_ties(texts: Sequence[str]) -> Ties:
    """``embed=0,4`` each: key of a TiedLayerSpec and the layers that use it; ``none`` that there are none."""
    if list(texts) == ["none"]:
        return ()
    found = []
    for text in texts:
        key, _, layers = text.partition("=")
        numbers = [part.strip() for part in layers.split(",")]
        if not key or not all(number.isdecimal() for number in numbers):
            raise CheckpointError(
                f"--tied {text}",
                "it names no key and the layers that use it",
                "write for example embed=0,4, or none",
            )
        found.append((key, tuple(int(number) for number in numbers)))
    return tuple(found)


def cut_note(layout: StockLayout) -> tuple[str, ...]:
    """What the loading script has to do alike, for people."""
    if not layout.bounds:
        return ()
    counts = [high - low for low, high in pairwise(layout.bounds)]
    return (f"The PipelineModule that loads it has {', '.join(map(str, counts))} layers in its stages.",)


_NAMES = {word: axis.title for axis in AXES for word in (axis.name, axis.title)}
_NAMES |= {"chunks": "chunks", "zero": "zero"}


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetDegrees:
    """What of a layout is asked for; None leaves it as the source has it."""

    tensor: int | None = None
    pipeline: int | None = None
    data: int | None = None
    context: int | None = None
    expert: int | None = None
    chunks: int | None = None
    zero: int | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """``tp=2,pp=2,chunks=2,dp=2,zero=1``, any of them. Raises ConfigError.

        >>> TargetDegrees.parse("tp=2,zero=3")
        TargetDegrees(tensor=2, pipeline=None, data=None, context=None, expert=None, chunks=None, zero=3)
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

    def over(self, other: TargetDegrees) -> TargetDegrees:
        """These, and where they say nothing, ``other``."""
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(other, **{name: value for name, value in given.items() if value is not None})


def layout_like(source: Catalog, wanted: TargetDegrees) -> Layout:
    """The source's own model in another layout.

    Stages keep the source's cut where their number stays; else layers are cut so that parameters balance.

    Raises:
        CheckpointError: The source does not say how tensor parallelism cuts its tensors, or has not layers
            enough.
        LayoutError: Degrees that do not fit the model.
    """
    saved = source.facts.get("mesh") or {}
    mesh = Mesh.of(**{a.name: _or(getattr(wanted, a.title), saved.get(a.name, 1)) for a in AXES})
    chunks = _or(wanted.chunks, source.facts.get("chunks", 1))
    params = specs_of(source)
    known = {spec.name for spec in source.specs}
    unknown = [spec.name for spec in params if spec.name not in known]
    if unknown and mesh.tp > 1:
        raise CheckpointError(
            f"{source.root}: tensor {unknown[0]}",
            f"the checkpoint does not say how tensor parallelism of degree {mesh.tp} cuts it",
            "ask for tensor 1, or name a CONFIG of the model",
        )
    return Layout(
        mesh=mesh,
        stages=_stages(source, params, mesh.pp, chunks),
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
    rest = (name for name in reversed(names) if name not in known)
    return (*source.specs, *(ParamSpec.uncut(name, names[name].shape, layer_of(name)) for name in rest))


def _stages(source: Catalog, params: Sequence[ParamSpec], pp: int, chunks: int) -> StageMap:
    facts: Mapping[str, object] = source.facts
    bounds, placement = facts.get("stage_bounds"), facts.get("placement", "loop")
    known = tuple(bounds) if isinstance(bounds, list | tuple) else None
    layers = known[-1] if known else num_layers(params)
    check_layers(source, {"its layers": layers})
    if known is not None and len(known) - 1 == pp * chunks:
        return StageMap(known, pp, "v" if placement == "v" and chunks == 2 else "loop")
    for each in violations(LayoutRequest(layers=layers, pipeline=pp, chunks=chunks)):
        what = f"it cannot be cut into pipeline {pp} x chunks {chunks} stages: {each.why}"
        raise CheckpointError(str(source.root), what, each.fix)
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
