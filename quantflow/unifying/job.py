"""The job of stage 3: the ranks or shards that become one, and their settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantflow.progress import SILENT, Progress


@dataclass(frozen=True, kw_only=True)
class UnifyResult:
    """Merged ranks.

    Attributes:
        folder: the folder that was written.
        summary: the rule of each statistic that was merged, or the shards that were joined, as
            plain data.
    """

    folder: Path
    summary: Mapping[str, Any]

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[str]]]:
        """Columns and rows of a table for people."""
        from quantflow.unifying.unify import report

        return report(dict(self.summary))


@dataclass(frozen=True, kw_only=True)
class UnifyJob:
    """Measurements of several ranks merged, one expanded to several, or quantized shards joined.

    Attributes:
        measurement: the folder that holds rank-*-of-*; or Gaudi's files, as a folder or
            folder/prefix.
        output: the folder, which gets one folder per group; the shards of one group become the
            folder itself.
        groups: ranks that become one, as `-g` takes them: `0123` or `0,1,2` or `0-7`; empty means
            all ranks into one.
        ranks: so many groups of neighbouring ranks instead.
        expand: make so many ranks of one instead of merging.
        allow_missing: go on without replicas that are missing as a whole; the result says which.
        expert_parallel: of Gaudi's files, and of a measurement that is expanded, whether a rank
            holds some of the experts, or a part of each; None where the files say it.
        model: the model that quantized shards were made from; None reads it where quantize did. Not
            read where the model ran.
        force: redo a finished result that was made from other inputs, instead of refusing.
    """

    measurement: Path
    output: Path
    groups: tuple[str, ...] = ()
    ranks: int | None = None
    expand: int | None = None
    allow_missing: bool = False
    expert_parallel: bool | None = None
    model: Path | None = None
    force: bool = False

    def run(self, progress: Progress = SILENT) -> UnifyResult:
        """Merge; a result of the same ranks and groups is left alone.

        Raises:
            QuantflowError: ranks that are missing, twice, foreign or damaged; groups that no card
                would hold.
        """
        from quantflow.unifying.unify import run, settled, summary

        folder = run(settled(self), progress)
        return UnifyResult(folder=folder, summary=summary(folder))
