"""What is known of layer types."""

import pytest
import torch
from nets import ChannelsFirstNorm, SqueezeExcite
from torch import nn
from torchvision.ops import FrozenBatchNorm2d

from stamppruner import layers


@pytest.mark.parametrize(
    ("module", "mixing", "depthwise"),
    [
        (nn.Conv2d(4, 8, 3), True, False),
        (nn.Conv2d(4, 8, 3, groups=2), True, False),
        (nn.Conv2d(4, 8, 3, groups=4), False, True),
        (nn.Conv2d(1, 8, 3), True, False),
        (nn.ConvTranspose1d(4, 4, 3, groups=4), False, True),
        (nn.Linear(4, 8), True, False),
        (nn.BatchNorm2d(4), False, False),
        (nn.ReLU(), False, False),
    ],
)
def test_mixing_and_depthwise(module, mixing, depthwise):
    assert (layers.is_mixing(module), layers.is_depthwise(module)) == (mixing, depthwise)


@pytest.mark.parametrize(
    ("module", "width"),
    [
        (nn.BatchNorm2d(4), 4),
        (nn.BatchNorm1d(4, affine=False), 4),
        (nn.InstanceNorm2d(4, affine=True), 4),
        (nn.PReLU(4), 4),
        (FrozenBatchNorm2d(4), 4),
        (nn.PReLU(), None),
        (nn.ReLU(), None),
        (nn.Linear(4, 4), None),
        (ChannelsFirstNorm(4), None),
        (SqueezeExcite(4, 2), None),
    ],
)
def test_channelwise_width(module, width):
    assert layers.channelwise_width(module) == width


@pytest.mark.parametrize(
    ("module", "shape", "places"),
    [
        (nn.Conv2d(3, 4, 3, stride=2), (2, 3, 9, 9), 2 * 16),
        (nn.Conv2d(3, 4, 3), (3, 9, 9), 49),
        (nn.Conv1d(3, 4, 1), (1, 3, 7), 7),
        (nn.ConvTranspose2d(3, 4, 2, stride=2), (1, 3, 5, 6), 30),
        (nn.Linear(3, 4), (2, 7, 3), 14),
        (nn.Linear(3, 4), (3,), 1),
    ],
)
def test_applications(module, shape, places):
    x = torch.zeros(shape)
    assert layers.applications(module, x, module(x)) == places


@pytest.mark.parametrize(
    ("module", "dim", "axis"),
    [
        (nn.Conv2d(3, 4, 1), 4, 1),
        (nn.Conv2d(3, 4, 1), 3, 0),
        (nn.Conv1d(3, 4, 1), 3, 1),
        (nn.Linear(3, 4), 2, 1),
        (nn.Linear(3, 4), 4, 3),
    ],
)
def test_channel_axis(module, dim, axis):
    assert layers.channel_axis(module, dim) == axis


def test_widths_are_written_into_attributes():
    norm = nn.LayerNorm([8, 5, 5])
    layers.set_width(norm, 8, 6)
    assert norm.normalized_shape == (6, 5, 5)
    batch = nn.BatchNorm2d(8)
    layers.set_width(batch, 8, 6)
    assert batch.num_features == 6
    layers.set_width(batch, 8, 4)
    assert batch.num_features == 6


def test_first_floating_tells_device_and_dtype():
    assert layers.first_floating(nn.Linear(2, 2).double()).dtype == torch.float64
    assert layers.first_floating(nn.ReLU()).dtype == torch.float32
