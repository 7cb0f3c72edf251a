"""Optimizers that ZeRO makes anew or beside the one it was given, whose settings then go unread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer


@contextmanager
def given_optimizer_kept() -> Iterator[None]:
    """Inside the block, ZeRO steps the optimizer that it is given.

    ZeRO-1 to 3 make torch's Adagrad anew, over their fp32 partitions, in one parameter group with the
    defaults (stage_1_and_2.py:947, stage3.py:1358). Schedules and users hold on to the first one, so that its
    learning rate would never reach a weight; the settings of each group would be lost, and with a second
    group the step fails. The groups of the first one have their fp32 partitions by then; all that it lacks
    are the states of those.
    """
    kinds = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    originals = [kind.initialize_optimizer_states for kind in kinds]
    for kind, original in zip(kinds, originals, strict=True):
        kind.initialize_optimizer_states = _keeping(original)
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.initialize_optimizer_states = original


def _keeping(initialize_states: Callable[[Any], None]) -> Callable[[Any], None]:
    def initialize(wrapper: Any) -> None:
        given = wrapper.optimizer
        initialize_states(wrapper)
        made = wrapper.optimizer
        if made is not given:
            given.state, wrapper.optimizer = made.state, given

    return initialize


def share_groups(wrapper: Any) -> None:
    """Have the second optimizer of a partly offloaded ZeRO-3 follow the first one's settings.

    It steps what stays on the GPU (``offload_optimizer.ratio``), and its first group is a copy, which no
    schedule reaches (stage3.py:317). Both may have the same groups: each step puts its parameters into them
    and takes them out again (stage3.py, _optimizer_step).
    """
    second = getattr(wrapper, "backup_optimizer", None)
    if second is not None:
        second.param_groups.clear()
        second.state.clear()
        for group in wrapper.optimizer.param_groups:
            second.add_param_group(group)
