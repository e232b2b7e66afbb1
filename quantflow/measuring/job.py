"""The job of stage 1: one measurement's inputs, settings and folder."""

from dataclasses import dataclass
from pathlib import Path

from quantflow.planning.recipe import Calibration, Compute, Measure, Quantize, Resources
from quantflow.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class MeasureResult:
    """A finished measurement.

    Attributes:
        folder: the folder of the ranks.
    """

    folder: Path


@dataclass(frozen=True, kw_only=True)
class MeasureJob:
    """One measurement: calibration text runs through a model, and statistics are kept.

    Attributes:
        model: the source: a folder, a name on the hub (org/name), or a GGUF file.
        output: the folder, which gets one folder per rank.
        calibration: the text, and how much of it; no source is the shipped text.
        options: ranks and statistics. `stats` None takes what `entries` need, or what every scheme
            needs; empty keeps the token ids alone, and no layer runs unless there are experts whose
            tokens `entries` do not count themselves.
        entries: the artifacts that will be made.
        seed: seed of the choice of documents.
        revision: revision of a model on the hub.
        resources: memory and disk of each rank; no bit of the result depends on them.
        compute: the device that runs the layers, and their dtype.
        trust_network: the ranks may meet at the address of somebody's torchrun, which others may
            reach.
        force: redo a finished result that was made from other inputs, instead of refusing.
    """

    model: Path
    output: Path
    calibration: Calibration = Calibration()
    options: Measure = Measure()
    entries: tuple[Quantize, ...] = ()
    seed: int = 0
    revision: str | None = None
    resources: Resources = Resources()
    compute: Compute = Compute()
    trust_network: bool = False
    force: bool = False

    def run(self, progress: Progress = SILENT) -> MeasureResult:
        """Measure; finished ranks are left alone, an unfinished one goes on.

        Raises:
            QuantflowError: an input, a limit or the model is refused; nothing finished is lost.
        """
        from quantflow.measuring.measure import run, settled

        return MeasureResult(folder=run(settled(self, progress), progress))
