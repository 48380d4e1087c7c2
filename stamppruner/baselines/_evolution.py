"""The evolutionary search over widths of MetaPruning (Liu et al. 2019, algorithm 1)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from stamppruner.baselines._widths import Widths, WidthSpace
from stamppruner.channels import FloatArray

logger = logging.getLogger(__name__)

_PATIENCE = 50
"""Draws in a row that give no new network within the budget, after which there are enough."""


@dataclass(frozen=True, eq=False)
class Found:
    """Networks that were tried.

    Attributes:
        widths: of the best.
        fitness: of the best.
        history: fitness of every network, ``(candidates,)`` a generation.
    """

    widths: Widths
    fitness: float
    history: tuple[FloatArray, ...]


class Evolution:
    """Draws a population, then mutates and crosses its best, always within the budget.

    Args:
        space: of widths.
        fitness: of a network, larger is better.
        population: networks a generation; a half are mutants and a half crossings, as far as new
            ones are found, and random ones fill it up.
        parents: the best so far, from which the next generation comes.
        mutation: probability that a mutant's group is drawn anew.
        random: of all draws.
    """

    def __init__(
        self,
        space: WidthSpace,
        fitness: Callable[[Widths], float],
        *,
        population: int,
        parents: int,
        mutation: float,
        random: np.random.Generator,
    ) -> None:
        self.space, self.fitness, self.random = space, fitness, random
        self.population, self.parents, self.mutation = population, parents, mutation
        self._tried: dict[tuple[int, ...], float] = {}

    def run(self, generations: int) -> Found:
        """The best of all generations; the first one is random."""
        history = []
        for generation in range(generations):
            values = []
            for widths in self._mutants_and_crossings() if generation else self._strangers([]):
                values.append(self.fitness(widths))
                self._tried[tuple(widths.tolist())] = values[-1]
            history.append(np.array(values))
            best = max(self._tried.values())
            logger.info("generation %d of %d: best %.4f", generation + 1, generations, best)
        best_key = max(self._tried, key=lambda key: self._tried[key])
        return Found(np.array(best_key), self._tried[best_key], tuple(history))

    def _mutants_and_crossings(self) -> list[Widths]:
        ranked = sorted(self._tried, key=lambda key: -self._tried[key])[: self.parents]
        best = np.array(ranked)
        half = self.population // 2
        new = self._distinct(lambda: self._mutant(best), half, [])
        if len(best) > 1:
            new = self._distinct(lambda: self._crossing(best), 2 * half, new)
        return self._strangers(new)

    def _mutant(self, best: Widths) -> Widths:
        groups = np.asarray(self.random.random(best.shape[1]) < self.mutation)
        return self.space.moved(best[self.random.integers(len(best))], groups, self.random)

    def _crossing(self, best: Widths) -> Widths:
        one, two = best[self.random.choice(len(best), 2, replace=False)]
        return np.where(self.random.random(best.shape[1]) < 0.5, one, two)

    def _strangers(self, new: list[Widths]) -> list[Widths]:
        return self._distinct(
            lambda: self.space.draw(self.random), self.population, new, checked=True
        )

    def _distinct(
        self,
        draw: Callable[[], Widths],
        count: int,
        new: list[Widths],
        *,
        checked: bool = False,
    ) -> list[Widths]:
        """Add networks that were not tried, up to a count, unless they are hard to find."""
        new = list(new)
        seen = {*self._tried, *(tuple(widths.tolist()) for widths in new)}
        misses = 0
        while len(new) < count and misses < _PATIENCE:
            widths = draw()
            key = tuple(widths.tolist())
            misses += 1
            if key not in seen and (checked or bool(self.space.fits(widths))):
                seen.add(key)
                new.append(widths)
                misses = 0
        return new
