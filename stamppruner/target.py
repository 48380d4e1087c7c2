"""A target data set as the prune stage needs it: a sample of images and labels, checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stamppruner.calls import FORWARD_ERRORS
from stamppruner.errors import DataError, UnsupportedModelError
from stamppruner.evidence import running_statistics
from stamppruner.tasks import check_batch

Batch = tuple[Tensor, Tensor]

SAMPLE = 2000
"""Images of a target that heads, batch norms and scores are fitted on."""


@dataclass(frozen=True, eq=False)
class Target:
    """A uniform sample of a labelled data set.

    Attributes:
        images: ``(N, C, H, W)`` in random order.
        labels: ``(N,)`` int64.
        num_classes: largest label of the whole data set, plus one.
        num_images: size of the whole data set.
        facts: what the data set says of its images: ``classes`` (names), ``mean`` and ``std``.
    """

    images: Tensor
    labels: Tensor
    num_classes: int
    num_images: int
    facts: Mapping[str, list[Any]] = field(default_factory=dict)

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


def as_loader(
    data: Any, *, batch_size: int = 128, shuffle: bool = False, seed: int = 0
) -> Iterable[Batch]:
    """A map-style data set becomes a loader; anything else that yields batches passes through.

    Args:
        data: a data set, or what yields batches.
        batch_size: of the loader that is made.
        shuffle: a new order every epoch, which follows from ``seed``.
        seed: of the order.

    Raises:
        DataError: the data are not iterable.
    """
    if isinstance(data, Dataset) and not isinstance(data, IterableDataset):
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(data, batch_size=batch_size, shuffle=shuffle, generator=generator)
    if not isinstance(data, Iterable):
        raise DataError(
            f"{type(data).__name__} is no loader: pass a DataLoader, a Dataset, or an iterable of "
            "(images, labels) batches"
        )
    return data


def reread(data: Any) -> Any:
    """The data themselves, if they can be read more than once.

    Raises:
        DataError: a generator or another iterator, which is empty after one pass.
    """
    if isinstance(data, Iterator):
        raise DataError(
            f"a {type(data).__name__} can be read only once: pass a DataLoader, a Dataset, or a "
            "list of (images, labels) batches"
        )
    return data


def checked_batches(loader: Any, *, channels: int | None = None) -> Iterator[Batch]:
    """The loader's batches, each checked.

    Raises:
        DataError: a batch is not a pair of images and labels that can be trained on.
    """
    for number, batch in enumerate(_collated(as_loader(loader))):
        where = f"target batch {number}"
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise DataError(
                f"{where} is a {type(batch).__name__}, not a pair: yield (images, labels)"
            )
        images, labels = batch
        check_batch(images, labels, channels=channels, where=where)
        yield images, labels


def _collated(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches; what it cannot put together is an error of the data."""
    try:
        yield from loader
    except (TypeError, RuntimeError) as error:
        raise DataError(
            f"the target's images cannot be put into batches ({error}): give tensors (C, H, W) of "
            "one size (torchvision: transform=Compose([Resize((32, 32)), ToTensor()]))"
        ) from error


def first_images(loader: Any) -> Tensor:
    """Images of the first batch.

    Raises:
        DataError: the loader is empty, can be read only once, or its first batch is unusable.
    """
    for images, _ in checked_batches(reread(loader)):
        return images
    raise DataError("the target loader is empty: give it at least one batch")


def sample_target(loader: Any, limit: int, *, channels: int | None = None, seed: int = 0) -> Target:
    """One pass over a loader that keeps a uniform random sample (reservoir sampling).

    A loader sorted by class is as good as a shuffled one.

    Raises:
        DataError: no images, unusable batches, images of several sizes, or a single class.
    """
    target, labels = read_target(loader, limit, channels=channels, seed=seed)
    check_labels(labels)
    return target


def read_target(
    loader: Any, limit: int, *, channels: int | None = None, seed: int = 0
) -> tuple[Target, set[int]]:
    """The sample of :func:`sample_target`, and all labels that were seen, which are not checked."""
    rng = np.random.default_rng(seed)
    images: list[Tensor] = []
    labels: list[int] = []
    seen: set[int] = set()
    count = 0
    for x, y in checked_batches(loader, channels=channels):
        if images and x.shape[1:] != images[0].shape:
            raise DataError(
                f"target images of {tuple(images[0].shape)} and {tuple(x.shape[1:])}: resize them "
                "to one shape"
            )
        seen.update(y.unique().tolist())
        for image, label in zip(x, y.tolist(), strict=True):
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
    found = torch.tensor(labels)[order]
    return Target(stacked, found, max(seen) + 1, count, _facts(loader)), seen


def _facts(loader: Any) -> dict[str, list[Any]]:
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


def check_fits(model: nn.Module, images: Tensor, classes: int) -> None:
    """Run the model on one image and see that it can tell the classes apart.

    Args:
        model: any; left in its modes.
        images: ``(B, C, H, W)`` on the model's device.
        classes: outputs that are needed; 0 for any output.

    Raises:
        DataError: the model does not take the images, or has too few outputs.
        UnsupportedModelError: it gives no logits.
    """
    try:
        with running_statistics(model), torch.no_grad():
            logits = model(images[:1])
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
