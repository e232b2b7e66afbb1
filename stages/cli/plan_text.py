"""The tables of `quantflow plan`."""

from collections.abc import Mapping
from typing import Any

from quantflow.stages.cli.output import table
from quantflow.units import duration, size


def text(plan: Mapping[str, Any]) -> str:
    """Return a plan, as `quantflow.planning.forecast.run` makes it, as tables for people."""
    model, limits, calibration, total = plan["model"], plan["limits"], plan["calibration"], plan["total"]
    observers = ", ".join(calibration["observers"]) or "none, the token ids alone"
    lines = [
        f"{model['folder']}: {model['family']}, {model['layers']} layers, {model['weights']:,} weights, {size(model['bytes'])}",
        f"memory: {size(limits['memory'])}, {limits['memory_from']}; {limits['cores']} cores",
        f"calibration: {calibration['samples']} sequences of {calibration['sequence_length']} tokens; statistics: {observers}",
        "",
        _stages(plan),
        f"peak memory {size(total['peak_memory'])}, disk {size(total['disk'])}" + _seconds(total["seconds"], ", "),
    ]
    for artifact in plan["artifacts"]:
        lines += ["", *_artifact(artifact)]
    return "\n".join(lines)


def _stages(plan: Mapping[str, Any]) -> str:
    timed = plan["total"]["seconds"] is not None
    rows = []
    for stage in plan["stages"]:
        note = "does not fit" if stage["refused"] else ""
        row = [stage["stage"], stage["artifact"] or "", note, size(stage["peak_memory"]), str(stage["workers"])]
        row += [size(stage["result"]), size(stage["scratch"])]
        rows.append([*row, duration(stage["seconds"])] if timed else row)
    columns = ("stage", "artifact", "", "peak memory", "workers", "result", "scratch")
    refused = [f"does not fit: {stage['refused']}" for stage in plan["stages"] if stage["refused"]]
    return "\n".join([table((*columns, "time") if timed else columns, rows), *refused])


def _artifact(artifact: Mapping[str, Any]) -> list[str]:
    coverage = artifact["coverage"]
    algorithm = " ".join([*artifact["transforms"], artifact["algorithm"]])
    algorithm += f", {artifact['tune']} steps of tuning" if artifact["tune"] else ""
    head = f" and a head of {artifact['head']}" if artifact["head"] else ""
    path = ("" if artifact["kv_cache"] is None else f"cache {artifact['kv_cache']}, ") + artifact["path"]
    lines = [
        f"{artifact['name']}: {artifact['scheme']} by {algorithm}{head}, {path}: {size(artifact['output_bytes'])}, "
        f"{artifact['bits_per_weight']:.2f} bits per quantized weight, "
        f"{coverage['weights']:.1%} of the weights and {coverage['bytes']:.1%} of the bytes are quantized"
    ]
    if artifact["chosen"]:
        lines.append(
            f"schemes are chosen when it runs, by what was measured; the figures are those of {artifact['scheme']} for all"
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
        lines.append(f"tensor parallel {cards}: {'; '.join(shown) if shown else 'every head, row and group divides'}")
    return lines


def _seconds(seconds: float | None, before: str) -> str:
    return "" if seconds is None else f"{before}about {duration(seconds)}"
