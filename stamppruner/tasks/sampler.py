"""Balanced tasks of disjoint classes, drawn from one labelled dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Integral
from operator import methodcaller
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from stamppruner.errors import DataError
from stamppruner.tasks.labelled import (
    IntArray,
    check_batch,
    check_drawn,
    fetch_images,
    group_by_class,
    read_labels,
)
from stamppruner.tasks.task import DrawnTask, Task, check_count, resumed_position

Transform: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""Maps images ``(B, C, H, W)`` and a generator to images."""


class TaskSampler:
    """Balanced tasks of ``ways`` classes and ``shots`` images a class, without replacement.

    The tasks of one call have disjoint classes while enough classes remain; then a new random
    partition of the classes starts. Which images a call draws follows from the seed and the
    number of calls before it alone (random numbers that the dataset itself draws do not).

    Args:
        dataset: map-style, items ``(image (C, H, W), label)``. Labels come from ``.targets`` or
            ``.labels`` if present, else from one scan; images from ``.fetch(indices)``,
            ``(B, C, H, W)``, if present.
        ways: classes a task.
        shots: images a class.
        seed: not negative.
        transform: called on the images ``(B, C, H, W)`` of each task with a generator.

    Raises:
        DataError: labels that are not integers from 0 on, fewer than two classes, ``ways`` or
            ``shots`` that the dataset cannot supply.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.zeros(40, 3, 8, 8), torch.arange(40) % 4)
        >>> first, second = TaskSampler(data, ways=2, shots=5).tasks(2)
        >>> first.images.shape, sorted(first.classes + second.classes)
        (torch.Size([10, 3, 8, 8]), [0, 1, 2, 3])
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        ways: int = 10,
        shots: int = 64,
        *,
        seed: int = 0,
        transform: Transform | None = None,
    ) -> None:
        self.by_class = group_by_class(read_labels(dataset, "TaskSampler"), "TaskSampler")
        _check_draw(self.by_class, ways, shots, seed)
        self.dataset = dataset
        self.ways, self.shots, self.seed = ways, shots, seed
        self.transform = transform
        self.iteration = 0

    @property
    def num_classes(self) -> int:
        """Number of classes in the dataset."""
        return len(self.by_class)

    @property
    def num_images(self) -> int:
        """Number of images in the dataset."""
        return sum(len(found) for found in self.by_class.values())

    def tasks(self, n: int) -> list[Task]:
        """The next ``n`` tasks; counts as one call. Raises DataError as :meth:`sample` does."""
        drawn = self.sample(self.iteration, n)
        self.iteration += 1
        return drawn

    def draw(self, n: int) -> list[DrawnTask]:
        """The next ``n`` tasks, chosen and not read; counts as one call."""
        drawn = self._drawn(self.iteration, n)
        self.iteration += 1
        return drawn

    def sample(self, iteration: int, n: int) -> list[Task]:
        """The ``n`` tasks of call number ``iteration``; leaves the count of calls alone.

        Raises:
            DataError: ``n`` is below 1, or images are not finite floating point of one shape.
        """
        return [drawn.read(self) for drawn in self._drawn(iteration, n)]

    def minibatch(self, step: int, size: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Images ``(size, C, H, W)`` of all classes, and their labels in the dataset ``(size,)``.

        Classes come equally often in the mean; the choice follows from the seed and ``step``. With
        a ``part``, those positions alone are given, and read.

        Raises:
            DataError: images that are not finite floating point of one shape.
        """
        rng = np.random.default_rng([self.seed, step, 1])
        ids = np.array(sorted(self.by_class), dtype=np.int64)
        labels = rng.choice(ids, size)
        indices = np.array([rng.choice(self.by_class[c]) for c in labels.tolist()])
        images = self._images(indices, labels, self._transform_seed(rng), part)
        return images, torch.from_numpy(labels)[part]

    def images_at(self, indices: IntArray) -> Tensor:
        """Images ``(B, C, H, W)`` at these places of the dataset, without the transform.

        Raises:
            DataError: items that are not pairs with a tensor, or tensors of unequal shapes.
        """
        return fetch_images(self.dataset, indices, "TaskSampler")

    def state_dict(self) -> dict[str, Any]:
        """Settings and the number of calls so far, JSON-able."""
        return {**self._settings(), "iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state``. Raises DataError if it was taken under other settings."""
        self.iteration = resumed_position(state, self._settings(), "iteration")

    def _settings(self) -> dict[str, Any]:
        sizes = {"num_classes": self.num_classes, "ways": self.ways, "shots": self.shots}
        return {"kind": "TaskSampler", "seed": self.seed, **sizes}

    def _partition(self, n: int, rng: np.random.Generator) -> list[IntArray]:
        ids = np.array(sorted(self.by_class), dtype=np.int64)
        groups: list[IntArray] = []
        while len(groups) < n:
            whole = self.num_classes // self.ways * self.ways
            groups.extend(rng.permutation(ids)[:whole].reshape(-1, self.ways))
        return groups[:n]

    def _drawn(self, iteration: int, n: int) -> list[DrawnTask]:
        check_count(n)
        rng = np.random.default_rng([self.seed, iteration])
        return [self._choose(classes, rng) for classes in self._partition(n, rng)]

    def _choose(self, classes: IntArray, rng: np.random.Generator) -> DrawnTask:
        found = [rng.choice(self.by_class[c], self.shots, replace=False) for c in classes.tolist()]
        order = rng.permutation(self.ways * self.shots)
        indices = np.concatenate(found)[order]
        chosen = indices, order // self.shots, classes, self._transform_seed(rng)
        return DrawnTask(len(order), methodcaller("_read", *chosen))

    def _read(self, indices: IntArray, labels: IntArray, classes: IntArray, seed: int) -> Task:
        images = self._images(indices, classes[labels], seed)
        return Task(images, torch.from_numpy(labels), tuple(classes.tolist()))

    def _transform_seed(self, rng: np.random.Generator) -> int:
        return 0 if self.transform is None else int(rng.integers(2**62))

    def _images(
        self, indices: IntArray, classes: IntArray, seed: int, part: slice = slice(None)
    ) -> Tensor:
        read = part if self.transform is None else slice(None)  # it may treat images together
        images = self.images_at(indices[read])
        check_drawn(images, classes[read], indices[read], "TaskSampler")
        if self.transform is None:
            return images
        images = self.transform(images, torch.Generator().manual_seed(seed))
        check_batch(images, where="TaskSampler, after transform")
        return images[part]


def _check_draw(by_class: Mapping[int, IntArray], ways: int, shots: int, seed: int) -> None:
    whole = all(isinstance(n, Integral) for n in (ways, shots, seed))
    if not whole or ways < 2 or shots < 1 or seed < 0:
        raise DataError(
            f"TaskSampler: ways {ways!r}, shots {shots!r}, seed {seed!r}; they must be whole "
            "numbers of at least 2, 1, 0"
        )
    if ways > len(by_class):
        raise DataError(
            f"TaskSampler: ways is {ways} and the dataset has {len(by_class)} classes; "
            f"use ways up to {len(by_class)}"
        )
    label, found = min(by_class.items(), key=lambda entry: len(entry[1]))
    if len(found) < shots:
        raise DataError(
            f"TaskSampler: class {label} has {len(found)} images and shots is {shots}; "
            f"use shots up to {len(found)}, or leave out small classes"
        )
