"""What both families share: checked sizes, a convolution with its norm, Kaiming initialisation."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from stamppruner.errors import ConfigError


def scaled(channels: int, width: float) -> int:
    """``max(1, round(channels * width))``, the channels of a layer at a width multiplier.

    Raises:
        ConfigError: ``width`` is not above zero.
    """
    if not width > 0:
        raise ConfigError(f"width is {width}; give a multiplier above zero, such as 0.5")
    return max(1, round(channels * width))


def check_sizes(owner: str, **sizes: int) -> None:
    """Raise ConfigError, naming ``owner`` and the argument, unless every size is at least 1."""
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{owner}: {name} is {size}; it must be at least 1")


def conv_norm(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> list[nn.Module]:
    """A convolution without a bias, padded to keep the size, and its batch norm."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


def kaiming_init_(modules: Iterable[nn.Module]) -> None:
    """Convolutions: Kaiming normal, fan-out, for ReLU (He et al. 2015); classifiers: no bias."""
    for module in modules:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
            nn.init.zeros_(module.bias)
