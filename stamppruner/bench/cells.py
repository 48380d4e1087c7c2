"""One run of a benchmark: which row, on which target, of which seed, at which size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from stamppruner.errors import CheckpointError


@dataclass(frozen=True)
class Cell:
    """One run.

    Attributes:
        row: its name.
        target: name of the data set.
        seed: of everything random.
        share: kept, of the multiply-adds of a structured row or the weights of an unstructured
            one; 1 of a full network; None leaves the size to the posterior.
        images: training images, None for all.
        prune_epochs, kl_scale: in place of the preset's, None for these.
    """

    row: str
    target: str
    seed: int
    share: float | None
    images: int | None
    prune_epochs: float | None = None
    kl_scale: float | None = None

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Cell:
        """That of a finished cell's record.

        Raises:
            CheckpointError: the record lacks a part of it.
        """
        try:
            return cls(**{field.name: record[field.name] for field in fields(cls)})
        except KeyError as error:
            raise CheckpointError(f"a cell of the record has no {error}") from error

    def to_json(self) -> dict[str, Any]:
        """What identifies it in a record."""
        return asdict(self)

    def __str__(self) -> str:
        text = f"{self.row}, {self.target}, seed {self.seed}"
        if self.share is not None and self.share < 1:
            text += f", {100 * self.share:g}%"
        if self.images is not None:
            text += f", {self.images} images"
        if self.prune_epochs is not None:
            text += f", K={self.prune_epochs:g}, kl={self.kl_scale:g}"
        return text
