"""``dsx.moe``: what keeps the experts of a mixture equally busy, besides a family's own auxiliary loss."""

from __future__ import annotations

from pydantic import Field

from dsx.config.schema_block import SchemaBlock


class MoeConfig(SchemaBlock):
    """Routers of experts."""

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
