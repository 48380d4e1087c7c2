"""A set encoder without attention: the mean of learned features (Zaheer et al. 2017)."""

from __future__ import annotations

from torch import Tensor, nn

from stamppruner.encoders._base import GridSetEncoder, linear, seeded


class DeepSets(GridSetEncoder):
    """``rho(mean_i phi(x_i))`` (Zaheer et al. 2017, theorem 2, with a mean for the sum).

    The mean keeps sets of 1 and of 1,000 images on one scale. Cost grows with B, not its square.

    Args:
        in_channels: C of the images, at least 1.
        grid: side of the pooled images.
        dim: width of the embeddings.
        r: pseudo images per set.
        seed: of the initial weights.

    Raises:
        ConfigError: a value is below 1.
    """

    def __init__(
        self, in_channels: int, *, grid: int = 8, dim: int = 128, r: int = 1, seed: int = 0
    ) -> None:
        generator = seeded(seed)
        super().__init__(in_channels, grid=grid, dim=dim, r=r, generator=generator)
        self.phi = nn.Sequential(nn.ReLU(), linear(dim, dim, generator), nn.ReLU())
        self.rho = nn.Sequential(
            linear(dim, dim, generator), nn.ReLU(), linear(dim, r * dim, generator)
        )
        self.norm = nn.LayerNorm(dim)

    def aggregate(self, embeddings: Tensor) -> Tensor:
        """Returns ``rho(mean(phi(X)))`` (r, dim) of embeddings ``X`` (B, dim)."""
        codes: Tensor = self.norm(self.rho(self.phi(embeddings).mean(0)).unflatten(0, (self.r, -1)))
        return codes
