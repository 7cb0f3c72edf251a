"""How many steps a Trainer's data set and arguments make."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader
from transformers import TrainingArguments

from dsx.config.wording import at
from dsx.errors import ConfigError, DataError
from dsx.trainer.batches import ShareOfBatches


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """How long a training is, as transformers' Trainer counts it in one process of as large batches.

    Attributes:
        batches: Batches of an epoch, over all data-parallel ranks; None if nobody knows.
        per_step: Batches of a step, over all of them.
        steps_per_epoch: Optimizer steps of an epoch.
        epochs: Epochs that are begun.
        steps: Optimizer steps in all.
        samples: Samples in all.
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
