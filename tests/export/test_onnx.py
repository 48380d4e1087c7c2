"""What ONNX files have beyond the contract: int8, names, sizes, and what is asked of the user."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from samples import images, slim
from stripes import dataset, loader, stripes, vgg
from torch import nn

from stamppruner import Budget, ExportReport, export_onnx
from stamppruner.baselines import Magnitude
from stamppruner.errors import (
    ConfigError,
    DataError,
    ExportError,
    MissingExtraError,
)
from stamppruner.export import onnx as module
from stamppruner.export._int8 import NoiseCalibrationWarning

IMAGES, LABELS = stripes(8, seed=5)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    result = Magnitude().prune(vgg(), loader(), Budget(macs=0.5))
    result.finetune(loader(), epochs=4, progress=False)
    return result.model


@pytest.fixture(scope="module")
def int8(trained: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ExportReport]:
    path = tmp_path_factory.mktemp("int8") / "net.onnx"
    report = export_onnx(trained, path, images(1), int8=True, calibration=IMAGES)
    return path, report


def test_int8_files_classify_like_the_float_network(
    int8: tuple[Path, ExportReport], trained: nn.Module
) -> None:
    path, report = int8
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    logits = torch.from_numpy(session.run(None, {"images": IMAGES.numpy()})[0])
    with torch.no_grad():
        expected = trained.eval()(IMAGES)
    agreement = float((logits.argmax(1) == expected.argmax(1)).float().mean())
    q = report.quantization
    assert q is not None
    assert not q.noise
    assert q.images == len(IMAGES)
    assert q.agreement == pytest.approx(agreement, abs=0.03)
    assert agreement >= 0.9
    assert 1e-4 < q.max_relative_difference < 0.2
    assert report.max_relative_difference <= 1e-5  # of the float file
    assert report.size_bytes == path.stat().st_size
    assert "same class on" in str(report)


def test_int8_files_hold_bytes_in_place_of_floats(int8: tuple[Path, ExportReport]) -> None:
    weights = [w for w in onnx.load(int8[0]).graph.initializer if len(w.dims) == 4]
    assert len(weights) == 3
    assert {w.data_type for w in weights} == {onnx.TensorProto.INT8}


def test_int8_without_images_warns_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(NoiseCalibrationWarning, match="calibration=images"):
        report = export_onnx(nn.Conv2d(3, 2, 1), tmp_path / "net.onnx", images(1), int8=True)
    assert report.quantization is not None
    assert report.quantization.noise
    assert report.quantization.agreement is None  # its output is no logits
    assert "noise images" in str(report)


def test_names_and_opset_are_those_asked_for(trained: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    names: dict[str, Any] = {"input_names": ["pixels"], "output_names": ["scores"]}
    report = export_onnx(trained, path, images(1), opset=18, **names)
    made = onnx.load(path)
    onnx.checker.check_model(made, full_check=True)
    assert list(report.inputs) == ["pixels"] == [x.name for x in made.graph.input]
    assert [x.name for x in made.graph.output] == ["scores"]
    assert [x.version for x in made.opset_import if not x.domain] == [18]
    shapes = {w.name: tuple(w.dims) for w in made.graph.initializer}
    own = [tuple(m.weight.shape) for m in trained.modules() if isinstance(m, nn.Conv2d)]
    assert [s for s in shapes.values() if len(s) == 4] == own


# Refusals


def refused(
    kind: type[Exception], match: str, tmp_path: Path, model: Any = None, **how: Any
) -> None:
    with pytest.raises(kind, match=match):
        export_onnx(model or slim("plain"), tmp_path / "net.onnx", images(1), **how)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("package", ["onnx", "onnxscript", "onnxruntime"])
def test_what_is_not_installed_is_named_first(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"needs {package} .*stamppruner\[onnx\]"):
        export_onnx(slim("plain"), tmp_path / "missing" / "net.onnx", "no input")


@pytest.mark.parametrize(
    ("calibration", "match"),
    [
        (IMAGES[:0], r"calibration is \(0, 3, 8, 8\)"),
        (IMAGES[:, :2], r"calibration is \(48, 2, 8, 8\): .*\(3, 8, 8\)"),
        (dataset(), "calibration is TensorDataset"),
        ((IMAGES * 255).byte(), "calibration images are torch.uint8"),
        (IMAGES * float("nan"), "not finite"),
    ],
)
def test_calibration_images_that_do_not_fit(calibration: Any, match: str, tmp_path: Path) -> None:
    refused(DataError, match, tmp_path, int8=True, calibration=calibration)


def test_fewer_images_than_a_fixed_batch(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="3 calibration images make no batch of 4"):
        export_onnx(
            slim("plain"),
            tmp_path / "net.onnx",
            images(4),
            dynamic_batch=False,
            int8=True,
            calibration=IMAGES[:3],
        )
    assert list(tmp_path.iterdir()) == []


def test_settings_that_make_no_sense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(ConfigError, "int8=True", tmp_path, calibration=IMAGES)
    refused(ExportError, "opset 18, not 3: leave opset out", tmp_path, opset=3)
    refused(ExportError, "float64", tmp_path, slim("plain").double())
    refused(ExportError, "on meta", tmp_path, slim("plain").to("meta"))
    monkeypatch.setattr(module, "_LARGEST", 1000)
    refused(ExportError, "one ONNX file holds 1000: use export_program", tmp_path)
