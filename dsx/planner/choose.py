"""Chooses schedule, chunks, group size, warm-up, recompute and cut together, from measured costs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import product

from dsx.errors import DsxError, LayoutError, ScheduleError
from dsx.models.spec import Recompute
from dsx.planner.layout import Space
from dsx.planner.partition_search import LayerCut, SimulatedPipeline, shortest_cut
from dsx.planner.profile import RECOMPUTE, Profile
from dsx.schedules.builders import Options
from dsx.schedules.interleaved import groups
from dsx.schedules.program import Program
from dsx.terminal import amount

_WARMUPS = (1, 2, 3)
_SIMPLE = (
    *("1f1b", "gpipe", "zb_h1", "interleaved", "looped_bfs"),
    *("zbv", "interleaved_zb", "dualpipev", "v_half", "v_min"),
)
_TIE = 1.005  # Closer than measurements tell: the simpler one wins.
_GLANCE, _LOOK = 100_000, 4_000_000  # Actions to simulate per candidate, first and for the best few.
_FEW = 4


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to run the pipeline: a recompute mode, and a schedule with its cut."""

    recompute: Recompute
    cut: LayerCut

    @property
    def options(self) -> Options:
        return self.cut.program.options

    @property
    def peak_bytes(self) -> int:
        """Most activation bytes on any rank."""
        return max(self.cut.peak_bytes)

    @property
    def label(self) -> str:
        """In words, e.g. ``interleaved, 2 chunks, groups of 8, recompute full``."""
        parts = [self.cut.program.name]
        if self.cut.stage_map.num_chunks > 1:
            parts.append(f"{self.cut.stage_map.num_chunks} chunks")
        if self.options.group_size is not None:
            parts.append(f"groups of {self.options.group_size}")
        if self.options.warmup_per_rank is not None:
            parts.append(f"warm-up {self.options.warmup_per_rank}")
        if self.recompute != "none":
            parts.append(f"recompute {self.recompute}")
        return ", ".join(parts)

    @property
    def figures(self) -> str:
        return (
            f"step {1000 * self.cut.step_seconds:.4g} ms, bubble {self.cut.bubble:.1%}, "
            f"activations {amount(self.peak_bytes)} a rank"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The choice and its alternatives.

    Attributes:
        chosen: The choice with the shortest simulated step within the cap; of equal ones, the simplest.
        others: The best of every other schedule, number of chunks and recompute mode, those within the cap
            first, then by step.
    """

    chosen: Choice
    others: tuple[Choice, ...]
    most_bytes: int | None

    def next_best(self, most: int) -> tuple[Choice, ...]:
        """At most ``most`` of the others, for a person to read: by step, a third of them above the cap.

        Other ways of recomputing the same schedule are left out if they are within the cap.
        """
        above = [other for other in self.others if self._is_above(other)]
        seen, within = {_kind(self.chosen)[:2]}, []
        for other in self.others:
            if not self._is_above(other) and _kind(other)[:2] not in seen:
                seen.add(_kind(other)[:2])
                within.append(other)
        above = above[: max(most // 3, most - len(within))]
        return tuple(
            sorted([*above, *within[: most - len(above)]], key=lambda choice: choice.cut.step_seconds)
        )

    def _is_above(self, choice: Choice) -> bool:
        return self.most_bytes is not None and choice.peak_bytes > self.most_bytes

    def reason(self, other: Choice) -> str:
        """Why ``other`` was not chosen."""
        if self._is_above(other):
            assert self.most_bytes is not None
            return f"needs {amount(other.peak_bytes)} > {amount(self.most_bytes)} cap"
        longer = other.cut.step_seconds / self.chosen.cut.step_seconds - 1
        return f"{longer:+.1%} step" if longer > 0.0005 else "as fast, less simple"


def choose(profile: Profile, *, num_ranks: int, num_micro_batches: int, space: Space) -> Ranking:
    """The best way to run a profiled model as a pipeline.

    Every schedule x chunks x recompute mode is cut with a short search; group sizes and warm-ups are tried
    for the best few that have them, and the best few of all are cut with a long search. Times are the
    simulator's, without the optimizer step, ZeRO's traffic and the engine's own time between actions.

    Raises:
        ConfigError: A recompute mode that the profile lacks.
        LayoutError: No cut is possible.
        ScheduleError: No schedule has this size, or none stays within the cap; names the three nearest.
    """
    for mode in space.recompute:
        profile.require_mode(mode, name="profile")
    task = _Task(profile, num_ranks, num_micro_batches, space)
    found = task.judge(_candidates(space, num_ranks, profile.num_layers), _GLANCE)
    best = sorted(filter(_has_options, found), key=task.order)[:_FEW]
    found += task.judge((c for choice in best for c in task.variants(choice)), _GLANCE, must=False)
    best = sorted(found, key=task.order)[:_FEW]
    if space.cut is None:
        found += task.judge(map(_again, best), _LOOK)
    return _rank(found, task, space.most_bytes)


_Candidate = tuple[Program, int, Recompute]
"""(schedule, chunks, recompute)."""


@dataclass(frozen=True, slots=True)
class _Task:
    """The inputs that all candidates share."""

    profile: Profile
    num_ranks: int
    num_micro_batches: int
    space: Space

    def judge(
        self, candidates: Iterable[_Candidate], most_actions: int, *, must: bool = True
    ) -> list[Choice]:
        """Those that can be built, cut; if one must be, and none can, the first one's error is raised."""
        found, errors = [], []
        for candidate in candidates:
            try:
                found.append(Choice(candidate[2], self._cut(candidate, most_actions)))
            except (LayoutError, ScheduleError) as error:
                errors.append(error)
        if must and errors and not found:
            raise errors[0]
        return found

    def variants(self, choice: Choice) -> Iterator[_Candidate]:
        """The same candidates with other group sizes and warm-ups, where these are free and exist."""
        program, chunks, recompute = _again(choice)
        p, m, given = self.num_ranks, self.num_micro_batches, program.options
        usual = groups(p, m, None)
        sizes = [n for n in dict.fromkeys((2 * p, m)) if n <= m and groups(p, m, n) != usual]
        warmups = [n for n in _WARMUPS if n != (2 if program.name == "interleaved" else 1)]
        for size, warmup in product(
            [given.group_size] if given.group_size is not None else [None, *sizes],
            [given.warmup_per_rank] if given.warmup_per_rank is not None else [None, *warmups],
        ):
            options = replace(given, group_size=size, warmup_per_rank=warmup)
            if options != given:
                yield replace(program, options=options), chunks, recompute

    def order(self, choice: Choice) -> tuple[bool, float, tuple[int, ...]]:
        """Sort key: within the cap first, then by step, then the simpler."""
        cap = self.space.most_bytes
        return cap is not None and choice.peak_bytes > cap, choice.cut.step_seconds, _complexity(choice)

    def _cut(self, candidate: _Candidate, most_actions: int) -> LayerCut:
        program, chunks, recompute = candidate
        size = self.num_ranks, chunks, self.num_micro_batches
        pipeline = SimulatedPipeline.of(self.profile, recompute, program, size, self.space.most_bytes)
        if self.space.cut is not None:
            return pipeline.judge(self.space.cut(pipeline.num_stages))
        return shortest_cut(pipeline, most_actions=most_actions)


def _candidates(space: Space, num_ranks: int, num_layers: int) -> Iterator[_Candidate]:
    if space.rows is not None:
        assert space.rows.rows is not None
        yield from ((space.rows, space.rows.rows.num_chunks, mode) for mode in space.recompute)
        return
    options = Options(
        group_size=space.group_size, warmup_per_rank=space.warmup_per_rank, most_live=space.most_live
    )
    for (name, chunks), mode in product(space.pipelines(num_ranks, num_layers), space.recompute):
        yield Program(name=name, options=options), chunks, mode


def _has_options(choice: Choice) -> bool:
    """Whether a choice's schedule takes groups and warm-ups."""
    program = choice.cut.program
    return program.rows is None and program.name in ("interleaved", "interleaved_zb")


def _again(choice: Choice) -> _Candidate:
    """The candidate that ``choice`` was made from, without its cut's times."""
    program = choice.cut.program
    if program.rows is None:
        program = replace(program, options=replace(program.options, costs=None))
    return program, choice.cut.stage_map.num_chunks, choice.recompute


def _complexity(choice: Choice) -> tuple[int, ...]:
    name, options = choice.cut.program.name, choice.options
    return (
        RECOMPUTE.index(choice.recompute),
        _SIMPLE.index(name) if name in _SIMPLE else 0,
        choice.cut.stage_map.num_chunks,
        (options.group_size is not None) + (options.warmup_per_rank is not None),
        choice.peak_bytes,
    )


def _rank(found: list[Choice], task: _Task, most_bytes: int | None) -> Ranking:
    if not found:
        raise ScheduleError(
            f"{task.profile.num_layers} layers on {task.num_ranks} pipeline ranks",
            "no schedule that may be chosen has such a size",
            "use fewer ranks or chunks, or schedule.name auto",
        )
    found = sorted(found, key=task.order)
    if task.order(found[0])[0]:
        assert most_bytes is not None
        raise _nothing_fits(found, most_bytes)
    as_short = [
        choice
        for choice in found
        if not task.order(choice)[0] and choice.cut.step_seconds <= found[0].cut.step_seconds * _TIE
    ]
    chosen = min(as_short, key=lambda choice: (_complexity(choice), choice.cut.step_seconds))
    others: dict[tuple[str, int, str], Choice] = {}
    for choice in found:
        others.setdefault(_kind(choice), choice)
    others.pop(_kind(chosen))
    return Ranking(chosen=chosen, others=tuple(others.values()), most_bytes=most_bytes)


def _kind(choice: Choice) -> tuple[str, int, str]:
    return choice.cut.program.name, choice.cut.stage_map.num_chunks, choice.recompute


def _nothing_fits(found: list[Choice], most_bytes: int) -> DsxError:
    nearest: dict[tuple[str, int, str], Choice] = {}
    for choice in sorted(found, key=lambda choice: choice.peak_bytes):
        nearest.setdefault(_kind(choice), choice)
    near = "; ".join(f"{c.label}: {amount(c.peak_bytes)}" for c in [*nearest.values()][:3])
    return ScheduleError(
        f"activation memory of {amount(most_bytes)} a rank (schedule.activation_gib)",
        f"no schedule that may be chosen stays within it; the nearest are {near}",
        "raise it, use a smaller micro-batch, or let more be chosen (schedule, chunks and recompute auto)",
    )
