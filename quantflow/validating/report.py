"""A table for the terminal and one self-contained HTML page, which people read after validate.

The page is a template, report.html.jinja beside this file. This file computes its tables and plots;
the template has every sentence, and escapes every text.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from quantflow.files import disk
from quantflow.files.inspect import output_errors
from quantflow.models.graph import UNTRACED
from quantflow.plain_text import plain
from quantflow.svg_plot import Interval, Mark, by_layer, colour_of, heat_map, intervals, powers_of
from quantflow.validating import diagnosis_table, recovery, regression, task_table
from quantflow.validating.gate import METRICS, Gate, judge

_METRIC_NAMES = {
    "ppl_ratio": "ppl ratio",
    "mean_kld": "mean KLD",
    "kld_p999": "99.9% KLD",
    "top1_agreement": "top-1",
}
_KINDS = tuple(  # of linears, in the order in which a layer runs them
    dict.fromkeys(
        name.rpartition(".")[2]
        for family in UNTRACED.values()
        for name in (
            *(linear for group in family.groups for linear in group.linears),
            *(family.mixture.linears if family.mixture is not None else ()),
        )
    )
)
_HEAD = "head"  # the slot of what belongs to no layer
COLUMNS = (
    "artifact",
    "scheme",
    "algorithm",
    "size",
    "bits/weight",
    "ppl ratio",
    "mean KLD",
    "99.9% KLD",
    "top-1",
    "verdict",
)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One artifact.

    Attributes:
        result: content of its validation.json.
        layers: records of its manifest, one a layer, and one of the head where that is quantized.
        source_bytes: bytes of all tensors of its source; None where that is not known.
    """

    result: Mapping[str, Any]
    layers: Sequence[Mapping[str, Any]]
    source_bytes: int | None = None


def verdict_text(result: Mapping[str, Any]) -> str:
    """The verdict as a reader should see it, `fail (expected)` included."""
    outcome = str(result["outcome"])
    return f"{outcome} (expected)" if result["expect"] == "fail" and outcome == "fail" else outcome


def cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    """One table row, in the order of COLUMNS."""
    metrics = {name: result["metrics"][name]["value"] for name in METRICS}
    steps = [name for item in result["transforms"] for name in item]
    return (
        str(result["artifact"]),
        ", cache ".join(filter(None, (result["scheme"], result.get("kv_cache")))),
        " + ".join([*steps, result["algorithm"]]),
        f"{result['size'] / 1e6:.1f} MB",
        f"{result['bits_per_weight']:.2f}",
        f"{metrics['ppl_ratio']:.4f}",
        f"{metrics['mean_kld']:.5f}",
        f"{metrics['kld_p999']:.4f}",
        f"{100 * metrics['top1_agreement']:.2f} %",
        verdict_text(result),
    )


def row_of(result: Mapping[str, Any], manifest: Mapping[str, Any]) -> Row:
    """The row of an artifact from its validation.json and its manifest."""
    layers = [*manifest["layers"], *([manifest["head"]] if "head" in manifest else [])]
    return Row(result=result, layers=layers, source_bytes=manifest["ledger"]["bytes"]["source"])


@dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of a table: its texts, and behind them the outcome of a gate with the text of it."""

    texts: Sequence[str]
    outcome: str = ""
    verdict: str = ""


@dataclass(frozen=True, kw_only=True)
class _Group:
    """A row that heads those below it; the name, where there is one, is bold before it."""

    group: str
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class _Table:
    """A table that scrolls inside its own box; the first column stays in sight.

    Attributes:
        columns: headings.
        rows: rows from top to bottom.
        left: number of leading columns that are text.
        protocol: how tasks were asked, for their table.
    """

    columns: Sequence[str]
    rows: Sequence[_Row | _Group]
    left: int
    protocol: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class _Section:
    """A plot per artifact on one vertical axis.

    Attributes:
        title: heading of the section.
        note: sentence about the values.
        legend: each kind of linear with its colour.
        plots: each artifact's name with its plot as SVG; empty without values.
    """

    title: str
    note: str
    legend: Sequence[tuple[str, str]] = ()
    plots: Sequence[tuple[str, str]] = ()


def write_report(path: Path, rows: Sequence[Row]) -> None:
    """Write the page for one or several artifacts of one model."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("report.html.jinja")
    disk.write_atomic(path, plain(template.render(_content(rows))).encode())


def _content(rows: Sequence[Row]) -> dict[str, Any]:
    """The variables of the template."""
    results, kinds = [row.result for row in rows], _kinds_of(rows)
    calibrated, calibration_errors = _calibrated(rows, kinds)
    limits = intervals(
        [_interval(result) for result in results],
        unit="nats per token; a line across is the limit",
    )
    errors = [
        _panels(
            [(row, [(errors_of(row), False)]) for row in rows],
            kinds,
            title=title,
            note=f"||quantized - original||² / ||original||² of {note}.",
            unit="relative squared error",
        )
        for title, note, errors_of in (
            (
                "Output error of each linear",
                "the output on the canary, quantized input included",
                _output_errors,
            ),
            (
                "Weight error of each linear",
                "the weight; no forward pass ran, so there are no outputs",
                _weight_errors,
            ),
        )
    ]
    ranges = _panels(
        [(row, [(_decided(row, "input_amax"), False)]) for row in rows],
        kinds,
        title="Activation ranges",
        note="The largest |x| of each linear's input in calibration, after smoothing where there "
        "is any.",
        unit="largest |x|",
    )
    return {
        "first": results[0],
        "results": results,
        "verdict_text": verdict_text,
        "short": _short,
        "summary": _summary(rows),
        "artifacts": _artifacts(results),
        "divergences": _svg(limits),
        "gates": _gates(results),
        "regressions": _regressions(results),
        "tasks": _tasks(results),
        "diagnoses": _diagnoses(results, kinds),
        "errors": errors,
        "calibrated": calibrated,
        "calibration_errors": calibration_errors,
        "ranges": ranges,
        "experts": _experts(rows),
    }


def _svg(plot: str) -> str:
    """A plot that the template does not escape: quantflow.svg_plot has escaped its texts."""
    from markupsafe import Markup

    return Markup(plot)


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The page in three lines: artifacts, verdicts, and their cost in bytes and divergence."""
    results = [row.result for row in rows]
    entries = "; ".join(
        f"{result['artifact']} ({cells(result)[1]}, {cells(result)[2]})" for result in results
    )
    # Divergence and bytes are of the artifacts that may be used, where there are any.
    usable = [result for result in results if result["outcome"] == "pass"] or results
    sizes = _range(sorted(result["size"] / 1e6 for result in usable), lambda value: f"{value:.1f}")
    bits = _range(
        sorted(result["bits_per_weight"] for result in usable), lambda value: f"{value:.2f}"
    )
    source = rows[0].source_bytes
    weights = f"{sizes} MB, {bits} bits per quantized weight"
    cost = weights if source is None else f"{source / 1e6:.1f} MB became {weights}"
    klds = sorted(usable, key=lambda result: float(result["metrics"]["mean_kld"]["value"]))
    names = [
        f"{result['metrics']['mean_kld']['value']:.2g} ({result['artifact']})"
        for result in (klds[0], klds[-1])
    ]
    divergence = names[0] if len(klds) == 1 else " to ".join(names)
    which = "" if len(usable) == len(results) else ", of those that pass"
    return {
        "made": f"{results[0]['model']} as {entries}",
        "expected": sum(result["outcome"] == result["expect"] for result in results),
        "costs": f"{cost}; mean KLD {divergence} nats per token{which}",
    }


def _range(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """The ends of sorted values, once where they look the same."""
    first, last = shown(values[0]), shown(values[-1])
    return first if first == last else f"{first} to {last}"


def _artifacts(results: Sequence[Mapping[str, Any]]) -> _Table:
    """A row per artifact, in the order of COLUMNS."""
    rows = []
    for result in results:
        *texts, verdict = cells(result)
        rows.append(_Row(texts=texts, outcome=result["outcome"], verdict=verdict))
    return _Table(columns=COLUMNS, rows=rows, left=3)


def _gates(results: Sequence[Mapping[str, Any]]) -> _Table:
    """A row per artifact and metric, with the bound that decides."""
    rows: list[_Row | _Group] = []
    for result in results:
        gate = result["gate"]
        rows.append(_Group(name=str(result["artifact"]), group=f"gate {gate['name']}"))
        for metric in METRICS:
            bound, threshold = result["metrics"][metric], gate["thresholds"][metric]
            decides = bound["upper"] if METRICS[metric] == "<=" else bound["lower"]
            one = Gate(name=gate["name"], thresholds={metric: threshold})
            outcome = judge(one, {metric: (bound["lower"], bound["upper"])}).outcome
            texts = [
                _METRIC_NAMES[metric],
                f"{METRICS[metric]} {threshold:.4g}",
                _short(bound["value"]),
                _short(decides),
            ]
            rows.append(_Row(texts=texts, outcome=outcome, verdict=outcome))
        for task, (least, lower, upper) in recovery.asked(Gate(**gate), result).items():
            one = Gate(name=gate["name"], thresholds={})
            outcome = judge(one, {}, {task: (least, lower, upper)}).outcome
            kept = result["tasks"]["scores"][task]["recovery"]
            shown = "" if kept is None else f"{kept:.1f} %"
            texts = [f"recovery of {task}", f">= {least:g} %", shown, f"{lower:.1f} %"]
            rows.append(_Row(texts=texts, outcome=outcome, verdict=outcome))
    columns = ("metric", "threshold", "measured", "bound", "verdict")
    return _Table(columns=columns, rows=rows, left=1)


def _regressions(results: Sequence[Mapping[str, Any]]) -> _Table:
    """The comparisons with older artifacts; no rows without any."""
    rows = [
        _Row(
            texts=(str(result["artifact"]), older, metric, *numbers),
            outcome=outcome,
            verdict=outcome,
        )
        for result in results
        if "regression" in result
        for metric, older, outcome, *numbers in regression.cells(result)
    ]
    columns = ("artifact", "beside", "metric", *regression.COLUMNS[3:], "verdict")
    return _Table(columns=columns, rows=rows, left=3)


def _tasks(results: Sequence[Mapping[str, Any]]) -> _Table:
    """The scores of both models in tasks; no rows where none were asked."""
    with_tasks = [result for result in results if "tasks" in result]
    rows = [
        _Row(texts=(str(result["artifact"]), *row))
        for result in with_tasks
        for row in task_table.cells(result["tasks"])
    ]
    protocol = with_tasks[0]["tasks"]["protocol"] if with_tasks else None
    columns = ("artifact", *task_table.COLUMNS)
    return _Table(columns=columns, rows=rows, left=3, protocol=protocol)


def _diagnoses(results: Sequence[Mapping[str, Any]], kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Each diagnosed artifact's losses and mends; empty where no diagnosis was asked."""
    return [
        {
            "artifact": result["artifact"],
            "hint": diagnosis_table.hint(result),
            "maps": _heat_maps(result["diagnosis"], kinds),
            "units": _Table(
                columns=diagnosis_table.COLUMNS,
                rows=[_Row(texts=row) for row in diagnosis_table.cells(result["diagnosis"])],
                left=1,
            ),
            "breakdown": _breakdown(result["diagnosis"]),
            "windows": result["diagnosis"]["windows"],
        }
        for result in results
        if "diagnosis" in result
    ]


def _heat_maps(diagnosis: Mapping[str, Any], kinds: Sequence[str]) -> list[tuple[str, str]]:
    """Two maps of layers and linears with their titles: cost of each alone, and gain without it."""
    if diagnosis["probes"] is None:
        return []
    units = diagnosis["probes"]["units"]
    cells: dict[tuple[str, str], Mapping[str, Any]] = {}
    for unit in units:
        places = (
            [("whole layer", str(unit["layer"]))]
            if unit["whole"]
            else [_place(name)[::-1] for name in unit["linears"]]
        )
        cells |= dict.fromkeys(places, unit)
    layers = {layer for _, layer in cells}
    columns = sorted(layers, key=lambda layer: (layer == _HEAD, layer.zfill(8)))
    there = {kind for kind, _ in cells}
    lines = [kind for kind in ("whole layer", *kinds) if kind in there]
    lines += sorted(there.difference(lines))
    maps = []
    for key, title in (
        ("only_this", "Only this quantized"),
        ("gain", "Gain of leaving this alone"),
    ):
        values = {place: float(unit[key]) for place, unit in cells.items()}
        drawn = heat_map(values, rows=lines, columns=columns, across="layer", unit="nats per token")
        maps.append((title, _svg(drawn)))
    return maps


def _breakdown(diagnosis: Mapping[str, Any]) -> _Table:
    """The divergence by position, kind and frequency of the predicted token."""
    rows: list[_Row | _Group] = []
    for key, title in (
        ("positions", "Tokens of the window before it"),
        ("kinds", "Kind of token"),
        ("frequency", "How often it stands in the text"),
    ):
        rows.append(_Group(group=title))
        for part in diagnosis[key]:
            numbers = [
                _short(part["mean_kld"]),
                f"{part['share']:.1%}",
                f"{part['top1_agreement']:.1%}",
            ]
            rows.append(_Row(texts=[part["name"], f"{part['tokens']:,}", *numbers]))
    columns = ("predicted token", "tokens", "mean KLD", "share", "top-1")
    return _Table(columns=columns, rows=rows, left=1)


def _short(value: float) -> str:
    """A metric in at most seven characters: four digits of large values, two of small ones."""
    return f"{value:.4g}" if abs(value) >= 0.01 else f"{value:.2g}"


def _kinds_of(rows: Sequence[Row]) -> list[str]:
    """The kinds of all linears of a page in a layer's order, unknown ones last."""
    names = {
        name
        for row in rows
        for layer in row.layers
        for key in ("errors", "decisions")
        for name in layer[key]
    }
    kinds = {_place(name)[1] for name in names}
    return [*[kind for kind in _KINDS if kind in kinds], *sorted(kinds.difference(_KINDS))]


def _panels(
    of_rows: Sequence[tuple[Row, Sequence[tuple[Mapping[str, float], bool]]]],
    kinds: Sequence[str],
    *,
    title: str,
    note: str,
    unit: str,
) -> _Section:
    """A section with a plot per artifact that has values.

    Args:
        of_rows: each artifact with its series: source name of a linear -> value, and whether its
            marks are hollow.
        kinds: kinds of all linears of the page.
        title: heading of the section.
        note: sentence about the values.
        unit: unit of the values.
    """
    panels = []
    for row, series in of_rows:
        marks = [
            Mark(**_slot(name), value=value, hollow=hollow)
            for values, hollow in series
            for name, value in values.items()
        ]
        marks.sort(key=lambda mark: (mark.layer == _HEAD, mark.layer.zfill(8)))
        if marks:
            panels.append((str(row.result["artifact"]), marks))
    everything = [mark for _, marks in panels for mark in marks]
    there = [kind for kind in kinds if any(mark.kind == kind for mark in everything)]
    powers = powers_of(everything)
    return _Section(
        title=title,
        note=note,
        legend=[(kind, colour_of(kind, kinds)) for kind in there],
        plots=[
            (name, _svg(by_layer(marks, kinds=kinds, unit=unit, powers=powers)))
            for name, marks in panels
        ],
    )


def _slot(name: str) -> dict[str, str]:
    layer, kind = _place(name)
    return {"layer": layer, "kind": kind}


def _place(name: str) -> tuple[str, str]:
    """The layer and the kind of a linear: `3`, `q_proj` of `model.layers.3.self_attn.q_proj`.

    Experts' linears have the same kinds.
    """
    match = re.search(r"\.(\d+)\.(?:.*\.)?([^.]+)$", name)
    number = re.search(r"\.(\d+)\.", name)
    return (number[1], match[2]) if match and number else (_HEAD, name.rpartition(".")[2])


def _experts(rows: Sequence[Row]) -> _Table:
    """The number of tokens that reached the experts of each layer; no rows without experts."""
    columns = ("artifact", "experts", "shown", "least", "median", "most", "short of tokens")
    body = []
    for row in rows:
        for experts in [layer["experts"] for layer in row.layers if "experts" in layer]:
            tokens = experts["tokens"]
            counts = (
                ["", "", ""]
                if not tokens
                else [str(min(tokens)), f"{median(tokens):g}", str(max(tokens))]
            )
            short = [
                f"{name.rpartition('.')[0].rpartition('.')[2]} ({shortage['tokens']} of "
                f"{shortage['needed']})"
                for name, shortage in experts["short"].items()
            ]
            texts = [
                str(row.result["artifact"]),
                experts["experts"],
                str(experts["fed"] or ""),
                *counts,
                ", ".join(short) or "none",
            ]
            body.append(_Row(texts=texts))
    return _Table(columns=columns, rows=body, left=3)


def _calibrated(rows: Sequence[Row], kinds: Sequence[str]) -> tuple[_Table, _Section]:
    """Output errors after calibration, as a table and plots; no rows without a calibrated one."""
    columns = (
        "artifact",
        "algorithm",
        "linears",
        "median",
        "median of rtn",
        "worst",
        "worse than rtn",
        "same as rtn",
    )
    body, plotted = [], []
    for row in rows:
        errors, result = output_errors(row.layers), row.result
        if errors:
            shares = [f"{errors[key]:.2%}" for key in ("median", "median_rtn", "worst")]
            counts = [str(errors[key]) for key in ("worse_than_rtn", "same_as_rtn")]
            texts = [
                str(result["artifact"]),
                str(result["algorithm"]),
                str(errors["linears"]),
                *shares,
                *counts,
            ]
            body.append(_Row(texts=texts))
            plotted.append(
                (
                    row,
                    [
                        (_decided(row, "output_error_rtn"), True),
                        (_decided(row, "output_error"), False),
                    ],
                )
            )
    section = _panels(
        plotted,
        kinds,
        title="Output error on the calibration text",
        note="||quantized - original|| / ||original|| of each linear's output, its input as it "
        "was; rings are the same of round to nearest without calibration. Of rows that stand for "
        "all.",
        unit="relative error",
    )
    return _Table(columns=columns, rows=body, left=2), section


def _decided(row: Row, key: str) -> dict[str, float]:
    """A number that was decided for each linear, where it was."""
    decisions = [
        (name, decided) for layer in row.layers for name, decided in layer["decisions"].items()
    ]
    return {name: decided[key] for name, decided in decisions if decided.get(key) is not None}


def _interval(result: Mapping[str, Any]) -> Interval:
    kld = result["metrics"]["mean_kld"]
    return Interval(
        label=str(result["artifact"]), limit=result["gate"]["thresholds"]["mean_kld"], **kld
    )


def _output_errors(row: Row) -> dict[str, float]:
    errors = [(name, error) for layer in row.layers for name, error in layer["errors"].items()]
    return {name: error["output"] for name, error in errors if "output" in error}


def _weight_errors(row: Row) -> dict[str, float]:
    """Errors of weights where those of outputs are not known, as after quantizing file to file."""
    errors = [(name, error) for layer in row.layers for name, error in layer["errors"].items()]
    return {name: error["weight"] for name, error in errors if "output" not in error}
