"""Reading labels and images from whatever the user gives, and refusing what cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from stamppruner.errors import DataError

IntArray = npt.NDArray[np.int64]

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def check_batch(
    images: Any,
    labels: Any = None,
    *,
    channels: int | None = None,
    num_classes: int | None = None,
    where: str = "batch",
) -> None:
    """Raise DataError unless the batch can be trained on.

    Args:
        images: must be ``(B, C, H, W)``, floating point, finite, not empty.
        labels: if given, must be ``(B,)``, integers, not negative.
        channels: if given, ``C`` must equal it.
        num_classes: if given, labels must lie below it.
        where: begins the message.
    """
    if not isinstance(images, Tensor) or not images.is_floating_point():
        found = images.dtype if isinstance(images, Tensor) else type(images).__name__
        raise DataError(
            f"{where}: images are {found}; give a floating-point tensor "
            "(torchvision: transform=ToTensor())"
        )
    _check_dense(images, f"{where}: images")
    if images.ndim != 4 or 0 in images.shape:
        raise DataError(
            f"{where}: images have shape {tuple(images.shape)}; give (B, C, H, W), none of them 0"
        )
    if channels is not None and images.shape[1] != channels:
        raise DataError(
            f"{where}: images have {images.shape[1]} channels and the model reads {channels}; "
            "convert the images"
        )
    bad = not_finite(images)
    if len(bad):
        raise DataError(
            f"{where}: {len(bad)} of {len(images)} images hold NaN or Inf, first at positions "
            f"{bad[:5].tolist()}; clean them"
        )
    if labels is not None:
        _check_labels(labels, len(images), num_classes, where)


def _check_labels(labels: Any, count: int, num_classes: int | None, where: str) -> None:
    if not isinstance(labels, Tensor) or labels.dtype not in _INTEGERS:
        found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise DataError(f"{where}: labels are {found}; give a tensor of integers")
    _check_dense(labels, f"{where}: labels")
    if labels.shape != (count,):
        raise DataError(
            f"{where}: labels have shape {tuple(labels.shape)}; {count} images need ({count},)"
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or (num_classes is not None and high >= num_classes):
        top = "n - 1" if num_classes is None else num_classes - 1
        raise DataError(
            f"{where}: labels span {low}..{high}; they must lie in 0..{top} "
            "(relabel them, or give the model more outputs)"
        )


def _check_dense(values: Tensor, what: str) -> None:
    """Raise DataError for a tensor whose values are not there, or not one beside the other."""
    if values.is_nested or values.layout != torch.strided:
        kind = "nested" if values.is_nested else str(values.layout).removeprefix("torch.")
        raise DataError(f"{what} are a {kind} tensor; give an ordinary one, such as x.to_dense()")
    if values.is_meta:
        raise DataError(f"{what} are on the meta device, which has no values; load them")


def not_finite(images: Tensor) -> IntArray:
    """Positions, ``(K,)``, of the images of ``(B, ...)`` that hold NaN or Inf."""
    bad = ~torch.isfinite(images).flatten(1).all(1)
    return np.flatnonzero(bad.cpu().numpy()).astype(np.int64)


def is_map_style(source: Any) -> bool:
    """Whether it has a length and items by index, and is not a plain sequence or mapping."""
    if isinstance(source, (list, tuple, str, bytes, dict, Tensor, np.ndarray, IterableDataset)):
        return False
    return hasattr(source, "__getitem__") and hasattr(source, "__len__")


def read_labels(dataset: Any, where: str = "dataset") -> IntArray:
    """Labels ``(N,)`` of a map-style dataset.

    From ``.targets`` or ``.labels`` where these are present, as long as the dataset, and not
    changed by a ``target_transform``; else from one scan of all items.

    Raises:
        DataError: no items, or labels that are not integers from 0 on.
    """
    if not is_map_style(dataset):
        raise DataError(
            f"{where}: {type(dataset).__name__} is not a map-style dataset; give one with "
            "__len__ and __getitem__"
        )
    count = len(dataset)
    if count == 0:
        raise DataError(f"{where}: the dataset is empty; give labelled images")
    if isinstance(dataset, Subset):
        inner: IntArray = read_labels(dataset.dataset, where)
        return inner[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return as_labels(dataset.tensors[1], where)
    if getattr(dataset, "target_transform", None) is None:
        for name in ("targets", "labels"):
            found = getattr(dataset, name, None)
            if isinstance(found, (list, tuple, np.ndarray, Tensor)) and len(found) == count:
                return as_labels(found, where)
    return as_labels([pair(dataset[index], where)[1] for index in range(count)], where)


def as_labels(raw: Any, where: str) -> IntArray:
    """``(N,)`` int64; raises DataError unless they are integers from 0 on."""
    if isinstance(raw, Tensor):
        raw = raw.detach().cpu().numpy()
    try:
        one_by_one = not isinstance(raw, np.ndarray)
        labels = np.array([np.asarray(one) for one in raw]) if one_by_one else raw
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: labels cannot be read ({error}); give integers") from error
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise DataError(
            f"{where}: labels are {labels.dtype} of shape {labels.shape}; give one integer an image"
        )
    if labels.size and labels.min() < 0:
        raise DataError(
            f"{where}: label {labels.min()} at position {labels.argmin()} is negative; "
            "number the classes from 0"
        )
    return labels.astype(np.int64)


def fetch_images(dataset: Any, indices: IntArray, where: str = "dataset") -> Tensor:
    """Images ``(B, C, H, W)`` at ``indices`` ``(B,)`` of a map-style dataset.

    In one go from ``.fetch(indices)`` if it has that, else item by item.

    Raises:
        DataError: items that are not pairs with a tensor, or tensors of unequal shapes.
    """
    if isinstance(dataset, Subset):
        return fetch_images(dataset.dataset, np.asarray(dataset.indices)[indices], where)
    if callable(getattr(dataset, "fetch", None)):
        fetched: Tensor = dataset.fetch(indices)
        return fetched
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[0][torch.from_numpy(indices)]
    return stack_images([pair(dataset[int(i)], where)[0] for i in indices], where, indices)


def stack_images(images: Sequence[Any], where: str, indices: IntArray | None = None) -> Tensor:
    """``(B, C, H, W)`` from images ``(C, H, W)``; raises DataError unless all are alike."""
    names = range(len(images)) if indices is None else indices.tolist()
    for image, name in zip(images, names, strict=True):
        if not isinstance(image, Tensor):
            raise DataError(
                f"{where}: image {name} is {type(image).__name__}; give tensors "
                "(torchvision: transform=ToTensor())"
            )
        if image.shape != images[0].shape:
            raise DataError(
                f"{where}: image {name} has shape {tuple(image.shape)} and image {names[0]} "
                f"{tuple(images[0].shape)}; resize them to one shape"
            )
    return torch.stack(list(images))


def batches(loader: Any, where: str) -> Iterator[tuple[Any, Any]]:
    """Yield the pairs of a loader; raises DataError if it gives something else."""
    try:
        stream = iter(loader)
    except TypeError as error:
        raise DataError(
            f"{where}: {type(loader).__name__} is neither a map-style dataset nor a loader"
        ) from error
    for batch in stream:
        yield pair(batch, where)


def group_by_class(labels: IntArray, where: str) -> dict[int, IntArray]:
    """Positions of each class, in the order of class ids; at least two classes."""
    ids, counts = np.unique(labels, return_counts=True)
    if len(ids) < 2:
        raise DataError(f"{where}: all labels are {ids[0]}; a task needs at least two classes")
    positions = np.split(np.argsort(labels, kind="stable"), np.cumsum(counts)[:-1])
    return dict(zip(ids.tolist(), positions, strict=True))


def check_drawn(images: Tensor, ids: IntArray, indices: IntArray, where: str) -> None:
    """As :func:`check_batch`, but names the class and the place in the dataset."""
    bad = not_finite(images)
    if len(bad):
        raise DataError(
            f"{where}: {len(bad)} images hold NaN or Inf, first in class {ids[bad[0]]} at "
            f"dataset indices {indices[bad[:5]].tolist()}; clean them or leave them out"
        )
    check_batch(images, where=where)


def pair(item: Any, where: str) -> tuple[Any, Any]:
    """An item of a data set; raises DataError unless it is a pair."""
    if not isinstance(item, (tuple, list)) or len(item) != 2:
        raise DataError(f"{where}: an item is {type(item).__name__}; give (image, label) pairs")
    return item[0], item[1]
