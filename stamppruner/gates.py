"""Mask gates on a model, through hooks.

A gate multiplies what each *reader* of a channel reads, so a channel with mask 0 is exactly a
removed channel, whatever lies between its writer and its readers (batch norm with a bias, a
sigmoid, residual sums, depthwise convolutions). This is the ``m ⊗ W`` of Eq. 3 with the product
taken along the input channels of the next layer's weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stamppruner import layers
from stamppruner.channels import KEPT, ChannelGraph, ChannelPlan
from stamppruner.errors import PlanError


class Gates:
    """The gates of one model: injected on entry, ejected on exit, also after an exception.

    Example:
        >>> from stamppruner import trace_channels
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> graph = trace_channels(net, torch.zeros(1, 3, 9, 9))
        >>> with Gates(net, graph).injected() as gates:
        ...     gates.values = torch.zeros(graph.num_channels)
        ...     bool((net(torch.ones(1, 3, 9, 9)) == net[2].bias.view(1, 4, 1, 1)).all())
        True
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        modules = dict(model.named_modules())
        self._sites: list[tuple[nn.Module, _Gate]] = []
        for layer in graph.layers.values():
            if layer.kind != "mixing" or (layer.inputs == KEPT).all():
                continue
            module = modules.get(layer.name)
            if module is None or layers.input_width(module) != len(layer.inputs):
                raise PlanError(
                    f"layer {layer.name!r} is missing or has another width than in the graph: "
                    "trace this model anew"
                )
            index = np.where(layer.inputs == KEPT, graph.num_channels, layer.inputs)
            self._sites.append((module, _Gate(self, torch.from_numpy(index))))
        self._extended: Tensor | None = None
        self._handles: list[RemovableHandle] = []

    @property
    def values(self) -> Tensor | None:
        """Mask ``(num_channels,)``, or ``(B, num_channels)`` with one a sample; None is open."""
        return None if self._extended is None else self._extended[..., :-1]

    @values.setter
    def values(self, mask: Tensor | None) -> None:
        if mask is None:
            self._extended = None
        else:
            self._extended = torch.cat([mask, mask.new_ones((*mask.shape[:-1], 1))], dim=-1)

    def inject(self) -> None:
        """Register the hooks (once)."""
        if not self._handles:
            self._handles = [
                module.register_forward_pre_hook(gate) for module, gate in self._sites
            ]

    def eject(self) -> None:
        """Remove the hooks: the model is as it was before :meth:`inject`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def injected(self) -> Iterator[Gates]:
        """Gates that are there inside the ``with`` block only."""
        self.inject()
        try:
            yield self
        finally:
            self.eject()


class _Gate:
    """Forward pre-hook that multiplies a layer's input by the mask of its channels."""

    def __init__(self, gates: Gates, index: Tensor) -> None:
        self.gates, self.index = gates, index

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        mask = self.gates._extended
        if mask is None:
            return None
        x = args[0]
        if self.index.device != mask.device:
            self.index = self.index.to(mask.device)
        gate = mask.index_select(-1, self.index).to(x.dtype)
        axis = layers.channel_axis(module, x.dim())
        trailing = [1] * (x.dim() - axis - 1)
        if gate.dim() == 2:  # one mask a sample; frames or windows repeat it
            gate = gate.repeat_interleave(x.shape[0] // gate.shape[0], dim=0)
            gate = gate.view(x.shape[0], *[1] * (axis - 1), -1, *trailing)
        else:
            gate = gate.view(-1, *trailing)
        return (x * gate, *args[1:])


def mask(model: nn.Module, plan: ChannelPlan) -> nn.Module:
    """A copy of the dense model whose removed channels are held at zero.

    It computes what :func:`~stamppruner.shrink` of the same plan computes, at full size.

    Raises:
        PlanError: the plan is of another model.
    """
    dense = copy.deepcopy(model)
    gates = Gates(dense, plan.graph)
    like = layers.first_floating(dense)
    gates.values = torch.from_numpy(plan.keep.copy()).to(like.device, like.dtype)
    gates.inject()
    return dense
