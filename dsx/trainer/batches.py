"""A Trainer's data sets and collators as micro-batches of one data-parallel rank.

The order is that of transformers' Trainer in one process whose batches are as large: batch ``i`` of an epoch
goes to rank ``i % shares``. What collators draw at random depends on the seed, the epoch and the batch alone,
so that the ranks that read inputs and those that read labels see the same.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import SeedableRandomSampler
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler
from transformers import (
    DataCollatorWithPadding,
    PreTrainedTokenizerBase,
    TrainingArguments,
    default_data_collator,
)
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import RemoveColumnsCollator, has_length, seed_worker

from dsx.config.wording import at
from dsx.errors import ConfigError, DataError
from dsx.nn.documents import MicroBatch
from dsx.nn.loss import IGNORED

# What collators give beside these says with other words where documents begin.
_IMPLIED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_READ = ("input_ids", "labels", "shift_labels", "attention_mask", "position_ids")


class ShareOfBatches(BatchSampler):
    """Every ``shares``-th batch of ``batches``, from the ``index``-th on.

    Attributes:
        skip: Batches, over all ranks, that the next epoch leaves out, having been trained on.
    """

    def __init__(self, batches: BatchSampler, shares: int, index: int) -> None:
        self.batches, self.batch_size, self.drop_last = batches, batches.batch_size, batches.drop_last
        self.sampler = batches.sampler
        self._shares, self._index, self.skip = shares, index, 0

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self.batches), self.skip + self._index, None, self._shares)

    def __len__(self) -> int:
        return len(range(self.skip + self._index, len(self.batches), self._shares))


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """How a Trainer's arguments read data.

    Attributes:
        columns: Names that the model's forward takes.
        index: This rank's place in it.
    """

    args: Any
    collate: Callable[[list[Any]], Any]
    processing_class: Any
    columns: tuple[str, ...]
    shares: int
    index: int

    def training(self, dataset: Any, global_batch: int) -> DataLoader[Any]:
        """Batches to train on; ``global_batch`` samples are those of a step."""
        return self._loader(
            dataset, self.args.per_device_train_batch_size, partial(self._training_order, size=global_batch)
        )

    def evaluation(self, dataset: Any) -> DataLoader[Any]:
        return self._loader(dataset, self.args.per_device_eval_batch_size, self._evaluation_order)

    def _loader(self, dataset: Any, size: int, order: Callable[[Any], Any]) -> DataLoader[Any]:
        args, collate = self.args, self.collate
        if args.remove_unused_columns:
            if hasattr(dataset, "remove_columns") and getattr(dataset, "column_names", None):
                unused = [name for name in dataset.column_names if name not in self.columns]
                if len(unused) == len(dataset.column_names):
                    raise DataError(
                        f"data set with the columns {', '.join(unused)}",
                        f"the model takes none of them ({', '.join(self.columns)})",
                        "tokenise it, or set remove_unused_columns=False",
                    )
                dataset = dataset.remove_columns(unused)
            else:
                collate = RemoveColumnsCollator(collate, list(self.columns))
        options: dict[str, Any] = {
            "collate_fn": collate,
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
            "persistent_workers": args.dataloader_persistent_workers,
            "multiprocessing_context": args.dataloader_multiprocessing_context,
            "prefetch_factor": args.dataloader_prefetch_factor,
            "in_order": args.dataloader_in_order,
            "worker_init_fn": partial(seed_worker, num_workers=args.dataloader_num_workers, rank=self.index),
        }
        if isinstance(dataset, IterableDataset) or not has_length(dataset):
            drop = args.dataloader_drop_last
            return DataLoader(dataset, batch_size=size, drop_last=drop, **options)
        batches = BatchSampler(order(dataset), size, args.dataloader_drop_last)
        return DataLoader(dataset, batch_sampler=ShareOfBatches(batches, self.shares, self.index), **options)

    @property
    def _seed(self) -> int:
        return int(self.args.seed if self.args.data_seed is None else self.args.data_seed)

    def _training_order(self, dataset: Any, *, size: int) -> Any:
        how = self.args.train_sampling_strategy
        if how == "sequential":
            return SequentialSampler(dataset)
        if how == "group_by_length":
            return _ByLength(size, self.args.seed, **self._lengths(dataset))
        return SeedableRandomSampler(dataset, data_seed=self._seed)

    def _evaluation_order(self, dataset: Any) -> Any:
        if self.args.train_sampling_strategy == "group_by_length":
            drawn = torch.Generator().manual_seed(self._seed)
            size = self.args.per_device_eval_batch_size
            return LengthGroupedSampler(size, **self._lengths(dataset), generator=drawn)
        return SequentialSampler(dataset)

    def _lengths(self, dataset: Any) -> dict[str, Any]:
        """How long samples are, as LengthGroupedSampler takes it."""
        name = self.args.length_column_name
        lengths = dataset[name] if name in (getattr(dataset, "column_names", None) or ()) else None
        names = getattr(self.processing_class, "model_input_names", None)
        return {"dataset": dataset, "lengths": lengths, "model_input_name": names[0] if names else None}


class _ByLength(LengthGroupedSampler):  # type: ignore[misc]
    """Draws every epoch's order from a seed of its own, and the first as transformers' Trainer does."""

    def __init__(self, size: int, seed: int, **lengths: Any) -> None:
        super().__init__(size, **lengths)
        self._seed = seed

    def set_epoch(self, number: int) -> None:
        self.generator = torch.Generator().manual_seed(self._seed + number)
        torch.empty((), dtype=torch.int64).random_(
            generator=self.generator
        )  # which a DataLoader draws before


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a training is, as transformers' Trainer counts it in one process of as large batches.

    Attributes:
        batches: Batches of an epoch, over all data-parallel ranks; None if nobody knows.
        per_step: Batches of a step, over all of them.
        steps_per_epoch: Optimizer steps of an epoch.
        epochs: Epochs that are begun.
    """

    batches: int | None
    per_step: int
    steps_per_epoch: int
    epochs: int
    steps: int
    samples: float

    @classmethod
    def of(cls, loader: DataLoader[Any], args: TrainingArguments, shares: int) -> Length:
        """Count. Raises ConfigError if neither the data set nor max_steps says how long it is."""
        per_step, size = args.gradient_accumulation_steps * shares, args.per_device_train_batch_size
        sampler, steps = loader.batch_sampler, args.max_steps
        if not isinstance(sampler, ShareOfBatches):
            if steps <= 0:
                raise ConfigError(
                    at("max_steps", steps), "the training data set has no length", "set max_steps"
                )
            batches, in_epoch, epochs = None, steps, sys.maxsize
        else:
            batches = len(sampler.batches)
            if not batches:
                what, fix = "it holds no whole batch", "use more samples or smaller batches"
                raise DataError("train_dataset", what, fix)
            in_epoch = math.ceil(batches / per_step)
            epochs = math.ceil(args.num_train_epochs if steps <= 0 else steps / in_epoch)
        samples: float = steps * per_step * size
        if steps <= 0:
            steps = math.ceil(args.num_train_epochs * in_epoch)
            samples = len(loader.dataset) * args.num_train_epochs  # type: ignore[arg-type]
        return cls(
            batches=batches,
            per_step=per_step,
            steps_per_epoch=in_epoch,
            epochs=epochs,
            steps=steps,
            samples=samples,
        )

    def done(self, step: int) -> int:
        """Batches of an epoch that its first ``step`` steps have read."""
        return step * self.per_step if self.batches is None else min(step * self.per_step, self.batches)

    def epoch(self, number: int, step: int) -> float:
        """What a Trainer logs as the epoch after so many steps of epoch ``number``."""
        whole = self.batches or self.steps * self.per_step
        return number + self.done(step) / whole


def default_collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """The collator of a Trainer that is given none."""
    plain: Callable[[list[Any]], Any] = default_data_collator
    is_tokenizer = isinstance(processing_class, PreTrainedTokenizerBase)
    return DataCollatorWithPadding(processing_class) if is_tokenizer else plain


def epoch(
    loader: DataLoader[Any], loading: Loading, number: int, *, skip: int = 0
) -> Iterator[Mapping[str, Any]]:
    """This rank's batches of epoch ``number``, without the first ``skip`` of those of all ranks."""
    batches, seed, place = loader.batch_sampler, loading.args.seed + number, skip + loading.index
    ordered = batches.sampler if isinstance(batches, ShareOfBatches) else loader.dataset
    if hasattr(ordered, "set_epoch"):
        ordered.set_epoch(number)
    if isinstance(batches, ShareOfBatches):
        batches.skip = skip
    with _drawing(seed):  # the seeds of workers
        source: Iterator[Any] = iter(loader)
    if not isinstance(batches, ShareOfBatches):
        source = islice(source, place, None, loading.shares)
    while True:
        with _drawing(hash((seed, place))):
            batch = next(source, None)
        if batch is None:
            return
        yield batch
        place += loading.shares


@contextmanager
def _drawing(seed: int) -> Iterator[None]:
    """Draw from ``seed`` inside, and outside as if nothing had been drawn inside."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - collators use it
    number = seed % (1 << 32)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.default_generator.manual_seed(number)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def micro_batch(batch: Mapping[str, Any], *, multiple: int, needs_labels: bool) -> MicroBatch:
    """A collator's batch as dsx takes it: labels shifted, a mask of padding left out.

    Args:
        batch: ``input_ids``, and any of ``labels``, ``attention_mask`` and ``position_ids``, int [B, S].
        multiple: The length is rounded up to a multiple of this, with tokens that nothing is trained on.
        needs_labels: Whether the batch must have labels.

    Raises:
        DataError: It has something that dsx cannot give to the model, named.
    """
    unknown = [name for name in batch if name not in _READ + _IMPLIED]
    if unknown:
        raise DataError(
            f"batch: {', '.join(unknown)}",
            "dsx gives a model input_ids, position_ids that restart, and labels, and nothing else",
            "leave it out of the data set, or out of what the collator returns",
        )
    if "input_ids" not in batch:
        raise DataError("batch", "it has no input_ids", "tokenise the data set")
    ids = torch.as_tensor(batch["input_ids"]).long()
    labels = _labels(batch, ids, needed=needs_labels)
    _check_mask(batch.get("attention_mask"), labels)
    positions = _positions(batch.get("position_ids"), ids)
    missing = -ids.shape[1] % multiple
    if missing:
        ids, labels = _longer(ids, missing, 0), _longer(labels, missing, IGNORED)
        if positions is not None:
            tail = torch.arange(missing).expand(ids.shape[0], -1)
            positions = torch.cat((positions, tail), 1)
    return MicroBatch(ids if positions is None else (ids, positions), labels)


def filler(multiple: int) -> MicroBatch:
    """A micro-batch that trains nothing, for a rank without one where others have one."""
    shape = (1, max(1, multiple))
    return MicroBatch(torch.zeros(shape, dtype=torch.long), torch.full(shape, IGNORED))


def _labels(batch: Mapping[str, Any], ids: Tensor, *, needed: bool) -> Tensor:
    """The label of each place: that of the next token, as models of transformers shift it themselves."""
    if batch.get("shift_labels") is not None:
        return torch.as_tensor(batch["shift_labels"]).long()
    labels = batch.get("labels")
    if labels is None:
        if needed:
            raise DataError(
                "batch",
                "it has no labels, so that there is no loss",
                "use a collator that makes them: DataCollatorForLanguageModeling(tokenizer, mlm=False)",
            )
        return torch.full_like(ids, IGNORED)
    return _longer(torch.as_tensor(labels).long()[:, 1:], 1, IGNORED)


def _check_mask(mask: Any, labels: Tensor) -> None:
    """Refuse a mask of other places than padding at the end, and labels of padding."""
    if mask is None:
        return
    mask = torch.as_tensor(mask)
    if mask.ndim != 2 or bool((mask[:, 1:] > mask[:, :-1]).any()):
        what = "it leaves out tokens that others follow" if mask.ndim == 2 else f"it has {mask.ndim} dims"
        raise DataError(
            "batch: attention_mask",
            f"{what}, and dsx's attention is causal, over whole documents",
            'pad at the end (tokenizer.padding_side = "right"), or give packs position_ids that restart',
        )
    if bool(((mask == 0) & (labels != IGNORED)).any()):
        raise DataError(
            "batch: labels",
            "padding has labels, which would be trained",
            "set them to -100 where the mask is 0",
        )


def _positions(given: Any, ids: Tensor) -> Tensor | None:
    """Positions that restart where a document begins; None if there is one document per row."""
    if given is None:
        return None
    positions = torch.as_tensor(given).long()
    steps = positions[:, 1:] - positions[:, :-1]
    if positions.shape != ids.shape or bool(
        (positions[:, 0] != 0).any() or ((steps != 1) & (positions[:, 1:] != 0)).any()
    ):
        raise DataError(
            "batch: position_ids",
            "they do not count from 0 in every document",
            "leave them out, or let them restart at 0 where a document begins (DataCollatorWithFlattening)",
        )
    return positions if bool((steps != 1).any()) else None


def _longer(values: Tensor, by: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, by), value=fill)


def tokens_in(
    batches: Iterable[Mapping[str, Any]], padding: int | None = None, *, all_of: bool = True
) -> int:
    """Tokens of the batches, padding included unless ``all_of`` is False.

    What is padding says the mask; without one, it is the id ``padding``.
    """
    count = 0
    for batch in batches:
        ids, mask = torch.as_tensor(batch["input_ids"]), batch.get("attention_mask")
        if all_of or (mask is None and padding is None):
            count += ids.numel()
        else:
            there = ids.ne(padding or 0) if mask is None else torch.as_tensor(mask)
            count += int(there.sum())
    return count
