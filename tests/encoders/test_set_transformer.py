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


@pytest.mark.parametrize(("queries", "keys"), [(4, 7), (7, 4), (6, 7), (5, 0)])
def test_attention_is_that_of_torch(queries: int, keys: int) -> None:
    """Of few queries to many, of many to few, and of a set to itself."""
    dim, heads = 12, 3
    block = AttentionBlock(dim, heads, seeded(0))
    reference = nn.MultiheadAttention(dim, heads)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(queries, dim, generator=generator)
    y = torch.randn(keys, dim, generator=generator) if keys else x
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


def test_induced_points_take_time_linear_in_the_images() -> None:
    """No product has the square of the images in it, and the set is still heard."""
    encoder = SetTransformer(3, grid=4, dim=16, induced=4)
    sizes: list[int] = []
    for block in encoder.modules():
        if isinstance(block, AttentionBlock):
            block.register_forward_hook(
                lambda _m, args, _o: sizes.append(len(args[0]) * len(args[1]))
            )
    batch = torch.randn(50, 3, 8, 8, generator=seeded(1))
    encoder(batch)
    assert max(sizes) == 4 * 50
    assert len(list(encoder.induced.parameters())) > 0
    assert float((encoder(batch) - encoder(batch * 2)).abs().max().detach()) > 1e-3


def test_the_default_has_no_induced_points_and_the_same_first_weights() -> None:
    plain, induced = SetTransformer(3), SetTransformer(3, induced=2)
    assert not any("induced" in name for name in plain.state_dict())
    own = induced.state_dict()
    assert all(torch.equal(t, own[name]) for name, t in plain.state_dict().items())
    with pytest.raises(ConfigError, match="induced=-1"):
        SetTransformer(3, induced=-1)
