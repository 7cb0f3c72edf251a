"""Micro-batches of one data-parallel rank, in an order that no layout changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import torch

from dsx.errors import DataError
from dsx.runtime.data.corpus import Sequences
from dsx.runtime.data.order import keyed_hash, permute

MicroBatch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and labels, both int64 [B, S]."""


class Batches:
    """Endless training micro-batches of one data-parallel rank.

    Global sample ``g`` is sequence ``permute(g % n)`` of epoch ``g // n``, n sequences an epoch; the
    permutation follows from the seed and the epoch. The ranks' next micro-batches take the next ``dp * B``
    samples: rank ``d`` rows ``d * B`` to ``(d + 1) * B`` of them. So step ``t`` covers samples ``t * G`` to
    ``(t + 1) * G`` with ``G = B * accumulation * dp``, whatever the layout.

    Args:
        sequences: Training sequences.
        micro_batch_size: B.
        accumulation: Micro-batches per optimizer step.
        dp: Data-parallel degree.
        dp_rank: This rank's place in it.
        seed: Seed of the order.
        cursor: First global sample, as a checkpoint stored it.

    Raises:
        DataError: Fewer sequences than one optimizer step takes, or a cursor that no micro-step begins at.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        micro_batch_size: int,
        accumulation: int,
        dp: int,
        dp_rank: int,
        seed: int,
        cursor: int = 0,
    ) -> None:
        global_batch = micro_batch_size * accumulation * dp
        if len(sequences) < global_batch:
            raise DataError(
                "train_batch_size",
                f"one step takes {global_batch} sequences ({micro_batch_size} per micro-batch x "
                f"{accumulation} micro-batches x {dp} data-parallel ranks), the training text has "
                f"{len(sequences)} of {sequences.sequence_length} tokens",
                "use more text, a smaller batch or a smaller dsx.data.sequence_length",
            )
        self._sequences = sequences
        self._rows = micro_batch_size
        self._dp, self._dp_rank = dp, dp_rank
        self._seed = seed
        self.cursor = cursor

    @property
    def cursor(self) -> int:
        """Next global sample of the whole job, the same on ranks that have taken as many micro-batches."""
        return self._cursor

    @cursor.setter
    def cursor(self, value: int) -> None:
        step = self._rows * self._dp
        if value < 0 or value % step:
            raise DataError(
                f"data cursor {value}",
                f"no micro-batch begins there with {self._rows} sequences x {self._dp} data-parallel ranks",
                f"resume with micro-batch size x data parallelism dividing {value}",
            )
        self._cursor = value

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> MicroBatch:
        first = self._cursor + self._dp_rank * self._rows
        rows = [self._window(sample) for sample in range(first, first + self._rows)]
        self._cursor += self._rows * self._dp
        return _micro_batch(rows)

    def _window(self, sample: int) -> torch.Tensor:
        epoch, place = divmod(sample, len(self._sequences))
        key = keyed_hash("train", self._seed, epoch)
        return self._sequences.window(permute(place, len(self._sequences), key))


class EvaluationBatches:
    """The same held-out micro-batches at every evaluation, as many on every data-parallel rank.

    They are a prefix of one fixed shuffle of the held-out sequences, so that a short evaluation samples the
    whole split, and layouts that divide alike evaluate the same sequences.

    Args:
        sequences: Held-out sequences.
        micro_batch_size: B.
        dp: Data-parallel degree.
        dp_rank: This rank's place in it.
        max_tokens: Take about this many label tokens over all ranks, in whole micro-batches; None: all.
        multiple_of: The number of micro-batches per rank is a multiple of this (a pipeline's micro-batches
            per evaluation call).

    Raises:
        DataError: Too few held-out sequences for one (multiple of a) micro-batch on every rank.
    """

    def __init__(
        self,
        sequences: Sequences,
        *,
        micro_batch_size: int,
        dp: int,
        dp_rank: int,
        max_tokens: int | None = None,
        multiple_of: int = 1,
    ) -> None:
        unit = micro_batch_size * dp * multiple_of
        if len(sequences) < unit:
            raise DataError(
                "dsx.data.held_out",
                f"the held-out text has {len(sequences)} sequences of {sequences.sequence_length} tokens, "
                f"one evaluation takes {unit} ({micro_batch_size} per micro-batch x {multiple_of} "
                f"micro-batches x {dp} data-parallel ranks)",
                "hold out more, use more text, a smaller batch or a smaller dsx.data.sequence_length",
            )
        wanted = len(sequences)
        if max_tokens is not None:
            wanted = min(wanted, max(unit, max_tokens // sequences.sequence_length))
        self._sequences = sequences
        self._rows, self._dp, self._dp_rank = micro_batch_size, dp, dp_rank
        self._count = wanted // unit * multiple_of

    @property
    def num_sequences(self) -> int:
        """Sequences evaluated by all ranks together."""
        return self._count * self._rows * self._dp

    def __len__(self) -> int:
        """Micro-batches per rank."""
        return self._count

    def __iter__(self) -> Iterator[MicroBatch]:
        size, key = len(self._sequences), keyed_hash("evaluation")
        for number in range(self._count):
            first = (number * self._dp + self._dp_rank) * self._rows
            places = range(first, first + self._rows)
            yield _micro_batch([self._sequences.window(permute(place, size, key)) for place in places])


def _micro_batch(rows: list[torch.Tensor]) -> MicroBatch:
    tokens = torch.stack(rows)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
