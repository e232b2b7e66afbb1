"""One validation: an artifact, the model it is compared with, and the verdict; a model alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quantflow.errors import UsageError
from quantflow.files.outputs import beside
from quantflow.planning.recipe import Compute, Resources, Validate
from quantflow.progress import SILENT, Progress
from quantflow.sources.models import is_on_hub

# lm-eval's, which optimum-habana's run_lm_eval asks
USUAL_TASKS = "hellaswag,lambada_openai,piqa,winogrande"


@dataclass(frozen=True, kw_only=True)
class ValidateResult:
    """A finished validation.

    Attributes:
        folder: the folder of validation.json and report.html.
        outcome: pass, fail or inconclusive.
        values: the content of validation.json.
    """

    folder: Path
    outcome: str
    values: Mapping[str, Any]

    def raise_for_verdict(self, *, allow_inconclusive: bool = False) -> None:
        """Do nothing where the outcome is the expected one.

        Raises:
            GateError: the gate failed, could not decide, or passed although a failure was expected.
        """
        from quantflow.validating.verdict import raise_for_verdict

        raise_for_verdict(self.values, allow_inconclusive=allow_inconclusive)


@dataclass(frozen=True, kw_only=True)
class ValidateJob:
    """One artifact compared with its source, and judged by a gate.

    Attributes:
        artifact: the artifact's folder, or its name on the hub.
        baseline: the model that it was made from: a folder, a name on the hub (org/name), or a GGUF
            file.
        options: text, tokens and gate; no text is the shipped one.
        report: the folder of validation.json and report.html; None is `<artifact>-validation`.
        expect: `fail` where a failing gate is the expected outcome.
        previous: an older artifact of the model to compare with, its validation.json, or the folder
            of that.
        cache: the folder of what validations of one model over one text share; None is
            `validation-cache` beside the report. It may be removed at any time, and costs the
            hidden states of the text: 4 bytes a token and hidden feature.
        seed: seed of the resampling.
        revision: revision of a baseline on the hub.
        resources: limits of memory and disk.
        compute: the device that runs both models, and their dtype.
        force: redo a finished validation that was made from other inputs, instead of refusing.
    """

    artifact: Path
    baseline: Path
    options: Validate = Validate()
    report: Path | None = None
    expect: str = "pass"
    previous: Path | None = None
    cache: Path | None = None
    seed: int = 0
    revision: str | None = None
    resources: Resources = Resources()
    compute: Compute = Compute()
    force: bool = False

    def run(self, progress: Progress = SILENT) -> ValidateResult:
        """Compare and judge; a validation of the same inputs is left alone.

        A gate that fails raises nothing here: `ValidateResult.raise_for_verdict` does.

        Raises:
            QuantflowError: an input that cannot be used.
        """
        from quantflow.validating.validate import run, settled

        job = settled(self, progress)
        values = run(job, progress)
        return ValidateResult(folder=job.folder, outcome=str(values["outcome"]), values=values)

    @property
    def folder(self) -> Path:
        """The folder of the report; here for an artifact on the hub."""
        if self.report is None and is_on_hub(self.artifact):
            return Path(f"{self.artifact.name}-validation")
        return beside(self.artifact, "-validation") if self.report is None else self.report


@dataclass(frozen=True, kw_only=True)
class ScoreJob:
    """One model or artifact that answers tasks, with nothing beside it to compare with.

    Attributes:
        model: a folder, a name on the hub (org/name), or a GGUF file.
        options: tasks, limit, shots, template and ranks; the rest is of comparisons.
        report: the folder of scores.json and tasks.json; None is `<model>-validation`.
        revision: revision of a model on the hub.
        resources: limits of memory and disk.
        compute: the dtype that the model runs in.
        force: redo finished scores that were made from other inputs, instead of refusing.
    """

    model: Path
    options: Validate
    report: Path | None = None
    revision: str | None = None
    resources: Resources = Resources()
    compute: Compute = Compute()
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse a job without a task, and options that compare.

        Raises:
            UsageError: naming them.
        """
        asked, plain = self.options, Validate()
        compared = [
            f"--{name.replace('_', '-')}"
            for name in ("text", "tokens", "sequence_length", "gate", "diagnose", "base")
            if getattr(asked, name) != getattr(plain, name)
        ]
        if compared:
            raise UsageError(
                f"validate {self.model}: {', '.join(compared)} without a baseline",
                "give --baseline MODEL, the model that ARTIFACT was made from",
            )
        if not asked.tasks:
            raise UsageError(
                f"validate {self.model}: neither a baseline nor tasks",
                "give --baseline MODEL to compare an artifact with its source, or --tasks to score "
                f"a model alone: `quantflow validate {self.model} --tasks {USUAL_TASKS}`",
            )

    def run(self, progress: Progress = SILENT) -> Mapping[str, Any]:
        """Ask, and return the content of scores.json; scores of the same inputs are left alone.

        Raises:
            QuantflowError: an input that cannot be used.
        """
        from quantflow.sources.models import model_folder
        from quantflow.validating.scores import run

        model = model_folder(self.model, revision=self.revision, progress=progress)
        return run(replace(self, model=model, report=self.folder), progress)

    @property
    def folder(self) -> Path:
        """The folder of the scores; here for a model on the hub."""
        if self.report is None and is_on_hub(self.model):
            return Path(f"{self.model.name}-validation")
        return beside(self.model, "-validation") if self.report is None else self.report


@dataclass(frozen=True, kw_only=True)
class GateJob:
    """A validation to be judged once more from its validation.json; no model is loaded.

    Attributes:
        validation: its validation.json, or the folder that holds it.
        previous: the same of an older artifact; None keeps the comparison that the validation
            recorded, if any.
        gate: a shipped gate or a file; None is the thresholds that the validation recorded.
        allow_inconclusive: whether the gate may fail to decide; None is what the validation
            recorded.
    """

    validation: Path
    previous: Path | None = None
    gate: str | None = None
    allow_inconclusive: bool | None = None

    def run(self) -> ValidateResult:
        """Judge.

        Raises:
            QuantflowError: a file that cannot be read, or validations of different models or texts.
        """
        from quantflow.validating.recorded import run

        values = run(self)
        path = self.validation
        folder = path if path.is_dir() else path.parent
        return ValidateResult(folder=folder, outcome=str(values["outcome"]), values=values)
