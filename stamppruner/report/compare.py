"""Several prunings side by side: methods, budgets or data sets, as text, as data, as a page."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.files import atomic_write
from stamppruner.report import format as fmt
from stamppruner.report._report import Report
from stamppruner.report.html import document, element, number, section, table, text, warning_list
from stamppruner.report.plot import Kind, Mark, plot_svg

_FORMAT = 1
_METRICS = {
    "accuracy_after_finetune": "fine-tuned",
    "accuracy_after_cut": "after cut",
    "target_accuracy_after": "own images, after cut",
    "metric_after_finetune": "metric, fine-tuned",
    "metric_after_cut": "metric, after cut",
    "loss_after_finetune": "loss, fine-tuned",
    "loss_after_cut": "loss, after cut",
}
"""What can be compared, the one that tells most first; metrics and losses of the user's own."""


@dataclass(frozen=True)
class Comparison:
    """What :func:`compare` gives: print it for a table; a notebook shows it as a page.

    Attributes:
        reports: by name, in the order of the rows.
        warnings: what must be known to compare them.
    """

    reports: Mapping[str, Report]
    warnings: tuple[str, ...] = ()

    @property
    def costs(self) -> list[str]:
        """Costs that at least one has, in the order of the first that has them."""
        return list(dict.fromkeys(name for r in self.reports.values() for name in r.after))

    @property
    def metrics(self) -> list[str]:
        """Accuracies, metrics or losses that one has at least, those that tell most first."""
        return [m for m in _METRICS if any(m in r.metrics for r in self.reports.values())]

    def table(self) -> str:
        """For a terminal; shares in brackets are of each network's own size before."""
        headers = ["", *map(fmt.label, self.costs), *(_METRICS[m] for m in self.metrics), "time"]
        rows = [
            [
                name,
                *(_with_share(report, cost) for cost in self.costs),
                *(_metric(report, metric) for metric in self.metrics),
                _seconds(report),
            ]
            for name, report in self.reports.items()
        ]
        return fmt.text_table(headers, rows)

    def __str__(self) -> str:
        return "\n".join([self.table(), *(f"warning: {warning}" for warning in self.warnings)])

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values: the whole reports."""
        reports = {name: report.to_json() for name, report in self.reports.items()}
        return {"format": _FORMAT, "reports": reports}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Comparison:
        """Inverse of :meth:`to_json`.

        Raises:
            CheckpointError: the record is of another format.
        """
        if record.get("format") != _FORMAT or not isinstance(record.get("reports"), Mapping):
            raise CheckpointError(
                f"the record has format {record.get('format')!r}, this version reads {_FORMAT}: "
                "give what Comparison.to_json returned"
            )
        return compare({name: Report.from_json(data) for name, data in record["reports"].items()})

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write a page that needs nothing else, neither files nor network.

        Raises:
            CheckpointError: ``path`` cannot be written.
        """
        page = document(self._title, self._repr_html_(), self.to_json(), "stamppruner-comparison")
        atomic_write(path, page.encode("utf-8", errors="replace"))

    def _repr_html_(self) -> str:
        return element(
            f"<header><h1>{text(self._title)}</h1></header>",
            warning_list(self.warnings),
            section("Accuracy over multiply-adds", self._picture()),
            section("Networks", self._rows()),
        )

    @property
    def _title(self) -> str:
        return f"{len(self.reports)} networks compared"

    def _picture(self) -> str:
        """Empty unless every network has an accuracy of one kind, and its multiply-adds."""
        reports = self.reports.items()
        kinds = [
            Kind(_METRICS[metric], [_mark(name, r, metric) for name, r in reports])
            for metric in self.metrics
            if "accuracy" in metric
            and all(metric in r.metrics and r.after.get("macs", 0) > 0 for _, r in reports)
        ]
        if not kinds:
            return ""
        return plot_svg(
            kinds[:2],
            Kind("", []),
            x="macs",
            x_label="multiply-adds a sample (MACs), logarithmic",
            y_label="accuracy",
        )

    def _rows(self) -> str:
        headers = ["", *map(fmt.label, self.costs), *(_METRICS[m] for m in self.metrics), "time"]
        rows = []
        for name, report in self.reports.items():
            cells = [text(name)]
            for cost in self.costs:
                shown = number(f"{name}.after.{cost}", report.after.get(cost), _cost(report, cost))
                left = fmt.ratio(report.before.get(cost), report.after.get(cost))
                share = "" if left is None else f' <span class="same">{fmt.share(left)}</span>'
                cells.append(shown + share)
            for metric in self.metrics:
                key = f"{name}.metrics.{metric}"
                cells.append(number(key, report.metrics.get(metric), _metric(report, metric)))
            rows.append([*cells, text(_seconds(report))])
        return table([text(header) for header in headers], rows, "networks")


def compare(results: Mapping[str, Any] | Iterable[Any]) -> Comparison:
    """Results of several methods, budgets or data sets side by side.

    Args:
        results: by name, or in a row; then their titles are the names. Each is a
            :class:`~stamppruner.PruneResult` or a :class:`Report`.

    Returns:
        A table of costs (shares are of each network's own size before), accuracies in [0, 1]
        shown in per cent, and seconds of all steps. A latency that was measured in another
        setting than the first's is left out, with a warning.

    Raises:
        ConfigError: there are none, or one of them is neither.

    Example:
        >>> small = Report("L1", "ResNet", {"macs": 4e6}, {"macs": 1e6})
        >>> large = Report("random", "ResNet", {"macs": 4e6}, {"macs": 2e6})
        >>> print(compare([small, large]).table().splitlines()[1])
        L1      1.00M (25.0%)     -
    """
    named = _named(results)
    first = next(iter(named.values()))
    reports: dict[str, Report] = {}
    warnings: list[str] = []
    for name, report in named.items():
        if "latency_ms" in report.after and report.latency_setting != first.latency_setting:
            after = {cost: v for cost, v in report.after.items() if cost != "latency_ms"}
            report = replace(report, after=after)
            warnings.append(f"{name}: its latency was measured in another setting than the first's")
        reports[name] = report
    return Comparison(reports, tuple(warnings))


def _named(results: Mapping[str, Any] | Iterable[Any]) -> dict[str, Report]:
    """Reports by name; titles that come twice are numbered."""
    if isinstance(results, Mapping):
        pairs = [(str(name), value) for name, value in results.items()]
    elif isinstance(results, Iterable):
        pairs = [("", value) for value in results]
    else:
        raise ConfigError(f"compare({results!r}): pass a dict or a list of results")
    named: dict[str, Report] = {}
    for name, value in pairs:
        report = getattr(value, "report", value)
        if not isinstance(report, Report):
            raise ConfigError(
                f"compare: {name or len(named)} is a {type(value).__name__}: pass PruneResults, or "
                "Reports"
            )
        name = name or report.title
        while name in named:
            name += "'"
        named[name] = report
    if not named:
        raise ConfigError("compare: there is nothing to compare: pass at least one result")
    return named


def _mark(name: str, report: Report, metric: str) -> Mark:
    value, macs = report.metrics[metric], report.after["macs"]
    title = f"{name}: {fmt.share(value)}, {fmt.cost('macs', macs)}"
    return Mark(macs, value, name, title, on_line=False)


def _cost(report: Report, name: str) -> str:
    return fmt.cost(name, report.after.get(name))


def _with_share(report: Report, name: str) -> str:
    left = fmt.ratio(report.before.get(name), report.after.get(name))
    return _cost(report, name) + ("" if left is None else f" ({fmt.share(left)})")


def _metric(report: Report, name: str) -> str:
    value = report.metrics.get(name)
    if value is None:
        return fmt.MISSING
    return fmt.share(value) if "accuracy" in name else fmt.number(value)


def _seconds(report: Report) -> str:
    return fmt.seconds(sum(report.timings.values())) if report.timings else fmt.MISSING
