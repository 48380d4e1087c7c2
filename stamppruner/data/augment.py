"""Random crop and flip of a whole batch in one gather."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from stamppruner.errors import ConfigError, DataError

Augment: TypeAlias = Callable[[Tensor, torch.Generator], Tensor]
"""Maps images ``(B, C, H, W)`` and a generator to images of the same shape and dtype."""


@dataclass(frozen=True)
class CropFlip:
    """Pad, crop at random back to the size, and flip left-right with probability one half.

    Attributes:
        padding: pixels added on each side before the crop; 0 crops nothing.
        flip: whether to flip; switch it off for characters and digits.
        mode: what is added, ``"zeros"`` or the mirrored image, ``"reflect"``.

    Raises:
        ConfigError: a padding below 0, or another mode.
    """

    padding: int = 4
    flip: bool = True
    mode: Literal["reflect", "zeros"] = "reflect"

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"CropFlip: padding is {self.padding}; it must be at least 0")
        if self.mode not in ("reflect", "zeros"):
            raise ConfigError(f"CropFlip: mode is {self.mode!r}; use 'reflect' or 'zeros'")

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augmented images, ``(B, C, H, W)`` of the dtype and device given.

        Raises:
            DataError: the padding is not smaller than the image.
        """
        batch, channels, height, width = images.shape
        if self.padding >= min(height, width):
            raise DataError(
                f"CropFlip: padding {self.padding} does not fit images of {height}x{width}; "
                f"use a padding below {min(height, width)}"
            )
        span = 2 * self.padding + 1
        top, left = torch.randint(span, (2, batch, 1), generator=generator) - self.padding
        rows = top + torch.arange(height)
        columns = left + torch.arange(width)
        if self.flip:
            flipped = torch.randint(2, (batch, 1), generator=generator) == 1
            columns = torch.where(flipped, columns.flip(1), columns)
        where = images.device
        picked = images[
            torch.arange(batch, device=where)[:, None, None, None],
            torch.arange(channels, device=where)[:, None, None],
            _reflect(rows, height).to(where)[:, None, :, None],
            _reflect(columns, width).to(where)[:, None, None, :],
        ]
        if self.mode == "zeros":
            inside = _inside(rows, height)[:, :, None] & _inside(columns, width)[:, None, :]
            picked = picked * inside[:, None].to(where, images.dtype)
        return picked


def _reflect(index: Tensor, size: int) -> Tensor:
    return (size - 1) - ((size - 1) - index.abs()).abs()


def _inside(index: Tensor, size: int) -> Tensor:
    return (index >= 0) & (index < size)
