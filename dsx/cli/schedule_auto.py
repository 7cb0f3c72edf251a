"""``dsx schedule auto``: what may be chosen for measured layers, ranked."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsx.errors import ConfigError
from dsx.plan.builders import NAMES
from dsx.plan.choose import Choice, Ranking, Space, choose, gib
from dsx.plan.profile import Profile
from dsx.plan.simulate import Costs, Seconds

if TYPE_CHECKING:
    from dsx.spec.schedule import Schedule

_MOST_ROWS = 12
_PICTURES = ("svg", "html")
_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the command line fixes; None is open.

    Attributes:
        name: A schedule, or auto.
        profile: File of measured costs.
        stages: Pipeline ranks.
        micro_batches: Per step.
        chunks: Virtual stages per rank.
        group_size: As :class:`dsx.plan.builders.Options`.
        warmup: The same.
        activation_gib: Most activations on a rank.
        wire: Time of a transfer in forwards, which a profile knows better.
    """

    name: str
    profile: Path | None
    stages: int | None
    micro_batches: int | None
    chunks: int | None
    group_size: int | None
    warmup: int | None
    activation_gib: float | None
    wire: float


def ranking_text(wanted: Wanted, style: str, draw: Callable[[Schedule, Costs], str]) -> str:
    """The ranking as a table or JSON; in other styles the chosen schedule, drawn with its measured costs.

    Args:
        wanted: The command line.
        style: Of the command's --format.
        draw: Draws a schedule in that style, pictures in milliseconds.

    Raises:
        ConfigError: An option is missing or has no meaning here, or the profile cannot be read.
        ScheduleError: Nothing can be chosen.
    """
    profile, ranking = rank(wanted)
    if style == "table":
        return _table(profile, ranking)
    if style == "json":
        return json.dumps(_facts(ranking), indent=2) + "\n"
    costs = ranking.chosen.cut.program.options.costs
    assert costs is not None
    return draw(ranking.chosen.cut.schedule, _in_milliseconds(costs) if style in _PICTURES else costs)


def rank(wanted: Wanted) -> tuple[Profile, Ranking]:
    """Rank what the command line leaves open, every measured way of recomputing included."""
    if wanted.profile is None:
        where = "dsx schedule auto" if wanted.name == "auto" else "--activation-gib"
        raise ConfigError(
            where,
            "nothing is measured that it could go by",
            "give --profile: a run with dsx.profile = measure writes profile.json to its output",
        )
    if wanted.stages is None or wanted.micro_batches is None:
        missing = "--stages" if wanted.stages is None else "--micro-batches"
        raise ConfigError(missing, "it is needed with --profile", f"give {missing} N")
    if wanted.wire:
        raise ConfigError(
            f"--wire {wanted.wire:g}", "the profile says what transfers take", "leave one of them out"
        )
    if wanted.name not in ("auto", *NAMES):
        raise ConfigError(
            f"schedule {wanted.name!r}", "not one to choose", f"use auto or one of {', '.join(NAMES)}"
        )
    try:
        text = wanted.profile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"--profile {wanted.profile}", reason, "give a profile.json") from None
    profile, cap = Profile.from_json(text, name=str(wanted.profile)), wanted.activation_gib
    space = Space(
        names=NAMES if wanted.name == "auto" else (wanted.name,),
        chunks=None if wanted.chunks is None else (wanted.chunks,),
        group_size=wanted.group_size,
        warmup_per_rank=wanted.warmup,
        recompute=tuple(profile.layers),
        most_bytes=None if cap is None else int(cap * _GIB),
    )
    return profile, choose(
        profile, num_ranks=wanted.stages, num_micro_batches=wanted.micro_batches, space=space
    )


def _in_milliseconds(costs: Costs) -> Costs:
    def scaled(value: Seconds | None) -> Seconds | None:
        if isinstance(value, tuple):
            return tuple(1000 * seconds for seconds in value)
        return None if value is None else 1000 * value

    forward = scaled(costs.forward_seconds)
    assert forward is not None
    return Costs(
        forward_seconds=forward,
        backward_seconds=scaled(costs.backward_seconds),
        backward_input_seconds=scaled(costs.backward_input_seconds),
        backward_weight_seconds=scaled(costs.backward_weight_seconds),
        transfer_seconds=1000 * costs.transfer_seconds,
    )


def _table(profile: Profile, ranking: Ranking) -> str:
    rows = [("", "step", "bubble", "activations", "layers per virtual stage")]
    rows.append((ranking.chosen.label, *_figures(ranking.chosen), _layers(ranking.chosen)))
    rows += [(c.label, *_figures(c), ranking.reason(c)) for c in ranking.next_best(_MOST_ROWS)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in (1, 2, 3)), row[4]]).rstrip()
        for row in rows
    ]
    left = len(ranking.others) - (len(rows) - 2)
    if left:
        lines.append(f"and {left} more (--format json)")
    conditions = profile.conditions
    lines.append(
        f"measured on {conditions.device}, {conditions.precision}, micro-batches of "
        f"{conditions.micro_batch_size}"
        + ("; transfers were not, and count as free" if profile.bytes_per_second is None else "")
    )
    return "\n".join(lines) + "\n"


def _figures(choice: Choice) -> tuple[str, str, str]:
    return f"{1000 * choice.cut.step_seconds:.4g} ms", f"{choice.cut.bubble:.1%}", gib(choice.peak_bytes)


def _layers(choice: Choice) -> str:
    stages = choice.cut.stage_map
    return " ".join(str(len(stages.layers(stage))) for stage in range(stages.num_stages))


def _facts(ranking: Ranking) -> dict[str, Any]:
    return {
        "chosen": _choice(ranking.chosen),
        "others": [_choice(c) | {"reason": ranking.reason(c)} for c in ranking.others],
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {
        "schedule": choice.cut.program.name,
        "chunks": choice.cut.stage_map.num_chunks,
        "group_size": choice.options.group_size,
        "warmup": choice.options.warmup_per_rank,
        "recompute": choice.recompute,
        "stage_bounds": list(choice.cut.stage_map.bounds),
        "step_seconds": choice.cut.step_seconds,
        "bubble_over_ideal": choice.cut.bubble,
        "activation_bytes": list(choice.cut.peak_bytes),
    }
