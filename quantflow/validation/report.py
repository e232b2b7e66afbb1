"""What people read after validate: a table for the terminal, and one self-contained HTML page."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any

from quantflow.artifact import disk
from quantflow.artifact.inspect import output_errors
from quantflow.evaluation.svg_plot import Interval, intervals, lines
from quantflow.validation.gate import METRICS

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; color: #1c1e21; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; width: 100%; } th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #1c1e21; } td { border-bottom: 1px solid #dcdfe3; }
th:first-child, td:first-child, th.left, td.left { text-align: left; }
.wide { overflow-x: auto; } .pass { color: #1d7a46; font-weight: 600; } .fail { color: #b3261e; font-weight: 600; }
.inconclusive { color: #8a6100; font-weight: 600; } .note { color: #555b63; font-size: .92rem; }
svg { max-width: 100%; height: auto; } svg text { font: 11px system-ui, sans-serif; fill: #3b4047; }
svg .grid { stroke: #e3e6ea; } code { font-size: .88em; }
"""
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
    """One artifact: its validation.json, and what `parts_of` returns of its manifest."""

    result: Mapping[str, Any]
    layers: Sequence[Mapping[str, Any]]


def verdict_text(result: Mapping[str, Any]) -> str:
    """Return the verdict as a reader should see it, `fail (expected)` included."""
    outcome = str(result["outcome"])
    return f"{outcome} (expected)" if result["expect"] == "fail" and outcome == "fail" else outcome


def cells(result: Mapping[str, Any]) -> tuple[str, ...]:
    """Return one table row, in the order of COLUMNS."""
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


def parts_of(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a manifest records of each layer, and of the head where that is quantized."""
    return [*manifest["layers"], *([manifest["head"]] if "head" in manifest else [])]


def write_report(path: Path, rows: Sequence[Row]) -> None:
    """Write the page for one or several artifacts of one model."""
    results = [row.result for row in rows]
    first = results[0]
    protocol, noise = first["protocol"], first["noise_floor"]
    body = [
        f"<h1>{escape(str(first['model']))}: {len(rows)} artifact{'s' if len(rows) != 1 else ''} validated</h1>",
        f"<p>{protocol['tokens']} tokens in {protocol['windows']} windows of at most {protocol['sequence_length']}; "
        f"both models in {protocol['dtype']}; bounds are {protocol['bound']}, {protocol['resamples']} resamples of windows. "
        f"Baseline perplexity {first['perplexity']['baseline']:.4f}. Protocol <code>{protocol['hash'][:16]}</code>.</p>",
        f"<p>Noise floor, the baseline in bf16 against itself in float32: mean KLD {noise['mean_kld']['value']:.2g}, "
        f"top-1 {100 * noise['top1_agreement']['value']:.2f} %, perplexity ratio {noise['ppl_ratio']['value']:.5f}.</p>",
        _table(results),
        "<h2>Mean KL divergence, its bounds, and the gate's limit</h2>",
        intervals([_interval(result) for result in results], unit="nats per token; the bar across is the limit"),
        "<h2>Gates</h2>",
        _gates(results),
    ]
    for title, note, errors in (
        ("Output error of each linear", "the output on the canary, quantized input included", _output_errors),
        ("Weight error of each linear", "the weight; no forward pass ran, so there are no outputs", _weight_errors),
    ):
        found = {str(row.result["artifact"]): values for row in rows if (values := errors(row))}
        if found:
            body += [
                f"<h2>{title}</h2>",
                f"<p class=note>||quantized - original||² / ||original||² of {note}.</p>",
                lines(found, unit="relative squared error"),
            ]
    body += _calibrated(rows)
    ranges = {str(row.result["artifact"]): _told(row, "input_amax") for row in rows}
    ranges = {name: values for name, values in ranges.items() if values}
    if ranges:
        body += [
            "<h2>Activation ranges</h2>",
            "<p class=note>The largest |x| of each linear's input in calibration, after smoothing where there is any.</p>",
            lines(ranges, unit="largest |x|"),
        ]
    body += _experts(rows)
    body += ["<h2>Artifacts</h2>", _digests(results)]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>quantflow validation</title>'
        f"<style>{STYLE}</style></head><body>{''.join(body)}</body></html>"
    )
    disk.write_atomic(path, page.encode())


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    head = "".join(f"<th{' class=left' if i < 3 else ''}>{escape(name)}</th>" for i, name in enumerate(COLUMNS))
    body = []
    for result in results:
        columns = [f"<td{' class=left' if i < 3 else ''}>{escape(text)}</td>" for i, text in enumerate(cells(result)[:-1])]
        body.append(f"<tr>{''.join(columns)}<td class={result['outcome']}>{escape(verdict_text(result))}</td></tr>")
    return f"<div class=wide><table><tr>{head}</tr>{''.join(body)}</table></div>"


def _gates(results: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for result in results:
        limits = ", ".join(f"{name} {METRICS[name]} {value:.4g}" for name, value in result["gate"]["thresholds"].items())
        why = "; ".join(result["reasons"]) or "every bound is inside"
        note = f"<br><span class=note>{escape(result['gate']['note'])}</span>" if result["gate"]["note"] else ""
        rows.append(
            f"<li><b>{escape(str(result['artifact']))}</b>, gate {escape(result['gate']['name'])} ({escape(limits)}): "
            f"<span class={result['outcome']}>{verdict_text(result)}</span>, {escape(why)}{note}</li>"
        )
    return f"<ul>{''.join(rows)}</ul>"


def _experts(rows: Sequence[Row]) -> list[str]:
    """Return the ledger of tokens: how many reached the experts of each layer; nothing for models without experts."""
    columns = ("artifact", "experts", "shown", "least", "median", "most", "short of tokens")
    body = []
    for row in rows:
        for found in [layer["experts"] for layer in row.layers if "experts" in layer]:
            tokens = found["tokens"]
            known = ["", "", ""] if not tokens else [str(min(tokens)), f"{median(tokens):g}", str(max(tokens))]
            short = [
                f"{name.rpartition('.')[0].rpartition('.')[2]} ({told['tokens']} of {told['needed']})"
                for name, told in found["short"].items()
            ]
            texts = [str(row.result["artifact"]), found["experts"], str(found["fed"] or ""), *known, ", ".join(short) or "none"]
            cells = [f"<td{' class=left' if i < 3 else ''}>{escape(text)}</td>" for i, text in enumerate(texts)]
            body.append(f"<tr>{''.join(cells)}</tr>")
    if not body:
        return []
    head = "".join(f"<th{' class=left' if i < 3 else ''}>{escape(name)}</th>" for i, name in enumerate(columns))
    return [
        "<h2>Calibration tokens of the experts</h2>",
        "<p class=note>How many tokens the router sent to the experts of each layer; what was done with those that got too few "
        "stands with the decisions in quantflow.json.</p>",
        f"<div class=wide><table><tr>{head}</tr>{''.join(body)}</table></div>",
    ]


def _calibrated(rows: Sequence[Row]) -> list[str]:
    """Return what calibration did to the outputs, as a table and a plot; nothing where no algorithm is calibrated."""
    columns = ("artifact", "algorithm", "linears", "median", "median of rtn", "worst", "worse than rtn", "same as rtn")
    body, plotted = [], dict[str, dict[str, float]]()
    for row in rows:
        found, result = output_errors(row.layers), row.result
        if found:
            shares = [f"{found[key]:.2%}" for key in ("median", "median_rtn", "worst")]
            counts = [str(found[key]) for key in ("worse_than_rtn", "same_as_rtn")]
            texts = [str(result["artifact"]), str(result["algorithm"]), str(found["linears"]), *shares, *counts]
            body.append("".join(f"<td{' class=left' if i < 2 else ''}>{escape(text)}</td>" for i, text in enumerate(texts)))
            plotted[str(result["artifact"])] = _told(row, "output_error")
            plotted[f"{result['artifact']}, rtn"] = _told(row, "output_error_rtn")
    if not body:
        return []
    head = "".join(f"<th{' class=left' if i < 2 else ''}>{escape(name)}</th>" for i, name in enumerate(columns))
    return [
        "<h2>Output error on the calibration text</h2>",
        "<p class=note>||quantized - original|| / ||original|| of each linear's output, its input as it was, and the same of "
        "round to nearest without calibration, of rows that stand for all.</p>",
        f"<div class=wide><table><tr>{head}</tr>{''.join(f'<tr>{cells}</tr>' for cells in body)}</table></div>",
        lines(plotted, unit="relative error"),
    ]


def _told(row: Row, key: str) -> dict[str, float]:
    """Return a number that was decided of each linear, where it was."""
    decisions = [(name, told) for layer in row.layers for name, told in layer["decisions"].items()]
    return {_short(name): told[key] for name, told in decisions if told.get(key) is not None}


def _digests(results: Sequence[Mapping[str, Any]]) -> str:
    items = [f"<li>{escape(str(r['artifact']))}: <code>{escape(str(r['digest']))}</code></li>" for r in results]
    return f"<ul>{''.join(items)}</ul>"


def _interval(result: Mapping[str, Any]) -> Interval:
    kld = result["metrics"]["mean_kld"]
    return Interval(label=str(result["artifact"]), limit=result["gate"]["thresholds"]["mean_kld"], **kld)


def _output_errors(row: Row) -> dict[str, float]:
    errors = [(name, error) for layer in row.layers for name, error in layer["errors"].items()]
    return {_short(name): error["output"] for name, error in errors if "output" in error}


def _weight_errors(row: Row) -> dict[str, float]:
    """Return the errors of weights where those of outputs are not known, as after quantizing file to file."""
    errors = [(name, error) for layer in row.layers for name, error in layer["errors"].items()]
    return {_short(name): error["weight"] for name, error in errors if "output" not in error}


def _short(name: str) -> str:
    """Return `3.q_proj` for `model.layers.3.self_attn.q_proj`, `3.7.up_proj` for that of its expert 7."""
    match = re.search(r"\.(\d+)\..*?((?:\d+\.)?[^.]+)$", name)
    return f"{match[1]}.{match[2]}" if match else name
