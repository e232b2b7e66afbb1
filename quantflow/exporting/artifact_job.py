"""From a model to an artifact in one command: measure, quantize, export and prove."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantflow.exporting.job import ExportJob
from quantflow.files.outputs import beside
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Calibration, Compute, Export, Measure, Quantize, Resources
from quantflow.progress import SILENT, Progress
from quantflow.quantizing.job import QuantizeJob, QuantizeResult

if TYPE_CHECKING:
    from quantflow.exporting.proof import Prover


def work_folder(output: Path) -> Path:
    """The folder of the stages before an artifact, beside it: `llama-w4a16.work`."""
    return beside(output, ".work")


@dataclass(frozen=True, kw_only=True)
class ArtifactResult:
    """A finished artifact.

    Attributes:
        folder: the artifact's folder.
        quantized: the result of the stage before it.
    """

    folder: Path
    quantized: QuantizeResult


@dataclass(frozen=True, kw_only=True)
class ArtifactJob:
    """Three stages, each resumed where it stopped.

    What the first two write is beside the artifact: `llama-w4a16` has `llama-w4a16.work/1-measure`
    and `.../2-quantize`.

    Attributes:
        model: the source: a folder, a name on the hub (org/name), or a GGUF file.
        output: the artifact's folder.
        entry: scheme, algorithm, and all else that a recipe says of one artifact.
        calibration: the text, and how much of it; no source is the shipped text.
        measure: statistics, and the tokens that experts are shown; ranks stay one.
        export: format and size of a weight file.
        seed: seed of the choice of documents.
        revision: revision of a model on the hub; of any other, a word for the manifest.
        resources: limits of memory and disk; no bit of the result depends on them.
        compute: the device that runs layers and rounds weights.
        force: redo an artifact that was made from other inputs, instead of refusing.
    """

    model: Path
    output: Path
    entry: Quantize
    calibration: Calibration = Calibration()
    measure: Measure = Measure()
    export: Export = Export()
    seed: int = 0
    revision: str | None = None
    resources: Resources = Resources()
    compute: Compute = Compute()
    force: bool = False

    @property
    def work(self) -> Path:
        """The folder of the stages before the artifact."""
        return work_folder(self.output)

    def run(self, progress: Progress = SILENT, *, prover: "Prover | None" = None) -> ArtifactResult:
        """Make the artifact; finished stages are left alone.

        Args:
            progress: receiver of progress.
            prover: a process that `quantflow.exporting.proof.proving` has started already; None
                starts one.

        Raises:
            QuantflowError: an input, a limit or the model is refused; nothing finished is lost.
        """
        export = ExportJob(
            source=self.work / "2-quantize",
            output=self.output,
            options=self.export,
            model=self.model,
            revision=self.revision,
            resources=self.resources,
            force=self.force,
        )
        export.check()
        quantize = QuantizeJob(
            model=self.model,
            output=export.source,
            entry=self.entry,
            seed=self.seed,
            revision=self.revision,
            resources=self.resources,
            compute=self.compute,
            force=True,
        )
        opened = quantize.open(progress)
        if opened.needs_measurement:
            if prover is not None:
                prover.expect_canary()
            measured = self._measurement().run(progress)
            quantize = replace(quantize, measurement=measured.folder)
        quantized = quantize.run(progress, opened=opened)
        artifact = export.run(progress, prover=prover)
        return ArtifactResult(folder=artifact.folder, quantized=quantized)

    def _measurement(self) -> MeasureJob:
        return MeasureJob(
            model=self.model,
            output=self.work / "1-measure",
            calibration=self.calibration,
            options=self.measure,
            entries=(self.entry,),
            seed=self.seed,
            revision=self.revision,
            resources=self.resources,
            compute=self.compute,
            force=True,
        )
