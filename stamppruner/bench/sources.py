"""Where the images of a benchmark come from: downloads, folders, an installed package, or noise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from stamppruner.data import (
    ArrayDataset,
    balanced_subset,
    cifar10,
    cifar100,
    digits,
    fashion_mnist,
    folder_tree,
    load_dataset,
    render_characters,
    svhn,
)
from stamppruner.data.benchmarks import Loader
from stamppruner.errors import ConfigError
from stamppruner.files import PathLike

Pair = tuple[ArrayDataset, ArrayDataset]
"""Training and test images."""


@dataclass(frozen=True)
class Known:
    """A data set that can be fetched: how, its images (training and test), classes, mirroring."""

    loader: Loader
    sizes: tuple[int, int]
    classes: int
    mirrored: bool


KNOWN = {
    "cifar10": Known(cifar10, (50_000, 10_000), 10, True),
    "cifar100": Known(cifar100, (50_000, 10_000), 100, True),
    "svhn": Known(svhn, (73_257, 26_032), 10, False),
    "fashion_mnist": Known(fashion_mnist, (60_000, 10_000), 10, True),
}
_MADE: dict[str, Callable[[], Pair]] = {
    "digits": lambda: digits(100),
    "characters": lambda: (render_characters(60), render_characters(10, seed=1)),
}


class Sources:
    """Data sets by name, each read once.

    Args:
        data: folder that downloads are kept in.
        folders: of image folders (``train/<class>``, ``test`` or ``val``) by the name of the set.
        cache: folder for decoded images.
        stand_in: noise in place of every set, so many images; None reads the real ones.
    """

    def __init__(
        self,
        data: PathLike = "data",
        folders: Mapping[str, PathLike] | None = None,
        cache: PathLike | None = None,
        stand_in: int | None = None,
    ) -> None:
        self.data, self.cache, self.stand_in = Path(data), cache, stand_in
        self.folders = dict(folders or {})
        self._read: dict[str, Pair] = {}

    def check(self, names: tuple[str, ...]) -> None:
        """Raise ConfigError, before anything is read, if a name stands for nothing."""
        for name in names:
            if name not in {*self.folders, *KNOWN, *_MADE}:
                raise ConfigError(
                    f"no data set {name!r}: there are {', '.join([*KNOWN, *_MADE])}; for a folder "
                    f"of yours pass --images {name}=DIR"
                )

    def pair(self, name: str) -> Pair:
        """Training and test images.

        Raises:
            ConfigError: there is no such data set.
            DataError: it cannot be read.
        """
        self.check((name,))
        if name not in self._read:
            self._read[name] = self._pair(name)
        return self._read[name]

    def target(self, name: str, images: int | None, seed: int) -> Pair:
        """The same with so many training images, drawn by the seed, classes equally often."""
        train, test = self.pair(name)
        if images is None or self.stand_in is not None:
            return train, test
        return balanced_subset(train, images, seed), test

    def size(self, name: str) -> int:
        """Training images of the whole set; those of a known one are not read for it."""
        if name in KNOWN and name not in self.folders:
            return KNOWN[name].sizes[0]
        return len(self.pair(name)[0])

    def mirrored(self, name: str) -> bool:
        """Whether an image's mirror image is of its class."""
        if name in KNOWN:
            return KNOWN[name].mirrored
        return name not in _MADE

    def _pair(self, name: str) -> Pair:
        known = KNOWN.get(name)
        if self.stand_in is not None:
            classes = known.classes if known else 10
            return _noise(self.stand_in, classes, seed=0), _noise(self.stand_in, classes, seed=1)
        if name in self.folders:
            loader = known.loader if known else folder_tree
            return load_dataset(loader, self.folders[name], cache=self.cache)
        if known:
            return load_dataset(known.loader, self.data, cache=self.cache)
        return _MADE[name]()


def _noise(images: int, classes: int, seed: int) -> ArrayDataset:
    """Noise of 32x32 pixels in colour, classes equally often."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(256, (max(images, classes), 32, 32, 3), generator=generator)
    labels = torch.arange(len(pixels)) % classes
    return ArrayDataset(
        pixels.to(torch.uint8).numpy(), labels, classes=[str(c) for c in range(classes)]
    )
