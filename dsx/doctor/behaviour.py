"""What one config does differently under a newer DeepSpeed, for ``dsx check --from-version``.

Read out of DeepSpeed's releases 0.8.3 to 0.19.8; keys that came, went or were renamed are in the reference
(``since``, ``until``), and other checks report those that the newer version refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from dsx.doctor.context import Context
from dsx.doctor.finding import ABSENT, Edit, Finding, Path
from dsx.doctor.key import Version, shown, version


@dataclass(frozen=True, slots=True)
class Change:
    """One change of behaviour.

    Attributes:
        since: First version that behaves in the new way.
        name: Dotted key that it is about.
        applies: Whether a config sees it.
        what: The change: old, then new.
        old: Value that brings the old behaviour back.
    """

    since: str
    name: str
    applies: Callable[[Context], bool]
    what: str
    old: Any


def _left_out(name: str) -> Callable[[Context], bool]:
    return lambda context: context.at(tuple(name.split("."))) is ABSENT


def _offload_unpinned(what: str) -> Callable[[Context], bool]:
    left_out = _left_out(f"zero_optimization.offload_{what}.pin_memory")
    return lambda context: context.offloads(what) and left_out(context)


def _warmup_lr(context: Context) -> bool:
    left_out = _left_out("scheduler.params.warmup_max_lr")(context)
    return context.text("scheduler.type") == "WarmupLR" and left_out


def _checks_overflow(context: Context) -> bool:
    return context.is_on("bf16.enabled") and _left_out("bf16.check_grad_overflow")(context)


CHANGES: Final = (
    Change(
        "0.15.2",
        "steps_per_print",
        _left_out("steps_per_print"),
        "left out, it printed progress every 10 steps; now it prints nothing",
        10,
    ),
    Change(
        "0.17.2",
        "scheduler.params.warmup_max_lr",
        _warmup_lr,
        "left out, WarmupLR ended at 0.001; now it ends at the optimizer's learning rate",
        1e-3,
    ),
    Change(
        "0.19.3",
        "gradient_clipping",
        _left_out("gradient_clipping"),
        "left out, gradients were not clipped; now they are clipped to a norm of 1.0",
        0,
    ),
    Change(
        "0.19.3",
        "bf16.check_grad_overflow",
        _checks_overflow,
        "left out, a step with inf or nan gradients was taken; now it is skipped",
        False,
    ),
    Change(
        "0.19.5",
        "zero_optimization.offload_optimizer.pin_memory",
        _offload_unpinned("optimizer"),
        "left out, host memory was pageable; now it is pinned: faster, and it cannot be swapped out",
        False,
    ),
    Change(
        "0.19.5",
        "zero_optimization.offload_param.pin_memory",
        _offload_unpinned("param"),
        "left out, host memory was pageable; now it is pinned: faster, and it cannot be swapped out",
        False,
    ),
)


def changes(context: Context, old: Version) -> Iterator[Finding]:
    """A warning for each change between ``old`` and the version of ``context`` that this config sees.

    Its edit is safe in that it keeps what the config does under ``old``.
    """
    for change in sorted(CHANGES, key=lambda change: version(change.since)):
        since = version(change.since)
        if not old < since <= context.version or not change.applies(context):
            continue
        path: Path = tuple(change.name.split("."))
        fix = f'write "{path[-1]}": {_word(change.old)} for the behaviour of {shown(old)}, or leave it'
        why = f"since {change.since}: {change.what}"
        yield context.find("behaviour", "warning", path, why, fix, Edit("set", path, change.old), safe=True)


def _word(value: object) -> str:
    return {False: "false", True: "true"}[value] if isinstance(value, bool) else f"{value:g}"
