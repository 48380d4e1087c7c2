"""Target data that need no download: scikit-learn's handwritten digits, at 32x32."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from stamppruner.data.arrays import ArrayDataset
from stamppruner.errors import DataError
from stamppruner.optional import require

DIGITS_MEAN = (0.305, 0.305, 0.305)
DIGITS_STD = (0.323, 0.323, 0.323)


def digits(
    train_per_class: int = 50, seed: int = 0, *, size: int = 32
) -> tuple[ArrayDataset, ArrayDataset]:
    """The 1,797 images of ``sklearn.datasets.load_digits``, ten classes, as train and test sets.

    Light digits on a dark ground, 8x8 grey, upscaled bilinearly to ``(N, size, size, 3)`` uint8.

    Args:
        train_per_class: training images a class; the test set is all the rest.
        seed: chooses the training images.
        size: pixels a side.

    Raises:
        DataError: ``train_per_class`` leaves a class without training or test images.
        MissingExtraError: scikit-learn is not installed.
    """
    raw = require("sklearn.datasets", "the handwritten digits").load_digits()
    labels = np.asarray(raw.target, dtype=np.int64)
    fewest = int(np.bincount(labels).min())
    if not 1 <= train_per_class < fewest:
        raise DataError(
            f"digits: train_per_class is {train_per_class}; it must lie in 1..{fewest - 1}, "
            f"because the smallest class has {fewest} images"
        )
    grey = torch.as_tensor(raw.images, dtype=torch.float32)[:, None] / 16
    large = F.interpolate(grey, size=(size, size), mode="bilinear", align_corners=False)
    pixels = (large * 255).round().to(torch.uint8).permute(0, 2, 3, 1).repeat(1, 1, 1, 3).numpy()

    order = np.random.default_rng(seed).permutation(len(labels))
    train = np.concatenate([order[labels[order] == c][:train_per_class] for c in range(10)])
    test = np.setdiff1d(order, train)
    whole = ArrayDataset(
        pixels, labels, mean=DIGITS_MEAN, std=DIGITS_STD, classes=[str(c) for c in range(10)]
    )
    return whole.subset(np.sort(train)), whole.subset(test)
