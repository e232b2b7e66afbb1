"""One export: what is written, in which format, and the folder that it becomes."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantflow.planning.recipe import Export, Resources
from quantflow.progress import SILENT, Progress

if TYPE_CHECKING:
    from quantflow.exporting.proof import Prover
    from quantflow.formats.gaudi.quant_config import GivenConfig


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """A finished export.

    Attributes:
        folder: the folder that was written; for format gguf it holds one file.
    """

    folder: Path


@dataclass(frozen=True, kw_only=True)
class ExportJob:
    """An artifact that is written and proven in a fresh process, or a folder for another program.

    Attributes:
        source: a finished quantize folder, or an artifact that has its quantize folder beside it;
            formats inc and imatrix take a measurement, format gguf a model or an artifact, other
            formats a quantized folder.
        output: the folder that is written.
        options: format, size of a weight file, and what only some formats know.
        model: the source model; None reads it where quantize did.
        revision: revision of a model on the hub.
        quant_config: Gaudi's own configuration, for format inc.
        keep_originals: for format inc, keep what Gaudi measured beside what is written for it.
        resources: limits of memory and disk.
        force: redo a result that was made from other inputs, instead of refusing.
    """

    source: Path
    output: Path
    options: Export = Export()
    model: Path | None = None
    revision: str | None = None
    quant_config: "GivenConfig | None" = None
    keep_originals: bool = False
    resources: Resources = Resources()
    force: bool = False

    def check(self) -> None:
        """Refuse what can be seen before there is anything quantized.

        Raises:
            UsageError: another format than an artifact's, or one folder for both.
        """
        from quantflow.exporting.exporters import check

        check(self)

    def run(self, progress: Progress = SILENT, *, prover: "Prover | None" = None) -> ExportResult:
        """Write the folder; one that is up to date is left alone.

        Args:
            progress: receiver of progress.
            prover: a process that `quantflow.exporting.proof.proving` has started already; None
                starts one.

        Raises:
            QuantflowError: an input that cannot be used, or a proof that does not hold; then
                nothing is published.
        """
        from quantflow.exporting.exporters import run

        return ExportResult(folder=run(self, progress, prover=prover))
