"""From a model, a batch and a config to the search for its layout, and from the result to a config."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Any, Self, get_args

from dsx.config.batch import ACCUMULATION, MICRO, TRAIN
from dsx.config.deepspeed import precision
from dsx.config.load import content_of, load, override
from dsx.config.ordinary import complete, replace_model, value_at
from dsx.config.resolve import resolve
from dsx.config.run import RunConfig
from dsx.config.schema import OuterConfig
from dsx.config.schema_parallel import ParallelConfig
from dsx.config.sources import find_model
from dsx.config.wording import at, either, item_without_secrets
from dsx.errors import ConfigError, DsxError
from dsx.hub.allowed import has_tiles, unselected, unshared
from dsx.memory.estimate import Job, estimate
from dsx.memory.islands import IslandSettings
from dsx.memory.job import job_of
from dsx.memory.layer_record import DeviceKind
from dsx.memory.ledger import AboveError
from dsx.models.flops import Precision
from dsx.models.spec import ContextMethod, HubModel, Recompute
from dsx.planner.cluster import Cluster, gpu_memory
from dsx.planner.costs import Efficiency
from dsx.planner.layout import LONG, Candidate, Space, Task, meshes, variants
from dsx.planner.plan import Looked, Plan, Ranked, Search, looks_away
from dsx.planner.predicted import task_of
from dsx.planner.profile import RECOMPUTE
from dsx.planner.step_time import Predictor


@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedChoices:
    """What a user has already decided; None is open.

    ``micro_batch`` is in sequences, and ``gpu_memory`` all GiB of a GPU, its reserve included.
    """

    tensor: int | None = None
    pipeline: int | None = None
    context: int | None = None
    expert: int | None = None
    zero: int | None = None
    micro_batch: int | None = None
    gpu_memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a plan goes by.

    Attributes:
        efficiency: Shares of them that are reached.
        text: What was measured, in words; empty if nothing was.
    """

    cluster: Cluster
    efficiency: Efficiency
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs(ABC):
    """Inputs of a plan: for a config's model, or for a layer list of one's own.

    Attributes:
        content: The config without its layout.
        global_batch: Samples per step.
        imbalance: As :func:`~dsx.memory.job.job_of` has it.
    """

    name: str
    content: dict[str, Any]
    cluster: Cluster
    gpus: int
    global_batch: int
    imbalance: float = 1.0

    @property
    @abstractmethod
    def num_parameters(self) -> int:
        """Of the whole model, tied ones once."""

    @property
    @abstractmethod
    def batch_words(self) -> str: ...

    @abstractmethod
    def task(self, rates: Calibration) -> Task:
        """What is trained, on a machine of these rates."""

    @abstractmethod
    def config_of(self, layout: Candidate, predictor: Predictor) -> dict[str, Any]:
        """The DeepSpeed JSON of a layout."""

    @abstractmethod
    def job(self, layout: Candidate, predictor: Predictor, capacity_bytes: int) -> Job:
        """The run of a layout as the memory estimate takes it. Raises DsxError if it cannot be run."""

    def refuse(self, layout: Candidate, predictor: Predictor) -> None:
        """Raise a DsxError if the config that :meth:`config_of` writes would be refused."""
        del layout, predictor

    def module_words(self, layout: Candidate, predictor: Predictor) -> str:
        """The layout as arguments of :class:`dsx.PipelineModule`, where the config does not hold it."""
        del layout, predictor
        return ""

    @property
    def precision(self) -> Precision:
        return precision(self.content)

    @property
    def device(self) -> DeviceKind:
        return "cpu" if self.cluster.is_host else "cuda"

    @property
    def offloads(self) -> bool:
        """Whether the optimizer or parameters live on the host."""
        return self.lowest_zero_stage > 0

    @property
    def lowest_zero_stage(self) -> int:
        """The lowest ZeRO stage that what is offloaded allows."""
        return lowest_stage(self.content)

    @property
    def decided(self) -> dict[str, Any]:
        """What of a :class:`~dsx.planner.layout.Space` is not to be chosen, whatever a user pins."""
        return {"zero_stages": tuple(range(self.lowest_zero_stage, 4))}

    def no_share(self, micro_batch: str, shares: str) -> ConfigError:
        """The error where no rank's share of the global batch is of whole micro-batches."""
        return ConfigError(
            f"--micro-batch {micro_batch}",
            f"it divides no rank's share of the global batch ({shares} sequences)",
            "use a divisor of one of these",
        )

    def check(self, pinned: PinnedChoices) -> None:
        for name in ("tensor", "pipeline", "context", "expert"):
            value = getattr(pinned, name)
            if value is not None and value < 1:
                raise ConfigError(f"--{name} {value}", "not a degree", "use 1 or more")
        if pinned.zero is not None and not 0 <= pinned.zero <= 3:
            raise ConfigError(f"--zero {pinned.zero}", "ZeRO has stages 0 to 3", "use 0, 1, 2 or 3")
        if pinned.zero is not None and pinned.zero < self.lowest_zero_stage:
            raise ConfigError(
                f"--zero {pinned.zero}",
                f"what the config offloads needs stage {self.lowest_zero_stage} or more",
                "use that, or remove zero_optimization.offload_optimizer and offload_param",
            )
        micro, batch = pinned.micro_batch, self.global_batch
        if micro is not None and (micro < 1 or batch % micro):
            raise ConfigError(
                f"--micro-batch {micro}",
                f"it does not divide the global batch {batch}",
                "use a divisor of it",
            )
        if pinned.gpu_memory is not None and not 0 < pinned.gpu_memory < 1e6:
            raise ConfigError(
                f"--gpu-memory {pinned.gpu_memory:g}", "it is the GiB of one GPU", "use 79 for an A100-80GB"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs(PlanInputs):
    """Inputs of a plan for a config's model; ``content`` has the ``dsx`` block.

    Attributes:
        run: The same, resolved for one rank with micro-batches of one sequence.
        parallel: The config's ``dsx.parallel``, of which a plan takes the axes of context and experts.
        outer: The config's ``dsx.outer``, which ``content`` and ``run`` are without.
        islands: The islands of which this is one, for the memory that they take; None for one job.
    """

    run: RunConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    outer: OuterConfig | None = None
    islands: IslandSettings | None = None

    @property
    def num_parameters(self) -> int:
        return self.run.num_parameters

    @property
    def batch_words(self) -> str:
        return f"{self.global_batch} sequences of {self.run.sequence_length} tokens"

    def check(self, pinned: PinnedChoices) -> None:
        super(ModelInputs, self).check(pinned)
        job_of(self.run, device=self.device)  # Refuses what no layout could mend.
        (degree,) = (pinned.context,) if pinned.context else self._contexts or (1,)
        why = unshared(self.run.model) if degree > 1 else None
        if why is not None:
            raise ConfigError(at("dsx.parallel.context", degree), f"{self.run.model.family}: {why}", "use 1")

    @property
    def decided(self) -> dict[str, Any]:
        """Of transformers' modules only what they can do; :meth:`refuse` would find it one by one."""
        found, model = super(ModelInputs, self).decided, self.run.model
        contexts, method = self._contexts, self.parallel.context_method
        found["context"] = (1,) if contexts is None and unshared(model) is not None else contexts
        found["expert"] = self._experts
        if "mlp_tiles" in self.run.dsx.model_fields_set:
            found["mlp_tiles"] = (self.run.dsx.mlp_tiles,)
        elif self.run.sequence_length >= LONG and has_tiles(self.run.model):
            found["mlp_tiles"] = (1, "auto")
        if method != "auto":
            found["methods"] = (method,)
        elif found["context"] != (1,):
            methods = (each for each in get_args(ContextMethod) if unshared(model, method=each) is None)
            found["methods"] = tuple(methods) or ("all_gather",)
        long = self.run.sequence_length >= LONG and not self.cluster.is_host
        found["recompute"] = modes = get_args(Recompute) if long else RECOMPUTE
        if unselected(model) is not None:
            found["recompute"] = tuple(each for each in modes if each != "selective")
        if isinstance(model, HubModel) and model.no_gathering is not None:
            found["zero_stages"] = tuple(stage for stage in found["zero_stages"] if stage < 3)
        return found

    @property
    def _contexts(self) -> tuple[int, ...] | None:
        """What the config says; else None, all degrees, for sequences that are long."""
        degree = self.parallel.context
        if "context" not in self.parallel.model_fields_set:
            return None if self.run.sequence_length >= LONG else (1,)
        return None if degree == "auto" else (degree,)

    @property
    def _experts(self) -> tuple[int, ...] | None:
        """What the config says; else None, all degrees, of a model with experts that ranks may share out."""
        degree = self.parallel.expert
        if "expert" in self.parallel.model_fields_set and degree != "auto":
            return (degree,)
        return None if any(spec.experts is not None for spec in self.run.param_specs) else (1,)

    def task(self, rates: Calibration) -> Task:
        return task_of(self.run, rates.cluster, rates.efficiency, self.imbalance)

    def config_of(self, layout: Candidate, predictor: Predictor) -> dict[str, Any]:
        """The config of a layout: what :func:`~dsx.config.resolve.resolve` takes.

        The cut into stages is written out, because the plan's times are for that cut.
        """
        content, settings = _at_stage(self.content, layout.zero_stage), layout.settings
        if not layout.reduces_micro_batches:
            del settings["dsx.zero.reduce"]
        if layout.pipeline == 1:
            del settings["dsx.schedule.name"]
        else:
            stages = predictor.stages(layout)
            settings["dsx.partition.method"] = [
                len(stages.layers(stage)) for stage in range(stages.num_stages)
            ]
        for key, value in settings.items():
            override(content, f"{key}={json.dumps(value)}")
        return content

    def refuse(self, layout: Candidate, predictor: Predictor) -> None:
        resolve(self.config_of(layout, predictor), world_size=self.gpus)

    def job(self, layout: Candidate, predictor: Predictor, capacity_bytes: int) -> Job:
        run = resolve(self.config_of(layout, predictor), world_size=self.gpus)
        job = job_of(run, device=self.device, capacity_bytes=capacity_bytes, imbalance=self.imbalance)
        return replace(job, islands=self.islands)


def plan_inputs(
    *,
    model: str | None,
    config: Path | None,
    cluster: Cluster,
    gpus: int,
    global_batch: int | None,
    sequence_length: int | None,
    overrides: Sequence[str] = (),
    imbalance: float = 1.0,
) -> ModelInputs:
    """Read and check everything that a plan needs.

    Args:
        model: Preset (``llama-3-8b``, ``gpt2/tiny``), Hugging Face ``config.json`` or model folder; None for
            that of ``config``.
        config: DeepSpeed JSON whose layout is to be found, without a ``dsx`` block if there is a ``model``;
            None for usual settings.
        cluster: What to train on.
        gpus: How many of its GPUs.
        global_batch: Sequences per step; None for that of ``config``.
        sequence_length: Tokens; None for that of ``config``.
        overrides: What is put over keys of ``config``, as ``--set`` takes it.
        imbalance: As :func:`~dsx.memory.job.job_of` has it.

    Raises:
        ConfigError: Something is missing, unknown or cannot be.
        ModelError: A Hugging Face config that dsx cannot build.
    """
    cluster = cluster.holding(gpus)
    if overrides and config is None:
        raise ConfigError(f"--set {overrides[0]}", "there is no CONFIG to change", "give CONFIG")
    written = None if config is None else _written(config, model, overrides)
    content = _usual(cluster) if written is None else _without_layout(written)
    block = content["dsx"]
    if model is not None:
        replace_model(content, find_model(model)[0], overrides)
    elif config is None:
        raise ConfigError("--model", "no model is named", "give --model, or a CONFIG with a dsx.model")
    outer = _outer(block.pop("outer", None), cluster)
    batch = global_batch or content.get(TRAIN) or _batch_of(written, gpus)
    if batch and not global_batch and outer is not None:
        batch *= outer.islands  # what is written is one island's
    length = sequence_length or block["data"].get("sequence_length")
    for name, value in (("--global-batch", batch), ("--sequence-length", length)):
        if value is None:
            raise ConfigError(name, "it is needed", f"give {name} N")
    content[TRAIN], block["data"]["sequence_length"] = batch, length
    run = resolve(_smallest(content), world_size=1)
    return ModelInputs(
        name=run.model.family,
        content=content,
        cluster=cluster,
        gpus=gpus,
        global_batch=run.global_batch_size,
        run=run,
        parallel=ParallelConfig.model_validate(((written or {}).get("dsx") or {}).get("parallel") or {}),
        outer=outer,
        imbalance=imbalance,
    )


def _at_stage(content: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """A config at a ZeRO stage, without what other stages alone have."""
    found = copy.deepcopy(dict(content))
    found["zero_optimization"] = found.get("zero_optimization", {}) | {"stage": stage}
    if stage != 3:
        found["dsx"].get("zero", {}).pop("keep_gathered_bytes", None)
    return found


def _smallest(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config at the lowest ZeRO stage that it allows, for one rank with micro-batches of one sequence."""
    return _at_stage(content, lowest_stage(content)) | {MICRO: 1}


def _outer(written: Any, cluster: Cluster) -> OuterConfig | None:
    """The config's ``dsx.outer``; an island for each site."""
    if written is None:
        return None
    outer = OuterConfig.model_validate_json(json.dumps(written))
    if outer.islands != cluster.sites:
        sites = f"{cluster.sites} sites" if cluster.sites > 1 else "one site"
        raise ConfigError(
            at("dsx.outer.islands", outer.islands),
            f"a plan has an island on each site, and cluster {cluster.name} has {sites}",
            f'describe one with "sites": {outer.islands} and the link across them, or leave dsx.outer out',
        )
    return outer


def site_inputs(joined: ModelInputs, cluster: Cluster) -> ModelInputs:
    """One island of what is planned as one job over all sites of ``cluster``, with its part of the batch."""
    count, batch = cluster.sites, joined.global_batch
    if batch % count:
        raise ConfigError(
            f"--global-batch {batch}",
            f"each of the {count} sites reads as many sequences",
            f"use a multiple of {count}",
        )
    content = copy.deepcopy(joined.content) | {TRAIN: batch // count}
    small = _smallest(content)
    run, given = resolve(small, world_size=1), joined.outer
    outer = {"islands": count} if given is None else written(given)
    # Refuses what islands cannot be combined with.
    resolve(small | {"dsx": content["dsx"] | {"outer": outer}}, world_size=1 if outer.get("meet") else count)
    return replace(
        joined,
        content=content,
        run=run,
        cluster=cluster.site(joined.gpus),
        gpus=joined.gpus // count,
        global_batch=run.global_batch_size,
        islands=IslandSettings(
            count=count,
            shares=1 if given is None else given.shares,
            wire="int8" if given is None else given.wire,  # the most that may be chosen
            goes_on=given is not None and given.delay > 0,
        ),
    )


def written(outer: OuterConfig) -> dict[str, Any]:
    """``dsx.outer`` as it stands in a config."""
    return outer.model_dump(mode="json", exclude_defaults=True)


def lowest_stage(content: Mapping[str, Any]) -> int:
    """The lowest stage that partitions what is offloaded: 1 for the optimizer, 3 for parameters."""
    zero = content.get("zero_optimization", {})
    for key, stage in (("offload_param", 3), ("offload_optimizer", 1)):
        if (zero.get(key) or {}).get("device", "none") != "none":
            return stage
    return 0


def _written(config: Path, model: str | None, overrides: Sequence[str]) -> dict[str, Any]:
    """The file's config; in an ordinary DeepSpeed JSON with ``model``, no batch and length are assumed."""
    for item in overrides:
        said: dict[str, Any] = {}
        override(said, item)
        keys = value_at(said, "dsx.parallel")
        if isinstance(keys, dict) and keys and keys.keys() <= {"context", "context_method", "expert"}:
            continue
        if any(value_at(said, key) is not None for key in _DECIDED):
            pins = "--tensor, --pipeline, --context, --expert, --zero or --micro-batch"
            fix = f"leave it out, or pin it by {pins}"
            raise ConfigError(f"--set {item_without_secrets(item)}", "a plan decides it", fix)
    content = content_of(config)
    if "dsx" in content:
        load(config, overrides)  # Strict: unknown keys are named with their file.
        return content_of(config, overrides)
    usual = ("dsx.train.steps=100", "dsx.train.output=runs/planned-{layout}")
    whole = complete(content, model, overrides=(*usual, *overrides), where=str(config))
    load(whole.content)
    data = whole.content["dsx"]["data"]
    data.setdefault("source", "python-stdlib")
    for key in {each.key for each in whole.assumed} & {MICRO, ACCUMULATION, "dsx.data.sequence_length"}:
        del (data if "." in key else whole.content)[key.rpartition(".")[2]]
    return whole.content


def _batch_of(written: Mapping[str, Any] | None, gpus: int) -> int | None:
    """The global batch of a config that says micro-batch and accumulation, in its own layout."""
    if written is None:
        return None
    outer = written["dsx"].get("outer") or {}
    if outer.get("meet"):
        gpus //= outer["islands"]  # it is about one launch of several
    try:
        return resolve(written, world_size=gpus).global_batch_size
    except DsxError:
        return None


def _usual(cluster: Cluster) -> dict[str, Any]:
    """A config for a first run: AdamW, bf16 on GPUs, text that needs no network."""
    parameters: dict[str, Any] = {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    return {
        "gradient_clipping": 1.0,
        **({} if cluster.is_host else {"bf16": {"enabled": True}}),
        "optimizer": {
            "type": "AdamW",
            "params": parameters | ({"torch_adam": True} if cluster.is_host else {}),
        },
        "dsx": {
            "data": {"source": "python-stdlib", "tokenizer": "bytes"},
            # Of islands so many that their rounds are some.
            "train": {"steps": 100 if cluster.sites == 1 else 1000, "output": "runs/planned-{layout}"},
        },
    }


_PARTS = ("parallel", "schedule", "partition", "profile", "recompute")
_DECIDED = (MICRO, ACCUMULATION, "zero_optimization.stage", *(f"dsx.{key}" for key in _PARTS))


def _without_layout(content: Mapping[str, Any]) -> dict[str, Any]:
    """A config without what a plan decides."""
    out = {key: value for key, value in content.items() if key not in (MICRO, ACCUMULATION)}
    block = dict(out.get("dsx") or {})
    for key in _PARTS:
        block.pop(key, None)
    block["data"] = dict(block.get("data") or {})
    if block.get("zero"):
        block["zero"] = {key: value for key, value in block["zero"].items() if key != "reduce"}
    out["dsx"] = block
    zero = dict(out.get("zero_optimization") or {})
    zero.pop("stage", None)
    if zero:
        out["zero_optimization"] = zero
    else:
        out.pop("zero_optimization", None)
    return out


def plan_search(
    inputs: PlanInputs,
    pinned: PinnedChoices,
    measured: Calibration | None = None,
    *,
    looked: Looked = looks_away,
    slack: float = 0.0,
) -> Search:
    """A search, ready to run.

    ``measured`` has rates in place of the cluster's usual ones; ``slack`` is as
    :class:`~dsx.planner.plan.Search` has it.

    Raises:
        ConfigError: A fixed value that cannot be.
        LayoutError: A fixed degree that the model or the number of GPUs does not allow.
        ModelError: A layer of a list that dsx cannot record.
    """
    inputs.check(pinned)
    rates = measured or Calibration(cluster=inputs.cluster, efficiency=Efficiency.of(inputs.cluster))
    task = inputs.task(rates)
    given = {
        "tensor": pinned.tensor,
        "pipeline": pinned.pipeline,
        "context": pinned.context,
        "expert": pinned.expert,
        "micro_batches": pinned.micro_batch,
        "zero_stages": pinned.zero,
    }
    decided = {name: (value,) for name, value in given.items() if value is not None}
    space = Space.of(inputs.gpus, **inputs.decided | decided)
    found = tuple(meshes(task, space))
    if not any(True for mesh in found for _ in variants(task, space, mesh)):
        shares = sorted({task.global_batch // mesh.data for mesh in found})
        raise inputs.no_share(either(space.micro_batches or ()), either(shares[:6]))
    cap = None if pinned.gpu_memory is None else gpu_memory(pinned.gpu_memory, rates.cluster).usable_bytes
    search = Search(
        task=task,
        space=space,
        memory=lambda _: 0,
        cap_bytes=cap,
        update_bytes=update_bytes(inputs.content),
        looked=looked,
        slack=slack,
    )
    memory = LayoutMemory(inputs, search.predictor, search.cap)
    return replace(
        search,
        memory=memory,
        within=memory.within,
        least=memory.least,
        refuse=lambda layout: inputs.refuse(layout, search.predictor),
    )


def update_bytes(content: Mapping[str, Any]) -> int:
    """The least that the optimizer of a config keeps on the device for a parameter that it updates."""
    if lowest_stage(content):
        return 0
    moments = {"adam": 8, "adamw": 8, "lion": 4}.get(content["optimizer"]["type"].lower(), 0)
    return moments + (0 if precision(content) == "fp32" else 4)


_ALL = 4
"""Pipeline ranks that are all looked at."""


@dataclass(frozen=True, slots=True)
class LayoutMemory:
    """Peak memory of layouts, by the ledger.

    Attributes:
        cap_bytes: Bytes above which the exact peak does not matter.
    """

    inputs: PlanInputs
    predictor: Predictor
    cap_bytes: int
    _least: dict[object, int] = field(default_factory=dict)

    def __call__(self, layout: Candidate) -> int:
        """Bytes of the fullest pipeline rank, or of one above the cap.

        Raises:
            DsxError: The layout cannot be run.
        """
        return self.within(layout, inf)

    def within(self, layout: Candidate, most_bytes: float) -> int:
        """The same; or, of one that takes more than ``most_bytes``, a bound that is above them.

        Raises:
            DsxError: As above.
        """
        return self._peak(layout, walks=True, most_bytes=most_bytes)

    def least(self, layout: Candidate) -> int:
        """Bytes that parameters, gradients, optimizer and their update take by themselves.

        It is the estimate of a step without micro-batches, which is what layouts with the same stages and
        ZeRO stage have in common, and many times as fast. 0 for a layout that cannot be run.
        """
        stages = self.predictor.stages(layout)
        key = (layout.mesh, stages, layout.zero_stage, layout.reduces_micro_batches)
        if key not in self._least:
            try:
                self._least[key] = self._peak(layout, walks=False)
            except DsxError:
                return 0
        return self._least[key]

    def _peak(self, layout: Candidate, *, walks: bool, most_bytes: float = inf) -> int:
        """The peak of the fullest rank, among those of which one is the fullest within a few per mille."""
        job = self.inputs.job(layout, self.predictor, self.cap_bytes)
        if not walks:
            job = replace(job, schedule=replace(job.schedule, rows=tuple(() for _ in job.schedule.rows)))
        peak = 0
        ranks: Iterable[int] = range(layout.pipeline)
        if layout.pipeline > _ALL:
            largest = max(ranks, key=job.layout.local_parameters)
            ranks = dict.fromkeys((0, layout.pipeline - 1, largest, 1))
        for rank in ranks:
            try:
                found = estimate(job, layout.mesh.rank(pp=rank), most_bytes=most_bytes)
            except AboveError as above:
                return int(above.args[0])
            peak = max(peak, found.peak.peak_bytes)
            if peak > self.cap_bytes:
                break
        return peak


@dataclass(frozen=True, slots=True)
class BestLayout:
    """What a search for a layout was for, and what it found."""

    inputs: PlanInputs
    predictor: Predictor
    plan: Plan

    @classmethod
    def of(
        cls,
        inputs: PlanInputs,
        pinned: PinnedChoices,
        measured: Calibration | None = None,
        looked: Looked = looks_away,
        *,
        top: int,
        slack: float = 0.0,
    ) -> Self:
        """The search's result; it raises as :func:`plan_search` and :meth:`Search.run` do."""
        search = plan_search(inputs, pinned, measured, looked=looked, slack=slack)
        return cls(inputs, search.predictor, search.run(top))

    @property
    def best(self) -> Ranked:
        return self.plan.best[0]

    def config(self) -> dict[str, Any]:
        return self.inputs.config_of(self.best.layout, self.predictor)

    def module_words(self) -> str:
        return self.inputs.module_words(self.best.layout, self.predictor)
