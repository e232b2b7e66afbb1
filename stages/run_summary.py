"""The end of `run`: the seconds of its stages, and each artifact's continuation of one prompt.

The prompt is the beginning of the evaluation text, which no artifact was calibrated on. The texts
are kept in `5-validate/texts.json` with the digest of their inputs, so an up-to-date
run loads no artifact again.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quantflow.errors import QuantflowError
from quantflow.files import disk
from quantflow.files.canonical import canonical_json, digest_of, file_digest, read_json
from quantflow.files.manifest import read_manifest
from quantflow.planning.recipe import Recipe
from quantflow.progress import Progress

ALL = "all"  # the row of the stages that every artifact shares
STAGES = ("measure", "unify", "quantize", "export", "validate", "generate")
PROMPT_TOKENS = 48
NEW_TOKENS = 24
TEXTS = "texts.json"
WIDTH = 72  # characters of a prompt's end that are shown


class StageTimes:
    """Seconds of each stage and artifact of a run."""

    def __init__(self) -> None:
        """Nothing has run."""
        self._seconds: dict[tuple[str, str], float] = {}  # (artifact, stage) -> seconds

    @contextmanager
    def timing(self, stage: str, artifact: str = ALL) -> Iterator[None]:
        """Count the seconds of a block for a stage of an artifact, also where the block fails."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._seconds[artifact, stage] = (
                self._seconds.get((artifact, stage), 0.0) + time.monotonic() - begin
            )

    def table(self) -> str:
        """Seconds as aligned text: a row per artifact, a column per stage, sums at both ends."""
        stages = [stage for stage in STAGES if any(of == stage for _, of in self._seconds)]
        artifacts = list(dict.fromkeys(artifact for artifact, _ in self._seconds))
        rows = [("seconds", *stages, "sum")]
        for artifact in artifacts:
            values = [self._seconds.get((artifact, stage)) for stage in stages]
            rows.append((artifact, *map(_cell, values), _cell(sum(filter(None, values)))))
        columns = [
            sum(self._seconds.get((artifact, stage), 0.0) for artifact in artifacts)
            for stage in stages
        ]
        rows.append(("sum", *map(_cell, columns), _cell(sum(columns))))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                text.rjust(width) if i else text.ljust(width)
                for i, (text, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )


def write_texts(recipe: Recipe, folder: Path, times: StageTimes, progress: Progress) -> None:
    """Let each artifact continue the beginning of the evaluation text, and keep its words.

    The most likely token is taken each time. Where the recipe bounds the memory, weights are read
    from disk for every token.

    Args:
        recipe: recipe of the artifacts in `folder`.
        folder: folder of the run.
        times: receiver of the seconds of each artifact.
        progress: receiver of the reason why an artifact cannot be run here; the run goes on.
    """
    path, source = folder / "5-validate" / TEXTS, Path(str(recipe.validate.text))
    kept = read_json(path) if path.is_file() else {}
    made: dict[str, dict[str, str]] = {}
    for entry in recipe.quantize:
        artifact = folder / "4-export" / entry.name
        key = digest_of(
            [read_manifest(artifact)["digest"], file_digest(source), PROMPT_TOKENS, NEW_TOKENS]
        )
        if kept.get(entry.name, {}).get("key") == key:
            made[entry.name] = kept[entry.name]
            continue
        try:
            from quantflow.validating.sample_text import (
                sample_text,  # here: an up-to-date run has it
            )

            with times.timing("generate", entry.name):
                prompt, text = sample_text(
                    artifact,
                    model=Path(recipe.model),
                    text=source,
                    prompt_tokens=PROMPT_TOKENS,
                    new_tokens=NEW_TOKENS,
                    disk_offload=recipe.resources.disk_offload
                    or recipe.resources.max_memory is not None,
                )
        except QuantflowError as error:
            progress.say(f"generate {entry.name}: no text: {error.cause}")
            continue
        made[entry.name] = {"key": key, "prompt": prompt, "text": text}
    if made != kept:
        disk.write_atomic(path, canonical_json(made))


def texts(folder: Path, names: Sequence[str]) -> str:
    """The prompt and each artifact's continuation as lines after a line break; else empty."""
    path = folder / "5-validate" / TEXTS
    made = read_json(path) if path.is_file() else {}
    said = [(name, made[name]) for name in names if name in made]
    if not said:
        return ""
    prompt, width = said[0][1]["prompt"], max(len("prompt"), *(len(name) for name, _ in said))
    rows = [
        ("prompt", prompt if len(prompt) <= WIDTH else f"...{prompt[-WIDTH:]}"),
        *((name, one["text"]) for name, one in said),
    ]
    return "\n" + "\n".join(
        f"{name.ljust(width)}  {json.dumps(text, ensure_ascii=False)}" for name, text in rows
    )


def _cell(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f}"
