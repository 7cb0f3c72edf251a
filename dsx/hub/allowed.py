"""What a model made of transformers' modules cannot do, asked of any model.

What answers tries small models of the family, so it is imported where there is such a model: dsx's own need
nothing of transformers.
"""

from __future__ import annotations

from dsx.models.flops import Precision
from dsx.models.spec import ContextMethod, HubModel, Model


def has_tiles(model: Model) -> bool:
    """Whether blocks of a model have feed-forwards that may be computed for some tokens at a time."""
    if not isinstance(model, HubModel):
        return True
    from dsx.hub.feed_forward import feed_forwards  # here: as above

    return any(feed_forwards(model.config, balanced=model.balance is not None))


def unshared(model: Model | None, ranks: int = 2, method: ContextMethod = "all_gather") -> str | None:
    """Why no ``ranks`` may share sequences of a model by a method of attention; None if they may."""
    if not isinstance(model, HubModel):
        return None
    from dsx.hub.context_probe import no_context  # here: as above

    return no_context(model, ranks, method)


def unselected(model: Model | None) -> str | None:
    """Why blocks of a model may not compute attention alone again; None if they may."""
    if not isinstance(model, HubModel):
        return None
    from dsx.hub.context_probe import no_selective  # here: as above

    return no_selective(model.config)


def no_moe(key: str, model: Model, precision: Precision) -> str | None:
    """Why a model's routers cannot have what a key of ``dsx.moe`` asks for; None if they can."""
    if not isinstance(model, HubModel) or not model.experts:
        return "no block has experts in stacks that transformers' registry of experts knows"
    from dsx.hub import balance, experts  # here: other models need nothing of it

    return balance.no_z_loss(model.config) if key == "z_loss" else experts.no_biases(model, precision)
