"""From whatever the user gives to a source of tasks."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from stamppruner.errors import DataError
from stamppruner.tasks.labelled import is_map_style, read_labels
from stamppruner.tasks.loaders import LoaderTasks
from stamppruner.tasks.sampler import TaskSampler
from stamppruner.tasks.task import TaskSource

logger = logging.getLogger("stamppruner")


def as_sampler(ref_tasks: Any, *, ways: int = 10, shots: int = 64, seed: int = 0) -> TaskSource:
    """Whatever the user gave, as a source of tasks.

    A source of tasks passes through; a labelled dataset becomes a :class:`TaskSampler` (``ways``
    lowered, with a warning, to the number of its classes); a list of datasets or loaders becomes
    :class:`LoaderTasks`.

    Raises:
        DataError: anything else, or data that these classes refuse.
    """
    if isinstance(ref_tasks, TaskSource):
        return ref_tasks
    if isinstance(ref_tasks, (list, tuple)):
        return LoaderTasks(ref_tasks, shots, seed=seed)
    if is_map_style(ref_tasks):
        available = len(np.unique(read_labels(ref_tasks, "reference data")))
        if 2 <= available < ways:
            logger.warning("reference data have %d classes: ways is %d", available, available)
            ways = available
        return TaskSampler(ref_tasks, ways, shots, seed=seed)
    raise DataError(
        f"reference data: {type(ref_tasks).__name__} is not a source of tasks; give a labelled "
        "map-style dataset, a TaskSampler, or a list of datasets or loaders"
    )
