"""Networks by name, sized by the tensors of a file."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from stripes import resnet, vgg
from torch import nn

from stamppruner import STAMPPruner
from stamppruner.errors import CheckpointError, ConfigError, MissingExtraError
from stamppruner.models import VGG, resnet18, vgg19
from stamppruner.named import fresh_model, named_model, pretrained_model
from stamppruner.pruner_file import model_in


def shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("vgg19", vgg19(7, width=0.13)),
        ("vgg19", vgg(5, channels=1)),
        ("vgg19", VGG(((3,), (4,), (5, 6)), 2)),
        ("resnet18", resnet18(7, width=0.13)),
        ("resnet18", resnet(4)),
    ],
)
def test_sizes_are_read_off_the_tensors(name: str, model: nn.Module) -> None:
    made = named_model(name, {}, model.state_dict())
    assert type(made) is type(model)
    assert str(made) == str(model)
    assert shapes(made) == shapes(model)


def test_sizes_may_be_given() -> None:
    arguments = {"num_classes": 3, "width": 0.0625}
    tensors = vgg19(3, width=0.0625).state_dict()
    assert shapes(named_model("vgg19", arguments, tensors)) == shapes(vgg19(3, width=0.0625))
    with pytest.raises(CheckpointError, match=r"features\.0\.weight is \(4, 3, 3, 3\) in the file"):
        named_model("vgg19", arguments | {"width": 0.125}, tensors)


@pytest.mark.parametrize(
    ("library", "name"), [("torchvision", "squeezenet1_1"), ("timm", "resnet10t")]
)
def test_networks_of_libraries_get_the_classes_of_the_file(library: str, name: str) -> None:
    module = importlib.import_module("torchvision.models" if library == "torchvision" else library)
    make: Any = module.get_model if library == "torchvision" else module.create_model
    tensors = make(name, num_classes=9).state_dict()
    made = named_model(f"{library}:{name}", {}, tensors)
    assert shapes(made) == {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    assert made(torch.zeros(2, 3, 64, 64)).shape == (2, 9)


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("lenet", {}, "choose vgg19"),
        ("os:system", {}, "choose vgg19"),
        ("stamppruner.models:vgg19", {}, "choose vgg19"),
        ("torchvision:nothing", {}, "no classifier 'nothing'"),
        ("torchvision:fcn_resnet50", {}, "no classifier"),
        ("timm:hf-hub:someone/net", {}, "choose vgg19"),
        ("timm:nothing", {}, "no model 'nothing'"),
        ("timm:resnet18", {"checkpoint_path": "evil.pt"}, "weights come from"),
        ("timm:resnet18", {"pretrained": True}, "weights come from"),
        ("torchvision:resnet18", {"weights": "DEFAULT"}, "weights come from"),
        ("vgg19", {"colour": 1}, "does not take"),
        ("vgg19", {"width": "wide"}, "does not take"),
        ("torchvision:resnet18", {"layers": 3}, "does not take"),
    ],
)
def test_nothing_else_is_made(name: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        named_model(name, arguments, vgg().state_dict())


@pytest.mark.parametrize(
    ("name", "said"),
    [("resnet18", "no ResNet"), ("torchvision:resnet18", "conv1.weight is missing in the file")],
)
def test_files_of_other_networks(name: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        named_model(name, {}, vgg().state_dict())


def test_tensors_that_the_network_lacks_are_named() -> None:
    tensors = {**vgg().state_dict(), "more.weight": torch.zeros(2)}
    with pytest.raises(CheckpointError, match=r"more\.weight is \(2,\) in the file and missing"):
        named_model("vgg19", {}, tensors)
    del tensors["classifier.weight"]
    with pytest.raises(CheckpointError, match=r"no 'classifier\.weight'"):
        named_model("vgg19", {}, tensors)


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "torchvision"):
        monkeypatch.setitem(importlib.import_module("sys").modules, name, None)
        with pytest.raises(MissingExtraError, match=f"pip install {name}"):
            named_model(f"{name}:resnet18", {}, {})


@pytest.mark.parametrize("shortcuts", ["couple", "project"])
def test_pruners_are_loaded_by_name(tmp_path: Any, shortcuts: Any) -> None:
    model = resnet18(4, width=0.125)
    path = tmp_path / "r.stamp.safetensors"
    STAMPPruner(model, torch.zeros(1, 3, 16, 16), shortcuts=shortcuts).save(path)
    tensors, shape = model_in(path)
    assert shape == (3, 16, 16)
    assert shapes(named_model("resnet18", {}, tensors)) == shapes(model)
    loaded = STAMPPruner.load(path, named_model("resnet18", {}, tensors))
    assert loaded.shortcuts == shortcuts


def test_names_of_timm_with_a_tag_and_near_misses() -> None:
    pytest.importorskip("timm")
    assert isinstance(fresh_model("timm:resnet10t.c3_in1k", {}), nn.Module)
    with pytest.raises(ConfigError, match=r"no model 'resnet10x': did you mean .*resnet10t"):
        fresh_model("timm:resnet10x", {})


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_weights_that_cannot_be_fetched_name_the_remedy(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module: Any = pytest.importorskip("torchvision.models" if library == "torchvision" else "timm")
    make = {"torchvision": "get_model", "timm": "create_model"}[library]
    original = getattr(module, make)

    def offline(name: str, **settings: Any) -> nn.Module:
        if settings.get("weights") or settings.get("pretrained"):
            raise OSError("no route to host\nmore")
        return original(name, **settings)

    monkeypatch.setattr(module, make, offline)
    with pytest.raises(ConfigError, match=r"fetched \(no route to host\): pass a file of yours"):
        pretrained_model(f"{library}:resnet18", {})
