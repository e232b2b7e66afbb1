"""Line and interval plots as SVG, inline or a file: no script, no font, nothing beside the page that holds them."""

import math
from collections.abc import Callable, Mapping, Sequence
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


@dataclass(frozen=True, kw_only=True)
class Point:
    """A marked point of `curves`."""

    label: str
    x: float
    y: float


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


def curves(
    *, line: Sequence[tuple[float, float]], label: str, points: Mapping[str, Sequence[Point]], x: str, y: str, height: int = 420
) -> str:
    """Draw a line and series of marked points on a logarithmic vertical axis, as a file of its own; zero is left out.

    Args:
        line: (x, y) from left to right.
        label: what it is.
        points: name of the series -> its points, each with its label beside it.
        x: the name of the horizontal axis.
        y: of the vertical one.
        height: of the drawing area, pixels.
    """
    series = {label: [Point(label="", x=a, y=b) for a, b in line if b > 0]}
    series |= {name: [point for point in of_name if point.y > 0] for name, of_name in points.items()}
    everything = [point for of_name in series.values() for point in of_name]
    if not everything:
        return _svg([f'<text x="{LEFT}" y="30">nothing to draw: every value is zero</text>'], 60, alone=True)
    low, high = (math.floor(min(p.x for p in everything)), math.ceil(max(p.x for p in everything) + 1e-9))
    bottom, top = (
        math.floor(math.log10(min(p.y for p in everything))),
        math.ceil(math.log10(max(p.y for p in everything)) + 1e-9),
    )
    top, right, foot = max(top, bottom + 1), WIDTH - RIGHT, TOP + height

    def place(point: Point) -> tuple[float, float]:
        across = LEFT + (right - LEFT) * (point.x - low) / (high - low)
        return across, TOP + height * (top - math.log10(point.y)) / (top - bottom)

    parts = _axes(place, across=range(low, high + 1), powers=range(bottom, top + 1), foot=foot, names=(x, y))
    for index, (name, of_name) in enumerate(series.items()):
        colour, spots = COLOURS[index % len(COLOURS)], [place(point) for point in of_name]
        if index == 0:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        else:
            parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>' for a, b in spots]
        for point, (a, b) in zip(of_name, spots, strict=True):
            parts.append(f'<text x="{a + 6:.1f}" y="{b - 6:.1f}">{escape(point.label)}</text>' if point.label else "")
        level = TOP + 12 + 18 * index
        parts.append(f'<rect x="{right + 16}" y="{level - 9}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{right + 32}" y="{level}">{escape(name)}</text>')
    return _svg(parts, foot + 46, alone=True)


def _axes(
    place: Callable[[Point], tuple[float, float]], *, across: range, powers: range, foot: float, names: tuple[str, str]
) -> list[str]:
    """Return grid lines, their values, and the names of both axes."""
    parts, right = [], WIDTH - RIGHT
    for power in powers:
        level = place(Point(label="", x=across[0], y=10.0**power))[1]
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">1e{power}</text>')
    for value in across:
        at = place(Point(label="", x=value, y=1.0))[0]
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{foot}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{foot + 16}" text-anchor="middle">{value}</text>')
    middle = (TOP + foot) / 2
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{foot + 36}" text-anchor="middle">{escape(names[0])}</text>')
    turned = f'transform="rotate(-90 14 {middle})" text-anchor="middle"'
    return [*parts, f'<text x="14" y="{middle}" {turned}>{escape(names[1])}</text>']


def _svg(parts: Sequence[str], height: float, *, alone: bool = False) -> str:
    if alone:  # a file of its own: what a page says of text and grids stands in it
        style = "text { font: 11px system-ui, sans-serif; fill: #3b4047; } .grid { stroke: #e3e6ea; }"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}">'
        return f'{head}<style>{style}</style><rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>'
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" role="img">{"".join(parts)}</svg>'
