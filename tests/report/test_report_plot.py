"""Marks lie where their numbers say, and axes have round ticks around them."""

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stamppruner.report.plot import Kind, Mark, log_ticks, plot_svg, ticks

costs = st.floats(1.0, 1e12)
shares = st.floats(0, 1)
NONE = Kind("full", [])


def drawn(points, reference=NONE, x="macs"):
    marks = [Mark(c, a, f"{i}", f"mark {i}") for i, (c, a) in enumerate(points)]
    svg = plot_svg([Kind("nets", marks)], reference, x=x, x_label="cost", y_label="accuracy")
    return ElementTree.fromstring(svg)


def group(svg, name):
    """The last group of that class: the legend comes first."""
    return [g for g in svg.iter("g") if g.get("class") == name][-1]


def places(svg, kind="first"):
    markers = [m for m in group(svg, kind).iter("svg") if m.get("class") == "marker"]
    return [(float(m.get("x").rstrip("%")), float(m.get("y"))) for m in markers]


@given(st.lists(st.tuples(costs, shares), min_size=1, max_size=6))
def test_marks_keep_the_order_of_their_numbers_and_lie_inside(points):
    svg = drawn(points)
    found = places(svg)
    height = int(svg.get("height"))
    assert len(found) == len(points)
    assert all(0 < x < 100 and 0 < y < height for x, y in found)
    for (c, a), (x, y) in zip(points, found, strict=True):
        for (d, b), (z, w) in zip(points, found, strict=True):
            assert c <= d or x >= z
            assert a <= b or y <= w


def test_equal_factors_are_equally_far_apart():
    (a, _), (b, _), (c, _) = places(drawn([(1e6, 0.1), (1e7, 0.2), (1e8, 0.3)]))
    assert b - a == pytest.approx(c - b, abs=0.02)


def test_ticks_lie_at_their_values():
    svg = drawn([(1e6, 0.7), (1e7, 0.9)])
    texts = {t.text: t for t in svg.iter("text")}
    (left, low), (right, high) = places(svg)
    assert float(texts["1M"].get("x").rstrip("%")) == pytest.approx(left, abs=0.02)
    assert float(texts["10M"].get("x").rstrip("%")) == pytest.approx(right, abs=0.02)
    assert float(texts["70%"].get("y")) - 4 == pytest.approx(low, abs=0.2)
    assert float(texts["90%"].get("y")) - 4 == pytest.approx(high, abs=0.2)
    assert "110%" not in texts


def test_bytes_have_ticks_in_powers_of_two():
    texts = {t.text for t in drawn([(2**16, 0.5), (2**20, 0.6)], x="size_bytes").iter("text")}
    assert {"64 KiB", "1 MiB"} <= texts


def test_the_line_joins_what_it_is_drawn_through():
    marks = [Mark(1e6, 0.5, "a", ""), Mark(2e6, 0.4, "b", "", False), Mark(4e6, 0.8, "c", "")]
    svg = plot_svg([Kind("nets", marks)], NONE, x="macs", x_label="x", y_label="y")
    (line,) = group(ElementTree.fromstring(svg), "first").iter("line")
    found = places(ElementTree.fromstring(svg))
    ends = [(float(line.get(f"x{k}").rstrip("%")), float(line.get(f"y{k}"))) for k in (1, 2)]
    assert ends == [found[0], found[2]]


def test_the_reference_is_a_mark_and_a_line_across():
    svg = drawn([(1e6, 0.5)], Kind("full", [Mark(4e6, 0.9, "", "full")]))
    (place,) = places(svg, "reference")
    lines = [
        g for g in svg.iter("g") if g.get("class") == "reference" and g.find("line") is not None
    ]
    assert float(lines[0].find("line").get("y1")) == place[1]
    assert not [g for g in drawn([(1e6, 0.5)]).iter("g") if g.get("class") == "reference"]


def test_labels_that_would_lie_on_another_are_left_out():
    svg = drawn([(1e6, 0.5), (1.001e6, 0.5), (1e7, 0.5)])
    assert [t.text for t in svg.iter("text") if t.get("class") == "mark"] == ["0", "2"]


def test_kinds_differ_in_shape_and_dashes():
    kinds = [Kind(n, [Mark(1e6, 0.5, "", ""), Mark(2e6, 0.6, "", "")]) for n in ("a", "b")]
    svg = plot_svg(kinds, NONE, x="macs", x_label="x", y_label="y")
    root = ElementTree.fromstring(svg)
    shapes = [{e.tag for e in group(root, kind).iter()} for kind in ("first", "second")]
    assert "circle" in shapes[0]
    assert "circle" not in shapes[1]
    assert "stroke-dasharray" in ElementTree.tostring(group(root, "second"), "unicode")
    assert "stroke-dasharray" not in ElementTree.tostring(group(root, "first"), "unicode")


def test_text_is_escaped():
    marks = [Mark(1, 0.5, "<b>", '"&"')]
    svg = plot_svg([Kind("<i>", marks)], NONE, x="macs", x_label="<x>", y_label="&")
    assert not re.search(r"<[bix]>", svg)
    assert "<b>" in {t.text for t in ElementTree.fromstring(svg).iter("text")}


@given(shares, st.floats(1e-3, 1))
def test_round_ticks_within_the_range(low, width):
    found = ticks(low, low + width)
    assert 3 <= len(found) <= 9
    assert all(low - 1e-6 <= v <= low + width + 1e-6 for v in found)
    assert found == sorted(set(found))


@given(costs, st.floats(1.3, 1e9), st.booleans())
def test_logarithmic_ticks_within_the_range(low, factor, binary):
    found = log_ticks(low, low * factor, binary=binary)
    assert 2 <= len(found) <= 9
    assert all(low * (1 - 1e-6) <= v <= low * factor * (1 + 1e-6) for v in found)
    assert found == sorted(set(found))
    assert not (binary and factor > 4) or all(math.log2(v) % 1 == 0 for v in found)
