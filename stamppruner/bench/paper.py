"""The figures that the paper prints, to stand beside measured ones.

Song et al. 2020, "STAMP": tables 1 (VGG-19), 2 and 4 (ResNet-18); times on a Titan XP, expense at
1.46 dollars an hour.
"""

from __future__ import annotations

from typing import NamedTuple

DOLLARS_PER_HOUR = 1.46
"""Of the paper's Expense: a Tesla P100 on Google Cloud."""


class Printed(NamedTuple):
    """A row of the paper.

    Accuracy and its deviation, and parameters left, in per cent; how many times fewer
    multiply-adds; hours of training, seconds of inference, dollars.
    """

    accuracy: float
    deviation: float
    params: float
    macs: float
    hours: float
    seconds: float
    dollars: float


_VGG_CIFAR10 = {
    "Full": Printed(93.72, 0.07, 100, 1.00, 0.78, 0.85, 1.13),
    "SNIP (P)": Printed(92.98, 0.22, 4.17, 1.00, 0.83, 0.92, 1.21),
    "SNIP": Printed(92.85, 0.24, 4.17, 1.00, 0.83, 0.92, 1.21),
    "Random Pruning": Printed(92.01, 0.29, 32.20, 3.33, 0.43, 0.42, 0.62),
    "MetaPruning": Printed(92.12, 0.47, 21.84, 3.58, 4.99, 0.41, 7.28),
    "BBDropout": Printed(92.97, 0.10, 3.99, 3.42, 2.07, 0.43, 3.02),
    "STAMP-Structure": Printed(92.69, 0.13, 4.43, 3.48, 0.44, 0.36, 0.64),
    "STAMP": Printed(93.49, 0.04, 4.16, 3.56, 0.44, 0.36, 0.64),
}
_VGG_SVHN = {
    "Full": Printed(95.99, 0.07, 100, 1.00, 1.21, 2.42, 1.76),
    "SNIP (P)": Printed(95.56, 0.09, 3.08, 1.00, 1.22, 2.45, 1.78),
    "SNIP": Printed(95.52, 0.10, 3.08, 1.00, 1.22, 2.45, 1.78),
    "Random Pruning": Printed(95.56, 0.12, 28.95, 3.40, 0.62, 1.27, 0.90),
    "MetaPruning": Printed(95.50, 0.07, 22.04, 3.64, 2.08, 1.44, 3.03),
    "BBDropout": Printed(95.98, 0.19, 2.15, 9.67, 3.05, 0.86, 4.45),
    "STAMP-Structure": Printed(95.39, 0.15, 3.08, 4.60, 0.58, 0.91, 0.84),
    "STAMP": Printed(95.82, 0.16, 2.87, 5.10, 0.58, 0.91, 0.84),
}
_RESNET_CIFAR10 = {
    "Full": Printed(94.37, 0.12, 100, 1.00, 1.08, 1.02, 1.57),
    "Edge-Popup": Printed(89.50, 3.46, 10.00, 1.00, 1.38, 2.50, 2.01),
    "SNIP (P)": Printed(93.17, 0.00, 10.04, 1.00, 1.71, 1.90, 2.49),
    "SNIP": Printed(93.11, 0.00, 10.04, 1.00, 1.71, 1.90, 2.49),
    "Random Pruning": Printed(91.95, 0.65, 69.77, 3.65, 0.58, 0.58, 0.84),
    "MetaPruning": Printed(91.01, 0.91, 66.02, 4.09, 3.80, 0.58, 5.54),
    "BBDropout": Printed(93.47, 0.14, 5.94, 4.11, 2.17, 0.54, 3.16),
    "STAMP-Structure": Printed(93.63, 0.08, 9.07, 4.08, 0.57, 0.54, 0.83),
    "STAMP": Printed(93.61, 0.27, 9.22, 4.29, 0.57, 0.54, 0.83),
}
_RESNET_SVHN = {
    "Full": Printed(94.57, 0.01, 100, 1.00, 0.16, 3.30, 0.24),
    "Edge-Popup": Printed(92.61, 0.01, 5.00, 1.00, 0.20, 6.15, 0.29),
    "SNIP (P)": Printed(95.38, 0.01, 6.06, 1.00, 0.35, 6.64, 0.51),
    "SNIP": Printed(94.88, 0.01, 6.06, 1.00, 0.35, 6.64, 0.51),
    "Random Pruning": Printed(94.39, 0.23, 72.17, 2.99, 0.08, 1.66, 0.12),
    "MetaPruning": Printed(94.49, 0.19, 70.99, 2.83, 2.41, 1.68, 3.51),
    "BBDropout": Printed(94.32, 0.02, 4.90, 5.25, 0.31, 1.52, 0.46),
    "STAMP-Structure": Printed(95.17, 0.01, 4.81, 5.47, 0.11, 1.51, 0.16),
    "STAMP": Printed(95.41, 0.01, 4.81, 5.47, 0.11, 1.51, 0.16),
}

PAPER = {
    ("vgg19", "cifar10"): _VGG_CIFAR10,
    ("vgg19", "svhn"): _VGG_SVHN,
    ("resnet18", "cifar10"): _RESNET_CIFAR10,
    ("resnet18", "svhn"): _RESNET_SVHN,
}
"""By network and target, then by row."""
