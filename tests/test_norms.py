"""Norms over channels: recognised by what they compute, masked as if the channels were gone."""

import pytest
import torch
from nets import ChannelsFirstNorm, difference, noise
from torch import nn

from stamppruner.norms import recognise

CHANNELS = {1: (4, 8, 5, 5), -1: (4, 5, 8)}


class HandWritten(nn.Module):
    """Over the channels of (B, C, H, W), as in the ConvNeXt code of many projects."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = 1e-6

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        y = (x - mean) / ((x - mean).pow(2).mean(1, keepdim=True) + self.eps).sqrt()
        return self.weight[:, None, None] * y + self.bias[:, None, None]


NORMS = {
    "layer": (nn.LayerNorm(8), -1, 1),
    "rms": (nn.RMSNorm(8), -1, 1),
    "group": (nn.GroupNorm(2, 8), 1, 2),
    "one group": (nn.GroupNorm(1, 8), 1, 1),
    "hand-written": (HandWritten(8), 1, 1),
    "image layer": (nn.LayerNorm([8, 5, 5]), 1, 1),
}


@pytest.mark.parametrize("name", NORMS)
def test_masked_norm_equals_the_norm_of_the_kept_channels(name):
    module, axis, groups = NORMS[name]
    module = module.double()
    x = noise(*CHANNELS[axis])
    norm = recognise(module, x)
    assert norm is not None
    assert (norm.axis, norm.groups) == (axis, groups)
    assert difference(module(x), norm(module, x, x.new_ones(8))) < 1e-12
    keep = torch.tensor([1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool)
    masked = norm(module, x, keep.double()).movedim(axis, 1)[:, keep]
    kept = x.movedim(axis, 1)[:, keep].movedim(1, axis)
    if isinstance(module, nn.GroupNorm):
        small = nn.GroupNorm(groups, 6).double()
    elif isinstance(module, HandWritten):
        small = HandWritten(6).double()
    else:
        small = type(module)([6, *module.normalized_shape[1:]]).double()
    small.eps = module.eps
    assert difference(small(kept).movedim(axis, 1), masked) < 1e-12


@pytest.mark.parametrize(
    "module", [nn.BatchNorm2d(8), nn.InstanceNorm2d(8), nn.ReLU(), ChannelsFirstNorm(8)],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_what_is_no_norm_over_channels(module):
    assert recognise(module.eval(), noise(4, 8, 5, 5, dtype=torch.float32)) is None


def test_one_mask_a_sample():
    module = nn.GroupNorm(2, 8).double()
    x = noise(3, 8, 4, 4)
    norm = recognise(module, x)
    masks = (noise(3, 8, seed=5) > -0.5).double()
    masks[:, [0, 4]] = 1
    together = norm(module, x, masks)
    for i in range(3):
        assert difference(norm(module, x[i : i + 1], masks[i]), together[i : i + 1]) < 1e-12
