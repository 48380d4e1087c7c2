"""What every set encoder has in common: a set of images goes in, pseudo images come out."""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.errors import ConfigError, DataError

_RESIDUAL_DEVIATION = 0.02  # of the first pseudo image about the mean image: near, yet not zero


class SetEncoder(nn.Module, abc.ABC):
    """Maps a set of images to ``r`` pseudo images, whatever the order (paper's eq. ``set_func``).

    Args:
        in_channels: C of the images, at least 1.
        r: pseudo images per set, at least 1.

    Raises:
        ConfigError: a value is below 1.
    """

    def __init__(self, in_channels: int, *, r: int = 1) -> None:
        super().__init__()
        self._require_positive(in_channels=in_channels, r=r)
        self.in_channels = in_channels
        self.r = r

    @abc.abstractmethod
    def forward(self, images: Tensor) -> Tensor:
        """Returns pseudo images (r, C, H, W) of the set ``images`` (B, C, H, W), any B, H, W >= 1.

        Raises:
            DataError: the images are not floating-point, not 4-D, empty, or of another C.
        """

    def prepared(self, images: Tensor) -> Callable[[], Tensor]:
        """Gives ``self(images)``, again and again while parameters change."""
        return lambda: self(images)

    def _require_positive(self, **values: int) -> None:
        for name, value in values.items():
            if value < 1:
                raise ConfigError(f"{type(self).__name__}: {name}={value}; pass 1 or more.")

    def _check_images(self, images: Tensor) -> None:
        shape = tuple(images.shape)
        if images.dim() != 4 or images.numel() == 0 or shape[1] != self.in_channels:
            raise DataError(
                f"{type(self).__name__}: images have shape {shape}; "
                f"pass a set of shape (B, {self.in_channels}, H, W) with no empty dimension."
            )
        if not images.is_floating_point():
            raise DataError(
                f"{type(self).__name__}: images are {images.dtype}; "
                "pass them as floating-point numbers, scaled as the network expects."
            )


class GridSetEncoder(SetEncoder):
    """A set encoder that sees each image pooled to a grid and corrects the set's mean image.

    Images are averaged to ``(C, grid, grid)`` and embedded in ``dim`` numbers; a subclass turns
    the set of B embeddings into ``r``; these are decoded to ``(C, grid, grid)``, enlarged
    bilinearly to ``(C, H, W)`` and added to the mean image. The decoder starts small, so the
    first pseudo images lie near the mean image while gradients flow.

    Args:
        in_channels: C of the images, at least 1.
        grid: side of the pooled images, at least 1.
        dim: width of the embeddings, at least 1.
        r: pseudo images per set, at least 1.
        generator: CPU generator of the initial weights.

    Raises:
        ConfigError: a value is below 1.
    """

    def __init__(
        self, in_channels: int, *, grid: int, dim: int, r: int, generator: torch.Generator
    ) -> None:
        super().__init__(in_channels, r=r)
        self._require_positive(grid=grid, dim=dim)
        self.grid = grid
        self.dim = dim
        pixels = in_channels * grid * grid
        self.embed = linear(pixels, dim, generator)
        self.decode = linear(dim, pixels, generator)
        nn.init.normal_(self.decode.weight, std=_RESIDUAL_DEVIATION / dim**0.5, generator=generator)

    def forward(self, images: Tensor) -> Tensor:
        """Returns pseudo images (r, C, H, W); see :meth:`SetEncoder.forward`."""
        return self.prepared(images)()

    def prepared(self, images: Tensor) -> Callable[[], Tensor]:
        """Gives ``self(images)``; images are averaged once. See :meth:`SetEncoder.prepared`."""
        self._check_images(images)
        pooled = F.adaptive_avg_pool2d(images, self.grid).flatten(1)
        mean, size = images.mean(0, keepdim=True), images.shape[-2:]

        def encode() -> Tensor:
            codes = self.aggregate(self.embed(pooled))
            residual = self.decode(codes).unflatten(1, (self.in_channels, self.grid, self.grid))
            return mean + F.interpolate(residual, size=size, mode="bilinear", align_corners=False)

        return encode

    @abc.abstractmethod
    def aggregate(self, embeddings: Tensor) -> Tensor:
        """Returns codes (r, dim) of unit scale for a set (B, dim), whatever its order."""


def linear(
    inputs: int, outputs: int, generator: torch.Generator, *, bias: bool = True
) -> nn.Linear:
    """Returns a fully connected layer, Xavier-initialised without torch's global generator."""
    layer = nn.Linear(inputs, outputs, bias=bias, device="meta").to_empty(device="cpu")
    nn.init.xavier_uniform_(layer.weight, generator=generator)
    if bias:
        nn.init.zeros_(layer.bias)
    return layer


def seeded(seed: int) -> torch.Generator:
    """Returns a CPU generator that starts from ``seed``."""
    return torch.Generator().manual_seed(seed)
