"""The cells of a preset."""

from __future__ import annotations

import dataclasses

import pytest

from stamppruner.bench import PRESETS, ROWS, Cell, grid
from stamppruner.bench.grid import share_of, table_cells
from stamppruner.bench.rows import rows_of
from stamppruner.errors import CheckpointError

SMALL = PRESETS["vgg19-small"]
ALL = rows_of(SMALL)


def test_the_table_has_every_row_target_and_seed() -> None:
    cells = table_cells(SMALL, ALL)
    assert len(cells) == len(ALL) * len(SMALL.targets) * len(SMALL.seeds)
    assert {c.seed for c in cells[: len(ALL)]} == {SMALL.seeds[0]}
    assert {c.row: c.share for c in cells} == {
        name: {"full": 1.0, "structured": 0.27, "unstructured": 0.0417}[ROWS[name].kind]
        for name in ALL
    }


def test_the_grid_has_each_cell_once_with_those_of_the_table_first() -> None:
    cells = grid(SMALL, ALL)
    table = table_cells(SMALL, ALL)
    assert cells[: len(table)] == table
    assert len(set(cells)) == len(cells)
    sized = {c.images for c in cells if c.row == "Full"}
    assert sized == {SMALL.images, *SMALL.sizes}
    explored = {(c.prune_epochs, c.kl_scale) for c in cells if c.share is None}
    assert explored == {(k, kl) for k in SMALL.prune_epochs for kl in SMALL.kl_scales}
    shares = {c.share for c in cells if c.row == "SNIP"}
    assert shares == {SMALL.weights, *SMALL.weight_shares}


def test_a_sweep_over_a_size_of_the_table_adds_nothing() -> None:
    same = dataclasses.replace(
        SMALL, sizes=(SMALL.images,), budgets=(SMALL.macs,), weight_shares=(SMALL.weights,),
        prune_epochs=(),
    )  # fmt: skip
    assert grid(same, ALL) == table_cells(same, ALL)


def test_rows_that_are_not_asked_for_are_not_run() -> None:
    assert {c.row for c in grid(SMALL, ["Full", "STAMP"])} == {"Full", "STAMP"}
    assert not any(c.share is None for c in grid(SMALL, ["Full"]))


def test_cells_are_told_by_their_record() -> None:
    for cell in grid(SMALL, ALL):
        assert Cell.of({**cell.to_json(), "accuracy": 0.5}) == cell
        assert cell.row in str(cell)
        assert cell.target in str(cell)
    with pytest.raises(CheckpointError, match="target"):
        Cell.of({"row": "Full"})


def test_every_row_has_a_share() -> None:
    assert {name: share_of(row, SMALL) for name, row in ROWS.items() if row.kind == "full"} == {
        "Full": 1.0,
        "Full, from scratch": 1.0,
    }
