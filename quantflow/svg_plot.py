"""Plots as SVG, inline or a file: no script, no font, nothing beside the page that holds them.

Plots of a page are as wide as their box and drawn for 520 pixels, so that their text is readable on
a phone as well. The page's own style gives text and grids their colours.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP = 900, 74, 190, 14
NARROW = 520  # pixels that a plot of a page is drawn for
COLOURS = ("#2563a8", "#c2571a", "#2c8a55", "#8a3fa0", "#a8872b", "#6b7280", "#c0392b", "#1f8f99")
NOTHING = "<p>nothing to draw: every value is zero</p>"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A row of `intervals`: a value between two bounds, and the limit that it must stay below.

    A limit of None is not drawn.
    """

    label: str
    value: float
    lower: float
    upper: float
    limit: float | None = None


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A linear in `by_layer`.

    Attributes:
        layer: label of the slot on the horizontal axis.
        kind: kind that gives it its colour, such as q_proj.
        value: height; zero or less is left out.
        hollow: whether it is drawn as a ring, to compare others with.
    """

    layer: str
    kind: str
    value: float
    hollow: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """A marked point of `curves`."""

    label: str
    x: float
    y: float


def by_layer(
    marks: Sequence[Mark],
    *,
    kinds: Sequence[str],
    unit: str,
    powers: tuple[int, int] | None = None,
    height: int = 210,
) -> str:
    """Marks over the layers of a model on a logarithmic axis; kinds stand side by side.

    Args:
        marks: marks; layers keep the order in which they first appear.
        kinds: every kind, in the order inside a layer; `colour_of` gives each its colour.
        unit: name of the vertical axis.
        powers: powers of ten at both ends of the vertical axis, for several plots that share it;
            None takes those of the marks.
        height: height of the drawing area, pixels.
    """
    drawn = [mark for mark in marks if mark.value > 0]
    if not drawn:
        return NOTHING
    low, high = powers or powers_of(drawn)
    layers = list(dict.fromkeys(mark.layer for mark in marks))
    left, right, foot = 58, NARROW - 8, TOP + height
    slot = (right - left) / len(layers)
    inner = 0.7 * slot / len(kinds)  # the rest is the gap between two layers
    parts = []
    for power in range(low, high + 1):
        y = TOP + height * (high - power) / (high - low)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{left - 7}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    every = math.ceil(len(layers) / 14)
    for index, layer in enumerate(layers):
        x = left + slot * index
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{foot}" class="grid"/>'
            if index % every == 0
            else ""
        )
        if index % every == 0:
            parts.append(
                f'<text x="{x + slot / 2:.1f}" y="{foot + 16}" '
                f'text-anchor="middle">{escape(layer)}</text>'
            )
    radius = max(1.6, min(4.2, 0.55 * inner))
    for mark in drawn:
        x = left + slot * (layers.index(mark.layer) + 0.15) + inner * (kinds.index(mark.kind) + 0.5)
        y = TOP + height * (high - math.log10(mark.value)) / (high - low)
        colour = colour_of(mark.kind, kinds)
        paint = (
            f'fill="none" stroke="{colour}" stroke-width="1.3"'
            if mark.hollow
            else f'fill="{colour}"'
        )
        title = escape(f"{mark.layer} {mark.kind}: {mark.value:.3g}")
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" '
            f"{paint}><title>{title}</title></circle>"
        )
    middle = TOP + height / 2
    parts.append(
        f'<text x="12" y="{middle}" transform="rotate(-90 12 {middle})" '
        f'text-anchor="middle">{escape(unit)}</text>'
    )
    parts.append(
        f'<text x="{(left + right) / 2:.1f}" y="{foot + 34}" text-anchor="middle">layer</text>'
    )
    return _inline(parts, foot + 42)


def heat_map(
    values: Mapping[tuple[str, str], float],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    across: str,
    unit: str,
) -> str:
    """Values as coloured cells, by the root of their size.

    Values below zero have another colour, and cells without a value are empty.

    Args:
        values: (row, column) -> value.
        rows: labels from top to bottom.
        columns: labels from left to right.
        across: name of the horizontal axis.
        unit: unit of the values.
    """
    largest = max((abs(value) for value in values.values()), default=0.0)
    if not largest:
        return NOTHING
    left, pitch = 112, 24
    width = (NARROW - 8 - left) / len(columns)
    foot = TOP + pitch * len(rows)
    parts = []
    for place, row in enumerate(rows):
        parts.append(
            f'<text x="{left - 7}" y="{TOP + pitch * place + 17}" '
            f'text-anchor="end">{escape(row)}</text>'
        )
    every = math.ceil(len(columns) / 14)
    for index, column in enumerate(columns):
        if index % every == 0:
            middle = left + width * (index + 0.5)
            parts.append(
                f'<text x="{middle:.1f}" y="{foot + 16}" '
                f'text-anchor="middle">{escape(column)}</text>'
            )
        for place, row in enumerate(rows):
            value = values.get((row, column))
            box = (
                f'x="{left + width * index:.1f}" y="{TOP + pitch * place}" '
                f'width="{width:.1f}" height="{pitch}" class="grid"'
            )
            if value is None:
                parts.append(f'<rect {box} fill="none"/>')
                continue
            colour = _heat(value / largest)
            title = escape(f"{column} {row}: {value:.3g}")
            parts.append(f"<rect {box} {colour}><title>{title}</title></rect>")
    parts.append(
        f'<text x="{(left + NARROW - 8) / 2}" y="{foot + 34}" '
        f'text-anchor="middle">{escape(across)}</text>'
    )
    legend = foot + 46
    step = 26
    shares = (
        [-1.0, -0.25, 0.0, 0.25, 1.0] if min(values.values()) < 0 else [0.0, 0.06, 0.25, 0.56, 1.0]
    )
    for index, share in enumerate(shares):
        parts.append(
            f'<rect x="{left + step * index}" y="{legend}" width="{step}" height="14" '
            f'class="grid" {_heat(share)}/>'
        )
    parts.append(
        f'<text x="{left - 7}" y="{legend + 12}" text-anchor="end">{shares[0] * largest:.2g}</text>'
    )
    parts.append(
        f'<text x="{left + step * len(shares) + 7}" y="{legend + 12}">{largest:.2g} '
        f"{escape(unit)}</text>"
    )
    return _inline(parts, legend + 22)


def _heat(share: float) -> str:
    """The fill of a cell, by its share of the largest value, -1 to 1."""
    colour = COLOURS[1] if share >= 0 else COLOURS[0]
    return f'fill="{colour}" fill-opacity="{math.sqrt(abs(share)):.3f}"'


def powers_of(marks: Sequence[Mark]) -> tuple[int, int]:
    """Powers of ten around the marks that can be drawn, at least one apart; (-1, 0) without any."""
    values = [mark.value for mark in marks if mark.value > 0]
    if not values:
        return -1, 0
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) - 1e-9)
    return low, max(high, low + 1)


def colour_of(kind: str, kinds: Sequence[str]) -> str:
    """The colour of a kind among all of a page."""
    return COLOURS[kinds.index(kind) % len(COLOURS)]


def intervals(rows: Sequence[Interval], *, unit: str) -> str:
    """Values with bounds and limits, one row each below its label, on a logarithmic axis."""
    values = [
        value
        for row in rows
        for value in (row.value, row.lower, row.upper, row.limit)
        if value is not None and value > 0
    ]
    if not values:
        return NOTHING
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    left, right, pitch = 24, NARROW - 24, 42
    height = pitch * len(rows) + 6

    def x_of(value: float) -> float:
        position = (math.log10(max(value, 10.0**low)) - low) / max(1, high - low)
        return left + (right - left) * position

    parts = []
    for power in range(low, high + 1):
        x = x_of(10.0**power)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{TOP + height}" class="grid"/>'
        )
        parts.append(
            f'<text x="{x:.1f}" y="{TOP + height + 16}" text-anchor="middle">1e{power}</text>'
        )
    for index, row in enumerate(rows):
        y = TOP + pitch * index + 30
        inside = row.limit is None or row.upper <= row.limit
        colour = COLOURS[0] if inside else COLOURS[6]
        parts.append(f'<text x="{left}" y="{y - 15}" class="label">{escape(row.label)}</text>')
        parts.append(
            f'<line x1="{x_of(row.lower):.1f}" x2="{x_of(row.upper):.1f}" y1="{y:.1f}" '
            f'y2="{y:.1f}" stroke="{colour}" stroke-width="4"/>'
        )
        parts.append(f'<circle cx="{x_of(row.value):.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        if row.limit is not None:
            x = x_of(row.limit)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 9:.1f}" y2="{y + 9:.1f}" class="limit"/>'
            )
    parts.append(
        f'<text x="{(left + right) / 2}" y="{TOP + height + 34}" '
        f'text-anchor="middle">{escape(unit)}</text>'
    )
    return _inline(parts, TOP + height + 44)


def curves(
    *,
    line: Sequence[tuple[float, float]],
    label: str,
    points: Mapping[str, Sequence[Point]],
    x: str,
    y: str,
    height: int = 420,
) -> str:
    """A line and series of points on a logarithmic vertical axis, as a file; zero is left out.

    Args:
        line: (x, y) from left to right.
        label: name of the line.
        points: name of the series -> its points, each with its label beside it.
        x: name of the horizontal axis.
        y: name of the vertical axis.
        height: height of the drawing area, pixels.
    """
    series = {label: [Point(label="", x=a, y=b) for a, b in line if b > 0]}
    series |= {
        name: [point for point in of_name if point.y > 0] for name, of_name in points.items()
    }
    everything = [point for of_name in series.values() for point in of_name]
    if not everything:
        return _file([f'<text x="{LEFT}" y="30">nothing to draw: every value is zero</text>'], 60)
    low = math.floor(min(p.x for p in everything))
    high = math.ceil(max(p.x for p in everything) + 1e-9)
    bottom = math.floor(math.log10(min(p.y for p in everything)))
    top = max(bottom + 1, math.ceil(math.log10(max(p.y for p in everything)) + 1e-9))
    right, foot = WIDTH - RIGHT, TOP + height

    def place(point: Point) -> tuple[float, float]:
        across = LEFT + (right - LEFT) * (point.x - low) / (high - low)
        return across, TOP + height * (top - math.log10(point.y)) / (top - bottom)

    parts = _axes(
        place, across=range(low, high + 1), powers=range(bottom, top + 1), foot=foot, names=(x, y)
    )
    for index, (name, of_name) in enumerate(series.items()):
        colour = COLOURS[index % len(COLOURS)]
        spots = [place(point) for point in of_name]
        if index == 0:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            )
        else:
            parts += [
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colour}"/>' for a, b in spots
            ]
        for point, (a, b) in zip(of_name, spots, strict=True):
            parts.append(
                f'<text x="{a + 6:.1f}" y="{b - 6:.1f}">{escape(point.label)}</text>'
                if point.label
                else ""
            )
        level = TOP + 12 + 18 * index
        parts.append(
            f'<rect x="{right + 16}" y="{level - 9}" width="10" height="10" fill="{colour}"/>'
        )
        parts.append(f'<text x="{right + 32}" y="{level}">{escape(name)}</text>')
    return _file(parts, foot + 46)


def _axes(
    place: Callable[[Point], tuple[float, float]],
    *,
    across: range,
    powers: range,
    foot: float,
    names: tuple[str, str],
) -> list[str]:
    """Grid lines, their values, and the names of both axes."""
    parts = []
    right = WIDTH - RIGHT
    for power in powers:
        level = place(Point(label="", x=across[0], y=10.0**power))[1]
        parts.append(
            f'<line x1="{LEFT}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}" class="grid"/>'
        )
        parts.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">1e{power}</text>')
    for value in across:
        at = place(Point(label="", x=value, y=1.0))[0]
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{foot}" class="grid"/>')
        parts.append(f'<text x="{at:.1f}" y="{foot + 16}" text-anchor="middle">{value}</text>')
    middle = (TOP + foot) / 2
    parts.append(
        f'<text x="{(LEFT + right) / 2}" y="{foot + 36}" '
        f'text-anchor="middle">{escape(names[0])}</text>'
    )
    turned = f'transform="rotate(-90 14 {middle})" text-anchor="middle"'
    return [*parts, f'<text x="14" y="{middle}" {turned}>{escape(names[1])}</text>']


def _inline(parts: Sequence[str], height: float) -> str:
    """A plot of a page; the page's style gives text and grids their colours."""
    return (
        f'<svg viewBox="0 0 {NARROW} {height:.0f}" width="100%" role="img">{"".join(parts)}</svg>'
    )


def _file(parts: Sequence[str], height: float) -> str:
    """A plot as a file, which holds the style that a page would have."""
    style = "text { font: 11px system-ui, sans-serif; fill: #3b4047; } .grid { stroke: #e3e6ea; }"
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{style}</style>'
        f"{ground}{''.join(parts)}</svg>"
    )
