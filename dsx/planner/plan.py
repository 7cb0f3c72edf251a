"""Rank layouts by predicted step time under the memory cap: best first, by bounds that are cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import inf

from dsx.errors import DsxError, LayoutError, ScheduleError
from dsx.parallel.mesh import Mesh
from dsx.planner.best_first import best_first
from dsx.planner.layout import CHUNKS, Candidate, Space, Task, meshes, scheduled, variants
from dsx.planner.step_time import Predictor, StepTime, total
from dsx.terminal import amount

_ALL_LIVE = ("gpipe", "looped_bfs")  # Keep every micro-batch.


@dataclass(slots=True)
class MemoryFloor:
    """Bounds for the layouts of one task.

    Attributes:
        update_bytes: What the optimizer keeps per parameter, the fp32 copy of a bf16 parameter included.
    """

    predictor: Predictor
    update_bytes: int = 12
    _kept: dict[object, int] = field(default_factory=dict)

    def of(self, layout: Candidate) -> float:
        """Bytes that some rank of the layout holds at least."""
        return self.states(layout) + self.activations(layout)

    def states(self, layout: Candidate) -> float:
        """Parameters, gradients and optimizer state of a mean pipeline rank (arXiv:1910.02054, section 5)."""
        width = self.predictor.task.width
        held, trained = (
            total(self.predictor.held(layout, trained=only)).times(1 / layout.pipeline)
            for only in (False, True)
        )
        stages = (3, 2 if layout.reduces_micro_batches else 3, 1)
        sizes = (held, width), (trained, width), (trained, self.update_bytes)
        return sum(
            size * (each.parts(layout) if layout.zero_stage >= stage else each.total)
            for stage, (each, size) in zip(stages, sizes, strict=True)
        )

    def activations(self, layout: Candidate) -> float:
        """What the blocks of the first pipeline rank keep for the micro-batches under way."""
        count = layout.micro_batches(self.predictor.task.global_batch)
        live = count if layout.schedule in _ALL_LIVE else min(count, layout.pipeline)
        blocks = self.predictor.task.layers.num_layers // layout.pipeline
        kept = self.kept_bytes(layout)
        # What one block computes again is there as a whole before the first of what it keeps goes.
        again = self.kept_bytes(replace(layout, recompute="none")) - kept if self._trains_all else 0
        return float(live * blocks * kept + _NEARLY * max(0, again))

    @property
    def _trains_all(self) -> bool:
        predictor = self.predictor
        return predictor.elements(1) == predictor.elements(1, trained=True)

    def kept_bytes(self, layout: Candidate) -> int:
        """What one block keeps of one micro-batch, by its record."""
        key = layout.timing
        if key not in self._kept:
            self._kept[key] = self.predictor.task.layers.kept_bytes(layout)
        return self._kept[key]


_WORTH_A_WORD = 0.003  # Of the best step.
_MOST_WORDS = 3


def reason(plan: Plan, ranked: Ranked) -> str:
    """Why ``ranked`` was not chosen: its memory, or the parts of its step that are longer."""
    best = plan.best[0]
    step = ranked.time.seconds / best.time.seconds - 1.0
    if not ranked.fits:
        takes = ("at least " if ranked.is_bound else "") + amount(ranked.peak_bytes)
        return f"{step:+.1%} step, but takes {takes} of {amount(plan.cap_bytes)}"
    have, want = ranked.time.parts(), best.time.parts()
    names = [*have, *(name for name in want if name not in have)]
    change = {name: (have.get(name, 0.0) - want.get(name, 0.0)) / best.time.seconds for name in names}
    worst = sorted(change.items(), key=lambda item: -abs(item[1]))[:_MOST_WORDS]
    words = [f"{name} {part:+.1%}" for name, part in worst if abs(part) >= _WORTH_A_WORD]
    if step < _WORTH_A_WORD and not words:
        return f"{step:+.1%} step: as fast"
    return f"{step:+.1%} step: {', '.join(words)}" if words else f"{step:+.1%} step"


Memory = Callable[[Candidate], int]
"""Peak bytes of the fullest rank of a layout; a DsxError for one that cannot be run."""

_SURELY = 0.95  # What is soon known is above the truth by less.
_FAR = 1.1  # What a larger micro-batch shares with others is less than this.
_NEARLY = 0.9  # Stages before the last may be a little shorter than the mean.


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """A layout with its predicted step.

    Attributes:
        peak_bytes: Memory of its fullest rank, or a bound of it.
        is_bound: Whether ``peak_bytes`` is a bound.
    """

    layout: Candidate
    time: StepTime
    peak_bytes: float
    fits: bool
    is_bound: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a search found.

    Attributes:
        cap_bytes: Memory of a GPU that it kept within.
        best: The best layout of each mesh, the fastest first: at least the number asked for, if there are so
            many.
        others: The best one's neighbours, each with one thing changed, fastest first.
        too_large: Layouts that are faster than the best one and do not fit, fastest first.
        predicted: Layouts whose step was simulated.
        estimated: Layouts whose memory was estimated in full.
    """

    task: Task
    cap_bytes: int
    best: tuple[Ranked, ...]
    others: tuple[Ranked, ...]
    too_large: tuple[Ranked, ...]
    predicted: int
    estimated: int


@dataclass(frozen=True, slots=True)
class _Node:
    """A candidate of the search: a mesh's variant, the same with a schedule, or that with its step.

    Attributes:
        seconds: Its step, less the slack of the search, or a bound that no step which comes of it is below.
        place: Of its variant among all.
        is_priced: Whether the bound is by its own records.
    """

    seconds: float
    layout: Candidate
    place: int
    is_priced: bool = False
    is_scheduled: bool = False
    time: StepTime | None = None

    @property
    def cost(self) -> tuple[float, tuple[int, ...]]:
        """Of equally fast layouts the simpler one comes first, of equally simple ones the first variant."""
        layout = self.layout
        simplicity = (layout.zero_stage, layout.chunks, int(layout.program.divides), layout.pipeline)
        return self.seconds, () if self.time is None else (*simplicity, self.place)


Looked = Callable[[str, int, int | None], None]
"""Told what a search does, how much of it is done and of how much; None if nobody knows."""


def looks_away(_what: str, _done: int, _total: int | None) -> None:
    """A :data:`Looked` that tells nobody."""


@dataclass(slots=True)
class Search:
    """A search for the best layouts of one task.

    Args:
        memory: Peak bytes of a layout.
        within: The same up to so many bytes, and beyond them any bound that is above them, which is sooner
            known; None if nothing is. Where nobody is to read by how much a layout is too large, the cap is
            given.
        least: A bound of the same that is soon known. Once a layout has proved too large, others that exceed
            the cap by it alone are not estimated, unless somebody is to read by how much.
        cap_bytes: What they must stay within; None: what the cluster's GPUs have.
        update_bytes: What the optimizer keeps per parameter at least, the fp32 copy of a bf16 one included.
        looked: See :data:`Looked`; called for every layout that is compared, simulated, or estimated.
        refuse: Raises a DsxError for a layout that nobody can run. What is compared by bounds alone goes
            through it before anybody reads of it.
        slack: A layout counts as the fastest of its mesh where no other can be faster by more than this
            share of its step: where a slow link takes most of the step, thousands are nearly as fast.
    """

    task: Task
    space: Space
    memory: Memory
    least: Memory = lambda _: 0
    within: Callable[[Candidate, float], int] | None = None
    cap_bytes: int | None = None
    update_bytes: int = 12
    looked: Looked = looks_away
    refuse: Callable[[Candidate], None] = lambda _: None
    slack: float = 0.0
    predictor: Predictor = field(init=False)
    _floor: MemoryFloor = field(init=False)
    _soon: MemoryFloor = field(init=False)
    _hopeless: dict[Candidate, int] = field(init=False, default_factory=dict)
    _peaks: dict[Candidate, int | None] = field(init=False, default_factory=dict)
    _above: dict[Candidate, int] = field(init=False, default_factory=dict)
    _times: dict[Candidate, StepTime] = field(init=False, default_factory=dict)
    _large: dict[Candidate, Ranked] = field(init=False, default_factory=dict)
    _offered: dict[Candidate, bool] = field(init=False, default_factory=dict)
    _refusals: list[DsxError] = field(init=False, default_factory=list)
    _compared: int = field(init=False, default=0)
    _all: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.predictor = Predictor(self.task)
        self._floor = MemoryFloor(self.predictor, self.update_bytes)
        soon = replace(self.task, layers=self.task.layers.soon)
        self._soon = MemoryFloor(Predictor(soon), self.update_bytes)
        if self.cap_bytes is None:
            self.cap_bytes = self.task.machine.network.cluster.usable_bytes

    @property
    def cap(self) -> int:
        assert self.cap_bytes is not None
        return self.cap_bytes

    def run(self, top: int) -> Plan:
        """The ``top`` best meshes, each with its best layout.

        Raises:
            LayoutError: Nothing fits; names what comes nearest.
        """
        best: dict[Mesh, Ranked] = {}
        self._all = sum(
            1 for mesh in meshes(self.task, self.space) for _ in variants(self.task, self.space, mesh)
        )
        starts = [node for mesh in meshes(self.task, self.space) for node in self._open(mesh)]

        def grow(node: _Node) -> Iterable[_Node] | None:
            if node.layout.mesh in best:
                return ()
            return self._inner(node) if node.time is None else None

        for node in best_first(starts, cost=lambda node: node.cost, grow=grow):
            ranked = self._judge(node.layout, self._time(node.layout))
            if ranked is not None and ranked.fits:
                best[node.layout.mesh] = ranked
            if len(best) == top:
                break
        if not best and len(self.space.mlp_tiles) > 1:
            return replace(self, space=replace(self.space, mlp_tiles=self.space.mlp_tiles[1:])).run(top)
        if not best:
            raise self._nothing_fits()
        first = min(best.values(), key=lambda each: each.time.seconds)
        others, too_large = tuple(self._neighbours(first)), tuple(self._faster(first))
        return Plan(
            task=self.task,
            cap_bytes=self.cap,
            best=tuple(sorted(best.values(), key=lambda each: each.time.seconds)),
            others=others,
            too_large=too_large,
            predicted=len(self._times),
            estimated=self._estimated,
        )

    def judge(self, layout: Candidate) -> Ranked | None:
        if not self._can_run(layout):
            return None
        ranked = self._judge(layout, self._time(layout))
        return self._walked(ranked, inf) if ranked is not None and self._is_open(ranked) else ranked

    def _open(self, mesh: Candidate) -> Iterator[_Node]:
        """A mesh's variants whose memory can fit, with a bound that is soon known."""
        for layout in variants(self.task, self.space, mesh):
            self._compared += 1
            self.looked("comparing", self._compared, self._all)
            if self._can_fit(layout, self._soon):
                seconds = _SURELY * self._ideal(layout, self._soon.predictor)
                yield _Node(seconds, layout, self._compared)

    def _priced(self, node: _Node) -> Iterator[_Node]:
        """A variant by its own records, if its memory can fit.

        Where a micro-batch is far too large, larger ones are not looked at: each size takes a record.
        """
        layout, kind = node.layout, replace(node.layout, micro_batch=1)
        if layout.micro_batch > self._hopeless.get(kind, layout.micro_batch):
            return
        self._look_closer()
        if self._can_fit(layout, self._floor):
            seconds = max(node.seconds, self._ideal(layout, self.predictor))
            yield replace(node, seconds=seconds, is_priced=True)
        elif self._floor.of(layout) > _FAR * self.cap:
            self._hopeless[kind] = layout.micro_batch

    def _ideal(self, layout: Candidate, predictor: Predictor) -> float:
        """Seconds with equal ranks and no bubble, which start as early as with the most chunks."""
        times, ranks = predictor.times(layout), layout.pipeline
        work = sum(time.seconds for time in times) * layout.micro_batches(self.task.global_batch)
        chunks = max(2, min(max(CHUNKS), self.task.layers.num_layers // ranks))
        fill = sum(time.forward_seconds for time in times) * (ranks - 1) / chunks
        beside, after = predictor.crossing(layout)
        return max((work + _NEARLY * fill) / ranks, beside) + after

    def _can_fit(self, layout: Candidate, floor: MemoryFloor) -> bool:
        return floor.states(layout) <= self.cap and floor.of(layout) <= self.cap

    def _inner(self, node: _Node) -> Iterator[_Node]:
        """What a node leads to: itself with a better bound, its schedules, or its own prediction."""
        if not node.is_priced:
            yield from self._priced(node)
            return
        if node.is_scheduled:
            time = self._time(node.layout)
            yield replace(node, seconds=time.seconds / (1 + self.slack), time=time)
            return
        for layout in scheduled(self.task, self.space, node.layout):
            if self._can_fit(layout, self._floor):
                bound = self.predictor.bound(layout)
                yield replace(node, seconds=max(bound, node.seconds), layout=layout, is_scheduled=True)

    def _time(self, layout: Candidate) -> StepTime:
        if layout not in self._times:
            self._look_closer()
            self._times[layout] = self.predictor.predict(layout)
        return self._times[layout]

    def _look_closer(self) -> None:
        """A step is simulated or a memory estimated, of those layouts that may be the fastest."""
        self.looked("simulating the fastest", len(self._times) + self._estimated, None)

    @property
    def _estimated(self) -> int:
        return len(self._peaks.keys() | self._above.keys())

    def _judge(self, layout: Candidate, time: StepTime) -> Ranked | None:
        """With its memory, by a bound if that says enough; None if it cannot be run."""
        floor = self._floor.of(layout)
        if floor > self.cap:
            return Ranked(layout=layout, time=time, peak_bytes=floor, fits=False, is_bound=True)
        least = self.least(layout) if self._large else 0  # worth its time where little fits
        ranked = Ranked(layout=layout, time=time, peak_bytes=least, fits=False, is_bound=True)
        if least <= self.cap:
            return self._walked(ranked, self.cap)
        self._large[layout] = ranked
        return ranked

    def _walked(self, ranked: Ranked, most_bytes: float) -> Ranked | None:
        """With its memory estimated, beyond ``most_bytes`` by a bound; None if it cannot be run."""
        layout, again = ranked.layout, ranked.layout in self._above and most_bytes > self.cap
        if layout not in self._peaks and self._above.get(layout, 0) <= most_bytes:
            self._look_closer()
            try:
                peak = self.memory(layout) if self.within is None else self.within(layout, most_bytes)
            except DsxError as error:
                self._refusals.append(error)
                self._peaks[layout] = None
            else:
                is_bound = self.within is not None and peak > most_bytes
                (self._above if is_bound else self._peaks)[layout] = peak
        if not again:  # else it keeps its place among those that are too large
            self._large.pop(layout, None)
        is_bound = layout not in self._peaks
        found = self._above[layout] if is_bound else self._peaks[layout]
        if found is None:
            return None
        ranked = replace(ranked, peak_bytes=found, fits=found <= self.cap, is_bound=is_bound)
        if not ranked.fits:
            self._large[layout] = ranked
        return ranked

    def _is_open(self, ranked: Ranked) -> bool:
        """Whether its memory has only been compared by a bound that is soon known."""
        return ranked.is_bound and ranked.layout in self._large

    def _nearest(self, found: Iterable[Ranked]) -> Ranked | None:
        """The one that takes least memory, and how much: of equals the first of those walked before."""
        places = {each.layout: (place, each) for place, each in enumerate(found)}
        opened = {
            layout: each.peak_bytes
            for layout, (_, each) in places.items()
            if self._is_open(each) and each.peak_bytes != self._above.get(layout)
        }
        least = inf

        def cost(ranked: Ranked) -> tuple[float, float, int]:
            late = 0.0 if ranked.is_bound else opened.get(ranked.layout, 0.0)
            return ranked.peak_bytes, late, places[ranked.layout][0]

        def grow(ranked: Ranked) -> Iterable[Ranked] | None:
            nonlocal least
            if not self._is_open(ranked):
                return None if self._is_offered(ranked.layout) else ()
            full = self._walked(ranked, least)
            if full is None or full.is_bound:
                return ()
            if self._is_offered(full.layout):
                least = min(least, full.peak_bytes)
            return (full,)

        return next(best_first([each for _, each in places.values()], cost=cost, grow=grow), None)

    def _neighbours(self, first: Ranked) -> list[Ranked]:
        """The best layout with one thing changed, the best of each such change."""
        layout = first.layout
        found: list[Ranked] = []
        changed: dict[str, list[Candidate]] = {}
        mesh = layout.mesh
        wide = replace(self.space, tensor=(mesh.tp,), pipeline=(mesh.pp,), context=(mesh.cp,))
        for other in variants(self.task, wide, layout):
            names = [name for name in _KNOBS if getattr(layout, name) != getattr(other, name)]
            if len(names) == 1:
                # Of micro-batches only the best one is listed.
                value = "" if names[0] == "micro_batch" else getattr(other, names[0])
                changed.setdefault(f"{names[0]}{value}", []).append(
                    replace(other, schedule=layout.schedule, chunks=layout.chunks)
                )
        for other in scheduled(self.task, wide, layout):
            if other.schedule != layout.schedule:
                changed.setdefault(other.schedule, []).append(other)
            elif other.chunks != layout.chunks:
                changed.setdefault("chunks", []).append(other)
        for options in changed.values():
            found += filter(None, [self._best_of(options, first)])
        return sorted(found, key=lambda each: each.time.seconds)

    def _best_of(self, layouts: Iterable[Candidate], first: Ranked) -> Ranked | None:
        """The fastest that may fit; if none does, the one that comes nearest.

        Memory is estimated in full only for those that are faster than the first: others lose anyhow.
        """
        tried = []
        for layout in sorted(filter(self._can_run, layouts), key=lambda each: self._time(each).seconds):
            time, floor = self._time(layout), self._floor.of(layout)
            if time.seconds < first.time.seconds:
                ranked = self._judge(layout, time)
            else:
                fits = floor <= self.cap
                ranked = Ranked(layout=layout, time=time, peak_bytes=floor, fits=fits, is_bound=True)
            if ranked is not None and ranked.fits and self._is_offered(layout):
                return ranked
            tried += [] if ranked is None else [ranked]
        return self._nearest(tried)

    def _is_offered(self, layout: Candidate) -> bool:
        if layout not in self._offered:
            try:
                self.refuse(layout)
            except DsxError as error:
                self._refusals.append(error)
                self._offered[layout] = False
            else:
                self._offered[layout] = True
        return self._offered[layout]

    def _can_run(self, layout: Candidate) -> bool:
        try:
            self._time(layout)
        except (LayoutError, ScheduleError):
            return False
        return True

    def _faster(self, first: Ranked) -> Iterator[Ranked]:
        """What is faster and too large: the fastest of each mesh and way to recompute."""
        kinds: set[tuple[object, ...]] = set()
        for ranked in sorted(self._large.values(), key=lambda each: each.time.seconds):
            kind = ranked.layout.mesh, ranked.layout.recompute
            if ranked.time.seconds >= first.time.seconds or kind in kinds:
                continue
            known = self._walked(ranked, inf) if self._is_open(ranked) else ranked
            if known is not None and self._is_offered(known.layout):
                kinds.add(kind)
                yield known

    def _least_floor(self, layouts: Iterable[Candidate]) -> Candidate | None:
        """The layout with the lowest bound of memory of those that can be run, by its own records."""

        def grow(each: tuple[MemoryFloor, Candidate]) -> Iterable[tuple[MemoryFloor, Candidate]] | None:
            floor, layout = each
            if not self._is_offered(layout):
                return ()
            return None if floor is self._floor else ((self._floor, layout),)

        starts = ((self._soon, layout) for layout in layouts)
        found = next(best_first(starts, cost=lambda each: each[0].of(each[1]), grow=grow), None)
        return None if found is None else found[1]

    def _nothing_fits(self) -> DsxError:
        nearest = self._nearest(list(self._large.values()))
        if nearest is None and self._refusals:
            return self._refusals[0]
        if nearest is None:
            layouts = [
                v for mesh in meshes(self.task, self.space) for v in variants(self.task, self.space, mesh)
            ]
            layout = self._least_floor(layouts) or layouts[0]
            least = f"at least {amount(self._floor.of(layout))} ({layout.label})"
        else:
            least = f"{amount(nearest.peak_bytes)} ({nearest.layout.label})"
        name = self.task.machine.network.cluster.name
        # Whether ranks might share sequences, and none were tried.
        may_share = self.space.context == (1,) and self.task.layers.unshared is None
        open_axis = " (or ranks that share them: dsx.parallel.context)" if may_share else ""
        return LayoutError(
            f"{self.space.gpus} x {name}, {amount(self.cap)} usable of each",
            f"no layout of the model fits; the nearest takes {least}",
            f"use more GPUs, shorter sequences{open_axis} or a smaller model, or "
            "zero_optimization.offload_optimizer",
        )


_KNOBS = ("micro_batch", "recompute", "zero_stage", "sequence_parallel", "context_method")
