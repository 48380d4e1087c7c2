"""The paper's pictures from the record of a benchmark, as SVG files.

Rows differ in marker and dashes as well as in colour (Okabe and Ito's palette), so that neither
colour vision nor a colour printer is needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from stamppruner.bench.cells import Cell
from stamppruner.bench.grid import share_of, table_cells
from stamppruner.bench.presets import Preset
from stamppruner.bench.rows import ROWS
from stamppruner.files import PathLike, atomic_write, check_folder
from stamppruner.optional import require

Found = Mapping[str, Any]

_COLOURS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
_OF_ROWS = {
    "Full": "#000000", "Full, from scratch": "#777777", "SNIP": "#0072B2", "SNIP (P)": "#56B4E9",
    "BBDropout": "#009E73", "STAMP": "#D55E00", "STAMP-Structure": "#E69F00",
    "MetaPruning": "#CC79A7",
}  # fmt: skip
_OTHER = "#8a6d3b"
_MARKERS = "oDsv^P*Xd<>"
_DASHES = ("-", "--", "-.", ":")
_REMEDY = 'pip install "stamppruner[plots]"'


class Figures:
    """Pictures of one record.

    Args:
        record: of :class:`~stamppruner.bench.Bench`.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self._plt = require("matplotlib.figure", "drawing pictures", _REMEDY)
        self._ticker = require("matplotlib.ticker", "drawing pictures", _REMEDY)
        self.preset = Preset.from_json(record["preset"])
        self.cells = {Cell.of(found): found for found in record["cells"]}
        self.target = self.preset.targets[0]
        self.table = {
            cell: self.cells[cell]
            for cell in table_cells(self.preset, list(ROWS))
            if cell in self.cells
        }

    def save(self, folder: PathLike) -> list[Path]:
        """Write those that the cells suffice for; returns their paths."""
        base = check_folder(folder, [])
        drawn = {
            **{f"accuracy-params-{t}": self.over_params(t) for t in self.preset.targets},
            **{f"accuracy-time-{t}": self.over_time(t) for t in self.preset.targets},
            "images": self.over_images(),
            "k-and-kl": self.k_and_kl(),
            "kept-channels": self.kept_channels(),
        }
        paths = []
        for name, figure in drawn.items():
            if figure is not None:
                path = base / f"{name}.svg"
                with _lean_svg():
                    atomic_write(
                        path, partial(figure.savefig, format="svg", metadata={"Date": None})
                    )
                paths.append(path)
        return paths

    def over_params(self, target: str) -> Any:
        """Accuracy over the share of parameters left, every row, and lines of those swept."""
        rows = self._rows(target)
        if not rows:
            return None
        figure, axes = self._axes(
            "parameters left, %", f"accuracy on {target}, %", title="Accuracy over parameters"
        )
        axes.set_xscale("log")
        for name, cells in rows.items():
            x = 100 * np.mean([c["params"] for c in cells])
            y = 100 * np.array([c["accuracy"] for c in cells])
            axes.errorbar(x, y.mean(), y.std(), label=name, zorder=3, **_style(name, line=False))
            swept = self._swept(name, target)
            if len(swept) > 1:
                points = sorted((100 * c["params"], 100 * c["accuracy"]) for c in swept)
                axes.plot(*zip(*points, strict=True), **_style(name, small=True))
        self._plain(axes.xaxis)
        return _with_legend(figure, axes)

    def over_time(self, target: str) -> Any:
        """Accuracy over wall-clock seconds of search and fine-tuning, the first seed."""
        rows = self._rows(target)
        if not rows:
            return None
        figure, axes = self._axes(
            "seconds of search and fine-tuning",
            f"accuracy on {target}, %",
            title="Accuracy over training time",
        )
        for name, cells in rows.items():
            x, y = np.array(cells[0]["curve"]).T
            axes.plot(x, 100 * y, label=name, **_style(name, small=True))
        axes.set_xscale("log")
        self._plain(axes.xaxis)
        return _with_legend(figure, axes)

    def over_images(self) -> Any:
        """Training time and accuracy over the number of training images."""
        sized = self._by_size()
        if not any(len(cells) > 1 for cells in sized.values()):
            return None
        figure = self._plt.Figure(figsize=(9.6, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        for name, cells in sized.items():
            x = [c["images"] for c in cells]
            spent = [c["search_seconds"] + c["finetune_seconds"] for c in cells]
            left.plot(x, spent, label=name, **_style(name))
            right.plot(x, [100 * c["accuracy"] for c in cells], **_style(name))
        for axes, what in ((left, "training time, s"), (right, f"accuracy on {self.target}, %")):
            axes.set_xscale("log")
            axes.set_xlabel("training images")
            axes.set_title(what, loc="left", fontsize=10)
            _tidy(axes)
            sizes = sorted({c["images"] for cells in sized.values() for c in cells})
            axes.set_xticks(sizes, [f"{n:,}" for n in sizes], minor=False)
            axes.xaxis.set_minor_locator(self._ticker.NullLocator())
        left.set_yscale("log")
        self._plain(left.yaxis)
        left.legend(frameon=False)
        return figure

    def k_and_kl(self) -> Any:
        """What K and the scale of the KL term make of STAMP without a budget."""
        preset = self.preset
        found = {
            (c.prune_epochs, c.kl_scale): v
            for c, v in self.cells.items()
            if c.prune_epochs is not None
        }
        if not found:
            return None
        figure, axes = self._axes(
            "parameters left, %",
            f"accuracy on {self.target}, %",
            title="STAMP without a budget: K epochs of gate learning, scale of the KL term",
        )
        for i, epochs in enumerate(preset.prune_epochs):
            points = [
                (100 * v["params"], 100 * v["accuracy"], scale, v)
                for scale in preset.kl_scales
                if (v := found.get((epochs, scale)))
            ]
            if not points:
                continue
            x, y = [p[0] for p in points], [p[1] for p in points]
            axes.plot(
                x, y, label=f"K = {epochs:g}", marker=_MARKERS[i], markersize=8,
                color=_COLOURS[i % len(_COLOURS)], linestyle=_DASHES[i % len(_DASHES)],
            )  # fmt: skip
            for px, py, scale, v in points:
                spent = v["search_seconds"] + v["finetune_seconds"]
                axes.annotate(
                    f"kl {scale:g}, x{1 / v['macs']:.1f}, {spent:.0f} s", (px, py),
                    textcoords="offset points", xytext=(6, 7), fontsize=8,
                )  # fmt: skip
        axes.margins(x=0.25, y=0.15)
        return _with_legend(figure, axes)

    def kept_channels(self) -> Any:
        """Indices of the channels that STAMP keeps in every group, for two targets."""
        seed = self.preset.seeds[0]
        kept = [
            (cell.target, found["kept"])
            for cell, found in self.table.items()
            if cell.row == "STAMP" and cell.seed == seed and found["kept"]
        ][:2]
        if len(kept) < 2:
            return None
        (one, first), (other, second) = kept
        names = list(first)
        figure = self._plt.Figure(figsize=(9.6, 0.6 + 0.3 * len(names)), layout="constrained")
        axes = figure.subplots()
        for i, name in enumerate(names):
            a, b = set(first[name]), set(second.get(name, []))
            for where, at, colour in ((a, i - 0.17, _COLOURS[1]), (b, i + 0.17, _COLOURS[0])):
                axes.vlines(
                    sorted(where), at - 0.15, at + 0.15, colors=colour, linewidth=0.9,
                    label=None if i else (one if where is a else other),
                )  # fmt: skip
        axes.set_yticks(range(len(names)), names, fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("index of the kept channel in its group")
        shared = [len(set(first[n]) & set(second[n])) / len(set(first[n]) | set(second[n]))
                  for n in names]  # fmt: skip
        axes.set_title(
            f"Channels kept for {one} (upper marks) and {other} (lower); "
            f"mean overlap (IoU) of a group {np.mean(shared):.2f}",
            loc="left", fontsize=10,
        )  # fmt: skip
        _tidy(axes)
        axes.grid(visible=False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
        return figure

    def _rows(self, target: str) -> dict[str, list[Found]]:
        rows: dict[str, list[Found]] = {}
        for cell, found in self.table.items():
            if cell.target == target:
                rows.setdefault(cell.row, []).append(found)
        return {name: rows[name] for name in ROWS if name in rows}

    def _swept(self, name: str, target: str) -> list[Found]:
        """Cells of one seed and the table's number of images, at all shares."""
        return [
            found
            for cell, found in self.cells.items()
            if (cell.row, cell.target) == (name, target)
            and cell.seed == self.preset.seeds[0]
            and cell.images == self.preset.images
            and cell.share is not None
        ]

    def _by_size(self) -> dict[str, list[Found]]:
        sized: dict[str, list[Found]] = {}
        sizes = {*self.preset.sizes, self.preset.images} - {None}
        for cell, found in self.cells.items():
            row = ROWS[cell.row]
            if (
                cell.target == self.target
                and cell.seed == self.preset.seeds[0]
                and cell.images in sizes
                and cell.share == share_of(row, self.preset)
                and (row.swept or row.name == "Full")
            ):
                sized.setdefault(cell.row, []).append(found)
        return {n: sorted(sized[n], key=lambda c: c["images"]) for n in ROWS if n in sized}

    def _axes(self, x: str, y: str, *, title: str) -> tuple[Any, Any]:
        figure = self._plt.Figure(figsize=(8.4, 4.6), layout="constrained")
        axes = figure.subplots()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.set_title(title, loc="left", fontsize=11)
        _tidy(axes)
        return figure, axes

    def _plain(self, axis: Any) -> None:
        """Round numbers on a logarithmic axis."""
        axis.set_major_locator(self._ticker.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(self._ticker.FuncFormatter(lambda v, _: f"{v:g}"))
        axis.set_minor_formatter(self._ticker.NullFormatter())


def _style(name: str, *, line: bool = True, small: bool = False) -> dict[str, Any]:
    number = list(ROWS).index(name)
    return {
        "color": _OF_ROWS.get(name, _OTHER),
        "marker": _MARKERS[number % len(_MARKERS)],
        "markersize": 4 if small else 8,
        "linestyle": _DASHES[number % len(_DASHES)] if line else "none",
        "linewidth": 1.4,
    }


def _tidy(axes: Any) -> None:
    axes.grid(color="#d8dee4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _with_legend(figure: Any, axes: Any) -> Any:
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


@contextmanager
def _lean_svg() -> Iterator[None]:
    """The same figure gives the same bytes; texts stay texts."""
    matplotlib = require("matplotlib", "drawing pictures", _REMEDY)
    with matplotlib.rc_context({"svg.hashsalt": "stamppruner", "svg.fonttype": "none"}):
        yield
