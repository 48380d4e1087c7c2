"""A report as a page of its own: no scripts, no requests, light and dark, screen, phone and print.

Numbers are rounded for reading; the exact value is in the ``data-value`` of their element, and the
whole record in the page's JSON block.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from stamppruner.report import format as fmt
from stamppruner.report._style import CSS
from stamppruner.report.svg import kept_channels_svg

if TYPE_CHECKING:
    from stamppruner.report._report import LayerRow, Report

_GROUPS_A_PICTURE = 6  # a picture is not split between printed pages, so it must not be long


def page(report: Report) -> str:
    """A whole HTML document."""
    return document(report.title, fragment(report), report.to_json(), "stamppruner-report")


def document(title: str, body: str, record: Mapping[str, object], name: str) -> str:
    """A whole HTML document around an element, with a record as its JSON block of that id."""
    data = json.dumps(record, ensure_ascii=True, allow_nan=False)
    for character in "<>&":  # inside a script element, only escapes within JSON are safe
        data = data.replace(character, f"\\u{ord(character):04x}")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n</head>\n"
        f'<body style="margin:0">\n{body}\n'
        f'<script type="application/json" id="{name}">{data}</script>\n'
        "</body>\n</html>\n"
    )


def fragment(report: Report) -> str:
    """The report as one element, for a notebook or another page."""
    return element(
        f"<header><h1>{text(report.title)}</h1><p>{text(report.model)}</p></header>",
        warning_list(report.warnings),
        _cards(report),
        _budget(report),
        section("Results", _pairs("metrics", report.metrics, fmt.number)),
        channels(report),
        _layers(report.layers),
        _reasons("Left whole", report.protected),
        _reasons("Cut in surroundings that stay wide", report.rewired),
        section("Time", _pairs("timings", report.timings, fmt.seconds)),
        section("How to reproduce", _code(report.reproduce())),
        _settings(report),
    )


def element(*sections: str) -> str:
    """Sections, without those that are empty, as one element that brings its style."""
    body = "\n".join(one for one in sections if one)
    return f'<div class="stamppruner-report">\n<style>{CSS}</style>\n{body}\n</div>'


def warning_list(warnings: Sequence[str]) -> str:
    """What the reader should know, in a box; nothing if there is nothing."""
    if not warnings:
        return ""
    items = "".join(f"<li>{text(warning)}</li>" for warning in warnings)
    return f'<section class="warnings" role="note"><h2>Warnings</h2><ul>{items}</ul></section>'


def _cards(report: Report) -> str:
    cards = []
    for name in report.costs:
        before, after = report.before.get(name), report.after.get(name)
        left = fmt.ratio(before, after)
        bar = "" if left is None else f"{_bar(left)}<p>{fmt.share(left)}, {fmt.reduction(left)}</p>"
        cards.append(
            f'<div class="card"><h3>{text(fmt.label(name))}</h3><p class="change">'
            f"{number(f'before.{name}', before, fmt.cost(name, before))} <span>→</span> "
            f"<strong>{number(f'after.{name}', after, fmt.cost(name, after))}</strong></p>"
            f"{bar}</div>"
        )
    if not cards:
        return ""
    how = report.latency_note
    note = f'<p class="note">Latency: {text(how)}.</p>' if how else ""
    return f'<section class="cards">{"".join(cards)}</section>{note}'


def _budget(report: Report) -> str:
    rows = []
    for name in report.targets:
        asked, reached = (report.budget or {}).get(name), (report.reached or {}).get(name)
        over = report.over_budget(name)
        verdict = "over budget" if over else "" if None in (asked, reached) else "within budget"
        rows.append(
            [
                text(fmt.label(name)),
                number(f"budget.{name}", asked, fmt.target(name, asked)),
                number(f"reached.{name}", reached, fmt.target(name, reached, asked)),
                f'<span class="{"over" if over else "within"}">{verdict}</span>',
            ]
        )
    return section("Budget", table(["", "asked", "reached", ""], rows))


def channels(report: Report) -> str:
    """The picture of the kept channels, under its heading; nothing if there are no groups."""
    if not report.groups:
        return ""
    kept, total = report.kept_channels
    chunks = range(0, len(report.groups), _GROUPS_A_PICTURE)
    pictures = [
        kept_channels_svg(
            report.groups[start : start + _GROUPS_A_PICTURE], legend=start == 0, inline=True
        )
        for start in chunks
    ]
    summary = f"<p>{kept} of {total} channels in {len(report.groups)} groups.</p>"
    return section("Kept channels", summary + "\n".join(pictures))


def _layers(layers: Sequence[LayerRow]) -> str:
    headers = ["layer", "kind", "in", "out", "parameters", "MACs", "MACs left"]
    rows = []
    for row in layers:
        left = fmt.ratio(row.macs_before, row.macs_after)
        rows.append(
            [
                _name(row.name),
                text(row.kind),
                _change(row.in_before, row.in_after, str),
                _change(row.out_before, row.out_after, str),
                _change(row.params_before, row.params_after, fmt.count),
                _change(row.macs_before, row.macs_after, fmt.count),
                "" if left is None else f"{fmt.share(left)} {_bar(left)}",
            ]
        )
    return section("Layers", table(headers, rows, "layers"))


def _reasons(heading: str, reasons: Mapping[str, str]) -> str:
    rows = [[_name(name), text(reason)] for name, reason in reasons.items()]
    return section(f"{heading} ({len(rows)})", table(["layer", "reason"], rows, "words"))


def _settings(report: Report) -> str:
    rows = []
    for name, value in report.settings.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        rows.append([text(fmt.label(name)), f"<code>{text(shown)}</code>"])
    return section("Settings", table(["", ""], rows, "words"))


def _code(lines: str) -> str:
    return f"<pre><code>{escape(lines)}</code></pre>" if lines else ""


def section(heading: str, content: str) -> str:
    """A heading over markup; nothing if there is none."""
    return f"<section><h2>{text(heading)}</h2>{content}</section>" if content else ""


def _pairs(group: str, values: Mapping[str, float], show: Callable[[float], str]) -> str:
    rows = [
        [text(fmt.label(name)), number(f"{group}.{name}", value, show(value))]
        for name, value in values.items()
    ]
    return table(["", ""], rows, "pairs")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table whose cells are markup already, the first of each row a heading."""
    if not rows:
        return ""
    titles = "".join(f'<th scope="col">{title}</th>' for title in headers)
    head = f"<thead><tr>{titles}</tr></thead>" if any(headers) else ""
    lines = []
    for first, *rest in rows:
        cells = "".join(f"<td>{cell}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{first}</th>{cells}</tr>')
    body = "\n".join(lines)
    return f'<div class="wide"><table class="{kind}">{head}<tbody>\n{body}\n</tbody></table></div>'


def number(key: str, value: float | None, shown: str) -> str:
    """A rounded number that carries its exact value."""
    if value is None:
        return shown
    return f'<data data-key="{text(key)}" data-value="{value!r}">{text(shown)}</data>'


def _name(name: str) -> str:
    """A qualified module name, which may break behind its dots."""
    return f"<code>{text(name).replace('.', '.<wbr>')}</code>"


def _change(before: int, after: int, show: Callable[[int], str]) -> str:
    title = f"{before} → {after}"
    if before == after:
        return f'<span class="same" title="{title}">{show(after)}</span>'
    return f'<span title="{title}">{show(before)} → <strong>{show(after)}</strong></span>'


def _bar(left: float) -> str:
    width = min(100.0, 100 * left)
    return f'<span class="bar" aria-hidden="true"><i style="width:{width:.1f}%"></i></span>'


def text(value: object) -> str:
    """Text as markup, on one line."""
    return escape(fmt.one_line(value))
