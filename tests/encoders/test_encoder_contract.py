"""What every set encoder promises."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stamppruner.encoders import DeepSets, SetEncoder, SetTransformer
from stamppruner.errors import ConfigError, DataError

IMPLEMENTATIONS = [
    pytest.param(SetTransformer, id="SetTransformer"),
    pytest.param(partial(SetTransformer, induced=8), id="induced"),
    pytest.param(DeepSets, id="DeepSets"),
]
Build = Callable[..., SetEncoder]


@pytest.fixture(params=IMPLEMENTATIONS)
def build(request: pytest.FixtureRequest) -> Build:
    return request.param


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def residual(encoder: SetEncoder, batch: Tensor) -> Tensor:
    """What the encoder adds to the mean image: the mean alone would hide its mistakes."""
    with torch.no_grad():
        return encoder(batch) - batch.mean(0, keepdim=True)


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("size", [(32, 32), (5, 41), (1, 1), (64, 48)])
def test_shapes(build: Build, channels: int, size: tuple[int, int]) -> None:
    pseudo = build(channels)(images(4, channels, *size))
    assert pseudo.shape == (1, channels, *size)
    assert torch.isfinite(pseudo).all()


@pytest.mark.parametrize("count", [1, 2, 1000])
@pytest.mark.parametrize("r", [1, 3])
def test_any_number_of_images(build: Build, count: int, r: int) -> None:
    batch = images(count, 3, 8, 8)
    with torch.no_grad():
        pseudo = build(3, r=r)(batch)
    assert pseudo.shape == (r, 3, 8, 8)
    assert torch.isfinite(pseudo).all()


@pytest.mark.parametrize("count", [2, 17, 300])
def test_order_is_ignored(build: Build, count: int) -> None:
    batch = images(count, 3, 12, 10)
    encoder = build(3)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    first = residual(encoder, batch)
    assert first.abs().max() > 1e-3
    assert (residual(encoder, batch[order]) - first).abs().max() < 1e-5


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from([SetTransformer, DeepSets]),
    count=st.integers(1, 9),
    channels=st.integers(1, 4),
    height=st.integers(1, 20),
    width=st.integers(1, 20),
    seed=st.integers(0, 2**32),
)
def test_order_is_ignored_for_any_shape(
    kind: Build, count: int, channels: int, height: int, width: int, seed: int
) -> None:
    batch = images(count, channels, height, width, seed=seed)
    encoder = kind(channels, grid=4, dim=16)
    pseudo = encoder(batch)
    assert pseudo.shape == (1, channels, height, width)
    assert torch.allclose(encoder(batch.flip(0)), pseudo, atol=1e-5)


def test_copies_of_the_whole_set_change_nothing(build: Build) -> None:
    batch = images(5, 3, 8, 8)
    encoder = build(3)
    with torch.no_grad():
        for seed, p in enumerate(encoder.parameters()):  # biases of 0 would hide a sum
            p.add_(0.1 * images(*p.shape, seed=seed))
    copies = residual(encoder, batch.repeat(3, 1, 1, 1))
    assert torch.allclose(copies, residual(encoder, batch), atol=1e-4)


def test_a_copy_of_one_image_counts(build: Build) -> None:
    batch = images(4, 3, 8, 8)
    encoder = build(3)
    with_copy = torch.cat([batch, batch[:1]])
    assert (residual(encoder, with_copy) - residual(encoder, batch)).abs().max() > 1e-4


def test_other_sets_give_other_residuals(build: Build) -> None:
    encoder = build(3)
    one, other = (residual(encoder, images(16, 3, 8, 8, seed=s)) for s in (0, 1))
    bright = residual(encoder, images(16, 3, 8, 8) + 2)
    for x in (other, bright):
        assert (one - x).abs().max() > 1e-3


def test_first_pseudo_image_is_near_the_mean_and_not_on_it(build: Build) -> None:
    deviation = residual(build(3), images(64, 3, 16, 16)).std()
    assert 1e-3 < deviation < 0.05


def test_gradients_reach_every_parameter_and_the_images(build: Build) -> None:
    encoder = build(3, r=2)
    batch = images(6, 3, 9, 9).requires_grad_()
    (encoder(batch) * images(2, 3, 9, 9, seed=1)).sum().backward()
    for name, tensor in [*encoder.named_parameters(), ("images", batch)]:
        assert tensor.grad is not None, name
        assert torch.isfinite(tensor.grad).all(), name
        assert tensor.grad.norm() > 1e-7, name


def test_training_moves_the_pseudo_image(build: Build) -> None:
    encoder = build(1, grid=4, dim=16)
    batch, target = images(8, 1, 8, 8), torch.ones(1, 1, 8, 8)
    optimiser = torch.optim.Adam(encoder.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = (encoder(batch) - target).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_weights_follow_the_seed_alone(build: Build) -> None:
    state = torch.random.get_rng_state()
    first, again, other = build(3, seed=1), build(3, seed=1), build(3, seed=2)
    assert torch.equal(torch.random.get_rng_state(), state)
    batch = images(4, 3, 8, 8)
    assert torch.equal(first(batch), again(batch))
    assert not torch.allclose(first(batch), other(batch), atol=1e-3)


def test_training_mode_changes_nothing(build: Build) -> None:
    encoder, batch = build(3), images(4, 3, 8, 8)
    assert torch.equal(encoder.train()(batch), encoder.eval()(batch))


def test_state_dict_round_trip(build: Build) -> None:
    source, target = build(3, seed=1), build(3, seed=2)
    batch = images(4, 3, 8, 8)
    assert not torch.equal(source(batch), target(batch))
    target.load_state_dict(source.state_dict())
    assert torch.equal(source(batch), target(batch))


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-5), (torch.bfloat16, 0.05)])
def test_results_follow_the_dtype(build: Build, dtype: torch.dtype, atol: float) -> None:
    encoder, batch = build(3), images(4, 3, 8, 8)
    expected = encoder(batch)
    pseudo = encoder.to(dtype)(batch.to(dtype))
    assert pseudo.dtype == dtype
    assert torch.allclose(pseudo.float(), expected, atol=atol)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_follow_the_device(build: Build) -> None:
    encoder, batch = build(3), images(4, 3, 8, 8)
    expected = encoder(batch)
    pseudo = encoder.cuda()(batch.cuda())
    assert pseudo.is_cuda
    assert torch.allclose(pseudo.cpu(), expected, atol=1e-2)


@pytest.mark.parametrize(
    "shape", [(4, 1, 8, 8), (3, 8, 8), (0, 3, 8, 8), (2, 3, 0, 8), (1, 4, 3, 8, 8)]
)
def test_unusable_images_are_refused(build: Build, shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match=r"images have shape .* \(B, 3, H, W\)"):
        build(3)(torch.zeros(shape))


def test_bytes_are_refused(build: Build) -> None:
    with pytest.raises(DataError, match=r"torch\.uint8"):
        build(3)(torch.zeros(2, 3, 8, 8, dtype=torch.uint8))


@pytest.mark.parametrize("bad", [{"in_channels": 0}, {"grid": 0}, {"dim": 0}, {"r": 0}])
def test_settings_below_one_are_refused(build: Build, bad: dict[str, int]) -> None:
    (name,) = bad
    with pytest.raises(ConfigError, match=f"{name}=0"):
        build(**{"in_channels": 3, **bad})


def test_a_prepared_set_follows_the_parameters(build: Build) -> None:
    encoder, batch = build(3), images(6, 3, 16, 16)
    encode = encoder.prepared(batch)
    first = encode()
    assert torch.equal(first, encoder(batch))
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.mul_(1.5)
    assert torch.equal(encode(), encoder(batch))
    assert not torch.equal(encode(), first)
