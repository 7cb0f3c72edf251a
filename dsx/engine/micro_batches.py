"""Micro-batches, as one rank reads them."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from dsx.errors import DataError
from dsx.nn.context import WHOLE, ContextParallel
from dsx.nn.documents import MicroBatch
from dsx.nn.loss import HeadLoss, TokenMean, cross_entropy
from dsx.parallel.groups import Groups

_AT_LEAST_EVERY = 1024


@dataclass(slots=True)
class BatchSource:
    """The one way of micro-batches from an iterator to the stages of a rank.

    Of a step they are read in order, when first needed, and dropped after their last use.

    Args:
        loss_fn: The pipeline's loss, by which labels are looked at once; None leaves them alone.
        moved: Called after each micro-batch that was read; None calls nothing.
        iterator: Yields ``(inputs, labels)``, or what ``convert`` makes into that; None on a rank that needs
            neither.
        convert: Stock DeepSpeed's ``batch_fn``.
        cp: The ranks that share the rows which the iterator yields whole.

    Attributes:
        seconds: How long has been waited for the iterator.
        tokens: Counts the trained tokens of a step whose loss is the mean over them, on ranks of the last
            stage.
    """

    device: torch.device
    loss_fn: Callable[..., Any] | None = None
    moved: Callable[[], None] | None = None
    iterator: Iterator[Any] | None = None
    convert: Callable[[Any], Any] | None = None
    cp: ContextParallel = WHOLE
    seconds: float = 0.0
    tokens: TrainedTokens | None = None
    _count: int = 0
    _uses: int = 0
    _read: int = 0
    _kept: dict[int, list[Any]] = field(default_factory=dict)
    _parted: int = field(default=0, init=False)

    def begin(self, count: int, *, uses: int, tokens: TrainedTokens | None = None) -> None:
        """Begin a step of ``count`` micro-batches, each with so many uses: as inputs, labels or both."""
        self._count, self._uses, self.tokens = count, uses, tokens
        self._read, self._kept = 0, {}

    def inputs(self, micro_batch: int) -> Any:
        """Inputs of a micro-batch: copies, as layers may write over what they are given."""
        return _to(self._use(micro_batch).inputs, self.device, own=True)

    def labels(self, micro_batch: int) -> tuple[Any, ...]:
        """Labels of a micro-batch, and the divisor of its loss if the step gives one."""
        tokens = self.tokens
        if tokens is not None and tokens.before_backward:
            self._read_to(self._count - 1)
        labels = _to(self._use(micro_batch).labels, self.device, own=False)
        if tokens is None or not tokens.before_backward:
            return (labels,)
        return labels, tokens.share(self._count)

    def _use(self, micro_batch: int) -> MicroBatch:
        self._read_to(micro_batch)
        kept = self._kept[micro_batch]
        kept[1] -= 1
        if kept[1] == 0:
            del self._kept[micro_batch]
        found: MicroBatch = kept[0]
        return found

    def _read_to(self, micro_batch: int) -> None:
        while self._read <= micro_batch:
            batch = self._next()
            if self.moved is not None:
                self.moved()
            if self.tokens is not None:
                self.tokens.note(batch.labels)
            self._kept[self._read] = [batch, self._uses]
            self._read += 1

    def _next(self) -> MicroBatch:
        if self.iterator is None:
            raise DataError(
                "data_iter = None", "this rank's stage needs data", "pass an iterator of micro-batches"
            )
        began = time.perf_counter()
        try:
            batch = next(self.iterator)
        except StopIteration:
            raise DataError(
                f"data_iter after {self._read} of {self._count} micro-batches",
                "it ended within the step",
                "give as many micro-batches as gradient_accumulation_steps, e.g. through RepeatingLoader",
            ) from None
        finally:
            self.seconds += time.perf_counter() - began
        batch = batch if self.convert is None else self.convert(batch)
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise DataError(f"batch of type {type(batch).__name__}", "not a pair", "yield (inputs, labels)")
        found = MicroBatch(*batch[:2])
        self._look_at(found)
        return found if self.cp.size == 1 else self._part(found)

    def _part(self, batch: MicroBatch) -> MicroBatch:
        """This rank's ids and labels of whole rows; places stay whole (:mod:`dsx.nn.context`)."""
        ids, *places = batch.inputs if isinstance(batch.inputs, (tuple, list)) else (batch.inputs,)
        labels = list(leaves(batch.labels))
        for rows in (ids, *places, *labels):
            if not isinstance(rows, torch.Tensor) or rows.dim() != 2 or rows.shape != ids.shape:
                what = f"shape {tuple(rows.shape)}" if isinstance(rows, torch.Tensor) else type(rows).__name__
                raise DataError(
                    f"a micro-batch on {self.cp.size} context-parallel ranks",
                    f"something of it is no number per token, [rows, tokens] ({what})",
                    "yield (ids, labels), or ((ids, positions), labels), of whole rows; labels may be a nest",
                )
        self._compare((ids, *places, *labels))
        mine = self.cp.cut(ids)
        return MicroBatch((mine, *places) if places else mine, each(self.cp.cut, batch.labels))

    def _compare(self, rows: Sequence[torch.Tensor]) -> None:
        """Refuse other rows than those of the ranks that share them, as micro-batches 1, 2, 4, 8, ... show.

        From the 1024th on, every 1024th is compared. Collective over those ranks.
        """
        self._parted += 1
        if self._parted & (self._parted - 1) and self._parted % _AT_LEAST_EVERY:
            return
        if any(type(each) is not torch.Tensor for each in rows):
            return  # fake ones, without values
        digest = hashlib.blake2b(digest_size=7)
        for each in rows:
            digest.update(f"{each.shape} {each.dtype}".encode())
            digest.update(each.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        number = int.from_bytes(digest.digest())
        both = torch.tensor([number, -number], device=self.device)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self.cp.group)
        if both.sum() != 0:  # the highest and the lowest
            raise DataError(
                f"a micro-batch on {self.cp.size} context-parallel ranks",
                "the ranks of a context axis read the same rows, and trains each its part "
                "of them: these have read different ones",
                "read by engine.grid's data-parallel rank and size, e.g. DistributedSampler(dataset, "
                "engine.grid.get_data_parallel_world_size(), engine.grid.get_data_parallel_rank())",
            )

    def _look_at(self, batch: MicroBatch) -> None:
        """Warn, once, where labels are the inputs themselves and the loss is dsx's, which shifts nothing.

        Another loss may shift by itself, or want its input back.
        """
        loss, self.loss_fn = self.loss_fn, None
        loss = loss.loss if isinstance(loss, TokenMean) else loss
        ours = isinstance(loss, HeadLoss) or getattr(loss, "func", loss) is cross_entropy
        if ours and _is_unshifted(batch):
            warnings.warn(
                "labels are the inputs themselves: the loss compares the logits at each place with the label "
                "there and shifts nothing, so that the model learns to copy. Give tokens[:, :-1] as inputs "
                "and tokens[:, 1:] as labels.",
                stacklevel=2,
            )


class TrainedTokens:
    """The trained tokens of one step or evaluation, as a rank of the last stage counts them.

    Args:
        loss: Says how many a micro-batch's labels have.
        device: Where counts are summed over ranks.
        before_backward: Whether the losses are divided by the step's number of them, for which all
            micro-batches are read before the first loss.
    """

    def __init__(
        self, loss: TokenMean, groups: Groups, device: torch.device, *, before_backward: bool
    ) -> None:
        self._loss, self._groups, self._device = loss, groups, device
        self.before_backward = before_backward
        self._counts: list[torch.Tensor] = []
        self._share: torch.Tensor | None = None

    def note(self, labels: Any) -> None:
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


def _is_unshifted(batch: MicroBatch) -> bool:
    """Whether labels equal inputs, as they would not if they were shifted."""
    inputs, labels = batch
    if not isinstance(inputs, torch.Tensor) or not isinstance(labels, torch.Tensor) or inputs.dim() < 2:
        return False
    same = inputs.shape == labels.shape and torch.equal(inputs, labels)
    return same and not torch.equal(inputs[:, 1:], labels[:, :-1])


def _to(value: Any, device: torch.device, *, own: bool) -> Any:
    def moved(tensor: torch.Tensor) -> torch.Tensor:
        there = tensor.detach().to(device, non_blocking=True)
        return there.clone() if own and there.device == tensor.device else there

    return each(moved, value)


def each(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """A nest with each of its tensors changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        return tuple(each(change, item) for item in value)
    if isinstance(value, Mapping):
        return {name: each(change, item) for name, item in value.items()}
    return value


def leaves(value: Any) -> Iterator[Any]:
    """What a nest holds, in its order."""
    if isinstance(value, (tuple, list, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from leaves(item)
    else:
        yield value
