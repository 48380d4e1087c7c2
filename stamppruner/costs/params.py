"""Number of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn

from stamppruner.channels import KEPT, ChannelGraph, LayerMap
from stamppruner.costs._base import Cost, positions


class Params(Cost):
    """Elements of all parameters, shared ones counted once."""

    name, unit = "params", "parameters"

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        modules = dict(model.named_modules())
        counts = [_counts(modules[name], layer) for name, layer in graph.layers.items()]
        table = torch.tensor(counts, dtype=torch.float64).reshape(-1, 4)
        self._neither, self._outputs, self._inputs, self._both = table.unbind(-1)
        maps = graph.layers.values()
        self._in_full = torch.tensor([len(m.inputs) for m in maps], dtype=torch.float64)
        self._out_full = torch.tensor([len(m.outputs) for m in maps], dtype=torch.float64)
        self._free = list(_free(model, graph))
        self._outside = 0.0
        super().__init__(model, graph)
        total = sum(p.numel() for p in model.parameters())
        self._outside = total - self.full
        self.full = float(total)

    @property
    def constant(self) -> float:
        """Parameters that the graph does not list."""
        return self._outside

    def __call__(self, widths: Tensor) -> Tensor:
        """Total number, ``(...)``, for kept channels a group ``(..., G)``."""
        w = widths.to(torch.float64)
        total = super().__call__(w)
        for numel, axes in self._free:
            lengths = prod(fixed + w @ per for _, fixed, per in axes)
            total = total + numel * lengths / prod(length for length, _, _ in axes)
        return total

    def per_layer(self, widths: Tensor) -> Tensor:
        """Weights and one-a-channel parameters of each layer."""
        inputs, outputs = self._layers.inputs(widths), self._layers.outputs(widths)
        return (
            self._neither
            + self._outputs * outputs / self._out_full
            + self._inputs * inputs / self._in_full
            + self._both * (inputs * outputs) / (self._in_full * self._out_full)
        )


def _counts(module: nn.Module, layer: LayerMap) -> tuple[int, int, int, int]:
    """Elements of a layer's parameters that follow neither side, outputs, inputs, or both."""
    own = list(module.parameters(recurse=False))
    if isinstance(parametrizations := getattr(module, "parametrizations", None), nn.Module):
        own += parametrizations.parameters()
    mixing = layer.kind == "mixing"
    weight = getattr(module, "weight", None)
    counts = [0, 0, 0, 0]
    for parameter in own:
        if mixing and weight is not None and parameter.shape == weight.shape:
            counts[3] += parameter.numel()
        elif len(layer.outputs) in parameter.shape:
            counts[1] += parameter.numel()
        elif len(layer.inputs) in parameter.shape:
            counts[2] += parameter.numel()
        else:
            counts[0] += parameter.numel()
    return counts[0], counts[1], counts[2], counts[3]


Axis = tuple[int, int, Tensor]
"""Length; indices that are never removed; indices a kept channel of each group, ``(G,)``."""


def _free(model: nn.Module, graph: ChannelGraph) -> Iterator[tuple[int, list[Axis]]]:
    """Elements, and axes that follow channels, of every parameter that no layer owns."""
    parameters = dict(model.named_parameters())
    sizes = torch.tensor([group.size for group in graph.groups], dtype=torch.float64)
    for name in dict.fromkeys(tensor.name for tensor in graph.tensors):
        if name not in parameters:  # a buffer
            continue
        axes: list[Axis] = []
        for tensor in graph.tensors:
            if tensor.name == name:
                per = torch.from_numpy(positions(tensor.channels, graph)) / sizes
                fixed = int((tensor.channels == KEPT).sum())
                axes.append((len(tensor.channels), fixed, per))
        yield parameters[name].numel(), axes
