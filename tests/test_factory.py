"""Functions that make networks, found again by the structure of these."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from stripes import SIZE, loader, resnet, same_state, snapshot, vgg
from torch import nn

from stamppruner import Budget, STAMPConfig, STAMPPruner, describe, load_slim
from stamppruner.errors import CheckpointError, ConfigError
from stamppruner.factory import Factory, Structure, recognise
from stamppruner.models import VGG


def made(library: str, name: str, **arguments: Any) -> nn.Module:
    if library == "timm":
        return importlib.import_module("timm").create_model(name, **arguments)
    return importlib.import_module("torchvision.models").get_model(name, **arguments)


@pytest.mark.parametrize("model", [vgg(5, channels=1), VGG(((3,), (4,), (5, 6)), 2), resnet(4)])
def test_ours_are_recognised(model: nn.Module) -> None:
    factory = recognise(Structure.of(model))
    assert factory is not None
    again = factory.make(blank=True)
    assert str(again) == str(model)
    assert {p.device.type for p in again.parameters()} == {"meta"}
    assert Factory.from_json(factory.to_json(), "file") == factory


@pytest.mark.parametrize(
    ("library", "name", "arguments"),
    [
        ("torchvision", "squeezenet1_1", {"num_classes": 7}),
        ("torchvision", "wide_resnet50_2", {"num_classes": 7}),
        ("torchvision", "regnet_x_400mf", {"num_classes": 1000}),
        ("torchvision", "mobilenet_v3_small", {"num_classes": 2}),
        ("torchvision", "shufflenet_v2_x0_5", {"num_classes": 2}),
        ("timm", "resnet10t", {"num_classes": 3, "in_chans": 1}),
        ("timm", "mobilenetv3_small_050", {"num_classes": 3}),
        ("timm", "convnext_atto", {"num_classes": 3}),
    ],
)
def test_those_of_libraries_are_recognised(
    library: str, name: str, arguments: dict[str, Any]
) -> None:
    model = made(library, name, **arguments)
    assert recognise(Structure.of(model)) == Factory(f"{library}:{name}", arguments)


class Own(nn.Sequential):
    pass


def strided() -> nn.Module:
    model = made("torchvision", "resnet18")
    model.get_submodule("layer2.0.conv1").stride = (1, 1)
    return model


def in_inception() -> nn.Module:
    model = made("torchvision", "inception_v3", init_weights=False)
    model.transform_input = True  # shapes and layers do not tell
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(nn.Conv2d(3, 4, 3)),
        strided,
        in_inception,
        lambda: nn.Sequential(made("torchvision", "resnet18")),
        lambda: made("timm", "resnet10t", act_layer=nn.SiLU),
    ],
)
def test_others_are_not(make: Any) -> None:
    assert recognise(Structure.of(make())) is None


def test_a_subclass_is_not_its_base() -> None:
    assert recognise(Structure.of(type("Mine", (VGG,), {})(((4,), (8,)), 3))) is None


@pytest.mark.parametrize("shortcuts", ["couple", "project"])
def test_a_slim_file_loads_by_itself(tmp_path, shortcuts) -> None:
    config = STAMPConfig(prune_epochs=0, measure_latency=False)
    pruner = STAMPPruner(resnet(), config=config, shortcuts=shortcuts)
    result = pruner.prune(loader(classes=5), Budget(macs=0.5))
    path = tmp_path / "slim.safetensors"
    result.save(path)
    images = next(iter(loader()))[0]
    loaded = load_slim(path)
    assert torch.equal(loaded(images), result.model.eval()(images))
    assert describe(path)["factory"]["name"] == "resnet"


def test_a_pruner_file_loads_by_itself(tmp_path) -> None:
    pruner = STAMPPruner(vgg(), torch.zeros(1, 3, SIZE, SIZE), shortcuts="couple")
    pruner.save(tmp_path / "p.stamp.safetensors")
    again = STAMPPruner.load(tmp_path / "p.stamp.safetensors")
    assert same_state(again.network, snapshot(pruner.network))
    assert type(again.model) is VGG


def test_a_pruner_of_a_class_of_the_users_needs_it(tmp_path) -> None:
    model = Own(*vgg().features, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))
    pruner = STAMPPruner(model, torch.zeros(1, 3, SIZE, SIZE))
    pruner.save(tmp_path / "p.stamp.safetensors")
    with pytest.raises(CheckpointError, match=r"does not say how its .*Own' is made"):
        STAMPPruner.load(tmp_path / "p.stamp.safetensors")


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (None, "does not say how"),
        ({}, "the file is damaged"),
        ("resnet", "the file is damaged"),
        ({"name": "os:system", "arguments": {}}, "choose vgg19"),
        ({"name": "torchvision:resnet18", "arguments": {"weights": "DEFAULT"}}, "is damaged"),
        ({"name": "torchvision:resnet18", "arguments": {"num_classes": 10**9}}, "is damaged"),
        ({"name": "torchvision:resnet18", "arguments": {"num_classes": True}}, "is damaged"),
        ({"name": "resnet", "arguments": {"blocks": [10**3, 10**3]}}, "is damaged"),
        ({"name": "vgg", "arguments": {"widths": [[1] * 10**4]}}, "is damaged"),
        ({"name": "resnet", "arguments": {"widths": 3}}, "does not take"),
    ],
)
def test_other_records_are_refused(tmp_path, record, said) -> None:
    from stamppruner.slim import save_slim

    save_slim(tmp_path / "slim", resnet(3), {"factory": record})
    with pytest.raises(CheckpointError, match=said):
        load_slim(tmp_path / "slim")


def test_arguments_that_fetch_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match="weights come from the file"):
        Factory("timm:resnet18", {"pretrained": True}).make()
