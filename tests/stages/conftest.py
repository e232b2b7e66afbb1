"""What the tests of stages share."""

from pathlib import Path

import pytest

from stages import quantize
from stages._config import Quantize
from stages._progress import Progress

QUIET = Progress(quiet=True)


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
        job = quantize.Job(model=model, output=output, entry=recipe, ranks=ranks, measurement=measurement)
        for rank in range(ranks) if only is None else only:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            quantize.run(job, QUIET)
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("WORLD_SIZE")
        return output

    return run
