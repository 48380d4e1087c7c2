"""Tasks that the user has already cut: one dataset or loader each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stamppruner.errors import DataError
from stamppruner.tasks.in_turn import InTurn
from stamppruner.tasks.labelled import (
    IntArray,
    as_labels,
    batches,
    check_batch,
    check_drawn,
    fetch_images,
    group_by_class,
    is_map_style,
    read_labels,
    stack_images,
)
from stamppruner.tasks.task import Task


class LoaderTasks(InTurn):
    """One task for each dataset or loader given, in a new random order each cycle.

    Args:
        sources: map-style datasets as in :class:`TaskSampler`, or loaders (iterables of batches
            ``(images (B, C, H, W), labels (B,))``). A loader is read once here, for its labels.
        shots: at most so many images a class, drawn at random from a dataset, and the first
            ones that come from a loader.
        seed: not negative; fixes the order of the sources and the draws from datasets.

    Raises:
        DataError: no sources, or one of them is of another kind or has unusable labels.

    Example:
        >>> two = [(torch.zeros(6, 3, 8, 8), torch.arange(6) % 2)]  # a loader: batches
        >>> three = [(torch.zeros(6, 3, 8, 8), torch.arange(6) % 3)]
        >>> sorted(task.ways for task in LoaderTasks([two, three], shots=2).tasks(2))
        [2, 3]
    """

    def __init__(self, sources: Iterable[Any], shots: int = 64, *, seed: int = 0) -> None:
        super().__init__(sources, shots, seed, "shots")
        self.shots = shots
        self.groups: list[dict[int, IntArray]] = []
        for index, source in enumerate(self.sources):
            where = f"LoaderTasks: source {index}"
            if is_map_style(source):
                labels = read_labels(source, where)
            else:
                parts = [as_labels(y, where) for _, y in batches(source, where)]
                if not parts:
                    raise DataError(f"{where}: the loader gives no batches")
                labels = np.concatenate(parts)
            self.groups.append(group_by_class(labels, where))

    @property
    def num_classes(self) -> int:
        """Number of distinct classes over all sources."""
        return len(set().union(*self.groups))

    @property
    def num_images(self) -> int:
        """Number of images over all sources."""
        return sum(len(found) for group in self.groups for found in group.values())

    def _length_of(self, which: int) -> int:
        return sum(min(len(found), self.shots) for found in self.groups[which].values())

    def _read(self, position: int) -> Task:
        cycle, turn = divmod(position, len(self.sources))
        which = self._source_at(position)
        rng = np.random.default_rng([self.seed, cycle, turn])
        source, group = self.sources[which], self.groups[which]
        where = f"LoaderTasks: source {which}"
        if is_map_style(source):
            indices = np.concatenate(
                [rng.permutation(found)[: self.shots] for found in group.values()]
            )
            ids = np.repeat(list(group), [min(len(v), self.shots) for v in group.values()])
            images = fetch_images(source, indices, where)
            check_drawn(images, ids, indices, where)
        else:
            images, ids = self._first(source, group, where)
        classes = rng.permutation(np.unique(ids))
        order = rng.permutation(len(ids))
        ranks = {label: rank for rank, label in enumerate(classes.tolist())}
        labels = torch.tensor([ranks[label] for label in ids[order].tolist()])
        return Task(images[torch.from_numpy(order)], labels, tuple(ranks))

    def _first(
        self, loader: Any, group: Mapping[int, IntArray], where: str
    ) -> tuple[Tensor, IntArray]:
        """The first ``shots`` images a class of one pass, which ends early if all are full."""
        room = {label: min(len(found), self.shots) for label, found in group.items()}
        images, ids = [], []
        for x, y in batches(loader, where):
            check_batch(x, where=where)
            for image, label in zip(x, as_labels(y, where).tolist(), strict=True):
                if room.get(label, 0) > 0:
                    room[label] -= 1
                    images.append(image)
                    ids.append(label)
            if not any(room.values()):
                break
        if len(set(ids)) < 2:
            raise DataError(f"{where}: this pass of the loader gave fewer than two classes")
        return stack_images(images, where), np.array(ids, dtype=np.int64)
