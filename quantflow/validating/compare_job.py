"""One comparison: several models, whatever wrote them, beside one source over one text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantflow.errors import UsageError
from quantflow.files.outputs import beside
from quantflow.planning.recipe import Compute, Resources
from quantflow.progress import SILENT, Progress
from quantflow.settings import check_numbers, setting
from quantflow.sources.models import is_on_hub

COMPARE = ("compare",)


def is_address(word: str) -> bool:
    """Whether a candidate is a server's address."""
    return word.startswith(("http://", "https://"))


@dataclass(frozen=True, kw_only=True)
class CompareResult:
    """A finished comparison.

    Attributes:
        folder: the folder of compare.json, compare.html and compare.svg.
        values: the content of compare.json.
    """

    folder: Path
    values: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class CompareJob:
    """Candidates beside a source, by the divergence of their predictions.

    Attributes:
        source: a model, or a base of log-probabilities as llama.cpp writes it.
        candidates: artifacts, other programs' quantized folders, models and GGUF files; each a
            path or a name on the hub.
        servers: addresses of models that are served, such as `http://localhost:8000/v1#name`;
            the name may be left out.
        server_key: their key, which is never written; None where they ask for none.
        output: the folder that is written; None is `<source>-compare`, here for a name on the hub.
        text, tokens, sequence_length: the evaluation text, as `validate` takes it; a base has its
            own.
        write_base: file in which the source's log-probabilities go, for llama.cpp; the candidates
            are then compared with that file, so that every figure is llama.cpp's.
        engine: `llama.cpp` runs candidates that are GGUF files; None runs all of them here.
        rounded_inputs: inputs of candidates that the schemes leave alone are rounded, whatever it
            costs; those of the source are not.
        force: redo a finished comparison that was made from other inputs, instead of refusing.
    """

    source: Path
    candidates: tuple[Path, ...]
    servers: tuple[str, ...] = ()
    server_key: str | None = field(default=None, repr=False)
    output: Path | None = None
    text: str | None = setting(
        None,
        "--text",
        metavar="TEXT",
        verbs=COMPARE,
        help="Evaluation text, as --calibration takes it (default: a shipped one).",
    )
    tokens: int = setting(
        32768, "--tokens", verbs=COMPARE, least=2, help="Tokens of it (default 32768)."
    )
    sequence_length: int = setting(
        512, "--sequence-length", verbs=COMPARE, least=4, help="Tokens per window (default 512)."
    )
    write_base: Path | None = None
    engine: str | None = setting(
        None,
        "--engine",
        verbs=COMPARE,
        choices=("llama.cpp",),
        help="llama.cpp runs candidates that are GGUF files, in place of our runtime; needs "
        "llama-cpp-python.",
    )
    rounded_inputs: bool = setting(
        False,
        "--rounded-inputs",
        verbs=COMPARE,
        help="Round inputs of the candidates' 4-bit weights to int8 in groups, as `generate "
        "--rounded-inputs` does.",
    )
    seed: int = setting(
        0, "--seed", verbs=COMPARE, least=0, help="Seed of the resampling (default 0)."
    )
    resources: Resources = Resources()
    compute: Compute = Compute()
    force: bool = False

    def __post_init__(self) -> None:
        """Refuse numbers that mean nothing, and a comparison of nothing."""
        check_numbers(self)
        if not self.candidates and not self.servers and self.write_base is None:
            raise UsageError(
                "compare: no candidate",
                "name artifacts, GGUF files or other folders after SOURCE, or give --write-base",
            )

    def run(self, progress: Progress = SILENT) -> CompareResult:
        """Compare; a comparison of the same inputs is left alone.

        Raises:
            QuantflowError: an input that cannot be used.
        """
        from quantflow.validating.compare import run

        return run(self, progress)

    @property
    def folder(self) -> Path:
        """The folder that is written; here for a source on the hub."""
        if self.output is not None:
            return self.output
        if is_on_hub(self.source):
            return Path(f"{self.source.name}-compare")
        return beside(self.source, "-compare")
