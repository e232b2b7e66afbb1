"""The verb `diff`: two manifests field by field, or two folders tensor by tensor.

It imports no torch without --values.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from quantflow.errors import UsageError
from quantflow.files.diff import diff
from quantflow.files.manifest import MANIFEST_NAME, read_manifest
from quantflow.files.verify import verify
from quantflow.reporting.progress_line import ProgressLine
from quantflow.sources.models import is_on_hub
from quantflow.stages.cli.environment import bars_wanted
from quantflow.stages.cli.options import NO_VERIFY, offline
from quantflow.stages.cli.output import show, table

_COLUMNS = ("tensor", "verdict", "first", "second", "largest", "relative", "changed")


@click.command("diff")
@click.argument("left")
@click.argument("right")
@click.option(
    "--values",
    is_flag=True,
    help="Values of any two folders, tensor by tensor: artifacts, models, other programs' folders.",
)
@click.option(
    "--text",
    metavar="FILE|NAME",
    help="Text that both run on with --values; the divergence between them is printed.",
)
@click.option("--tokens", type=int, default=4096, show_default=True, help="Most tokens of --text.")
@NO_VERIFY
@offline
def command(
    left: str,
    right: str,
    values: bool,
    text: str | None,
    tokens: int,
    no_verify: bool,
    as_json: bool,
    **_shared: Any,
) -> None:
    """Compare two artifacts: their manifests, or with --values the values of any two folders.

    Prints every field, or tensor, that differs; exits 0 whether any does or not, 7 where one of
    them is damaged. Of a name on the hub (org/name) the manifest alone is read, or with --values
    all of it.

    \b
    Example: quantflow diff work/old work/new
             quantflow diff ./llama-gptq ./llama-awq --values
             quantflow diff ./llama work/4-export --values --text heldout.jsonl
    """
    if text is not None and not values:
        raise UsageError(f"diff: --text {text} without --values", "give --values too")
    for folder in () if no_verify else (left, right):
        if not is_on_hub(folder) and (not values or (Path(folder) / MANIFEST_NAME).exists()):
            verify(Path(folder))
    if values:
        progress = ProgressLine(quiet=as_json, bars=bars_wanted())
        from quantflow.validating.folder_diff import FolderDiffJob  # here: it imports torch

        job = FolderDiffJob(
            left=Path(left),
            right=Path(right),
            text=None if text is None else Path(text),
            tokens=tokens,
        )
        found = job.run(progress)
        show(found, as_json=as_json, text=_values_text(found))
        return
    manifests = [_manifest(folder, quiet=as_json) for folder in (left, right)]
    differences = diff(*manifests)
    rows = [(item.path, str(item.left), str(item.right)) for item in differences]
    lines = table(("field", left, right), rows) if rows else "no difference"
    show(
        [{"path": path, "left": a, "right": b} for path, a, b in rows], as_json=as_json, text=lines
    )


def _manifest(folder: str, *, quiet: bool) -> dict[str, Any]:
    """The manifest of a folder, or of a repository on the hub."""
    if not is_on_hub(folder):
        return read_manifest(Path(folder))
    from quantflow.sources.hub import manifest_of  # here: it needs the hub's library

    return read_manifest(manifest_of(folder, ProgressLine(quiet=quiet, bars=bars_wanted())))


def _values_text(found: Mapping[str, Any]) -> str:
    """The tensors that differ as a table, their numbers by kind, and the divergence."""
    different = [row for row in found["tensors"] if row["relative"] != 0]
    cells = [
        (
            *(str(row[key] or "") for key in ("name", "verdict", "left", "right")),
            *("" if row[key] is None else f"{row[key]:.3g}" for key in ("largest", "relative")),
            "" if row["changed"] is None else f"{row['changed']:.1%}",
        )
        for row in different
    ]
    lines = [table(_COLUMNS, cells), ""] if cells else []
    lines.append(", ".join(f"{count} {verdict}" for verdict, count in found["counts"].items()))
    if "divergence" in found:
        apart = found["divergence"]
        lines.append(
            f"KL divergence {apart['mean_kld']:.6f} nats, at most {apart['largest_kld']:.4f}; "
            f"{apart['top1_agreement']:.2%} of {apart['tokens']} tokens alike"
        )
    return "\n".join(lines)
