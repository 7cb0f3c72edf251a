"""The micro-batches of one step, as one rank reads them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from dsx.errors import DataError
from dsx.nn.loss import cross_entropy


@dataclass(slots=True)
class MicroBatches:
    """A step's micro-batches, pulled in order when first needed, and dropped after their last use.

    Args:
        source: Yields ``(inputs, labels)``; None on a rank that needs neither.
        count: Micro-batches in the step.
        device: Where tensors are moved.
        uses: How often each micro-batch is read on this rank (inputs, labels or both).
    """

    source: Iterator[Any] | None
    count: int
    device: torch.device
    uses: int
    _loaded: dict[int, list[Any]] = field(default_factory=dict)
    _pulled: int = 0

    def inputs(self, micro_batch: int) -> Any:
        """Inputs of a micro-batch: copies, as layers may write over what they are given."""
        return _to(self._use(micro_batch)[0], self.device, own=True)

    def labels(self, micro_batch: int) -> Any:
        """Labels of a micro-batch."""
        return _to(self._use(micro_batch)[1], self.device, own=False)

    def _use(self, micro_batch: int) -> Any:
        while self._pulled <= micro_batch:
            self._loaded[self._pulled] = [self._pull(), self.uses]
            self._pulled += 1
        entry = self._loaded[micro_batch]
        entry[1] -= 1
        if entry[1] == 0:
            del self._loaded[micro_batch]
        return entry[0]

    def _pull(self) -> Any:
        if self.source is None:
            raise DataError(
                "data_iter = None", "this rank's stage needs data", "pass an iterator of micro-batches"
            )
        try:
            batch = next(self.source)
        except StopIteration:
            raise DataError(
                f"data_iter after {self._pulled} of {self.count} micro-batches",
                "it ended within the step",
                "give as many micro-batches as gradient_accumulation_steps, e.g. through RepeatingLoader",
            ) from None
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise DataError(f"batch of type {type(batch).__name__}", "not a pair", "yield (inputs, labels)")
        return batch


@dataclass(slots=True)
class LabelCheck:
    """Warns, once, where labels are the inputs themselves and the loss is dsx's, which shifts nothing.

    Another loss may shift by itself, or want its input back.
    """

    loss_fn: Callable[..., Any] | None
    due: bool

    def looked_at(self, batch: Any) -> Any:
        """The micro-batch as it is."""
        if self.due and _is_unshifted(batch) and getattr(self.loss_fn, "func", self.loss_fn) is cross_entropy:
            warnings.warn(
                "labels are the inputs themselves: the loss compares the logits at each place with the label "
                "there and shifts nothing, so that the model learns to copy. Give tokens[:, :-1] as inputs "
                "and tokens[:, 1:] as labels.",
                stacklevel=2,
            )
        self.due = False
        return batch


def _is_unshifted(batch: Any) -> bool:
    """Whether labels equal inputs, as they would not if they were shifted."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        return False
    inputs, labels = batch[:2]
    if not isinstance(inputs, torch.Tensor) or not isinstance(labels, torch.Tensor) or inputs.dim() < 2:
        return False
    same = inputs.shape == labels.shape and torch.equal(inputs, labels)
    return same and not torch.equal(inputs[:, 1:], labels[:, :-1])


class DataWait:
    """How long training has waited for its iterator.

    Attributes:
        seconds: The total on this rank.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield the same items and note the time that each took. Ending early does not end ``source``."""
        items = []  # emptied before each yield, so that no batch outlives its step here
        while True:
            began = time.perf_counter()
            try:
                items.append(next(source))
            except StopIteration:
                return
            finally:
                self.seconds += time.perf_counter() - began
            yield items.pop()


def _to(value: Any, device: torch.device, *, own: bool) -> Any:
    if isinstance(value, torch.Tensor):
        moved = value.detach().to(device, non_blocking=True)
        return moved.clone() if own and moved.device == value.device else moved
    if isinstance(value, (tuple, list)):
        return tuple(_to(item, device, own=own) for item in value)
    return value
