"""Records when each rank did what in training steps, by one clock and without a wait inside the step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from dsx.checkpoint import store
from dsx.engine.executor import Around
from dsx.errors import ConfigError
from dsx.launch.entry import boot_id
from dsx.parallel.groups import Groups
from dsx.schedules.schedule import Action, Schedule
from dsx.schedules.simulate import Span

if TYPE_CHECKING:  # loaded by the runs that record a step
    from dsx.schedules.trace import Comparison, RankTrace, Rounds, Trace

_ROUNDS = 8


class HostClock:
    """``time.perf_counter``: takes marks while a step runs, and tells their times once it has run.

    Attributes:
        error_seconds: How far what :meth:`seconds` gives can be from ``time.perf_counter``.
    """

    error_seconds = 0.0

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, marks: list[float]) -> list[float]:
        return marks


class StreamClock:
    """Events on the accelerator's current stream: the host never waits for them before the end.

    Args:
        accelerator: DeepSpeed's accelerator, or what has its ``Event`` and ``synchronize``.
    """

    def __init__(self, accelerator: Any) -> None:
        self._new_event: Callable[..., Any] = accelerator.Event
        accelerator.synchronize()
        before = time.perf_counter()
        self._origin = self.mark()
        self._origin.synchronize()
        after = time.perf_counter()
        self._origin_seconds, self.error_seconds = (before + after) / 2, (after - before) / 2

    def mark(self) -> Any:
        """An event, reached when all work before it is done."""
        event = self._new_event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: list[Any]) -> list[float]:
        """Summed from event to event: one distance is a float32 in milliseconds, too coarse for minutes."""
        found, now, last = [], self._origin_seconds, self._origin
        for event in marks:
            event.synchronize()
            now += max(0.0, last.elapsed_time(event)) / 1e3
            found.append(now)
            last = event
        return found


Clock = HostClock | StreamClock


class Recorder:
    """Marks the start and end of every action of one step on one rank."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._actions: list[Action] = []
        self._marks: list[Any] = []

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        """Entered around every action by :class:`dsx.engine.executor.StepRun`."""
        self._actions.append(action)
        self._marks.append(self._clock.mark())
        yield
        self._marks.append(self._clock.mark())

    def finish(self, rounds: Rounds) -> RankTrace:
        from dsx.schedules.trace import RankTrace

        *times, end = self._clock.seconds([*self._marks, self._clock.mark()])
        spans: list[Span] = list(zip(self._actions, times[::2], times[1::2], strict=True))
        return RankTrace(
            spans=tuple(spans),
            end=end,
            rounds=rounds,
            machine=boot_id(),
            error_seconds=self._clock.error_seconds,
        )


class Tracer:
    """The steps of an engine that are recorded, and where their traces go."""

    def __init__(self, groups: Groups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        cuda = device.type == "cuda"
        self._device_name = torch.cuda.get_device_name(device) if cuda else device.type.upper()
        self._wanted: dict[int, list[list[Trace]]] = {}

    def expect(self, steps: int | Iterable[int], *, done: int) -> list[Trace]:
        """Record when each rank runs each action. Every rank calls it alike.

        Args:
            steps: How many of the next steps, or their numbers (``global_steps`` after them, from 1). The
                first step of a run says little: it also sets things up.
            done: Steps that are over.

        Returns:
            A list that gets a :class:`~dsx.schedules.trace.Trace` at the end of each of these steps: on the
            rank 0 of all, of its own pipeline; on other ranks it stays empty. Ranks agree on the time as well
            as the trace's ``clock_error_seconds`` say: on one Linux machine they read the same clock.

        Raises:
            ConfigError: No step, or one that is over.
        """
        numbers = list(range(done + 1, done + 1 + steps) if isinstance(steps, int) else steps)
        late = [number for number in numbers if number <= done]
        if late or not numbers:
            raise ConfigError(
                f"trace(steps={steps})",
                f"step {late[0]} is over" if late else "no step to record",
                f"give a number of steps, or steps from {done + 1} on",
            )
        traces: list[Trace] = []
        for number in dict.fromkeys(numbers):
            self._wanted.setdefault(number, []).append(traces)
        return traces

    @contextmanager
    def step(self, number: int, schedule: Schedule) -> Iterator[Around | None]:
        """Entered around step ``number``; gives what to enter around its actions, None without recording."""
        wanted = self._wanted.pop(number, None)
        if wanted is None:
            yield None
            return
        clock: Clock = HostClock() if self._device.type == "cpu" else StreamClock(get_accelerator())
        rounds = time_rounds(self._groups.pipe, self._device)
        recorder = Recorder(clock)
        yield recorder.around
        records = self._gather(recorder.finish(rounds))
        if records:
            from dsx.schedules.trace import Trace

            trace = Trace.of(schedule, records, step=number, device=self._device_name)
            for traces in wanted:
                traces.append(trace)

    def _gather(self, record: RankTrace) -> list[RankTrace]:
        """Records of the pipeline that rank 0 is in, on its first rank; nothing elsewhere."""
        groups = self._groups
        if groups.pipe_peer(0):
            return []
        records: list[Any] = [None] * groups.mesh.pp
        first = groups.pp_rank == 0
        dist.gather_object(record, records if first else None, dst=groups.pipe_peer(0), group=groups.pipe)
        return records if first else []


def time_rounds(group: dist.ProcessGroup, device: torch.device) -> Rounds:
    """The clock before and after some all-gathers; also brings the ranks of ``group`` to one start."""
    mine = torch.zeros(1, device=device)
    theirs = [torch.zeros_like(mine) for _ in range(dist.get_world_size(group))]
    rounds = []
    for _ in range(_ROUNDS):
        before = time.perf_counter()
        dist.all_gather(theirs, mine, group=group)
        theirs[-1].item()  # a GPU's collective has only been asked for so far
        rounds.append((before, time.perf_counter()))
    return tuple(rounds)


def write(comparison: Comparison, folder: Path) -> Path:
    """Write ``step<N>.json``, ``.html`` and ``.perfetto.json``, each at once.

    Returns:
        The page.

    Raises:
        CheckpointError: ``folder`` cannot be made or written.
    """
    from dsx.schedules.timeline import comparison_page, comparison_trace

    trace = comparison.trace
    store.require_writable(folder)
    page = folder / f"step{trace.step}.html"
    for path, text in (
        (folder / f"step{trace.step}.json", trace.to_json()),
        (folder / f"step{trace.step}.perfetto.json", comparison_trace(comparison)),
        (page, comparison_page(comparison)),
    ):
        store.write_atomically(path, text.encode())
    return page
