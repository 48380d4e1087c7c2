"""ResNet of basic blocks for small images: a 3x3 stem and no max-pool (He et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from stamppruner.errors import ConfigError
from stamppruner.models._build import check_sizes, conv_norm, kaiming_init_, scaled


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a residual sum.

    The shortcut is the identity, or a 1x1 convolution with batch norm where the shape changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv_norm(inputs, outputs, stride=stride)
        self.conv2, self.bn2 = conv_norm(outputs, outputs)
        self.relu1 = nn.ReLU()
        self.relu2 = nn.ReLU()
        self.shortcut: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(*conv_norm(inputs, outputs, kernel=1, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        """``(B, inputs, H, W)`` to ``(B, outputs, H / stride, W / stride)``."""
        residual = x if self.shortcut is None else self.shortcut(x)
        x = self.relu1(self.bn1(self.conv1(x)))
        out: Tensor = self.relu2(self.bn2(self.conv2(x)) + residual)
        return out


class ResNet(nn.Module):
    """A 3x3 stem, stages of basic blocks, global average pool, one linear layer.

    Every stage but the first halves height and width. Any image size fits.

    Args:
        blocks: number of basic blocks of each stage.
        widths: channels of each stage; the stem has those of the first.
        num_classes: outputs of the classifier.
        in_channels: channels of the images.

    Raises:
        ConfigError: a size below 1, no stages, or ``blocks`` and ``widths`` of unequal length.
    """

    def __init__(
        self,
        blocks: Sequence[int] = (2, 2, 2, 2),
        widths: Sequence[int] = (64, 128, 256, 512),
        num_classes: int = 100,
        *,
        in_channels: int = 3,
    ) -> None:
        super().__init__()
        if not blocks or len(blocks) != len(widths):
            raise ConfigError(
                f"ResNet: {len(blocks)} entries in blocks and {len(widths)} in widths; "
                "give one of each for every stage"
            )
        check_sizes(
            "ResNet",
            blocks=min(blocks),
            widths=min(widths),
            num_classes=num_classes,
            in_channels=in_channels,
        )
        self.conv1, self.bn1 = conv_norm(in_channels, widths[0])
        self.relu = nn.ReLU()
        stages: list[nn.Module] = []
        channels = widths[0]
        for index, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            strides = [1 if index == 0 else 2, *[1] * (count - 1)]
            stage = []
            for stride in strides:
                stage.append(BasicBlock(channels, width, stride))
                channels = width
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, num_classes)
        kaiming_init_(self.modules())

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, num_classes)`` of images ``(B, in_channels, H, W)``."""
        x = self.stages(self.relu(self.bn1(self.conv1(images))))
        out: Tensor = self.classifier(self.pool(x).flatten(1))
        return out


def resnet18(num_classes: int = 100, *, width: float = 1.0, in_channels: int = 3) -> ResNet:
    """The paper's ResNet-18 for 32x32 images; 11.2 M parameters at width 1.

    Args:
        num_classes: outputs of the classifier.
        width: multiplies the channels of every stage (rounded, at least 1).
        in_channels: channels of the images.

    Raises:
        ConfigError: a size below 1, or a width not above zero.
    """
    widths = [scaled(channels, width) for channels in (64, 128, 256, 512)]
    return ResNet((2, 2, 2, 2), widths, num_classes, in_channels=in_channels)
