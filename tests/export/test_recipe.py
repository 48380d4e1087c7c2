"""Recipes: lines of Python that narrow a class to a slim network."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import CASES, Case, Net, conv_bn, head, noise, seeded
from safetensors.torch import load_file
from samples import FULL, images, slim
from stripes import resnet, same_state, snapshot, vgg
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from stamppruner import ChannelPlan, export_state_dict, recipe, shrink, trace_channels
from stamppruner.errors import ExportError


def rebuilt(model: nn.Module, full: Callable[[], nn.Module], folder: Path) -> nn.Module:
    """As a user does it."""
    export_state_dict(model, folder / "slim.safetensors")
    scope: dict[str, Any] = {"model": full()}
    exec(recipe(model, full), scope)
    scope["model"].load_state_dict(load_file(folder / "slim.safetensors"), strict=True)
    return scope["model"].eval()


def cut(full: nn.Module, x: Tensor, keep: float = 0.5) -> nn.Module:
    return shrink(full, ChannelPlan.random(trace_channels(full, x), keep=keep, seed=1))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_networks_of_every_kind_come_back_with_the_same_bits(case: Case, tmp_path: Path) -> None:
    x = noise(2, *case.shapes[0], dtype=torch.float32)
    model = cut(case.model(torch.float32), x)
    made = rebuilt(model, lambda: case.model(torch.float32, seed=3), tmp_path)
    with torch.no_grad():
        assert torch.equal(made(x), model(x))
    for (name, one), (_, two) in zip(made.named_modules(), model.named_modules(), strict=True):
        assert repr(one) == repr(two), name


def test_the_text_is_what_a_person_would_write() -> None:
    text = recipe(slim("plain"), FULL["plain"])
    lines = text.splitlines()
    assert lines[:3] == ["import torch", "from torch import nn", ""]
    assert "model.features[0] = nn.Conv2d(3, 4, 3, padding=1, bias=False)" in lines
    assert "model.features[1] = nn.BatchNorm2d(4)" in lines
    assert not any("stamppruner" in line for line in lines)


def test_rewired_layers_need_no_stamppruner_and_spliced_ones_say_that_they_do() -> None:
    rewired = recipe(slim("rewired"), FULL["rewired"])
    assert "register_forward_pre_hook(gathering(-3))" in rewired
    assert "register_forward_hook(scattering(-3))" in rewired
    assert "stamppruner" not in rewired
    assert "stamppruner" not in recipe(slim("projected"), FULL["projected"])
    spliced = recipe(slim("spliced"), FULL["spliced"])
    assert "from stamppruner import apply_projections" in spliced


def test_neither_model_is_changed() -> None:
    model, full = slim("rewired").train(), FULL["rewired"]().train()
    before, drawn = (snapshot(model), snapshot(full)), torch.random.get_rng_state()
    recipe(model, full)
    assert same_state(model, before[0])
    assert same_state(full, before[1])
    assert full.training
    assert torch.equal(torch.random.get_rng_state(), drawn)


def test_equal_networks_need_no_change() -> None:
    assert recipe(vgg(seed=1), vgg) == "# nothing to change"


class Tied(nn.Module):
    """One block under two names, one weight in two layers, a buffer that is not saved."""

    offset: Tensor

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.first, self.block = conv_bn(3, 8), conv_bn(8, 8)
        self.again = self.block
        self.blocks = nn.ModuleDict({"a-b": conv_bn(8, 8), "c": weight_norm(nn.Conv2d(8, 8, 1))})
        self.register_buffer("offset", torch.linspace(0, 1, 8).view(8, 1, 1), persistent=False)
        self.blocks["c"].parametrizations.weight.original0.requires_grad_(False)
        self.narrow, self.last = conv_bn(8, features), head(features)
        self.twin = nn.Linear(features, 5)
        self.twin.weight = self.last[2].weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.block(self.first(x)).relu()).relu()
        x = self.narrow(self.blocks["c"](self.blocks["a-b"](x + self.offset)))
        return self.last(x) + self.twin(x.mean((2, 3)))


def test_shared_parts_odd_names_and_unsaved_buffers(tmp_path: Path) -> None:
    model = cut(Tied().eval(), images(1))
    assert model.block[0].out_channels == len(model.offset) == 4
    made = rebuilt(model, Tied, tmp_path)
    assert made.again is made.block
    assert not made.blocks["c"].parametrizations.weight.original0.requires_grad
    with torch.no_grad():
        assert torch.equal(made(images()), model(images()))


def test_weights_of_two_layers_stay_one(tmp_path: Path) -> None:
    model = Tied(features=5).eval()
    made = rebuilt(model, Tied, tmp_path)
    assert made.twin.weight is made.last[2].weight
    assert made.twin.weight.shape == (5, 5)
    with torch.no_grad():
        assert torch.equal(made(images()), model(images()))


def test_other_dtypes_are_kept(tmp_path: Path) -> None:
    for make in (vgg, FULL["rewired"]):
        model = cut(make().eval(), images(1)).to(torch.bfloat16)
        made = rebuilt(model, make, tmp_path)
        assert {p.dtype for p in made.parameters()} == {torch.bfloat16}
        x = images().bfloat16()
        with torch.no_grad():
            assert torch.equal(made(x), model(x))


def test_hooks_of_the_users_class_stay(tmp_path: Path) -> None:
    def make() -> nn.Module:
        net = vgg()
        net.features[0].register_forward_hook(lambda _m, _x, y: y * 2)
        return net

    model = cut(make().eval(), images(1))
    made = rebuilt(model, make, tmp_path)
    with torch.no_grad():
        assert torch.equal(made(images()), model(images()))


def test_models_of_another_class_are_refused() -> None:
    with pytest.raises(ExportError, match=r"the model is a VGG in the slim model.*ResNet"):
        recipe(slim("plain"), resnet)
    other = seeded(lambda: Net(lambda n, x: n.a(x), a=conv_bn(3, 8)))
    longer = seeded(lambda: Net(lambda n, x: n.a(x), a=conv_bn(3, 8), b=conv_bn(8, 8)))
    with pytest.raises(ExportError, match=r"no recipe makes Net of the full model given"):
        recipe(other, longer)
    with pytest.raises(ExportError, match=r"b is a Sequential in the slim model and missing"):
        recipe(longer, other)
    with pytest.raises(ExportError, match="the full model is not of the slim one's class"):
        recipe(slim("spliced"), vgg)


def test_long_buffers_outside_the_state_dict_are_refused() -> None:
    model = Tied()
    small = copy.deepcopy(model)
    small.offset = torch.zeros(5000)
    with pytest.raises(ExportError, match=r"model.offset was cut.*5000 values: use save_slim"):
        recipe(small, model)
