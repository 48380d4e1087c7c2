"""Number of parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stamppruner import layers
from stamppruner.channels import ChannelGraph
from stamppruner.costs._base import Cost, fan_in, kernel_size


class Params(Cost):
    """Elements of all parameters, shared ones counted once."""

    name, unit = "params", "parameters"

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        self._outside = 0.0
        super().__init__(model, graph)
        total = sum(p.numel() for p in model.parameters())
        self._outside = total - self.full
        self.full = float(total)

    @property
    def constant(self) -> float:
        """Parameters of modules that the graph does not list."""
        return self._outside

    def per_layer(self, widths: Tensor) -> Tensor:
        """Weights and one-a-channel parameters of each layer."""
        inputs, outputs = self._layers.inputs(widths), self._layers.outputs(widths)
        columns = []
        for i, module in enumerate(self._layers.modules):
            own = [p for p in module.parameters(recurse=False)]
            if not (layers.is_mixing(module) or layers.is_depthwise(module)):
                columns.append(outputs[..., i] * len([p for p in own if p.numel() > 1]))
                continue
            weight = kernel_size(module) * fan_in(module, inputs[..., i]) * outputs[..., i]
            columns.append(weight + outputs[..., i] * (getattr(module, "bias", None) is not None))
        return torch.stack(columns, dim=-1)
