"""Numbers with units, and tables of text.

Costs are named with their unit (``size_bytes``, ``latency_ms``), so a name is enough to choose how
its value is shown. A multiply-add counts as one MAC.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence

MISSING = "-"
"""Stands where a value was not measured."""

_LABELS = {
    "target_accuracy_before": "accuracy on the images pruned for, before",
    "target_accuracy_after": "accuracy on the images pruned for, after",
    "params": "parameters",
    "macs": "MACs",
    "size_bytes": "size",
    "activation_bytes": "activation memory",
    "train_bytes": "training memory",
    "memory_bytes": "memory",
    "peak_bytes": "peak memory",
    "latency_ms": "latency",
}


def count(value: float) -> str:
    """A number to three digits with a power of 1000 behind it.

    >>> count(999), count(11_173_962), count(999_999), count(0.5)
    ('999', '11.2M', '1.00M', '0.5')
    """
    return _scaled(value, 1000, ("", "K", "M", "G", "T", "P"))


def macs(value: float) -> str:
    """Multiply-adds.

    >>> macs(45_600_000)
    '45.6 MMACs'
    """
    return _scaled(value, 1000, (" MACs", " KMACs", " MMACs", " GMACs", " TMACs", " PMACs"))


def size(value: float) -> str:
    """Bytes, in powers of 1024.

    >>> size(512), size(44_695_848)
    ('512 B', '42.6 MiB')
    """
    return _scaled(value, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def milliseconds(value: float) -> str:
    """A duration given in milliseconds.

    >>> milliseconds(4.2137), milliseconds(0.0123), milliseconds(2500)
    ('4.21 ms', '12.3 us', '2.50 s')
    """
    return seconds(value / 1000)


def seconds(value: float) -> str:
    """A duration given in seconds.

    >>> seconds(0.25), seconds(75.2), seconds(3 * 3600 + 65)
    ('250 ms', '75.2 s', '3 h 01 min')
    """
    if not math.isfinite(value) or value == 0:
        return f"{value:g} s"
    if abs(value) < 0.9995e-3:
        return f"{_digits(value * 1e6)} us"
    if abs(value) < 0.9995:
        return f"{_digits(value * 1e3)} ms"
    if abs(value) < 180:
        return f"{_digits(value)} s"
    minutes = round(abs(value) / 60)
    sign = "-" if value < 0 else ""
    return sign + (
        f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min"
    )


def share(value: float) -> str:
    """A fraction as a percentage.

    >>> share(0.25), share(1), share(0.00012)
    ('25.0%', '100.0%', '0.012%')
    """
    percent = value * 100
    if not math.isfinite(percent):
        return f"{percent:g}"
    return f"{percent:.1f}%" if percent == 0 or abs(percent) >= 0.95 else f"{percent:.2g}%"


def ratio(before: float | None, after: float | None) -> float | None:
    """``after / before``, or None where one of them is missing or the dense value is zero."""
    if before is None or after is None or before == 0:
        return None
    return after / before


def reduction(left: float | None) -> str:
    """The factor that belongs to a share that is left.

    >>> reduction(0.25), reduction(2.0), reduction(None)
    ('4.00x less', '2.00x more', '')
    """
    if left is None or left <= 0 or not math.isfinite(left):
        return ""
    return f"{_digits(1 / left)}x less" if left <= 1 else f"{_digits(left)}x more"


def cost(name: str, value: float | None) -> str:
    """A value in the unit that its name ends with; counts go without one, their name says it.

    >>> cost("size_bytes", 2048), cost("latency_ms", 3), cost("macs", 2e6), cost("macs", None)
    ('2.00 KiB', '3.00 ms', '2.00M', '-')
    """
    if value is None:
        return MISSING
    for ending, show in _BY_ENDING.items():
        if name == ending or name.endswith(f"_{ending}"):
            return show(value)
    return number(value)


def target(name: str, value: float | None, asked: float | None = None) -> str:
    """A budget, asked or reached: a share of the dense network, or a value with a unit.

    As in a :class:`~stamppruner.Budget`, a bound of at most 1 is a share; what was reached is in
    the unit of what was asked.

    >>> target("macs", 0.25), target("macs", 2e6), target("latency_ms", 0.5)
    ('25.0%', '2.00M', '50.0%')
    >>> target("latency_ms", 0.9, asked=2.0)
    '900 us'
    """
    bounded = name.endswith(("params", "macs", "bytes", "_ms"))
    if value is None:
        return MISSING
    bound = value if asked is None else asked
    if name.endswith("_share") or (bounded and bound <= 1):
        return share(value)
    return cost(name, value)


def number(value: float) -> str:
    """A plain number: integers in full, others to four digits."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def label(name: str) -> str:
    """How the name of a cost, a metric or a step is shown.

    >>> label("size_bytes"), label("accuracy_after_cut")
    ('size', 'accuracy after cut')
    """
    name = name.removesuffix("_share")
    return _LABELS.get(name, name.replace("_", " "))


def one_line(text: object) -> str:
    """Text with control characters, line breaks among them, replaced by spaces."""
    return "".join(" " if unicodedata.category(c) in _UNPRINTABLE else c for c in str(text))


def text_table(
    headers: Sequence[object], rows: Iterable[Sequence[object]], indent: str = ""
) -> str:
    """A table for a terminal: the first column to the left, the others to the right.

    >>> print(text_table(["cost", "left"], [["MACs", "25.0%"], ["size", "9.1%"]]))
    cost   left
    MACs  25.0%
    size   9.1%
    """
    table = [[one_line(cell) for cell in row] for row in [headers, *rows]]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *rest in table:
        cells = [first.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def markdown_table(headers: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    r"""A Markdown table: the first column to the left, the others to the right.

    >>> print(markdown_table(["net", "left"], [["a|b", "25%"]]))
    | net | left |
    |:----|-----:|
    | a\|b | 25% |
    """
    lines = [[one_line(cell).replace("|", "\\|") for cell in row] for row in [headers, *rows]]
    widths = [len(cell) for cell in lines[0]]
    rule = "|".join(
        ":" + "-" * (width + 1) if i == 0 else "-" * (width + 1) + ":"
        for i, width in enumerate(widths)
    )
    body = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([body[0], f"|{rule}|", *body[1:]])


_UNPRINTABLE = {"Cc", "Cf", "Cs", "Zl", "Zp"}
_BY_ENDING = {
    "params": count,
    "macs": count,
    "bytes": size,
    "ms": milliseconds,
    "seconds": seconds,
    "s": seconds,
}


def _digits(value: float) -> str:
    """Three digits, without an exponent below a thousand."""
    rounded = float(f"{value:.3g}")
    decimals = max(0, 2 - math.floor(math.log10(abs(rounded)))) if rounded else 0
    return f"{rounded:.{decimals}f}"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    if not math.isfinite(value):
        return f"{value:g}{units[0]}"
    scaled, index = float(value), 0
    while abs(scaled) >= 999.5 and index < len(units) - 1:  # three digits at the most
        scaled, index = scaled / base, index + 1
    return (f"{scaled:.3g}" if index == 0 else _digits(scaled)) + units[index]
