"""The verb `inspect`: the kind and content of a folder; it reads no weight with --no-verify.

It imports torch for --backends and --cards, for folders of other programs, names on the hub and
GGUF files alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantflow.errors import InputError, UsageError
from quantflow.files.checkpoint import open_checkpoint
from quantflow.files.inspect import summarize
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.files.verify import verify
from quantflow.reporting.progress_line import ProgressLine
from quantflow.sources.models import SUFFIX, is_on_hub
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import NO_VERIFY, offline
from quantflow.stages.cli.output import outline, show, table

_RUN = ("artifact", "checkpoint")  # kinds that an engine runs
_SHOWN = 4  # obstacles in a line


@click.command("inspect")
@click.argument("path")
@click.option(
    "--backends",
    is_flag=True,
    help="Backend that would run each linear of an artifact here, and why the others would not.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Dtype of the activations for --backends.",
)
@click.option(
    "--cards",
    is_flag=True,
    help="What runs it, which numbers of cards divide it, and faults that names show; always of a "
    "name on the hub and of another program's folder.",
)
@click.option("--revision", metavar="NAME", help="Branch, tag or commit of a name on the hub.")
@NO_VERIFY
@offline
def command(
    path: str,
    backends: bool,
    dtype: str,
    cards: bool,
    revision: str | None,
    no_verify: bool,
    as_json: bool,
    **_shared: Any,
) -> None:
    """Show the content of a model, measurement, artifact, other program's folder, or GGUF file.

    An artifact is verified first. Every tensor of another program's folder and of a GGUF file is
    read; a damaged one is refused with its name. Of a name on the hub (org/name) headers are read
    and nothing else is downloaded: hashes and weights are not checked.

    \b
    Example: quantflow inspect work/4-export
             quantflow inspect org/llama-awq
             quantflow inspect ./llama-gptq --json
             quantflow inspect org/llama-gguf/model.Q4_K_M.gguf
             quantflow inspect work/4-export --backends --dtype bfloat16
    """
    if is_on_hub(path):
        if backends:
            raise UsageError(f"inspect: --backends of {path}, a name on the hub", "download it")
        _of_the_hub(path, revision, as_json=as_json)
        return
    if not no_verify and (Path(path) / MANIFEST_NAME).exists():
        verify(Path(path))
    if backends:
        from quantflow.runtime.backend_choice import (
            backends as chosen_backends,  # here: imports torch
        )

        rows = chosen_backends(Path(path), dtype=dtype)
        show(rows, as_json=as_json, text=_backends_text(rows))
        return
    place = _file(path, revision, quiet=as_json)
    summary = {} if place.is_file() else summarize(place)
    foreign = _is_foreign(summary)
    if place.is_file() or foreign:
        progress = ProgressLine(quiet=as_json, bars=bars_wanted())
        summary = _described(place, verify=not no_verify, progress=progress)
    if foreign or (cards and summary["kind"] in _RUN):
        summary |= _survey(place)
    show(summary, as_json=as_json, text=outline(_for_people(summary)))


def _file(path: str, revision: str | None, *, quiet: bool) -> Path:
    """The path itself, or the download of a GGUF file on the hub, all of which is read."""
    repository, _, file = path.rpartition("/")
    if not path.endswith(SUFFIX) or Path(path).exists() or not is_on_hub(repository):
        return Path(path)
    from quantflow.sources.hub import file_of  # here: it needs the hub's library

    return file_of(repository, file, revision, ProgressLine(quiet=quiet, bars=bars_wanted()))


def _of_the_hub(name: str, revision: str | None, *, as_json: bool) -> None:
    """Show a repository from its headers."""
    from quantflow.sources.headers import described  # here: it needs the hub's library

    progress = ProgressLine(quiet=as_json, bars=bars_wanted())
    with described(name, revision=revision, progress=progress) as folder:
        summary = summarize(folder)
        if _is_foreign(summary):
            summary = _described(folder, verify=False, progress=progress)
        about = {"repository": name, "revision": folder.name}
        result = about | summary | (_survey(folder) if summary["kind"] != "openvino_ir" else {})
    show(result, as_json=as_json, text=outline(_for_people(result)))


def _described(place: Path, *, verify: bool, progress: ProgressLine) -> dict[str, Any]:
    """Another program's folder or a GGUF file.

    Raises:
        InputError: it is damaged; where a list in config.json is the cause, that is said too.
    """
    from quantflow.planning.survey import list_faults  # here: they import torch
    from quantflow.runtime.inspection import describe

    try:
        return describe(place, verify=verify, progress=progress)
    except InputError as error:
        found = list_faults(open_checkpoint(place)) if place.is_dir() else []
        if not found:
            raise
        raise InputError(
            f"{error.cause}; {found[0]}", "mend the list in config.json, or ask who published it"
        ) from error


def _is_foreign(summary: Mapping[str, Any]) -> bool:
    """Whether another program quantized what a folder holds."""
    return summary.get("kind") == "checkpoint" and summary["quant_method"] is not None


def _survey(folder: Path) -> dict[str, Any]:
    from quantflow.planning.survey import survey  # here: it imports torch

    return survey(folder)


def _for_people(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The summary with words where a list is empty or long."""
    if "tensor_parallel" not in summary:
        return dict(summary)
    splits = summary["tensor_parallel"]
    words: Any = "not known"
    if splits is not None:
        words = {cards: _obstacles(found) for cards, found in splits.items()}
    return {**summary, "tensor_parallel": words, "faults": summary["faults"] or "none seen"}


def _obstacles(found: Sequence[str]) -> str:
    more = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
    return "; ".join([*found[:_SHOWN], *more]) or "every head, row and group divides"


def _backends_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table, and every reason once."""
    cells = [
        (r["first"], r["scheme"], r["backend"], "x".join(map(str, r["shape"])), str(r["count"]))
        for r in rows
    ]
    lines = [table(("first linear", "scheme", "backend", "shape", "linears"), cells)]
    for scheme, reasons in {r["scheme"]: r["why_not"] for r in rows}.items():
        lines += [
            f"\n{scheme}, not run by",
            *(f"  {name}: {reason}" for name, reason in reasons.items()),
        ]
    return "\n".join(lines)
