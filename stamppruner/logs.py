"""Figures of a run on disk: a CSV file, and TensorBoard's where that is installed."""

from __future__ import annotations

import csv
import io as text_io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stamppruner.files import PathLike, atomic_write, check_folder
from stamppruner.history import History

logger = logging.getLogger(__name__)

FILE = "meta-fit.csv"
_TIMES = ("seconds", "images_per_second")


class RunLog:
    """One row an iteration, in ``meta-fit.csv`` and for TensorBoard.

    Args:
        directory: made if missing.
        history: rows that there are already. What the file says of their times is kept, what it
            says of later ones is not: those come again.

    Raises:
        CheckpointError: the folder cannot be written to.
    """

    def __init__(self, directory: PathLike, history: History) -> None:
        self.path = check_folder(directory, [FILE]) / FILE
        self._columns: list[str] = []
        self._board = _tensorboard(self.path.parent, len(history))
        times = {row["iteration"]: row for row in _read(self.path)}
        for row in history:
            self._columns = self._columns or [*row, *_TIMES]
            known = times.get(str(row["iteration"]), {})
            times[str(row["iteration"])] = {**_texts(row), **{k: known.get(k, "") for k in _TIMES}}
        kept = [times[str(row["iteration"])] for row in history]
        lines = [self._line(self._columns), *map(self._row, kept)] if kept else []
        atomic_write(self.path, "".join(lines).encode())

    def add(self, row: Mapping[str, float], seconds: float, images: int) -> None:
        """Write one row: all of it, or, if the process is killed, perhaps a part of a line."""
        times = {"seconds": round(seconds, 4), "images_per_second": round(images / seconds, 1)}
        lines = ""
        if not self._columns:
            self._columns = [*row, *_TIMES]
            lines = self._line(self._columns)
        with open(self.path, "a", newline="") as file:
            file.write(lines + self._row(_texts({**row, **times})))
        if self._board is not None:
            for name, value in {**row, **times}.items():
                if name != "iteration":
                    self._board.add_scalar(f"meta-fit/{name}", value, int(row["iteration"]))

    def close(self) -> None:
        """Let TensorBoard write what it holds."""
        if self._board is not None:
            self._board.close()

    def _row(self, texts: Mapping[str, str]) -> str:
        return self._line([texts.get(name, "") for name in self._columns])

    @staticmethod
    def _line(cells: list[str]) -> str:
        buffer = text_io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerow(cells)
        return buffer.getvalue()


def _texts(row: Mapping[str, float]) -> dict[str, str]:
    return {name: str(value) for name, value in row.items()}


def _read(path: Path) -> list[dict[str, str]]:
    """Rows of the file that are whole."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError):
        return []
    rows = list(csv.DictReader(text_io.StringIO(text)))
    return [row for row in rows if row.get("iteration") and None not in row.values()]


def _tensorboard(folder: Path, first: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("no TensorBoard files: pip install 'stamppruner[tensorboard]'")
        return None
    return SummaryWriter(str(folder), purge_step=first or None)
