"""CIFAR-10, CIFAR-100, SVHN and Fashion-MNIST, from an image folder or through torchvision."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stamppruner.data.arrays import ArrayDataset, Statistics
from stamppruner.data.folders import PHOTO_MEAN, PHOTO_STD, image_folder
from stamppruner.errors import DataError
from stamppruner.optional import require

PathLike = str | os.PathLike[str]

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100_MEAN, CIFAR100_STD = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
SVHN_MEAN, SVHN_STD = (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)
FASHION_MEAN, FASHION_STD = (0.219,) * 3, (0.330,) * 3
"""Of the images with their dark margin."""


class Loader(Protocol):
    """A function such as :func:`cifar10`."""

    def __call__(
        self,
        root: PathLike,
        train: bool = ...,
        download: bool = ...,
        cache: PathLike | None = ...,
    ) -> ArrayDataset:
        """The training or the test images below ``root``."""


def cifar10(
    root: PathLike, train: bool = True, download: bool = True, cache: PathLike | None = None
) -> ArrayDataset:
    """CIFAR-10: 50,000 training or 10,000 test images, 32x32 RGB, 10 classes.

    If ``root`` has folders ``train`` and ``test`` (or ``val``) of one folder a class, these are
    read; else torchvision reads, and if need be downloads, its own copy there.

    Raises:
        DataError: nothing readable is there and it cannot be, or may not be, downloaded.
        MissingExtraError: torchvision, or Pillow, is needed and not installed.
    """
    if is_folder_tree(root):
        return _split(root, train, CIFAR10_MEAN, CIFAR10_STD, cache)
    found = _torchvision("CIFAR10", root, download, train=train)
    return ArrayDataset(
        found.data, found.targets, mean=CIFAR10_MEAN, std=CIFAR10_STD, classes=found.classes
    )


def cifar100(
    root: PathLike, train: bool = True, download: bool = True, cache: PathLike | None = None
) -> ArrayDataset:
    """CIFAR-100: 50,000 training or 10,000 test images, 32x32 RGB, 100 classes.

    Folders and errors as in :func:`cifar10`.
    """
    if is_folder_tree(root):
        return _split(root, train, CIFAR100_MEAN, CIFAR100_STD, cache)
    found = _torchvision("CIFAR100", root, download, train=train)
    return ArrayDataset(
        found.data, found.targets, mean=CIFAR100_MEAN, std=CIFAR100_STD, classes=found.classes
    )


def svhn(
    root: PathLike, train: bool = True, download: bool = True, cache: PathLike | None = None
) -> ArrayDataset:
    """SVHN, cropped: 73,257 training or 26,032 test images, 32x32 RGB, the digits 0 to 9.

    Folders and errors as in :func:`cifar10`.
    """
    if is_folder_tree(root):
        return _split(root, train, SVHN_MEAN, SVHN_STD, cache)
    found = _torchvision("SVHN", root, download, split="train" if train else "test")
    pixels = np.ascontiguousarray(np.asarray(found.data).transpose(0, 2, 3, 1))
    return ArrayDataset(
        pixels, found.labels, mean=SVHN_MEAN, std=SVHN_STD, classes=[str(c) for c in range(10)]
    )


def fashion_mnist(
    root: PathLike, train: bool = True, download: bool = True, cache: PathLike | None = None
) -> ArrayDataset:
    """Fashion-MNIST (Xiao et al. 2017): 60,000 training or 10,000 test images, 10 classes.

    The grey images of 28x28 get a dark margin of two pixels and three equal channels: 32x32 RGB.
    Folders and errors as in :func:`cifar10`.
    """
    if is_folder_tree(root):
        return _split(root, train, FASHION_MEAN, FASHION_STD, cache)
    found = _torchvision("FashionMNIST", root, download, train=train)
    grey = np.pad(np.asarray(found.data), ((0, 0), (2, 2), (2, 2)))
    pixels = grey[..., None].repeat(3, axis=-1)
    return ArrayDataset(
        pixels, found.targets, mean=FASHION_MEAN, std=FASHION_STD, classes=found.classes
    )


def folder_tree(
    root: PathLike, train: bool = True, download: bool = False, cache: PathLike | None = None
) -> ArrayDataset:
    """Any ``root/train/<class>`` with ``root/test/<class>`` or ``root/val/<class>``, at 32x32.

    ``download`` is there to match the other loaders; nothing is ever downloaded.

    Raises:
        DataError: ``root`` is not such a tree.
    """
    if not is_folder_tree(root):
        raise DataError(
            f"{root}: no image folders; it must have train/<class> and test/<class> or val/<class>"
        )
    return _split(root, train, PHOTO_MEAN, PHOTO_STD, cache)


def load_dataset(
    loader: Loader,
    data_dir: PathLike,
    *,
    download: bool = True,
    cache: PathLike | None = None,
) -> tuple[ArrayDataset, ArrayDataset]:
    """Training and test set of one of the loaders above: ``load_dataset(cifar10, "data")``.

    Raises:
        DataError: from the loader; or the two sets do not have the same classes.
    """
    train = loader(data_dir, train=True, download=download, cache=cache)
    test = loader(data_dir, train=False, download=download, cache=cache)
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(
            f"{data_dir}: training and test classes differ ({', '.join(map(str, odd[:5]))}); "
            "both must have the same class folders"
        )
    return train, test


def balanced_subset(dataset: ArrayDataset, total: int, seed: int) -> ArrayDataset:
    """``total`` images drawn without replacement, classes equally often (to within one image).

    Raises:
        DataError: fewer images than classes are asked for, or a class has too few.
    """
    labels = dataset.targets.numpy()
    classes, counts = np.unique(labels, return_counts=True)
    if total < len(classes):
        raise DataError(
            f"balanced_subset: total is {total}, below the {len(classes)} classes; ask for more"
        )
    rng = np.random.default_rng(seed)
    share, rest = divmod(total, len(classes))
    wanted = np.full(len(classes), share)
    wanted[rng.permutation(len(classes))[:rest]] += 1
    short = np.flatnonzero(counts < wanted)
    if len(short):
        first = short[0]
        raise DataError(
            f"balanced_subset: class {classes[first]} has {counts[first]} images and "
            f"{wanted[first]} are wanted; lower total (now {total})"
        )
    chosen = [
        rng.choice(np.flatnonzero(labels == label), size=want, replace=False)
        for label, want in zip(classes, wanted, strict=True)
    ]
    return dataset.subset(rng.permutation(np.concatenate(chosen)))


def is_folder_tree(root: PathLike) -> bool:
    """Whether ``root`` has ``train`` and ``test`` or ``val``, with folders inside ``train``."""
    base = Path(root)
    train = base / "train"
    if not train.is_dir() or not any(p.is_dir() for p in train.iterdir()):
        return False
    return (base / "test").is_dir() or (base / "val").is_dir()


def _split(
    root: PathLike, train: bool, mean: Statistics, std: Statistics, cache: PathLike | None
) -> ArrayDataset:
    base = Path(root)
    held_out = "test" if (base / "test").is_dir() else "val"
    folder = base / ("train" if train else held_out)
    return image_folder(folder, cache=cache, mean=mean, std=std)


def _torchvision(name: str, root: PathLike, download: bool, **split: bool | str) -> Any:
    datasets = require("torchvision.datasets", f"reading {name}", "pip install torchvision")
    try:
        return getattr(datasets, name)(str(root), download=download, **split)
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{root}: {name} is not there and was not fetched ({error}); allow the download, put "
            "torchvision's copy there, or give a folder with train/<class> and test/<class>"
        ) from error
