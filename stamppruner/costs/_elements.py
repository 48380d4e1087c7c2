"""Elements of tensors that a model holds, as functions of its group widths."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn

from stamppruner.channels import KEPT, ChannelGraph, LayerMap
from stamppruner.costs._base import HERE, Cost, Setting, positions

Axis = tuple[int, int, Tensor]
"""Length; indices that are never removed; indices a kept channel of each group, ``(G,)``."""


class Elements(Cost):
    """Elements of the model's tensors, each with a weight; shared ones count once."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, setting: Setting = HERE) -> None:
        modules = dict(model.named_modules())
        counts = [self._counts(modules[name], layer) for name, layer in graph.layers.items()]
        table = torch.tensor(counts, dtype=torch.float64).reshape(-1, 4)
        self._neither, self._outputs, self._inputs, self._both = table.unbind(-1)
        maps = graph.layers.values()
        self._in_full = torch.tensor([len(m.inputs) for m in maps], dtype=torch.float64)
        self._out_full = torch.tensor([len(m.outputs) for m in maps], dtype=torch.float64)
        self._free = list(self._axes(model, graph))
        self._outside = 0.0
        super().__init__(model, graph, setting)
        total = float(sum(self.weight(t) * t.numel() for _, t in self.tensors(model, whole=True)))
        self._outside = total - self.full
        self.full = total

    def tensors(self, module: nn.Module, *, whole: bool) -> Iterator[tuple[str, Tensor]]:
        """What counts, by name: parameters and buffers of the module alone, or of all in it."""
        yield from module.named_parameters(recurse=whole)
        yield from module.named_buffers(recurse=whole)

    @abstractmethod
    def weight(self, tensor: Tensor) -> int:
        """What one element counts."""

    @property
    def constant(self) -> float:
        """What the graph does not list."""
        return self._outside

    def __call__(self, widths: Tensor) -> Tensor:
        """Total, ``(...)``, for kept channels a group ``(..., G)``."""
        w = widths.to(torch.float64)
        total = super().__call__(w)
        for numel, axes in self._free:
            lengths = prod(fixed + w @ per for _, fixed, per in axes)
            total = total + numel * lengths / prod(length for length, _, _ in axes)
        return total

    def per_layer(self, widths: Tensor) -> Tensor:
        """Weights and one-a-channel tensors of each layer."""
        inputs, outputs = self._layers.inputs(widths), self._layers.outputs(widths)
        return (
            self._neither
            + self._outputs * outputs / self._out_full
            + self._inputs * inputs / self._in_full
            + self._both * (inputs * outputs) / (self._in_full * self._out_full)
        )

    def _counts(self, module: nn.Module, layer: LayerMap) -> tuple[int, int, int, int]:
        """What follows neither side of a layer, its outputs, its inputs, or both."""
        own = [tensor for _, tensor in self.tensors(module, whole=False)]
        if isinstance(parametrizations := getattr(module, "parametrizations", None), nn.Module):
            own += [tensor for _, tensor in self.tensors(parametrizations, whole=True)]
        mixing = layer.kind == "mixing"
        weight = getattr(module, "weight", None)
        counts = [0, 0, 0, 0]
        for tensor in own:
            if mixing and weight is not None and tensor.shape == weight.shape:
                side = 3
            elif len(layer.outputs) in tensor.shape:
                side = 1
            elif len(layer.inputs) in tensor.shape:
                side = 2
            else:
                side = 0
            counts[side] += self.weight(tensor) * tensor.numel()
        return counts[0], counts[1], counts[2], counts[3]

    def _axes(self, model: nn.Module, graph: ChannelGraph) -> Iterator[tuple[int, list[Axis]]]:
        """What every tensor that no layer owns counts, and its axes that follow channels."""
        counted = dict(self.tensors(model, whole=True))
        sizes = torch.tensor([group.size for group in graph.groups], dtype=torch.float64)
        for name in dict.fromkeys(tensor.name for tensor in graph.tensors):
            if name not in counted:
                continue
            axes: list[Axis] = []
            for tensor in graph.tensors:
                if tensor.name == name:
                    per = torch.from_numpy(positions(tensor.channels, graph)) / sizes
                    fixed = int((tensor.channels == KEPT).sum())
                    axes.append((len(tensor.channels), fixed, per))
            yield self.weight(counted[name]) * counted[name].numel(), axes
