"""MetaPruning's PruningNet: weights of every convolution, from the widths around it."""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from stamppruner.channels import BoolArray, ChannelGraph
from stamppruner.layers import first_floating
from stamppruner.zeros import weights_of

_CHANGE = 0.1
"""Deviation of what is generated at the start, next to weights that are given."""


class PruningNet(nn.Module):
    """Two linear layers a convolution: shares of its inputs and outputs to its whole weight.

    Widths are then cropped by keeping the first channels of every group, which gates do.

    Args:
        model: gives the shapes, and the weights where ``pretrained``.
        graph: its channels.
        hidden: width between the two layers.
        pretrained: start near the model's weights, which the second layer's bias holds; else at
            Kaiming's deviation.
        seed: of its own weights.
    """

    def __init__(
        self, model: nn.Module, graph: ChannelGraph, *, hidden: int, pretrained: bool, seed: int
    ) -> None:
        super().__init__()
        self.graph = graph
        self.shapes = {
            name: layer.weight.shape
            for name, layer in weights_of(model).items()
            if isinstance(layer, _ConvNd) and name in graph.layers
        }
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            self.makers = nn.ModuleList(
                nn.Sequential(nn.Linear(2, hidden), nn.ReLU(), nn.Linear(hidden, shape.numel()))
                for shape in self.shapes.values()
            )
        self.to(first_floating(model).device)
        for name, maker in zip(self.shapes, self.makers, strict=True):
            weight = model.get_parameter(f"{name}.weight" if name else "weight")
            _start_(cast(nn.Sequential, maker), weight.detach(), pretrained=pretrained)

    def forward(self, keep: BoolArray) -> dict[str, Tensor]:
        """Weights by the name of the parameter, for kept channels ``(num_channels,)``."""
        found = {}
        for (name, shape), maker in zip(self.shapes.items(), self.makers, strict=True):
            layer = self.graph.layers[name]
            shares = [layer.kept_inputs(keep).mean(), layer.kept_outputs(keep).mean()]
            device = first_floating(maker).device
            weight = maker(torch.tensor(shares, dtype=torch.float32, device=device)).view(shape)
            found[f"{name}.weight" if name else "weight"] = weight
        return found


@torch.no_grad()
def _start_(maker: nn.Sequential, given: Tensor, *, pretrained: bool) -> None:
    """Bring what is generated for full widths to the right deviation."""
    last = cast(nn.Linear, maker[2])
    made = maker(torch.ones(2, device=given.device)) - (last.bias if pretrained else 0)
    fan = nn.init._calculate_correct_fan(given, "fan_in")
    wanted = _CHANGE * float(given.float().std()) if pretrained else math.sqrt(2 / fan)
    factor = wanted / max(float(made.std()), 1e-12) if made.numel() > 1 else 1.0
    last.weight.mul_(factor)
    if pretrained:
        last.bias.copy_(given.flatten())
    else:
        last.bias.mul_(factor)
