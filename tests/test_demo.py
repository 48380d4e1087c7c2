from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stamppruner import demo as demos
from stamppruner.data import digits
from stamppruner.demo import DemoConfig, make_backbone, run_demo
from stamppruner.errors import CheckpointError, ConfigError, StampError
from stamppruner.models import VGG, ResNet


def test_without_a_folder_nothing_is_written_and_the_figures_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    train, test = digits(5, size=16)
    monkeypatch.setattr(demos, "digits", lambda *_a, **_k: (train, test.subset(range(60))))
    said: list[str] = []
    config = DemoConfig(
        classes=10,
        per_class=16,
        backbone_epochs=1,
        iterations=1,
        train_per_class=5,
        finetune_epochs=2,
        size=16,
        macs=0.4,
    )
    demo = run_demo(None, config, say=said.append, progress=False)
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")
    assert [line[:3] for line in said] == ["1/5", "2/5", "3/5", "4/5"]
    assert [row.method for row in demo.rows][:2] == ["full network", "STAMP"]
    full, stamp = demo.rows[:2]
    assert demo.result.report.after["macs"] == stamp.macs <= 0.4 * full.macs
    assert sum(p.numel() for p in demo.result.model.parameters()) == stamp.params
    assert demo.result.model.classifier.out_features == 10
    assert len(demo.result.history) == 2
    assert {"data", "train_backbone", "meta_fit", "compare"} == demo.seconds.keys()
    table = demo.table().splitlines()
    assert len(table) == 1 + len(demo.rows)
    assert f"{100 * stamp.accuracy:.1f}%" in table[2]
    assert demo.to_json()["config"]["macs"] == 0.4


def test_wrong_input_fails_before_any_work(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="choose another"):
        run_demo(tmp_path / "file" / "folder", say=said.append)
    with pytest.raises(StampError, match="choose 'resnet' or 'vgg'"):
        run_demo(None, DemoConfig(arch="lenet"), say=said.append)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="iterations=0"):
        run_demo(None, DemoConfig(iterations=0), say=said.append)
    assert said == []


@pytest.mark.parametrize(("arch", "kind"), [("resnet", ResNet), ("vgg", VGG)])
def test_backbones_take_the_images(arch: Any, kind: type) -> None:
    model = make_backbone(arch, 7)
    assert type(model) is kind
    assert model(torch.zeros(2, 3, 24, 24)).shape == (2, 7)


def test_sizes_of_the_demo() -> None:
    fast, whole = DemoConfig.fast(seed=4), DemoConfig()
    assert fast.seed == 4
    for name in ("classes", "per_class", "backbone_epochs", "iterations", "finetune_epochs"):
        assert getattr(fast, name) < getattr(whole, name)
    with pytest.raises(TypeError, match="colour"):
        DemoConfig.fast(colour=1)


def test_the_short_demo_learns() -> None:
    demo = run_demo(None, DemoConfig.fast(), progress=False)
    accuracy = {row.method: row.accuracy for row in demo.rows}
    assert len(accuracy) >= 4
    assert all(x > 0.75 for x in accuracy.values()), accuracy
