"""What happened while something was learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class History:
    """One row of figures a step, ready to plot.

    Example:
        >>> history = History()
        >>> row = history.add(loss=2.0, accuracy=0.1)
        >>> row = history.add(loss=1.0, accuracy=0.5)
        >>> history["loss"]
        [2.0, 1.0]
    """

    rows: list[dict[str, float]] = field(default_factory=list)

    def add(self, **figures: float) -> dict[str, float]:
        """Append a row and return it."""
        self.rows.append(figures)
        return figures

    def __getitem__(self, name: str) -> list[float]:
        return [row[name] for row in self.rows if name in row]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, float]]:
        return iter(self.rows)
