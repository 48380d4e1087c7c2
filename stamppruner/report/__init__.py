"""What pruning did to a network: as text, as data, as a page."""

from stamppruner.report._report import GroupRow, LayerRow, Report
from stamppruner.report.format import markdown_table, text_table
from stamppruner.report.svg import kept_channels_svg

__all__ = [
    "GroupRow",
    "LayerRow",
    "Report",
    "kept_channels_svg",
    "markdown_table",
    "text_table",
]
