"""Magnitude pruning: channels with small filters go first (Li et al. 2017)."""

from __future__ import annotations

from torch import nn

from stamppruner.baselines._base import ChannelBaseline, rank_within_groups
from stamppruner.baselines._filters import Gathered, rows, writers
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.target import Target


class Magnitude(ChannelBaseline):
    """L1 norm of the filters that write a channel, the same share of every layer."""

    name = "L1 magnitude"

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Mean L1 norm over the layers that write the channel, ranked within each group."""
        norms = Gathered(graph)
        for layer, module in writers(model, graph):
            norms.add(layer, rows(module).abs().sum(1))
        return rank_within_groups(norms.mean(), graph)
