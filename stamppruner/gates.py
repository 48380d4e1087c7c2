"""Mask gates on a model, through hooks.

A gate multiplies what each *reader* of a channel reads, so a channel with mask 0 is exactly a
removed channel, whatever lies between its writer and its readers (batch norm with a bias, a
sigmoid, residual sums, depthwise convolutions). Norms over channels are gated too: they take their
statistics over the channels that the mask leaves. This is the ``m ⊗ W`` of Eq. 3 with the product
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
from stamppruner.norms import Norm

_PLAIN = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear)
"""Layers that use their weight as it is, with input channels along its second axis."""


class Gates:
    """The gates of one model: injected on entry, ejected on exit, also after an exception.

    Args:
        model: the dense model; its hooks change, and nothing else.
        graph: its channels.

    Raises:
        PlanError: the graph is of another model.

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
        self._mask = _Mask()
        self._sites: list[tuple[nn.Module, _Gate | _NormGate]] = []
        for layer in graph.layers.values():
            if layer.kind == "channelwise" or (layer.inputs == KEPT).all():
                continue
            module, widths = modules.get(layer.name), (len(layer.inputs), len(layer.outputs))
            if module is None or (layers.widths(module) or widths)[0] != widths[0]:
                raise PlanError(
                    f"layer {layer.name!r} is missing or has another width than in the graph: "
                    "trace this model anew"
                )
            index = np.where(layer.inputs == KEPT, graph.num_channels, layer.inputs)
            gate = _Gate(self._mask, torch.from_numpy(index))
            self._sites.append((module, _NormGate(gate, layer.norm) if layer.norm else gate))
        self._handles: list[RemovableHandle] = []

    @property
    def values(self) -> Tensor | None:
        """Mask ``(num_channels,)``, or ``(B, num_channels)`` with one a sample; None is open."""
        extended = self._mask.extended
        return None if extended is None else extended[..., :-1]

    @values.setter
    def values(self, mask: Tensor | None) -> None:
        if mask is None:
            self._mask.extended = None
        else:
            self._mask.extended = torch.cat([mask, mask.new_ones((*mask.shape[:-1], 1))], dim=-1)

    def inject(self, *, by_weight: bool = False) -> None:
        """Register the hooks (once).

        Args:
            by_weight: multiply a layer's weight instead of its input where that is smaller. The
                outputs are the same but for rounding; what other hooks see of inputs is not.
        """
        if self._handles:
            return
        self._mask.by_weight = by_weight
        for module, gate in self._sites:
            if isinstance(gate, _NormGate):
                self._handles.append(module.register_forward_hook(gate))
                continue
            self._handles.append(module.register_forward_pre_hook(gate))
            if by_weight:
                self._handles.append(module.register_forward_hook(_unveil, always_call=True))

    def eject(self) -> None:
        """Remove the hooks: the model is as it was before :meth:`inject`."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @contextmanager
    def injected(self, *, by_weight: bool = False) -> Iterator[Gates]:
        """Gates that are there inside the ``with`` block only; see :meth:`inject`."""
        self.inject(by_weight=by_weight)
        try:
            yield self
        finally:
            self.eject()


class _Mask:
    """What the gates of a model share: the mask, and a 1 behind it for positions that stay.

    With ``by_weight``, it is multiplied into weights where these are smaller than inputs.

    Gates do not hold :class:`Gates` itself, which holds the model: such a circle would keep the
    weights in memory until Python looks for circles.
    """

    extended: Tensor | None = None
    by_weight: bool = False


class _Gate:
    """Forward pre-hook that multiplies a layer's input by the mask of its channels."""

    def __init__(self, shared: _Mask, index: Tensor) -> None:
        self.shared, self.index = shared, index

    def mask(self, x: Tensor) -> Tensor | None:
        """Mask of the positions, ``(C,)``, or ``(B, C)`` where each sample has its own."""
        mask = self.shared.extended
        if mask is None:
            return None
        if self.index.device != mask.device:
            self.index = self.index.to(mask.device)
        gate = mask.index_select(-1, self.index).to(x.dtype)
        if gate.dim() == 2 and len(gate) != len(x):  # frames or windows repeat their sample's
            gate = gate.repeat_interleave(len(x) // len(gate), dim=0)
        return gate

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        x = args[0]
        gate = self.mask(x)
        if gate is None:
            return None
        if self.shared.by_weight and _cheaper_by_weight(module, x, gate):
            weight = module._parameters["weight"]
            assert weight is not None
            veiled = weight * gate.to(weight.dtype).view(1, -1, *[1] * (weight.dim() - 2))
            module.__dict__["weight"] = veiled  # found before the parameter of that name
            return None
        axis = layers.channel_axis(module, x.dim())
        trailing = [1] * (x.dim() - axis - 1)
        leading = [1] * (axis - 1) if gate.dim() == 2 else []
        return (x * gate.view(*gate.shape[:-1], *leading, -1, *trailing), *args[1:])


def _cheaper_by_weight(module: nn.Module, x: Tensor, gate: Tensor) -> bool:
    """Whether the mask can be multiplied into the weight, and the weight is the smaller one."""
    if type(module) not in _PLAIN or gate.dim() != 1 or getattr(module, "groups", 1) != 1:
        return False
    weight = module._parameters.get("weight")
    return weight is not None and weight.numel() < x.numel()


def _unveil(module: nn.Module, _args: Any, _output: Any) -> None:
    """The weight is the parameter again."""
    module.__dict__.pop("weight", None)


class _NormGate:
    """Forward hook that takes a norm's statistics over the channels that the mask leaves."""

    def __init__(self, gate: _Gate, norm: Norm) -> None:
        self.gate, self.norm = gate, norm

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        gate = self.gate.mask(args[0])
        return output if gate is None else self.norm(module, args[0], gate)


def mask(model: nn.Module, plan: ChannelPlan) -> nn.Module:
    """A copy of the dense model whose removed channels are held at zero.

    It computes what :func:`~stamppruner.shrink` of the same plan computes, at full size.

    Raises:
        PlanError: the plan is of another model.

    Example:
        >>> from stamppruner import ChannelPlan, shrink, trace_channels
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> graph = trace_channels(net, torch.zeros(1, 3, 9, 9))
        >>> plan = ChannelPlan.random(graph, keep=0.5)
        >>> images = torch.randn(2, 3, 9, 9)
        >>> torch.allclose(mask(net, plan)(images), shrink(net, plan)(images), atol=1e-5)
        True
    """
    dense = copy.deepcopy(model)
    gates = Gates(dense, plan.graph)
    like = layers.first_floating(dense)
    gates.values = torch.from_numpy(plan.keep.copy()).to(like.device, like.dtype)
    gates.inject()
    return dense
