"""Networks of several sizes for one data set: what each costs, and how well it does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stamppruner import ranks
from stamppruner.batches import reread
from stamppruner.budget import Budget
from stamppruner.errors import BudgetError, CheckpointError, ConfigError, StampError
from stamppruner.files import PathLike, atomic_write, check_folder
from stamppruner.finetune import checked_settings, evaluate
from stamppruner.kinds import is_real
from stamppruner.report import Report
from stamppruner.report import format as fmt
from stamppruner.report.front import METRICS, page
from stamppruner.result import PruneResult
from stamppruner.supervision import CLASSIFICATION, Supervision
from stamppruner.target import Target

RECORD, PAGE = "pareto.json", "pareto.html"
"""Files of :meth:`Pareto.save` beside the networks."""

BEFORE = "target_accuracy_before"
"""The metric of a report that is the full network's."""

_FORMAT = 1
_BATCH = 128


@dataclass(frozen=True)
class Point:
    """One network.

    Attributes:
        budget: what was asked, by cost; empty for the full network.
        costs: ``macs`` (a sample), ``params``, ``size_bytes``, and ``latency_ms`` if measured.
        metrics: accuracies in [0, 1], by the names of a report.
        file: its name in the folder of :meth:`Pareto.save`; empty for the full network.
    """

    budget: Mapping[str, float]
    costs: Mapping[str, float]
    metrics: Mapping[str, float]
    file: str = ""

    @property
    def label(self) -> str:
        """The budget, for people."""
        bounds = [f"{fmt.label(name)} {fmt.target(name, v)}" for name, v in self.budget.items()]
        return ", ".join(bounds) or "full network"


@dataclass(frozen=True, eq=False)
class Pareto:
    """What :meth:`STAMPPruner.pareto` gives: one data set, one scoring, many networks.

    Print it for a table; :meth:`save` writes the networks and a page.

    Attributes:
        model: class name of the model.
        full: the full network with a fitted head, not fine-tuned.
        points: one a budget, in the order that they were given in.
        warnings: what the reader should know; those of a single network name its budget.
        settings: of the reports: configuration, versions, how latency was measured.
        results: the networks, one a point; none where the record alone was read.

    Example:
        >>> small = Point({"macs": 0.25}, {"macs": 1e6}, {"accuracy_after_cut": 0.8})
        >>> print(Pareto("ResNet", Point({}, {"macs": 4e6}, {}), (small,)))
        budget         MACs  after cut
        full network  4.00M          -
        MACs 25.0%    1.00M      80.0%  *
    """

    model: str
    full: Point
    points: tuple[Point, ...]
    warnings: tuple[str, ...] = ()
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    results: tuple[PruneResult, ...] = ()

    @classmethod
    def of(cls, results: Sequence[PruneResult], full: Mapping[str, float]) -> Pareto:
        """Gather results.

        Args:
            results: of one model and one target, at least one.
            full: accuracies of the full network that the results do not have.
        """
        reports = _comparable([result.report for result in results])
        before: dict[str, float] = {}
        for report in reports:
            before = {**report.before, **before}
        points = tuple(
            Point(
                budget=report.budget or {},
                costs=report.after,
                metrics={name: v for name, v in report.metrics.items() if name != BEFORE},
                file=_file(number, report.budget or {}),
            )
            for number, report in enumerate(reports, 1)
        )
        own = {name: v for name, v in reports[0].metrics.items() if name == BEFORE}
        return cls(
            model=reports[0].model,
            full=Point({}, before, {**own, **full}),
            points=points,
            warnings=_shared([report.warnings for report in reports], [p.label for p in points]),
            settings=reports[0].settings,
            results=tuple(results),
        )

    @property
    def costs(self) -> list[str]:
        """Costs that every point has; first the one that the first budget bounds."""
        asked = [*self.points[0].budget, "macs", *self.full.costs]
        return [n for n in dict.fromkeys(asked) if all(n in p.costs for p in self._all)]

    @property
    def metrics(self) -> list[str]:
        """Accuracies that every point has, the one that tells most first."""
        return [name for name in METRICS if all(name in p.metrics for p in self.points)]

    def front(self, cost: str = "macs", metric: str | None = None) -> list[int]:
        """Indices of the points that no other beats, from the cheapest to the dearest.

        A point beats another if it costs no more, is no less accurate, and differs in either.

        Args:
            cost: by name.
            metric: by name; by default the first of :attr:`metrics`.

        Raises:
            ConfigError: not all points have them.
        """
        if cost not in self.costs or (metric or "") not in ["", *self.metrics] or not self.metrics:
            raise ConfigError(
                f"front(cost={cost!r}, metric={metric!r}): all points have the costs "
                f"{', '.join(self.costs)} and the accuracies {', '.join(self.metrics) or '(none)'}"
            )
        metric = metric or self.metrics[0]
        found = [(p.costs[cost], -p.metrics[metric]) for p in self.points]
        best = [
            i
            for i, (price, loss) in enumerate(found)
            if not any(p <= price and q <= loss and (p, q) != (price, loss) for p, q in found)
        ]
        return sorted(best, key=lambda i: found[i])

    def table(self) -> str:
        """Costs and accuracies, for a terminal; a star marks the front of MACs."""
        costs = [name for name in self.full.costs if any(name in p.costs for p in self.points)]
        star = set(self.front()) if self.metrics else set()
        headers = ["budget", *map(fmt.label, costs), *(METRICS[m].short for m in self.metrics), ""]
        rows = [self._row(self.full, costs, "")]
        rows += [self._row(p, costs, "*" * (i in star)) for i, p in enumerate(self.points)]
        return fmt.text_table(headers, rows)

    def __str__(self) -> str:
        return self.table()

    def to_json(self) -> dict[str, Any]:
        """A dict of JSON values: everything but the networks."""
        return {
            "format": _FORMAT,
            "model": self.model,
            "full": dataclasses.asdict(self.full),
            "points": [dataclasses.asdict(point) for point in self.points],
            "warnings": list(self.warnings),
            "settings": dict(self.settings),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Pareto:
        """Inverse of :meth:`to_json`; it has no results.

        Raises:
            CheckpointError: the record is of another format, or lacks or adds fields.
        """
        if record.get("format") != _FORMAT:
            raise CheckpointError(
                f"the record has format {record.get('format')!r}, this version reads {_FORMAT}: "
                "read it with the version that wrote it"
            )
        try:
            full, *points = (Point(**p) for p in [record["full"], *record["points"]])
            values = record["model"], full, tuple(points), tuple(record["warnings"])
            return cls(*values, dict(record["settings"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the record is damaged ({error!r}): give what Pareto.to_json returned"
            ) from error

    def save(self, directory: PathLike) -> None:
        """Write every network, ``pareto.html`` and, last, ``pareto.json``.

        Each file is whole or not there.

        Args:
            directory: made if missing. Files of other names in it stay.

        Raises:
            CheckpointError: a file cannot be written.
            StampError: there are no networks, as the record alone was read.
        """
        if len(self.results) != len(self.points):
            raise StampError("there are no networks to save: this was read from a record")
        files = [point.file for point in self.points]
        folder = check_folder(directory, (*files, PAGE, RECORD))
        for file, result in zip(files, self.results, strict=True):
            result.save(folder / file)
        atomic_write(folder / PAGE, page(self).encode())
        atomic_write(folder / RECORD, json.dumps(self.to_json(), indent=2).encode())

    @property
    def _all(self) -> tuple[Point, ...]:
        return (self.full, *self.points)

    def _row(self, point: Point, costs: Sequence[str], star: str) -> list[str]:
        cells = [fmt.cost(name, point.costs.get(name)) for name in costs]
        for name in self.metrics:
            value = point.metrics.get(METRICS[name].full if point is self.full else name)
            cells.append(fmt.MISSING if value is None else fmt.share(value))
        return [point.label, *cells, star]


class AfterCut:
    """Fine-tunes and evaluates networks, as :meth:`STAMPPruner.pareto` was asked to.

    Raises:
        ConfigError: see there.
        DataError: data that can be read only once.
    """

    def __init__(
        self,
        data: Any,
        evaluate_on: Any,
        settings: Mapping[str, Any] | None,
        progress: bool,
        task: Supervision = CLASSIFICATION,
    ) -> None:
        if not task.classifies:
            raise ConfigError("pareto compares accuracies of classes: call prune for every budget")
        if settings is not None and ranks.count() > 1:
            raise ConfigError(
                "fine-tuning runs in one process: on several ranks leave finetune out, and train "
                "each result with a loop of your own"
            )
        self._settings = (
            None if settings is None else {"progress": progress, **checked_settings(settings)}
        )
        self._data = data if settings is None else reread(data)
        self._test = reread(evaluate_on)

    def full(self, dense: nn.Module) -> dict[str, float]:
        """Accuracy of the full network on the data to evaluate on."""
        return {} if self._test is None else {"accuracy_before_cut": evaluate(dense, self._test)}

    def __call__(self, result: PruneResult, target: Target) -> PruneResult:
        """The result itself, trained and measured; its report has the accuracies."""
        if self._test is not None:
            result.evaluate(self._test)
        if self._settings is None:
            return result
        result.finetune(self._data, **self._settings)
        if self._test is not None:
            result.evaluate(self._test)
        else:
            name = "target_accuracy_after_finetune"
            found = {name: evaluate(result.model, target.batches(_BATCH))}
            metrics = {**result.report.metrics, **found}
            result.report = dataclasses.replace(result.report, metrics=metrics)
        return result


def as_budgets(budgets: Any) -> list[Budget]:
    """Budgets of several networks; a plain number is a share of the multiply-adds.

    Raises:
        BudgetError: none, one twice, or one that is none.
    """
    if isinstance(budgets, str | Mapping) or not isinstance(budgets, Iterable):
        raise BudgetError(f"budgets={budgets!r}: pass a list, such as [0.5, Budget(params=1e5)]")
    asked = [_as_budget(budget) for budget in budgets]
    if not asked:
        raise BudgetError("there are no budgets: pass at least one, such as [0.5, 0.25]")
    for i, budget in enumerate(asked):
        if budget in asked[:i]:
            raise BudgetError(f"{budget} is given twice: pass each budget once")
    return asked


def _as_budget(value: Any) -> Budget:
    if isinstance(value, Budget):
        return value
    if not is_real(value):
        raise BudgetError(f"the budget {value!r} is none: pass Budget(macs=0.25) or 0.25, say")
    if not 0 < float(value) <= 1:
        raise BudgetError(
            f"the budget {value!r} is no share of the multiply-adds in (0, 1]: for a number of "
            "them pass Budget(macs=...)"
        )
    return Budget(macs=float(value))


def _file(number: int, budget: Mapping[str, float]) -> str:
    """Name of a slim file; the number tells budgets apart whose bounds are written alike."""
    bounds = [f"{name}-{value:.6g}" for name, value in budget.items()]
    return f"{'-'.join(['slim', str(number), *bounds])}.safetensors"


def _comparable(reports: Sequence[Report]) -> list[Report]:
    """The reports, without latencies that were measured in another setting than the first's."""
    found = []
    for report in reports:
        if report.latency_setting != reports[0].latency_setting:
            note = "its latency is left out: it was measured in another setting than the first's"
            before, after = (
                {name: value for name, value in costs.items() if name != "latency_ms"}
                for costs in (report.before, report.after)
            )
            warnings = (*report.warnings, note)
            report = dataclasses.replace(report, before=before, after=after, warnings=warnings)
        found.append(report)
    return found


def _shared(warnings: Sequence[Sequence[str]], labels: Sequence[str]) -> tuple[str, ...]:
    """Every warning once; those that not all networks have, behind the budget of theirs."""
    common = [text for text in warnings[0] if all(text in others for others in warnings)]
    single = [
        f"{label}: {text}"
        for label, own in zip(labels, warnings, strict=True)
        for text in own
        if text not in common
    ]
    return (*common, *single)
