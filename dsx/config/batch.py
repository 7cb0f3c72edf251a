"""DeepSpeed's three batch keys, resolved as DeepSpeed does for a data-parallel degree."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dsx.config.wording import at
from dsx.errors import ConfigError

TRAIN = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
_SHOWN_TRIPLES = 3


MOST_ACCUMULATION = 1 << 17
"""The most micro-batches of a step, each of which is an action in every rank's schedule."""


@dataclass(frozen=True, slots=True, order=True)
class Batch:
    """Sizes of one optimizer step, in sequences; ``accumulation`` counts micro-batches."""

    train: int
    micro: int
    accumulation: int

    def keys(self) -> dict[str, int]:
        return {TRAIN: self.train, MICRO: self.micro, ACCUMULATION: self.accumulation}

    def __str__(self) -> str:
        return f"{TRAIN} {self.train} = {MICRO} {self.micro} x {ACCUMULATION} {self.accumulation}"


def resolve_batch(config: Mapping[str, Any], dp: int, sharing: int = 1) -> Batch:
    """The batch triple for ``dp`` data-parallel ranks, or groups of ``sharing`` that read the same rows.

    As in DeepSpeed (runtime/config.py, _set_batch_related_parameters), two keys give the third, and a batch
    size alone means accumulation 1.
    """
    batch = _resolved(config, dp, sharing)
    if batch.accumulation > MOST_ACCUMULATION:
        raise ConfigError(
            str(batch),
            f"a step has at most {MOST_ACCUMULATION:,} micro-batches",
            f"use a larger {MICRO}, or a smaller {TRAIN}",
        )
    return batch


def _resolved(config: Mapping[str, Any], dp: int, sharing: int) -> Batch:
    given = {key: config[key] for key in (TRAIN, MICRO, ACCUMULATION) if config.get(key) is not None}
    for key, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(at(key, value), "not a whole number of at least 1", "use 1 or more, unquoted")
    train, micro, accumulation = (given.get(key) for key in (TRAIN, MICRO, ACCUMULATION))
    if train is None and micro is None:
        said = f"only {at(ACCUMULATION, accumulation)} is given" if accumulation else "no batch size is given"
        raise ConfigError(MICRO, said, f"write {MICRO} and {ACCUMULATION}, for example 2 and 8")
    if accumulation is None and (train is None or micro is None):
        accumulation = 1
    if train is None:
        assert micro is not None
        assert accumulation is not None
        return Batch(micro * accumulation * dp, micro, accumulation)
    if micro is None:
        assert accumulation is not None
        micro = train // (accumulation * dp)
    elif accumulation is None:
        accumulation = train // (micro * dp)
    if train == micro * accumulation * dp:
        return Batch(train, micro, accumulation)
    shared = f" ({sharing} context-parallel ranks share rows and count once)" if sharing > 1 else ""
    raise ConfigError(
        ", ".join(at(key, value) for key, value in given.items()),
        f"{TRAIN} is not {MICRO} x {ACCUMULATION} x {dp} data-parallel ranks{shared}",
        "the nearest that fit are " + "; ".join(f"{batch} x {dp}" for batch in _nearest(given, train, dp)),
    )


def _nearest(given: Mapping[str, int], train: int, dp: int) -> list[Batch]:
    """Legal triples that change few of the given keys, and change them little."""

    def change(batch: Batch) -> tuple[int, float]:
        new = batch.keys()
        off = [max(new[key], old) / min(new[key], old) - 1 for key, old in given.items()]
        return sum(ratio > 0 for ratio in off), sum(off)

    return sorted(set(_candidates(given, train, dp)), key=lambda b: (change(b), b))[:_SHOWN_TRIPLES]


def _candidates(given: Mapping[str, int], train: int, dp: int) -> Iterator[Batch]:
    micro, accumulation = given.get(MICRO), given.get(ACCUMULATION)
    if micro and accumulation:
        yield Batch(micro * accumulation * dp, micro, accumulation)
    for fixed, is_micro in ((micro, True), (accumulation, False)):
        # Keep one factor and round the other down and up; with neither given, the micro-batch takes all.
        kept = fixed or 1
        for other in {max(1, train // (kept * dp)), -(-train // (kept * dp))}:
            pair = (kept, other) if is_micro else (other, kept)
            yield Batch(kept * other * dp, *pair)
    if train % dp == 0:
        per_rank = train // dp
        for factor in range(1, min(math.isqrt(per_rank), MOST_ACCUMULATION) + 1):
            if per_rank % factor == 0:
                yield Batch(train, factor, per_rank // factor)
                yield Batch(train, per_rank // factor, factor)
