"""From scores and a budget to the channels that are kept."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stamppruner.channels import BoolArray, ChannelGraph, ChannelGroup, ChannelPlan, IntArray
from stamppruner.costs import Cost, Macs, Params
from stamppruner.errors import BudgetError, PlanError

COSTS: dict[str, type[Cost]] = {"macs": Macs, "params": Params}
"""The cost behind each field of :class:`Budget`."""


@dataclass(frozen=True)
class Budget:
    """Upper bounds on the slim network; at least one.

    A value up to 1 is a share of the full network's cost, a larger one an absolute number.

    Attributes:
        macs: multiply-adds a sample (one fused multiply-add counts as one), at the image size
            that the model was traced with.
        params: parameters.

    Raises:
        BudgetError: a bound is not a positive finite number, or there is none.

    Example:
        >>> Budget(macs=0.25)
        Budget(macs=0.25, params=None)
    """

    macs: float | None = None
    params: float | None = None

    def __post_init__(self) -> None:
        bounds = self.bounds()
        if not bounds:
            raise BudgetError("a budget needs a bound, such as Budget(macs=0.25)")
        for name, value in bounds.items():
            real = isinstance(value, Real) and not isinstance(value, bool)
            if not real or not 0 < value < float("inf"):
                raise BudgetError(f"Budget({name}={value!r}): pass a share in (0, 1] or a number")
            plain = value if isinstance(value, int | float) else float(value)
            object.__setattr__(self, name, plain)

    def bounds(self) -> dict[str, float]:
        """The bounds that are set, by cost name."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in found.items() if value is not None}

    def limits(self, costs: Sequence[Cost]) -> list[float]:
        """Absolute bounds in the order of ``costs``."""
        bounds = self.bounds()
        return [bounds[c.name] * c.full if bounds[c.name] <= 1 else bounds[c.name] for c in costs]


class Chooser:
    """Chooses channels of one model under budgets; cheap enough to be asked every step.

    Args:
        model: the dense model.
        graph: its channels.
        floor: least share of every group that is kept (and at least one channel a block).
        round_to: kept widths are multiples of it wherever a group is at least four times as wide.
    """

    def __init__(
        self, model: nn.Module, graph: ChannelGraph, *, floor: float = 0.05, round_to: int = 1
    ) -> None:
        if not 0 <= floor <= 1 or round_to < 1:
            raise BudgetError(f"floor={floor} must lie in [0, 1] and round_to={round_to} above 0")
        self.graph = graph
        self.costs = {name: cost(model, graph) for name, cost in COSTS.items()}
        self._blocks = np.array([g.blocks for g in graph.groups])
        self._depth = np.array([g.block_size for g in graph.groups])  # channels a block
        self._step = np.array([_step(g, round_to) for g in graph.groups], dtype=np.int64)
        least = np.maximum(1, np.ceil(floor * self._depth)).astype(np.int64)
        self._least = np.minimum(self._depth, -(-least // self._step) * self._step)

    def choose(self, scores: npt.ArrayLike, budget: Budget) -> ChannelPlan:
        """Keep the best channels that fit.

        Channels are admitted in the order of their scores, over all groups at once, on top of
        every group's floor; in groups with blocks the r-th best of every block come together.
        More budget never keeps less.

        Args:
            scores: ``(num_channels,)``, larger is better.
            budget: what must hold.

        Raises:
            BudgetError: the floors alone cost more than the budget.
        """
        ranked, order = self._rank(scores)
        names = list(budget.bounds())
        costs = [self.costs[name] for name in names]
        limits = budget.limits(costs)

        def fits(admitted: int) -> bool:
            widths = torch.from_numpy(self._widths(order[:admitted]) * self._blocks).double()
            return all(float(c(widths)) <= m for c, m in zip(costs, limits, strict=True))

        if not fits(0):
            least = ", ".join(f"{self.least(c.name):.4g} {c.unit}" for c in costs)
            held = sorted(self.graph.protected)
            raise BudgetError(
                f"{budget} cannot be met: the least reachable is {least}. Lower floor or round_to, "
                f"or protect less (protected: {', '.join(held[:5]) or 'nothing'}"
                f"{', ...' if len(held) > 5 else ''})"
            )
        low, high = 0, len(order)  # fits(low) holds
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return self._plan(ranked, self._widths(order[:low]))

    def least(self, name: str) -> float:
        """Cost, by name, of every group at its floor: no budget below it can be met."""
        widths = torch.from_numpy(self._least * self._blocks).double()
        return float(self.costs[name](widths))

    def threshold(self, scores: npt.ArrayLike, least: float) -> ChannelPlan:
        """Keep the channels whose score reaches ``least``; blocks agree on their mean count."""
        ranked, _ = self._rank(scores)
        values = np.asarray(scores, dtype=np.float64)
        counts = np.array(
            [
                round(float((values[g.channels] >= least).sum()) / g.blocks)
                for g in self.graph.groups
            ]
        )
        return self._plan(ranked, np.clip(self._rounded(counts), self._least, self._depth))

    def widths(self, plan: ChannelPlan) -> torch.Tensor:
        """Kept channels a group, ``(G,)`` float64, as costs take them."""
        kept = [int(plan.keep[group.channels].sum()) for group in self.graph.groups]
        return torch.tensor(kept, dtype=torch.float64)

    def _rank(self, scores: npt.ArrayLike) -> tuple[list[IntArray], IntArray]:
        """Channels of each block from best to worst, and groups in order of admission."""
        values = np.asarray(scores, dtype=np.float64)
        if values.shape != (self.graph.num_channels,) or not np.isfinite(values).all():
            raise PlanError(
                f"scores of shape {values.shape} must be {self.graph.num_channels} finite numbers"
            )
        ranked, merit, owner = [], [], []
        for g, group in enumerate(self.graph.groups):
            block = values[group.channels].reshape(group.blocks, -1)
            order = np.argsort(-block, axis=1, kind="stable")
            ranked.append(order)
            atoms = np.take_along_axis(block, order, axis=1).mean(axis=0)[self._least[g] :]
            merit.append(atoms)
            owner.append(np.full(len(atoms), g))
        if not merit:
            return ranked, np.empty(0, dtype=np.int64)
        admission = np.argsort(-np.concatenate(merit), kind="stable")
        return ranked, np.concatenate(owner)[admission]

    def _widths(self, admitted: IntArray) -> IntArray:
        """Channels a block of every group after some were admitted."""
        counts = self._least + np.bincount(admitted, minlength=len(self._least))
        return self._rounded(counts)

    def _rounded(self, counts: IntArray) -> IntArray:
        whole = counts // self._step * self._step
        return np.where(counts >= self._depth, self._depth, np.maximum(whole, self._least))

    def _plan(self, ranked: list[IntArray], widths: IntArray) -> ChannelPlan:
        keep: BoolArray = np.zeros(self.graph.num_channels, dtype=bool)
        for group, order, width in zip(self.graph.groups, ranked, widths.tolist(), strict=True):
            offsets = group.start + np.arange(group.blocks)[:, None] * (group.size // group.blocks)
            keep[(offsets + order[:, :width]).ravel()] = True
        return ChannelPlan(self.graph, keep)


def _step(group: ChannelGroup, round_to: int) -> int:
    """Channels a block between allowed widths of a group."""
    step = math.lcm(round_to // math.gcd(round_to, group.blocks), group.multiple)
    return step if group.block_size >= 4 * step else group.multiple
