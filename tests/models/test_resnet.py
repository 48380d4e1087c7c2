"""The ResNet family: the paper's sizes, shortcuts, and settings that are refused."""

import math

import pytest
import torch
from torch import nn

from stamppruner.errors import ConfigError
from stamppruner.models import BasicBlock, ResNet, resnet18


def test_resnet18_has_the_layers_of_the_paper():
    with torch.device("meta"):
        model = resnet18()
    assert [len(stage) for stage in model.stages] == [2, 2, 2, 2]
    assert [stage[-1].conv2.out_channels for stage in model.stages] == [64, 128, 256, 512]
    assert model.conv1.stride == (1, 1)
    assert not any(isinstance(m, nn.MaxPool2d) for m in model.modules())
    # The published count for 10 classes, with a 3x3 stem, is 11,173,962.
    assert sum(p.numel() for p in model.parameters()) == 11_173_962 + 90 * 513


def test_shortcuts_project_only_where_the_shape_changes():
    model = resnet18(width=0.1)
    projected = [[block.shortcut is not None for block in stage] for stage in model.stages]
    assert projected == [[False, False], [True, False], [True, False], [True, False]]
    conv, norm = model.stages[1][0].shortcut
    assert conv.kernel_size == (1, 1)
    assert conv.stride == (2, 2)
    assert isinstance(norm, nn.BatchNorm2d)


def test_block_without_a_branch_is_the_rectified_input():
    block = BasicBlock(4, 4).eval()
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(x), x.relu())


@pytest.mark.parametrize(("height", "width"), [(32, 32), (28, 28), (17, 40), (5, 5)])
def test_resnet_takes_any_size(height, width):
    model = resnet18(7, width=0.05, in_channels=1)
    assert model(torch.zeros(2, 1, height, width)).shape == (2, 7)


def test_generic_resnet_follows_blocks_and_widths():
    model = ResNet(blocks=(1, 3), widths=(5, 5), num_classes=2)
    assert [len(stage) for stage in model.stages] == [1, 3]
    assert model.stages[1][0].shortcut is not None
    assert model.stages(torch.zeros(1, 5, 8, 8)).shape == (1, 5, 4, 4)


def test_kaiming_initialisation_has_fan_out_spread():
    weight = ResNet(blocks=(1,), widths=(64,)).stages[0][0].conv1.weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / (9 * 64)), rel=0.05)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"blocks": (), "widths": ()}, "0 entries in blocks"),
        ({"blocks": (1,), "widths": (4, 4)}, "1 entries in blocks and 2 in widths"),
        ({"blocks": (0,), "widths": (4,)}, "blocks is 0"),
        ({"blocks": (1,), "widths": (0,)}, "widths is 0"),
        ({"num_classes": 0}, "num_classes is 0"),
    ],
)
def test_resnet_refuses_settings_out_of_range(settings, named):
    with pytest.raises(ConfigError, match=named):
        ResNet(**settings)
