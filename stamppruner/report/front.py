"""The page of several networks for one data set: accuracy over cost, and every number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from stamppruner.report import format as fmt
from stamppruner.report.html import document, element, number, section, table, text, warning_list
from stamppruner.report.plot import Kind, Mark, plot_svg, short

if TYPE_CHECKING:
    from stamppruner.pareto import Pareto, Point


@dataclass(frozen=True)
class Metric:
    """How an accuracy is shown: in a heading, in a legend, and under which name of the full net."""

    short: str
    long: str
    full: str


METRICS = {
    "accuracy_after_finetune": Metric("fine-tuned", "after fine-tuning", "accuracy_before_cut"),
    "accuracy_after_cut": Metric("after cut", "right after the cut", "accuracy_before_cut"),
    "target_accuracy_after_finetune": Metric(
        "fine-tuned, own images", "after fine-tuning", "target_accuracy_before"
    ),
    "target_accuracy_after": Metric("own images", "right after the cut", "target_accuracy_before"),
}
"""Accuracies, the one that tells most first. Own images are those that a network was made for."""

_OWN = (
    "Accuracies are those on the images that the networks were made for. On images that they have "
    "not seen they are usually lower: pass evaluate_on to measure that."
)
_UNITS = {"macs": "multiply-adds a sample (MACs)", "size_bytes": "size of the file"}


def page(pareto: Pareto) -> str:
    """A whole HTML document, without scripts or requests."""
    count = len(pareto.points)
    title = f"{pareto.model}, {count} budget{'s' * (count > 1)}"
    body = element(
        f"<header><h1>{text(title)}</h1><p>One data set, one scoring of the channels, a network a "
        "budget</p></header>",
        warning_list(pareto.warnings),
        section("Accuracy over cost", picture(pareto)),
        section("Networks", _networks(pareto)),
    )
    return document(title, body, pareto.to_json(), "stamppruner-pareto")


def picture(pareto: Pareto) -> str:
    """The plot over the first cost of all points, and what must be known to read it."""
    if not pareto.metrics:
        return ""
    cost, first = pareto.costs[0], METRICS[pareto.metrics[0]]
    same = [name for name in pareto.metrics if METRICS[name].full == first.full][:2]
    kinds = [Kind(METRICS[name].long, _marks(pareto, cost, name)) for name in same]
    height = pareto.full.metrics.get(first.full)
    where = [] if height is None else [Mark(pareto.full.costs[cost], height, "", "full network")]
    svg = plot_svg(
        kinds,
        Kind("full network, not fine-tuned", where),
        x=cost,
        x_label=f"{_UNITS.get(cost, fmt.label(cost))}, logarithmic",
        y_label="accuracy",
    )
    note = f"<p>{_OWN}</p>" if first.full == "target_accuracy_before" else ""
    return f"{svg}{note}"


def _marks(pareto: Pareto, cost: str, metric: str) -> list[Mark]:
    front = pareto.front(cost, metric)
    return [
        Mark(
            point.costs[cost],
            point.metrics[metric],
            _label(pareto, point),
            f"{point.label}: {fmt.share(point.metrics[metric])}, "
            f"{fmt.cost(cost, point.costs[cost])}",
            i in front,
        )
        for i, point in enumerate(pareto.points)
    ]


def _label(pareto: Pareto, point: Point) -> str:
    """The budget beside a marker: the bare value where all bound the same cost."""
    if len({tuple(p.budget) for p in pareto.points}) > 1 or len(point.budget) != 1:
        return short(point.label)
    ((name, value),) = point.budget.items()
    return short(fmt.target(name, value))


def _networks(pareto: Pareto) -> str:
    """All numbers; those of the page are those of its record."""
    costs = [n for n in pareto.full.costs if any(n in p.costs for p in pareto.points)]
    headers = ["budget", *map(fmt.label, costs)]
    headers += [METRICS[name].short for name in pareto.metrics]
    rows = []
    for key, point in [("full", pareto.full), *_numbered(pareto)]:
        row = [text(point.label)]
        row += [_cost(f"{key}.costs.{name}", name, point, pareto.full) for name in costs]
        for metric in pareto.metrics:
            name = METRICS[metric].full if point is pareto.full else metric
            value = point.metrics.get(name)
            shown = fmt.MISSING if value is None else fmt.share(value)
            row.append(number(f"{key}.metrics.{name}", value, shown))
        rows.append(row)
    files = ", ".join(f"<code>{text(point.file)}</code>" for point in pareto.points)
    rows_of_all = table([text(header) for header in headers], rows, "networks")
    return f"{rows_of_all}<p>Files: {files}</p>"


def _numbered(pareto: Pareto) -> list[tuple[str, Point]]:
    return [(f"points.{i}", point) for i, point in enumerate(pareto.points)]


def _cost(key: str, name: str, point: Point, full: Point) -> str:
    value = point.costs.get(name)
    shown = number(key, value, fmt.cost(name, value))
    left = fmt.ratio(full.costs.get(name), value)
    if point is full or left is None:
        return shown
    return f'{shown} <span class="same">{fmt.share(left)}</span>'
