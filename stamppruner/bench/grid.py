"""The grid of a benchmark: the cells of its table and of its pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from stamppruner.bench.cells import Cell
from stamppruner.bench.presets import Preset
from stamppruner.bench.rows import ROWS, Row


def share_of(row: Row, preset: Preset) -> float:
    """What the row keeps in the table."""
    return {"full": 1.0, "unstructured": preset.weights}.get(row.kind, preset.macs)


def table_cells(preset: Preset, rows: Sequence[str]) -> list[Cell]:
    """Those of the paper's table, seed by seed, so that an early look has every row."""
    return [
        Cell(name, target, seed, share_of(ROWS[name], preset), preset.images)
        for seed in preset.seeds
        for target in preset.targets
        for name in rows
    ]


def sweep_cells(preset: Preset, rows: Sequence[str]) -> Iterator[Cell]:
    """Those of the pictures: on the first target, with the first seed."""
    target, seed = preset.targets[0], preset.seeds[0]
    of = [ROWS[name] for name in rows]
    for row in (row for row in of if row.swept):
        shares = {"structured": preset.budgets, "unstructured": preset.weight_shares}
        for share in shares.get(row.kind, ()):
            yield Cell(row.name, target, seed, share, preset.images)
    for row in (row for row in of if row.swept or row.name == "Full"):
        for size in preset.sizes:
            yield Cell(row.name, target, seed, share_of(row, preset), size)
    if "STAMP" in rows:
        for epochs in preset.prune_epochs:
            for scale in preset.kl_scales:
                yield Cell("STAMP", target, seed, None, preset.images, epochs, scale)


def grid(preset: Preset, rows: Sequence[str]) -> list[Cell]:
    """All cells, each once."""
    return list(dict.fromkeys([*table_cells(preset, rows), *sweep_cells(preset, rows)]))
