"""Random pruning: every channel is as good as another."""

from __future__ import annotations

import numpy as np
from torch import nn

from stamppruner.baselines._base import ChannelBaseline, rank_within_groups
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.target import Target


class Random(ChannelBaseline):
    """A random choice of the same share of every layer.

    ``RandomWidths`` draws the shares, too, as MetaPruning and STAMP's tables do.
    """

    name = "random"

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Uniform noise, ranked within each group."""
        noise = np.random.default_rng(self.seed).random(graph.num_channels)
        return rank_within_groups(noise, graph)
