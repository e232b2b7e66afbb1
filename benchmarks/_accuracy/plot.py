"""The plot: divergence against bits per weight, one panel per model, weights alone."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib

from _accuracy.results import Outcome
from _accuracy.rows import INPUTS, OURS

matplotlib.use("Agg")
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "accuracy"})  # text stays text, the same bytes each time
from matplotlib import pyplot  # noqa: E402, after the backend is chosen

MARKERS = "ovs^D<P>X*hp"


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Write an SVG; quantflow's programs are filled, the peers' are not. Rows with quantized inputs are left out."""
    rows = [row for row in outcomes if row.scheme not in INPUTS]
    models, programs = (list(dict.fromkeys(getattr(row, key) for row in rows)) for key in ("model", "program"))
    figure, panels = pyplot.subplots(1, len(models), figsize=(6.5 * len(models), 5.5), squeeze=False, layout="constrained")
    for axes, model in zip(panels[0], models, strict=True):
        for index, program in enumerate(programs):
            points = sorted((row.bits, row.mean_kld) for row in rows if (row.model, row.program) == (model, program))
            colour = f"C{index % 10}"
            ours = program.startswith(OURS)
            axes.plot(
                [bits for bits, _ in points],
                [kld for _, kld in points],
                MARKERS[index % len(MARKERS)],
                color=colour,
                markerfacecolor=colour if ours else "none",
                markersize=7 if ours else 6,
                label=program,
            )
        axes.set(title=model, xlabel="bits per weight", ylabel="mean KL divergence, nats per token", yscale="log")
        axes.grid(alpha=0.3, which="both")
    panels[0][0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
