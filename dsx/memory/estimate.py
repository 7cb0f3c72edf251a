"""What the ranks of a run will hold, phase by phase, with the lines that their peaks consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf, prod

from dsx.memory.islands import OUTER_STEP, IslandMemory, IslandSettings
from dsx.memory.layer_record import DeviceKind, Kept
from dsx.memory.ledger import Label, Leaf, Ledger, Message, Storage, dropped
from dsx.memory.partitioned import Bf16, Bucketed, BucketedOffload, Partitioned, PartitionedOffload
from dsx.memory.record_cache import LayerRecords
from dsx.memory.stage3 import Stage3, built, uses
from dsx.memory.states import Flat, States, StateSettings, Unfused
from dsx.memory.walk import IN_FLIGHT, RankLayers, Walk
from dsx.models.param import ITEM_BYTES, ParamSpec
from dsx.parallel.layout import Layout
from dsx.schedules.program import Program
from dsx.schedules.receives import ReceivePlan, receive_plans
from dsx.schedules.schedule import Action, Op, Schedule

ROUNDING_BYTES: dict[DeviceKind, int] = {"cuda": 512, "cpu": 1}
"""To which an allocator rounds a tensor up (CUDACachingAllocator.cpp, kMinBlockSize)."""

STEPS = 2
"""The first makes the optimizer's moments; those after the second are like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What of a run decides about its memory.

    Attributes:
        layout: Mesh, stages, parameters and ZeRO stage.
        schedule: Lowered training schedule.
        left_out: Micro-batches of a step that ``schedule`` leaves out (:func:`enough_micro_batches`).
        releases: Whether a stage frees what it has sent (``dsx.PipelineModule(release_outputs=)``).
        built_width: Bytes of a parameter of a model that is built whole and then converted and cut; None
            for one that is built as it is trained.
        alike: Whether tensor-parallel ranks hold the same between layers, so that each sends a part of it.
        capacity_bytes: Memory of a device for tensors, where DeepSpeed asks for it; None for enough.
        islands: The islands of which the run is one; None if it is one job.
        supposed: What the records suppose of the run's data, in words.
    """

    records: LayerRecords
    layout: Layout
    schedule: Schedule
    states: StateSettings
    alike: bool = False
    releases: bool = True
    built_width: int | None = None
    device: DeviceKind = "cuda"
    capacity_bytes: int | None = None
    left_out: int = 0
    islands: IslandSettings | None = None
    supposed: str = ""


Lines = tuple[tuple[Label, int], ...]
"""Bytes by label."""


def _sorted(lines: Mapping[Label, int]) -> Lines:
    """The largest first, equal ones by their names."""
    return tuple(sorted(lines.items(), key=lambda item: (-item[1], item[0])))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A part of a run.

    Attributes:
        name: build, engine, step 1 (which makes the moments), step 2 (and all after it) or, of an island,
            outer step: what happens between inner steps.
        lines: The lines of the peak, largest first.
        place: The schedule action at the peak; "update" after the actions; "" outside of a step.
    """

    name: str
    peak_bytes: int
    lines: Lines
    place: Action | str

    @property
    def where(self) -> str:
        return str(self.place)

    @property
    def when(self) -> str:
        return f"{self.name} at {self.where}" if self.where else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One rank's memory.

    Attributes:
        steady_bytes: Bytes held between steps.
        host_bytes: The most that is kept on the host for this rank at once: offload, parameters that
            DeepSpeed flattens there, what islands have in common.
        host_lines: The lines of that, largest first.
    """

    rank: int
    phases: tuple[Phase, ...]
    steady_bytes: int
    host_bytes: int = 0
    host_lines: Lines = ()

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.peak_bytes)


def estimate(
    job: Job,
    rank: int,
    *,
    rounding_bytes: int | None = None,
    receives: ReceivePlan | None = None,
    replays: bool = True,
    most_bytes: float = inf,
    steps: range = range(STEPS),
) -> Estimate:
    """Memory of global rank ``rank``, without the device's context and libraries.

    Args:
        job: The run.
        rank: Global rank.
        rounding_bytes: Multiple to which each tensor is rounded up; None for that of the device's allocator.
        receives: The pipeline rank's receives, if already made.
        replays: Whether to take micro-batches that repeat an earlier one from notes
            (:mod:`dsx.memory.ledger`).
        most_bytes: Above which nobody wants to know by how much.
        steps: Which are walked; the first is passed over otherwise, under ZeRO-3 alone.

    Raises:
        AboveError: A step takes more than ``most_bytes``; its argument is a bound of the peak.
    """
    if most_bytes < inf and job.layout.zero_stage == 3 and not (steps[0] or job.islands):
        # No micro-batch repeats another, and what is too large mostly is so in later steps alone.
        estimate(job, rank, receives=receives, most_bytes=most_bytes, steps=steps[1:])
    at = job.layout.mesh.coords(rank)
    ledger = Ledger(ROUNDING_BYTES[job.device] if rounding_bytes is None else rounding_bytes)
    states, walk = _rank(job, at["pp"], job.layout.mesh.replica(rank), ledger, receives, replays=replays)
    sizes = [walk.layers.record(index).buffer_bytes for index in walk.layers.stages.layers_of(at["pp"])]
    kept, phases = [Storage(walk.layers.states.ledger, _BUFFERS, size).hold() for size in sizes if size], []
    quantized = tuple(spec for spec in job.layout.params_of(at["pp"]) if spec.quantized != "none")
    for name, action in (("build", states.build), ("engine", states.start)):
        ledger.start()
        action()
        if name == "build":
            kept += _quantized(quantized, job, ledger)
        phases.append(_phase(name, ledger, ""))
    if job.built_width is not None:
        phases[0] = _built_whole(states, job.built_width, sum(storage.size_bytes for storage in kept))
    kept += _kept(walk.layers, at["pp"])
    islands = job.islands and IslandMemory(job.islands, states, unified=job.device == "cpu")
    if steps[0] and isinstance(states, Stage3):
        walk.pass_over(states.coordinator.modules)
    ledger.most_bytes = most_bytes
    for step in steps:
        ledger.start()
        watch = _Watch(ledger)
        if islands and step == 0:
            islands.start()
        if islands and islands.goes_on and step == STEPS - 1:
            islands.launch()
            islands.exchange()
        walk.run(watch)
        phases.append(_phase(f"step {step + 1}", ledger, watch.place))
    phases += [_outer_step(islands, ledger)] if islands else []
    steady_bytes, host = ledger.current_bytes, states.host.ledger
    dropped(kept)
    apart = host is not ledger
    return Estimate(
        rank=rank,
        phases=tuple(phases),
        steady_bytes=steady_bytes,
        host_bytes=apart * host.peak_bytes,
        host_lines=apart * _sorted(host.at_peak),
    )


def _outer_step(islands: IslandMemory, ledger: Ledger) -> Phase:
    ledger.start()
    if not islands.goes_on:
        islands.launch()
        islands.exchange()
    islands.land()
    return _phase(OUTER_STEP, ledger, "")


def _built_whole(states: States, width: int, buffer_bytes: int) -> Phase:
    """All parameters and buffers, before DeepSpeed converts and cuts the parameters."""
    size = sum(states.ledger.rounded(leaf.numel * width) for leaf in states.leaves.values())
    lines = [(Label("parameters", "parameter"), size)]
    lines += [(_BUFFERS, buffer_bytes)] if buffer_bytes else []
    return Phase(name="build", peak_bytes=size + buffer_bytes, lines=tuple(lines), place="")


class _Watch:
    """Notes the action at the peak."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger, self._peak = ledger, 0
        self.place: Action | str = ""

    def __call__(self, action: Action | None) -> None:
        if self._ledger.peak_bytes > self._peak:
            self._peak, self.place = self._ledger.peak_bytes, "update" if action is None else action


def _phase(name: str, ledger: Ledger, place: Action | str) -> Phase:
    return Phase(name=name, peak_bytes=ledger.peak_bytes, lines=_sorted(ledger.at_peak), place=place)


_BUFFERS = Label("parameters", "buffers")


def _quantized(specs: Sequence[ParamSpec], job: Job, ledger: Ledger) -> Message:
    """Quantised matrices, those of the last layer beside what they are made of, one after the other."""
    at, held = job.layout.mesh.at(), []
    last = max((spec.layer for spec in specs), default=0)
    passing = {
        spec.name: Storage(ledger, _ORIGINAL, prod(spec.local_shape(at)) * job.states.width).hold()
        for spec in specs
        if spec.layer == last
    }
    for spec in specs:
        through: list[Storage] = []
        if spec.name in passing:
            through.append(passing[spec.name])
            half = 2 * prod(spec.local_shape(at)) if spec.quantized == "int8" else 0
            through.append(Storage(ledger, _ORIGINAL, half).hold())
        held += [Storage(ledger, _QUANTIZED, size).hold() for size in spec.quantized_bytes(at)]
        dropped(through)
    return held


_QUANTIZED = Label("parameters", "quantised matrices")
_ORIGINAL = Label("parameters", "matrices to be quantised")


def _kept(layers: RankLayers, pp_rank: int) -> Message:
    """What layers make in their first forward and keep: tables of positions, masks of windows."""
    shared: dict[Kept, int] = {}
    found: Message = []
    for index in layers.stages.layers_of(pp_rank):
        counts: dict[Kept, int] = {}
        for kept in layers.record(index).kept:
            if kept.remade and not layers.records.remakes:
                continue  # backward has it saved, each micro-batch its own
            if kept.owner:
                counts[kept] = counts.get(kept, 0) + 1
            else:
                found.append(Storage(layers.states.ledger, kept.label, kept.size_bytes).hold())
        for key, count in counts.items():
            shared[key] = max(shared.get(key, 0), count)
    for each, count in shared.items():
        found += [Storage(layers.states.ledger, each.label, each.size_bytes).hold() for _ in range(count)]
    return found


def _rank(
    job: Job,
    pp_rank: int,
    dp_rank: int,
    ledger: Ledger,
    receives: ReceivePlan | None,
    *,
    replays: bool,
) -> tuple[States, Walk]:
    at, width = job.layout.mesh.at(), job.states.width
    plain = (spec for spec in job.layout.params if spec.quantized == "none")
    layout = replace(job.layout, params=tuple(plain))
    leaves = {
        spec.name: Leaf(
            spec.name,
            spec.local_shape(at),
            ITEM_BYTES[spec.dtype_in(layout.dtype)] if layout.dtype != "float32" else width,
            experts_over=1 if spec.experts is None else layout.mesh.ep,
        )
        for spec in layout.params_of(pp_rank)
    }
    plan = layout.zero_plan(pp_rank)
    if not plan.groups:  # the one number that a rank trains with nothing to train (engine/initialize.py)
        leaves["spare"] = Leaf("spare", (1,), width)
        plan = replace(plan, groups=((("spare", 1),),))
    states = _wrapper(job)(ledger, plan, dp_rank, leaves, job.states)
    # On a CPU device and host are one.
    states.capacity_bytes = job.capacity_bytes if job.device == "cuda" else None
    used = uses(layout, pp_rank, leaves)
    if isinstance(states, Stage3):
        states.layers, states.ties = built(layout, pp_rank, leaves)
        states.plan_gathers(job.schedule.rows[pp_rank], used)
    else:
        states.plan_reduction(used, job.schedule, pp_rank)
    states.replicated = frozenset(
        spec.name for spec in layout.params_of(pp_rank) if layout.owners(spec)[0] != pp_rank
    )
    layers = RankLayers(
        records=job.records,
        stages=job.layout.stages,
        states=states,
        hooks=states.coordinator if isinstance(states, Stage3) else None,
        divided=any(action.op is Op.BACKWARD_WEIGHT for action in job.schedule.rows[pp_rank]),
        unified=job.device == "cpu",
    )
    walk = Walk(
        schedule=job.schedule,
        rank=pp_rank,
        layers=layers,
        checks=job.alike,
        releases=job.releases,
        receives=receives,
        eager=job.device == "cpu",
        left_out=job.left_out,
        replays=replays and states.reduction is not None,
    )
    return states, walk


def _wrapper(job: Job) -> type[States]:
    """deepspeed/runtime/engine.py, _do_optimizer_sanity_check."""
    stage, settings = job.layout.zero_stage, job.states
    if stage == 0:
        low = Flat if settings.fused else Unfused
        return low if settings.width == 2 else States
    if stage == 1 and settings.is_bf16 and settings.accumulate == 4 and not settings.offload:
        return Bf16
    if stage == 3:
        return Stage3
    if settings.offload is not None:
        return BucketedOffload if settings.reduces_micro_batches else PartitionedOffload
    return Bucketed if settings.reduces_micro_batches else Partitioned


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """The ranks of one pipeline coordinate, whose memory differs by padding at most.

    Attributes:
        estimate: The estimate of the first of them.
    """

    pp_rank: int
    ranks: tuple[int, ...]
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMemory:
    """Memory of every rank, and what that supposes of the run's data, in words."""

    roles: tuple[Role, ...]
    supposed: str = ""

    @property
    def highest(self) -> Role:
        """The role with the highest peak; the first of equals."""
        return max(self.roles, key=lambda role: role.estimate.peak.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.highest.estimate.peak.peak_bytes


def estimate_run(job: Job) -> RunMemory:
    """Estimates of all ranks of ``job``."""
    mesh = job.layout.mesh
    ranks: dict[int, list[int]] = {}
    for rank in range(mesh.size):
        ranks.setdefault(mesh.coords(rank)["pp"], []).append(rank)
    plans = list(receive_plans(job.schedule))
    known: dict[int, Estimate] = {}

    def found(pp_rank: int) -> Estimate:
        if pp_rank not in known:
            known[pp_rank] = estimate(job, ranks[pp_rank][0], receives=plans[pp_rank])
        return known[pp_rank]

    for alike in _alike(job):
        known |= _between(alike, found, [_held(job.schedule.rows[each]) for each in alike])
    return RunMemory(
        supposed=job.supposed,
        roles=tuple(
            Role(
                pp_rank=pp_rank,
                ranks=tuple(ranks[pp_rank]),
                estimate=replace(found(pp_rank), rank=ranks[pp_rank][0]),
            )
            for pp_rank in range(len(plans))
        ),
    )


def _alike(job: Job) -> Iterable[list[int]]:
    """Pipeline ranks with equal layers, stage by stage."""
    groups: dict[object, list[int]] = {}
    stages, hooked = job.layout.stages, job.layout.zero_stage == 3
    for pp_rank, row in enumerate(job.schedule.rows):
        divided = any(action.op is Op.BACKWARD_WEIGHT for action in row)
        layers = tuple(
            tuple(
                id(job.records.layer(index, divided=divided, hooked=hooked)) for index in stages.layers(stage)
            )
            for stage in stages.stages_of(pp_rank)
        )
        groups.setdefault((divided, layers), []).append(pp_rank)
    return groups.values()


_Held = Mapping[tuple[Op, int, str], int]
"""By op, chunk and what is counted: the most, whenever a rank runs such an action."""


def _held(row: Sequence[Action]) -> _Held:
    """What a rank holds of micro-batches: all of them, and those whose backward has not begun."""
    chunks = {stage: at for at, stage in enumerate(sorted({action.stage for action in row}))}
    live, pending = [0] * len(chunks), [0] * len(chunks)
    most: dict[tuple[Op, int, str], int] = {}
    for action in row:
        chunk = chunks[action.stage]
        if action.op is Op.FORWARD:
            live[chunk] += 1
        counts = {f"live {at}": number for at, number in enumerate(live)}
        counts |= {f"whole {at}": live[at] - number for at, number in enumerate(pending)}
        counts |= {"live": sum(live), "whole": sum(live) - sum(pending)}
        for what, number in counts.items():
            key = (action.op, chunk, what)
            most[key] = max(most.get(key, 0), number)
        if action.op is Op.BACKWARD_INPUT:
            pending[chunk] += 1
        elif action.op is Op.BACKWARD_WEIGHT:
            pending[chunk] -= 1
        live[chunk] -= action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    return most


def _is_straight(alike: Sequence[int], held: Sequence[_Held]) -> bool:
    """Whether what ranks hold changes evenly along them; in V-half and V-min it goes up and down."""
    first, last = alike[0], alike[-1]
    return all(
        (last - first) * (each.get(key, 0) - held[0].get(key, 0))
        == (pp_rank - first) * (held[-1].get(key, 0) - held[0].get(key, 0))
        for pp_rank, each in zip(alike, held, strict=True)
        for key in {*each, *held[0], *held[-1]}
    )


def _between(
    alike: Sequence[int], found: Callable[[int], Estimate], held: Sequence[_Held]
) -> dict[int, Estimate]:
    """Estimates of ranks that differ by what they hold of micro-batches alone, most of them not walked.

    Along most pipelines that changes by as much from rank to rank. Where it does and the one in the middle
    confirms it, line for line, the others follow from the two ends; elsewhere each half is looked at alone.
    """
    if len(alike) <= _FEW:
        return {}
    half = len(alike) // 2
    if _is_straight(alike, held):
        line = _Line(alike[0], found(alike[0]), alike[-1], found(alike[-1]))
        if line.at(alike[half]) == replace(found(alike[half]), rank=0):
            filled = {pp_rank: line.at(pp_rank) for pp_rank in alike}
            return {pp_rank: each for pp_rank, each in filled.items() if each is not None}
    return _between(alike[: half + 1], found, held[: half + 1]) | _between(alike[half:], found, held[half:])


_FEW = 4
"""Ranks that are walked one by one."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Two ranks' estimates, continued in a straight line."""

    first: int
    begin: Estimate
    last: int
    end: Estimate

    def at(self, pp_rank: int) -> Estimate | None:
        """The estimate of a rank between them; None if it is no whole number or something else changes."""
        try:
            return self._estimate(Fraction(pp_rank - self.first, self.last - self.first))
        except _BentError:
            return None

    def _estimate(self, share: Fraction) -> Estimate:
        begin, end = self.begin, self.end
        return Estimate(
            rank=0,
            phases=tuple(
                Phase(
                    name=one.name,
                    peak_bytes=_mean(one.peak_bytes, other.peak_bytes, share),
                    lines=_lines(one.lines, other.lines, share),
                    place=_place(one.place, other.place, share),
                )
                for one, other in zip(begin.phases, end.phases, strict=True)
            ),
            steady_bytes=_mean(begin.steady_bytes, end.steady_bytes, share),
            host_bytes=_mean(begin.host_bytes, end.host_bytes, share),
            host_lines=_lines(begin.host_lines, end.host_lines, share),
        )


class _BentError(Exception):
    """Two estimates are no ends of a straight line."""


def _mean(one: int, other: int, share: Fraction) -> int:
    between = one + share * (other - one)
    if between.denominator != 1:
        raise _BentError
    return int(between)


def _lines(one: Lines, other: Lines, share: Fraction) -> Lines:
    ends = dict(one), dict(other)
    sizes = {label: _mean(ends[0].get(label, 0), ends[1].get(label, 0), share) for label in ends[0] | ends[1]}
    return _sorted({label: size for label, size in sizes.items() if size})


def _place(one: Action | str, other: Action | str, share: Fraction) -> Action | str:
    if isinstance(one, Action) and isinstance(other, Action) and one.op is other.op:
        stage = _mean(one.stage, other.stage, share)
        return Action(stage, one.op, _mean(one.micro_batch, other.micro_batch, share))
    if one != other:
        raise _BentError
    return one


def enough_micro_batches(
    program: Program, num_ranks: int, num_micro_batches: int, device: DeviceKind = "cuda"
) -> int:
    """The least number of micro-batches known to need as much memory as ``num_micro_batches``.

    The numbers, in pipeline degrees p, were found by trying (tests/memory/test_steady.py repeats it): 1F1B
    and its kind hold most after p + 1, the others after 2 p or 3 p. Interleaved schedules proceed in groups
    of p; a step that ends with a smaller group differs for every number, and is left whole. GPipe holds all;
    a schedule from a file or with options is left as it is. On a CPU receives are posted ahead of their turn,
    so that a rank holds most while as many messages are still to come as may be under way.
    """
    if program.rows is not None or program.options != type(program.options)():
        return num_micro_batches
    to_come = IN_FLIGHT if device == "cpu" else 0
    if program.name in ("1f1b", "zb_h1"):
        return min(num_micro_batches, num_ranks + 2 + to_come)
    if program.name in ("zbv", "dualpipev", "v_half", "v_min"):
        return min(num_micro_batches, 3 * num_ranks + to_come)
    if program.name in ("interleaved", "interleaved_zb") and num_micro_batches % num_ranks == 0:
        return min(num_micro_batches, (4 if to_come else 3) * num_ranks)
    return num_micro_batches
