"""Which layers of a list are computed again in backward, and with what function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from deepspeed import checkpointing
from torch import nn
from torch.utils.checkpoint import checkpoint


def checkpoint_non_reentrant(function: Callable[..., Any], *inputs: Any) -> Any:
    """Recompute ``function`` in backward (torch.utils.checkpoint, non-reentrant, RNG preserved).

    The states of ``deepspeed.checkpointing.get_cuda_rng_tracker()``, which Megatron's layers draw their
    dropout from, are preserved too, as DeepSpeed's own checkpoint functions do.
    """
    tracker = checkpointing.get_cuda_rng_tracker()
    if not tracker.get_states():
        return checkpoint(function, *inputs, use_reentrant=False)
    return checkpoint(function, *inputs, use_reentrant=False, context_fn=partial(_replaying, tracker))


class _Replayed:
    """Inside, a tracker of random states is where it was when this was made; entered as often as need be."""

    def __init__(self, tracker: Any) -> None:
        self._tracker, self._then = tracker, tracker.get_states()
        self._now: dict[str, Any] = {}

    def __enter__(self) -> None:
        self._now = self._tracker.get_states()
        self._tracker.set_states(dict(self._then))

    def __exit__(self, *_error: object) -> None:
        self._tracker.set_states(self._now)


def _replaying(tracker: Any) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _Replayed(tracker)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Which runs of layers are recomputed in backward.

    Attributes:
        interval: Layers per recomputed run; 0 turns recomputation off.
        layer_names: Class names that may be recomputed; None means every run that has parameters.
        function: Called as ``function(run, *inputs)``.
        model_name: Class of the PipelineModule, by which DeepSpeed knows Megatron's.
    """

    interval: int = 0
    layer_names: tuple[str, ...] | None = None
    function: Callable[..., Any] = checkpoint_non_reentrant
    model_name: str = ""

    @property
    def may_be_reentrant(self) -> bool:
        """Whether inputs need a gradient for weights to get one: so it is unless the function is known."""
        known = (checkpoint_non_reentrant, checkpointing.non_reentrant_checkpoint)
        return not any(self.function is function for function in known)

    def applies(self, layers: Sequence[Callable[..., Any]]) -> bool:
        """Whether this run of layers is recomputed (deepspeed/runtime/pipe/module.py, _is_checkpointable)."""
        names = [type(layer).__name__ for layer in layers]
        allowed = self.layer_names or ()
        if self.may_be_reentrant and self.model_name in ("GPTModelPipe", "GPT2ModelPipe"):
            return all("ParallelTransformerLayerPipe" in name or name in allowed for name in names)
        if self.layer_names is not None:
            return all(name in allowed for name in names)
        return any(isinstance(layer, nn.Module) and any(True for _ in layer.parameters()) for layer in layers)
