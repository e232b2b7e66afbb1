"""The verb `plan`: the needs and the results of a run, before it starts.

Reads    the model's headers and config.json; with --probe the weights of one layer; no tokenizer,
         no text
Writes   nothing
Resumes  nothing
Fails    2 the recipe does not fit the model; 3 unusable model; 6 unsupported family
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from quantflow.errors import UsageError
from quantflow.planning.plan_job import PlanJob, entries, has_groups
from quantflow.planning.recipe import recipe_from
from quantflow.sources.models import names_model
from quantflow.stages.cli.options import (
    SET,
    offline,
    overlay,
    recipe_data,
    recipe_flags,
    recipe_settings,
)
from quantflow.stages.cli.output import note, show, table
from quantflow.units import duration, size


@click.command("plan")
@click.argument("subject", metavar="RECIPE|MODEL")
@click.option(
    "--for",
    "schemes",
    metavar="SCHEMES",
    help="Artifacts of MODEL, such as W4A16:gptq,FP8 (default: all schemes).",
)
@click.option("--scheme", "scheme", hidden=True)  # quantize's word for --for
@recipe_settings("plan", "calibration", "quantize")
@click.option(
    "--probe",
    is_flag=True,
    help="Time parts of one layer, from which the seconds of every stage follow.",
)
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    default="artifacts",
    help="Folder on the disk that will be written.",
)
@offline
@SET
def command(
    subject: str,
    schemes: str | None,
    scheme: str | None,
    output: str,
    probe: bool,
    as_json: bool,
    settings: tuple[str, ...],
    **shared: Any,
) -> None:
    """Print the needs of a run: memory, disk, bytes, schemes.

    No weight is read without --probe, which adds the time of each stage. Without --for a scheme
    that does not fit the model is left out, and the reason said.

    \b
    Example: quantflow plan ./llama --for W4A16:gptq,FP8_DYNAMIC --max-memory 4GiB
    """
    if scheme is not None:
        if schemes is not None:
            raise UsageError(f"plan: --for {schemes} beside --scheme {scheme}", "give --for alone")
        schemes = scheme
        note(f"plan: --scheme {scheme} is read as --for {schemes}", as_json=as_json)
    whole = not names_model(subject)
    if whole and schemes is not None:
        raise UsageError(
            f"plan: --for {schemes} beside recipe {subject}",
            "give the folder of a model with --for",
        )
    flags, entry_flags = recipe_flags("plan", shared)
    otherwise = {} if whole else {"model": subject, "quantize": _entries(schemes)}
    data = recipe_data(subject if whole else None, settings, flags, otherwise=otherwise)
    for entry in data.get("quantize", ()):
        overlay(
            entry,
            entry_flags if has_groups(entry.get("scheme")) else {**entry_flags, "group_size": None},
        )
    job = PlanJob(
        recipe=recipe_from(data),
        measured=whole,
        fitting=not whole and schemes is None,
        folder=Path(output),
        probe=probe,
    )
    result = job.run()
    show(result, as_json=as_json, text=text(result))


def _entries(schemes: str | None) -> list[dict[str, Any]]:
    """The entries that --for names, as a recipe spells them."""
    keys = ("name", "scheme", "algorithm", "target_bpw")
    return [{key: getattr(entry, key) for key in keys} for entry in entries(schemes)]


def text(plan: Mapping[str, Any]) -> str:
    """A plan of `quantflow.planning.forecast.run` as tables for people."""
    model, limits, calibration, total = (
        plan["model"],
        plan["limits"],
        plan["calibration"],
        plan["total"],
    )
    observers = ", ".join(calibration["observers"]) or "none, the token ids alone"
    lines = [
        f"{model['folder']}: {model['family']}, {model['layers']} layers, {model['weights']:,} "
        f"weights, {size(model['bytes'])}",
        *model["notes"],
        f"memory: {size(limits['memory'])}, {limits['memory_from']}; {limits['cores']} cores",
        f"calibration: {calibration['samples']} sequences of {calibration['sequence_length']} "
        f"tokens; statistics: {observers}",
        "",
        _stages(plan),
        f"peak memory {size(total['peak_memory'])}, disk {size(total['disk'])}"
        + _seconds(total["seconds"], ", "),
        *_cards(plan["stages"]),
    ]
    for artifact in plan["artifacts"]:
        lines += ["", *_artifact(artifact)]
    if plan["left_out"]:
        lines += ["", *(f"not planned: {e['cause']}; {e['fix']}" for e in plan["left_out"])]
    return "\n".join(lines)


def _stages(plan: Mapping[str, Any]) -> str:
    timed = plan["total"]["seconds"] is not None
    placed = any("device_memory" in stage for stage in plan["stages"])
    rows = []
    for stage in plan["stages"]:
        note = "does not fit" if stage["refused"] else ""
        row = [stage["stage"], stage["artifact"] or "", note, size(stage["peak_memory"])]
        if placed:
            row.append("" if stage["device_memory"] is None else size(stage["device_memory"]))
        row.append(str(stage["workers"]))
        row += [size(stage["result"]), size(stage["scratch"])]
        rows.append([*row, duration(stage["seconds"])] if timed else row)
    columns = (
        "stage",
        "artifact",
        "",
        "peak memory",
        *(["on device"] if placed else []),
        "workers",
        "result",
        "scratch",
    )
    refused = [f"does not fit: {stage['refused']}" for stage in plan["stages"] if stage["refused"]]
    return "\n".join([table((*columns, "time") if timed else columns, rows), *refused])


def _cards(stages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The least seconds of each stage by card, where they are known."""
    names = list(dict.fromkeys(name for stage in stages for name in stage.get("cards", ())))
    if not names:
        return []
    rows = [
        [stage["stage"], stage["artifact"] or ""]
        + [duration(stage["cards"][name]) if stage["cards"] else "?" for name in names]
        for stage in stages
    ]
    return [
        "",
        "the least time of a stage on a card, by arithmetic with data sheets, a disk of 2 GB/s and "
        "sha256 of 1.5 GB/s; --probe times the card that is here",
        table(("stage", "artifact", *names), rows),
    ]


def _token(token: Mapping[str, Any]) -> str:
    """Bytes of a decoded token, and what memory allows."""
    rates = ", ".join(f"{rate:,.0f} on {name}" for name, rate in token["tokens_per_second"].items())
    return (
        f"a decoded token reads {size(token['weights'])} of weights, and "
        f"{size(token['position'])} for each position before it; at most tokens/s: {rates}"
    )


def _artifact(artifact: Mapping[str, Any]) -> list[str]:
    coverage = artifact["coverage"]
    refit = ["refit"] if artifact["refit"] else []
    algorithm = " ".join([*artifact["transforms"], *refit, artifact["algorithm"]])
    algorithm += f", {artifact['tune']} steps of tuning" if artifact["tune"] else ""
    head = f" and a head of {artifact['head']}" if artifact["head"] else ""
    path = ("" if artifact["kv_cache"] is None else f"cache {artifact['kv_cache']}, ") + artifact[
        "path"
    ]
    lines = [
        f"{artifact['name']}: {artifact['scheme']} by {algorithm}{head}, {path}: "
        f"{size(artifact['output_bytes'])}, "
        f"{artifact['bits_per_weight']:.2f} bits per quantized weight, "
        f"{coverage['weights']:.1%} of the weights and {coverage['bytes']:.1%} of the bytes are "
        "quantized"
    ]
    if "token" in artifact:
        lines.append(_token(artifact["token"]))
    lines += artifact["notes"]
    if artifact["chosen"]:
        lines.append(
            "schemes are chosen when it runs, by what was measured; the figures are those of "
            f"{artifact['scheme']} for all"
        )
    rows = [
        (
            row["tensors"],
            " x ".join(map(str, row["shape"])) if row["shape"] else "",
            row["scheme"],
            str(row["count"]),
            size(row["bytes_before"]),
            size(row["bytes_after"]),
        )
        for row in artifact["schemes"]
    ]
    lines.append(table(("tensors", "shape", "scheme", "count", "before", "after"), rows))
    for cards, obstacles in artifact["tensor_parallel"].items():
        shown = obstacles[:4] + ([f"and {len(obstacles) - 4} more"] if len(obstacles) > 4 else [])
        lines.append(
            f"tensor parallel {cards}: "
            f"{'; '.join(shown) if shown else 'every head, row and group divides'}"
        )
    return lines


def _seconds(seconds: float | None, before: str) -> str:
    return "" if seconds is None else f"{before}about {duration(seconds)}"
