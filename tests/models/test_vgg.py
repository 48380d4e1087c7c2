"""The VGG family: the paper's sizes, and settings that are refused."""

import pytest
import torch
from torch import nn

from stamppruner.errors import ConfigError
from stamppruner.models import VGG, vgg19


def convolutions(model):
    return [m for m in model.modules() if isinstance(m, nn.Conv2d)]


def test_vgg19_has_the_layers_of_the_paper():
    with torch.device("meta"):
        model = vgg19()
    widths = [64] * 2 + [128] * 2 + [256] * 4 + [512] * 8
    assert [conv.out_channels for conv in convolutions(model)] == widths
    assert all(conv.kernel_size == (3, 3) and conv.bias is None for conv in convolutions(model))
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 16
    assert [m.out_features for m in model.modules() if isinstance(m, nn.Linear)] == [100]
    inputs = [3, *widths[:-1]]
    weights = sum(9 * i * o + 2 * o for i, o in zip(inputs, widths, strict=True))
    assert sum(p.numel() for p in model.parameters()) == weights + 512 * 100 + 100


def test_vgg19_width_scales_every_convolution_and_never_reaches_zero():
    assert [c.out_channels for c in convolutions(vgg19(width=0.125))][::4] == [8, 32, 64, 64]
    assert {c.out_channels for c in convolutions(vgg19(width=0.001))} == {1}


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 28), (16, 40)])
def test_vgg_takes_any_size_near_32(height, width):
    model = vgg19(7, width=0.05, in_channels=1)
    assert model(torch.zeros(2, 1, height, width)).shape == (2, 7)


def test_small_vgg_pools_between_blocks_only():
    model = VGG(((4, 5), (6,)), 3)
    assert [c.out_channels for c in convolutions(model)] == [4, 5, 6]
    assert sum(isinstance(m, nn.MaxPool2d) for m in model.modules()) == 1
    assert model.features(torch.zeros(1, 3, 8, 8)).shape == (1, 6, 4, 4)


def test_vgg_gradients_reach_every_parameter():
    model = VGG(((4,), (6,)), 3)
    model(torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("widths", [(), ((),), ((4,), ())])
def test_vgg_refuses_empty_blocks(widths):
    with pytest.raises(ConfigError, match="at least one block"):
        VGG(widths)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_classes": 0}, "num_classes is 0"),
        ({"in_channels": 0}, "in_channels is 0"),
        ({"width": 0.0}, "width is 0"),
        ({"width": float("nan")}, "width is nan"),
    ],
)
def test_vgg19_refuses_settings_out_of_range(settings, named):
    with pytest.raises(ConfigError, match=named):
        vgg19(**settings)
