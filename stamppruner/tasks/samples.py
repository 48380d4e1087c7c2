"""Tasks whose targets are not classes: one for each data set or loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stamppruner.errors import DataError
from stamppruner.tasks.in_turn import InTurn
from stamppruner.tasks.labelled import batches, check_batch, is_map_style, pair
from stamppruner.tasks.task import Task


class SampleTasks(InTurn):
    """Samples of data sets, with targets of any kind; one task each, in turn.

    Args:
        sources: map-style data sets of pairs of an image ``(C, H, W)`` and a target (a tensor or a
            number), or loaders of batches ``(images (B, C, H, W), targets (B, ...))``.
        size: images a task: drawn at random from a data set, the first ones of a loader.
        seed: not negative; fixes the order of the sources and the draws.

    Raises:
        DataError: no sources, one of them is empty or of another kind, or values out of range.
    """

    num_classes = 0

    def __init__(self, sources: Iterable[Any], size: int = 640, *, seed: int = 0) -> None:
        super().__init__(sources, size, seed, "size")
        self.size = size
        self.lengths = [_length(source, index) for index, source in enumerate(self.sources)]

    @property
    def num_images(self) -> int:
        """Number of images over all sources."""
        return sum(self.lengths)

    def _length_of(self, which: int) -> int:
        return min(self.size, self.lengths[which])

    def _read(self, position: int) -> Task:
        which = self._source_at(position)
        source, where = self.sources[which], f"SampleTasks: source {which}"
        rng = np.random.default_rng([self.seed, 1, position])
        if is_map_style(source):
            chosen = rng.permutation(self.lengths[which])[: self.size]
            items = [pair(source[int(i)], where) for i in chosen]
            images = _stacked([x for x, _ in items], "images", where)
            targets = _stacked([torch.as_tensor(y) for _, y in items], "targets", where)
        else:
            images, targets = self._first(source, where)
            order = torch.from_numpy(rng.permutation(len(images)))
            images, targets = images[order], targets[order]
        check_batch(images, where=where)
        return Task(images, targets, ())

    def _first(self, loader: Any, where: str) -> tuple[Tensor, Tensor]:
        """The first ``size`` samples of one pass."""
        images, targets, count = [], [], 0
        for x, y in batches(loader, where):
            images.append(x)
            targets.append(torch.as_tensor(y))
            count += len(x)
            if count >= self.size:
                break
        try:
            return torch.cat(images)[: self.size], torch.cat(targets)[: self.size]
        except (RuntimeError, TypeError) as error:
            raise DataError(f"{where}: batches cannot be put together ({error})") from error


def as_samples(ref_tasks: Any, *, size: int, seed: int = 0) -> SampleTasks:
    """Whatever the user gave for a task that is not classification, as a source of tasks.

    Raises:
        DataError: a sampler of classes, or data that :class:`SampleTasks` refuses.
    """
    if isinstance(ref_tasks, SampleTasks):
        return ref_tasks
    if isinstance(ref_tasks, list | tuple):
        return SampleTasks(ref_tasks, size, seed=seed)
    if is_map_style(ref_tasks):
        return SampleTasks([ref_tasks], size, seed=seed)
    raise DataError(
        f"reference data: {type(ref_tasks).__name__} draws no targets for a loss_fn; give a data "
        "set of (image, target) pairs, or a list of data sets or loaders, one a task"
    )


def _length(source: Any, index: int) -> int:
    where = f"SampleTasks: source {index}"
    if is_map_style(source):
        length = len(source)
    else:
        length = sum(len(x) for x, _ in batches(source, where))
    if not length:
        raise DataError(f"{where} is empty: give it at least one image")
    return length


def _stacked(tensors: list[Any], what: str, where: str) -> Tensor:
    try:
        return torch.stack(tensors)
    except (RuntimeError, TypeError) as error:
        raise DataError(
            f"{where}: its {what} cannot be put together ({error}); give tensors of one shape"
        ) from error
