"""The plot: divergence against bits per weight, one panel per model, weights alone.

A program is known by its marker's shape, filled of quantflow's and hollow of a peer's; colours only
help. Of each side a line says the least divergence with at most so many bits. Panels stand below
each other, as wide as a page, so that text keeps its size there.
"""

from collections.abc import Iterable, Sequence
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


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write the plot in the format of the suffix, such as SVG.

    Rows with quantized inputs and rows of whole files are left out.
    """
    inputs = [name for name in FLOAT4 if not name.endswith("A16")]
    rows = [row for row in outcomes if row.scheme not in (*INPUTS, *inputs, *FILES)]
    models, programs = (
        list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("model", "program")
    )
    sides = [[name for name in programs if name.startswith(OURS) == ours] for ours in (True, False)]
    figure, panels = pyplot.subplots(
        len(models),
        figsize=(WIDTH, HEIGHT * len(models) + LEGEND),
        squeeze=False,
        layout="constrained",
    )
    for axes, model in zip(panels[:, 0], models, strict=True):
        _panel(axes, model, [row for row in rows if row.model == model], sides)
    figure.legend(
        *panels[0][0].get_legend_handles_labels(),
        loc="outside upper center",
        ncols=4,
        fontsize="small",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _panel(axes: Axes, model: str, rows: Sequence[Outcome], sides: Sequence[Sequence[str]]) -> None:
    """Draw one model; every program gets its place in the legend, rows or not."""
    for ours, programs in zip((True, False), sides, strict=True):
        style, grey, label = SIDES[ours]
        end = max((row.bits for row in rows), default=0.0)
        corners = least(
            ((row.bits, row.mean_kld) for row in rows if row.program in programs), end=end
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
            points = [(row.bits, row.mean_kld) for row in rows if row.program == program]
            colour = COLOURS[index % len(COLOURS)]
            axes.plot(
                [bits for bits, _ in points],
                [kld for _, kld in points],
                MARKERS[index % len(MARKERS)],
                color=colour,
                markerfacecolor=colour if ours else "none",
                markersize=6.5,
                label=program,
            )
    axes.set(
        title=model,
        xlabel="bits per weight",
        ylabel="mean KL divergence, nats per token",
        yscale="log",
    )
    axes.grid(alpha=0.25, which="both")


def least(points: Iterable[tuple[float, float]], *, end: float) -> list[tuple[float, float]]:
    """Corners of the least divergence with at most so many bits, by bits.

    The last corner stands again at `end`, if that lies beyond.
    """
    corners: list[tuple[float, float]] = []
    for bits, divergence in sorted(points):
        if not corners or divergence < corners[-1][1]:
            corners.append((bits, divergence))
    return [*corners, (end, corners[-1][1])] if corners and corners[-1][0] < end else corners
