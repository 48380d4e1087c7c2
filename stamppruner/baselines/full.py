"""The full network: nothing is removed, everything else is the same."""

from __future__ import annotations

import numpy as np
from torch import nn

from stamppruner.baselines._base import ChannelBaseline
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.target import Target


class Full(ChannelBaseline):
    """What pruned networks are measured against: the same head start at full size.

    Pass no budget to :meth:`prune`.
    """

    name = "full network"

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """The same for every channel."""
        return np.ones(graph.num_channels)
