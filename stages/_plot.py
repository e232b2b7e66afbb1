"""Line and interval plots as inline SVG: no script, no font, no file beside the page that holds them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP = 900, 74, 190, 14
COLOURS = ("#2563a8", "#c2571a", "#2c8a55", "#8a3fa0", "#a8872b", "#4a4f57", "#c0392b", "#1f8f99")


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A row of `intervals`: a value between two bounds, and the limit that it must stay below."""

    label: str
    value: float
    lower: float
    upper: float
    limit: float


def lines(series: Mapping[str, Mapping[str, float]], *, unit: str, height: int = 300) -> str:
    """Draw one line per series over shared categories, on a logarithmic axis; zero and missing values leave a gap.

    Args:
        series: label -> category -> value; categories keep the order in which they first appear.
        unit: the name of the vertical axis.
        height: of the drawing area, pixels.
    """
    categories = list(dict.fromkeys(name for values in series.values() for name in values))
    positive = [v for values in series.values() for v in values.values() if v > 0]
    if not positive:
        return "<p>nothing to draw: every value is zero</p>"
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 1e-9)
    high = max(high, low + 1)
    step = (WIDTH - LEFT - RIGHT) / max(1, len(categories) - 1)
    place = {name: LEFT + index * step for index, name in enumerate(categories)}

    def y_of(value: float) -> float:
        return TOP + height * (high - math.log10(value)) / (high - low)

    parts = []
    for power in range(low, high + 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    for index, name in enumerate(categories):
        if index % max(1, len(categories) // 32) == 0:
            parts.append(
                f'<text x="{place[name]:.1f}" y="{TOP + height + 12}" text-anchor="end" '
                f'transform="rotate(-45 {place[name]:.1f} {TOP + height + 12})">{escape(name)}</text>'
            )
    for index, (label, values) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        points = [(place[name], y_of(value)) for name, value in values.items() if value > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{colour}"/>' for x, y in points]
        y = TOP + 12 + 18 * index
        parts.append(f'<rect x="{WIDTH - RIGHT + 16}" y="{y - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{WIDTH - RIGHT + 32}" y="{y}">{escape(label)}</text>')
    middle = TOP + height / 2
    parts.append(f'<text x="14" y="{middle}" transform="rotate(-90 14 {middle})" text-anchor="middle">{escape(unit)}</text>')
    return _svg(parts, TOP + height + 120)


def intervals(rows: Sequence[Interval], *, unit: str) -> str:
    """Draw values with their bounds and limits, one row each, on a logarithmic axis."""
    values = [v for row in rows for v in (row.value, row.lower, row.upper, row.limit) if v > 0]
    if not values:
        return "<p>nothing to draw: every value is zero</p>"
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    left, right, pitch = 190, WIDTH - 30, 26
    height = pitch * len(rows)

    def x_of(value: float) -> float:
        position = (math.log10(max(value, 10.0**low)) - low) / max(1, high - low)
        return left + (right - left) * position

    parts = []
    for power in range(low, high + 1):
        x = x_of(10.0**power)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + height}" class="grid"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP + height + 16}" text-anchor="middle">1e{power}</text>')
    for index, row in enumerate(rows):
        y = TOP + pitch * (index + 0.5)
        colour = COLOURS[0] if row.upper <= row.limit else COLOURS[6]
        parts.append(f'<text x="{left - 10}" y="{y + 4:.1f}" text-anchor="end">{escape(row.label)}</text>')
        parts.append(
            f'<line x1="{x_of(row.lower):.1f}" x2="{x_of(row.upper):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{colour}" stroke-width="4"/>'
        )
        parts.append(f'<circle cx="{x_of(row.value):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        x = x_of(row.limit)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}" stroke="#222" stroke-width="2"/>')
    parts.append(f'<text x="{(left + right) / 2}" y="{TOP + height + 34}" text-anchor="middle">{escape(unit)}</text>')
    return _svg(parts, TOP + height + 44)


def _svg(parts: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
