"""What is particular to the set transformer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from stamppruner.encoders import SetTransformer
from stamppruner.encoders._base import seeded
from stamppruner.encoders.set_transformer import AttentionBlock
from stamppruner.errors import ConfigError


def test_dim_is_a_multiple_of_heads() -> None:
    with pytest.raises(ConfigError, match=r"dim=30 .* heads=4; pass dim=32"):
        SetTransformer(3, dim=30)
    with pytest.raises(ConfigError, match="heads=0"):
        SetTransformer(3, heads=0)


def test_attention_is_that_of_torch() -> None:
    dim, heads = 12, 3
    block = AttentionBlock(dim, heads, seeded(0))
    reference = nn.MultiheadAttention(dim, heads)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(4, dim, generator=generator), torch.randn(7, dim, generator=generator)
    with torch.no_grad():
        for layer in (block.query, block.value, block.join):
            layer.bias.copy_(torch.randn(dim, generator=generator))
        reference.in_proj_weight.copy_(
            torch.cat([block.query.weight, block.key.weight, block.value.weight])
        )
        reference.in_proj_bias.copy_(
            torch.cat([block.query.bias, torch.zeros(dim), block.value.bias])
        )
        reference.out_proj.load_state_dict(block.join.state_dict())
        h = block.norm_attended(x + reference(x, y, y)[0])
        expected = block.norm_fed(h + torch.relu(block.feed(h)))
        assert torch.allclose(block(x, y), expected, atol=1e-5)
