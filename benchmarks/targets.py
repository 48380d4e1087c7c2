"""Small targets, unlike each other, for the benchmarks of task-adaptive pruning.

Each is a pair (training set, test set) of images at 32x32 RGB. ``held_out=True`` gives as test set
training images that no seed trains on, to choose settings with; the test images stay unseen.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import torch

from stamppruner.data import (
    ArrayDataset,
    balanced_subset,
    cifar10,
    digits,
    fashion_mnist,
    load_dataset,
    render_characters,
)
from stamppruner.errors import DataError

Pair = tuple[ArrayDataset, ArrayDataset]

ALPHABET = "ΓΔΘΛΞΠΣΦΨΩ"
_HELD_OUT = 2000
_VEHICLES = {"airplane", "automobile", "ship", "truck"}


class Targets:
    """Makes targets by name.

    Args:
        cifar: folder of CIFAR-10, as for :func:`stamppruner.data.cifar10`.
        fashion: folder of Fashion-MNIST, as for :func:`stamppruner.data.fashion_mnist`; None leaves
            it out.
        cache: folder for decoded images.
    """

    def __init__(self, cifar: Path, fashion: Path | None, cache: Path | None = None) -> None:
        self._cifar, self._fashion, self._cache = cifar, fashion, cache
        self._read: dict[str, Pair] = {}
        self.makers: dict[str, Callable[[int, int | None], Pair]] = {
            "cifar10": lambda *_: self._cifar10(),
            "animals-vehicles": lambda *_: _relabelled(self._cifar10()),
            "inverted": lambda *_: _inverted(self._cifar10()),
            "digits": lambda seed, total: digits((total or 500) // 10, seed),
            "greek": lambda *_: _greek(),
        }
        if fashion is not None:
            self.makers["fashion"] = lambda *_: self._fashion_mnist(fashion)

    def get(self, name: str, seed: int, *, held_out: bool = False) -> Pair:
        """Training images drawn by the seed, and test images.

        Args:
            name: of a target; with a number of training images behind it (``greek-100``) in place
                of 1,000 (500 of the digits and the alphabet).
            seed: of the draw.
            held_out: test on training images.

        Raises:
            DataError: no such target, or its images are not there.
        """
        kind, number = re.fullmatch(r"(.*?)(?:-(\d+))?", name).groups()
        asked = int(number) if number else None
        if kind not in self.makers:
            raise DataError(f"no target {name!r}: there are {', '.join(self.makers)}")
        train, test = self.makers[kind](seed, asked)
        if kind == "digits":  # drawn already; all the rest are test images
            return train, _halves(test)[0 if held_out else 1]
        chosen, kept = _halves(train) if held_out else (train, test)
        total = asked or {"greek": 400 if held_out else 500}.get(kind, 1000)
        rest = balanced_subset(kept, min(_HELD_OUT, len(kept) * 4 // 5), 0) if held_out else kept
        return balanced_subset(chosen, total, seed), rest

    def _cifar10(self) -> Pair:
        if "cifar10" not in self._read:
            self._read["cifar10"] = load_dataset(cifar10, self._cifar, cache=self._cache)
        return self._read["cifar10"]

    def _fashion_mnist(self, folder: Path) -> Pair:
        if "fashion" not in self._read:
            self._read["fashion"] = load_dataset(fashion_mnist, folder)
        return self._read["fashion"]


def _greek() -> Pair:
    """Rendered capital letters: 100 images a class to train on, 150 to test."""
    train = render_characters(100, seed=3, classes=ALPHABET)
    return train, render_characters(150, seed=4, classes=ALPHABET)


def _relabelled(pair: Pair) -> Pair:
    """CIFAR-10 as two classes: animals and vehicles."""

    def one(data: ArrayDataset) -> ArrayDataset:
        kinds = torch.tensor([int(name in _VEHICLES) for name in data.classes])
        twin = data.with_augment(None)
        twin.targets, twin.classes = kinds[data.targets], ("animal", "vehicle")
        return twin

    return one(pair[0]), one(pair[1])


def _inverted(pair: Pair) -> Pair:
    def one(data: ArrayDataset) -> ArrayDataset:
        twin = data.with_augment(None)
        twin.images = 255 - data.images
        return twin

    return one(pair[0]), one(pair[1])


def _halves(data: ArrayDataset) -> Pair:
    """Two halves that do not overlap, the same every time."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
    return data.subset(order[: len(data) // 2]), data.subset(order[len(data) // 2 :])
