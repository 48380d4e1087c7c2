"""Labelled images held in memory, and batches of them by indexing."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from stamppruner.data.augment import Augment
from stamppruner.errors import DataError

Statistics = Sequence[float]


class ArrayDataset(Dataset[tuple[Tensor, int]]):
    """Images and labels in memory; yields ``(image (C, H, W) float32, label int)``.

    ``uint8`` images are scaled to ``[0, 1]``; then ``augment`` is applied, then
    ``(x - mean) / std`` a channel. Images are stored once, in the dtype given.

    Args:
        images: ``(N, H, W, C)`` uint8 or ``(N, C, H, W)`` floating point.
        labels: ``(N,)`` integers, not negative.
        mean: one number a channel; ``None`` is 0.
        std: one number a channel; ``None`` is 1.
        augment: batched augmentation, such as :class:`~stamppruner.data.CropFlip`.
        seed: seeds the generator handed to ``augment``.
        classes: names of the classes, optional; entry ``i`` is label ``i``.

    Raises:
        DataError: shapes, dtypes or statistics that do not fit, or images with NaN or Inf.
    """

    def __init__(
        self,
        images: npt.NDArray[np.generic] | Tensor,
        labels: npt.ArrayLike | Tensor,
        *,
        mean: Statistics | None = None,
        std: Statistics | None = None,
        augment: Augment | None = None,
        seed: int = 0,
        classes: Sequence[str] = (),
    ) -> None:
        self.images = _as_images(images)
        self.targets = _as_labels(labels, len(self.images), len(classes))
        self.classes = tuple(classes)
        self.mean = _as_statistics("mean", mean, 0.0, self.images.shape[1])
        self.std = _as_statistics("std", std, 1.0, self.images.shape[1])
        if not bool((self.std > 0).all()):
            raise DataError(f"std is {self.std.flatten().tolist()}; every entry must be above 0")
        self.augment = augment
        self._generator = torch.Generator().manual_seed(seed)
        self._worker_seed: int | None = None

    @property
    def num_classes(self) -> int:
        """Number of class names if given, else the largest label plus one."""
        return len(self.classes) or int(self.targets.max()) + 1

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """``(C, H, W)``."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"index {index} is outside a dataset of {len(self)} images")
        index = index % len(self)
        return self.fetch([index])[0], int(self.targets[index])

    def fetch(
        self,
        indices: Sequence[int] | npt.NDArray[np.int64] | Tensor,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Augmented and normalised images ``(B, C, H, W)`` at ``indices`` ``(B,)``, on the CPU.

        Args:
            indices: positions in the dataset.
            generator: random numbers for ``augment``; ``None`` is the dataset's own.
        """
        images = self.images[torch.as_tensor(indices, dtype=torch.int64)]
        if images.dtype == torch.uint8:
            images = images.to(torch.float32).div_(255)
        images = images.to(torch.float32)
        if self.augment is not None:
            images = self.augment(images, self._own_generator() if generator is None else generator)
        return images.sub_(self.mean).div_(self.std)

    def tensors(self) -> tuple[Tensor, Tensor]:
        """All images ``(N, C, H, W)`` as :meth:`fetch` gives them, and labels ``(N,)``."""
        return self.fetch(torch.arange(len(self))), self.targets

    def subset(self, indices: Sequence[int] | npt.NDArray[np.int64] | Tensor) -> ArrayDataset:
        """A dataset of the images at ``indices``, in that order, with the same settings."""
        chosen = torch.as_tensor(indices, dtype=torch.int64)
        twin = self.with_augment(self.augment)
        twin.images, twin.targets = self.images[chosen], self.targets[chosen]
        return twin

    def with_augment(self, augment: Augment | None, seed: int = 0) -> ArrayDataset:
        """The same images, not copied, under another augmentation."""
        twin = copy.copy(self)
        twin.augment = augment
        twin._generator = torch.Generator().manual_seed(seed)
        return twin

    def _own_generator(self) -> torch.Generator:
        """The dataset's generator; reseeded in each loader worker, which else all draw alike."""
        worker = get_worker_info()
        if worker is not None and worker.seed != self._worker_seed:
            self._worker_seed = worker.seed
            self._generator = torch.Generator().manual_seed(worker.seed)
        return self._generator


class BatchLoader:
    """Batches of an :class:`ArrayDataset` by indexing; use it where a ``DataLoader`` is used.

    Each iteration is a new epoch: reshuffled, and augmented anew, from the loader's own generator.

    Args:
        dataset: where the images come from.
        batch_size: images a batch; the last one may be smaller.
        shuffle: whether to reshuffle each epoch.
        drop_last: whether to leave out a last batch that is smaller.
        seed: seeds the order and the augmentation.
        augment: takes the place of the dataset's augmentation; ``None`` keeps that.
        device: where the batches go; ``None`` leaves them on the CPU.

    Raises:
        DataError: the batch size is below 1.
    """

    def __init__(
        self,
        dataset: ArrayDataset,
        batch_size: int = 128,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int = 0,
        augment: Augment | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if batch_size < 1:
            raise DataError(f"BatchLoader: batch_size is {batch_size}; it must be at least 1")
        self.dataset = dataset if augment is None else dataset.with_augment(augment)
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __len__(self) -> int:
        """Batches an epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + bool(rest and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images ``(B, C, H, W)`` float32 and labels ``(B,)`` int64."""
        count = len(self.dataset)
        order = torch.arange(count)
        if self.shuffle:
            order = torch.randperm(count, generator=self._generator)
        for start in range(0, len(self) * self.batch_size, self.batch_size):
            batch = order[start : start + self.batch_size]
            images = self.dataset.fetch(batch, self._generator)
            yield images.to(self.device), self.dataset.targets[batch].to(self.device)


def _as_images(images: npt.NDArray[np.generic] | Tensor) -> Tensor:
    stored = torch.as_tensor(images)
    if stored.ndim != 4 or 0 in stored.shape:
        raise DataError(
            f"images have shape {tuple(stored.shape)}; give (N, H, W, C) uint8 or "
            "(N, C, H, W) floating point, none of them 0"
        )
    if stored.dtype == torch.uint8:
        return stored.permute(0, 3, 1, 2).contiguous()
    if not stored.is_floating_point():
        raise DataError(f"images are {stored.dtype}; give uint8 or floating point")
    bad = (~torch.isfinite(stored).flatten(1).all(1)).nonzero().flatten().tolist()
    if bad:
        raise DataError(f"{len(bad)} images hold NaN or Inf, first at {bad[:5]}; clean them")
    return stored


def _as_labels(labels: npt.ArrayLike | Tensor, count: int, names: int) -> Tensor:
    stored = torch.as_tensor(labels)
    if stored.dtype not in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64):
        raise DataError(f"labels are {stored.dtype}; give integers")
    if stored.shape != (count,):
        raise DataError(f"labels have shape {tuple(stored.shape)}; {count} images need ({count},)")
    low, high = int(stored.min()), int(stored.max())
    if low < 0 or (names and high >= names):
        raise DataError(
            f"labels span {low}..{high}; they must lie in 0..{names - 1 if names else 'n - 1'}"
        )
    return stored.to(torch.int64)


def _as_statistics(name: str, value: Statistics | None, default: float, channels: int) -> Tensor:
    entries = [default] * channels if value is None else list(value)
    if len(entries) != channels:
        raise DataError(f"{name} has {len(entries)} entries; {channels} channels need {channels}")
    return torch.tensor(entries, dtype=torch.float32).view(channels, 1, 1)
