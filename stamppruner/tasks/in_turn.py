"""One task for each of several sources, in a new random order each cycle."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from operator import methodcaller
from typing import Any

import numpy as np

from stamppruner.errors import DataError
from stamppruner.tasks.task import DrawnTask, Task, check_count, resumed_position


class InTurn(ABC):
    """Draws tasks from sources in turn.

    Args:
        sources: at least one.
        size: images to a task, or to a class of it, whatever ``named`` says; from 1.
        seed: of the order; not negative.
        named: what the size is called.

    Raises:
        DataError: no sources, or values out of range.
    """

    def __init__(self, sources: Iterable[Any], size: int, seed: int, named: str) -> None:
        self.sources = list(sources)
        self.seed, self.position = seed, 0
        self._kept = {"sources": len(self.sources), named: size}
        if not self.sources or size < 1 or seed < 0:
            raise DataError(
                f"{type(self).__name__}: {len(self.sources)} sources, {named} {size}, seed {seed}; "
                f"give at least one source, {named} from 1 and a seed from 0"
            )

    def tasks(self, n: int) -> list[Task]:
        """The next ``n`` tasks. Raises DataError if ``n`` is below 1, or for unusable images."""
        before = self.position
        try:
            return [drawn.read(self) for drawn in self.draw(n)]
        except BaseException:
            self.position = before
            raise

    def draw(self, n: int) -> list[DrawnTask]:
        """The next ``n`` tasks, chosen and not read."""
        check_count(n)
        positions = range(self.position, self.position + n)
        self.position += n
        return [
            DrawnTask(self._length_of(self._source_at(at)), methodcaller("_read", at))
            for at in positions
        ]

    def state_dict(self) -> dict[str, Any]:
        """Settings and the number of tasks so far, JSON-able."""
        return {**self._settings(), "position": self.position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. Raises DataError if it was taken under other settings."""
        self.position = resumed_position(state, self._settings(), "position")

    def _settings(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "seed": self.seed, **self._kept}

    def _source_at(self, position: int) -> int:
        cycle, turn = divmod(position, len(self.sources))
        return int(np.random.default_rng([self.seed, cycle]).permutation(len(self.sources))[turn])

    @abstractmethod
    def _length_of(self, which: int) -> int:
        """Images of a task of this source."""

    @abstractmethod
    def _read(self, position: int) -> Task:
        """The task at this place of the order."""
