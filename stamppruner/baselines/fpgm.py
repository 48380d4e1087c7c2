"""Filter pruning via geometric median: filters that others can stand in for go first."""

from __future__ import annotations

import torch
from torch import nn

from stamppruner.baselines._base import ChannelBaseline, rank_within_groups
from stamppruner.baselines._filters import Gathered, rows, writers
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.target import Target


class FPGM(ChannelBaseline):
    """Distance to the other filters of a layer, the same share of every layer (He et al. 2019).

    The filter nearest to the geometric median is the one with the least sum of Euclidean distances
    to all filters of its layer, ``g(j) = sum_k ||F_j - F_k||`` (their eqs. 5 and 6); it is the
    first to go. Of channels that several layers write, the mean counts.

    The importance of this name in torch-pruning takes distances between the *squares* of weights.
    """

    name = "FPGM"

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Mean of ``g`` over the layers that write the channel, ranked within each group."""
        distances = Gathered(graph)
        for layer, module in writers(model, graph):
            filters = rows(module)
            exact = "donot_use_mm_for_euclid_dist"  # the other way cancels for near filters
            distances.add(layer, torch.cdist(filters, filters, compute_mode=exact).sum(1))
        return rank_within_groups(distances.mean(), graph)
