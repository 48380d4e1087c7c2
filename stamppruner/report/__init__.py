"""What pruning did to a network: as text, as data, as a page, as figures."""

from stamppruner.report._report import GroupRow, LayerRow, Report
from stamppruner.report.compare import Comparison, compare
from stamppruner.report.format import markdown_table, text_table
from stamppruner.report.plots import plot_history, plot_kept_channels, plot_pareto
from stamppruner.report.svg import kept_channels_svg

__all__ = [
    "Comparison",
    "GroupRow",
    "LayerRow",
    "Report",
    "compare",
    "kept_channels_svg",
    "markdown_table",
    "plot_history",
    "plot_kept_channels",
    "plot_pareto",
    "text_table",
]
