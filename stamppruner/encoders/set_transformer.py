"""The paper's set encoder: attention blocks and pooling by attention (Lee et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence

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

    Attention among B images takes time that grows with B^2: as much as the rest of the encoder at
    about 600 images. For sets of more than 1,000, pass ``induced=64``, say: images then attend to
    so many learned points, which attended to them (ISAB of Lee et al. 2019), in time linear in B.

    Args:
        in_channels: C of the images, at least 1.
        grid: side of the pooled images.
        dim: width of the embeddings, a multiple of ``heads``.
        heads: of the attention, at least 1.
        r: pseudo images per set.
        induced: learned points between the images; 0, as in the paper, has images attend to each
            other.
        seed: of the initial weights.

    Raises:
        ConfigError: a value is below 1 (``induced``: 0), or ``dim`` is not a multiple of ``heads``.
    """

    def __init__(
        self,
        in_channels: int,
        *,
        grid: int = 8,
        dim: int = 128,
        heads: int = 4,
        r: int = 1,
        induced: int = 0,
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
        if induced < 0:
            raise ConfigError(f"SetTransformer: induced={induced}; pass 0 or more.")
        self.heads = heads
        self.encode_1 = AttentionBlock(dim, heads, generator)
        self.encode_2 = AttentionBlock(dim, heads, generator)
        self.pool_input = linear(dim, dim, generator)
        self.seeds = nn.Parameter(torch.empty(r, dim))
        nn.init.xavier_uniform_(self.seeds, generator=generator)
        self.pool = AttentionBlock(dim, heads, generator)
        self.relate = AttentionBlock(dim, heads, generator)
        self.induced = nn.ModuleList(
            InducedPoints(induced, dim, heads, generator) for _ in range(2 if induced else 0)
        )

    def aggregate(self, embeddings: Tensor) -> Tensor:
        """Returns ``AE(Pool_r(AE(AE(X))))`` (r, dim) of embeddings ``X`` (B, dim)."""
        x = embeddings
        for number, block in enumerate((self.encode_1, self.encode_2)):
            x = block(x, self.induced[number](x) if self.induced else x)
        pooled = self.pool(self.seeds, F.relu(self.pool_input(x)))
        codes: Tensor = self.relate(pooled, pooled)
        return codes


class InducedPoints(nn.Module):
    """``AE(I, X)``: what learned points ``I`` (m, dim) find in a set (Lee et al. 2019, eq. 10)."""

    def __init__(self, number: int, dim: int, heads: int, generator: torch.Generator) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.empty(number, dim))
        nn.init.xavier_uniform_(self.points, generator=generator)
        self.attend = AttentionBlock(dim, heads, generator)

    def forward(self, x: Tensor) -> Tensor:
        """Returns vectors (m, dim) of a set (B, dim), whatever its order."""
        found: Tensor = self.attend(self.points, x)
        return found


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
        if len(x) < len(y) and len(x) * (self.heads - 1) < x.shape[1]:  # fewer products
            return self._attend_by_few(x, y)
        query, key, value = (
            t.unflatten(1, (self.heads, -1)).transpose(0, 1).unsqueeze(0)
            for t in self._projected(x, y)
        )
        heads = F.scaled_dot_product_attention(query, key, value)
        joined: Tensor = self.join(heads.squeeze(0).transpose(0, 1).flatten(1))
        return joined

    def _projected(self, x: Tensor, y: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values; in one product where they are all of one set."""
        if x is not y:
            return self.query(x), self.key(y), self.value(y)
        weight = torch.cat([self.query.weight, self.key.weight, self.value.weight])
        none = torch.zeros_like(self.query.bias)
        return F.linear(x, weight, torch.cat([self.query.bias, none, self.value.bias])).chunk(3, 1)

    def _attend_by_few(self, x: Tensor, y: Tensor) -> Tensor:
        """The same where queries are few: keys and values of the many are never made.

        ``(q W_k) y`` stands for ``q (W_k y)``, and ``W_v sum_i a_i y_i`` for ``sum_i a_i W_v y_i``.
        """
        split = (self.heads, x.shape[1] // self.heads)
        query = self.query(x).unflatten(1, split)
        asked = torch.einsum("phd,hdc->phc", query, self.key.weight.unflatten(0, split))
        shares = (asked.flatten(0, 1) @ y.t() / math.sqrt(split[1])).softmax(1)
        found = (shares @ y).unflatten(0, (len(x), self.heads))
        heads = torch.einsum("phc,hdc->phd", found, self.value.weight.unflatten(0, split))
        joined: Tensor = self.join(heads.flatten(1) + self.value.bias)
        return joined
