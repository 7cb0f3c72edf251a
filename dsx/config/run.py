"""The resolved description of a training run, frozen, and how its layers are cut into stages."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsx.config.deepspeed import offloads_optimizer
from dsx.config.schema import DsxConfig
from dsx.config.wording import at, without_secrets
from dsx.errors import ConfigError, LayoutError
from dsx.models.flops import WIDTHS, Precision, auto_chunk, layer_flops, tiles_of
from dsx.models.param import PRECISIONS, ParamSpec
from dsx.models.params import layer_kinds
from dsx.models.spec import HubModel, Model
from dsx.parallel.islands import Islands
from dsx.parallel.layout import Layout
from dsx.parallel.mesh import Mesh
from dsx.parallel.partition import partition
from dsx.parallel.reduction import reduces_micro_batches
from dsx.parallel.stages import StageMap
from dsx.schedules.program import Program

PENDING = (
    "dsx.profile: schedule, chunks, recompute and partition, where they are left open, are chosen from "
    "measured times when the run starts"
)
"""The note of a run that is resolved but not yet measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """One config, resolved for one world size.

    Attributes:
        deepspeed: For ``deepspeed.initialize``: the JSON without its ``dsx`` block, with all three batch keys
            and the gradient clipping written out.
        dsx: The ``dsx`` block as the user wrote it, with its "auto" but a named tokenizer; after
            ``dsx.recipe.measure``, with what was chosen written out.
        mesh: Degree of every axis over the world's ranks.
        hf_config: The Hugging Face config that it was read from.
        weights: Hugging Face folder to start from; None for fresh weights.
        chunks: Virtual stages per pipeline rank.
        stage_map: Layers over virtual stages over pipeline ranks.
        micro_batch_size: Sequences per micro-batch and data-parallel rank.
        accumulation: Micro-batches per step and data-parallel rank.
        global_batch_size: Sequences per step, over all ranks.
        zero_stage: 0 to 3.
        gradient_clipping: Largest global gradient norm; 0 means no clipping.
        notes: What "auto" became, and other things that the user did not write but should know.
        spare_ranks: Ranks that the launcher starts beyond the mesh's, and that wait (``dsx.elastic``).
        islands: Which island this is of which (``dsx.outer``); None if there is one job. All else is about
            this island alone.
    """

    deepspeed: dict[str, Any]
    dsx: DsxConfig
    mesh: Mesh
    model: Model
    hf_config: dict[str, Any]
    weights: Path | None
    chunks: int
    program: Program
    stage_map: StageMap
    param_specs: tuple[ParamSpec, ...]
    micro_batch_size: int
    accumulation: int
    global_batch_size: int
    zero_stage: int
    precision: Precision
    gradient_clipping: float
    notes: tuple[str, ...]
    spare_ranks: int = 0
    islands: Islands | None = None

    @property
    def schedule_name(self) -> str:
        """The schedule's name: a builder's, or the file's."""
        return self.program.name

    @property
    def output(self) -> Path:
        """Folder of this run: ``dsx.train.output`` with ``{layout}`` filled in, e.g. ``pp2-dp2-tp2``.

        Each island has a folder of its own in it.
        """
        layout = "-".join(f"{axis}{degree}" for axis, degree in self.mesh.axes)
        folder = Path(self.dsx.train.output.replace("{layout}", layout))
        return folder if self.islands is None else folder / f"island{self.islands.index}"

    @property
    def sequence_length(self) -> int:
        return self.dsx.data.sequence_length

    @property
    def tokens_of_rank(self) -> int:
        """Tokens of a micro-batch on one rank; those of its sequences, or of its parts of them."""
        return self.micro_batch_size * self.sequence_length // self.mesh.cp

    @property
    def samples_per_micro_step(self) -> int:
        """Sequences of one micro-batch on every data-parallel rank."""
        return self.global_batch_size // self.accumulation

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step trains on, over all ranks."""
        return self.global_batch_size * self.sequence_length

    @property
    def loss_chunk(self) -> int:
        """Tokens whose logits the head makes at a time; 0 for all (``dsx.loss.chunk_tokens``)."""
        wanted = self.dsx.loss.chunk_tokens
        if wanted != "auto":
            return wanted or 0
        return auto_chunk(
            self.model,
            self.tokens_of_rank,
            tensor=self.mesh.tp,
            width=WIDTHS[self.precision],
            pad_multiple=self.dsx.model.vocab_multiple,
            piles_up=self.program.piles_up,
        )

    @property
    def mlp_tiles(self) -> int:
        """Parts of a sequence that a feed-forward computes one after the other (``dsx.mlp_tiles``)."""
        return tiles_of(self.dsx.mlp_tiles, self.model, self.tokens_of_rank)

    @property
    def fingerprint(self) -> str:
        """What islands must have in common to hold the same parts of the model, and to share the samples."""
        outer = None if self.dsx.outer is None else self.dsx.outer.model_dump(
            exclude={"meet", "island", "keys", "insecure", "patience_seconds", "delay"}
        )  # fmt: skip
        parts = (self.mesh, self.zero_stage, self.stage_map, self.param_specs, outer)
        # They take turns at samples of one size, in batches, in an order that the seed draws.
        return repr((*parts, self.global_batch_size, self.sequence_length, self.dsx.data.seed))

    @property
    def num_parameters(self) -> int:
        """Elements of the model's parameters, tied ones once, padding not counted."""
        return sum(spec.numel for spec in self.param_specs)

    @property
    def num_trained(self) -> int:
        """Elements of those that are not frozen."""
        return sum(spec.numel for spec in self.param_specs if spec.trained)

    @property
    def reduces_micro_batches(self) -> bool:
        """Whether gradients are reduced after every backward, by DeepSpeed (``dsx.zero.reduce``)."""
        offloads, asked = offloads_optimizer(self.deepspeed), self.dsx.zero.reduce
        return reduces_micro_batches(
            asked, self.zero_stage, offloads=offloads, micro_batches=self.accumulation
        )

    @property
    def layout(self) -> Layout:
        return Layout(
            mesh=self.mesh,
            stages=self.stage_map,
            params=self.param_specs,
            zero_stage=self.zero_stage,
            dtype=PRECISIONS[self.precision],
        )

    def resolved(self) -> dict[str, Any]:
        """The whole config as JSON with every "auto" replaced, from which loading gives this run again.

        ``dsx.elastic``, which is about other numbers of ranks, is left out.
        """
        block = self.dsx.model_dump(mode="json", exclude_none=True, exclude={"elastic"})
        block["parallel"] |= {"tensor": self.mesh.tp, "pipeline": self.mesh.pp, "chunks": self.chunks}
        if self.mesh.cp > 1:
            block["parallel"]["context_method"] = self.dsx.parallel.method
        else:  # so that a plan of this config may think of it
            block["parallel"].pop("context_method", None)
            block["parallel"].pop("context", None)
        if self.mesh.ep == 1:
            block["parallel"].pop("expert", None)
        if self.program.rows is None:
            block["schedule"]["name"] = self.schedule_name
        return copy.deepcopy(self.deepspeed) | {"dsx": block}

    def recorded(self) -> dict[str, Any]:
        """:meth:`resolved` as it may be written, sent and shown: without values of keys that are secrets."""
        found: dict[str, Any] = without_secrets(self.resolved())
        return found

    def summary(self) -> dict[str, Any]:
        """What a person wants to see before starting, as JSON values."""
        kinds = layer_kinds(self.model)
        stages, layout = self.stage_map, self.layout
        return {
            "world_size": self.mesh.size,
            "spare_ranks": self.spare_ranks,
            "islands": None
            if self.islands is None
            else {"count": self.islands.count, "index": self.islands.index, "ranks": self.islands.ranks},
            "mesh": dict(self.mesh.axes),
            "chunks": self.chunks,
            "schedule": self.schedule_name,
            "zero_stage": self.zero_stage,
            "precision": self.precision,
            "recompute": self.dsx.recompute,
            "compile": self.dsx.compile,
            "sequence_parallel": self.dsx.parallel.sequence_parallel and self.mesh.tp > 1,
            "model": {
                "family": self.model.family,
                "implementation": "transformers" if isinstance(self.model, HubModel) else "dsx",
                "parameters": self.num_parameters,
                "trained": self.num_trained,
            },
            "batch": {
                "micro_batch_size": self.micro_batch_size,
                "micro_batches_per_step": self.accumulation,
                "global_batch_size": self.global_batch_size,
                "sequence_length": self.sequence_length,
                "tokens_per_step": self.tokens_per_step,
            },
            "stages": [
                {
                    "pipeline_rank": rank,
                    "parameters_per_rank": layout.local_parameters(rank),
                    "chunks": [[f"{i} {kinds[i]}" for i in stages.layers(s)] for s in stages.stages_of(rank)],
                }
                for rank in range(self.mesh.pp)
            ],
            "notes": list(self.notes),
        }


def cut_layers(
    dsx: DsxConfig, model: Model, specs: Sequence[ParamSpec], *, num_ranks: int, num_chunks: int
) -> StageMap:
    """Stage map for this many ranks and chunks; before anything is measured, ``time`` goes by FLOPs."""
    method, names = dsx.partition.method, layer_kinds(model)
    key = at("dsx.partition.method", method)
    if isinstance(method, list) and len(method) != num_ranks * num_chunks:
        stages = num_ranks * num_chunks
        raise ConfigError(
            key,
            f"it lists {len(method)} stages, and pipeline {num_ranks} x chunks {num_chunks} has {stages}",
            f"list {stages} numbers, or set dsx.parallel.pipeline and chunks to match",
        )
    parameters = [0] * len(names)
    for spec in specs:
        parameters[spec.layer] += spec.numel
        if spec.tie is not None:
            parameters[-1] += spec.numel  # the head's stage holds a copy of the tied table
    try:
        return partition(
            "flops" if method == "time" else method,
            num_ranks * num_chunks,
            num_ranks,
            parameters=parameters,
            costs=layer_flops(model, dsx.data.sequence_length),
            names=names,
        )
    except LayoutError as error:
        raise ConfigError(key, f"{error.where}: {error.what}", error.fix) from None
