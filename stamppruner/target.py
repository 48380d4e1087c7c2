"""A target data set as the prune stage needs it: a sample of images and labels, checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stamppruner.batches import Batch, reread
from stamppruner.calls import FORWARD_ERRORS
from stamppruner.errors import DataError, UnsupportedModelError
from stamppruner.evidence import running_statistics
from stamppruner.supervision import CLASSIFICATION, Supervision

SAMPLE = 2000
"""Images of a target that heads, batch norms and scores are fitted on."""


@dataclass(frozen=True, eq=False)
class Target:
    """A uniform sample of a labelled data set.

    Attributes:
        images: ``(N, C, H, W)`` in random order.
        labels: ``(N,)`` int64, or the targets ``(N, ...)`` of another task.
        num_classes: largest label of the whole data set, plus one; 0 of another task.
        num_images: size of the whole data set.
        facts: what the data set says of its images: ``classes`` (names), ``mean`` and ``std``.
        task: what is to be learned of them.
    """

    images: Tensor
    labels: Tensor
    num_classes: int
    num_images: int
    facts: Mapping[str, list[Any]] = field(default_factory=dict)
    task: Supervision = CLASSIFICATION

    def batches(self, size: int, device: torch.device | str = "cpu") -> Iterator[Batch]:
        """Images and labels ``size`` at a time; a lone last image joins the batch before."""
        starts = list(range(0, len(self.labels), size))
        if len(starts) > 1 and len(self.labels) - starts[-1] < 2:
            starts.pop()
        for start, stop in zip(starts, [*starts[1:], len(self.labels)], strict=True):
            yield self.images[start:stop].to(device), self.labels[start:stop].to(device)

    def image_batches(self, size: int, device: torch.device | str = "cpu") -> list[Tensor]:
        """The images alone."""
        return [images for images, _ in self.batches(size, device)]


def first_images(loader: Any, task: Supervision = CLASSIFICATION) -> Tensor:
    """Images of the first batch.

    Raises:
        DataError: the loader is empty, can be read only once, or its first batch is unusable.
    """
    for images, _ in task.image_batches(reread(loader)):
        return images
    raise DataError("the target loader is empty: give it at least one batch")


def sample_target(
    loader: Any,
    limit: int,
    *,
    channels: int | None = None,
    seed: int = 0,
    task: Supervision = CLASSIFICATION,
) -> Target:
    """One pass over a loader that keeps a uniform random sample (reservoir sampling).

    A loader sorted by class is as good as a shuffled one.

    Raises:
        DataError: no images, unusable batches, images of several sizes, or a single class.
    """
    target, labels = read_target(loader, limit, channels=channels, seed=seed, task=task)
    if task.classifies:
        check_labels(labels)
    return target


def read_target(
    loader: Any,
    limit: int,
    *,
    channels: int | None = None,
    seed: int = 0,
    task: Supervision = CLASSIFICATION,
) -> tuple[Target, set[int]]:
    """The sample of :func:`sample_target`, and all labels that were seen, which are not checked."""
    rng = np.random.default_rng(seed)
    images: list[Tensor] = []
    labels: list[Tensor] = []
    seen: set[int] = set()
    count = 0
    for x, y in task.image_batches(loader, channels=channels):
        for kind, one, first in (("images", x, images), ("targets", y, labels)):
            if first and one.shape[1:] != first[0].shape:
                raise DataError(
                    f"target {kind} of {tuple(first[0].shape)} and {tuple(one.shape[1:])}: resize "
                    "them to one shape"
                )
        if task.classifies:
            seen.update(y.unique().tolist())
            y = y.long()
        y = y.cpu()
        for image, label in zip(x, y, strict=True):
            count += 1
            if len(images) < limit:
                images.append(image)
                labels.append(label)
            elif (slot := int(rng.integers(count))) < limit:
                images[slot], labels[slot] = image, label
    if not images:
        raise DataError("the target loader is empty: give it at least one batch")
    order = rng.permutation(len(images))
    stacked = torch.stack([images[i] for i in order])
    found = torch.stack([labels[i] for i in order])
    classes = max(seen) + 1 if task.classifies else 0
    return Target(stacked, found, classes, count, facts_of(loader), task), seen


def facts_of(loader: Any) -> dict[str, list[Any]]:
    """Names of classes, and statistics that were taken out of the images, where there are some."""
    data = getattr(loader, "dataset", loader)
    facts: dict[str, list[Any]] = {}
    if (names := getattr(data, "classes", None)) and all(isinstance(n, str) for n in names):
        facts["classes"] = list(names)
    for name in ("mean", "std"):
        if isinstance(values := getattr(data, name, None), Tensor):
            facts[name] = values.flatten().tolist()
    return facts


def check_labels(labels: set[int]) -> None:
    """Raise DataError unless the labels can be those of a classifier."""
    if len(labels) < 2:
        raise DataError(
            f"the target has the single class {min(labels)}: a classifier needs at least two"
        )
    if max(labels) >= max(1000, 100 * len(labels)):
        raise DataError(
            f"the target's {len(labels)} classes have labels up to {max(labels)}: they look like "
            "ids; relabel them 0, 1, 2, ..."
        )


def check_fits(
    model: nn.Module, images: Tensor, classes: int, task: Supervision = CLASSIFICATION
) -> None:
    """Run the model on one image and see that it can tell the classes apart.

    Args:
        model: any; left in its modes.
        images: ``(B, C, H, W)`` on the model's device.
        classes: outputs that are needed; 0 for any output.
        task: passes the images through the model.

    Raises:
        DataError: the model does not take the images, or has too few outputs.
        UnsupportedModelError: it gives no logits.
    """
    try:
        with running_statistics(model), torch.no_grad():
            logits = task.outputs(model, images[:1])
    except FORWARD_ERRORS as error:
        raise DataError(
            f"{type(model).__name__} does not take images of {tuple(images.shape[1:])}, "
            f"{images.dtype} ({type(error).__name__}: {error}): give them the shape and type that "
            "it was made for"
        ) from error
    if classes and not (isinstance(logits, Tensor) and logits.dim() == 2):
        raise UnsupportedModelError(
            f"{type(model).__name__} gives no logits (B, classes) for images: wrap it in a module "
            "that does"
        )
    if classes and logits.shape[1] < classes:
        raise DataError(
            f"the data have {classes} classes and {type(model).__name__} {logits.shape[1]} "
            "outputs: relabel them from 0, or give the model more outputs"
        )
