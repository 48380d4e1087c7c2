"""The widths that groups may have, and the climb from the floors as far as a budget goes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from stamppruner.channels import BoolArray, ChannelGraph, ChannelGroup, FloatArray, IntArray

_STEPS = 8
"""A group takes a step between its widths if it is at least this many steps wide."""

Fits = Callable[[IntArray], BoolArray]
"""Whether a budget holds, ``(...)``, for channels a block ``(..., G)``."""


def halvings(number: int) -> Iterator[int]:
    """The number, half of it, and so on to 1, rounded down.

    >>> list(halvings(12))
    [12, 6, 3, 1]
    """
    while number > 1:
        yield number
        number //= 2
    yield 1


@dataclass(frozen=True, eq=False)
class Ladder:
    """The allowed numbers of channels a block of every group.

    Attributes:
        rungs: the numbers of each group, rising; the last is the whole block.
    """

    rungs: tuple[IntArray, ...]

    @classmethod
    def of(cls, graph: ChannelGraph, floor: float, round_to: int) -> Ladder:
        """Multiples, of at least ``floor`` of every group and at least one channel a block."""
        return cls(tuple(_rungs(group, floor, round_to) for group in graph.groups))

    @property
    def least(self) -> IntArray:
        """Every group at its floor, ``(G,)``."""
        return np.array([rungs[0] for rungs in self.rungs], dtype=np.int64)

    def nearest(self, counts: IntArray) -> IntArray:
        """The allowed numbers closest to others, ``(G,)``; the smaller of two as close."""
        pairs = zip(self.rungs, counts, strict=True)
        return np.array([rungs[np.abs(rungs - c).argmin()] for rungs, c in pairs], dtype=np.int64)

    def climb(self, merits: Sequence[FloatArray], fits: Fits) -> IntArray:
        """Take rungs in the order of their merit; skip what does not fit, and go on.

        Every decision for a smaller budget is also that for a larger one, up to the first rung
        that only the larger one affords; with that rung it costs more than the smaller one allows.
        So the cost rises with the budget.

        Args:
            merits: channels of each group by falling merit, ``(block size,)`` a group.
            fits: monotone: what does not fit does not fit with more channels.

        Returns:
            Channels a block, ``(G,)``; the floors are not tested.
        """
        order = self._order(merits)
        low, high = 0, len(order)  # the first ``low`` rungs fit
        while low < high:
            middle = (low + high + 1) // 2
            taken = np.bincount(order[:middle], minlength=len(self.rungs))
            low, high = (middle, high) if fits(self._at(taken)) else (low, middle - 1)
        taken = np.bincount(order[:low], minlength=len(self.rungs))
        if any(rungs[-1] - rungs[0] >= len(rungs) for rungs in self.rungs):  # steps above 1
            taken = self._filled(taken, order[low:], fits)
        return self._at(taken)

    def _filled(self, taken: IntArray, later: IntArray, fits: Fits) -> IntArray:
        """More rungs, in order, of the groups that can still afford their next one."""
        while len(later):
            groups = np.unique(later)
            wider = taken + np.eye(len(taken), dtype=np.int64)[groups]
            afford = fits(self._at(wider))
            later = later[np.isin(later, groups[afford])]  # the others never fit again
            if len(later):
                taken = wider[groups == later[0]][0]
                later = later[1:]
        return taken

    def _at(self, taken: IntArray) -> IntArray:
        """Channels a block after so many rungs above the floors, both ``(..., G)``."""
        return np.stack([r[taken[..., g]] for g, r in enumerate(self.rungs)], axis=-1)

    def _order(self, merits: Sequence[FloatArray]) -> IntArray:
        """The group of every rung above the floors, by the mean merit of what the rung adds."""
        found = []
        for rungs, merit in zip(self.rungs, merits, strict=True):
            sums = np.add.reduceat(merit, rungs[:-1]) if len(rungs) > 1 else np.empty(0)
            found.append(np.minimum.accumulate(sums / np.diff(rungs)))  # equal ones round apart
        owners = np.repeat(np.arange(len(found)), [len(rungs) for rungs in found])
        return owners[np.argsort(-np.concatenate(found), kind="stable")]


def _rungs(group: ChannelGroup, floor: float, round_to: int) -> IntArray:
    whole, step = group.block_size, _step(group, round_to)
    least = max(1, math.ceil(floor * whole))
    return np.array([*range(-(-least // step) * step, whole, step), whole], dtype=np.int64)


def _step(group: ChannelGroup, round_to: int) -> int:
    """Channels a block between allowed widths: the first of the halvings that is fine enough."""
    for multiple in halvings(round_to):
        step = math.lcm(multiple // math.gcd(multiple, group.blocks), group.multiple)
        if group.block_size >= _STEPS * step:
            return step
    return group.multiple
