"""The paper's set encoder: attention blocks and pooling by attention (Lee et al. 2019)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.encoders._base import GridSetEncoder, linear, seeded
from stamppruner.errors import ConfigError


class SetTransformer(GridSetEncoder):
    """``rF(AE(Pool_r(AE(AE(X)))))``, ``Pool_r(X) = AE(R, rF(X))`` (paper, appendix A.1).

    The paper attends over raw pixels, ``X`` in ``R^(B x X_d)``, so its encoder fits one image
    size and grows with its square. Here images are pooled to ``grid x grid`` and embedded in
    ``dim`` numbers, so any size goes in; the output corrects the mean image rather than being
    drawn from nothing (see :class:`GridSetEncoder`). There is no dropout. For ``r = 1`` the block
    after ``Pool_r`` attends to one vector, so its query and key get no gradient.

    Args:
        in_channels: C of the images, at least 1.
        grid: side of the pooled images.
        dim: width of the embeddings, a multiple of ``heads``.
        heads: of the attention, at least 1.
        r: pseudo images per set.
        seed: of the initial weights.

    Raises:
        ConfigError: a value is below 1, or ``dim`` is not a multiple of ``heads``.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        grid: int = 8,
        dim: int = 128,
        heads: int = 4,
        r: int = 1,
        seed: int = 0,
    ) -> None:
        generator = seeded(seed)
        super().__init__(in_channels, grid=grid, dim=dim, r=r, generator=generator)
        self._require_positive(heads=heads)
        if dim % heads:
            raise ConfigError(
                f"SetTransformer: dim={dim} is not a multiple of heads={heads}; "
                f"pass dim={dim - dim % heads + heads}."
            )
        self.heads = heads
        self.encode_1 = AttentionBlock(dim, heads, generator)
        self.encode_2 = AttentionBlock(dim, heads, generator)
        self.pool_input = linear(dim, dim, generator)
        self.seeds = nn.Parameter(torch.empty(r, dim))
        nn.init.xavier_uniform_(self.seeds, generator=generator)
        self.pool = AttentionBlock(dim, heads, generator)
        self.relate = AttentionBlock(dim, heads, generator)

    def aggregate(self, embeddings: Tensor) -> Tensor:
        """Returns ``AE(Pool_r(AE(AE(X))))`` (r, dim) of embeddings ``X`` (B, dim)."""
        x = self.encode_1(embeddings, embeddings)
        x = self.encode_2(x, x)
        pooled = self.pool(self.seeds, F.relu(self.pool_input(x)))
        codes: Tensor = self.relate(pooled, pooled)
        return codes


class AttentionBlock(nn.Module):
    """``AE(x, y) = Norm(H + rF(H))``, ``H = Norm(x + MH(x, y, y))`` (paper, appendix A.1).

    ``AE(x) = AE(x, x)``; ``rF`` is a fully connected layer with ReLU, as in Lee et al. 2019.
    """

    def __init__(self, dim: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.heads = heads
        self.query = linear(dim, dim, generator)
        self.key = linear(dim, dim, generator, bias=False)  # softmax is blind to a key's bias
        self.value = linear(dim, dim, generator)
        self.join = linear(dim, dim, generator)
        self.feed = linear(dim, dim, generator)
        self.norm_attended = nn.LayerNorm(dim)
        self.norm_fed = nn.LayerNorm(dim)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns vectors (P, dim), one for each query in ``x`` (P, dim), from ``y`` (Q, dim)."""
        h = self.norm_attended(x + self._attend(x, y))
        out: Tensor = self.norm_fed(h + F.relu(self.feed(h)))
        return out

    def _attend(self, x: Tensor, y: Tensor) -> Tensor:
        query, key, value = (
            t.unflatten(1, (self.heads, -1)).transpose(0, 1).unsqueeze(0)
            for t in (self.query(x), self.key(y), self.value(y))
        )
        heads = F.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.join(heads.squeeze(0).transpose(0, 1).flatten(1))
        return joined
