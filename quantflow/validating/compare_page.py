"""A comparison for people: the terminal's tables, a page and a plot."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantflow.files import disk
from quantflow.plain_text import plain
from quantflow.svg_plot import Interval, Point, curves, intervals
from quantflow.units import size

COLUMNS = (
    "candidate",
    "stored",
    "size",
    "bits/weight",
    "mean KLD",
    "at least",
    "at most",
    "99.9% KLD",
    "top-1",
    "ppl ratio",
)
PAIRS = ("candidate", "against", "verdict", "KLD difference", "at least", "at most")


def indented(values: Mapping[str, Any]) -> bytes:
    """The bytes of compare.json, for people too."""
    return json.dumps(values, indent=1, sort_keys=True).encode()


def cells(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the candidates, in the order of COLUMNS, the least divergence first."""
    rows = sorted(values["candidates"], key=lambda row: row["metrics"]["mean_kld"]["value"])
    return [
        (
            row["name"],
            f"{row['stored']}, inputs rounded" if row["rounded_inputs"] else row["stored"],
            "" if row["bytes"] is None else size(row["bytes"]),
            "" if row["bits_per_weight"] is None else f"{row['bits_per_weight']:.2f}",
            *(f"{_more(row)}{row['metrics']['mean_kld'][part]:.5f}" for part in ("value", "lower")),
            "" if _more(row) else f"{row['metrics']['mean_kld']['upper']:.5f}",
            f"{_more(row)}{row['metrics']['kld_p999']['value']:.4f}",
            f"{100 * row['metrics']['top1_agreement']['value']:.2f} %",
            f"{row['metrics']['ppl_ratio']['value']:.5f}",
        )
        for row in rows
    ]


def _more(row: Mapping[str, Any]) -> str:
    """The sign before a divergence that is known from below."""
    return ">= " if "logprobs_per_position" in row else ""


def pair_cells(values: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The rows of the pairs, in the order of PAIRS."""
    return [
        (
            pair["name"],
            pair["against"],
            pair["verdict"],
            *(f"{pair[part]:+.5f}" for part in ("value", "lower", "upper")),
        )
        for pair in values["pairs"]
    ]


def frontier(rows: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """(bits, divergence) of the candidates that no smaller one beats, from the smallest on."""
    found: list[tuple[float, float]] = []
    points = sorted(
        (row["bits_per_weight"], row["metrics"]["mean_kld"]["value"])
        for row in rows
        if row["bits_per_weight"] is not None
    )
    for bits, divergence in points:
        if not found or divergence < found[-1][1]:
            found.append((bits, divergence))
    return found


def write_pages(folder: Path, values: Mapping[str, Any]) -> None:
    """Write compare.html and compare.svg."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    rows = values["candidates"]
    plot = curves(
        line=frontier(rows),
        label="no smaller one is closer",
        points={"candidates": [_point(row) for row in rows if row["bits_per_weight"] is not None]},
        x="bits per weight, everything that is stored",
        y="mean KL divergence, nats per token",
    )
    bounds = intervals([_interval(row) for row in rows], unit="nats per token") if rows else ""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("compare.html.jinja").render(
        values=values,
        columns=COLUMNS,
        rows=cells(values),
        pair_columns=PAIRS,
        pairs=pair_cells(values),
        plot=Markup(plot),
        bounds=Markup(bounds),
    )
    disk.write_file(folder / "compare.html", plain(page).encode())
    disk.write_file(folder / "compare.svg", plot.encode())


def _point(row: Mapping[str, Any]) -> Point:
    return Point(label=_label(row), x=row["bits_per_weight"], y=row["metrics"]["mean_kld"]["value"])


def _label(row: Mapping[str, Any]) -> str:
    name: str = row["name"]
    return name if "logprobs_per_position" in row else Path(name).name


def _interval(row: Mapping[str, Any]) -> Interval:
    bound = row["metrics"]["mean_kld"]
    return Interval(
        label=_label(row),
        value=bound["value"],
        lower=bound["lower"],
        upper=bound["upper"],
    )
