"""A picture of the kept channels: a row a group, a tick a channel.

Kept channels are dark and tall, removed ones light and low, so neither colour vision nor a colour
printer is needed. Rows stretch to the width at hand while text keeps its size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Protocol

from stamppruner.report.format import one_line, share


class _Group(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def kept(self) -> Sequence[int]: ...


KEPT_COLOUR = "#12466f"
REMOVED_COLOUR = "#b9c3cd"

_ROW, _LEGEND, _TICK = 20, 26, 14  # heights in pixels
_NAME_SHARE, _TICKS_START, _TICKS_SHARE = 32, 34, 46  # per cent of the width
_NAME_LENGTH, _PHONE_LENGTH = 30, 18  # what fits into its share of a page, and of a phone
_SEPARATED = 96  # up to this size, ticks stand apart


def kept_channels_svg(
    groups: Iterable[_Group], *, legend: bool = True, inline: bool = False
) -> str:
    """A picture of which channels of each group are kept.

    Args:
        groups: rows with ``name``, ``size`` and ``kept`` indices, as in a report.
        legend: start with a line that explains the two kinds of ticks.
        inline: leave out what only a file of its own needs.

    Returns:
        One SVG element, as wide as its surroundings.
    """
    rows = list(groups)
    top = _LEGEND if legend else 0
    height = top + _ROW * max(1, len(rows))
    namespace = "" if inline else ' xmlns="http://www.w3.org/2000/svg"'
    parts = [
        f'<svg{namespace} class="kept-channels" role="img" aria-label="Kept channels of each group"'
        f' width="720" height="{height}" style="width:100%;height:{height}px"'
        ' font-family="system-ui, sans-serif" font-size="12">'
    ]
    if legend:
        parts.append(_legend())
    parts += [_row(group, top + _ROW * i) for i, group in enumerate(rows)]
    if not rows:
        parts.append(f'<text x="0" y="{top + 14}" fill="#222">no removable channels</text>')
    return "\n".join([*parts, "</svg>"])


def _legend() -> str:
    return (
        '<g class="legend">'
        f'<rect class="kept" x="0" y="1" width="5" height="{_TICK}" fill="{KEPT_COLOUR}"/>'
        '<text x="11" y="12" fill="#222">kept</text>'
        f'<rect class="removed" x="52" y="5.5" width="5" height="5" fill="{REMOVED_COLOUR}"/>'
        '<text x="63" y="12" fill="#222">removed</text></g>'
    )


def _row(group: _Group, y: int) -> str:
    name, kept = one_line(group.name), len(group.kept)
    left = share(kept / group.size) if group.size else ""
    middle = y + _ROW / 2
    return (
        f'<g class="row"><title>{escape(name)}: {kept} of {group.size} channels kept</title>'
        f'<svg x="0" y="{y}" width="{_NAME_SHARE}%" height="{_ROW}">'
        f"{_name(name)}</svg>"
        f'<svg x="{_TICKS_START}%" y="{middle - _TICK / 2:g}" width="{_TICKS_SHARE}%"'
        f' height="{_TICK}" viewBox="0 0 {max(1, group.size)} 1" preserveAspectRatio="none">'
        f"{_ticks(group)}</svg>"
        f'<text x="100%" y="{y + 14}" text-anchor="end" fill="#222">'
        f'{kept}/{group.size} <tspan class="share">{left}</tspan></text></g>'
    )


def _name(name: str) -> str:
    """The end of a name; where that is long, a shorter one too, which the page shows on phones."""
    ends = [name if len(name) <= n else "…" + name[1 - n :] for n in (_NAME_LENGTH, _PHONE_LENGTH)]
    start = '<text x="100%" y="14" text-anchor="end" fill="#222"'
    if ends[0] == ends[1]:
        return f"{start}>{escape(name)}</text>"
    long, short = map(escape, ends)
    return f'{start} class="long">{long}</text>{start} class="short" display="none">{short}</text>'


def _ticks(group: _Group) -> str:
    """One path of kept and one of removed ticks; ticks that touch are joined."""
    chosen = set(group.kept)
    flags = [channel in chosen for channel in range(group.size)]
    paths = {True: "", False: ""}
    if group.size <= _SEPARATED:
        for channel, keep in enumerate(flags):
            paths[keep] += _rectangle(channel, 0.82, keep)
    else:
        for keep, run in groupby(enumerate(flags), key=lambda item: item[1]):
            channels = [channel for channel, _ in run]
            paths[keep] += _rectangle(channels[0], len(channels), keep)
    return (
        f'<path class="kept" fill="{KEPT_COLOUR}" d="{paths[True]}"/>'
        f'<path class="removed" fill="{REMOVED_COLOUR}" d="{paths[False]}"/>'
    )


def _rectangle(start: int, width: float, keep: bool) -> str:
    top, height = (0, 1) if keep else (0.32, 0.36)
    return f"M{start} {top}h{width:g}v{height:g}h{-width:g}z"
