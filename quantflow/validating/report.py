"""What people read after validate: a table for the terminal, and one self-contained HTML page."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
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

STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #555b63; --line: #dcdfe3; --grid: #e3e6ea; --page: #fff;
  --box: #f5f7f9; --good: #1d7a46; --bad: #b3261e; --open: #8a6100; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --soft: #a4abb4; --line: #3a4048; --grid: #2c3138;
  --page: #16181b; --box: #1f2328; --good: #5cc98a; --bad: #ff8a80; --open: #e0b450; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 74rem; padding: 1.5rem 1rem 3rem; color: var(--ink);
  background: var(--page); overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; margin: 0 0 .8rem; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 0; } h4 { font-size: .95rem; margin: 1rem 0 .3rem; }
.summary { display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1rem; margin: 0; padding: .8rem 1rem;
  background: var(--box); border-radius: 6px; }
.summary dt { color: var(--soft); } .summary dd { margin: 0; }
.wide { overflow-x: auto; } .plots + .wide, .wide + .one { margin-top: 1.2rem; }
table { border-collapse: collapse; width: 100%; overflow-wrap: normal; }
th, td { padding: .35rem .5rem; text-align: right; white-space: nowrap; vertical-align: top; }
th { border-bottom: 2px solid var(--ink); } td { border-bottom: 1px solid var(--line); }
th.left, td.left { text-align: left; }
th.group { font-weight: 400; padding-top: .8rem; border-bottom: 1px solid var(--ink); }
th:first-child, td.name { position: sticky; left: 0; background: var(--page); text-align: left; }
.pass { color: var(--good); font-weight: 600; } .fail, .regression { color: var(--bad); font-weight: 600; }
.inconclusive { color: var(--open); font-weight: 600; } .note { color: var(--soft); font-size: .92rem; }
ul { padding-left: 1.2rem; } summary { cursor: pointer; padding: .2rem 0; } .text { white-space: pre-wrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 30rem), 1fr)); gap: 1.2rem 2rem; }
.one { max-width: 40rem; }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1rem; padding: 0; margin: .4rem 0 .8rem; list-style: none; }
.legend i { display: inline-block; width: .7em; height: .7em; border-radius: 50%; margin-right: .4em; }
svg { display: block; height: auto; } svg text { font: 13px system-ui, sans-serif; fill: var(--soft); }
svg .label { fill: var(--ink); } svg .grid { stroke: var(--grid); } svg .limit { stroke: var(--ink); stroke-width: 2; }
code { font-size: .88em; }
@media (max-width: 600px) { body { padding: 1rem .7rem 2rem; }
  .summary { grid-template-columns: 1fr; gap: 0; } .summary dd { margin-bottom: .5rem; }
  th, td { padding: .3rem .3rem; font-size: .82rem; } svg text { font-size: 16px; } }
"""
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
        result: its validation.json.
        layers: what its manifest records of each layer, and of the head where that is quantized.
        source_bytes: of all tensors of the model that it was made from; None where that is not
            known.
    """

    result: Mapping[str, Any]
    layers: Sequence[Mapping[str, Any]]
    source_bytes: int | None = None


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


def row_of(result: Mapping[str, Any], manifest: Mapping[str, Any]) -> Row:
    """Return the row of an artifact from its validation.json and its manifest."""
    layers = [*manifest["layers"], *([manifest["head"]] if "head" in manifest else [])]
    return Row(result=result, layers=layers, source_bytes=manifest["ledger"]["bytes"]["source"])


def write_report(path: Path, rows: Sequence[Row]) -> None:
    """Write the page for one or several artifacts of one model."""
    results = [row.result for row in rows]
    first = results[0]
    protocol, noise = first["protocol"], first["noise_floor"]
    where = f" on {escape(protocol['device']['model'])}" if "device" in protocol else ""
    others = (
        "bf16 against itself in float32"
        if protocol["dtype"] == "float32"
        else "float32 against itself in bf16"
    )
    body = [
        f"<h1>{escape(str(first['model']))}: {len(rows)} artifact{'s' if len(rows) != 1 else ''} "
        "validated</h1>",
        _summary(rows),
        "<h2>Artifacts</h2>",
        _table(results),
        f"<p class=note>{protocol['tokens']} tokens in {protocol['windows']} windows of at most "
        f"{protocol['sequence_length']}; "
        f"both models in {protocol['dtype']}{where}; bounds are {protocol['bound']}, "
        f"{protocol['resamples']} resamples of windows. "
        f"Baseline perplexity {first['perplexity']['baseline']:.4f}. Protocol "
        f"<code>{protocol['hash'][:16]}</code>. "
        f"Noise floor, the baseline in {others}: mean KLD {noise['mean_kld']['value']:.2g}, "
        f"top-1 {100 * noise['top1_agreement']['value']:.2f} %, perplexity ratio "
        f"{noise['ppl_ratio']['value']:.5f}.</p>",
        "<h2>Mean KL divergence, its bounds, and the gate's limit</h2>",
        "<div "
        f"class=one>{intervals([_interval(r) for r in results], unit='nats per token; a line across is the limit')}</div>",
        "<h2>Gates</h2>",
        _gates(results),
        *_regressions(results),
        *_tasks(results),
    ]
    kinds = _kinds_of(rows)
    body += _diagnoses(rows, kinds)
    for title, note, errors in (
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
    ):
        body += _panels(
            [(row, [(errors(row), False)]) for row in rows],
            kinds,
            title=title,
            note=f"||quantized - original||² / ||original||² of {note}.",
            unit="relative squared error",
        )
    body += _calibrated(rows, kinds)
    body += _panels(
        [(row, [(_decided(row, "input_amax"), False)]) for row in rows],
        kinds,
        title="Activation ranges",
        note="The largest |x| of each linear's input in calibration, after smoothing where there "
        "is any.",
        unit="largest |x|",
    )
    body += _experts(rows)
    body += ["<h2>Digests</h2>", _digests(results)]
    page = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>quantflow '
        "validation</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{plain(''.join(body))}</body></html>"
    )
    disk.write_atomic(path, page.encode())


def _summary(rows: Sequence[Row]) -> str:
    """Return the page in three lines: what was made, the verdict, and what it costs in bytes and divergence."""
    results = [row.result for row in rows]
    made = "; ".join(
        f"{result['artifact']} ({cells(result)[1]}, {cells(result)[2]})" for result in results
    )
    expected = [result for result in results if result["outcome"] == result["expect"]]
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
    verdicts = "; ".join(
        f"{escape(str(result['artifact']))} <span "
        f"class={result['outcome']}>{escape(verdict_text(result))}</span>"
        for result in results
    )
    which = "" if len(usable) == len(results) else ", of those that pass"
    lines = {
        "Made": escape(f"{results[0]['model']} as {made}"),
        "Verdict": f"{len(expected)} of {len(results)} as expected: {verdicts}",
        "Costs": escape(f"{cost}; mean KLD {divergence} nats per token{which}"),
    }
    return f"<dl class=summary>{''.join(f'<dt>{name}</dt><dd>{text}</dd>' for name, text in lines.items())}</dl>"


def _range(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Return the ends of sorted values, once where they look the same."""
    first, last = shown(values[0]), shown(values[-1])
    return first if first == last else f"{first} to {last}"


def _rows_table(columns: Sequence[str], body: Iterable[Sequence[str]], *, left: int) -> str:
    """Return a table that scrolls inside its own box; the first `left` columns are text, the first of them stays in sight."""
    head = "".join(
        f"<th{' class=left' if i < left else ''}>{escape(name)}</th>"
        for i, name in enumerate(columns)
    )
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in body)
    return f"<div class=wide><table><tr>{head}</tr>{rows}</table></div>"


def _cells(texts: Sequence[str], *, left: int) -> list[str]:
    """Return the cells of a row: a name, more text, numbers."""
    classes = [" class=name", *[" class=left"] * (left - 1), *[""] * (len(texts) - left)]
    return [f"<td{kind}>{escape(text)}</td>" for kind, text in zip(classes, texts, strict=True)]


def _verdict(outcome: str, text: str) -> str:
    return f"<td class={outcome}>{escape(text)}</td>"


def _table(results: Sequence[Mapping[str, Any]]) -> str:
    body = [
        [*_cells(cells(r)[:-1], left=3), _verdict(r["outcome"], verdict_text(r))] for r in results
    ]
    return _rows_table(COLUMNS, body, left=3)


def _gates(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a row per artifact and metric, with the bound that decides, and below it what was changed or went wrong."""
    body, notes = [], []
    for result in results:
        gate, name = result["gate"], escape(str(result["artifact"]))
        body.append(
            [f"<th colspan=5 class='left group'><b>{name}</b>, gate {escape(gate['name'])}</th>"]
        )
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
            body.append([*_cells(texts, left=1), _verdict(outcome, outcome)])
        for task, (least, lower, upper) in recovery.asked(Gate(**gate), result).items():
            outcome = judge(
                Gate(name=gate["name"], thresholds={}), {}, {task: (least, lower, upper)}
            ).outcome
            kept = result["tasks"]["scores"][task]["recovery"]
            shown = "" if kept is None else f"{kept:.1f} %"
            texts = [f"recovery of {task}", f">= {least:g} %", shown, f"{lower:.1f} %"]
            body.append([*_cells(texts, left=1), _verdict(outcome, outcome)])
        why = "; ".join(result["reasons"]) or "every bound is inside"
        note = f" {gate['note']}." if gate["note"] else ""
        notes.append(
            f"<li><b>{name}</b>: <span class={result['outcome']}>{verdict_text(result)}</span>, "
            f"{escape(why)}.{escape(note)}</li>"
        )
    columns = ("metric", "threshold", "measured", "bound", "verdict")
    return f"<div class=one>{_rows_table(columns, body, left=1)}</div><ul class=note>{''.join(notes)}</ul>"


def _regressions(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the comparisons with older artifacts; nothing where there were none."""
    compared = [result for result in results if "regression" in result]
    if not compared:
        return []
    body = []
    for result in compared:
        for metric, beside, outcome, *numbers in regression.cells(result):
            artifact = str(result["artifact"])
            body.append(
                [*_cells((artifact, beside, metric, *numbers), left=3), _verdict(outcome, outcome)]
            )
    columns = ("artifact", "beside", "metric", *regression.COLUMNS[3:], "verdict")
    note = (
        "Worse by: the newer artifact minus the older one, more is worse. The same windows are "
        "drawn for both; `at "
        "least` holds for all metrics together with 95 %, `at most` for each."
    )
    return [
        "<h2>Beside the older artifact</h2>",
        _rows_table(columns, body, left=3),
        f"<p class=note>{note}</p>",
    ]


def _tasks(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return how both models answered tasks; nothing where none were asked."""
    asked = [result for result in results if "tasks" in result]
    if not asked:
        return []
    body = [
        _cells((str(result["artifact"]), *row), left=3)
        for result in asked
        for row in task_table.cells(result["tasks"])
    ]
    protocol = asked[0]["tasks"]["protocol"]
    note = (
        f"lm-eval {escape(str(protocol['lm_eval']))}, {protocol['limit'] or 'all'} documents of "
        "each, "
        f"{'with' if protocol['chat_template'] else 'without'} the chat template, "
        f"{'with' if protocol['bos'] else 'without'} a BOS, {protocol['dtype']}. "
        "Recovery: the artifact's score over the source's; where lower is better, the other way "
        "round. It is at least what the "
        "last column says with 95 %, by the pairs of answers."
    )
    return [
        "<h2>Tasks</h2>",
        _rows_table(("artifact", *task_table.COLUMNS), body, left=3),
        f"<p class=note>{note}</p>",
    ]


def _diagnoses(rows: Sequence[Row], kinds: Sequence[str]) -> list[str]:
    """Return where artifacts lose and what would mend them; nothing where that was not asked."""
    found = [row.result for row in rows if "diagnosis" in row.result]
    if not found:
        return []
    note = (
        "Mean KL divergence, nats per token, over some windows. Only this: nothing else is "
        "quantized. Gain: what leaving this "
        "alone, in the artifact as it is, takes off its divergence. Interactions are not "
        "additive, so neither column adds up."
    )
    parts = ["<h2>Where the loss is</h2>", f"<p class=note>{note}</p>"]
    for result in found:
        parts += [
            f"<h3>{escape(str(result['artifact']))}</h3>",
            f"<p>{escape(diagnosis_table.hint(result))}.</p>",
        ]
        parts += _heat_maps(result["diagnosis"], kinds)
        table = diagnosis_table.cells(result["diagnosis"])
        parts += (
            [_rows_table(diagnosis_table.COLUMNS, [_cells(row, left=1) for row in table], left=1)]
            if table
            else []
        )
        parts += [_breakdown(result["diagnosis"]), *_windows(result["diagnosis"])]
    return parts


def _heat_maps(diagnosis: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """Return layers and linears as two maps: what each costs alone, and what leaving it alone gains."""
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
        maps.append(f"<div><h4>{title}</h4>{drawn}</div>")
    return [f"<div class=plots>{''.join(maps)}</div>"]


def _breakdown(diagnosis: Mapping[str, Any]) -> str:
    """Return the divergence by position, kind and frequency of the predicted token."""
    body = []
    for key, title in (
        ("positions", "Tokens of the window before it"),
        ("kinds", "Kind of token"),
        ("frequency", "How often it stands in the text"),
    ):
        body.append([f"<th colspan=5 class='left group'>{title}</th>"])
        for part in diagnosis[key]:
            numbers = [
                _short(part["mean_kld"]),
                f"{part['share']:.1%}",
                f"{part['top1_agreement']:.1%}",
            ]
            body.append(_cells([part["name"], f"{part['tokens']:,}", *numbers], left=1))
    columns = ("predicted token", "tokens", "mean KLD", "share", "top-1")
    return f"<div class=one>{_rows_table(columns, body, left=1)}</div>"


def _windows(diagnosis: Mapping[str, Any]) -> list[str]:
    """Return the worst windows with both continuations, folded in."""
    items = []
    for window in diagnosis["windows"]:
        lines = {
            "Prompt": window["prompt"],
            "Source": window["baseline"],
            "Artifact": window["artifact"],
        }
        there = {name: escape(text) for name, text in lines.items() if text is not None}
        texts = "".join(
            f"<dt>{name}</dt><dd class=text>{text}</dd>" for name, text in there.items()
        )
        head = (
            f"window {window['window']}: mean KLD {_short(window['mean_kld'])}, most after "
            f"{window['position']} tokens "
            f"({_short(window['kld'])})"
        )
        items.append(f"<details><summary>{head}</summary><dl class=summary>{texts}</dl></details>")
    return [
        "<h4>Windows that diverge most, continued greedily before their worst token</h4>",
        *items,
    ]


def _short(value: float) -> str:
    """Return a metric in at most seven characters: four digits of large values, two of small ones."""
    return f"{value:.4g}" if abs(value) >= 0.01 else f"{value:.2g}"


def _kinds_of(rows: Sequence[Row]) -> list[str]:
    """Return the kinds of all linears of a page in the order in which a layer runs them, unknown ones last."""
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
) -> list[str]:
    """Return a section with a plot per artifact on one vertical axis, and the colours of the kinds; nothing without values.

    Args:
        of_rows: each artifact with its series: source name of a linear -> value, and whether its
            marks are hollow.
        kinds: of the page.
        title: of the section.
        note: what the values are.
        unit: of the values.
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
    if not panels:
        return []
    everything = [mark for _, marks in panels for mark in marks]
    there = [kind for kind in kinds if any(mark.kind == kind for mark in everything)]
    powers = powers_of(everything)
    legend = "".join(
        f'<li><i style="background:{colour_of(kind, kinds)}"></i>{escape(kind)}</li>'
        for kind in there
    )
    drawn = "".join(
        f"<div><h3>{escape(name)}</h3>{by_layer(marks, kinds=kinds, unit=unit, powers=powers)}</div>"
        for name, marks in panels
    )
    return [
        f"<h2>{title}</h2>",
        f"<p class=note>{note}</p>",
        f"<ul class=legend>{legend}</ul>",
        f"<div class=plots>{drawn}</div>",
    ]


def _slot(name: str) -> dict[str, str]:
    layer, kind = _place(name)
    return {"layer": layer, "kind": kind}


def _place(name: str) -> tuple[str, str]:
    """Return the layer and the kind of a linear: `3`, `q_proj` of `model.layers.3.self_attn.q_proj`, also inside experts."""
    match = re.search(r"\.(\d+)\.(?:.*\.)?([^.]+)$", name)
    number = re.search(r"\.(\d+)\.", name)
    return (number[1], match[2]) if match and number else (_HEAD, name.rpartition(".")[2])


def _experts(rows: Sequence[Row]) -> list[str]:
    """Return the ledger of tokens: how many reached the experts of each layer; nothing for models without experts."""
    columns = ("artifact", "experts", "shown", "least", "median", "most", "short of tokens")
    body = []
    for row in rows:
        for found in [layer["experts"] for layer in row.layers if "experts" in layer]:
            tokens = found["tokens"]
            known = (
                ["", "", ""]
                if not tokens
                else [str(min(tokens)), f"{median(tokens):g}", str(max(tokens))]
            )
            short = [
                f"{name.rpartition('.')[0].rpartition('.')[2]} ({told['tokens']} of "
                f"{told['needed']})"
                for name, told in found["short"].items()
            ]
            texts = [
                str(row.result["artifact"]),
                found["experts"],
                str(found["fed"] or ""),
                *known,
                ", ".join(short) or "none",
            ]
            body.append(_cells(texts, left=3))
    if not body:
        return []
    return [
        "<h2>Calibration tokens of the experts</h2>",
        "<p class=note>How many tokens the router sent to the experts of each layer; what was "
        "done with those that got too few "
        "stands with the decisions in quantflow.json.</p>",
        _rows_table(columns, body, left=3),
    ]


def _calibrated(rows: Sequence[Row], kinds: Sequence[str]) -> list[str]:
    """Return what calibration did to the outputs, as a table and plots; nothing where no algorithm is calibrated."""
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
        found, result = output_errors(row.layers), row.result
        if found:
            shares = [f"{found[key]:.2%}" for key in ("median", "median_rtn", "worst")]
            counts = [str(found[key]) for key in ("worse_than_rtn", "same_as_rtn")]
            texts = [
                str(result["artifact"]),
                str(result["algorithm"]),
                str(found["linears"]),
                *shares,
                *counts,
            ]
            body.append(_cells(texts, left=2))
            plotted.append(
                (
                    row,
                    [
                        (_decided(row, "output_error_rtn"), True),
                        (_decided(row, "output_error"), False),
                    ],
                )
            )
    if not body:
        return []
    note = (
        "||quantized - original|| / ||original|| of each linear's output, its input as it was; "
        "rings are the same of round to "
        "nearest without calibration. Of rows that stand for all."
    )
    title, *plots = _panels(
        plotted,
        kinds,
        title="Output error on the calibration text",
        note=note,
        unit="relative error",
    )
    return [title, _rows_table(columns, body, left=2), *plots]


def _decided(row: Row, key: str) -> dict[str, float]:
    """Return a number that was decided of each linear, where it was."""
    decisions = [
        (name, decided) for layer in row.layers for name, decided in layer["decisions"].items()
    ]
    return {name: decided[key] for name, decided in decisions if decided.get(key) is not None}


def _digests(results: Sequence[Mapping[str, Any]]) -> str:
    items = [
        f"<li>{escape(str(r['artifact']))}: <code>{escape(str(r['digest']))}</code></li>"
        for r in results
    ]
    return f"<ul>{''.join(items)}</ul>"


def _interval(result: Mapping[str, Any]) -> Interval:
    kld = result["metrics"]["mean_kld"]
    return Interval(
        label=str(result["artifact"]), limit=result["gate"]["thresholds"]["mean_kld"], **kld
    )


def _output_errors(row: Row) -> dict[str, float]:
    errors = [(name, error) for layer in row.layers for name, error in layer["errors"].items()]
    return {name: error["output"] for name, error in errors if "output" in error}


def _weight_errors(row: Row) -> dict[str, float]:
    """Return the errors of weights where those of outputs are not known, as after quantizing file to file."""
    errors = [(name, error) for layer in row.layers for name, error in layer["errors"].items()]
    return {name: error["weight"] for name, error in errors if "output" not in error}
