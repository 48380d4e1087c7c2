"""The interface of a cost, and layer widths as linear functions of group widths."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner import layers
from stamppruner.channels import KEPT, ChannelGraph, FloatArray, IntArray
from stamppruner.errors import BudgetError


@dataclass(frozen=True)
class Setting:
    """How a network is to run, for costs that depend on it.

    Attributes:
        device: such as ``"cpu"`` or ``"cuda:0"``; None: where the model is.
        batch_size: samples a pass.
        threads: of PyTorch on the CPU; None: as many as it uses now.
        amp: times are those under bfloat16 autocast.
    """

    device: str | None = None
    batch_size: int = 1
    threads: int | None = None
    amp: bool = False


def check_amp(model: nn.Module, setting: Setting) -> None:
    """Raise BudgetError where bfloat16 autocast is asked for and would do nothing, or fail."""
    like = layers.first_floating(model)
    kind = torch.device(setting.device or like.device).type
    if not setting.amp:
        return
    if not torch.amp.is_autocast_available(kind):
        raise BudgetError(f"Budget(amp=True): there is no autocast on {kind}")
    if like.dtype not in (torch.float32, torch.bfloat16):
        raise BudgetError(
            f"Budget(amp=True): the model is {like.dtype}, which bfloat16 autocast does not cast: "
            "pass it as float32, or leave out amp"
        )


HERE = Setting()
"""One sample, where the model is."""


@dataclass(frozen=True)
class LayerWidths:
    """Input and output widths of every layer, linear in the group widths ``w``.

    ``inputs = in_fixed + in_per @ w`` and the same for outputs: a group's channel may stand at
    several positions of a layer (a flatten, a concat of a tensor with itself).

    Attributes:
        names: the ``L`` layers.
        modules: their modules.
        in_fixed: input positions that are never removed, ``(L,)``.
        out_fixed: the same of the outputs.
        in_per: input positions a kept channel of each group, ``(L, G)``.
        out_per: the same of the outputs.
    """

    names: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    in_fixed: Tensor
    out_fixed: Tensor
    in_per: Tensor
    out_per: Tensor

    @classmethod
    def of(cls, model: nn.Module, graph: ChannelGraph) -> LayerWidths:
        """Read the widths off the graph's layer maps; positions the maps lack count as fixed."""
        named = dict(model.named_modules())
        names = tuple(graph.layers)
        sizes = np.array([group.size for group in graph.groups], dtype=np.float64)
        in_per, out_per, in_fixed, out_fixed = [], [], [], []
        for name in names:
            layer = graph.layers[name]
            inputs = np.full_like(layer.inputs, KEPT) if layer.whole else layer.inputs
            in_per.append(positions(inputs, graph) / sizes)
            out_per.append(positions(layer.outputs, graph) / sizes)
            in_fixed.append(float((inputs == KEPT).sum()))
            out_fixed.append(float((layer.outputs == KEPT).sum()))
        return cls(
            names,
            tuple(named[name] for name in names),
            torch.tensor(in_fixed, dtype=torch.float64),
            torch.tensor(out_fixed, dtype=torch.float64),
            torch.from_numpy(np.array(in_per).reshape(len(names), len(sizes))),
            torch.from_numpy(np.array(out_per).reshape(len(names), len(sizes))),
        )

    def inputs(self, widths: Tensor) -> Tensor:
        """Input width of every layer, ``(..., L)``, for group widths ``(..., G)``."""
        return self.in_fixed + widths @ self.in_per.T

    def outputs(self, widths: Tensor) -> Tensor:
        """Output width of every layer, ``(..., L)``, for group widths ``(..., G)``."""
        return self.out_fixed + widths @ self.out_per.T


class Cost(ABC):
    """A cost of the network as a function of its group widths.

    Exact at whole widths, differentiable in expected ones, and increasing in each.

    Args:
        model: the dense network.
        graph: its channels.
        setting: how it is to run; costs that do not depend on it ignore it.

    Attributes:
        name: as in :class:`~stamppruner.Budget`, for example ``"macs"``.
        unit: printed behind figures.
        full: cost with every channel kept.
    """

    name: str
    unit: str

    def __init__(self, model: nn.Module, graph: ChannelGraph, setting: Setting = HERE) -> None:
        self.setting = setting
        self._layers = LayerWidths.of(model, graph)
        self._sizes = torch.tensor([group.size for group in graph.groups], dtype=torch.float64)
        self.full = float(self(self._sizes).sum())

    @abstractmethod
    def per_layer(self, widths: Tensor) -> Tensor:
        """Cost of each layer, ``(..., L)``, for kept channels a group ``(..., G)`` in float64."""

    def of(self, names: Collection[str]) -> float:
        """Cost of some layers with every channel kept."""
        chosen = torch.tensor([name in names for name in self._layers.names], dtype=torch.bool)
        return float(self.per_layer(self._sizes)[chosen].sum())

    def __call__(self, widths: Tensor) -> Tensor:
        """Total cost, ``(...)``, for kept channels a group ``(..., G)``."""
        return self.per_layer(widths.to(torch.float64)).sum(-1) + self.constant

    @property
    def constant(self) -> float:
        """Cost of what no group touches and no layer map lists."""
        return 0.0


def kernel_size(module: nn.Module) -> int:
    """Weights a pair of one input and one output channel: ``kH * kW``, 1 for a linear layer."""
    return int(np.prod(getattr(module, "kernel_size", (1,))))


def fan_in(module: nn.Module, inputs: Tensor) -> Tensor:
    """Input channels that one output channel reads, for input widths ``(...)``."""
    if layers.is_depthwise(module):
        return torch.ones_like(inputs)
    return inputs / layers.blocks(module)


def positions(channels: IntArray, graph: ChannelGraph) -> FloatArray:
    """Positions that each group holds, ``(G,)``, among the channels of a side or an axis."""
    groups = graph.group_of[channels[channels != KEPT]]
    return np.bincount(groups, minlength=len(graph.groups)).astype(np.float64)
