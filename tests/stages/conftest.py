"""What the tests of stages share."""

from pathlib import Path

import pytest

from quantflow.calibration import measure
from quantflow.planning.recipe import Calibration, Quantize
from quantflow.quantization import quantize
from quantflow.stages.cli.progress_line import ProgressLine

QUIET = ProgressLine(quiet=True)


@pytest.fixture(scope="module")
def measured_family(family_model, text_files, tmp_path_factory):
    """Return the measurement of a family, taken once."""
    taken = {}

    def take(family: str) -> Path:
        if family not in taken:
            calibration = Calibration(source=str(text_files["calibration"]), samples=6, sequence_length=48)
            folder = tmp_path_factory.mktemp("measured") / family
            stats = ("amax", "channel_amax", "min_max", "mean_abs")
            job = measure.MeasureJob(model=family_model(family), output=folder, calibration=calibration, stats=stats)
            taken[family] = measure.run(job, QUIET)
        return taken[family]

    return take


@pytest.fixture
def cards(monkeypatch):
    """Return a function that quantizes as N ranks would, one after the other in this process."""

    def run(
        model: Path,
        output: Path,
        recipe: Quantize,
        *,
        ranks: int,
        only: tuple[int, ...] | None = None,
        measurement: Path | None = None,
    ) -> Path:
        monkeypatch.setattr(quantize, "die_with_parent", lambda: None)
        job = quantize.QuantizeJob(model=model, output=output, entry=recipe, ranks=ranks, measurement=measurement)
        for rank in range(ranks) if only is None else only:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            quantize.run(job, QUIET)
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("WORLD_SIZE")
        return output

    return run
