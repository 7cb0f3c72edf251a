"""All rows of the reference."""

from __future__ import annotations

from typing import Final

from dsx.doctor.key import Block, Key
from dsx.doctor.reference import (
    data,
    former,
    offload,
    optimizers,
    parallel,
    precision,
    reports,
    schedulers,
    top,
    training,
    tuning,
    zero,
)

KEYS: Final[tuple[Key, ...]] = (
    *top.KEYS,
    *optimizers.KEYS,
    *schedulers.KEYS,
    *precision.KEYS,
    *zero.KEYS,
    *offload.KEYS,
    *training.KEYS,
    *parallel.KEYS,
    *reports.KEYS,
    *data.KEYS,
    *tuning.KEYS,
    *former.KEYS,
)
BLOCKS: Final[tuple[Block, ...]] = (
    *top.BLOCKS,
    *optimizers.BLOCKS,
    *schedulers.BLOCKS,
    *precision.BLOCKS,
    *zero.BLOCKS,
    *offload.BLOCKS,
    *training.BLOCKS,
    *parallel.BLOCKS,
    *reports.BLOCKS,
    *data.BLOCKS,
    *tuning.BLOCKS,
)
