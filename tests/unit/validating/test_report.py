"""The table and the page that people read after validate."""

import re
from html.parser import HTMLParser

import pytest

from quantflow.validating.report import COLUMNS, Row, cells, row_of, verdict_text, write_report

METRICS = {
    "ppl_ratio": {"value": 1.01234, "lower": 1.0, "upper": 1.02},
    "mean_kld": {"value": 0.012345, "lower": 0.01, "upper": 0.015},
    "kld_p999": {"value": 0.25, "lower": 0.2, "upper": 0.3},
    "top1_agreement": {"value": 0.97531, "lower": 0.97, "upper": 0.98},
}
RESULT = {
    "artifact": "int8",
    "scheme": "W8A8",
    "algorithm": "rtn",
    "transforms": [{"smoothquant": {"alpha": 0.5}}],
    "model": "tiny",
    "size": 12_345_678,
    "bits_per_weight": 8.125,
    "digest": "d" * 64,
    "perplexity": {"baseline": 5.5, "candidate": 5.6},
    "metrics": METRICS,
    "noise_floor": METRICS,
    "gate": {
        "name": "int8",
        "note": "",
        "thresholds": {
            "ppl_ratio": 1.02,
            "mean_kld": 0.02,
            "kld_p999": 0.7,
            "top1_agreement": 0.95,
        },
    },
    "outcome": "pass",
    "reasons": [],
    "expect": "pass",
    "protocol": {
        "tokens": 100,
        "windows": 4,
        "sequence_length": 32,
        "dtype": "float32",
        "bound": "one-sided 95 %",
        "resamples": 2000,
        "hash": "h" * 64,
    },
}
LAYERS = [
    {
        "errors": {"model.layers.3.self_attn.q_proj": {"weight": 0.1, "output": 0.01}},
        "decisions": {},
    }
]
VOID = {"meta", "br", "line", "rect"}


class Balanced(HTMLParser):
    """Checks that every tag is closed, and keeps what would load another file."""

    def __init__(self):
        super().__init__()
        self.open, self.links = [], []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag


def page(tmp_path, *rows):
    write_report(tmp_path / "report.html", rows)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_table_row_rounds_each_number_and_names_the_transforms():
    assert cells(RESULT) == (
        *("int8", "W8A8", "smoothquant + rtn", "12.3 MB", "8.12"),
        *("1.0123", "0.01235", "0.2500", "97.53 %", "pass"),
    )
    assert len(cells(RESULT)) == len(COLUMNS)


@pytest.mark.parametrize(
    ("outcome", "expect", "text"),
    [
        ("pass", "pass", "pass"),
        ("fail", "pass", "fail"),
        ("fail", "fail", "fail (expected)"),
        ("pass", "fail", "pass"),
        ("inconclusive", "fail", "inconclusive"),
    ],
)
def test_only_a_failure_that_was_expected_says_so(outcome, expect, text):
    assert verdict_text({"outcome": outcome, "expect": expect}) == text


def test_the_page_is_well_formed_and_loads_no_other_file(tmp_path):
    parser = Balanced()
    parser.feed(page(tmp_path, Row(result=RESULT, layers=LAYERS)))
    assert parser.open == [] and parser.links == []


def test_the_page_tells_digest_protocol_bounds_and_noise(tmp_path):
    text = page(tmp_path, Row(result=RESULT, layers=LAYERS))
    for said in (
        "d" * 64,
        "h" * 16,
        "100 tokens in 4 windows",
        "one-sided 95 %",
        "Noise floor",
        "3 q_proj",
        "every bound is inside",
    ):
        assert said in text
    assert "Activation ranges" not in text


def test_names_are_escaped(tmp_path):
    evil = {**RESULT, "artifact": "<script>alert(1)</script>", "model": "<b>"}
    text = page(tmp_path, Row(result=evil, layers=LAYERS))
    assert "<script" not in text and "<b></h1>" not in text and "&lt;script&gt;" in text


def test_reasons_and_the_note_of_a_gate_are_told(tmp_path):
    result = {
        **RESULT,
        "outcome": "fail",
        "reasons": ["mean_kld: too large"],
        "gate": {**RESULT["gate"], "note": "lowered"},
    }
    text = page(tmp_path, Row(result=result, layers=LAYERS))
    assert "mean_kld: too large" in text and "lowered" in text and "class=fail" in text


def test_activation_ranges_are_drawn_where_they_are_known(tmp_path):
    layers = [{**LAYERS[0], "decisions": {"model.layers.3.self_attn.q_proj": {"input_amax": 4.0}}}]
    assert "Activation ranges" in page(tmp_path, Row(result=RESULT, layers=layers))


def test_several_artifacts_share_one_page(tmp_path):
    text = page(
        tmp_path,
        Row(result=RESULT, layers=LAYERS),
        Row(result={**RESULT, "artifact": "other"}, layers=LAYERS),
    )
    # the divergences, and a plot of each artifact
    assert "2 artifacts validated" in text and text.count("<svg") == 3


def summary(text):
    lines = re.search(r"<dl class=summary>(.*?)</dl>", text)[1]
    plain = re.sub(r"<(?!/?d[td]>)[^>]*>", "", lines)
    return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", plain))


def test_three_lines_tell_what_was_made_the_verdict_and_the_cost(tmp_path):
    kld = {**METRICS["mean_kld"], "value": 0.001}
    other = {
        **RESULT,
        "artifact": "best",
        "size": 10_000_000,
        "bits_per_weight": 4.0,
        "metrics": {**METRICS, "mean_kld": kld},
    }
    bad = {**RESULT, "artifact": "bad", "size": 1, "outcome": "fail", "expect": "fail"}
    assert summary(
        page(
            tmp_path,
            *(
                Row(result=one, layers=LAYERS, source_bytes=27_272_192)
                for one in (RESULT, other, bad)
            ),
        )
    ) == {
        "Made": "tiny as int8 (W8A8, smoothquant + rtn); best (W8A8, smoothquant + rtn); bad "
        "(W8A8, smoothquant + rtn)",
        "Verdict": "3 of 3 as expected: int8 pass; best pass; bad fail (expected)",
        "Costs": "27.3 MB became 10.0 to 12.3 MB, 4.00 to 8.12 bits per quantized weight; "
        "mean KLD 0.001 (best) to 0.012 (int8) nats per token, of those that pass",
    }
    alone = summary(page(tmp_path, Row(result={**RESULT, "outcome": "fail"}, layers=LAYERS)))
    assert alone["Verdict"] == "0 of 1 as expected: int8 fail"
    assert (
        alone["Costs"]
        == "12.3 MB, 8.12 bits per quantized weight; mean KLD 0.012 (int8) nats per token"
    )


def test_a_row_takes_layers_head_and_source_bytes_from_the_manifest():
    head = {"errors": {"lm_head": {"weight": 0.5}}, "decisions": {}}
    row = row_of(RESULT, {"layers": LAYERS, "head": head, "ledger": {"bytes": {"source": 99}}})
    assert (row.result, row.layers, row.source_bytes) == (RESULT, [*LAYERS, head], 99)


@pytest.mark.parametrize(
    ("metric", "bound", "cells"),
    [
        (
            "mean_kld",
            {"value": 0.012, "lower": 0.01, "upper": 0.015},
            ("mean KLD", "&lt;= 0.02", "0.012", "0.015", "pass"),
        ),
        (
            "mean_kld",
            {"value": 0.02, "lower": 0.01, "upper": 0.03},
            ("mean KLD", "&lt;= 0.02", "0.02", "0.03", "inconclusive"),
        ),
        (
            "mean_kld",
            {"value": 0.04, "lower": 0.03, "upper": 0.05},
            ("mean KLD", "&lt;= 0.02", "0.04", "0.05", "fail"),
        ),
        (
            "top1_agreement",
            {"value": 0.97, "lower": 0.96, "upper": 0.98},
            ("top-1", "&gt;= 0.95", "0.97", "0.96", "pass"),
        ),
        (
            "top1_agreement",
            {"value": 0.9, "lower": 0.89, "upper": 0.91},
            ("top-1", "&gt;= 0.95", "0.9", "0.89", "fail"),
        ),
    ],
)
def test_a_gate_is_a_table_of_threshold_measured_bound_and_verdict(tmp_path, metric, bound, cells):
    text = page(
        tmp_path, Row(result={**RESULT, "metrics": {**METRICS, metric: bound}}, layers=LAYERS)
    )
    name, *numbers, verdict = cells
    middle = "".join(f"<td>{one}</td>" for one in numbers)
    said = f"<td class=name>{name}</td>{middle}<td class={verdict}>{verdict}</td>"
    assert said in text


def test_linears_stand_in_the_order_of_the_model_and_a_kind_has_one_colour(tmp_path):
    names = [
        f"model.layers.{layer}.{path}"
        for layer in (0, 2, 10)
        for path in ("mlp.down_proj", "self_attn.q_proj", "mlp.odd")
    ]
    names += ["model.layers.2.mlp.experts.7.down_proj", "lm_head"]
    layers = [{"errors": {name: {"output": 0.1} for name in names}, "decisions": {}}]
    text = page(tmp_path, Row(result=RESULT, layers=layers))
    plot = next(svg for svg in re.findall(r"<svg.*?</svg>", text) if "<title>" in svg)
    circles = re.findall(r'cx="([\d.]+)".*?fill="(.*?)"><title>(.*?):', plot)
    by_place = [name for _, _, name in sorted(circles, key=lambda found: float(found[0]))]
    one, two, ten = (["q_proj", "down_proj", "odd"] for _ in range(3))
    two.insert(2, "down_proj")  # of the expert, in the place of its kind
    assert by_place == [
        *(
            f"{layer} {kind}"
            for layer, kinds in (("0", one), ("2", two), ("10", ten))
            for kind in kinds
        ),
        "head lm_head",
    ]
    colours = {(name.split()[1], colour) for _, colour, name in circles}
    assert len(colours) == len(dict(colours)) == 4
    legend = re.search(r"<ul class=legend>(.*?)</ul>", text)[1]
    assert set(re.findall(r"background:(.*?)\"></i>(.*?)</li>", legend)) == {
        (colour, kind) for kind, colour in colours
    }


def test_the_page_fits_a_phone(tmp_path):
    text = page(tmp_path, Row(result=RESULT, layers=LAYERS))
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    # each scrolls inside its own box
    assert text.count("<table>") == text.count("<div class=wide><table>") == 2


def test_output_errors_on_the_calibration_text_stand_beside_those_of_round_to_nearest(tmp_path):
    # the last has no output
    errors = [(0.02, 0.05, False), (0.06, 0.04, False), (0.03, 0.03, True), (None, None, False)]
    keys = ("output_error", "output_error_rtn", "same_as_rtn")
    decisions = {
        f"model.layers.0.{name}": dict(zip(keys, told, strict=True))
        for name, told in zip("qkvo", errors, strict=True)
    }
    content = page(tmp_path, Row(result=RESULT, layers=[{"errors": {}, "decisions": decisions}]))
    assert "<h2>Output error on the calibration text</h2>" in content
    cells = ("3", "3.00%", "4.00%", "6.00%", "1", "1")
    row = "<td class=name>int8</td><td class=left>rtn</td>" + "".join(
        f"<td>{cell}</td>" for cell in cells
    )
    assert row in content
    section = content.partition("<h2>Output error on the calibration text</h2>")[2].partition(
        "<h2>"
    )[0]
    # a ring of rtn for each mark
    assert section.count('fill="none"') == section.count("<circle") / 2 == 3
    assert "Output error on the calibration text" not in page(
        tmp_path, Row(result=RESULT, layers=LAYERS)
    )
