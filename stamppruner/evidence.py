"""What a set of images says about every channel.

The set encoder's pseudo image runs through the network (Eq. 3: ``o_l = h_l(o_{l-1}; W_l)``, on
unmasked weights) and every channel is pooled where it is read (Eq. 12: ``Pool(o)``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stamppruner import layers
from stamppruner.channels import KEPT, ChannelGraph
from stamppruner.few_positions import few_positions


class ChannelReader:
    """Averages what the readers of every channel read."""

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        self._model, self._graph = model, graph
        modules = dict(model.named_modules())
        self._sites: list[tuple[nn.Module, Tensor, Tensor]] = []
        for layer in graph.layers.values():
            held = layer.inputs != KEPT
            if layer.kind != "mixing" or not held.any():
                continue
            positions = torch.from_numpy(np.flatnonzero(held))
            channels = torch.from_numpy(layer.inputs[held])
            self._sites.append((modules[layer.name], positions, channels))
        self._group_of = torch.from_numpy(graph.group_of)

    def read(self, images: Tensor) -> Tensor:
        """Mean reading of every channel over the images, ``(num_channels,)``, differentiable.

        Batch norms run on their running statistics: with the images' own, the mean would be the
        batch norm's bias for every set of images.
        """
        total = images.new_zeros(self._graph.num_channels)
        count = torch.zeros_like(total)
        found: list[tuple[Tensor, Tensor]] = []
        with self._hooked(found), running_statistics(self._model), few_positions(self._model):
            self._model(images)
        for channels, means in found:
            total = total.index_add(0, channels.to(total.device), means.to(total.dtype))
            count.index_add_(
                0, channels.to(total.device), torch.ones_like(means, dtype=total.dtype)
            )
        return total / count.clamp_min(1)

    def standardised(self, images: Tensor) -> Tensor:
        """:meth:`read` with zero mean and unit variance over each group's channels."""
        reading = self.read(images)
        groups = self._group_of.to(reading.device)
        number = len(self._graph.groups)
        size = torch.bincount(groups, minlength=number).to(reading.dtype)
        zeros = reading.new_zeros(number)
        mean = zeros.index_add(0, groups, reading) / size
        centred = reading - mean[groups]
        variance = zeros.index_add(0, groups, centred.square()) / size
        return centred / (variance[groups] + 1e-8).sqrt()

    @contextmanager
    def _hooked(self, found: list[tuple[Tensor, Tensor]]) -> Iterator[None]:
        handles: list[RemovableHandle] = []

        def hook(positions: Tensor, channels: Tensor) -> Any:
            def note(module: nn.Module, args: tuple[Any, ...]) -> None:
                x = args[0]
                axis = layers.channel_axis(module, x.dim())
                means = x.movedim(axis, 0).flatten(1).mean(1)
                found.append((channels, means.index_select(0, positions.to(means.device))))

            return note

        try:
            for module, positions, channels in self._sites:
                handles.append(module.register_forward_pre_hook(hook(positions, channels)))
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def running_statistics(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode inside the block, as before after it."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
