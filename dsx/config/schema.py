"""Schema of the ``dsx`` block: strict, frozen, every key described (``dsx schema`` prints it for editors).

Batch sizes, optimizer, precision, clipping and ZeRO live in DeepSpeed's own keys and nowhere here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from dsx.config.block import Block, Degree, Positive, Seed
from dsx.config.data import DataConfig
from dsx.config.faults import FaultsConfig
from dsx.plan.builders import ScheduleName
from dsx.spec.model import Family, Recompute


class ModelConfig(Block):
    """Which model to train: exactly one of preset, config and path."""

    family: Family | None = Field(
        default=None,
        description='Architecture of the preset; needed for presets that several families have ("tiny").',
    )
    preset: str | None = Field(
        default=None, description="Name of a built-in model; `dsx presets` lists them."
    )
    config: dict[str, Any] | None = Field(default=None, description="A Hugging Face config.json, inline.")
    path: str | None = Field(
        default=None,
        min_length=1,
        description="A Hugging Face model folder: config.json and, if any, weights.",
    )
    weights: Literal["auto", "load", "random"] = Field(
        default="auto",
        description='"auto" loads safetensors if path holds any, "load" insists, "random" starts fresh.',
    )
    vocab_multiple: Positive = Field(
        default=64,
        description="Each tensor-parallel rank's vocabulary rows are padded to a multiple of this.",
    )
    overrides: dict[str, Any] = Field(
        default_factory=dict, description='Hugging Face config keys put over the model, e.g. {"n_layer": 8}.'
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        given = [name for name in ("preset", "config", "path") if getattr(self, name) is not None]
        if len(given) != 1:
            said = "none of them is given" if not given else f"{' and '.join(given)} are given"
            raise ValueError(f"exactly one of preset, config and path is needed; {said}")
        return self


class ParallelConfig(Block):
    """Degrees of parallelism; data parallelism takes the ranks that tensor x pipeline leave.

    "auto" degrees: the prime factors of world size / fixed degrees go round-robin, largest first, to data,
    then pipeline, then tensor (those of them that are auto), past an axis that cannot legally take one.
    """

    tensor: Degree = Field(
        default="auto",
        description="Ranks that share each layer. Divides attention heads, key/value heads and MLP width; "
        '"auto" takes its turn after data and pipeline, up to 8 (one node\'s fast links).',
    )
    pipeline: Degree = Field(
        default="auto",
        description="Ranks that the layers are spread over; with chunks at most one stage per layer. "
        '"auto" takes its turn after data and keeps a block for every stage.',
    )
    chunks: Degree = Field(
        default="auto",
        description='Virtual stages per pipeline rank (interleaving). "auto": 2 when the schedule allows it '
        "and every stage gets a block, else 1. Without a pipeline always 1.",
    )
    sequence_parallel: bool = Field(
        default=True,
        description="Shard activations between tensor-parallel layers along the sequence (tensor > 1).",
    )


class ScheduleConfig(Block):
    """Order of the micro-batches in the pipeline: by name, or from a file."""

    name: Literal["auto"] | ScheduleName = Field(
        default="auto",
        description='"auto": interleaved if chunks > 1, else 1f1b. gpipe, 1f1b and zb_h1 take 1 chunk, zbv '
        "and dualpipev 2, the others 2 or more; `dsx schedule NAME` draws one with its bubble and memory.",
    )
    file: str | None = Field(
        default=None,
        min_length=1,
        description="A CSV file instead of a name: one row per pipeline rank, actions as "
        "torch.distributed.pipelining writes them (2F0). It fixes pipeline, chunks and micro-batches.",
    )
    group_size: Positive | None = Field(
        default=None,
        description="Least micro-batches per group (interleaved, interleaved_zb); null: the pipeline degree. "
        "Larger ones hide slow links and keep more activations.",
    )
    warmup: int | None = Field(
        default=None,
        ge=0,
        description="Forwards that a rank starts ahead of the next one (interleaved: 2, interleaved_zb: 1).",
    )
    most_live: Positive | None = Field(
        default=None,
        description="Chunk activations alive at once on a rank (interleaved_zb, zb_h1); null: the fewest. "
        "More let weight gradients wait longer.",
    )
    activation_gib: Annotated[float, Field(gt=0)] | None = Field(
        default=None,
        description="Most memory that activations may take on a rank, in GiB; null: any. What is chosen from "
        "a profile stays within it.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        numbers = [key for key in ("group_size", "warmup", "most_live") if getattr(self, key) is not None]
        if self.file is not None and (self.name != "auto" or numbers):
            other = "name" if self.name != "auto" else numbers[0]
            raise ValueError(f"file and {other} are both given; a file is the whole schedule")
        return self


class ZeroConfig(Block):
    """When ZeRO communicates under a pipeline; what it cuts is in DeepSpeed's zero_optimization."""

    reduce: Literal["step", "micro_batch"] = Field(
        default="step",
        description="ZeRO-2: reduce gradients once per step, each chunk's after its last backward, keeping "
        "them whole until then; or after every backward, keeping this rank's part alone, for as many times "
        "the traffic as there are micro-batches.",
    )
    keep_gathered_bytes: int = Field(
        default=0,
        ge=0,
        description="ZeRO-3: memory per rank, in bytes, for parameters that stay gathered from one action of "
        "their chunk to the next. 0 leaves what stays to DeepSpeed's stage3_max_reuse_distance and "
        "stage3_max_live_parameters.",
    )


class PartitionConfig(Block):
    """How layers are spread over the pipeline stages."""

    method: (
        Literal["uniform", "parameters", "flops", "time"]
        | Annotated[str, Field(pattern=r"^type:.+$")]
        | Annotated[list[Positive], Field(min_length=1)]
    ) = Field(
        default="flops",
        description="What is balanced: layers, parameters, FLOPs, the layers whose class name matches "
        "type:<regex>, or an explicit number of layers per virtual stage. time: the cut with the shortest "
        "simulated step, from the layers' own times (dsx.profile).",
    )


class TrainConfig(Block):
    """Length of the run and what it leaves behind."""

    steps: Positive = Field(description="Optimizer steps in all, those before a resume included.")
    output: str = Field(
        min_length=1,
        description="Folder for checkpoints, metrics and the resolved config; {layout} stands for the "
        "degrees, e.g. pp2-dp2-tp2.",
    )
    log_every: Positive | Literal["auto"] = Field(
        default="auto",
        description='Steps between progress lines. "auto" prints the first ten, then at most about 200 in '
        "all; metrics.jsonl and W&B get every step. A number holds for all of them.",
    )
    eval_every: int = Field(
        default=0, ge=0, description="Steps between held-out evaluations; 0: at the end only."
    )
    eval_tokens: Positive = Field(
        default=65_536, description="Held-out tokens per evaluation, about (whole batches)."
    )
    save_every: int = Field(default=0, ge=0, description="Steps between checkpoints; 0: at the end only.")
    seed: Seed = Field(default=0, description="Seed of fresh weights and of dropout.")
    resume: str = Field(
        default="auto",
        min_length=1,
        description='"auto" continues from the latest checkpoint in output, if any; "never" does not. '
        "A folder, of another run or of one of its checkpoints, is what a run begins with whose own output "
        "has none; its layout may be any.",
    )
    save_in_background: bool = Field(
        default=False,
        description="Train on while a checkpoint is written, from a copy of the states in the host's memory.",
    )
    keep_checkpoints: int = Field(
        default=0, ge=0, description="Delete all but the newest so many checkpoints; 0 keeps all."
    )
    export_hf: bool = Field(default=False, description="Write a Hugging Face model folder at the end.")
    trace_steps: list[Positive] = Field(
        default_factory=list,
        description="Steps, from 1, whose pipeline actions are recorded, compared with their simulation and "
        "drawn in output/trace.",
    )

    @model_validator(mode="after")
    def _steps_to_trace_exist(self) -> Self:
        late = [step for step in self.trace_steps if step > self.steps]
        if late:
            raise ValueError(f"trace_steps names step {late[0]}, and steps = {self.steps} is the last")
        return self


class WandbConfig(Block):
    """Weights & Biases."""

    mode: Literal["offline", "online", "disabled"] = Field(
        default="disabled",
        description="offline writes a run that `wandb sync` can send later; online sends it.",
    )
    project: str = Field(default="dsx", min_length=1, description="Project.")
    entity: str | None = Field(default=None, description="Account or team.")
    name: str | None = Field(default=None, description="Display name of the run.")
    group: str | None = Field(default=None, description="Group of runs.")
    tags: list[str] = Field(default_factory=list, description="Tags of the run.")
    artifacts: Literal["reference", "off"] = Field(
        default="reference",
        description="reference: each checkpoint and exported model becomes a version of an artifact that "
        "says where it is; none of its bytes are sent. off: none do.",
    )


class ElasticConfig(Block):
    """What a run may become when it starts again on another number of ranks; its global batch stays."""

    tensor: Annotated[list[Positive], Field(min_length=1)] | None = Field(
        default=None,
        description="Tensor-parallel degrees it may take, the one you like best first: divisors of a node's "
        "GPUs. null: parallel.tensor alone.",
    )
    pipeline: Annotated[list[Positive], Field(min_length=1)] | None = Field(
        default=None,
        description="Pipeline degrees it may take, the one you like best first. null: parallel.pipeline "
        "alone.",
    )
    min_ranks: Positive = Field(
        default=1, description="Fewest ranks to train on; ranks that no layout can use wait as spares."
    )
    cluster: str | None = Field(
        default=None,
        min_length=1,
        description="Name or JSON file of a cluster (`dsx plan`): of the layouts that use most ranks, the "
        "one with the shortest predicted step that fits its memory. null: the first that is legal, in the "
        "order of tensor, then pipeline.",
    )


class TrackingConfig(Block):
    """Where metrics go, besides the console and metrics.jsonl."""

    wandb: WandbConfig = Field(default=WandbConfig(), description="Weights & Biases.")


class DsxConfig(Block):
    """The ``dsx`` block of a DeepSpeed JSON: 3D training with DeepSpeed."""

    model: ModelConfig = Field(description="Which model to train.")
    data: DataConfig = Field(description="Training text.")
    train: TrainConfig = Field(description="Length of the run and what it leaves behind.")
    parallel: ParallelConfig = Field(default=ParallelConfig(), description="Degrees of parallelism.")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="Pipeline schedule.")
    partition: PartitionConfig = Field(default=PartitionConfig(), description="Layers over stages.")
    zero: ZeroConfig = Field(default=ZeroConfig(), description="When ZeRO communicates.")
    profile: Annotated[str, Field(min_length=1)] | None = Field(
        default=None,
        description='Times and bytes of the layers: "measure" takes them when the run starts and writes '
        "profile.json to its output; or the path of such a file. All that is auto or null in schedule, "
        "parallel.chunks and recompute is then chosen by simulated step; null keeps rules of thumb.",
    )
    profile_micro_batches: Positive = Field(
        default=5, description="Micro-batches to measure per kind of layer, after two that do not count."
    )
    recompute: Recompute | Literal["auto"] = Field(
        default="none",
        description="What backward computes again: none, selective (attention core), full (blocks). "
        '"auto" needs a profile.',
    )
    memory_check: Literal["warn", "refuse", "off"] = Field(
        default="warn",
        description="If the estimated peak (`dsx estimate`) is more than a rank's memory: say so before "
        "anything is built, end the run there, or do not look.",
    )
    optimizer_bytes: int | None = Field(
        default=None,
        ge=0,
        description="Bytes that the optimizer keeps for each parameter, weights and gradients aside: for the "
        "memory estimate of an optimizer that dsx does not know (it knows Adam, AdamW, Lion, SGD).",
    )
    elastic: ElasticConfig | None = Field(
        default=None,
        description="What layout a run may take when it starts again on another number of ranks; null: the "
        "one that is written, or an error.",
    )
    tracking: TrackingConfig = Field(default=TrackingConfig(), description="Where metrics go.")
    faults: FaultsConfig = Field(
        default=FaultsConfig(), description="What is watched for, and what happens then."
    )
