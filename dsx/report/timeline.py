"""A schedule's timeline as a picture: SVG, or an HTML page that stands alone.

One row per rank, time from left to right; colour is the op, shade the chunk, the number the micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from dsx.plan.simulate import Span, Timeline
from dsx.plan.validate import peak_activations
from dsx.spec.schedule import Action, Op, Schedule

_HUES: dict[Op, tuple[str, int, int]] = {
    Op.FORWARD: ("forward", 217, 72),
    Op.BACKWARD: ("backward", 152, 52),
    Op.BACKWARD_INPUT: ("backward: input gradient", 184, 62),
    Op.BACKWARD_WEIGHT: ("backward: weight gradients", 30, 84),
}
"""Of every op that computes: what the legend calls it, hue in degrees, saturation in percent."""

_FONT = "Inter, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_INK, _FAINT, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_ROW, _GAP, _LEFT, _RIGHT, _TOP = 40.0, 9.0, 92.0, 120.0, 128.0
_NARROWEST, _WIDEST, _MOST_ZOOM = 1180.0, 1600.0, 4.0
_DIGIT = 0.68  # width of a bold digit over the font size, in the widest of the fonts above
_SMALLEST_TEXT, _LARGEST_TEXT = 6.0, 16.0


def svg(schedule: Schedule, timeline: Timeline, *, unit: str = "s", title: str | None = None) -> str:
    """Draw ``timeline`` of ``schedule`` as an SVG document.

    Args:
        schedule: What ran.
        timeline: When it ran, simulated or measured.
        unit: What one unit of the timeline's time is called: ``s``, or ``forwards`` when a forward costs 1.
        title: Headline; by default the schedule's name and size.
    """
    frame = _Frame.of(schedule, timeline)
    body = "\n".join(
        (
            *_defs(schedule),
            f'<rect width="{frame.width:.0f}" height="{frame.height:.0f}" fill="white"/>',
            *_heading(schedule, timeline, title or _title(schedule), unit),
            *_axis(frame, timeline.seconds, unit),
            *(line for rank in range(schedule.num_ranks) for line in _row(frame, schedule, timeline, rank)),
            *_legend(frame, schedule),
        )
    )
    size = f'width="{frame.width * frame.zoom:.0f}" height="{frame.height * frame.zoom:.0f}"'
    box = f'viewBox="0 0 {frame.width:.0f} {frame.height:.0f}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {box} font-family="{_FONT}">\n{body}\n</svg>\n'


def html(schedule: Schedule, timeline: Timeline, *, unit: str = "s", title: str | None = None) -> str:
    """As :func:`svg`, in a page that needs nothing else: pointing at an action follows its micro-batch."""
    picture = svg(schedule, timeline, unit=unit, title=title)
    return _PAGE.format(title=escape(title or _title(schedule)), picture=picture)


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where things lie, in the units of the picture; it is shown ``zoom`` pixels per unit large."""

    num_ranks: int
    digits: int
    """Of the largest micro-batch number."""
    largest_text: float
    scale: float
    """Units of the picture per unit of time."""
    plot_width: float
    zoom: float

    @classmethod
    def of(cls, schedule: Schedule, timeline: Timeline) -> _Frame:
        """Wide enough for a legible number in the shortest action, within reason."""
        lengths = [end - start for row in timeline.spans for _, start, end in row if end > start]
        digits = len(str(schedule.num_micro_batches - 1))
        wanted = timeline.seconds / min(lengths, default=1.0) * (5 + 7 * digits)
        plot_width = min(max(wanted, _NARROWEST), _WIDEST)
        zoom = min(max(wanted / _WIDEST, 1.0), _MOST_ZOOM)
        scale = plot_width / (timeline.seconds or 1.0)
        least = _fitting(min(lengths, default=1.0) * scale, digits)
        return cls(schedule.num_ranks, digits, min(_LARGEST_TEXT, 1.4 * least), scale, plot_width, zoom)

    @property
    def width(self) -> float:
        """Of the picture."""
        return _LEFT + self.plot_width + _RIGHT

    @property
    def bottom(self) -> float:
        """Where the last row ends."""
        return _TOP + self.num_ranks * (_ROW + _GAP) - _GAP

    @property
    def height(self) -> float:
        """Of the picture."""
        return self.bottom + 104

    def x(self, time: float) -> float:
        """Of a point in time."""
        return _LEFT + time * self.scale

    def y(self, rank: int) -> float:
        """Of a rank's upper edge."""
        return _TOP + rank * (_ROW + _GAP)


def _fitting(width: float, digits: int) -> float:
    """Font size at which so many digits fill a box."""
    return 0.9 * width / (_DIGIT * digits)


def _title(schedule: Schedule) -> str:
    sizes = [(schedule.num_ranks, "rank", "ranks")]
    if schedule.num_chunks > 1:
        sizes.append((schedule.num_chunks, "chunk", "chunks"))
    sizes.append((schedule.num_micro_batches, "micro-batch", "micro-batches"))
    return f"{schedule.name}: " + ", ".join(f"{n} {one if n == 1 else many}" for n, one, many in sizes)


def _heading(schedule: Schedule, timeline: Timeline, title: str, unit: str) -> Iterator[str]:
    peak = max(peak_activations(schedule)) / schedule.num_chunks
    facts = (
        f"{100 * timeline.bubble:.3g}% of the ideal time",
        f"step: {timeline.seconds:.4g} {unit}; peak activations: {peak:.4g} micro-batches a rank",
    )
    yield (
        f'<text x="{_LEFT:.0f}" y="50" font-size="27" font-weight="700" fill="{_INK}">{escape(title)}</text>'
    )
    yield (
        f'<text x="{_LEFT:.0f}" y="84" font-size="18" fill="{_INK}"><tspan font-weight="700">bubble '
        f'{facts[0]}</tspan><tspan fill="{_FAINT}" dx="18">{escape(facts[1])}</tspan></text>'
    )


def _axis(frame: _Frame, seconds: float, unit: str) -> Iterator[str]:
    step = _round_step(seconds * 90 / frame.plot_width)
    base = frame.bottom + 8
    for i in range(int(seconds / step * (1 + 1e-9)) + 1):
        x = frame.x(i * step)
        yield f'<path d="M{x:.1f} {_TOP - 8:.1f}V{base:.1f}" stroke="{_GRID}"/>'
        yield (
            f'<text x="{x:.1f}" y="{base + 17:.1f}" font-size="13" fill="{_FAINT}" '
            f'text-anchor="middle">{i * step:.6g}</text>'
        )
    yield (
        f'<text x="{frame.x(seconds) + 14:.1f}" y="{base + 17:.1f}" font-size="13" fill="{_FAINT}">'
        f"{escape(unit)}</text>"
    )


def _round_step(least: float) -> float:
    """1, 2 or 5 times a power of ten, at least ``least``."""
    power = 10.0 ** len(str(int(least))) if least >= 1 else 1.0
    while power >= least > 0:
        power /= 10
    return next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor >= least)


def _row(frame: _Frame, schedule: Schedule, timeline: Timeline, rank: int) -> Iterator[str]:
    y, middle = frame.y(rank), frame.y(rank) + _ROW / 2 + 5.5
    busy = timeline.busy_seconds[rank] / (timeline.seconds or 1.0)
    yield (
        f'<text x="{_LEFT - 14:.0f}" y="{middle:.1f}" font-size="16" text-anchor="end" '
        f'fill="{_INK}">rank {rank}</text>'
    )
    yield (
        f'<rect x="{_LEFT:.1f}" y="{y:.1f}" width="{frame.plot_width:.1f}" height="{_ROW:.0f}" '
        'fill="url(#idle)"/>'
    )
    for span in timeline.spans[rank]:
        yield _box(frame, schedule, span, y)
    yield (
        f'<text x="{frame.x(timeline.seconds) + 14:.1f}" y="{middle:.1f}" font-size="14" '
        f'fill="{_FAINT}">{busy:.1%} busy</text>'
    )


def _box(frame: _Frame, schedule: Schedule, span: Span, y: float) -> str:
    action, start, end = span
    x, width = frame.x(start), (end - start) * frame.scale
    number = str(action.micro_batch)
    size = min(frame.largest_text, _fitting(width, frame.digits))
    text = ""
    if size * frame.zoom >= _SMALLEST_TEXT:
        text = f'<text x="{x + width / 2:.2f}" y="{y + _ROW / 2 + size * 0.36:.1f}" font-size="{size:.1f}">'
        text += f"{number}</text>"
    tip = f"{action}: {start:.6g} to {end:.6g}"
    apart = min(1.0, width / 10)
    return (
        f'<g class="{_style(schedule, action)}" data-m="{number}"><title>{tip}</title>'
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{width - apart:.2f}" height="{_ROW:.0f}" '
        f'rx="{2.5 * apart:.2g}"/>'
        f"{text}</g>"
    )


def _style(schedule: Schedule, action: Action) -> str:
    return f"{action.op}{schedule.chunk_of(action.stage)}"


def _used(schedule: Schedule) -> list[Op]:
    used = {action.op for row in schedule.rows for action in row}
    return [op for op in _HUES if op in used]


def _shade(op: Op, chunk: int, num_chunks: int) -> tuple[str, str]:
    """Fill and text colours: the first chunk dark, the last one light."""
    _, hue, saturation = _HUES[op]
    darkest, lightest = (40, 76) if op is not Op.BACKWARD_WEIGHT else (50, 80)
    light = darkest + (lightest - darkest) * chunk / max(1, num_chunks - 1)
    red, green, blue = _rgb(hue, saturation / 100, light / 100)
    bright = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2  # relative luminance, nearly
    fill = "#" + "".join(f"{round(255 * channel):02x}" for channel in (red, green, blue))
    return fill, _INK if bright > 0.35 else "#ffffff"


def _rgb(hue: float, saturation: float, light: float) -> tuple[float, float, float]:
    """HSL to RGB, 0 to 1: not every SVG renderer reads hsl()."""
    amplitude = saturation * min(light, 1 - light)

    def channel(offset: int) -> float:
        k = (offset + hue / 30) % 12
        return light - amplitude * max(-1.0, min(k - 3, 9 - k, 1.0))

    return channel(0), channel(8), channel(4)


def _defs(schedule: Schedule) -> Iterator[str]:
    yield "<style>"
    yield "g text{text-anchor:middle;font-weight:600}"
    for op in _used(schedule):
        for chunk in range(schedule.num_chunks):
            fill, ink = _shade(op, chunk, schedule.num_chunks)
            yield f".{op}{chunk} rect{{fill:{fill}}}.{op}{chunk} text{{fill:{ink}}}"
    yield "</style>"
    yield (
        '<defs><pattern id="idle" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect width="7" height="7" fill="#f6f7f9"/>'
        '<path d="M0 0V7" stroke="#dde1e7" stroke-width="2"/></pattern></defs>'
    )


def _legend(frame: _Frame, schedule: Schedule) -> Iterator[str]:
    x, y = _LEFT, frame.bottom + 66.0
    for op in _used(schedule):
        for chunk in range(schedule.num_chunks):
            fill, _ = _shade(op, chunk, schedule.num_chunks)
            yield f'<rect x="{x:.0f}" y="{y - 14:.0f}" width="18" height="18" rx="2.5" fill="{fill}"/>'
            x += 21
        name = _HUES[op][0]
        yield f'<text x="{x + 5:.0f}" y="{y:.0f}" font-size="15" fill="{_INK}">{name}</text>'
        x += 5 + 7.6 * len(name) + 26
    yield f'<rect x="{x:.0f}" y="{y - 14:.0f}" width="18" height="18" fill="url(#idle)" stroke="#dde1e7"/>'
    notes = ["idle"]
    if schedule.num_chunks > 1:
        notes.append(f"dark to light: chunk 0 to {schedule.num_chunks - 1}")
    notes.append("number: micro-batch")
    yield (
        f'<text x="{x + 26:.0f}" y="{y:.0f}" font-size="15" fill="{_INK}">{notes[0]}'
        f'<tspan dx="28" fill="{_FAINT}">{"; ".join(notes[1:])}</tspan></text>'
    )


_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ margin: 0; background: #fff; overflow: auto }}
.one g[data-m] {{ opacity: 0.18 }}
.one g.on {{ opacity: 1 }}
</style>
{picture}
<script>
// Pointing at an action keeps its micro-batch bright and dims the others.
const picture = document.querySelector("svg");
picture.addEventListener("mouseover", (event) => {{
  const box = event.target.closest("g[data-m]");
  picture.classList.toggle("one", box !== null);
  for (const other of picture.querySelectorAll("g.on")) other.classList.remove("on");
  if (box)
    for (const other of picture.querySelectorAll(`g[data-m="${{box.dataset.m}}"]`)) other.classList.add("on");
}});
picture.addEventListener("mouseleave", () => picture.classList.remove("one"));
</script>
</html>
"""
