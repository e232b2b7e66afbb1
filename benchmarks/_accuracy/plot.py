"""The plots: divergence against bits per weight, and against seconds; weights alone.

The first has a panel per model, the second one per model and scheme. A program is known by its
marker's shape, filled of quantflow's and hollow of a peer's; colours only help. Of each side a line
says the least divergence with at most so many bits, or in so many seconds. Panels stand below each
other, as wide as a page, so that text keeps its size there.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

from _accuracy.results import Outcome
from _accuracy.rows import FILES, FLOAT4, INPUTS, OURS

matplotlib.use("Agg")
# text stays text, the same bytes each time
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "accuracy"})
from matplotlib import pyplot  # noqa: E402, after the backend is chosen
from matplotlib.axes import Axes  # noqa: E402

MARKERS = "ovs^DPh<X>pd*8"
# Okabe and Ito's, the yellow darker
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#000000")
# inches; HEIGHT of a panel: a factor of 1.15 in divergence is a marker's size
WIDTH, HEIGHT, LEGEND = 10.0, 7.0, 1.2
SIDES = {True: ("-", "0.2", f"{OURS}, the least"), False: ("--", "0.5", "peers, the least")}


@dataclass(frozen=True, kw_only=True)
class _Axis:
    """What divergence is drawn against."""

    label: str
    of: Callable[[Outcome], float]
    scale: str = "linear"


BITS = _Axis(label="bits per weight", of=lambda row: row.bits)
SECONDS = _Axis(label="seconds", of=lambda row: row.seconds, scale="log")


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw a panel per model: divergence against bits per weight.

    Rows with quantized inputs and rows of whole files are left out.
    """
    rows = _weights_alone(outcomes)
    panels = {model: [row for row in rows if row.model == model] for model in _each(rows, "model")}
    _draw(panels, BITS, path)


def draw_frontier(outcomes: Sequence[Outcome], path: Path) -> None:
    """Draw a panel per model and scheme: divergence against seconds, of rows run alone.

    Rows are left out as in `draw`, and so are schemes with a single row.
    """
    rows = [row for row in _weights_alone(outcomes) if row.idle]
    panels: dict[str, list[Outcome]] = {}
    for row in rows:
        panels.setdefault(f"{row.model}, {row.scheme}", []).append(row)
    _draw({title: each for title, each in panels.items() if len(each) > 1}, SECONDS, path)


def _weights_alone(outcomes: Iterable[Outcome]) -> list[Outcome]:
    inputs = [name for name in FLOAT4 if not name.endswith("A16")]
    return [row for row in outcomes if row.scheme not in (*INPUTS, *inputs, *FILES)]


def _each(rows: Iterable[Outcome], key: str) -> list[str]:
    return list(dict.fromkeys(getattr(row, key) for row in rows))


def _draw(panels: dict[str, list[Outcome]], axis: _Axis, path: Path) -> None:
    """Write a plot in the format of the suffix, such as SVG; no panels, no file."""
    if not panels:
        return
    programs = _each((row for rows in panels.values() for row in rows), "program")
    sides = [[name for name in programs if name.startswith(OURS) == ours] for ours in (True, False)]
    figure, places = pyplot.subplots(
        len(panels),
        figsize=(WIDTH, HEIGHT * len(panels) + LEGEND),
        squeeze=False,
        layout="constrained",
    )
    for axes, (title, rows) in zip(places[:, 0], panels.items(), strict=True):
        _panel(axes, title, rows, sides, axis)
    figure.legend(
        *places[0][0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        fontsize="small",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _panel(
    axes: Axes, title: str, rows: Sequence[Outcome], sides: Sequence[Sequence[str]], axis: _Axis
) -> None:
    """Draw one panel; every program gets its place in the legend, rows or not."""
    for ours, programs in zip((True, False), sides, strict=True):
        style, grey, label = SIDES[ours]
        end = max((axis.of(row) for row in rows), default=0.0)
        corners = least(
            ((axis.of(row), row.mean_kld) for row in rows if row.program in programs), end=end
        )
        axes.step(
            *zip(*corners, strict=True) if corners else ([], []),
            style,
            color=grey,
            where="post",
            linewidth=1,
            label=label,
        )
        for index, program in enumerate(programs):
            points = [(axis.of(row), row.mean_kld) for row in rows if row.program == program]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(
                [along for along, _ in points],
                [kld for _, kld in points],
                MARKERS[index % len(MARKERS)],
                color=colour,
                markerfacecolor=colour if ours else "none",
                markersize=6.5,
                label=program,
            )
    axes.set(
        title=title,
        xlabel=axis.label,
        ylabel="mean KL divergence, nats per token",
        xscale=axis.scale,
        yscale="log",
    )
    axes.grid(alpha=0.25, which="both")


def least(points: Iterable[tuple[float, float]], *, end: float) -> list[tuple[float, float]]:
    """Corners of the least divergence with at most so many bits (or seconds), in their order.

    The last corner stands again at `end`, if that lies beyond.
    """
    corners: list[tuple[float, float]] = []
    for along, divergence in sorted(points):
        if not corners or divergence < corners[-1][1]:
            corners.append((along, divergence))
    return [*corners, (end, corners[-1][1])] if corners and corners[-1][0] < end else corners
