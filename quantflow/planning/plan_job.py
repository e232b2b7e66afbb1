"""One plan: what a run needs and makes, before it runs."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.planning.recipe import Quantize, Recipe
from quantflow.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """Memory, disk, bytes, bits per weight and schemes of a run.

    Attributes:
        recipe: its model, artifacts, calibration, validation and limits.
        measured: artifacts that need no statistics get a measurement as well, as `quantflow run`
            gives it to all.
        fitting: leave out artifacts that the model does not take, and say why; otherwise the first
            of them is refused.
        folder: a folder on the disk that would be written.
        probe: read, run and round parts of one layer on the recipe's device, to say how long
            everything takes; without, no weight is read and no device is needed.
    """

    recipe: Recipe
    measured: bool = True
    fitting: bool = False
    folder: Path = Path()
    probe: bool = False

    def run(self, progress: Progress = SILENT) -> Mapping[str, Any]:
        """The plan, as plain data.

        Raises:
            QuantflowError: the model or the recipe is refused.
        """
        from quantflow.planning.forecast import run

        return run(self, progress)


def entries(schemes: str | None) -> tuple[Quantize, ...]:
    """The artifacts that `W4A16:gptq,W4A16@4.25,FP8` names; None names one of every scheme.

    Raises:
        UsageError: a scheme is unknown, one stands twice, or no number follows @.
    """
    from quantflow.core.scheme import PRESETS
    from quantflow.planning.requirements import entries_of

    return entries_of(",".join(PRESETS) if schemes is None else schemes)


def has_groups(scheme: str) -> bool:
    """Whether a scheme's weights have a scale per group of inputs.

    Raises:
        SchemeError: no preset has that name.
    """
    from quantflow.core.scheme import preset

    return preset(scheme).weights.granularity == "per_group"
