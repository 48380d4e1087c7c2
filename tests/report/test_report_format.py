"""Numbers are rounded to what a reader needs; tables line up."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stamppruner.report import format as fmt
from stamppruner.report import markdown_table, text_table


@pytest.mark.parametrize(
    ("show", "value", "expected"),
    [
        (fmt.count, 0, "0"),
        (fmt.count, 7, "7"),
        (fmt.count, 1000, "1.00K"),
        (fmt.count, 999_499, "999K"),
        (fmt.count, 999_500, "1.00M"),
        (fmt.count, -1_234_567, "-1.23M"),
        (fmt.count, 1e30, "1000000000000000P"),
        (fmt.macs, 12, "12 MACs"),
        (fmt.macs, 1_540_000_000, "1.54 GMACs"),
        (fmt.size, 999, "999 B"),
        (fmt.size, 1023, "0.999 KiB"),
        (fmt.size, 1024, "1.00 KiB"),
        (fmt.size, 1024**2 - 1, "1.00 MiB"),
        (fmt.milliseconds, 0, "0 s"),
        (fmt.milliseconds, 999.96, "1.00 s"),
        (fmt.seconds, 179, "179 s"),
        (fmt.seconds, 3599, "1 h 00 min"),
        (fmt.seconds, -7200, "-2 h 00 min"),
        (fmt.share, 0, "0.0%"),
        (fmt.share, 0.0099, "1.0%"),
        (fmt.share, 0.0093, "0.93%"),
        (fmt.share, 1.5, "150.0%"),
    ],
)
def test_units(show, value, expected):
    assert show(value) == expected


@pytest.mark.parametrize("show", [fmt.count, fmt.macs, fmt.size, fmt.seconds, fmt.share])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_shown(show, value):
    assert show(value).startswith(f"{value:g}")


@given(st.floats(1e-3, 1e14))
def test_three_digits_are_right(value):
    shown = fmt.count(value)
    scale = 1000 ** " KMGTP".index(shown[-1]) if shown[-1].isalpha() else 1
    assert float(shown.rstrip("KMGTP")) * scale == pytest.approx(value, rel=0.00501)
    assert len(shown.rstrip("KMGTP")) <= 8


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("params", 1234, "1.23K"),
        ("peak_memory_bytes", 2048, "2.00 KiB"),
        ("latency_ms", 0.5, "500 us"),
        ("energy", 12, "12"),
        ("energy", 1.23456, "1.235"),
        ("macs", None, "-"),
    ],
)
def test_costs_go_by_the_unit_in_their_name(name, value, expected):
    assert fmt.cost(name, value) == expected


def test_terminal_table():
    table = text_table(["", "before", "after"], [["ma\ncs", 1, 22], ["x", "333333333", ""]], "  ")
    assert table.splitlines() == [
        "            before  after",
        "  ma cs          1     22",
        "  x      333333333",
    ]


def test_markdown_table():
    table = markdown_table(["net", "left"], [["a|b\n", 0.5], ["c", "9%"]])
    assert table.splitlines() == [
        "| net | left |",
        "|:----|-----:|",
        "| a\\|b  | 0.5 |",
        "| c | 9% |",
    ]


def test_tables_without_rows():
    assert text_table(["a", "b"], []) == "a  b"
    assert markdown_table(["a"], []) == "| a |\n|:--|"
