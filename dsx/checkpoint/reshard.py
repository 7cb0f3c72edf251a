"""Any checkpoint into any other: a source, a target's format and layout, a plan. ``dsx reshard`` is this."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dsx.checkpoint.base import (
    completed,
    composite_at,
    fact_of,
    of_today,
    other_files,
    under_known_names,
    whole,
)
from dsx.checkpoint.catalog import Catalog, Target, check_files, model_fact
from dsx.checkpoint.claims import MISFITS, forms_of, language_config, model_of, model_of_fact, specs_of_model
from dsx.checkpoint.copy_plan import CopyPlan, plan
from dsx.checkpoint.execute import ConversionOptions, ConversionReport, execute, worker_bytes
from dsx.checkpoint.formats import dcp, megatron, native
from dsx.checkpoint.formats import universal as universal_target
from dsx.checkpoint.formats.deepspeed import target as deepspeed_target
from dsx.checkpoint.formats.deepspeed.module import as_model
from dsx.checkpoint.formats.deepspeed.reader import FORMAT as STOCK
from dsx.checkpoint.formats.deepspeed.target import StockLayout
from dsx.checkpoint.formats.huggingface import catalog
from dsx.checkpoint.formats.huggingface.names import in_memory
from dsx.checkpoint.layouts import (
    Pipeline,
    TargetDegrees,
    cut_note,
    layout_like,
    merged_groups,
    stock_layout,
    stock_mesh,
)
from dsx.checkpoint.merge import Merge, adapter_target, taken_apart
from dsx.checkpoint.staging import check_absent, partial_of
from dsx.checkpoint.store import LATEST
from dsx.errors import CheckpointError, LayoutError, ModelError
from dsx.models.hf_config import FAMILIES, model_spec
from dsx.models.param import ParamSpec
from dsx.models.params import stored_specs
from dsx.models.spec import Model
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Mesh

if TYPE_CHECKING:
    from dsx.config.run import RunConfig

_Written = tuple[Catalog, Target, dict[str, Any] | None]
"""The source in the target's names, the target, and its layout for people, if the format has one."""
Names = Literal["dsx", "hf", "source"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedTarget:
    """The target that is asked for.

    Attributes:
        run: A resolved config whose model and layout to take instead.
        precision: ``fp32``, ``bf16`` or ``fp16`` for the weights; the source's by default.
        names: Whose names the tensors shall have. By default dsx's for dsx, Hugging Face's for ``hf``, where
            the model is known, and the source's for DeepSpeed and DCP.
        hf_config: Content of the ``config.json`` of a ``hf`` target; of the source or the run by default.
        base: The model folder of what the source leaves out; where it says by default.
    """

    format: str = "dsx"
    degrees: TargetDegrees = field(default_factory=TargetDegrees)
    run: RunConfig | None = None
    precision: str | None = None
    names: Names | None = None
    hf_config: Mapping[str, Any] | None = None
    pipeline: Pipeline = field(default_factory=Pipeline)
    base: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """A conversion that is planned and can be done.

    Attributes:
        layout: The target's, for people; None for a format that has none.
        merge: What is added to weights on the way; None copies them.
    """

    source: Catalog
    target: Target
    layout: Mapping[str, Any] | None
    plan: CopyPlan
    merge: Merge | None = None

    def run(self, options: ConversionOptions) -> ConversionReport:
        """Carry it out. Raises CheckpointError; the target exists whole or not at all."""
        if self.merge is None:
            return execute(self.source, self.target, self.plan, options)
        with self.merge.changes() as change:
            jobs = tuple(replace(job, change=change(job.source)) for job in self.plan.jobs)
            return execute(self.source, self.target, replace(self.plan, jobs=jobs), options)

    def outline(self, options: ConversionOptions) -> dict[str, Any]:
        """What the conversion will take, as JSON values."""
        home = folder = self.target.catalog.root.absolute().parent
        while not folder.exists():
            folder = folder.parent
        entries = self.target.catalog.entries
        return {
            "source": {"path": str(self.source.root), "format": self.source.format},
            "target": {
                "path": str(self.target.catalog.root),
                "format": self.target.catalog.format,
                "layout": self.layout,
            },
            "tensors": len({entry.name for entry in entries}),
            "states": sorted({entry.state for entry in entries}),
            "read_bytes": self.plan.read_bytes,
            "write_bytes": sum(skeleton.num_bytes for skeleton in self.target.skeletons),
            "files": len(self.target.skeletons),
            "free_bytes": shutil.disk_usage(folder).free,
            "memory_bytes": min(options.memory_bytes, options.workers * worker_bytes(self.plan)),
            "beside": self._beside(home, options),
            "notes": [*self.plan.notes, *self.target.dropped],
        }

    def _beside(self, home: Path, options: ConversionOptions) -> list[str]:
        """What is written in the target's folder, ``home``, besides the target."""
        partial = partial_of(self.target.catalog.root)
        kept = (
            f"{partial}, with the files: renamed at the end; what a kill leaves, the next conversion removes"
        )
        made = [] if home.exists() else [f"{home}, which is not there yet"]
        return [*made, kept, *([f"{home / LATEST}, which will name the target"] * options.point_latest)]


def prepare(source: Catalog, root: Path, wanted: WantedTarget) -> Conversion:
    """Plan a conversion, and find all that can be wrong, before a byte is written.

    Raises:
        CheckpointError: The target exists, the source is incomplete, one does not fit the other, or what is
            asked for cannot be written.
        LayoutError: Degrees that do not fit the model.
    """
    check_absent(root)
    source = of_today(source)
    stock = wanted.format in ("deepspeed", "universal")
    if not stock and (wanted.pipeline.partition or (wanted.pipeline.tied and source.format != STOCK)):
        raise CheckpointError(
            f"--partition and --tied with --to {wanted.format}",
            "they are of DeepSpeed's PipelineModule",
            "leave them out",
        )
    if source.facts.get("base") and wanted.format == "hf" and wanted.precision is None:
        wanted = replace(wanted, precision=source.facts.get("precision"))
    adapted = (source.facts.get("model") or {}).get("adapter") is not None
    if adapted and wanted.format not in ("dsx", "peft", "hf"):
        raise CheckpointError(
            f"--to {wanted.format}",
            f"{source.root} is of a model with an adapter, which that format has no place for",
            "use --to peft for the adapter alone, or --to hf for the model with it merged",
        )
    if wanted.format not in ("dsx", "peft") or wanted.base is not None:
        source = completed(source, wanted.base)
    check_files(source)
    source, merge = _named(source, wanted), None
    if wanted.format == "hf":
        source, merge = whole(*taken_apart(source), wanted.base)
    source, target, layout = WRITERS[wanted.format](source, root, wanted)
    kept = {entry.name for entry in target.catalog.entries if entry.state in ("weight", "master")}
    for entry in source.entries:
        if entry.name not in kept:
            raise CheckpointError(
                f"{target.catalog.root}: {entry}",
                "the target would not have it, and its loader would miss it",
                "give the config of the model that the checkpoint is of, or another format",
            )
    copies = plan(source, target.catalog)
    return Conversion(source=source, target=target, layout=layout, plan=copies, merge=merge)


def _named(source: Catalog, wanted: WantedTarget) -> Catalog:
    """The source under the names that the target shall have, with all that is known of its model."""
    model, specs, facts = _model(source, wanted)
    source = under_known_names(source, model)
    source = replace(source, facts={**source.facts, **facts})
    if source.format == megatron.FORMAT:
        source = _of_megatron(source)
    names = wanted.names or {"dsx": "dsx", "hf": "hf"}.get(wanted.format, "source")
    if not specs or (names == "source" and not catalog.is_dsx(source)):
        if wanted.names in ("dsx", "hf"):
            raise CheckpointError(
                f"--names {wanted.names}",
                f"it is not known what model {source.root} is of",
                "name a CONFIG of the model",
            )
        kept = _float32_of(specs)
        if wanted.precision is not None and not kept and source.format == catalog.FORMAT:
            kept = _float32_within(source)
        return replace(source, float32=kept)
    forms = () if wanted.run is None else forms_of(wanted.run.hf_config)
    named = as_model(source, specs, forms=forms)
    if names == "hf":
        named = catalog.as_hf(named, specs, in_files=wanted.format == catalog.FORMAT)
    return replace(named, float32=_float32_of(specs))


def _float32_of(specs: Sequence[ParamSpec]) -> dict[str, tuple[str, ...]]:
    """What a model keeps in float32, by any of its names."""
    return {name: each.float32 for each in specs for name in (each.name, *each.hf, *in_memory(each).hf)}


def under_hf_names(source: Catalog, hf_config: Mapping[str, Any]) -> Catalog:
    """A checkpoint under the names that transformers' model of ``hf_config`` has in memory.

    A checkpoint of a model outside dsx's families keeps its names.
    """
    _, specs, _ = _model(source, WantedTarget())
    if not specs:
        try:
            model = model_of(hf_config)
        except ModelError:
            return source
        specs = specs_of_model(source, model)
    return catalog.as_hf(as_model(source, specs, forms=forms_of(hf_config)), specs, in_files=False)


def _of_megatron(source: Catalog) -> Catalog:
    told = source.facts.get("hf_config")
    if told is None:
        raise CheckpointError(
            str(source.root),
            "a Megatron checkpoint does not say how many heads its model has, which decides where queries, "
            "keys and values lie",
            "give the model's config.json with --hf-config, or name a CONFIG of it",
        )
    if told.get("model_type") not in FAMILIES:
        raise CheckpointError(
            f"{source.root}: model_type = {told.get('model_type')}",
            f"dsx reads Megatron's checkpoints of the families {', '.join(FAMILIES)}",
            "write it as a Hugging Face folder with Megatron's tools, and read that",
        )
    model = model_spec(told)
    return megatron.as_dsx(source, specs_of_model(source, model), model)


def _model(
    source: Catalog, wanted: WantedTarget
) -> tuple[Model | None, tuple[ParamSpec, ...], dict[str, Any]]:
    """The model if it is known, its every tensor, and facts about it.

    It is in the form that ranks of the target's tensor-parallel degree train.
    """
    if wanted.run is not None:
        run = wanted.run
        specs = stored_specs(run.model, pad_multiple=run.dsx.model.vocab_multiple)
        facts: dict[str, Any] = {
            "model": model_fact(run.model),
            "schedule": run.schedule_name,
            "hf_config": dict(run.hf_config),
        }
        return run.model, specs, facts
    mesh: Mapping[str, int] = source.facts.get("mesh") or {} if wanted.format == "dsx" else {}
    tensor = wanted.degrees.tensor or mesh.get("tp", 1)
    if source.format in (catalog.FORMAT, megatron.FORMAT):
        told = source.facts.get("hf_config") or wanted.hf_config
        if told is None:
            return None, (), {}
        config = dict(told)
        within = fact_of(source.root, config) if source.format == catalog.FORMAT else None
        if within is not None and wanted.format != "dsx":  # copied with all that it has
            return None, (), {"hf_config": config}
        try:
            config = language_config(config) if source.format == catalog.FORMAT else config
            model = model_of(config) if source.format == catalog.FORMAT else model_spec(config)
        except ModelError:
            return None, (), {"hf_config": config}
        model = model.for_tensor(tensor)
        facts = {"model": model_fact(model), "hf_config": config}
        facts |= {} if within is None else {"composite": within}
        return model, specs_of_model(source, model), facts
    homes = all(spec.hf != (spec.name,) for spec in source.specs)
    return None, (_in_form(source, tensor) if homes else ()), {}


def _float32_within(folder: Catalog) -> dict[str, tuple[str, ...]]:
    """What the language model of a composite folder keeps in float32, by the folder's names."""
    config = folder.facts.get("hf_config")
    if config is None or (found := composite_at(folder.root)) is None:
        return {}
    specs = stored_specs(model_of(language_config(config)))
    return {name: spec.float32 for spec in specs for name in found.inside(spec).hf}


def _in_form(source: Catalog, tensor: int) -> tuple[ParamSpec, ...]:
    """Specs of the model that the source names, for a tensor-parallel degree; else the source's own."""
    told = source.facts.get("model")
    if not isinstance(told, dict):
        return source.specs
    try:
        specs = stored_specs(model_of_fact(told).for_tensor(tensor))
    except (*MISFITS, LayoutError, ModelError):  # of another dsx, or another transformers
        return source.specs
    if {name for spec in specs for name in spec.hf} != {name for spec in source.specs for name in spec.hf}:
        return source.specs
    known = {spec.name: spec for spec in source.specs}
    whole: dict[str, Any] = {"split": None, "parts": ()}  # at this degree, whatever the source has
    return tuple(
        replace(known.get(spec.name, spec), float32=spec.float32, **whole if spec.split is None else {})
        for spec in specs
    )


def _dsx(source: Catalog, root: Path, wanted: WantedTarget) -> _Written:
    run = wanted.run
    if run is None:
        layout = layout_like(source, wanted.degrees)
    else:
        layout = Layout(mesh=run.mesh, stages=run.stage_map, params=source.specs, zero_stage=run.zero_stage)
    target = native.target_of(source, root, layout, precision=wanted.precision)
    facts = native.layout_facts(layout.mesh, layout.stages, layout.zero_stage)
    return source, target, {**facts.pop("mesh"), **facts}


def _hf(source: Catalog, root: Path, wanted: WantedTarget) -> _Written:
    config = wanted.hf_config or source.facts.get("hf_config")
    if config is None:
        raise CheckpointError(
            f"{root} as a Hugging Face folder",
            f"{source.root} does not have the model's config.json",
            "give --hf-config FILE, or name a CONFIG of the model",
        )
    target = catalog.target_of(source, root, config, precision=wanted.precision)
    return source, replace(target, skeletons=(*target.skeletons, *other_files(source))), None


def _dcp(source: Catalog, root: Path, wanted: WantedTarget) -> _Written:
    if wanted.run is not None or wanted.degrees != TargetDegrees(data=wanted.degrees.data):
        raise CheckpointError(
            "--to dcp with a layout",
            "torch.distributed.checkpoint loads whole tensors into any layout",
            "say --data alone: the number of files",
        )
    files = wanted.degrees.data or 1
    return source, dcp.target_of(source, root, files=files, precision=wanted.precision), None


def _stock(source: Catalog, root: Path, wanted: WantedTarget) -> _Written:
    """A checkpoint of a stock engine, in its own format or the universal one, and the source in its names."""
    degrees, mesh = wanted.degrees, source.facts.get("mesh") or {}
    if wanted.run is not None:
        raise CheckpointError(
            f"CONFIG with --to {wanted.format}",
            "a stock engine has none of dsx's layouts",
            "say --data and --zero, and --tensor and --pipeline if it has them",
        )
    if wanted.format == "universal" and (degrees.tensor or 1) > 1:
        raise CheckpointError(
            "--to universal with tensor above 1",
            "universal files hold whole tensors, and DeepSpeed cuts fused ones by what AutoTP's modules say",
            "leave --tensor out, or write deepspeed, in the cut of the engine that will load it",
        )
    told = int(source.facts.get("zero_stage", 0))
    least = 1 if wanted.format == "universal" else 0
    layout = StockLayout(
        dp=degrees.data or Mesh.of(**mesh).num_replicas,
        zero_stage=max(least, told) if degrees.zero is None else degrees.zero,
        precision=wanted.precision or str(source.facts.get("precision", "fp32")),
        groups=merged_groups(source) if wanted.names == "hf" else (),
    )
    universal = wanted.format == "universal"
    source, layout = stock_layout(source, degrees, wanted.pipeline, layout, universal=universal)
    facts = {**dict(stock_mesh(layout).axes), "chunks": 1, "zero_stage": layout.zero_stage}
    writer = universal_target if universal else deepspeed_target
    target = writer.target_of(source, root, layout)
    return source, replace(target, dropped=(*target.dropped, *cut_note(layout))), facts


def _peft(source: Catalog, root: Path, wanted: WantedTarget) -> _Written:
    if wanted.degrees != TargetDegrees() or wanted.run is not None:
        raise CheckpointError("--to peft with a layout", "its one file has whole tensors", "leave it out")
    return *adapter_target(source, root), None


WRITERS: dict[str, Callable[[Catalog, Path, WantedTarget], _Written]] = {
    "dsx": _dsx,
    "deepspeed": _stock,
    "universal": _stock,
    "hf": _hf,
    "dcp": _dcp,
    "peft": _peft,
}
"""How each format is written, by the name that ``--to`` gives it."""
