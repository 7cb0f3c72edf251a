"""What a model made of transformers' modules cannot do, asked of any model.

What answers tries small models of the family, so it is imported where there is such a model: dsx's own need
nothing of transformers.
"""

from __future__ import annotations

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
