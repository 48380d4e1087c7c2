"""Images for the demo, the tests and the benchmarks, all as :class:`ArrayDataset`."""

from stamppruner.data.arrays import ArrayDataset, BatchLoader
from stamppruner.data.augment import Augment, CropFlip
from stamppruner.data.benchmarks import (
    balanced_subset,
    cifar10,
    cifar100,
    fashion_mnist,
    folder_tree,
    load_dataset,
    svhn,
)
from stamppruner.data.characters import CHARACTERS, render_characters
from stamppruner.data.digits import digits
from stamppruner.data.folders import image_folder

__all__ = [
    "CHARACTERS",
    "ArrayDataset",
    "Augment",
    "BatchLoader",
    "CropFlip",
    "balanced_subset",
    "cifar10",
    "cifar100",
    "digits",
    "fashion_mnist",
    "folder_tree",
    "image_folder",
    "load_dataset",
    "render_characters",
    "svhn",
]
