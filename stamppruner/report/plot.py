"""A picture of accuracies over a cost: markers of several kinds, a line through each kind's front.

Kinds differ in shape and in dashes as well as in colour, so neither colour vision nor a colour
printer is needed. The picture stretches to the width at hand while its text keeps its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

from stamppruner.report.format import cost, one_line
from stamppruner.report.svg import KEPT_COLOUR

_COLOURS = (KEPT_COLOUR, "#8a4b00", "#1d242b")
"""Of the first, the second and the reference kind, where no style sheet says otherwise."""

_SHAPES = (
    '<circle r="5.5" fill="currentColor"/>',
    '<path d="M0 -6.5L6.5 5.5H-6.5z" fill="var(--paper, #fff)" stroke="currentColor"'
    ' stroke-width="2"/>',
    '<rect x="-5" y="-5" width="10" height="10" fill="currentColor"/>',
)
_DASHES = ("", "5 4", "2 4")
_CLASSES = ("first", "second", "reference")

_LEFT, _RIGHT = 11.0, 97.0  # of the axes, in per cent of the width
_HEIGHT, _LEGEND, _FOOT = 280, 20, 48  # of the axes, of a line above, and of all below; in pixels
_APART = 7.0, 15.0  # between labels: per cent of the width, pixels
_HALF_A_LETTER = 0.75  # per cent of the width of a phone
_MOST_TICKS = 7


@dataclass(frozen=True)
class Mark:
    """A point: its place, a short text beside it, a longer one to be pointed at."""

    x: float
    y: float
    label: str
    title: str
    on_line: bool = True


@dataclass(frozen=True)
class Kind:
    """Points of one kind, by what the legend calls them."""

    name: str
    marks: Sequence[Mark]


def plot_svg(kinds: Sequence[Kind], reference: Kind, *, x: str, x_label: str, y_label: str) -> str:
    """Accuracies over a cost.

    Args:
        kinds: one or two, each with at least one mark; the labels of the first are shown.
        reference: one mark, at whose height a line crosses the picture; or none.
        x: name of the cost, which gives the unit; its axis is logarithmic.
        x_label: of the axis.
        y_label: likewise; values are shares, shown in per cent.

    Returns:
        One SVG element, as wide as its surroundings.
    """
    drawn = [*enumerate(kinds), *([(2, reference)] if reference.marks else [])]
    marks = [mark for _, kind in drawn for mark in kind.marks]
    across = _Axis([math.log(m.x) for m in marks], least=0.4)
    up = _Axis([m.y for m in marks], least=0.02)
    top = _LEGEND * (len(drawn) + 1) + 6
    height = top + _HEIGHT + _FOOT

    def place(mark: Mark) -> tuple[float, float]:
        return (
            _LEFT + (_RIGHT - _LEFT) * across.share(math.log(mark.x)),
            top + _HEIGHT * (1 - up.share(mark.y)),
        )

    parts = [
        f'<svg class="plot" role="img" aria-label="{_text(y_label)} over {_text(x_label)}"'
        f' width="720" height="{height}" style="width:100%;height:{height}px"'
        ' font-family="system-ui, sans-serif" font-size="12">',
        *(_legend(line, number, kind.name) for line, (number, kind) in enumerate(drawn)),
        f'<text class="tick" x="0" y="{top - 9}" fill="#444">{_text(y_label)}</text>',
        *_grid(across, up, top, x),
        f'<text class="tick" x="{(_LEFT + _RIGHT) / 2:g}%" y="{height - 6}" text-anchor="middle"'
        f' fill="#444">{_text(x_label)}</text>',
    ]
    if reference.marks:
        y = place(reference.marks[0])[1]
        parts.append(_group(2, _line((_LEFT, y), (_RIGHT, y), 2)))
    parts += [_kind(number, kind.marks, place) for number, kind in reversed(drawn)]
    return "\n".join([*parts, *_labels(kinds[0].marks, place), "</svg>"])


class _Axis:
    """From values to shares of an axis that holds them all, with a margin."""

    def __init__(self, values: Sequence[float], *, least: float) -> None:
        low, high = min(values), max(values)
        margin = max(0.1 * (high - low), (least - (high - low)) / 2)
        self.low, self.high = low - margin, high + margin

    def share(self, value: float) -> float:
        return (value - self.low) / (self.high - self.low)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers, evenly spaced, three to nine, within a range.

    >>> ticks(0.71, 0.98)
    [0.75, 0.8, 0.85, 0.9, 0.95]
    """
    raw = (high - low) / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.9g}") for k in range(first, last + 1)]


def log_ticks(low: float, high: float, *, binary: bool = False) -> list[float]:
    """Round numbers for a logarithmic axis: 1, 2 and 5 times powers of ten, or powers of two.

    >>> log_ticks(3e5, 1.2e7)
    [500000.0, 1000000.0, 2000000.0, 5000000.0, 10000000.0]
    """
    base, factors = (2.0, (1,)) if binary else (10.0, (1, 2, 5))
    powers = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    found = [f * base**k for k in powers for f in factors if low <= f * base**k <= high]
    if len(found) < 2:
        return ticks(low, high)
    while len(found) > _MOST_TICKS:
        found = [v for v in found if math.log10(v) % 1 < 1e-9] if not binary else found[::2]
        binary = True  # decades that are still too many are halved
    return found


def _grid(across: _Axis, up: _Axis, top: int, x: str) -> list[str]:
    bottom = top + _HEIGHT
    parts = []
    for value in ticks(up.low, up.high):
        if 0 <= value <= 1:
            y = top + _HEIGHT * (1 - up.share(value))
            parts += [
                f'<line class="grid" x1="{_LEFT}%" x2="{_RIGHT}%" y1="{y:.1f}" y2="{y:.1f}"'
                ' stroke="#d8dee4"/>',
                f'<text class="tick" x="{_LEFT - 1:g}%" y="{y + 4:.1f}" text-anchor="end"'
                f' fill="#444">{100 * value:.6g}%</text>',
            ]
    binary = x.endswith("bytes")
    for value in log_ticks(math.exp(across.low), math.exp(across.high), binary=binary):
        at = _LEFT + (_RIGHT - _LEFT) * across.share(math.log(value))
        parts += [
            f'<line class="grid" x1="{at:.2f}%" x2="{at:.2f}%" y1="{top}" y2="{bottom}"'
            ' stroke="#d8dee4"/>',
            f'<text class="tick" x="{at:.2f}%" y="{bottom + 18}" text-anchor="middle"'
            f' fill="#444">{_text(short(cost(x, value)))}</text>',
        ]
    parts.append(
        f'<line class="axis" x1="{_LEFT}%" x2="{_RIGHT}%" y1="{bottom}" y2="{bottom}"'
        ' stroke="#5b6772"/>'
    )
    return parts


def short(shown: str) -> str:
    """A number without the zeros behind its point.

    >>> short("2.00M"), short("2.50 ms"), short("100%")
    ('2M', '2.5 ms', '100%')
    """
    return re.sub(r"\.0+(?=\D|$)|(?<=\.\d)0+(?=\D|$)", "", shown)


def _legend(line: int, number: int, name: str) -> str:
    y = _LEGEND * line + 10
    return (
        f'{_group(number, _marker("9", y, number))}<text x="22" y="{y + 4}" fill="#222">'
        f"{_text(name)}</text>"
    )


Place = Callable[[Mark], tuple[float, float]]


def _kind(number: int, marks: Sequence[Mark], place: Place) -> str:
    """The line through those that it is drawn through, and all markers."""
    line = sorted(place(mark) for mark in marks if mark.on_line)
    parts = [_line(a, b, number) for a, b in pairwise(line)]
    for mark in marks:
        x, y = place(mark)
        parts.append(_marker(f"{x:.2f}%", y, number, mark.title))
    return _group(number, "".join(parts))


def _labels(marks: Sequence[Mark], place: Place) -> list[str]:
    """Texts above the markers, without those that would lie on another."""
    parts: list[str] = []
    done: list[tuple[float, float]] = []
    for mark in marks:
        x, y = place(mark)
        if all(abs(x - a) >= _APART[0] or abs(y - b) >= _APART[1] for a, b in done):
            done.append((x, y))
            reach = _HALF_A_LETTER * len(mark.label)
            anchor = "start" if x < reach else "end" if x > 100 - reach else "middle"
            parts.append(
                f'<text class="mark" x="{x:.2f}%" y="{y - 11:.1f}" text-anchor="{anchor}"'
                f' fill="#222">{_text(mark.label)}</text>'
            )
    return parts


def _group(number: int, content: str) -> str:
    return f'<g class="{_CLASSES[number]}" color="{_COLOURS[number]}">{content}</g>'


def _line(a: tuple[float, float], b: tuple[float, float], number: int) -> str:
    dashes = f' stroke-dasharray="{_DASHES[number]}"' if _DASHES[number] else ""
    return (
        f'<line x1="{a[0]:.2f}%" y1="{a[1]:.1f}" x2="{b[0]:.2f}%" y2="{b[1]:.1f}"'
        f' stroke="currentColor" stroke-width="{2 - number // 2}"{dashes}/>'
    )


def _marker(x: str, y: float, number: int, title: str = "") -> str:
    named = f"<title>{_text(title)}</title>" if title else ""
    return (
        f'<svg class="marker" x="{x}" y="{y:.1f}" width="1" height="1" style="overflow:visible">'
        f"{named}{_SHAPES[number]}</svg>"
    )


def _text(value: object) -> str:
    return escape(one_line(value))
