"""Magnitude pruning: channels with small filters go first (Li et al. 2017)."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from stamppruner import layers
from stamppruner.baselines._base import ChannelBaseline, rank_within_groups
from stamppruner.channels import KEPT, ChannelGraph, FloatArray
from stamppruner.target import Target


class Magnitude(ChannelBaseline):
    """L1 norm of the filters that write a channel, the same share of every layer."""

    name = "L1 magnitude"

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Mean L1 norm over the layers that write the channel, ranked within each group."""
        norm = np.zeros(graph.num_channels)
        writers = np.zeros(graph.num_channels)
        for layer in graph.layers.values():
            if layer.kind != "mixing":
                continue
            module = model.get_submodule(layer.name)
            held = layer.outputs != KEPT
            np.add.at(norm, layer.outputs[held], _filter_norms(module)[held])
            np.add.at(writers, layer.outputs[held], 1.0)
        return rank_within_groups(norm / np.maximum(writers, 1), graph)


def _filter_norms(module: nn.Module) -> FloatArray:
    """L1 norm of the weights of each output channel, ``(out,)``."""
    weight: torch.Tensor = module.weight.detach().double().abs()  # type: ignore[operator]
    axis = layers.weight_axes(module)[0]
    if axis == 1:  # transposed: (in, out / groups, ...)
        groups = layers.blocks(module)
        norms = torch.stack([w.transpose(0, 1).flatten(1).sum(1) for w in weight.chunk(groups)])
        return np.asarray(norms.flatten().cpu().numpy())
    return np.asarray(weight.flatten(1).sum(1).cpu().numpy())
