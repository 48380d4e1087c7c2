"""What every posterior promises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from stamppruner.errors import ConfigError, DataError
from stamppruner.posteriors import BetaBernoulli, Posterior

M = 7
IMPLEMENTATIONS = [pytest.param(BetaBernoulli, id="BetaBernoulli")]
Build = Callable[[int], Posterior]


@pytest.fixture(params=IMPLEMENTATIONS)
def build(request: pytest.FixtureRequest) -> Build:
    return request.param


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def evidence(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.linspace(-2, 0.5, M, dtype=dtype)


@pytest.mark.parametrize("o", [None, evidence()], ids=["prior", "evidence"])
def test_shapes_and_ranges(build: Build, o: torch.Tensor | None) -> None:
    posterior = build(M)
    for mask in (
        posterior.keep_probability(o),
        posterior.sample(o, temperature=0.67, generator=seeded()),
    ):
        assert mask.shape == (M,)
        assert ((mask > 0) & (mask < 1)).all()
    assert posterior.kl().shape == ()
    assert posterior.kl() > 0


@pytest.mark.parametrize("draw", ["keep_probability", "sample"])
def test_gradients_reach_every_parameter_and_the_evidence(build: Build, draw: str) -> None:
    posterior = build(M)
    o = evidence().requires_grad_()
    if draw == "sample":
        mask = posterior.sample(o, temperature=0.67, generator=seeded())
    else:
        mask = posterior.keep_probability(o)
    mask.sum().backward()
    for name, tensor in [*posterior.named_parameters(), ("evidence", o)]:
        assert tensor.grad is not None, name
        assert torch.isfinite(tensor.grad).all(), name
        assert (tensor.grad != 0).all(), name


def test_each_parameter_is_in_one_optimiser_group(build: Build) -> None:
    posterior = build(M)
    grouped = [*posterior.pi_parameters(), *posterior.theta_parameters()]
    assert sorted(map(id, grouped)) == sorted(map(id, posterior.parameters()))
    posterior.kl().backward()
    assert all(p.grad is not None and (p.grad != 0).all() for p in posterior.pi_parameters())


def test_without_evidence_only_pi_decides(build: Build) -> None:
    posterior = build(M)
    posterior.keep_probability().sum().backward()
    assert all(p.grad is not None for p in posterior.pi_parameters())
    assert all(p.grad is None for p in posterior.theta_parameters())


def test_samples_follow_the_generator_alone(build: Build) -> None:
    posterior = build(M)

    def draw(seed: int) -> torch.Tensor:
        return posterior.sample(evidence(), temperature=0.67, generator=seeded(seed)).detach()

    before = torch.random.get_rng_state()
    first = draw(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.rand(3)
    assert torch.equal(first, draw(1))
    assert not torch.allclose(first, draw(2), atol=1e-3)


def test_samples_vary_without_a_generator(build: Build) -> None:
    posterior = build(M)
    first, second = (posterior.sample(temperature=0.67) for _ in range(2))
    assert not torch.equal(first, second)


def test_low_temperature_is_binary(build: Build) -> None:
    posterior = build(2000)
    mask = posterior.sample(temperature=1e-4, generator=seeded())
    assert ((mask < 1e-3) | (mask > 1 - 1e-3)).float().mean() > 0.99
    assert torch.isfinite(mask).all()


@pytest.mark.parametrize("with_evidence", [False, True])
def test_sample_mean_is_the_keep_probability(build: Build, with_evidence: bool) -> None:
    count = 40_000
    posterior = build(3 * count)
    posterior.warm_start(torch.tensor([0.1, 0.5, 0.9]).repeat_interleave(count))
    o = torch.tensor([-4.0, -1.0, 0.5]).repeat_interleave(count) if with_evidence else None
    mask = posterior.sample(o, temperature=1e-3, generator=seeded()).view(3, count).mean(1)
    p = posterior.keep_probability(o).view(3, count)[:, 0]
    assert ((mask - p).abs() < 4 * (p * (1 - p) / count).sqrt()).all()


def test_warm_start(build: Build) -> None:
    posterior = build(M)
    keep = torch.tensor([0.0, 0.02, 0.1, 0.5, 0.9, 0.98, 1.0], requires_grad=True)
    theta = [p.detach().clone() for p in posterior.theta_parameters()]
    posterior.warm_start(keep)
    start = posterior.keep_probability()
    assert torch.allclose(start, keep.clamp(0.02, 0.98), atol=1e-3)
    assert all(p.is_leaf and p.requires_grad for p in posterior.parameters())
    assert all(map(torch.equal, theta, posterior.theta_parameters()))
    start.sum().backward()
    assert keep.grad is None
    assert all(
        p.grad is not None and (p.grad.abs() > 1e-4).all() for p in posterior.pi_parameters()
    )


def test_state_dict_round_trip(build: Build) -> None:
    source, target = build(M), build(M)
    with torch.no_grad():
        for p in source.parameters():
            p.add_(torch.rand(p.shape, generator=seeded()))
    assert not torch.allclose(
        source.keep_probability(evidence()), target.keep_probability(evidence())
    )
    target.load_state_dict(source.state_dict())
    assert torch.equal(source.keep_probability(evidence()), target.keep_probability(evidence()))
    assert torch.equal(source.kl(), target.kl())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_results_follow_the_dtype(build: Build, dtype: torch.dtype) -> None:
    posterior = build(M)
    expected = posterior.keep_probability(evidence())
    posterior.to(dtype)
    keep = posterior.keep_probability(evidence())
    assert keep.dtype == dtype
    assert posterior.kl().dtype == dtype
    assert posterior.sample(evidence(), temperature=0.67).dtype == dtype
    assert torch.allclose(keep.float(), expected, atol=0.02)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_results_follow_the_device(build: Build) -> None:
    cpu, gpu = build(M), build(M).cuda()
    o = evidence()
    masks = [
        posterior.sample(o.to(device), temperature=0.67, generator=seeded())
        for posterior, device in ((cpu, "cpu"), (gpu, "cuda"))
    ]
    assert masks[1].is_cuda
    assert gpu.keep_probability(o.cuda()).is_cuda
    assert gpu.kl().is_cuda
    assert torch.allclose(masks[0], masks[1].cpu(), atol=1e-5)
    on_gpu = torch.Generator("cuda").manual_seed(0)
    assert gpu.sample(o.cuda(), temperature=0.67, generator=on_gpu).is_cuda


@pytest.mark.parametrize("bad", [torch.zeros(M + 1), torch.zeros(1, M), torch.zeros(M).long()])
def test_unusable_evidence_is_refused(build: Build, bad: torch.Tensor) -> None:
    posterior = build(M)
    with pytest.raises(DataError, match=rf"evidence .*\({M},\)"):
        posterior.keep_probability(bad)
    with pytest.raises(DataError, match=rf"evidence .*\({M},\)"):
        posterior.sample(bad, temperature=0.67)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_unusable_temperature_is_refused(build: Build, temperature: float) -> None:
    with pytest.raises(ConfigError, match="temperature"):
        build(M).sample(temperature=temperature)


@pytest.mark.parametrize(
    "bad",
    [torch.ones(M - 1), torch.full((M,), 1.1), torch.full((M,), -0.1), torch.full((M,), torch.nan)],
)
def test_unusable_warm_start_is_refused_and_changes_nothing(
    build: Build, bad: torch.Tensor
) -> None:
    posterior = build(M)
    before = posterior.keep_probability()
    with pytest.raises(DataError, match="keep"):
        posterior.warm_start(bad)
    assert torch.equal(posterior.keep_probability(), before)


def test_no_channels_are_refused(build: Build) -> None:
    with pytest.raises(ConfigError, match="num_channels=0"):
        build(0)
    assert build(1).keep_probability().shape == (1,)
