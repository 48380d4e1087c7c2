"""Widths of all groups at once, drawn under a budget as MetaPruning draws them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stamppruner.budget import Budget, Chooser
from stamppruner.channels import BoolArray, ChannelGraph, ChannelPlan, FloatArray, IntArray
from stamppruner.costs import Latency
from stamppruner.errors import BudgetError
from stamppruner.ladder import Ladder, halvings

TOLERANCE = 0.05
"""A drawn network uses at least this much less than all of a budget (theirs: 1950 to 2050 M)."""

_DRAWS = 200
"""Draws a round, and rounds without a hit before draws are scaled."""

_ROUNDS = 5

Widths = IntArray
"""Channels a block of every group, ``(G,)``."""


class WidthSpace:
    """The widths that groups may have under a budget.

    Args:
        chooser: of the network, for its costs.
        budget: of costs that follow from the widths.
        floor: share of every group that is always kept.
        round_to: see :class:`~stamppruner.baselines.ChannelBaseline`.
        shares: least and largest share of a group that is drawn.

    Raises:
        BudgetError: it bounds a time, or cannot be met.
    """

    def __init__(
        self,
        chooser: Chooser,
        budget: Budget,
        *,
        floor: float,
        round_to: int,
        shares: tuple[float, float],
    ) -> None:
        self.graph, self.shares = chooser.graph, shares
        self._costs = chooser.costs_of(budget)
        if timed := [cost.name for cost in self._costs if isinstance(cost, Latency)]:
            raise BudgetError(
                f"{budget}: widths are drawn under costs that follow from them, which "
                f"{', '.join(timed)} is not: bound macs, params or bytes"
            )
        self._limits = budget.limits(self._costs)
        self._blocks = np.array([g.blocks for g in self.graph.groups], dtype=np.int64)
        self._sizes = np.array([g.block_size for g in self.graph.groups], dtype=np.int64)
        for multiple in halvings(round_to):
            self._ladder = Ladder.of(self.graph, floor, multiple)
            if self.used(self._ladder.least) <= 1:
                return
        chooser.choose(np.zeros(self.graph.num_channels), budget)  # raises, with the reasons

    def used(self, widths: IntArray) -> FloatArray:
        """Share of the budget that is used, ``(...)``, for widths ``(..., G)``."""
        kept = torch.from_numpy(widths * self._blocks).double()
        pairs = zip(self._costs, self._limits, strict=True)
        return np.max([(cost(kept) / limit).numpy() for cost, limit in pairs], axis=0)

    def relative(self, widths: IntArray) -> FloatArray:
        """Shares of the full widths, ``(..., G)``."""
        return np.asarray(widths / self._sizes)

    def draw(self, random: np.random.Generator) -> Widths:
        """Independent uniform shares of all groups, drawn until the budget is met and used.

        Where no draw meets it, which holds for budgets far from the middle of the range, a draw's
        shares are multiplied by the number at which it does.
        """
        low, high = self.shares
        for _ in range(_ROUNDS):
            shares = random.uniform(low, high, (_DRAWS, len(self._sizes)))
            widths = self._at(shares)
            fits = self.fits(widths)
            if fits.any():
                return np.asarray(widths[fits.argmax()])
        return self._scaled(shares[0])

    def fits(self, widths: IntArray) -> BoolArray:
        """Whether the budget is met and used, ``(...)``, for widths ``(..., G)``."""
        used = self.used(widths)
        return np.asarray((used <= 1) & (used >= 1 - TOLERANCE))

    def plan(self, widths: Widths, order: FloatArray | None = None) -> ChannelPlan:
        """The plan of some widths.

        Args:
            widths: channels a block, ``(G,)``.
            order: scores ``(num_channels,)`` of which the largest are kept; None: the first ones.
        """
        return ChannelPlan(self.graph, keep_of(self.graph, widths.tolist(), order))

    def moved(self, widths: Widths, groups: BoolArray, random: np.random.Generator) -> Widths:
        """New draws for some of the groups; the others stay."""
        low, high = self.shares
        drawn = self._at(random.uniform(low, high, len(self._sizes)))
        return np.where(groups, drawn, widths)

    def _at(self, shares: FloatArray) -> IntArray:
        """The allowed widths that are closest to shares of the full ones, ``(..., G)``."""
        found = np.empty(shares.shape, dtype=np.int64)
        for g, rungs in enumerate(self._ladder.rungs):
            asked = shares[..., g, None] * self._sizes[g]
            found[..., g] = rungs[np.abs(rungs - asked).argmin(axis=-1)]
        return found

    def _scaled(self, shares: FloatArray) -> Widths:
        """The widest multiple of some shares that meets the budget."""
        low, high = 0.0, 1 / float(shares.min())
        for _ in range(40):
            middle = (low + high) / 2
            met = self.used(self._at(np.minimum(1, middle * shares))) <= 1
            low, high = (middle, high) if met else (low, middle)
        return self._at(np.minimum(1, low * shares))


def keep_of(
    graph: ChannelGraph, widths: Sequence[int], order: FloatArray | None = None
) -> BoolArray:
    """Channels that are kept at some widths, ``(num_channels,)``; see :meth:`WidthSpace.plan`."""
    keep = np.zeros(graph.num_channels, dtype=bool)
    for group, width in zip(graph.groups, widths, strict=True):
        for start in range(group.start, group.start + group.size, group.block_size):
            block = np.arange(start, start + group.block_size)
            best = block if order is None else block[np.argsort(-order[block], kind="stable")]
            keep[best[:width]] = True
    return keep
