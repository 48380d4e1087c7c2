"""Networks of torchvision, cut to half of their channels, in every format."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from nets import seeded
from safetensors.torch import load_file
from torch import nn
from torchvision import models

from stamppruner import (
    ChannelPlan,
    export_onnx,
    export_program,
    export_state_dict,
    recipe,
    shrink,
    trace_channels,
)

pytestmark = pytest.mark.slow

NAMES = [
    "resnet18",
    "mobilenet_v2",
    "efficientnet_b0",
    "densenet121",
    "shufflenet_v2_x0_5",
    "googlenet",
    "regnet_y_400mf",
]
IMAGE = torch.zeros(1, 3, 64, 64)


def make(name: str) -> nn.Module:
    more = {"aux_logits": False, "init_weights": False}
    settings: dict[str, Any] = more if name == "googlenet" else {}
    return seeded(lambda: models.get_model(name, weights=None, **settings))


def halved(model: nn.Module) -> nn.Module:
    """Half of the channels of every group are gone."""
    return shrink(model, ChannelPlan.random(trace_channels(model, IMAGE), keep=0.5, seed=0))


def shapes(path: Path) -> Counter[tuple[int, ...]]:
    """Of the kernels of convolutions."""
    found = onnx.load(path).graph.initializer
    return Counter(tuple(w.dims) for w in found if len(w.dims) == 4)


def bytes_of(model: nn.Module) -> int:
    return sum(x.numel() * x.element_size() for x in model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_half_of_it_in_every_format(name: str, tmp_path: Path) -> None:
    full = make(name)
    slim = halved(full)
    small = export_onnx(slim, tmp_path / "slim.onnx", IMAGE)
    large = export_onnx(full, tmp_path / "full.onnx", IMAGE)
    assert small.max_relative_difference <= 1e-4
    kernels = [m.weight for m in slim.modules() if isinstance(m, nn.Conv2d)]
    assert shapes(tmp_path / "slim.onnx") == Counter(tuple(w.shape) for w in kernels)
    saved = bytes_of(full) - bytes_of(slim)
    assert large.size_bytes - small.size_bytes == pytest.approx(saved, rel=0.1)
    images = torch.randn(8, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    tiny = export_onnx(slim, tmp_path / "int8.onnx", IMAGE, int8=True, calibration=images)
    assert tiny.size_bytes < 0.45 * small.size_bytes
    program = export_program(slim, tmp_path / "slim.pt2", IMAGE)
    assert program.max_relative_difference == 0
    export_state_dict(slim, tmp_path / "slim.safetensors")
    scope: dict[str, Any] = {"model": make(name)}
    exec(recipe(slim, lambda: make(name)), scope)
    scope["model"].load_state_dict(load_file(tmp_path / "slim.safetensors"), strict=True)
    with torch.no_grad():
        assert torch.equal(scope["model"].eval()(images), slim.eval()(images))
