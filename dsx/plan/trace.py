"""A training step as it ran: start and end of every action on every pipeline rank, by one clock."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dsx.errors import ScheduleError
from dsx.plan.clocks import Rounds, offsets
from dsx.plan.simulate import Span, Timeline
from dsx.plan.validate import validate
from dsx.spec.schedule import TRANSFERS, Action, Schedule

_FORMAT, _VERSION = "dsx.trace", 1
_DIGITS = 9  # nanoseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One rank's step, by its own clock.

    Attributes:
        spans: Every action with its start and end in seconds, in the order in which they ran.
        end: When the whole step had ended, the optimizer's part included.
        rounds: For :func:`dsx.plan.clocks.offsets`.
        machine: What the clock belongs to; empty if unknown.
        error_seconds: How far the times can be from the clock that ``rounds`` were read from: nothing unless
            a device took them.
    """

    spans: tuple[Span, ...]
    end: float
    rounds: Rounds
    machine: str = ""
    error_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A training step of one pipeline.

    Attributes:
        schedule: What ran: the actions of every rank, transfers included.
        spans: Per rank, every action of its row with start and end. Seconds, 0 is the start of the first
            computation.
        step: Number of the step, from 1.
        tail_seconds: Per rank, from its last action to the end of the step: sends that were still under way,
            gradients reduced and parameters updated.
        clock_error_seconds: Per rank, how far its times can be from rank 0's.
        device: What it ran on.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    step: int
    tail_seconds: tuple[float, ...]
    clock_error_seconds: tuple[float, ...]
    device: str = ""

    @classmethod
    def of(cls, schedule: Schedule, records: Sequence[Record], *, step: int, device: str = "") -> Trace:
        """The ranks' records by rank 0's clock.

        A wait for a first message that began before the first computation counts from there.

        Args:
            schedule: What ran, lowered.
            records: One per pipeline rank.
            step: Number of the step, from 1.
            device: What it ran on.

        Raises:
            ScheduleError: A record that is not its rank's row.
        """
        apart = offsets([record.rounds for record in records], [record.machine for record in records])
        ahead = [offset.seconds for offset in apart]
        origin = min(
            start - by
            for record, by in zip(records, ahead, strict=True)
            for action, start, _ in record.spans
            if action.op not in TRANSFERS
        )
        spans, tails = [], []
        for record, by in zip(records, ahead, strict=True):
            zero = origin + by
            row = tuple((a, max(0.0, start - zero), max(0.0, end - zero)) for a, start, end in record.spans)
            spans.append(row)
            tails.append(record.end - zero - row[-1][2])
        errors = (
            offset.error_seconds + record.error_seconds for offset, record in zip(apart, records, strict=True)
        )
        return cls(
            schedule=schedule,
            spans=tuple(spans),
            step=step,
            tail_seconds=tuple(tails),
            clock_error_seconds=tuple(errors),
            device=device,
        )

    def __post_init__(self) -> None:
        where = f"trace of step {self.step}"
        for rank, (row, spans) in enumerate(zip(self.schedule.rows, self.spans, strict=True)):
            ran = tuple(action for action, _, _ in spans)
            if ran != row:
                at = next((i for i, pair in enumerate(zip(ran, row, strict=False)) if pair[0] != pair[1]), -1)
                what = f"{ran[at]} in place of {row[at]}" if at >= 0 else f"{len(ran)} actions of {len(row)}"
                raise ScheduleError(f"{where}, rank {rank}", f"it has {what}", "record the step again")
            time = 0.0
            for action, start, end in spans:
                # Written so that it also fails on NaN; the slack is what rounding in files takes.
                if not time - 1e-8 <= start <= end < math.inf:
                    raise ScheduleError(
                        f"{where}, rank {rank}",
                        f"{action} from {start:g} to {end:g} s overlaps what came before it, at {time:g} s",
                        "record the step again",
                    )
                time = end

    @property
    def timeline(self) -> Timeline:
        """The actions that compute."""
        return Timeline(tuple(tuple(s for s in row if s[0].op not in TRANSFERS) for row in self.spans))

    @property
    def after_seconds(self) -> float:
        """From the last computation of all to the end of the step on the last rank."""
        ends = (row[-1][2] + tail for row, tail in zip(self.spans, self.tail_seconds, strict=True))
        return max(ends) - self.timeline.seconds

    def to_json(self) -> str:
        """One JSON object, a line per rank; times in seconds."""
        schedule = self.schedule
        ranks = (
            {
                "tail_seconds": round(tail, _DIGITS),
                "clock_error_seconds": round(error, _DIGITS),
                "actions": [[str(a), round(start, _DIGITS), round(end, _DIGITS)] for a, start, end in row],
            }
            for row, tail, error in zip(self.spans, self.tail_seconds, self.clock_error_seconds, strict=True)
        )
        head = {
            "format": _FORMAT,
            "version": _VERSION,
            "step": self.step,
            "device": self.device,
            "schedule": schedule.name,
            "chunks": schedule.num_chunks,
            "micro_batches": schedule.num_micro_batches,
            "placement": schedule.placement,
        }
        opening = json.dumps(head)[:-1]
        return f'{opening}, "ranks": [\n' + ",\n".join(map(json.dumps, ranks)) + "\n]}\n"

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Trace:
        """Read what :meth:`to_json` wrote.

        Args:
            text: The JSON.
            where: What errors call it, its file say.

        Raises:
            ScheduleError: It is something else, of another version, or no step that can have run.
        """
        fix = "give a step*.json that dsx.train.trace_steps or Trace.to_json wrote"
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScheduleError(where, f"not JSON ({error})", fix) from None
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ScheduleError(where, f'not a trace: it has no "format": "{_FORMAT}"', fix)
        if data.get("version") != _VERSION:
            raise ScheduleError(
                where,
                f"version {data.get('version')!r} of the format; this dsx reads version {_VERSION}",
                "use the dsx that wrote it, or record the step again",
            )
        try:
            trace = cls(**_fields(data))
            validate(trace.schedule)
        except ScheduleError as error:
            raise ScheduleError(where, f"{error.where}: {error.what}", fix) from None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ScheduleError(where, f"damaged: {type(error).__name__} {error}", fix) from None
        return trace


def computation(schedule: Schedule) -> Schedule:
    """The schedule without its transfers."""
    rows = tuple(tuple(action for action in row if action.op not in TRANSFERS) for row in schedule.rows)
    return replace(schedule, rows=rows)


def _fields(data: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of :class:`Trace`; KeyError, TypeError or ValueError for a damaged file."""
    spans = tuple(tuple(_spans(rank["actions"])) for rank in data["ranks"]) or ((),)
    if data["placement"] not in ("loop", "v") or not all(spans):
        raise ValueError("its placement or a row of actions")
    # Each virtual stage runs each micro-batch at least once.
    if len(spans) * int(data["chunks"]) * int(data["micro_batches"]) > sum(map(len, spans)):
        raise ValueError("it has fewer actions than its chunks and micro-batches take")
    return {
        "schedule": Schedule(
            name=str(data["schedule"]),
            num_ranks=len(spans),
            num_chunks=int(data["chunks"]),
            num_micro_batches=int(data["micro_batches"]),
            rows=tuple(tuple(action for action, _, _ in row) for row in spans),
            placement=data["placement"],
        ),
        "spans": spans,
        "step": int(data["step"]),
        "tail_seconds": tuple(float(rank["tail_seconds"]) for rank in data["ranks"]),
        "clock_error_seconds": tuple(float(rank["clock_error_seconds"]) for rank in data["ranks"]),
        "device": str(data["device"]),
    }


def _spans(actions: Sequence[Any]) -> Iterator[Span]:
    for name, start, end in actions:
        yield Action.parse(name), float(start), float(end)
