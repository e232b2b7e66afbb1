"""The job of stage 2: inputs, settings and result of one artifact's quantized layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quantflow.planning.recipe import Compute, Quantize, Resources
from quantflow.progress import SILENT, Progress

if TYPE_CHECKING:
    from quantflow.quantizing.planned_model import PlannedModel


@dataclass(frozen=True, kw_only=True)
class SchemeChoice:
    """The schemes that were chosen for the linears of an artifact.

    Attributes:
        columns, rows: a table for people, a row per scheme.
        recipe: the file that names them all, as a recipe does.
        plot: the picture of bits per weight against divergence.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    recipe: Path
    plot: Path


@dataclass(frozen=True, kw_only=True)
class QuantizeResult:
    """Finished quantized layers.

    Attributes:
        folder: the folder that `export` takes; with several ranks their folders, for `unify`.
        chosen: schemes were chosen, and `choice` says which.
    """

    folder: Path
    chosen: bool

    def choice(self) -> SchemeChoice:
        """The schemes that were chosen, as the folder records them.

        Raises:
            InputError: none were.
        """
        from quantflow.quantizing.mixed_precision.choose import choice_in

        return choice_in(self.folder)


@dataclass(frozen=True, kw_only=True)
class QuantizeJob:
    """Integers or float8 values and scales for a model, chosen layer by layer or file to file.

    Attributes:
        model: the source: a folder, a name on the hub (org/name), or a GGUF file.
        output: the folder of the layers; with several ranks one folder per rank, for `unify`.
        entry: scheme, algorithm, and all else that a recipe says of one artifact.
        measurement: the folder of a measurement of one rank, or of as many as `ranks`; or Gaudi's
            files, as a folder or folder/prefix; None where the entry needs no statistics.
            Statistics that it lacks are measured, on its own tokens, into a folder beside it:
            `1-measure` -> `1-measure-with-gradient`.
        ranks: cards that share the model, each with a slice of every linear.
        seed: seed of the canary's tokens where no measurement is given.
        revision: revision of a model on the hub; of any other, a word for the manifest.
        resources: memory and disk of each rank; no bit of the result depends on them.
        compute: the device that runs layers and rounds weights; the dtype in which the calibration
            text runs, where rounding is not learned and inputs are the original model's; and in
            which statistics that the measurement lacks are taken. Weights are rounded, and the
            artifact is proved, in float32.
        trust_network: the ranks may meet at the address of somebody's torchrun, which others may
            reach.
        force: redo a finished result that was made from other inputs, instead of refusing.
    """

    model: Path
    output: Path
    entry: Quantize
    measurement: Path | None = None
    ranks: int = 1
    seed: int = 0
    revision: str | None = None
    resources: Resources = Resources()
    compute: Compute = Compute()
    trust_network: bool = False
    force: bool = False

    def open(self, progress: Progress = SILENT) -> "PlannedModel":
        """The model, opened, and its plan, which says whether a measurement is needed.

        Raises:
            QuantflowError: the model is refused, or the entry does not fit it.
        """
        from quantflow.quantizing.quantize import open_model

        return open_model(self, progress)

    def run(
        self, progress: Progress = SILENT, *, opened: "PlannedModel | None" = None
    ) -> QuantizeResult:
        """Quantize; finished layers are left alone, an unfinished folder goes on.

        Args:
            progress: listener for every layer.
            opened: the result of `open`, where it was needed before.

        Raises:
            QuantflowError: an input, a limit or the model is refused; nothing finished is lost.
        """
        from quantflow.quantizing.missing_statistics import completed
        from quantflow.quantizing.quantize import run, settled

        job = settled(self, progress)
        job = replace(job, measurement=completed(job, progress))
        return QuantizeResult(folder=run(job, progress, opened=opened), chosen=self.entry.mixed)
