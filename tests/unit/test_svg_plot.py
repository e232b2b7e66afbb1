"""Plots are well-formed, self-contained SVG whose marks stand where the values say."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from quantflow.svg_plot import (
    COLOURS,
    NOTHING,
    Interval,
    Mark,
    Point,
    by_layer,
    colour_of,
    curves,
    heat_map,
    intervals,
    powers_of,
)


def drawn(svg):
    return ElementTree.fromstring(svg)


def circles(svg):
    return [(float(c.get("cx")), float(c.get("cy"))) for c in drawn(svg).iter("circle")]


def row(**values):
    return Interval(
        **{"label": "a", "value": 0.02, "lower": 0.01, "upper": 0.04, "limit": 0.1, **values}
    )


KINDS = ("q", "k", "v")


def marks(*told):
    return [Mark(layer=layer, kind=kind, value=value) for layer, kind, value in told]


def test_marks_stand_by_layer_then_by_kind_and_higher_for_larger_values():
    svg = by_layer(
        marks(("0", "v", 1.0), ("0", "q", 10.0), ("1", "q", 100.0)), kinds=KINDS, unit="error"
    )
    (v, vy), (q, qy), (later, ly) = circles(svg)
    assert q < v < later
    assert vy > qy > ly and vy - qy == pytest.approx(qy - ly, abs=0.11)  # a logarithmic axis
    assert [c.get("fill") for c in drawn(svg).iter("circle")] == [
        COLOURS[2],
        COLOURS[0],
        COLOURS[0],
    ]
    assert colour_of("v", KINDS) == COLOURS[2]


def test_kinds_keep_their_place_in_every_layer_where_some_are_missing():
    svg = by_layer(
        marks(("0", "q", 1.0), ("0", "k", 1.0), ("1", "k", 1.0), ("2", "k", 1.0)),
        kinds=KINDS,
        unit="error",
    )
    (q, _), (k, _), (one, _), (two, _) = circles(svg)
    assert q < k and one - k == pytest.approx(two - one, abs=0.11)


def test_what_others_are_compared_with_is_a_ring():
    svg = by_layer([Mark(layer="0", kind="q", value=1.0, hollow=True)], kinds=KINDS, unit="error")
    (ring,) = drawn(svg).iter("circle")
    assert ring.get("fill") == "none" and ring.get("stroke") == COLOURS[0]


def test_zero_values_leave_a_gap_and_nothing_but_zeros_is_said():
    assert (
        len(circles(by_layer(marks(("0", "q", 0.0), ("0", "k", 1.0)), kinds=KINDS, unit="x"))) == 1
    )
    assert "every value is zero" in by_layer(marks(("0", "q", 0.0)), kinds=KINDS, unit="x")
    assert "every value is zero" in by_layer([], kinds=KINDS, unit="x")


@pytest.mark.parametrize(
    ("values", "powers"),
    [
        ([0.02, 3.0], (-2, 1)),
        ([1.0], (0, 1)),
        ([0.01, 0.1], (-2, -1)),
        ([0.0], (-1, 0)),
        ([5.0], (0, 1)),
    ],
)
def test_the_axis_ends_at_the_powers_of_ten_around_the_values(values, powers):
    assert powers_of(marks(*[("0", "q", value) for value in values])) == powers


def test_plots_that_share_an_axis_put_a_value_at_one_height():
    few, many = marks(("0", "q", 0.1)), marks(("0", "q", 0.1), ("1", "q", 1e-6))
    powers = powers_of([*few, *many])
    heights = [
        circles(by_layer(some, kinds=KINDS, unit="x", powers=powers))[0][1] for some in (few, many)
    ]
    assert heights[0] == heights[1]


def test_labels_are_escaped():
    plots = (
        by_layer([Mark(layer="<q>", kind="<a&b>", value=1.0)], kinds=("<a&b>",), unit="<unit>"),
        intervals([row(label="<a&b>")], unit="<unit>"),
    )
    for svg in plots:
        drawn(svg)
        assert "&lt;a&amp;b&gt;" in svg and "&lt;unit&gt;" in svg


def test_more_kinds_than_colours_are_drawn():
    kinds = [f"kind{i}" for i in range(len(COLOURS) + 1)]
    svg = by_layer([Mark(layer="0", kind=kind, value=1.0) for kind in kinds], kinds=kinds, unit="x")
    assert len(circles(svg)) == len(COLOURS) + 1
    assert all(math.isfinite(v) for point in circles(svg) for v in point)


def test_a_plot_reads_no_other_file_and_is_as_wide_as_its_box():
    for svg in (
        by_layer(marks(("0", "q", 1.0)), kinds=KINDS, unit="x"),
        intervals([row()], unit="x"),
    ):
        assert "http" not in svg and "<script" not in svg and "url(" not in svg
        width = float(drawn(svg).get("viewBox").split()[2])
        # text of 13 pixels is readable on a phone
        assert drawn(svg).get("width") == "100%" and width <= 600
        assert all(0 < x < width for x, _ in circles(svg))


def test_many_layers_get_at_most_about_fourteen_labels():
    svg = by_layer(marks(*[(f"{i}", "q", 1.0 + i) for i in range(500)]), kinds=KINDS, unit="x")
    labels = [t.text for t in drawn(svg).iter("text") if (t.text or "").isdigit()]
    assert 7 <= len(labels) <= 14 and labels[0] == "0"


def test_an_interval_stands_between_its_bounds_and_is_coloured_by_the_limit():
    inside, outside = (
        drawn(intervals([row()], unit="x")),
        drawn(intervals([row(upper=0.2)], unit="x")),
    )
    for root, colour in ((inside, COLOURS[0]), (outside, COLOURS[6])):
        (bar,) = [line for line in root.iter("line") if line.get("stroke-width") == "4"]
        (point,) = root.iter("circle")
        assert float(bar.get("x1")) < float(point.get("cx")) < float(bar.get("x2"))
        assert bar.get("stroke") == point.get("fill") == colour


def test_bounds_of_zero_are_drawn_at_the_edge():
    svg = intervals([row(value=0.0, lower=0.0)], unit="x")
    assert all(math.isfinite(float(line.get("x1"))) for line in drawn(svg).iter("line"))
    assert "every value is zero" in intervals([row(value=0, lower=0, upper=0, limit=0)], unit="x")


SVG = "{http://www.w3.org/2000/svg}"


def test_a_curve_is_a_file_of_its_own_whose_points_stand_on_a_linear_and_a_logarithmic_axis():
    points = {
        "uniform": [Point(label="W4 <g64>", x=4.0, y=0.01), Point(label="W6", x=6.0, y=0.0001)]
    }
    svg = curves(
        line=[(4.0, 0.01), (5.0, 0.001), (6.0, 0.0001)],
        label="best",
        points=points,
        x="bits",
        y="KLD",
    )
    root = drawn(svg)
    line = [
        tuple(map(float, pair.split(",")))
        for pair in root.find(f"{SVG}polyline").get("points").split()
    ]
    marks = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    assert marks == [line[0], line[2]]
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.11)
    assert line[1][1] - line[0][1] == pytest.approx(line[2][1] - line[1][1], abs=0.11)
    assert line[0][0] < line[2][0] and line[0][1] < line[2][1]  # down is less
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"W4 <g64>", "W6", "bits", "KLD", "best", "uniform", "1e-2", "1e-4", "4", "6"} <= set(
        texts
    )


def test_a_curve_leaves_zero_out_and_says_where_nothing_is_left():
    svg = curves(
        line=[(4.0, 0.1), (5.0, 0.0)],
        label="best",
        points={"one": [Point(label="a", x=4.0, y=0.0)]},
        x="x",
        y="y",
    )
    assert len(drawn(svg).find(f"{SVG}polyline").get("points").split()) == 1
    assert not list(drawn(svg).iter(f"{SVG}circle"))
    assert "every value is zero" in curves(line=[(4.0, 0.0)], label="best", points={}, x="x", y="y")


def test_a_heat_map_has_a_cell_per_value_and_an_empty_one_where_there_is_none():
    values = {("q_proj", "0"): 1.0, ("q_proj", "1"): 0.25, ("k_proj", "0"): -0.04}
    root = drawn(
        heat_map(values, rows=["q_proj", "k_proj"], columns=["0", "1"], across="layer", unit="nats")
    )
    told = {
        rect[0].text: float(rect.get("fill-opacity")) for rect in root.iter("rect") if len(rect)
    }
    assert told == {"0 q_proj: 1": 1.0, "1 q_proj: 0.25": 0.5, "0 k_proj: -0.04": 0.2}
    assert len([rect for rect in root.iter("rect") if rect.get("fill") == "none"]) == 1
    colours = {rect.get("fill") for rect in root.iter("rect") if len(rect)}
    assert len(colours) == 2  # values below zero have their own
    assert heat_map({}, rows=[], columns=[], across="layer", unit="nats") == NOTHING
    assert (
        heat_map({("q", "0"): 0.0}, rows=["q"], columns=["0"], across="layer", unit="nats")
        == NOTHING
    )


def test_a_heat_map_of_many_layers_names_some_of_them():
    columns = [f"L{number}" for number in range(60)]
    root = drawn(
        heat_map({("q", "L59"): 1.0}, rows=["q"], columns=columns, across="layer", unit="nats")
    )
    named = [text.text for text in root.iter("text") if text.text in columns]
    assert len(named) == 12 and len(set(named)) == 12
