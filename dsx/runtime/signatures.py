"""What each stage boundary carries, remembered from step to step."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch.distributed as dist

from dsx.errors import ModelError
from dsx.runtime.p2p import Signature, Tensors
from dsx.runtime.shards import Shards


@dataclass(slots=True)
class Signatures:
    """What each boundary carries, learned from its first micro-batch; nothing is kept for dynamic shapes.

    Attributes:
        dynamic: Shapes may differ from micro-batch to micro-batch.
        shards: How tensors are cut for the way; None if they go whole.
        headers: Group for the headers of dynamic shapes (:func:`dsx.runtime.headers.header_group`).
    """

    dynamic: bool
    shards: Shards | None = None
    headers: dist.ProcessGroup | None = None
    _known: dict[tuple[int, bool], Signature] = field(default_factory=dict)
    _announced: set[tuple[int, bool]] = field(default_factory=set)
    _checked: set[tuple[str, int, bool]] = field(default_factory=set)

    def get(self, stage: int, training: bool) -> Signature | None:
        """Signature of virtual stage ``stage``'s input."""
        return self._known.get((stage, training))

    def learn(self, stage: int, training: bool, signature: Signature) -> None:
        """Remember what came in (static shapes only)."""
        if not self.dynamic:
            self._known[stage, training] = signature

    def announce(self, stage: int, training: bool, signature: Signature) -> bool:
        """Whether a header must go before this message. Raises ModelError if a static shape changed."""
        if self.dynamic:
            return True
        key = (stage, training)
        known = self._known.setdefault(key, signature)
        if known != signature:
            raise ModelError(
                f"input of virtual stage {stage}",
                f"it changed from {known} to {signature}",
                "build the PipelineModule with dynamic_shape=True, or call reset_activation_shape() on every "
                "rank before the change (for a short last batch, drop it: dataloader_drop_last)",
            )
        first = key not in self._announced
        self._announced.add(key)
        return first

    def check(self, kind: str, stage: int, training: bool, tensors: Tensors) -> None:
        """Before a boundary's first message to ``stage`` is cut: whether all ranks that cut it hold it alike.

        A collective call over the tensor-parallel ranks. Raises ModelError if they do not.
        """
        if self.shards is not None and (kind, stage, training) not in self._checked:
            self._checked.add((kind, stage, training))
            what = "activation into" if kind == "F" else "gradient of the output of"
            self.shards.require_equal(tensors, f"{what} virtual stage {stage}")

    def reset(self) -> None:
        """Forget everything; the next message of each boundary brings its header again."""
        self._known.clear()
        self._announced.clear()
        self._checked.clear()
