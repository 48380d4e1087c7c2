"""Runs are kept, resumed, and make tables and pictures."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stamppruner
from stamppruner.bench import (
    PAPER,
    RECORD,
    ROWS,
    Bench,
    Cell,
    Figures,
    Preset,
    Sources,
    Training,
    as_csv,
    estimate,
    grid,
    latex,
    lines,
    markdown,
    read_record,
)
from stamppruner.bench import run as running
from stamppruner.bench.rows import rows_of
from stamppruner.cli import main
from stamppruner.errors import CheckpointError, ConfigError

TINY = Preset(
    name="tiny",
    net="resnet18",
    width=0.0625,
    reference="cifar100",
    targets=("cifar10", "svhn"),
    images=40,
    backbone=Training(1, 1e-3, 50),
    finetune=Training(1, 1e-3, 20),
    config={"iterations": 1, "ways": 4, "shots": 1, "minibatch_size": 4, "tasks_per_iteration": 1,
            "weight_steps": 1, "weight_batch": 4},
    paper_config={"iterations": 1, "ways": 4, "shots": 1, "minibatch_size": 4,
                  "tasks_per_iteration": 1},
    macs=0.4,
    weights=0.2,
    seeds=(0,),
    budgets=(0.6,),
    weight_shares=(0.5,),
    sizes=(20,),
    prune_epochs=(1,),
    kl_scales=(1, 15),
)  # fmt: skip
NOISE = Sources(stand_in=40)
ALL = rows_of(TINY)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    fast = pytest.MonkeyPatch()
    fast.setattr(running, "_MEASURED_SECONDS", 0.001)
    bench = Bench(TINY, tmp_path_factory.mktemp("bench"), NOISE, progress=False)
    bench.run()
    fast.undo()
    return bench


def test_every_cell_is_run_and_kept(done: Bench) -> None:
    record = json.loads((done.folder / RECORD).read_text())
    assert record == done.record == read_record(done.folder)
    assert [Cell.of(c) for c in record["cells"]] == grid(TINY, rows_of(TINY))
    assert set(record["reference"]) == {
        "backbone_seconds", "backbone_accuracy", "pruner_seconds", "paper_pruner_seconds",
    }  # fmt: skip
    for cell in record["cells"]:
        assert 0 <= cell["accuracy"] <= 1
        assert cell["search_seconds"] > 0
        assert (cell["finetune_seconds"] > 0) == ROWS[cell["row"]].finetuned
        assert len(cell["inference_ms"]) == len(cell["train_step_ms"]) == 2


def test_budgets_hold_and_unstructured_rows_keep_their_multiply_adds(done: Bench) -> None:
    for cell in done.record["cells"]:
        kind, share = ROWS[cell["row"]].kind, cell["share"]
        if kind == "full":
            assert (cell["params"], cell["macs"]) == (1.0, 1.0)
        elif kind == "unstructured":
            assert cell["macs"] == 1.0
            assert share - 0.02 < cell["params"] <= share
        elif share is not None:
            assert share - 0.2 < cell["macs"] <= share


def test_nothing_is_run_twice(done: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (done.folder / RECORD).read_bytes()
    monkeypatch.setattr(Bench, "_run", lambda *_: pytest.fail("a finished cell was run"))
    said: list[str] = []
    again = Bench(TINY, done.folder, NOISE, say=said.append, progress=False)
    again.run()
    assert again.record == done.record
    assert (done.folder / RECORD).read_bytes() == before
    assert said == ["{0} of {0} cells are done".format(len(done.cells))]


def test_an_interrupted_run_goes_on(done: Bench, tmp_path: Path) -> None:
    rows = ["Full", "STAMP"]
    count = 0

    def stop(line: str) -> None:
        nonlocal count
        count += "of the parameters" in line
        if count == 3:
            raise KeyboardInterrupt

    quick = dataclasses.replace(TINY, budgets=(), sizes=(), prune_epochs=())
    bench = Bench(quick, tmp_path, NOISE, rows=rows, say=stop, progress=False)
    with pytest.raises(KeyboardInterrupt):
        bench.run()
    kept = json.loads((tmp_path / RECORD).read_text())["cells"]
    assert len(kept) == 3
    weights = (tmp_path / "backbone.safetensors").read_bytes()
    bench = Bench(quick, tmp_path, NOISE, rows=rows, progress=False)
    bench.run()
    assert bench.record["cells"][:3] == kept
    assert [Cell.of(c) for c in bench.record["cells"]] == grid(quick, rows)
    assert (tmp_path / "backbone.safetensors").read_bytes() == weights


def test_the_folder_of_another_benchmark_is_refused(done: Bench, tmp_path: Path) -> None:
    other = dataclasses.replace(TINY, macs=0.3)
    with pytest.raises(CheckpointError, match=r"macs is 0\.4, not 0\.3.*another folder"):
        Bench(other, done.folder, NOISE)
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Bench(TINY, tmp_path, NOISE)
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_record(tmp_path)


def test_unknown_rows_and_data_sets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no row 'Best'.*STAMP"):
        Bench(TINY, tmp_path, NOISE, rows=["Best"])
    birds = dataclasses.replace(TINY, targets=("birds",))
    with pytest.raises(ConfigError, match="no data set 'birds'"):
        Bench(birds, tmp_path / "new", Sources())
    assert not (tmp_path / "new").exists()


def test_lines_are_means_of_the_cells(done: Bench) -> None:
    found = lines(done.record, dollars_per_hour=3.6)
    assert [(line.target, line.row) for line in found] == [
        (target, row) for target in TINY.targets for row in ALL
    ]
    cells = {(c["target"], c["row"]): c for c in reversed(done.record["cells"])}
    stamp = cells["cifar10", "STAMP"]
    for line in found[: len(ALL)]:
        cell = cells["cifar10", line.row]
        assert line.accuracies == (cell["accuracy"],)
        assert line.macs == pytest.approx(1 / cell["macs"])
        both = cell["search_seconds"] + cell["finetune_seconds"]
        assert line.dollars == pytest.approx(both / 1000)
        ours = stamp["search_seconds"] + stamp["finetune_seconds"]
        assert line.against_stamp == pytest.approx(both / ours)
        assert line.train_speedup == cell["train_step_ms"][0] / cell["train_step_ms"][1]
        assert line.printed is PAPER["resnet18", "cifar10"].get(line.row)
        assert line.inference == pytest.approx(
            cell["inference_ms"][1] * cell["test_images"] / TINY.finetune.batch_size / 1000
        )


def test_what_is_trained_on_the_reference_is_in_no_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Bench._pruner
    order: list[str] = []

    def noted(self: Bench, name: str, config: Any) -> Any:
        order.append(name)
        return trained(self, name, config)

    monkeypatch.setattr(Bench, "_pruner", noted)
    monkeypatch.setattr(Bench, "_run", lambda _self, cell: order.append(cell.row) or cell.to_json())
    quick = dataclasses.replace(TINY, budgets=(), sizes=(), prune_epochs=())
    rows = ["Full", "STAMP, paper's settings"]
    bench = Bench(quick, tmp_path, NOISE, rows=rows, progress=False)
    with pytest.raises(KeyError):  # of the line that would tell the accuracy
        bench.run()
    assert order == ["pruner", "paper_pruner", "Full"]


def test_several_seeds_are_averaged(done: Bench) -> None:
    record = json.loads(json.dumps(done.record))
    record["preset"]["seeds"] = [0, 1]
    more = [{**c, "seed": 1, "accuracy": c["accuracy"] + 0.1} for c in record["cells"]]
    record["cells"] += more
    line = lines(record, 1.0)[0]
    first, second = line.accuracies
    assert second == pytest.approx(first + 0.1)
    assert line.accuracy == f"{100 * (first + 0.05):.2f} ± 5.00"


def test_the_table_has_three_forms(done: Bench) -> None:
    text = markdown(done.record, 1.46)
    rows = [row for row in text.splitlines() if row.startswith("| ")]
    assert len(rows) == 2 * (1 + len(ALL))
    full = next(row for row in rows if "| Full |" in row)
    assert "| 94.37 ± 0.12 |" in full
    assert "| x1.89 |" in full  # 1.08 h of 0.57 h
    stamp = next(row for row in rows if "| STAMP |" in row)
    assert "| x1.89 |" in stamp  # 1.02 s over 0.54 s
    table = list(csv.DictReader(io.StringIO(as_csv(done.record, 1.46))))
    assert [row["method"] for row in table] == ALL * 2
    assert float(table[0]["macs_times"]) == 1.0
    assert float(table[0]["paper_accuracy"]) == pytest.approx(0.9437)
    tex = latex(done.record, 1.46)
    assert tex.count(r"\\") == len(ALL) * 2 + 1
    assert r"\begin{tabular}" in tex
    assert "svhn & Full" in tex
    assert "%" not in re.sub(r"\\%", "", tex)


def test_pictures_are_drawn_from_the_record(done: Bench, tmp_path: Path) -> None:
    paths = Figures(done.record).save(tmp_path)
    assert {path.name for path in paths} == {
        "accuracy-params-cifar10.svg", "accuracy-params-svhn.svg", "accuracy-time-cifar10.svg",
        "accuracy-time-svhn.svg", "images.svg", "k-and-kl.svg", "kept-channels.svg",
    }  # fmt: skip
    texts = {path.stem: path.read_text() for path in paths}
    for text in texts.values():
        ET.fromstring(text)
    for row in ALL:
        assert f">{row}<" in texts["accuracy-params-cifar10"]
    assert "kl 15" in texts["k-and-kl"]
    again = {p.stem: p.read_text() for p in Figures(done.record).save(tmp_path / "again")}
    assert again == texts


def test_pictures_without_cells_are_left_out(tmp_path: Path) -> None:
    record = {"preset": TINY.to_json(), "cells": []}
    assert Figures(record).save(tmp_path) == []


def test_overlap_in_the_picture_is_that_of_the_channels(done: Bench, tmp_path: Path) -> None:
    record = json.loads(json.dumps(done.record))
    for cell in record["cells"]:
        if cell["kept"]:
            cell["kept"] = {"a": [0, 1], "b": [2, 3]}
            if cell["target"] == "svhn":
                cell["kept"] = {"a": [0, 1], "b": [3, 4]}
    Figures(record).save(tmp_path)
    assert (
        f"(IoU) of a group {np.mean([1, 1 / 3]):.2f}"
        in (tmp_path / "kept-channels.svg").read_text()
    )


def test_a_cost_is_estimated_from_one_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_MEASURED_SECONDS", 0.001)
    long = dataclasses.replace(
        TINY, images=None, finetune=Training(30, 0.1, 20), backbone=Training(10, 0.1, 20)
    )
    found = estimate(long, Sources("/nowhere"), rows=["Full", "BBDropout", "STAMP"])
    assert set(found.steps) == {"backbone", "meta-fitting", "meta-fitting, paper's settings"}
    assert found.number == len(grid(long, ["Full", "BBDropout", "STAMP"]))
    assert found.cells > max(found.rows.values()) > 0
    assert found.hours == pytest.approx((sum(found.steps.values()) + found.cells) / 3600)
    assert "in all" in found.table(1.46)
    # thirty epochs of 50,000 images, from one of eighty
    one = dataclasses.replace(long, finetune=Training(15, 0.1, 20))
    half = estimate(one, Sources("/nowhere"), rows=["Full"])
    assert 0.2 < half.rows["Full"] / found.rows["Full"] < 0.9


def test_what_a_search_does_once_is_not_multiplied_by_epochs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(running, "_MEASURED_SECONDS", 0.001)
    run = Bench._run

    def slow(self: Bench, cell: Cell) -> dict[str, Any]:
        seconds = 10.0 + 2.0 * self.preset.finetune.epochs
        return run(self, cell) | {"search_seconds": seconds, "finetune_seconds": 0.0}

    monkeypatch.setattr(Bench, "_run", slow)
    long = dataclasses.replace(TINY, images=None, finetune=Training(30, 0.1, 20))
    found = estimate(long, Sources("/nowhere"), rows=["BBDropout", "STAMP"])
    assert found.rows["STAMP"] == pytest.approx(12.0)
    # 50,000 images, of which 40 stood in
    assert found.rows["BBDropout"] == pytest.approx((10.0 + 30 * 2.0) * 50_000 / 40)


@pytest.fixture
def preset_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.json"
    tiny = dataclasses.replace(
        TINY, reference="digits", targets=("digits",), budgets=(), weight_shares=(), sizes=(),
        prune_epochs=(),
    )  # fmt: skip
    path.write_text(json.dumps(tiny.to_json()))
    return path


def test_the_command_writes_tables_and_pictures(
    preset_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    command = ["bench", str(preset_file), "--rows", "Full", "STAMP", "--out", str(out)]
    assert main([*command, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == read_record(out)
    assert "0 of 2 cells are done" in printed.err
    names = {path.name for path in out.iterdir()}
    assert {RECORD, "table.md", "table.csv", "table.tex", "figures"} <= names
    assert main([*command, "--quiet", "--dollars-per-hour", "100"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    assert printed.out.strip() == (out / "table.md").read_text().strip()
    assert main([*command, "--seeds", "1"]) == 1
    assert "another preset: seeds is [0], not [1]" in capsys.readouterr().err


def test_the_command_shows_a_preset_to_edit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "vgg19-small", "--targets", "svhn", "--show"]) == 0
    found = Preset.from_json(json.loads(capsys.readouterr().out))
    assert found.targets == ("svhn",)
    assert main(["bench", "vgg20"]) == 1
    assert "no preset 'vgg20'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["bench", "vgg19-small", "--images", "birds"])


def test_a_killed_command_loses_the_cell_in_progress_alone(
    preset_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    rows = ["Full", "Full, from scratch", "STAMP"]
    command = [
        sys.executable, "-m", "stamppruner", "bench", str(preset_file), "--out", str(out),
        "--rows", *rows, "--quiet",
    ]  # fmt: skip
    place = {**os.environ, "PYTHONPATH": str(Path(stamppruner.__file__).parent.parent)}

    def cells() -> list[dict[str, Any]]:
        path = out / RECORD
        return json.loads(path.read_text())["cells"] if path.exists() else []

    with subprocess.Popen(command, env=place, stdout=subprocess.DEVNULL) as process:
        while not cells():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    first = cells()
    assert 1 <= len(first) < 3
    subprocess.run(command, env=place, stdout=subprocess.DEVNULL, check=True)
    assert cells()[: len(first)] == first
    assert [c["row"] for c in cells()] == rows
