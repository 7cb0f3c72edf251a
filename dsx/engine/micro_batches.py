"""The micro-batches of one step, as one rank reads them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dsx.errors import DataError
from dsx.nn.loss import HeadLoss, TokenMean, cross_entropy
from dsx.parallel.groups import Groups


@dataclass(slots=True)
class MicroBatches:
    """A step's micro-batches, pulled in order when first needed, and dropped after their last use.

    Args:
        source: Yields ``(inputs, labels)``; None on a rank that needs neither.
        count: Micro-batches in the step.
        device: Where tensors are moved.
        uses: How often each micro-batch is read on this rank (inputs, labels or both).
        tokens: Counts the trained tokens of a loss that is the mean over them, on ranks of the last stage.
        pulled: Called after each micro-batch that was pulled; None calls nothing.
    """

    source: Iterator[Any] | None
    count: int
    device: torch.device
    uses: int
    tokens: TrainedTokens | None = None
    pulled: Callable[[], None] | None = None
    _loaded: dict[int, list[Any]] = field(default_factory=dict)
    _pulled: int = 0

    def inputs(self, micro_batch: int) -> Any:
        """Inputs of a micro-batch: copies, as layers may write over what they are given."""
        return _to(self._use(micro_batch)[0], self.device, own=True)

    def labels(self, micro_batch: int) -> tuple[Any, ...]:
        """Labels of a micro-batch, and the divisor of its loss if the step gives one."""
        tokens = self.tokens
        if tokens is not None and tokens.before_backward:
            self._read(self.count - 1)
        labels = _to(self._use(micro_batch)[1], self.device, own=False)
        if tokens is None or not tokens.before_backward:
            return (labels,)
        return labels, tokens.share(self.count)

    def _read(self, micro_batch: int) -> None:
        """Pull micro-batches up to this one."""
        while self._pulled <= micro_batch:
            batch = self._pull()
            if self.pulled is not None:
                self.pulled()
            if self.tokens is not None:
                self.tokens.note(batch[1])
            self._loaded[self._pulled] = [batch, self.uses]
            self._pulled += 1

    def _use(self, micro_batch: int) -> Any:
        self._read(micro_batch)
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


class TrainedTokens:
    """The trained tokens of one step or evaluation, as a rank of the last stage counts them.

    Args:
        loss: Says how many a micro-batch's labels have.
        groups: This rank's groups.
        device: Where counts are summed over ranks.
        before_backward: Whether the losses are divided by the step's number of them, for which all
            micro-batches are read before the first loss.

    Attributes:
        before_backward: See there.
    """

    def __init__(
        self, loss: TokenMean, groups: Groups, device: torch.device, *, before_backward: bool
    ) -> None:
        self._loss, self._groups, self._device = loss, groups, device
        self.before_backward = before_backward
        self._counts: list[torch.Tensor] = []
        self._share: torch.Tensor | None = None

    def note(self, labels: Any) -> None:
        """Count a micro-batch's tokens."""
        self._counts.append(self._loss.count(labels))

    def counts(self) -> torch.Tensor:
        """Of every micro-batch that was read: int64 [micro-batches]."""
        return torch.stack(self._counts).to(self._device)

    def share(self, count: int) -> torch.Tensor:
        """The tokens that one rank has of an average micro-batch: a float32 scalar.

        The mean over micro-batches and replicas of their sums divided by it is the sum over the global batch
        divided by its tokens. At least one token counts, so that a batch without any has the loss 0.
        """
        if self._share is None:
            total = self.counts().sum()
            dist.all_reduce(total, group=self._groups.data)
            mean = total.clamp(min=1).double() / (count * self._groups.mesh.num_replicas)
            self._share = mean.float()
        return self._share


@dataclass(slots=True)
class LabelCheck:
    """Warns, once, where labels are the inputs themselves and the loss is dsx's, which shifts nothing.

    Another loss may shift by itself, or want its input back.
    """

    loss_fn: Callable[..., Any] | None
    due: bool

    def looked_at(self, batch: Any) -> Any:
        """The micro-batch as it is."""
        loss: Any = self.loss_fn
        loss = loss.loss if isinstance(loss, TokenMean) else loss
        ours = isinstance(loss, HeadLoss) or getattr(loss, "func", loss) is cross_entropy
        if self.due and ours and _is_unshifted(batch):
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
    if isinstance(value, Mapping):
        return {name: _to(item, device, own=own) for name, item in value.items()}
    return value
