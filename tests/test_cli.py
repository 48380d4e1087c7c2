from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stamppruner
from stamppruner import demo as demos
from stamppruner import describe
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
