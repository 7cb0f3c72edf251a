"""What failures and saves leave of the time of a planned run, how often it saves, and both as a picture."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.resources import files
from math import ceil, inf, isfinite
from typing import TYPE_CHECKING, Any, NamedTuple

from dsx.config.schema import ZeroConfig
from dsx.config.wording import at
from dsx.errors import ConfigError, DsxError, no_matplotlib
from dsx.memory.job import faults_of, state_settings
from dsx.parallel.limits import divisors
from dsx.parallel.mesh import Mesh
from dsx.planner import goodput
from dsx.planner.cluster import FailuresConfig
from dsx.planner.goodput import DAY_SECONDS, PARTS, Hazards, Rung, SaveCost, simulate
from dsx.planner.inputs import BestLayout, LayoutMemory, PlanInputs
from dsx.planner.sites import SiteComparison
from dsx.schedules.timeline import FAINT, GRID, INK
from dsx.terminal import aligned, amount, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_GIGA, _MOST_RUNGS = 1e9, 4
_POINTS = 0.005  # What an interval may cost more that is as good.


class KnownFigure(NamedTuple):
    """A number that an answer rests on, and where it is from."""

    value: float
    source: str


_FILE = (files("dsx.planner") / "failures.toml").read_text(encoding="utf-8")
_USUAL = {key: KnownFigure(**each) for key, each in tomllib.loads(_FILE).items()}


def figures(
    inputs: PlanInputs, given: FailuresConfig | None, save_seconds: KnownFigure | None
) -> dict[str, KnownFigure]:
    """Everything an answer rests on, by the keys of a cluster's ``failures``: given, measured, or usual.

    Raises:
        ConfigError: Nobody would notice a hang.
    """
    said = {} if given is None else given.model_dump(exclude_none=True)
    known = {key: KnownFigure(value, "given") for key, value in said.items()}
    if save_seconds is not None:
        known["save_seconds"] = save_seconds
    usual = {key: each for key, each in _USUAL.items() if key in FailuresConfig.model_fields}
    storage = _USUAL["storage_gigabytes_per_second_and_node"]
    together = storage.value * inputs.cluster.hosts(inputs.gpus)
    usual["storage_gigabytes_per_second"] = storage._replace(value=together)
    if "notice_seconds" not in known:
        faults = faults_of(inputs.content)
        if not faults.hang_seconds:
            raise ConfigError(
                at("dsx.faults.hang_seconds", faults.hang_seconds),
                "a rank that hangs is never noticed, so that nobody knows what that costs",
                'set it, or write "failures": {"notice_seconds": ...} in the cluster\'s file',
            )
        hangs, soon = _USUAL["hang_share"], faults.silent_seconds or _USUAL["timeout_seconds"].value
        mean = (1 - hangs.value) * soon + hangs.value * faults.hang_seconds
        usual["notice_seconds"] = hangs._replace(value=mean)
    return usual | known


def hazards_of(
    known: Mapping[str, KnownFigure], gpus: int, nodes: int, checkpoint_bytes: float
) -> tuple[Hazards, SaveCost]:
    """What happens to a run of so many GPUs, and what its saves take, by what :func:`figures` gave."""
    value = {key: each.value for key, each in known.items()}
    moved = checkpoint_bytes / (_GIGA * value["storage_gigabytes_per_second"])
    copied = checkpoint_bytes / gpus / (_GIGA * value["host_gigabytes_per_second"])
    rate = value["per_thousand_gpu_days"] * gpus + value["per_thousand_node_days"] * nodes
    rate, repair = rate / (1000 * DAY_SECONDS), 3600 * value["repair_hours"]
    rate = rate if rate > 1e-100 else 0.0  # reckoned with, it would give times that are not finite
    enough = goodput.enough_spares(rate * value["lost_share"] * repair, nodes)
    hazards = Hazards(
        rungs=(Rung(nodes=nodes),),
        failures_per_second=rate,
        start_seconds=value["start_seconds"] + moved,
        repair_seconds=repair,
        spares=int(value.get("spare_nodes", enough)),
        **{key: value[key] for key in ("notice_seconds", "other_layout_seconds", "lost_share")},
    )
    pause = value.get("save_seconds", _USUAL["agree_seconds"].value + copied)
    return hazards, SaveCost(pause_seconds=pause, write_seconds=moved)


def time_left(
    found: BestLayout, known: Mapping[str, KnownFigure], *, islands: int = 1, between: float = 0.0
) -> dict[str, Any]:
    """How often the best layout saves and where its time goes, by what is done while nodes are away.

    Of ``islands``, which have the layout ``found`` each, one stops at a failure. From round to round it is
    ``between`` seconds: an island that comes back takes the others' weights, and has lost what no round
    has had.
    """
    inputs, step, nodes = found.inputs, found.best.time.seconds, found.inputs.cluster.hosts(found.inputs.gpus)
    trained = sum(found.predictor.elements(1, trained=True))
    trained -= found.predictor.task.layers.shared_elements(1)
    declared = (inputs.content.get("dsx") or {}).get("optimizer_bytes")
    states = state_settings(inputs.content, ZeroConfig(), declared, inputs.device)
    moved = states.offload if states.offload and states.offload.optimizer else states.optimizer
    num_bytes = trained * (4 + moved.state_bytes)  # the fp32 weight, and what the optimizer keeps
    one, saving = hazards_of(known, inputs.gpus, nodes, num_bytes)
    mttf, pause = one.mttf_seconds, saving.pause_seconds
    every, near, interval, run = None, None, inf, known["days"].value * DAY_SECONDS
    longest = max(1, int(run / step))
    if fails := isfinite(mttf):
        least = max(1, ceil(saving.write_seconds / step))  # a save waits until the one before is complete
        ends = (goodput.daly(mttf, pause), *goodput.as_good(mttf, pause, _POINTS))
        every, few, most = (round(min(end, run) / step) for end in ends)
        every = min(longest, max(least, every))
        near, interval = (min(every, max(least, few)), min(longest, max(every, most))), every * step
    cost = saving
    if islands > 1 and fails:
        cost, interval = SaveCost(pause * between / interval), between
    smaller = tuple(_smaller(found))
    ways = {"spare nodes": one} if one.spares else {}
    ways["wait for the repair"] = waits = replace(one, spares=0)
    if smaller:
        ways["shrink (dsx.elastic)"] = replace(waits, rungs=(*one.rungs, *smaller))
    shares: dict[str, dict[str, float]] = {}
    for way, each in ways.items():
        parts = goodput.simulate(each, cost, interval, days=known["days"].value)
        shares[way] = parts | {"of_all_nodes": parts["goodput"] * nodes / (nodes + each.spares)}
    rests = {"save_seconds": KnownFigure(pause, _USUAL["agree_seconds"].source), **known}
    return {
        "mean_seconds_to_failure": mttf if fails else None,
        "islands": islands,
        "nodes": nodes,
        "down_seconds": one.notice_seconds + one.start_seconds,
        "checkpoint_bytes": num_bytes,
        **saving._asdict(),
        "step_seconds": step,
        "save_every_steps": every,
        "as_good_steps": near,
        "only_at_the_end": not fails or every == longest,
        "interval_seconds": interval if fails else None,
        "young_seconds": goodput.young(mttf, pause) if fails else None,
        "daly_seconds": goodput.daly(mttf, pause) if fails else None,
        "spare_nodes": one.spares,
        "smaller_layouts": [rung._asdict() for rung in smaller],
        "ways": shares,
        "best": (best := max(shares, key=lambda way: shares[way]["of_all_nodes"])),
        "goodput": shares[best]["goodput"],
        "figures": {key: each._asdict() for key, each in rests.items()},
    }


def time_left_of_sites(sites: SiteComparison, known: Mapping[str, KnownFigure]) -> dict[str, Any]:
    """The same of what a comparison of sites has taken, beside one job; ``known`` is of one site."""
    settings, count = sites.settings, sites.cluster.sites
    by = {"storage_gigabytes_per_second": count, "spare_nodes": count}
    whole = {key: each._replace(value=each.value * by.get(key, 1)) for key, each in known.items()}
    if sites.one is not None and sites.taken is sites.one:
        return time_left(sites.one, whole)
    between = settings.every * sites.task.mean_step_seconds(settings) / settings.shares
    found, one = time_left(sites.site, known, islands=count, between=between), None
    found["tokens_per_second"] = sites.tokens_per_second * found["goodput"]
    if sites.one is not None:
        whole["spare_nodes"] = KnownFigure(count * found["spare_nodes"], "as many as all islands have")
        one = time_left(sites.one, whole)
        one["tokens_per_second"] = sites.one_tokens_per_second * one["goodput"]
    return found | {"one_job": one}


def words(found: Mapping[str, Any]) -> list[str]:
    """What :func:`time_left` found, for people."""
    mttf, down, rungs = found["mean_seconds_to_failure"], found["down_seconds"], found["smaller_layouts"]
    where = f"nodes: {found['nodes']:,}" + f" of each of {found['islands']} islands" * (found["islands"] > 1)
    often = "no failure" if mttf is None else f"a failure every {mttf / 3600:,.1f} hours"
    lines = [
        "",
        f"what failures and saves leave of {found['figures']['days']['value']:g} days, simulated",
        f"{often} ({where}), then {seconds(down)} to the next step",
    ]
    size, later = amount(found["checkpoint_bytes"]), seconds(found["write_seconds"])
    lines.append(
        f"a save stops training for {seconds(found['pause_seconds'])}; its {size} are complete {later} later"
    )
    if mttf is None:
        lines.append("nothing fails, so that a save at the end is enough")
    else:
        few, most = found["as_good_steps"]
        rules = f"Young {seconds(found['young_seconds'])}, Daly {seconds(found['daly_seconds'])}"
        more = f"from {few:,} to {most:,} it costs at most {100 * _POINTS:g} points more"
        often = f"save every {found['save_every_steps']:,} steps ({rules}); {more}"
        end = f"save at the end: the run is no longer than what would be between two ({rules})"
        lines.append(end if found["only_at_the_end"] else often)
        if mttf < down:
            lines.append(
                "failures come faster than a start after one: few starts get to their first step, and the "
                "run gets nowhere. Use fewer or sturdier nodes, or start faster"
            )
    rows = [("", "goodput", "all nodes", *goodput.PARTS[1:])]
    for way, each in found["ways"].items():
        shown = [each[part] for part in ("goodput", "of_all_nodes", *goodput.PARTS[1:])]
        rows.append((way, *(f"{share:.1%}" for share in shown)))
    spare = f"{found['spare_nodes']}{' on each site' * (found['islands'] > 1)}"
    lines += ["", *aligned(rows), "", f"most of all nodes: {found['best']}; spare: {spare}"]
    for one, who in ((found, "islands"), (found.get("one_job"), "one job, which stops at every failure")):
        if one and found.get("one_job"):
            nodes = one["islands"] * (one["nodes"] + one["spare_nodes"] * (one["best"] == "spare nodes"))
            left = f"{one['goodput']:.1%}, {one['tokens_per_second']:,.0f} tokens/s, are left"
            lines.append(f"{who}: {left} ({one['best']}; nodes: {nodes:,} in all)")
    for rung in rungs:
        lines.append(f"a smaller layout (nodes: {rung['nodes']:,}): {rung['speed']:.1%} of the speed")
    lines.append('it rests on ("failures" in the cluster\'s file gives your own):')
    return lines + [f"  {key} {one['value']:.4g}: {one['source']}" for key, one in found["figures"].items()]


def _smaller(found: BestLayout) -> Iterator[Rung]:
    """Layouts of fewer data-parallel ranks that a run can go on in: they share the global batch, and fit."""
    inputs, layout, batch = found.inputs, found.best.layout, found.inputs.global_batch
    count, nodes = 0, inputs.cluster.hosts(inputs.gpus)
    for data in range(layout.data - 1, max(1, layout.data // 2) - 1, -1):
        if data * layout.mesh.cp % layout.mesh.ep:
            continue
        mesh = Mesh.of(**dict(layout.mesh.axes) | {"dp": data})
        needs = inputs.cluster.hosts(mesh.size)
        if batch % data or needs >= nodes or count == _MOST_RUNGS:
            continue
        micro = max(size for size in divisors(layout.micro_batch) if batch // data % size == 0)
        smaller, cap = replace(layout, mesh=mesh, micro_batch=micro), found.plan.cap_bytes
        try:
            if LayoutMemory(replace(inputs, gpus=mesh.size), found.predictor, cap)(smaller) > cap:
                continue
            taken = found.predictor.predict(smaller).seconds
        except DsxError:  # it cannot be run
            continue
        yield Rung(nodes=needs, speed=min(1.0, found.best.time.seconds / taken))
        count, nodes = count + 1, needs


_SHOWN = {
    "goodput": ("#009E73", "useful"),
    "saves": ("#0072B2", "saves stop training"),
    "again": ("#D55E00", "trained again"),
    "down": ("#CC79A7", "noticing, starting"),
    "waiting": ("#E69F00", "waiting for repairs"),
    "slower": ("#56B4E9", "a smaller layout"),
    "idle": ("#BBBBBB", "spare nodes, idle"),
}
_SEEN = 0.05  # percent: less is no colour
_REACH, _INTERVALS, _BARS = 16.0, 17, 6
_TICKS = {
    "1 s": 1,
    "5 s": 5,
    "15 s": 15,
    "1 min": 60,
    "5 min": 300,
    "15 min": 900,
    "1 h": 3600,
    "4 h": 14_400,
}
_TICKS |= {"1 d": 86_400, "7 d": 604_800}
_TITLE: dict[str, Any] = {"loc": "left", "fontsize": "medium", "color": INK}


def draw(found: Mapping[str, Any], title: str) -> Figure:
    """The picture of what :func:`dsx.planner.what_is_left.time_left` found, as a matplotlib figure.

    Islands, which lose what no round has had, are drawn over spare nodes alone.

    Raises:
        ConfigError: Nothing fails, or matplotlib is missing.
    """
    if found["mean_seconds_to_failure"] is None:
        raise ConfigError("--output", "nothing fails, so that there is nothing to draw", "give failure rates")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise no_matplotlib("dsx plan --goodput") from None
    alone = found["islands"] == 1
    figure = Figure(figsize=(10.5 if alone else 7.0, 4.8), layout="constrained")
    grid = figure.subplots(1, 1 + alone, squeeze=False, width_ratios=[3, 2][: 1 + alone])[0]
    if alone:
        _over_intervals(grid[0], found)
    _over_spares(grid[-1], found)
    keys: dict[str, Any] = {}
    for axes in grid:
        axes.grid(visible=True, axis="y", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(color=FAINT)
        axes.yaxis.set_major_formatter("{x:g} %")
        drawn, names = axes.get_legend_handles_labels()
        keys |= dict(zip(names, drawn, strict=True))
    figure.legend(keys.values(), keys.keys(), loc="outside lower center", ncols=3 + alone, frameon=False)
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize="medium", fontweight="bold")
    return figure


def _simulated(found: Mapping[str, Any], spares: int, interval: float, *, shrinks: bool) -> dict[str, float]:
    """Percents of the time of all nodes, the spare ones among them, by the same failures."""
    known = {key: each["value"] for key, each in found["figures"].items()}
    nodes, smaller = found["nodes"], found["smaller_layouts"] if shrinks else ()
    hazards = Hazards(
        rungs=(Rung(nodes), *(Rung(**rung) for rung in smaller)),
        failures_per_second=1 / found["mean_seconds_to_failure"],
        start_seconds=found["down_seconds"] - known["notice_seconds"],
        repair_seconds=3600 * known["repair_hours"],
        spares=spares,
        **{key: known[key] for key in ("notice_seconds", "other_layout_seconds", "lost_share")},
    )
    saving = SaveCost(found["pause_seconds"], found["write_seconds"])
    if found["islands"] > 1:
        between_saves = found["save_every_steps"] * found["step_seconds"]
        saving = SaveCost(saving.pause_seconds * interval / between_saves)
    parts, share = simulate(hazards, saving, interval, days=known["days"]), 100 * nodes / (nodes + spares)
    return {name: share * parts[name] for name in PARTS} | {"idle": 100 - share}


def _over_intervals(axes: Axes, found: Mapping[str, Any]) -> None:
    """Over the training between two saves, with what the best answer does while nodes are away."""
    step, every, way = found["step_seconds"], found["interval_seconds"], found["best"]
    first, last = max(step, every / _REACH), every * _REACH
    intervals = [first * (last / first) ** (place / (_INTERVALS - 1)) for place in range(_INTERVALS)]
    spares, shrinks = found["spare_nodes"] * (way == "spare nodes"), way.startswith("shrink")
    all_parts = [_simulated(found, spares, each, shrinks=shrinks) for each in intervals]
    rows = {name: [parts[name] for parts in all_parts] for name in _SHOWN}
    colours, names = zip(*(_SHOWN[name] for name, row in rows.items() if max(row) > _SEEN), strict=True)
    axes.stackplot(
        intervals, *(row for row in rows.values() if max(row) > _SEEN), colors=colours, labels=names
    )
    least = min(rows["goodput"])
    bottom, (few, most) = max(0.0, least - 0.25 * (100 - least)), found["as_good_steps"]
    axes.axvspan(few * step, most * step, color=INK, alpha=0.1, linewidth=0)
    for name, stroke, align in (("young", "--", "left"), ("daly", "-", "right")):
        at = found[f"{name}_seconds"]
        axes.axvline(at, color=INK, linestyle=stroke, linewidth=1.1)
        words = f" {name.title()}: {seconds(at)} "
        axes.text(at, bottom, words, ha=align, va="bottom", color="white", fontsize="small", clip_on=True)
    axes.set(xscale="log", xlim=(first, last), ylim=(bottom, 100))
    ticks = {name: at for name, at in _TICKS.items() if first <= at <= last}
    axes.set_xticks([*ticks.values()], [*ticks])
    axes.minorticks_off()
    axes.set_xlabel(f"training between two saves; shaded, as good: {few:,} to {most:,} steps", color=INK)
    axes.set_title(f"of the time of all nodes, saving every {found['save_every_steps']:,} steps", **_TITLE)


def _over_spares(axes: Axes, found: Mapping[str, Any]) -> None:
    """By what is done while nodes are away."""
    enough, every, way = found["spare_nodes"], found["interval_seconds"], found["best"]
    most = max(2 * enough, 3)
    counts = sorted({round(place * most / _BARS) for place in range(_BARS + 1)} | {enough})
    bars = {f"{count}": _simulated(found, count, every, shrinks=False) for count in counts}
    if found["smaller_layouts"]:
        bars["shrink"] = _simulated(found, 0, every, shrinks=True)
    floor = [0.0] * len(bars)
    for name, (colour, label) in _SHOWN.items():
        heights = [parts[name] for parts in bars.values()]
        if max(heights) > _SEEN:
            axes.bar([*bars], heights, bottom=floor, color=colour, label=label)
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    useful = [parts["goodput"] for parts in bars.values()]
    axes.set_ylim(max(0.0, min(useful) - 0.15 * (100 - min(useful))), 100)
    chosen = [*bars].index({"spare nodes": f"{enough}", "wait for the repair": "0"}.get(way, "shrink"))
    axes.get_xticklabels()[chosen].set_fontweight("bold")
    for place in {chosen, 0, len(bars) - 1, useful.index(max(useful))}:
        words = f"{useful[place]:.1f}"
        axes.text(place, useful[place], words, ha="center", va="top", color="white", fontsize="small")
    where = " of each island" * (found["islands"] > 1)
    axes.set_xlabel(f"spare nodes{where}, beside {found['nodes']:,}; 0 waits for the repair", color=INK)
    axes.set_title("by what is done while nodes are repaired", **_TITLE)
