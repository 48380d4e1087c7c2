"""Slim files of stock networks: written, and loaded by the file alone."""

from __future__ import annotations

import importlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from stamppruner import (
    ChannelPlan,
    export_onnx,
    load_slim,
    project_shortcuts,
    trace_channels,
)
from stamppruner.errors import UnsupportedModelError
from stamppruner.factory import Structure, recognise
from stamppruner.slim import save_slim
from stamppruner.surgery import cut

TORCHVISION = """
alexnet convnext_tiny densenet121 densenet169 efficientnet_b0 efficientnet_b1 efficientnet_v2_s
googlenet inception_v3 maxvit_t mnasnet0_5 mnasnet1_3 mobilenet_v2 mobilenet_v3_large
mobilenet_v3_small regnet_x_400mf regnet_x_800mf regnet_y_400mf regnet_y_800mf resnet18 resnet34
resnet50 resnext50_32x4d shufflenet_v2_x0_5 shufflenet_v2_x1_0 squeezenet1_0 squeezenet1_1 swin_t
vgg11_bn wide_resnet50_2
"""
TIMM = """
convnext_atto cs3darknet_s cspresnet50 dla34 dpn48b efficientnet_lite0 ese_vovnet19b_dw
fasternet_t0 ghostnet_100 hgnetv2_b0 lcnet_050 mixnet_s mobilenetv1_100 mobilenetv3_small_050
regnety_002 repvgg_a0 res2net50_26w_4s resnest14d resnet10t skresnet18
"""
FAST = {"torchvision:squeezenet1_1", "torchvision:shufflenet_v2_x0_5", "timm:mobilenetv3_small_050"}
ALL = [f"torchvision:{n}" for n in TORCHVISION.split()] + [f"timm:{n}" for n in TIMM.split()]


def made(name: str) -> nn.Module:
    library, _, short = name.partition(":")
    torch.manual_seed(0)
    if library == "timm":
        return importlib.import_module("timm").create_model(short, num_classes=7).eval()
    settings: dict[str, Any] = {"num_classes": 7}
    if short in ("googlenet", "inception_v3"):
        settings["init_weights"] = False
    return importlib.import_module("torchvision.models").get_model(short, **settings).eval()


def varied_(model: nn.Module) -> None:
    """Norms and biases that are not all alike, which would hide a wrong order."""
    generator = torch.Generator().manual_seed(1)
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dim() == 1:
            with torch.no_grad():
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)


def images(name: str) -> Tensor:
    side = {"inception_v3": 299, "maxvit_t": 224, "swin_t": 224}.get(name.split(":")[1], 96)
    return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(2))


def halved(model: nn.Module, x: Tensor) -> nn.Module:
    varied_(model)
    graph = trace_channels(model, x)
    assert graph.groups
    return cut(model, ChannelPlan.random(graph, 0.5)).eval()


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [leaf for leaf in tree_leaves(model(x)) if isinstance(leaf, Tensor)]


NETS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in ALL]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("projected", [False, True], ids=["plain", "projected"])
def test_outputs_are_the_same_bit_for_bit(name: str, projected: bool, tmp_path: Path) -> None:
    model = made(name)
    x = images(name)
    if projected:
        try:
            model = project_shortcuts(model, x)
        except UnsupportedModelError:
            pytest.skip("no shortcut to project")
    slim = halved(model, x)
    factory = recognise(Structure.of(model))
    assert factory is not None
    assert factory.name == name
    for dtype in (torch.float32, torch.bfloat16):
        slim = slim.to(dtype)
        path = tmp_path / f"{dtype}.safetensors"
        save_slim(path, slim, {"factory": factory.to_json()})
        loaded = load_slim(path)
        assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))
        pairs = zip(outputs(slim, x.to(dtype)), outputs(loaded, x.to(dtype)), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (slim, model)]
    assert np.divide(*sizes) < 0.9


@pytest.mark.parametrize("name", NETS)
def test_onnx_files_agree_and_shrink_as_the_parameters_do(name: str, tmp_path: Path) -> None:
    model = made(name)
    x = images(name)
    slim = halved(model, x)
    path = tmp_path / "net.onnx"
    report = export_onnx(slim, path, x)  # compared with ONNX Runtime in there, at two batch sizes
    assert report.max_relative_difference <= 1e-4
    initializers = onnx.load(path).graph.initializer
    stored = Counter(tuple(w.dims) for w in initializers if len(w.dims) == 4)
    idle = uncalled(slim, x)  # auxiliary heads, which are for training
    own = Counter(
        tuple(m.weight.shape) for m in slim.modules() if isinstance(m, nn.Conv2d) and m not in idle
    )
    assert not own - stored
    spare = sum(p.numel() for m in idle for p in m.parameters(recurse=False))
    total = sum(p.numel() for p in slim.parameters())
    assert total < 0.9 * sum(p.numel() for p in model.parameters())
    assert 3.6 * (total - spare) < path.stat().st_size < 4.4 * total + 400_000  # and the graph


def uncalled(model: nn.Module, x: Tensor) -> set[nn.Module]:
    """Modules without children that the forward pass leaves out."""
    leaves = {m for m in model.modules() if not list(m.children())}
    called: set[nn.Module] = set()
    handles = [m.register_forward_hook(lambda m, *_: called.add(m)) for m in leaves]
    outputs(model, x)
    for handle in handles:
        handle.remove()
    return leaves - called
