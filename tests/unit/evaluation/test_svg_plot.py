"""Plots are well-formed, self-contained SVG whose marks stand where the values say."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from quantflow.evaluation.svg_plot import COLOURS, Interval, Point, curves, intervals, lines


def drawn(svg):
    return ElementTree.fromstring(svg)


def circles(svg):
    return [(float(c.get("cx")), float(c.get("cy"))) for c in drawn(svg).iter("circle")]


def row(**values):
    return Interval(**{"label": "a", "value": 0.02, "lower": 0.01, "upper": 0.04, "limit": 0.1, **values})


def test_a_line_has_one_point_per_category_in_the_order_of_first_appearance():
    svg = lines({"a": {"q": 1.0, "k": 10.0}, "b": {"v": 100.0, "q": 1.0}}, unit="error")
    points = circles(svg)
    assert len(points) == 4
    (q, qy), (k, ky), (v, vy), (again, _) = points
    assert q < k < v and again == q
    assert qy > ky > vy  # larger is higher
    assert qy - ky == pytest.approx(ky - vy, abs=0.11)  # a logarithmic axis
    assert len(list(drawn(svg).iter("polyline"))) == 2


def test_zero_values_leave_a_gap_and_nothing_but_zeros_is_said():
    assert len(circles(lines({"a": {"q": 0.0, "k": 1.0}}, unit="x"))) == 1
    assert "every value is zero" in lines({"a": {"q": 0.0}}, unit="x")
    assert "every value is zero" in lines({}, unit="x")


def test_labels_are_escaped():
    for svg in (lines({"<a&b>": {"<q>": 1.0}}, unit="<unit>"), intervals([row(label="<a&b>")], unit="<unit>")):
        drawn(svg)
        assert "&lt;a&amp;b&gt;" in svg and "&lt;unit&gt;" in svg


def test_one_value_and_many_series_are_drawn():
    svg = lines({str(i): {"q": 1.0} for i in range(len(COLOURS) + 1)}, unit="x")
    assert len(circles(svg)) == len(COLOURS) + 1
    assert all(math.isfinite(v) for point in circles(svg) for v in point)


def test_a_plot_reads_no_other_file():
    svg = lines({"a": {"q": 1.0}}, unit="x") + intervals([row()], unit="x")
    assert "http" not in svg and "<script" not in svg and "url(" not in svg


def test_many_categories_get_at_most_about_thirty_labels():
    svg = lines({"a": {f"name{i}": 1.0 + i for i in range(500)}}, unit="x")
    assert sum(1 for t in drawn(svg).iter("text") if (t.text or "").startswith("name")) <= 34


def test_an_interval_stands_between_its_bounds_and_is_coloured_by_the_limit():
    inside, outside = drawn(intervals([row()], unit="x")), drawn(intervals([row(upper=0.2)], unit="x"))
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
    points = {"uniform": [Point(label="W4 <g64>", x=4.0, y=0.01), Point(label="W6", x=6.0, y=0.0001)]}
    svg = curves(line=[(4.0, 0.01), (5.0, 0.001), (6.0, 0.0001)], label="best", points=points, x="bits", y="KLD")
    root = drawn(svg)
    line = [tuple(map(float, pair.split(","))) for pair in root.find(f"{SVG}polyline").get("points").split()]
    marks = [(float(c.get("cx")), float(c.get("cy"))) for c in root.iter(f"{SVG}circle")]
    assert marks == [line[0], line[2]]
    assert line[1][0] - line[0][0] == pytest.approx(line[2][0] - line[1][0], abs=0.11)
    assert line[1][1] - line[0][1] == pytest.approx(line[2][1] - line[1][1], abs=0.11)
    assert line[0][0] < line[2][0] and line[0][1] < line[2][1]  # down is less
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"W4 <g64>", "W6", "bits", "KLD", "best", "uniform", "1e-2", "1e-4", "4", "6"} <= set(texts)


def test_a_curve_leaves_zero_out_and_says_where_nothing_is_left():
    svg = curves(line=[(4.0, 0.1), (5.0, 0.0)], label="best", points={"one": [Point(label="a", x=4.0, y=0.0)]}, x="x", y="y")
    assert len(drawn(svg).find(f"{SVG}polyline").get("points").split()) == 1
    assert not list(drawn(svg).iter(f"{SVG}circle"))
    assert "every value is zero" in curves(line=[(4.0, 0.0)], label="best", points={}, x="x", y="y")
