"""Random widths: how many channels each layer keeps is drawn, not only which."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from stamppruner.baselines._base import ChannelBaseline
from stamppruner.baselines._widths import WidthSpace
from stamppruner.budget import Budget, Chooser
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.meet import Met
from stamppruner.target import Target


class RandomWidths(ChannelBaseline):
    """STAMP's "Random Pruning": a random structure under the budget, as in MetaPruning's search.

    Every group's share of channels is drawn uniformly and by itself, and all of them again until
    the network lies within 5% below the budget (Liu et al. 2019; their code draws from .1 to 1).
    Which channels stay is random, too. :class:`Random` in contrast gives every layer the same
    share.

    Where no draw meets the budget (less than a tenth of the multiply-adds, say), all shares of a
    draw are multiplied by one number, so that it is met.

    Args:
        shares: least and largest share that is drawn; STAMP's section A.2 has .4 and .8.
        settings: see :class:`~stamppruner.baselines.ChannelBaseline`.

    Raises:
        ConfigError: a value is outside its range.
    """

    name = "random widths"

    def __init__(self, *, shares: tuple[float, float] = (0.1, 1.0), **settings: Any) -> None:
        super().__init__(**settings)
        self.shares = shares
        ordered = len(shares) == 2 and 0 < shares[0] <= shares[1] <= 1
        self._require(ordered, "shares", "two shares in (0, 1], the smaller one first")

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Uniform noise: of the drawn number of channels, the largest stay."""
        return np.random.default_rng(self.seed).random(graph.num_channels)

    def choose_(self, model: nn.Module, chooser: Chooser, target: Target, budget: Budget) -> Met:
        """Draw widths, and as many channels."""
        space = WidthSpace(
            chooser, budget, floor=self.floor, round_to=self.round_to, shares=self.shares
        )
        widths = space.draw(np.random.default_rng([self.seed, 1]))
        return Met(space.plan(widths, self.scores(model, chooser.graph, target)))
