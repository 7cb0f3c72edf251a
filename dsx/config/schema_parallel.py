"""``dsx.parallel`` and ``dsx.moe``: over how many ranks a model is divided, and how experts are kept busy."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from dsx.config.schema_block import Degree, SchemaBlock
from dsx.models.spec import ContextMethod


class ParallelConfig(SchemaBlock):
    """Degrees of parallelism; data parallelism takes the ranks that tensor x pipeline x context leave.

    The prime factors of world size / fixed degrees go to the "auto" degrees in turn, largest first: to data,
    then pipeline, then tensor, skipping an axis that cannot legally take one.
    """

    tensor: Degree = Field(
        default="auto",
        description="Ranks that share each layer. Divides attention heads and MLP width, and key/value heads "
        'unless it is a multiple of them. "auto" divides them all, and takes its turn after data and '
        "pipeline, up to 8 (one node's fast links).",
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
    context: Degree = Field(
        default=1,
        description="Ranks that every sequence is cut over, each of which holds the activations of its part "
        'alone. Sequences divide into 2 chunks per rank; ZeRO partitions over data x context. "auto" is for '
        "`dsx plan`, which then tries all; a run needs a number.",
    )
    context_method: Literal["auto"] | ContextMethod = Field(
        default="auto",
        description='How attention sees whole sequences (context > 1): "all_gather" of keys and values, '
        '"ulysses" (all-to-alls; some heads each), or a "ring" of keys and values, one rank after the other. '
        '"auto": "ulysses" where dsx\'s own modules send less by it and heads divide, else "all_gather".',
    )
    expert: Degree = Field(
        default=1,
        description="Ranks, among those of data x context, that hold the experts of a layer together: each "
        "has its share, and tokens travel. Divides data x context and the experts of a layer, of families "
        'whose experts transformers calls by its registry. "auto" is for `dsx plan`, as of context.',
    )
    tensor_plan: dict[str, str | None] = Field(
        default_factory=dict,
        description="Changes of a transformers family's tensor plan, in transformers' words: a style by "
        'pattern of names, e.g. {"model.layers.*.mlp.up_proj": "colwise"}; null leaves a module whole.',
    )

    @property
    def method(self) -> ContextMethod:
        """``context_method``, with what "auto" becomes."""
        return "all_gather" if self.context_method == "auto" else self.context_method


class MoeConfig(SchemaBlock):
    """``dsx.moe``: what keeps a mixture's experts equally busy, besides a family's own auxiliary loss."""

    bias_update_speed: float = Field(
        default=0.0,
        ge=0,
        description="What the bias of each expert in its router's choice moves by after a step: up where "
        "the expert got fewer tokens of the global batch than the mean, down where more (arXiv:2408.15664; "
        "DeepSeek-V3 used 0.001). For families that have such a bias. 0: it stays.",
    )
    z_loss: float = Field(
        default=0.0,
        ge=0,
        description="Coefficient of the routers' z-loss (arXiv:2202.08906, equation 5): of each layer the "
        "mean over tokens of the squared logsumexp of the router's logits. ST-MoE used 0.001. 0: none.",
    )
