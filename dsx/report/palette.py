"""Colours and font of pictures. An action's hue is its op, its shade the chunk."""

from __future__ import annotations

from dsx.spec.schedule import Op

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
    red, green, blue = _rgb(hue, saturation / 100, light / 100)
    bright = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2  # relative luminance, nearly
    fill = "#" + "".join(f"{round(255 * channel):02x}" for channel in (red, green, blue))
    return fill, INK if bright > 0.35 else "#ffffff"


def _rgb(hue: float, saturation: float, light: float) -> tuple[float, float, float]:
    """HSL to RGB, 0 to 1: not every SVG renderer reads hsl()."""
    amplitude = saturation * min(light, 1 - light)

    def channel(offset: int) -> float:
        k = (offset + hue / 30) % 12
        return light - amplitude * max(-1.0, min(k - 3, 9 - k, 1.0))

    return channel(0), channel(8), channel(4)
