"""The paper's table from the record of a benchmark: markdown, CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stamppruner.bench.cells import Cell
from stamppruner.bench.grid import table_cells
from stamppruner.bench.paper import PAPER, Printed
from stamppruner.bench.presets import Preset
from stamppruner.bench.rows import ROWS
from stamppruner.report.format import markdown_table, seconds

Found = Mapping[str, Any]
"""A finished cell of a record."""


@dataclass(frozen=True)
class Line:
    """One row of the table: means over seeds.

    Attributes:
        target: name of the data set; ``row`` the method.
        accuracies: in [0, 1], one a seed.
        params: share of the parameters left; ``macs`` how many times fewer multiply-adds.
        search, finetune: seconds.
        inference: seconds for the target's test images.
        train_speedup, inference_speedup: over the full network, measured in turns with it.
        dollars: of search and fine-tuning.
        against_stamp: its training time over that of STAMP; None if STAMP was not run.
        printed: what the paper prints, None if it has no such row.
    """

    target: str
    row: str
    accuracies: tuple[float, ...]
    params: float
    macs: float
    search: float
    finetune: float
    inference: float
    train_speedup: float
    inference_speedup: float
    dollars: float
    against_stamp: float | None
    printed: Printed | None

    @property
    def accuracy(self) -> str:
        """Mean and deviation in per cent."""
        values = 100 * np.array(self.accuracies)
        return f"{values.mean():.2f} ± {values.std():.2f}"


def lines(record: Mapping[str, Any], dollars_per_hour: float) -> list[Line]:
    """Rows of the table, target by target; those without a finished cell are left out.

    Args:
        record: of :class:`~stamppruner.bench.Bench`.
        dollars_per_hour: of the machine.
    """
    preset = Preset.from_json(record["preset"])
    of: dict[tuple[str, str], list[Found]] = {}
    wanted = set(table_cells(preset, list(ROWS)))
    for found in record["cells"]:
        if Cell.of(found) in wanted:
            of.setdefault((found["target"], found["row"]), []).append(found)
    result = []
    for target in preset.targets:
        stamp = of.get((target, "STAMP"))
        result += [
            _line(preset, target, row, cells, stamp, dollars_per_hour)
            for row in ROWS
            if (cells := of.get((target, row)))
        ]
    return result


def _line(
    preset: Preset,
    target: str,
    row: str,
    cells: Sequence[Found],
    stamp: Sequence[Found] | None,
    dollars_per_hour: float,
) -> Line:
    search, finetune = _mean(cells, "search_seconds"), _mean(cells, "finetune_seconds")
    both = search + finetune
    ours = _mean(stamp, "search_seconds") + _mean(stamp, "finetune_seconds") if stamp else None
    own = np.mean([c["inference_ms"][1] for c in cells])
    batches = cells[0]["test_images"] / preset.finetune.batch_size
    return Line(
        target=target,
        row=row,
        accuracies=tuple(c["accuracy"] for c in cells),
        params=_mean(cells, "params"),
        macs=1 / _mean(cells, "macs"),
        search=search,
        finetune=finetune,
        inference=float(own * batches / 1e3),
        train_speedup=_speedup(cells, "train_step_ms"),
        inference_speedup=_speedup(cells, "inference_ms"),
        dollars=both / 3600 * dollars_per_hour,
        against_stamp=both / ours if ours else None,
        printed=PAPER.get((preset.net, target), {}).get(row),
    )


def _mean(cells: Sequence[Found], name: str) -> float:
    return float(np.mean([cell[name] for cell in cells]))


def _speedup(cells: Sequence[Found], name: str) -> float:
    return float(np.median([cell[name][0] / cell[name][1] for cell in cells]))


HEADERS = (
    "method", "accuracy, %", "paper", "P, %", "paper", "MACs", "paper", "search + fine-tuning",
    "of STAMP's", "paper", "inference", "speed-up of training", "of inference", "paper", "expense",
)  # fmt: skip


def markdown(record: Mapping[str, Any], dollars_per_hour: float) -> str:
    """A table a target, what the paper prints beside what was measured."""
    found = lines(record, dollars_per_hour)
    parts = []
    for target in dict.fromkeys(line.target for line in found):
        rows = [_shown(line) for line in found if line.target == target]
        parts.append(f"**{target}**\n\n{markdown_table(HEADERS, rows)}\n")
    return "\n".join(parts)


def _shown(line: Line) -> list[str]:
    accuracy = params = macs = hours = faster = "-"
    if (printed := line.printed) is not None:
        full, stamp = (_beside(line, name) for name in ("Full", "STAMP"))
        accuracy = f"{printed.accuracy:.2f} ± {printed.deviation:.2f}"
        params, macs = f"{printed.params:.2f}", f"x{printed.macs:.2f}"
        hours = f"x{printed.hours / stamp.hours:.2f}"
        faster = f"x{full.seconds / printed.seconds:.2f}"
    ratio = "-" if line.against_stamp is None else f"x{line.against_stamp:.2f}"
    return [
        line.row, line.accuracy, accuracy, f"{100 * line.params:.2f}", params, f"x{line.macs:.2f}",
        macs, f"{seconds(line.search)} + {seconds(line.finetune)}", ratio, hours,
        seconds(line.inference), f"x{line.train_speedup:.2f}", f"x{line.inference_speedup:.2f}",
        faster, f"{line.dollars:.4f} $",
    ]  # fmt: skip


def _beside(line: Line, row: str) -> Printed:
    """What the paper prints for another row of the same table."""
    return next(rows[row] for rows in PAPER.values() if line.printed in rows.values())


_COLUMNS = (
    "target", "method", "accuracy_mean", "accuracy_std", "seeds", "params_share", "macs_times",
    "search_seconds", "finetune_seconds", "training_of_stamps", "inference_seconds",
    "train_speedup", "inference_speedup", "dollars", "paper_accuracy", "paper_params_share",
    "paper_macs_times", "paper_training_hours",
)  # fmt: skip


def as_csv(record: Mapping[str, Any], dollars_per_hour: float) -> str:
    """The same for a spreadsheet: numbers in plain units, shares in [0, 1]."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for x in lines(record, dollars_per_hour):
        paper: Sequence[Any] = ("",) * 4
        if x.printed is not None:
            p = x.printed
            paper = p.accuracy / 100, p.params / 100, p.macs, p.hours
        values = np.array(x.accuracies)
        writer.writerow([
            x.target, x.row, values.mean(), values.std(), len(values), x.params, x.macs, x.search,
            x.finetune, x.against_stamp, x.inference, x.train_speedup, x.inference_speedup,
            x.dollars, *paper,
        ])  # fmt: skip
    return out.getvalue()


def latex(record: Mapping[str, Any], dollars_per_hour: float) -> str:
    """The columns of the paper's table as a LaTeX ``tabular``."""
    rows = []
    kind, target = "", ""
    for x in lines(record, dollars_per_hour):
        if target != x.target:
            rows.append(r"\hline")
        elif kind != ROWS[x.row].kind:
            rows.append(r"\cline{2-8}")
        kind = ROWS[x.row].kind
        shown = x.target.replace("_", r"\_") if target != x.target else ""
        target = x.target
        both = seconds(x.search + x.finetune)
        rows.append(
            " & ".join([
                shown, x.row, f"${x.accuracy}$".replace("±", r"\pm"), f"{100 * x.params:.2f}",
                rf"$\times${x.macs:.2f}", both, seconds(x.inference), rf"{x.dollars:.4f} \$",
            ]) + r" \\"
        )  # fmt: skip
    head = r"Data set & Method & Accuracy (\%) & P (\%) & MACs & Training & Inference & Expense \\"
    return "\n".join(
        [r"\begin{tabular}{llrrrrrr}", r"\hline", head, *rows, r"\hline", r"\end{tabular}", ""]
    )
