"""Figures with matplotlib, for papers and notebooks; they need the extra ``plots``.

Kinds differ in colour and in marker. The colours are those of Okabe and Ito (2008), which people
with any kind of colour vision tell apart. No global state: figures are made without pyplot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stamppruner.errors import ConfigError
from stamppruner.history import History
from stamppruner.optional import require
from stamppruner.report import format as fmt
from stamppruner.report._report import Report
from stamppruner.report.front import METRICS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from stamppruner.pareto import Pareto

_REMEDY = 'pip install "stamppruner[plots]"'
_BLUE, _VERMILLION, _GREEN, _BLACK = "#0072B2", "#D55E00", "#009E73", "#000000"
_STYLES = ((_BLUE, "o", "-"), (_VERMILLION, "^", "--"), (_GREEN, "s", "-."), (_BLACK, "D", ":"))
_LIGHT = "#b9c3cd"
_LONGEST = 40  # points of a curve that each get a marker


def plot_pareto(
    pareto: Pareto, *, cost: str | None = None, metrics: Sequence[str] | None = None
) -> Figure:
    """Accuracy over a cost, a line through the networks that no other beats.

    Args:
        pareto: of :meth:`stamppruner.STAMPPruner.pareto`.
        cost: by name, on a logarithmic axis; by default the first of ``pareto.costs``.
        metrics: by name, at most four; by default the first two of ``pareto.metrics`` that are on
            the same images.

    Returns:
        A matplotlib figure: ``plot_pareto(nets).savefig("front.png", dpi=150)``.

    Raises:
        ConfigError: not all networks have the cost or the accuracy, or there is no accuracy.
        MissingExtraError: matplotlib is not installed.
    """
    names = list(metrics) if metrics is not None else _same_images(pareto)
    cost = cost or pareto.costs[0]
    if not names or len(names) > len(_STYLES):
        raise ConfigError(
            f"plot_pareto(metrics={names}): pass one to {len(_STYLES)} of "
            f"{', '.join(pareto.metrics) or '(the networks have no accuracy)'}"
        )
    fronts = [pareto.front(cost, name) for name in names]  # refuses unknown names
    figure, axes = _figure(6.4, 4.2)
    for (colour, marker, dashes), name, front in zip(_STYLES, names, fronts, strict=False):
        places = [(p.costs[cost], 100 * p.metrics[name]) for p in pareto.points]
        best = [places[i] for i in front]
        axes.plot(*zip(*best, strict=True), dashes, color=colour, linewidth=1.6)
        axes.plot(
            *zip(*places, strict=True), marker, color=colour, markersize=7, label=METRICS[name].long
        )
    full = pareto.full.metrics.get(METRICS[names[0]].full)
    if full is not None:
        axes.axhline(100 * full, color=_BLACK, linestyle=":", label="full network, not fine-tuned")
    for i, point in enumerate(pareto.points):
        share = fmt.ratio(pareto.full.costs.get(cost), point.costs[cost])
        if share is not None and i in fronts[0]:
            place = point.costs[cost], 100 * point.metrics[names[0]]
            axes.annotate(
                fmt.share(share), place, (0, 9), textcoords="offset points", ha="center", fontsize=9
            )
    axes.set_xscale("log")
    axes.margins(x=0.08, y=0.14)
    _plain_ticks(axes, cost, [p.costs[cost] for p in pareto.points])
    axes.set_xlabel(f"{fmt.label(cost)} (logarithmic; labels: share of the full network)")
    axes.set_ylabel("accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, fontsize=9)
    return figure


def plot_kept_channels(results: Any) -> Figure:
    """Which channels each group keeps: the paper's figure of pruned structures.

    Kept channels are dark and tall, removed ones light and low.

    Args:
        results: a :class:`~stamppruner.PruneResult` or a :class:`Report`; or several by name, of
            one model, which stand side by side.

    Returns:
        A matplotlib figure, a row a group, a column a result.

    Raises:
        ConfigError: there is nothing to show, or the results have other groups.
        MissingExtraError: matplotlib is not installed.
    """
    several = results if isinstance(results, Mapping) else {"": results}
    reports = {str(name): getattr(value, "report", value) for name, value in several.items()}
    for name, report in reports.items():
        if not isinstance(report, Report) or not report.groups:
            raise ConfigError(f"plot_kept_channels: {name or report!r} has no groups of channels")
    groups = [[(g.name, g.size) for g in report.groups] for report in reports.values()]
    if not groups or any(other != groups[0] for other in groups):
        raise ConfigError("plot_kept_channels: pass results of one model, at least one")
    rows = len(groups[0])
    figure, axes = _figure(2.2 + 3.6 * len(reports), 0.9 + 0.26 * rows, columns=len(reports))
    for column, (name, report) in zip(axes, reports.items(), strict=True):
        for row, group in enumerate(report.groups):
            kept = set(group.kept)
            for keep, colour, height in ((True, _BLUE, 0.38), (False, _LIGHT, 0.14)):
                where = [i / group.size for i in range(group.size) if (i in kept) == keep]
                width = max(0.4, min(3.0, 150 / group.size))
                column.vlines(where, row - height, row + height, colour, linewidth=width)
            column.text(
                1.02, row, f"{len(kept)}/{group.size}", va="center", fontsize=8, color="#444444"
            )
        kept_all, total = report.kept_channels
        column.set_title(f"{name or report.title}: {kept_all} of {total} kept", fontsize=10)
        column.set_xlim(-0.01, 1.0)
        column.set_ylim(rows - 0.4, -0.6)
        column.set_xticks([])
        column.set_yticks([])
        for side in column.spines.values():
            side.set_visible(False)
    axes[0].set_yticks(range(rows), [_short(name) for name, _ in groups[0]], fontsize=8)
    axes[0].tick_params(length=0)
    return figure


def plot_history(history: History, names: Sequence[str] | None = None) -> Figure:
    """Figures of meta-fitting or fine-tuning, a panel each, over iterations or epochs.

    Args:
        history: ``pruner.history``, ``result.history``.
        names: which figures; by default all.

    Returns:
        A matplotlib figure.

    Raises:
        ConfigError: the history is empty, or has no such figure.
        MissingExtraError: matplotlib is not installed.
    """
    steps = ("iteration", "epoch")
    found = list(dict.fromkeys(name for row in history for name in row if name not in steps))
    chosen = found if names is None else list(names)
    if not chosen or (unknown := [name for name in chosen if name not in found]):
        what = ", ".join(unknown) if chosen else "nothing"
        raise ConfigError(
            f"plot_history: {what} to show: this history has {', '.join(found) or 'no rows'}"
        )
    figure, axes = _figure(3.4 * len(chosen), 2.9, columns=len(chosen))
    for number, (column, name) in enumerate(zip(axes, chosen, strict=True)):
        colour, marker, dashes = _STYLES[number % len(_STYLES)]
        values = history[name]
        shown = marker if len(values) <= _LONGEST else ""
        column.plot(range(len(values)), values, dashes, marker=shown, color=colour, markersize=4)
        column.set_title(fmt.label(name), fontsize=10)
        column.set_xlabel(next((s for s in steps if history[s]), "step"))
        column.grid(alpha=0.3)
    return figure


def _figure(width: float, height: float, columns: int | None = None) -> tuple[Figure, Any]:
    """A figure and its axes; a list of axes where columns are asked for."""
    module = require("matplotlib.figure", "plotting", _REMEDY)
    figure = module.Figure(figsize=(width, height), layout="constrained")
    made = figure.subplots(1, columns or 1, squeeze=False)[0]
    return figure, made if columns else made[0]


def _same_images(pareto: Pareto) -> list[str]:
    """The first two accuracies on the images of the first."""
    first = pareto.metrics[:1]
    return [n for n in pareto.metrics if METRICS[n].full == METRICS[first[0]].full][:2]


def _plain_ticks(axes: Any, cost: str, values: Sequence[float]) -> None:
    """Ticks at the networks, in the unit of the cost, instead of powers of ten."""
    ticker = require("matplotlib.ticker", "plotting", _REMEDY)
    apart: list[float] = []
    for value in sorted(set(values)):
        if not apart or value > 1.25 * apart[-1]:
            apart.append(value)
    axes.xaxis.set_major_locator(ticker.FixedLocator(apart))
    axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda v, _: fmt.cost(cost, float(v))))
    axes.xaxis.set_minor_locator(ticker.NullLocator())


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"…{name[-27:]}"
