"""Multiply-adds a sample, at the traced input size."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stamppruner.channels import ChannelGraph
from stamppruner.costs._base import HERE, Cost, Setting, fan_in, kernel_size


class Macs(Cost):
    """One fused multiply-add counts as one MAC; norms, activations and pooling are not counted.

    The convention is that of fvcore; ``torch.utils.flop_counter`` reports twice the number. What no
    layer map lists (products of activations as in attention, recurrent layers, weights that are
    handed to functions) counts as in the full network, so costs of smaller ones are upper bounds.
    """

    name, unit = "macs", "MACs"

    def __init__(self, model: nn.Module, graph: ChannelGraph, setting: Setting = HERE) -> None:
        self._spatial = torch.tensor(
            [graph.spatial.get(name, 0) for name in graph.layers], dtype=torch.float64
        )
        modules = dict(model.named_modules())
        self._kernel = torch.tensor(
            [kernel_size(modules[name]) for name in graph.layers], dtype=torch.float64
        )
        self._others = 0.0
        super().__init__(model, graph, setting)
        self._others = max(0.0, graph.macs - self.full)
        self.full += self._others

    def per_layer(self, widths: Tensor) -> Tensor:
        """MACs of each layer: places x kernel x fan-in x outputs."""
        inputs, outputs = self._layers.inputs(widths), self._layers.outputs(widths)
        modules = self._layers.modules
        reads = torch.stack([fan_in(m, inputs[..., i]) for i, m in enumerate(modules)], dim=-1)
        return self._spatial * self._kernel * reads * outputs

    @property
    def constant(self) -> float:
        """MACs of what no layer map lists, of the full network."""
        return self._others
