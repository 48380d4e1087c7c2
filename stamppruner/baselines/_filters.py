"""The filters that write a channel, and what a layer's scores say of the channels."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner import layers
from stamppruner.channels import KEPT, BoolArray, ChannelGraph, FloatArray, LayerMap


def writers(model: nn.Module, graph: ChannelGraph) -> Iterator[tuple[LayerMap, nn.Module]]:
    """Convolutions and linear layers that write channels, in call order."""
    for layer in graph.layers.values():
        if layer.kind == "mixing" and (layer.outputs != KEPT).any():
            yield layer, model.get_submodule(layer.name)


def rows(module: nn.Module, weight: Tensor | None = None) -> Tensor:
    """What writes each output of a layer, ``(out, values)`` in float64.

    Args:
        module: a convolution, transposed or not, or a linear layer.
        weight: of the weight's shape, in its place.
    """
    own: Tensor = module.weight if weight is None else weight  # type: ignore[assignment]
    values = own.detach().double()
    if layers.weight_axes(module)[0] == 1:  # transposed: (in, out / groups, ...)
        parts = values.chunk(layers.blocks(module))
        values = torch.cat([part.transpose(0, 1) for part in parts])
    return values.flatten(1)


class Gathered:
    """Means over the positions at which channels are written."""

    def __init__(self, graph: ChannelGraph) -> None:
        self._sum = np.zeros(graph.num_channels)
        self._count = np.zeros(graph.num_channels)

    def add(self, layer: LayerMap, scores: Tensor) -> None:
        """Note the scores ``(out,)`` of a layer's outputs."""
        held = layer.outputs != KEPT
        values = scores.detach().double().cpu().numpy()
        np.add.at(self._sum, layer.outputs[held], values[held])
        np.add.at(self._count, layer.outputs[held], 1.0)

    @property
    def seen(self) -> BoolArray:
        """Channels that have a score, ``(num_channels,)``."""
        return self._count > 0

    def mean(self) -> FloatArray:
        """``(num_channels,)``; 0 of channels without a score."""
        return self._sum / np.maximum(self._count, 1)
