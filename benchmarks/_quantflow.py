"""The commands of quantflow that are timed, and what its plan says about them beforehand."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from _report import off
from _watch import Failed, Run, run

QUANTFLOW = (sys.executable, "-m", "quantflow")


# what measure collects where nothing is named
STATISTICS = ("amax", "channel_amax", "min_max", "mean_abs", "histogram")
SMALL = 1e6  # a stage that writes a few kB is rounded up to blocks, and its log counts as well


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plan of one artifact by `quantflow plan --probe`, by stage.

    It is empty and None where the command says nothing.

    Attributes:
        memory: peak resident bytes.
        disk: bytes written, scratch files included.
        seconds: expected from the probe of one layer.
        output: bytes of the artifact.
        asking: seconds that the planning itself took, probe included.
    """

    memory: dict[str, float]
    disk: dict[str, float]
    seconds: dict[str, float]
    output: float | None
    asking: float


@dataclass(frozen=True, kw_only=True)
class Commands:
    """The commands of quantflow on one checkpoint.

    Attributes:
        model: the checkpoint.
        limits: options of every stage, such as `--max-memory 4GB`.
    """

    model: Path
    limits: tuple[str, ...] = ()

    def quantize(
        self, output: Path, *, scheme: str, algorithm: str, artifact: Path | None = None
    ) -> tuple[str | Path, ...]:
        """Return stage 2, and stage 4 with it where an artifact is named."""
        words: tuple[str | Path, ...] = ("--scheme", scheme, "--algorithm", algorithm)
        words += ("--no-export",) if artifact is None else ("--export", artifact)
        return (*QUANTFLOW, "quantize", self.model, "-o", output, *words, *self.limits)

    def measure(
        self, output: Path, calibration: Path, *, needs: str | None
    ) -> tuple[str | Path, ...]:
        """Stage 1.

        `needs` are the schemes it is for; None collects every default statistic.
        """
        chosen = ("--stats", ",".join(STATISTICS)) if needs is None else ("--for", needs)
        return (
            *QUANTFLOW,
            "measure",
            self.model,
            "-o",
            output,
            "--calibration",
            calibration,
            *chosen,
            *self.limits,
        )

    def export(self, quantized: Path, artifact: Path) -> tuple[str | Path, ...]:
        """Return stage 4."""
        return (*QUANTFLOW, "export", quantized, "-o", artifact, *self.limits)

    def verify(self, artifact: Path) -> tuple[str | Path, ...]:
        """Return the check of every byte of an artifact."""
        return (*QUANTFLOW, "verify", artifact)

    def plan(
        self,
        artifact: str,
        work: Path,
        *,
        samples: int = 1,
        tokens: int = 1,
        needs: str | None = None,
    ) -> Planned:
        """Ask what an artifact such as `W4A16:gptq` takes.

        Args:
            artifact: scheme and algorithm.
            work: where the log goes, and whose disk is meant.
            samples: calibration sequences.
            tokens: of each.
            needs: as in `measure`.
        """
        lengths = ("--samples", str(samples), "--sequence-length", str(tokens))
        chosen = ("--set", f"measure.stats=[{', '.join(STATISTICS)}]") if needs is None else ()
        words = (
            *QUANTFLOW,
            "plan",
            self.model,
            "--for",
            artifact,
            *lengths,
            *chosen,
            "-o",
            work,
            *self.limits,
        )
        try:
            asked = run((*words, "--probe", "--json"), log=work / "plan.log")
        except Failed as error:
            print(f"no plan: {error}", flush=True)
            return Planned(memory={}, disk={}, seconds={}, output=None, asking=0.0)
        document = json.loads(asked.output)
        stages = {str(stage["stage"]): stage for stage in document["stages"]}
        return Planned(
            memory={name: stage["peak_memory"] for name, stage in stages.items()},
            disk={name: stage["result"] + stage["scratch"] for name, stage in stages.items()},
            seconds={name: stage["seconds"] for name, stage in stages.items()},
            output=document["artifacts"][0]["output_bytes"],
            asking=asked.seconds,
        )


PLAN_COLUMNS = ("planned, actual, error", "peak RSS", "disk", "seconds")


def plan_rows(planned: Planned, found: dict[str, Run], output: int) -> list[tuple[str, ...]]:
    """PLAN_COLUMNS for every stage: planned, actual and the error of each.

    The last row is the artifact's size.
    """
    rows: list[tuple[str, ...]] = []
    for name, stage in found.items():
        memory, disk = (
            off(planned.memory.get(name), stage.rss),
            off(planned.disk.get(name), stage.disk),
        )
        seconds = (
            f"{planned.seconds[name]:.0f}, {stage.seconds:.0f}" if name in planned.seconds else ""
        )
        rows.append((name, memory, disk, seconds))
    return [*rows, ("artifact", "", off(planned.output, output), "")] if output else rows


def plan_errors(planned: Planned, found: dict[str, Run], output: int) -> dict[str, list[float]]:
    """Relative errors of the plan.

    They are of memory, of output, and of disk where more than SMALL bytes were written.
    """
    memory = [
        _error(planned.memory[name], stage.rss)
        for name, stage in found.items()
        if name in planned.memory
    ]
    written = {name: stage.disk for name, stage in found.items() if stage.disk > SMALL}
    disk = [
        _error(planned.disk[name], size) for name, size in written.items() if name in planned.disk
    ]
    return {
        "memory": memory,
        "disk": disk,
        "output": [_error(planned.output, output)] if planned.output and output else [],
    }


def worst(errors: Sequence[float]) -> float:
    """Return the error that is farthest from 0."""
    return max(errors, key=abs)


def artifact_bytes(folder: Path) -> int:
    """Return the sizes of all files of an artifact."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _error(planned: float, actual: float) -> float:
    return (planned - actual) / max(actual, 1)
