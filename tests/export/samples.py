"""Slim networks for the tests of exporters: plain ones, rewired ones, ones with projections."""

from __future__ import annotations

from collections.abc import Callable

import torch
from nets import Net, Residual, conv_bn, head, noise, seeded
from stripes import resnet, vgg
from torch import Tensor, nn

from stamppruner import ChannelPlan, project_shortcuts, shrink, trace_channels

SHAPE = (3, 8, 8)


def fixed_widths(net: nn.Module, x: Tensor) -> Tensor:
    a, b = torch.split(net.first(x).relu(), [4, 12], 1)
    x = torch.cat([net.a(a), net.b(b)], 1)
    return net.head(net.c(x.view(-1, 2, 6, *x.shape[2:]).transpose(1, 2).flatten(1, 2)))


FULL: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: vgg().eval(),
    "rewired": lambda: seeded(
        lambda: Net(
            fixed_widths,
            first=conv_bn(3, 16),
            a=conv_bn(4, 6),
            b=conv_bn(12, 6),
            c=conv_bn(12, 8),
            head=head(8),
        )
    ),
    "projected": lambda: resnet().eval(),
    "spliced": lambda: seeded(lambda: nn.Sequential(conv_bn(3, 8), Residual(8, 6), head(8))),
}
"""Functions that make full networks; those named after shortcuts get projections."""


def images(count: int = 5) -> Tensor:
    return noise(count, *SHAPE, dtype=torch.float32)


def slim(name: str) -> nn.Module:
    full = FULL[name]()
    if name in ("projected", "spliced"):
        full = project_shortcuts(full, images(1))
    return shrink(full, ChannelPlan.random(trace_channels(full, images(1)), keep=0.5, seed=0))
