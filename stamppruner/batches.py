"""Batches of images and labels from whatever the user gives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from stamppruner.errors import DataError
from stamppruner.tasks import check_batch

Batch = tuple[Tensor, Tensor]


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
