"""Presets say what runs, and travel as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from stamppruner.bench import PRESETS, Preset, Training, find_preset
from stamppruner.bench.rows import ROWS, rows_of
from stamppruner.bench.sources import KNOWN
from stamppruner.errors import ConfigError


@pytest.mark.parametrize("name", PRESETS)
def test_presets_name_what_there_is_and_travel_as_json(name: str) -> None:
    preset = PRESETS[name]
    assert preset.name == name
    assert name.startswith(preset.net)
    assert {preset.reference, *preset.targets} <= set(KNOWN)
    assert Preset.from_json(json.loads(json.dumps(preset.to_json()))) == preset
    assert set(preset.rates) <= set(ROWS)


def test_those_of_the_paper_have_its_settings() -> None:
    for name in ("vgg19-cifar10", "vgg19-svhn", "resnet18-cifar10", "resnet18-svhn"):
        preset = PRESETS[name]
        assert (preset.width, preset.images, preset.seeds) == (1.0, None, (0, 1, 2))
        assert preset.backbone.epochs == 200
        assert preset.finetune.batch_size == 128
        assert preset.finetune.epochs == (20 if name == "resnet18-svhn" else 200)
        paper = preset.stamp_paper_config()
        assert paper.ways * paper.shots == (500 if preset.net == "resnet18" else 640)
        assert paper.iterations == (3000 if preset.net == "resnet18" else 2000)
        assert preset.skip_1x1 == (preset.net == "resnet18")


def test_a_file_holds_a_preset(tmp_path: Path) -> None:
    own = dataclasses.replace(PRESETS["vgg19-small"], name="own", seeds=(7,))
    path = tmp_path / "own.json"
    path.write_text(json.dumps(own.to_json()))
    assert find_preset(path) == own
    assert find_preset("vgg19-small") is PRESETS["vgg19-small"]


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"colour": 1}', '{"name": "a"}'])
def test_a_file_that_holds_none_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "own.json"
    path.write_text(content)
    with pytest.raises(ConfigError):
        find_preset(path)
    with pytest.raises(ConfigError, match=r"no preset 'vgg20'.*vgg19-small"):
        find_preset("vgg20")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_preset(tmp_path / "missing.json")


@pytest.mark.parametrize(
    "change",
    [
        {"net": "vgg11"},
        {"targets": ()},
        {"seeds": ()},
        {"macs": 0.0},
        {"weights": 1.5},
        {"budgets": (0.5, 0.0)},
        {"width": 0.0},
        {"images": 0},
        {"sizes": (0,)},
        {"config": {"iterations": 0}},
        {"config": {"colour": 1}},
        {"paper_config": {"shots": -1}},
    ],
)
def test_values_out_of_range_are_refused(change: dict) -> None:
    with pytest.raises(ConfigError):
        dataclasses.replace(PRESETS["vgg19-small"], **change)


def test_training_needs_something_to_do() -> None:
    for values in ((0, 0.1, 8), (1, 0.0, 8), (1, 0.1, 0)):
        with pytest.raises(ConfigError, match="at least 1"):
            Training(*values)


def test_the_row_of_the_papers_settings_can_be_left_out() -> None:
    without = dataclasses.replace(PRESETS["vgg19-small"], paper_config=None)
    assert set(rows_of(PRESETS["vgg19-small"])) - set(rows_of(without)) == {
        "STAMP, paper's settings"
    }


def test_methods_that_the_paper_does_not_have_run_on_request_alone() -> None:
    extra = set(ROWS) - set(rows_of(PRESETS["vgg19-small"]))
    assert extra == {"Magnitude", "FPGM", "LAMP", "BNScale", "Hessian", "Taylor"}
