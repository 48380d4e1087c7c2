"""VGG with batch norm and one linear layer, for small images (Simonyan & Zisserman 2015)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from stamppruner.errors import ConfigError
from stamppruner.models._build import check_sizes, conv_norm, kaiming_init_, scaled

VGG19_WIDTHS = ((64,) * 2, (128,) * 2, (256,) * 4, (512,) * 4, (512,) * 4)
"""Output channels of the 16 convolutions, block by block."""


class VGG(nn.Module):
    """Blocks of 3x3 convolution + batch norm + ReLU, a 2x2 max-pool between blocks, a classifier.

    The last block ends in a global average pool, so any image of at least
    ``2 ** (len(widths) - 1)`` pixels a side fits.

    Args:
        widths: output channels of each convolution, block by block; ``((16,), (32,), (64,))``
            is three blocks of one convolution.
        num_classes: outputs of the classifier.
        in_channels: channels of the images.

    Raises:
        ConfigError: a size below 1, or no blocks, or an empty block.
    """

    def __init__(
        self, widths: Sequence[Sequence[int]], num_classes: int = 100, *, in_channels: int = 3
    ) -> None:
        super().__init__()
        if not widths or not all(widths):
            raise ConfigError(
                f"VGG: widths is {widths!r}; give at least one block and one convolution a block"
            )
        flat = [width for block in widths for width in block]
        check_sizes("VGG", widths=min(flat), num_classes=num_classes, in_channels=in_channels)
        layers: list[nn.Module] = []
        channels = in_channels
        for index, block in enumerate(widths):
            if index:
                layers.append(nn.MaxPool2d(2))
            for width in block:
                layers += [*conv_norm(channels, width), nn.ReLU()]
                channels = width
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        kaiming_init_(self.modules())

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of images ``(B, in_channels, H, W)``."""
        out: Tensor = self.classifier(self.pool(self.features(images)).flatten(1))
        return out


def vgg19(num_classes: int = 100, *, width: float = 1.0, in_channels: int = 3) -> VGG:
    """The paper's VGG-19: 16 convolutions and one linear layer; 20.1 M parameters at width 1.

    Args:
        num_classes: outputs of the classifier.
        width: multiplies the channels of every convolution (rounded, at least 1).
        in_channels: channels of the images.

    Raises:
        ConfigError: a size below 1, or a width not above zero.
    """
    widths = [[scaled(channels, width) for channels in block] for block in VGG19_WIDTHS]
    return VGG(widths, num_classes, in_channels=in_channels)
