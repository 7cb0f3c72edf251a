"""A schedule's timeline as a picture: SVG, an HTML page that stands alone, or a trace for ui.perfetto.dev.

One row per rank, time from left to right; colour is the op, shade the chunk, the number the micro-batch. A
measured step has two: as it ran and, below, as simulated. The trace (for chrome://tracing too) is JSON in the
Trace Event Format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from dsx.schedules.host_copies import host_plan
from dsx.schedules.schedule import TRANSFERS, Action, Op, Schedule
from dsx.schedules.simulate import Costs, Dependencies, Span, Timeline, peak_activations
from dsx.schedules.trace import Comparison, Executed, computation
from dsx.terminal import printable, shortened

INK, FAINT, GRID = "#1f2937", "#6b7280", "#e5e7eb"
"""Text, lesser text, lines."""
FONT = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"

_HUES: dict[Op, tuple[str, int, int]] = {
    Op.FORWARD: ("forward", 217, 72),
    Op.BACKWARD: ("backward", 152, 52),
    Op.BACKWARD_INPUT: ("backward: input gradient", 184, 62),
    Op.BACKWARD_WEIGHT: ("backward: weight gradients", 30, 84),
}
"""Of every op that computes: what the legend calls it, hue in degrees, saturation in percent."""

NAMES = {op: name for op, (name, _, _) in _HUES.items()}
"""What legends call the ops that compute."""


def shade(op: Op, chunk: int, num_chunks: int) -> tuple[str, str]:
    """Fill and text colours: the first chunk dark, the last one light.

    >>> shade(Op.FORWARD, 1, 2)
    ('#96b8ee', '#1f2937')
    """
    _, hue, saturation = _HUES[op]
    darkest, lightest = (40, 76) if op is not Op.BACKWARD_WEIGHT else (50, 80)
    light = darkest + (lightest - darkest) * chunk / max(1, num_chunks - 1)
    red, green, blue = hls_to_rgb(hue / 360, light / 100, saturation / 100)  # not every renderer reads hsl()
    bright = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2  # relative luminance, nearly
    fill = "#" + "".join(f"{round(255 * channel):02x}" for channel in (red, green, blue))
    return fill, INK if bright > 0.35 else "#ffffff"


def page(title: str, picture: str, *, rows: Sequence[str] = ()) -> str:
    """A page around an SVG timeline; pointing at an action says what its title does.

    Actions are groups with a ``data-m``, the micro-batch, and a title; classes in ``rows`` can be hidden.
    """
    boxes = "".join(f'<label><input type="checkbox" value="{row}" checked> {row}</label>\n' for row in rows)
    hide = f'<p class="rows">show\n{boxes}</p>\n' if rows else ""
    parts = {"title": escape(printable(title)), "picture": picture, "rows": hide, "font": FONT, "ink": INK}
    template = (files("dsx.schedules") / "page.html").read_text(encoding="utf-8")
    return re.sub(f"@({'|'.join(parts)})@", lambda found: parts[found[1]], template)


_RIGHT, _TOP = 108.0, 128.0
_NARROWEST, _WIDEST, _MOST_ZOOM = 1280.0, 1800.0, 4.0  # of the whole picture
_BOLD, _PLAIN = 0.61, 0.54  # width of a usual character of a heading over the font size, likewise
_MOST_NAME, _MOST_TITLE = 60, 160
_DIGIT = 0.68  # width of a bold digit over the font size, in the widest of the fonts above
_SMALLEST_TEXT, _LARGEST_TEXT = 6.0, 16.0
_MILLISECONDS = 1e3
_WAITS, _HIDDEN = "#b91c1c", "#facc15"


def svg(
    schedule: Schedule,
    timeline: Timeline,
    *,
    unit: str = "s",
    title: str | None = None,
    offloads: bool = False,
    costs: Costs | None = None,
) -> str:
    """Draw ``timeline`` of ``schedule`` as an SVG document.

    Args:
        schedule: What ran.
        timeline: When it ran, simulated or measured.
        unit: What one unit of the timeline's time is called: ``s``, or ``forwards`` when a forward costs 1.
        title: Headline; by default the schedule's name and size.
        offloads: Whether blocks' inputs go to the host: marks where the last one of a stage comes back.
        costs: What ``timeline`` was simulated with, in its unit: marks how long rows travel to experts.
    """
    comes: dict[Action, str] = {}
    for rank, row in enumerate(schedule.rows if offloads else ()):
        for place, keys in host_plan(schedule, rank).returns.items():
            comes[row[place]] = ", ".join(f"{m} of stage {stage}" for stage, m in keys)
    return _draw(
        _Picture(
            schedule=schedule,
            lanes=tuple(
                _Lane(rank, timeline, _TOP + 49.0 * rank, 40.0) for rank in range(schedule.num_ranks)
            ),
            title=title or _title(schedule),
            bubble=f"bubble {100 * timeline.bubble:.3g}% of the ideal time",
            facts=f"step: {_step(schedule, timeline, unit)}; {_peak(schedule)}",
            unit=unit,
            comes=comes,
            travels={} if costs is None else costs.exchanges(schedule.num_stages),
        )
    )


def html(
    schedule: Schedule,
    timeline: Timeline,
    *,
    unit: str = "s",
    title: str | None = None,
    **told: Any,
) -> str:
    """As :func:`svg`, in a self-contained page, where pointing at an action follows its micro-batch."""
    picture = svg(schedule, timeline, unit=unit, title=title, **told)
    return page(title or _title(schedule), picture)


def comparison_svg(comparison: Comparison) -> str:
    """Draw a measured step in milliseconds, each rank's simulated row below its measured one."""
    schedule = computation(comparison.trace.schedule)
    measured, simulated = _in_milliseconds(comparison.measured), _in_milliseconds(comparison.simulated)
    lanes = []
    for rank in range(schedule.num_ranks):
        y = _TOP + 71.0 * rank
        lanes += [
            _Lane(rank, measured, y, 34.0, "measured"),
            _Lane(rank, simulated, y + 36.0, 20.0, "simulated"),
        ]
    return _draw(
        _Picture(
            schedule=schedule,
            lanes=tuple(lanes),
            title=comparison_title(comparison),
            bubble=f"bubble {100 * measured.bubble:.3g}% of the ideal time, "
            f"simulated {100 * simulated.bubble:.3g}%",
            facts=f"step: {milliseconds(comparison.measured.seconds)}, "
            f"simulated {milliseconds(comparison.simulated.seconds)} ({comparison.excess:+.1%})",
            unit="ms",
            tips={executed.action: _tip(executed) for row in comparison.actions for executed in row},
        )
    )


def comparison_page(comparison: Comparison) -> str:
    """The drawing of :func:`comparison_svg` in a self-contained page; pointing at an action shows its error.

    Either row can be hidden.
    """
    return page(comparison_title(comparison), comparison_svg(comparison), rows=("measured", "simulated"))


def comparison_title(comparison: Comparison) -> str:
    """The schedule's name and size, the step and the device."""
    trace = comparison.trace
    device = f" on {trace.device}" if trace.device else ""
    return f"{_title(trace.schedule)}; step {trace.step}{device}"


@dataclass(frozen=True, slots=True)
class _Lane:
    """One row of boxes: a rank's actions. Two lanes of a rank have names."""

    rank: int
    timeline: Timeline
    y: float
    height: float
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Picture:
    schedule: Schedule
    lanes: tuple[_Lane, ...]
    title: str
    bubble: str
    facts: str
    unit: str
    tips: Mapping[Action, str] | None = None
    """What pointing at an action says; by default when it runs."""
    comes: Mapping[Action, str] = field(default_factory=dict)
    """What begins to come back from the host when an action begins."""
    travels: Mapping[Op, Sequence[tuple[float, float, float]]] = field(default_factory=dict)
    """How long rows travel in an action; see :meth:`dsx.schedules.simulate.Costs.exchanges`."""

    @property
    def seconds(self) -> float:
        """The length of the longest lane, in the picture's unit."""
        return max(lane.timeline.seconds for lane in self.lanes) or 1.0


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where things lie, in units of the picture, which is shown with ``zoom`` pixels per unit."""

    left: float
    bottom: float
    """Where the last lane ends."""
    digits: int
    """Of the largest micro-batch number."""
    largest_text: float
    numbered: bool
    """Whether any action is long enough for its number."""
    scale: float
    """Units of the picture per unit of time."""
    plot_width: float
    zoom: float

    @classmethod
    def of(cls, picture: _Picture) -> _Frame:
        """A frame wide enough for legible numbers in all but the shortest tenth of actions, within reason."""
        spans = (span for lane in picture.lanes for span in lane.timeline.spans[lane.rank])
        lengths = sorted(end - start for _, start, end in spans if end > start)
        short = lengths[len(lengths) // 10] if lengths else 1.0
        digits = len(str(picture.schedule.num_micro_batches - 1))
        wanted = picture.seconds / short * (5 + 7 * digits)
        last = picture.lanes[-1]
        left = (158.0 if last.name else 92.0) + 9 * max(0, len(str(last.rank)) - 2)
        around = left + _RIGHT
        plot_width = min(max(wanted, _NARROWEST - around), _WIDEST - around)
        scale = plot_width / picture.seconds
        zoom = min(max(wanted / plot_width, 1.0), _MOST_ZOOM)
        largest = min(_LARGEST_TEXT, 1.4 * _fitting(short * scale, digits))
        longest = lengths[-1] if lengths else 0.0
        return cls(
            left=left,
            bottom=last.y + last.height,
            digits=digits,
            largest_text=largest,
            numbered=min(largest, _fitting(longest * scale, digits)) * zoom >= _SMALLEST_TEXT,
            scale=scale,
            plot_width=plot_width,
            zoom=zoom,
        )

    @property
    def width(self) -> float:
        return self.left + self.plot_width + _RIGHT

    @property
    def height(self) -> float:
        return self.bottom + 104

    def x(self, time: float) -> float:
        return self.left + time * self.scale


def _draw(picture: _Picture) -> str:
    frame = _Frame.of(picture)
    body = "\n".join(
        (
            *_defs(picture.schedule),
            f'<rect width="{frame.width:.0f}" height="{frame.height:.0f}" fill="white"/>',
            *_heading(frame, picture),
            *_axis(frame, picture),
            *(line for lane in picture.lanes for line in _row(frame, picture, lane)),
            *_legend(frame, picture),
        )
    )
    size = f'width="{frame.width * frame.zoom:.0f}" height="{frame.height * frame.zoom:.0f}"'
    box = f'viewBox="0 0 {frame.width:.0f} {frame.height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} font-family="{FONT}">\n{body}\n</svg>\n'


def _fitting(width: float, digits: int) -> float:
    """The font size at which so many digits fill a box."""
    return 0.9 * width / (_DIGIT * digits)


def _tip(ran: Executed) -> str:
    """The tip for an action: both its runs, in milliseconds."""
    times = (ran.start, ran.end, ran.simulated_start, ran.simulated_end, ran.start_error, ran.duration_error)
    start, end, on_paper, until, late, longer = (_MILLISECONDS * value for value in times)
    return (
        f"{ran.action}: {start:.2f} to {end:.2f} ms; simulated {on_paper:.2f} to {until:.2f} ms "
        f"(start {late:+.2f}, duration {longer:+.2f} ms)"
    )


def milliseconds(duration: float) -> str:
    """Seconds as milliseconds, with about four figures.

    >>> [milliseconds(value) for value in (1.23456, 0.0123456, 0.00001234, -0.0005, 0.0099999999)]
    ['1234.6 ms', '12.35 ms', '0.012 ms', '-0.500 ms', '10.00 ms']
    """
    value = _MILLISECONDS * duration
    size = abs(float(f"{value:.4g}"))
    digits = 1 if size >= 100 else 2 if size >= 10 else 3
    return f"{value:.{digits}f} ms"


def _in_milliseconds(timeline: Timeline) -> Timeline:
    rows = (((a, start * _MILLISECONDS, end * _MILLISECONDS) for a, start, end in r) for r in timeline.spans)
    return Timeline(tuple(tuple(row) for row in rows))


def _title(schedule: Schedule) -> str:
    sizes = [(schedule.num_ranks, "rank", "ranks")]
    if schedule.num_chunks > 1:
        sizes.append((schedule.num_chunks, "chunk", "chunks"))
    sizes.append((schedule.num_micro_batches, "micro-batch", "micro-batches"))
    return f"{shortened(schedule.name, _MOST_NAME)}: " + ", ".join(
        f"{n} {one if n == 1 else many}" for n, one, many in sizes
    )


def _step(schedule: Schedule, timeline: Timeline, unit: str) -> str:
    whose = " of a chunk" if unit == "forwards" and schedule.num_chunks > 1 else ""
    return f"{timeline.seconds:.4g} {unit}{whose}"


_MOST_PEAKS = 8


def _peak(schedule: Schedule) -> str:
    """Each rank's most micro-batches in flight; of many ranks the most and the least."""
    peaks = [round(peak / schedule.num_chunks, 2) for peak in peak_activations(schedule)]
    high, low = max(peaks), min(peaks)
    if high == low:
        words = f"{_plain(high)} micro-batch{'' if high == 1 else 'es'}"
        words += " on every rank" if len(peaks) > 1 else ""
    elif len(peaks) <= _MOST_PEAKS:
        words = f"{', '.join(map(_plain, peaks))} micro-batches on ranks 0 to {len(peaks) - 1}"
    else:
        words = f"{_plain(high)} micro-batches on rank {peaks.index(high)}"
        words += f" to {_plain(low)} on rank {peaks.index(low)}"
    return f"peak activations: {words}"


def _fit(size: float, width: float, room: float) -> float:
    """The font size, or a smaller one, at which text that is ``width`` wide at size 1 fits into ``room``."""
    return min(size, max(room / width, size / 3))


def _heading(frame: _Frame, picture: _Picture) -> Iterator[str]:
    room = frame.width - frame.left - 12
    title = shortened(printable(picture.title), _MOST_TITLE)
    yield (
        f'<text x="{frame.left:.0f}" y="50" font-size="{_fit(27, _BOLD * len(title), room):.3g}" '
        f'font-weight="700" fill="{INK}">{escape(title)}</text>'
    )
    width = _BOLD * len(picture.bubble) + _PLAIN * len(picture.facts) + 1
    yield (
        f'<text x="{frame.left:.0f}" y="84" font-size="{_fit(18, width, room):.3g}" fill="{INK}">'
        f'<tspan font-weight="700">{escape(picture.bubble)}</tspan>'
        f'<tspan fill="{FAINT}" dx="18">{escape(picture.facts)}</tspan></text>'
    )


def _axis(frame: _Frame, picture: _Picture) -> Iterator[str]:
    seconds = picture.seconds
    step = _round_step(seconds * 90 / frame.plot_width)
    base = frame.bottom + 8
    for i in range(int(seconds / step * (1 + 1e-9)) + 1):
        x = frame.x(i * step)
        yield f'<path d="M{x:.1f} {_TOP - 8:.1f}V{base:.1f}" stroke="{GRID}"/>'
        yield (
            f'<text x="{x:.1f}" y="{base + 17:.1f}" font-size="13" fill="{FAINT}" '
            f'text-anchor="middle">{_plain(i * step)}</text>'
        )
    yield (
        f'<text x="{frame.x(seconds) + 24:.1f}" y="{base + 17:.1f}" font-size="13" fill="{FAINT}">'
        f"{escape(picture.unit)}</text>"
    )


def _plain(value: float) -> str:
    """A number of an axis without an exponent, if it is large."""
    return f"{value:,.0f}" if value >= 1e6 else f"{value:.6g}"


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``least``."""
    power = 10.0 ** len(str(int(least))) if least >= 1 else 1.0
    while power >= least > 0:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= least)


def _row(frame: _Frame, picture: _Picture, lane: _Lane) -> Iterator[str]:
    middle = lane.y + lane.height / 2 + 5.5
    busy = lane.timeline.busy_seconds[lane.rank] / (lane.timeline.seconds or 1.0)
    if lane.name != "simulated":
        yield (
            f'<text x="{frame.left - (88 if lane.name else 14):.0f}" y="{middle:.1f}" font-size="16" '
            f'text-anchor="end" fill="{INK}">rank {lane.rank}</text>'
        )
    named = f' class="{lane.name}"' if lane.name else ""
    if lane.name:
        yield (
            f'<text{named} x="{frame.left - 10:.0f}" y="{middle - 1:.1f}" font-size="12.5" '
            f'text-anchor="end" fill="{FAINT}">{lane.name}</text>'
        )
    idle = (
        f'<rect{named} x="{frame.left:.1f}" y="{lane.y:.1f}" '
        f'width="{lane.timeline.seconds * frame.scale:.1f}" height="{lane.height:.0f}" fill="url(#idle)"/>'
    )
    boxes = "\n".join(_box(frame, picture, lane, span) for span in lane.timeline.spans[lane.rank])
    yield f"{idle}\n<g{named}>\n{boxes}\n</g>" if lane.name else f"{idle}\n{boxes}"
    yield (
        f'<text{named} x="{frame.x(picture.seconds) + 14:.1f}" y="{middle:.1f}" '
        f'font-size="{14 if lane.height > 30 else 12.5}" fill="{FAINT}">{busy:.1%} busy</text>'
    )


def _box(frame: _Frame, picture: _Picture, lane: _Lane, span: Span) -> str:
    action, start, end = span
    x, width = frame.x(start), (end - start) * frame.scale
    number = str(action.micro_batch)
    size = min(frame.largest_text, _fitting(width, frame.digits), 0.7 * lane.height)
    text = ""
    if size * frame.zoom >= _SMALLEST_TEXT:
        text = f'<text x="{x + width / 2:.2f}" y="{lane.y + lane.height / 2 + size * 0.36:.1f}" '
        text += f'font-size="{size:.1f}">{number}</text>'
    tip = f"{action}: {start:.6g} to {end:.6g}" if picture.tips is None else picture.tips[action]
    mark = ""
    if action in picture.comes:
        tip += f"; from the host comes the last input of {picture.comes[action]}"
        foot = f'x="{x + 3:.2f}" y="{lane.y + lane.height - 7:.1f}" width="{min(10.0, width / 2):.2f}"'
        mark = f'<rect {foot} height="4" fill="#ffffff" style="fill:#ffffff"/>'
    waits, hidden, _ = picture.travels[action.op][action.stage] if picture.travels else (0.0, 0.0, 0.0)
    if waits or hidden:
        tip += f"; rows travel for {waits + hidden:.4g}, of which {hidden:.4g} are hidden"
        for at, length, fill in ((0.0, waits, _WAITS), (waits, hidden, _HIDDEN)):
            edge = f'x="{frame.x(start + at):.2f}" y="{lane.y:.1f}" width="{length * frame.scale:.2f}"'
            mark += f'<rect {edge} height="6" fill="{fill}" style="fill:{fill}"/>'
    apart, chunk = min(1.0, width / 10), picture.schedule.chunk_of(action.stage)
    return (
        f'<g class="{action.op}{chunk}" data-m="{number}"><title>{escape(tip)}</title>'
        f'<rect x="{x:.2f}" y="{lane.y:.1f}" width="{width - apart:.2f}" height="{lane.height:.0f}" '
        f'rx="{2.5 * apart:.2g}"/>'
        f"{text}{mark}</g>"
    )


def used_ops(schedule: Schedule) -> list[Op]:
    """The ops of a schedule that compute, in the legend's order."""
    used = {action.op for row in schedule.rows for action in row}
    return [op for op in NAMES if op in used]


def _defs(schedule: Schedule) -> Iterator[str]:
    yield "<style>"
    yield "g text{text-anchor:middle;font-weight:600}"
    for op in used_ops(schedule):
        for chunk in range(schedule.num_chunks):
            fill, ink = shade(op, chunk, schedule.num_chunks)
            yield f".{op}{chunk} rect{{fill:{fill}}}.{op}{chunk} text{{fill:{ink}}}"
    yield "</style>"
    yield (
        '<defs><pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="7" height="7" fill="#f6f7f9"/>'
        '<path d="M0 0V7" stroke="#dde1e7" stroke-width="2"/></pattern></defs>'
    )


_MOST_SHADES = 3


def _legend(frame: _Frame, picture: _Picture) -> Iterator[str]:
    schedule = picture.schedule
    x, y = frame.left, frame.bottom + 66.0
    last = schedule.num_chunks - 1
    shown = sorted({last * part // _MOST_SHADES for part in range(_MOST_SHADES + 1)})
    for op in used_ops(schedule):
        for chunk in shown:
            fill, _ = shade(op, chunk, schedule.num_chunks)
            yield f'<rect x="{x:.0f}" y="{y - 14:.0f}" width="18" height="18" rx="2.5" fill="{fill}"/>'
            x += 21
        name = NAMES[op]
        yield f'<text x="{x + 5:.0f}" y="{y:.0f}" font-size="15" fill="{INK}">{name}</text>'
        x += 5 + 8.2 * len(name) + 22
    yield f'<rect x="{x:.0f}" y="{y - 14:.0f}" width="18" height="18" fill="url(#idle)" stroke="#dde1e7"/>'
    yield f'<text x="{x + 26:.0f}" y="{y:.0f}" font-size="15" fill="{INK}">idle</text>'
    notes = [f"dark to light: chunk 0 to {last}"] if last else []
    notes += ["number: micro-batch"] if frame.numbered else []
    notes += ["white foot: a last input begins to come from the host"] * bool(picture.comes)
    travels = any(any(each) for stages in picture.travels.values() for each in stages)
    notes += ["edge: rows travel to experts, waited for (red) or hidden (yellow)"] * travels
    words, x = "; ".join(notes), x + 82
    if x + 15 * _PLAIN * len(words) > frame.width - 8:  # no room beside the colours
        x, y = frame.left, y + 26
    if words:
        yield f'<text x="{x:.0f}" y="{y:.0f}" font-size="15" fill="{FAINT}">{words}</text>'


_MICROSECONDS = 1e6

Event = dict[str, Any]


def chrome_trace(schedule: Schedule, timelines: Mapping[str, Timeline]) -> str:
    """Trace of timelines of ``schedule`` by name, in seconds: a process per timeline, a thread per rank.

    Arrows lead from the action that yields an activation or a gradient to the one on another rank that uses
    it.
    """
    depends = Dependencies(computation(schedule))
    events: list[Event] = []
    for process, (name, timeline) in enumerate(timelines.items()):
        events += _names(process, f"{schedule.name}, {name}", schedule.num_ranks)
        for rank, row in enumerate(timeline.spans):
            events += (_slice(schedule, process, rank, span) for span in row)
        events += _arrows(schedule, depends, process, timeline)
    return _document(events)


def comparison_trace(comparison: Comparison) -> str:
    """Trace of a measured step, transfers and the step's end included, above its simulation.

    The arguments of each measured computation say when the simulation has it, how far off that is, and what
    it waited for.
    """
    trace = comparison.trace
    schedule = computation(trace.schedule)
    depends = Dependencies(schedule)
    found = {executed.action: executed for row in comparison.actions for executed in row}
    title = f"{schedule.name}, step {trace.step}"
    events: list[Event] = [*_names(0, f"{title}, measured", schedule.num_ranks)]
    for rank, row in enumerate(trace.spans):
        for span in row:
            more = {} if span[0].op in TRANSFERS else _errors(schedule, found[span[0]])
            events.append(_slice(schedule, 0, rank, span, more))
        events.append(_tail(rank, row[-1][2], trace.tail_seconds[rank]))
    events += _arrows(schedule, depends, 0, comparison.measured)
    events += _names(1, f"{title}, simulated", schedule.num_ranks)
    for rank, row in enumerate(comparison.simulated.spans):
        events += (_slice(schedule, 1, rank, span) for span in row)
    events += _arrows(schedule, depends, 1, comparison.simulated)
    return _document(events)


def _document(events: list[Event]) -> str:
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"


def _names(process: int, name: str, num_ranks: int) -> Iterator[Event]:
    yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for rank in range(num_ranks):
        place = {"ph": "M", "pid": process, "tid": rank}
        yield {**place, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**place, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slice(
    schedule: Schedule, process: int, rank: int, span: Span, more: Mapping[str, Any] | None = None
) -> Event:
    action, start, end = span
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.op.value,
        "pid": process,
        "tid": rank,
        "ts": start * _MICROSECONDS,
        "dur": (end - start) * _MICROSECONDS,
        "args": {
            "stage": action.stage,
            "chunk": schedule.chunk_of(action.stage),
            "micro_batch": action.micro_batch,
            **(more or {}),
        },
    }


def _errors(schedule: Schedule, ran: Executed) -> dict[str, Any]:
    """What the simulation says of a measured action."""
    times = {
        "simulated_start_ms": ran.simulated_start,
        "simulated_duration_ms": ran.simulated_end - ran.simulated_start,
        "start_error_ms": ran.start_error,
        "duration_error_ms": ran.duration_error,
        "gap_ms": ran.gap,
        "lost_ms": ran.lost,
    }
    values: dict[str, Any] = {name: round(_MILLISECONDS * value, 6) for name, value in times.items()}
    if ran.waited_for is not None:
        values["waited_for"] = f"{ran.waited_for} on rank {schedule.rank_of(ran.waited_for.stage)}"
    if ran.held_up_by is not None:
        values["held_up_by"] = str(ran.held_up_by)
    return values


def _tail(rank: int, start: float, seconds: float) -> Event:
    place = {"ph": "X", "name": "end of step", "cat": "step", "pid": 0, "tid": rank}
    return {**place, "ts": start * _MICROSECONDS, "dur": seconds * _MICROSECONDS}


def _arrows(schedule: Schedule, depends: Dependencies, process: int, timeline: Timeline) -> Iterator[Event]:
    spans: dict[Action, Span] = {span[0]: span for row in timeline.spans for span in row}
    for number, (action, start, _) in enumerate(spans.values()):
        need = depends.on(action)
        if need is None or need not in spans:
            continue
        source, rank = schedule.rank_of(need.stage), schedule.rank_of(action.stage)
        if source == rank:
            continue
        _, began, ended = spans[need]
        # An arrow belongs to the slice around its time, so it must leave just before that slice ends.
        leaves = ended - (ended - began) * 1e-3
        ends = {"name": "transfer", "cat": "transfer", "pid": process, "id": f"{process}.{number}"}
        yield {**ends, "ph": "s", "tid": source, "ts": leaves * _MICROSECONDS}
        yield {**ends, "ph": "f", "bp": "e", "tid": rank, "ts": start * _MICROSECONDS}
