"""Few-class tasks, drawn from labelled reference data or given as loaders.

The paper splits the reference classes into disjoint tasks and meta-trains over them. A task here
holds its images and its own labels ``0 .. ways - 1``.
"""

from stamppruner.tasks.dispatch import as_sampler
from stamppruner.tasks.labelled import check_batch
from stamppruner.tasks.loaders import LoaderTasks
from stamppruner.tasks.sampler import TaskSampler
from stamppruner.tasks.samples import SampleTasks, as_samples
from stamppruner.tasks.task import DrawnTask, Task, TaskSource, draw

__all__ = [
    "DrawnTask",
    "LoaderTasks",
    "SampleTasks",
    "Task",
    "TaskSampler",
    "TaskSource",
    "as_sampler",
    "as_samples",
    "check_batch",
    "draw",
]
