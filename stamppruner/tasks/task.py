"""A task, and what every source of tasks can do."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from stamppruner.errors import DataError


@dataclass(frozen=True, eq=False)
class Task:
    """One classification task, its images in random order.

    Attributes:
        images: ``(B, C, H, W)`` floating point.
        labels: ``(B,)`` int64 in ``0 .. ways - 1``.
        classes: original class id behind each label, in random order.

    Example:
        >>> task = Task(torch.zeros(4, 3, 8, 8), torch.tensor([0, 1, 0, 1]), classes=(7, 3))
        >>> task.ways, len(task), [len(labels) for _, labels in task.minibatches(2)]
        (2, 4, [2, 2])
    """

    images: Tensor
    labels: Tensor
    classes: tuple[int, ...]

    @property
    def ways(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Task:
        """The same task on another device."""
        return Task(self.images.to(device), self.labels.to(device), self.classes)

    def minibatches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield ``(images, labels)`` in order, ``size`` at a time.

        A last batch of less than half the size is merged into the one before it.

        Raises:
            DataError: ``size`` is below 1.
        """
        starts = _starts(len(self), size)
        for start, stop in zip(starts, [*starts[1:], len(self)], strict=True):
            yield self.images[start:stop], self.labels[start:stop]


@dataclass(frozen=True, eq=False)
class DrawnTask:
    """A task that is chosen and not read yet.

    Attributes:
        length: number of its images.
        read: gives the task from the source that drew it, or a copy of that; can be pickled if the
            source is to be read by workers.
    """

    length: int
    read: Callable[[Any], Task]

    def minibatches(self, size: int) -> int:
        """How many minibatches of a size the task will have."""
        return len(_starts(self.length, size))


def _starts(length: int, size: int) -> list[int]:
    """Where the minibatches of a task begin."""
    if size < 1:
        raise DataError(f"Task.minibatches: size is {size}; it must be at least 1")
    starts = list(range(0, length, size))
    if len(starts) > 1 and 2 * (length - starts[-1]) < size:
        starts.pop()
    return starts


@runtime_checkable
class TaskSource(Protocol):
    """Anything that draws tasks, and can be saved and resumed.

    One that also has ``draw(n)``, which gives as many :class:`DrawnTask`, is read task by task, and
    by workers where that is asked for.
    """

    @property
    def num_classes(self) -> int:
        """Number of distinct classes that tasks are drawn from."""

    @property
    def num_images(self) -> int:
        """Number of images that tasks are drawn from: N of the KL term's weight 1 / N."""

    def tasks(self, n: int) -> list[Task]:
        """The next ``n`` tasks."""

    def state_dict(self) -> dict[str, Any]:
        """Where the source stands, as plain numbers and strings."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from where ``state`` was taken."""


def draw(source: TaskSource, n: int) -> list[DrawnTask]:
    """The next ``n`` tasks of a source, to be read one by one where it has a ``draw(n)``."""
    own: Callable[[int], list[DrawnTask]] | None = getattr(source, "draw", None)
    if own is not None:
        return own(n)
    return [DrawnTask(len(task), partial(_itself, task)) for task in source.tasks(n)]


def _itself(task: Task, _source: Any) -> Task:
    return task


def check_count(n: int) -> None:
    """Raise DataError unless at least one task is asked for."""
    if n < 1:
        raise DataError(f"tasks: {n} tasks were asked for; ask for at least 1")


def resumed_position(state: Mapping[str, Any], settings: Mapping[str, Any], key: str) -> int:
    """The count in ``state``, which must have been taken under the same settings."""
    for name, ours in settings.items():
        if state.get(name) != ours:
            raise DataError(
                f"{settings['kind']}: the state has {name} {state.get(name)!r} and this source "
                f"{ours!r}; resume with the settings it was saved under"
            )
    count = state.get(key)
    if not isinstance(count, int) or count < 0:
        raise DataError(f"{settings['kind']}: the state has {key} {count!r}; it must be from 0 on")
    return count
