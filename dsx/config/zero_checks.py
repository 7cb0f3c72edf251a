"""Checks of the ``dsx.zero`` block against DeepSpeed's ZeRO stage."""

from __future__ import annotations

from collections.abc import Iterator

from dsx.config.problems import at
from dsx.config.schema import ZeroConfig
from dsx.errors import ConfigError


def zero_problems(zero: ZeroConfig, stage: int) -> Iterator[ConfigError]:
    """Settings that would have no effect at this ZeRO stage."""
    if zero.reduce == "micro_batch" and stage != 2:
        yield ConfigError(
            at("dsx.zero.reduce", zero.reduce),
            "only zero_optimization.stage = 2 has the choice: below, gradients are reduced once per step, "
            "and stage 3 reduces them after every micro-batch",
            'use "step", or ZeRO stage 2',
        )
    if zero.keep_gathered_bytes and stage != 3:
        yield ConfigError(
            at("dsx.zero.keep_gathered_bytes", zero.keep_gathered_bytes),
            f"zero_optimization.stage = {stage} leaves parameters whole: there is nothing to gather",
            "use 0, or ZeRO stage 3",
        )
