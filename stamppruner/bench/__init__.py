"""The paper's tables and pictures from one command, on one protocol.

:class:`Bench` runs a grid of cells (row x target x seed) and keeps each in a record; ``table`` and
``figures`` draw from that record alone.
"""

from stamppruner.bench.cells import Cell
from stamppruner.bench.estimate import Estimate, estimate
from stamppruner.bench.figures import Figures
from stamppruner.bench.grid import grid
from stamppruner.bench.paper import DOLLARS_PER_HOUR, PAPER
from stamppruner.bench.presets import PRESETS, Preset, Training, find_preset
from stamppruner.bench.rows import ROWS, Row
from stamppruner.bench.run import RECORD, Bench, read_record
from stamppruner.bench.sources import Sources
from stamppruner.bench.table import Line, as_csv, latex, lines, markdown

__all__ = [
    "DOLLARS_PER_HOUR",
    "PAPER",
    "PRESETS",
    "RECORD",
    "ROWS",
    "Bench",
    "Cell",
    "Estimate",
    "Figures",
    "Line",
    "Preset",
    "Row",
    "Sources",
    "Training",
    "as_csv",
    "estimate",
    "find_preset",
    "grid",
    "latex",
    "lines",
    "markdown",
    "read_record",
]
