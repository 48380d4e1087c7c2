from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from stripes import SIZE, resnet, stripes, vgg

import stamppruner
from stamppruner import STAMPConfig, STAMPPruner, describe, load_slim
from stamppruner import demo as demos
from stamppruner.cli import main
from stamppruner.data import digits
from stamppruner.demo import DemoConfig

FILES = {"slim.safetensors", "report.html", "kept_channels.svg", "demo.json"}


def tiny(**changes: Any) -> DemoConfig:
    small = {
        "classes": 12,
        "per_class": 16,
        "backbone_epochs": 1,
        "iterations": 1,
        "train_per_class": 6,
        "finetune_epochs": 1,
        "size": 16,
    }
    return DemoConfig(**(small | changes))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DemoConfig, "fast", staticmethod(tiny))

    def few(*args: Any, **settings: Any) -> Any:
        train, test = digits(*args, **settings)
        return train, test.subset(range(60))

    monkeypatch.setattr(demos, "digits", few)


@pytest.mark.usefixtures("small")
def test_the_demo_writes_four_files_and_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arch = "resnet"
    out = tmp_path / "new" / "folder"
    assert main(["demo", "--fast", "--arch", arch, "--seed", "3", "--out", str(out)]) == 0
    assert {path.name for path in out.iterdir()} == FILES
    found = json.loads((out / "demo.json").read_text())
    assert found["reloaded_equal"] is True
    assert (found["config"]["arch"], found["config"]["seed"]) == (arch, 3)
    rows = {row["method"]: row for row in found["rows"]}
    assert {"STAMP", "full network", "L1 magnitude", "random"} <= rows.keys()
    full = rows["full network"]
    for name, row in rows.items():
        assert 0 <= row["accuracy"] <= 1
        if name != "full network":
            assert row["macs"] <= found["config"]["macs"] * full["macs"]
            assert row["params"] < full["params"]
    record = describe(out / "slim.safetensors")
    assert record["budget"] == {"macs": found["config"]["macs"]}
    assert "<svg" in (out / "kept_channels.svg").read_text()
    assert "STAMP" in (out / "report.html").read_text()
    shown = capsys.readouterr()
    for text in ("1/5", "5/5", "STAMP", "exactly the outputs", str(out)):
        assert text in shown.out
    assert shown.err == ""


@pytest.mark.usefixtures("small")
def test_quiet_prints_the_table_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--fast", "--arch", "vgg", "--quiet", "--out", str(tmp_path)]) == 0
    shown = capfd.readouterr()
    lines = shown.out.strip().splitlines()
    assert lines[0].split()[0] == "method"
    assert len(lines) == 1 + len(json.loads((tmp_path / "demo.json").read_text())["rows"])
    assert shown.err == ""


def test_an_error_of_ours_is_one_line_and_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    assert main(["demo", "--fast", "--out", str(tmp_path / "file")]) == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("stamppruner: CheckpointError: ")
    assert shown.err.count("\n") == 1
    assert (tmp_path / "file").read_text() == "in the way"


def test_a_negative_seed_is_an_error_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--fast", "--seed", "-1", "--out", str(tmp_path)]) == 1
    assert "seed" in capsys.readouterr().err


def test_interruption_gives_130(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_args: Any, **_settings: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demos, "run_demo", interrupted)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["demo", "--arch", "lenet"], ["demo", "--seed", "x"]]
)
def test_bad_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert "usage: stamppruner" in capsys.readouterr().err


def test_other_errors_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: Any, **_settings: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(demos, "run_demo", broken)
    with pytest.raises(ZeroDivisionError):
        main(["demo"])


def test_help_as_a_module() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "stamppruner", "demo", "--help"],
        env={**os.environ, "PYTHONPATH": str(Path(stamppruner.__file__).parents[1])},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0
    for option in ("--seed", "--out", "--fast", "--arch", "--quiet", "example:"):
        assert option in run.stdout


def write_images(folder: Path, classes: int = 3, per_class: int = 6) -> Path:
    """Stripes as files, a folder a class."""
    images, labels = stripes(per_class, classes)
    pixels = (images.clamp(0, 1) * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()
    for number, (image, label) in enumerate(zip(pixels, labels.tolist(), strict=True)):
        path = folder / f"class{label}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ascontiguousarray(image)).resize((20, 20)).save(path)
    return folder


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a pruner and images."""
    folder = tmp_path_factory.mktemp("job")
    config = STAMPConfig(measure_latency=False)
    STAMPPruner(resnet(), torch.zeros(1, 3, SIZE, SIZE), config=config).save(
        folder / "r.stamp.safetensors"
    )
    write_images(folder / "train")
    write_images(folder / "test", per_class=3)
    write_images(folder / "two", classes=2)
    return folder


def pareto(job: Path, folder: Path, *more: str, **changes: str) -> list[str]:
    """Arguments of the command."""
    options = {"model": "resnet18", "data": str(job / "train"), "out": str(folder)} | changes
    listed = [text for name, value in options.items() for text in (f"--{name}", value)]
    return ["pareto", str(job / "r.stamp.safetensors"), *listed, "--macs", "0.6", "0.3", *more]


def test_pareto_writes_networks_record_and_page(
    job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ["--test", str(job / "test"), "--finetune", "1"]
    assert main(pareto(job, tmp_path / "out", *more)) == 0
    shown = capfd.readouterr()
    record = json.loads((tmp_path / "out" / "pareto.json").read_text())
    files = [point["file"] for point in record["points"]]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *files,
        "pareto.json",
        "pareto.html",
    }
    for share, file in zip((0.6, 0.3), files, strict=True):
        assert describe(tmp_path / "out" / file)["budget"] == {"macs": share}
        assert load_slim(tmp_path / "out" / file, resnet(3))(torch.zeros(1, 3, 8, 8)).shape == (
            1,
            3,
        )
    assert all("accuracy_after_finetune" in point["metrics"] for point in record["points"])
    assert len(shown.out.splitlines()) == 4
    assert "full network" in shown.out
    assert "warning: not meta-fitted" in shown.err
    assert "UserWarning" not in shown.err
    assert f"wrote 2 networks, pareto.html and pareto.json to {tmp_path / 'out'}" in shown.err


def test_pareto_as_json_alone(job: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(pareto(job, tmp_path, "--json", "--quiet")) == 0
    shown = capfd.readouterr()
    assert json.loads(shown.out) == json.loads((tmp_path / "pareto.json").read_text())
    assert shown.err == ""


def test_pareto_normalises_as_told(job: Path, tmp_path: Path) -> None:
    said = ["--mean", "0", "0", "0", "--std", "0.5", "0.5", "0.5"]
    kept = []
    for name, more in (("a", []), ("b", said)):
        assert main(pareto(job, tmp_path / name, "--quiet", *more)) == 0
        kept.append((tmp_path / name / "slim-1-macs-0.6.safetensors").read_bytes())
    assert kept[0] != kept[1]


@pytest.mark.parametrize(
    ("changes", "more", "kind", "named"),
    [
        ({"data": "nowhere"}, [], "DataError", "nowhere: no such folder"),
        ({"model": "vgg19"}, [], "CheckpointError", "no VGG"),
        ({"model": "lenet"}, [], "ConfigError", "choose vgg19, resnet18"),
        ({"model": "os:system"}, [], "ConfigError", "choose vgg19, resnet18"),
        ({"model": "torchvision:resnet18"}, [], "CheckpointError", "is not of this torchvision"),
        ({"model-args": '{"width": 0.5}'}, [], "CheckpointError", "--model-args"),
        ({"model-args": '{"colour": 1}'}, [], "ConfigError", "colour"),
        ({}, ["--macs", "0.5", "0.5"], "BudgetError", "given twice"),
        ({}, ["--macs", "0.5", "7"], "BudgetError", "7.0 is no share"),
        ({}, ["--macs", "0.0001"], "BudgetError", "cannot be met"),
        ({}, ["--finetune", "-1"], "ConfigError", "epochs"),
        ({"test": "two"}, [], "DataError", "same sub-folders"),
        ({"out": "r.stamp.safetensors"}, [], "CheckpointError", "choose another"),
    ],
)
def test_errors_of_pareto_are_one_line(
    job: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    more: list[str],
    kind: str,
    named: str,
) -> None:
    monkeypatch.chdir(job)
    assert main(pareto(job, tmp_path, "--quiet", *more, **changes)) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"stamppruner: {kind}: ")
    assert shown.err.count("\n") == 1
    assert len(shown.err) < 600
    assert named in shown.err
    assert list(tmp_path.iterdir()) == []


def test_pruners_for_other_images_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    STAMPPruner(vgg(channels=1), torch.zeros(1, 1, 8, 8)).save(tmp_path / "r.stamp.safetensors")
    assert main(pareto(tmp_path, tmp_path / "out", model="vgg19")) == 1
    assert "(1, 8, 8), folders are read as RGB squares" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["pareto"], "required: PRUNER"),
        (["pareto", "p", "--macs", "x"], "invalid float"),
        (["pareto", "p", "--model-args", "{"], "is no JSON"),
        (["pareto", "p", "--model-args", "[1]"], "is no JSON object"),
    ],
)
def test_bad_usage_of_pareto(
    argv: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2
    assert named in capsys.readouterr().err


def test_help_of_pareto_fits_a_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        main(["pareto", "--help"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "example: stamppruner pareto backbone.stamp.safetensors --data" in text
