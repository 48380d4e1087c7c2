"""Logs on disk: one row an iteration, whatever happens in between."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import pytest
import runs
import torch
from test_checkpoints import Stop, stopping

from stamppruner.errors import CheckpointError
from stamppruner.history import History
from stamppruner.logs import FILE, RunLog
from stamppruner.randomness import deterministic_algorithms


def rows(folder: Path) -> list[dict[str, str]]:
    with open(folder / FILE, newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


@pytest.mark.usefixtures("no_board")
def test_a_row_an_iteration_also_after_a_resume(tmp_path: Path) -> None:
    logs, points = tmp_path / "logs", tmp_path / "points"
    with pytest.raises(Stop):
        runs.fitted(checkpoint_dir=points, checkpoint_minutes=0, log_dir=logs, callback=stopping(3))
    first = rows(logs)
    assert [row["iteration"] for row in first] == ["0", "1", "2", "3"]  # the last comes again
    with open(logs / FILE, "a") as file:
        file.write("4,1.5")  # killed in the middle of a line
    pruner = runs.fitted(checkpoint_dir=points, log_dir=logs)
    found = rows(logs)
    assert [row["iteration"] for row in found] == list("012345")
    assert found[:3] == first[:3]  # times as well
    for row, figures in zip(found, pruner.history, strict=True):
        assert {name: float(row[name]) for name in figures} == figures
        assert float(row["seconds"]) > 0
        assert float(row["images_per_second"]) > 0


@pytest.mark.usefixtures("no_board")
def test_a_new_folder_gets_the_rows_that_there_are(tmp_path: Path) -> None:
    history = History([{"iteration": 0, "loss": 1.5}, {"iteration": 1, "loss": 1.25}])
    RunLog(tmp_path, history).add({"iteration": 2, "loss": 1.0}, 2.0, 100)
    assert [(r["loss"], r["images_per_second"]) for r in rows(tmp_path)] == [
        ("1.5", ""), ("1.25", ""), ("1.0", "50.0"),
    ]  # fmt: skip


@pytest.mark.usefixtures("no_board")
def test_what_is_no_log_is_written_anew(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"\xff\xfe nothing")
    RunLog(tmp_path, History()).add({"iteration": 0, "loss": 1.0}, 1.0, 1)
    assert [row["iteration"] for row in rows(tmp_path)] == ["0"]


def test_folders_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot make the folder"):
        runs.fitted(log_dir=tmp_path / "file" / "logs")


def test_tensorboard_where_it_is_installed(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = RunLog(tmp_path, History())
    for i in range(3):
        log.add({"iteration": i, "loss": 2.0 - i}, 1.0, 10)
    log.close()

    def losses() -> list[float]:
        events = accumulator.EventAccumulator(str(tmp_path)).Reload()
        return [event.value for event in events.Scalars("meta-fit/loss")]

    assert losses() == [2.0, 1.0, 0.0]
    again = RunLog(tmp_path, History([{"iteration": 0, "loss": 2.0}]))  # from the first one on
    again.add({"iteration": 1, "loss": 0.5}, 1.0, 10)
    again.close()
    assert losses() == [2.0, 0.5]


@pytest.mark.parametrize("before", [False, True])
def test_deterministic_algorithms_are_for_the_call(before: bool) -> None:
    seen: list[bool] = []

    def callback(*_: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())

    torch.use_deterministic_algorithms(before, warn_only=before)
    try:
        with deterministic_algorithms(True):
            callback()
        with deterministic_algorithms(False):
            callback()
        assert seen == [True, before]
        assert torch.are_deterministic_algorithms_enabled() == before
        assert torch.is_deterministic_algorithms_warn_only_enabled() == before
    finally:
        torch.use_deterministic_algorithms(False)


def test_deterministic_runs() -> None:
    seen: list[bool] = []

    def callback(i: int, _: Any) -> None:
        seen.append(torch.are_deterministic_algorithms_enabled())
        if i == 1:
            raise Stop

    with pytest.raises(Stop):
        runs.fitted(deterministic=True, callback=callback)
    assert seen == [True, True]
    assert not torch.are_deterministic_algorithms_enabled()
