"""The formulas of the beta-Bernoulli posterior, against sampling and torch.distributions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Beta, Kumaraswamy

from stamppruner.errors import ConfigError
from stamppruner.posteriors import BetaBernoulli

SHAPES = [(0.3, 0.7), (1.0, 1.0), (2.0, 0.5), (0.5, 3.0), (4.0, 2.5), (8.0, 10.0)]
DRAWS = 200_000


def with_shape(a: float, b: float, **settings: float) -> BetaBernoulli:
    posterior = BetaBernoulli(1, beta=0.0, **settings).double()
    with torch.no_grad():
        posterior.a_uc.fill_(math.log(math.expm1(a)))
        posterior.b_uc.fill_(math.log(math.expm1(b)))
    return posterior


def draws(a: float, b: float) -> torch.Tensor:
    u = torch.rand(DRAWS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (1 - u ** (1 / b)) ** (1 / a)


def assert_mean(samples: torch.Tensor, expected: torch.Tensor) -> None:
    error = samples.std() / samples.numel() ** 0.5
    assert abs(samples.mean() - expected.squeeze()) < 4 * error


@pytest.mark.parametrize(("a", "b"), SHAPES)
def test_expected_pi_is_the_mean_of_draws(a: float, b: float) -> None:
    assert_mean(draws(a, b), with_shape(a, b).keep_probability().detach())


@pytest.mark.parametrize(("a", "b"), SHAPES)
@pytest.mark.parametrize("alpha", [1e-4, 0.5, 2.0])
def test_kl_is_the_mean_log_ratio(a: float, b: float, alpha: float) -> None:
    q = Kumaraswamy(torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64))
    prior = Beta(torch.tensor(alpha, dtype=torch.float64), torch.ones((), dtype=torch.float64))
    pi = draws(a, b).clamp(1e-15, 1 - 1e-15)
    log_ratio = q.log_prob(pi) - prior.log_prob(pi)
    assert_mean(log_ratio, with_shape(a, b, alpha=alpha).kl().detach())


def test_kl_is_zero_at_the_prior() -> None:
    assert with_shape(0.5, 1.0, alpha=0.5).kl().item() == pytest.approx(0, abs=1e-12)


def test_kl_is_the_formula_of_the_method_page() -> None:
    posterior = BetaBernoulli(5, alpha=1e-2, beta=0.7, beta_variance=3.0).double()
    with torch.no_grad():
        posterior.a_uc.copy_(torch.linspace(-2, 3, 5))
        posterior.b_uc.copy_(torch.linspace(2, -1, 5))
    a, b = (torch.nn.functional.softplus(p) for p in (posterior.a_uc, posterior.b_uc))
    kl = (1 - 1e-2 / a) * (-0.5772156649 - torch.digamma(b) - 1 / b)
    kl = kl + (a * b).log() - math.log(1e-2) - (b - 1) / b
    expected = kl.sum() + 5 * 0.7**2 / (2 * 3.0)
    assert posterior.kl().item() == pytest.approx(expected.item(), rel=1e-8)


def test_evidence_scales_pi_between_the_clamps() -> None:
    posterior = BetaBernoulli(3, gamma=0.1, beta=0.9, epsilon=0.01, initial_keep=0.5)
    o = torch.tensor([-100.0, -1.0, 100.0], requires_grad=True)
    keep = posterior.keep_probability(o)
    assert keep.tolist() == pytest.approx([0.5 * 0.01, 0.5 * 0.8, 0.5 * 0.99], rel=1e-5)
    keep.sum().backward()
    assert o.grad is not None
    assert o.grad.tolist() == pytest.approx([0, 0.05, 0], rel=1e-5)


def test_gradient_of_samples_matches_that_of_the_mean() -> None:
    count = 200_000
    posterior = BetaBernoulli(count, initial_keep=0.6)
    posterior.sample(temperature=0.67, generator=torch.Generator().manual_seed(0)).sum().backward()
    sampled = [p.grad.mean().item() for p in posterior.pi_parameters() if p.grad is not None]
    posterior.zero_grad()
    posterior.keep_probability().sum().backward()
    exact = [p.grad.mean().item() for p in posterior.pi_parameters() if p.grad is not None]
    assert exact[0] > 0 > exact[1]
    assert sampled == pytest.approx(exact, rel=0.2)  # the relaxation is biased, mildly


unconstrained = st.floats(-1000, 150, width=32)


@settings(max_examples=150, deadline=None)
@given(
    a_uc=unconstrained,
    b_uc=unconstrained,
    o=st.floats(-1e4, 1e4, width=32),
    temperature=st.floats(0.01, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 2**32),
)
def test_values_and_gradients_stay_finite(
    a_uc: float, b_uc: float, o: float, temperature: float, dtype: torch.dtype, seed: int
) -> None:
    posterior = BetaBernoulli(16).to(dtype)
    with torch.no_grad():
        posterior.a_uc.fill_(a_uc)
        posterior.b_uc.fill_(b_uc)
    evidence = torch.full((16,), o, dtype=dtype, requires_grad=True)
    generator = torch.Generator().manual_seed(seed)
    keep = posterior.keep_probability(evidence)
    mask = posterior.sample(evidence, temperature=temperature, generator=generator)
    free = posterior.sample(temperature=temperature, generator=generator)
    for value in (keep, mask, free):
        assert ((value >= 0) & (value <= 1)).all()
    kl = posterior.kl()
    assert torch.isfinite(kl)
    (keep.sum() + mask.sum() + free.sum() + kl).backward()
    for tensor in (*posterior.parameters(), evidence):
        assert tensor.grad is not None
        assert torch.isfinite(tensor.grad).all()


@pytest.mark.parametrize("u", [0.0, 1.0])
def test_noise_at_the_ends_is_survived(monkeypatch: pytest.MonkeyPatch, u: float) -> None:
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, **_: torch.full(shape, u, dtype=dtype))
    posterior = BetaBernoulli(3)
    mask = posterior.sample(torch.zeros(3), temperature=0.67)
    mask.sum().backward()
    assert torch.isfinite(mask).all()
    for p in posterior.parameters():
        assert p.grad is not None
        assert torch.isfinite(p.grad).all()


@settings(max_examples=100, deadline=None)
@given(a=st.floats(1e-4, 1e2), b=st.floats(1e-4, 1e2))
def test_float32_agrees_with_float64(a: float, b: float) -> None:
    exact = with_shape(a, b)
    single = with_shape(a, b).float()
    exact.load_state_dict(single.state_dict())  # the same rounded parameters
    for compute in (BetaBernoulli.keep_probability, BetaBernoulli.kl):
        wide, narrow = compute(exact), compute(single)
        assert narrow.item() == pytest.approx(wide.item(), rel=1e-5, abs=1e-30)
        wide.sum().backward()
        narrow.sum().backward()
    for p, q in zip(exact.pi_parameters(), single.pi_parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert q.grad.item() == pytest.approx(p.grad.item(), rel=1e-5, abs=1e-30)


@settings(max_examples=50, deadline=None)
@given(keep=st.floats(0, 1))
def test_warm_start_reaches_any_probability(keep: float) -> None:
    posterior = BetaBernoulli(2)
    posterior.warm_start(torch.full((2,), keep))
    reached = posterior.keep_probability().tolist()
    assert reached == pytest.approx([min(max(keep, 0.02), 0.98)] * 2, abs=1e-5)


@pytest.mark.parametrize(
    "bad",
    [
        {"alpha": 0.0},
        {"epsilon": 0.0},
        {"epsilon": 0.5},
        {"beta_variance": -1.0},
        {"initial_keep": 0.0},
        {"initial_keep": 1.0},
    ],
)
def test_settings_outside_their_range_are_refused(bad: dict[str, float]) -> None:
    (name,) = bad
    with pytest.raises(ConfigError, match=f"BetaBernoulli: {name}="):
        BetaBernoulli(3, **bad)


def test_whole_numbers_are_taken() -> None:
    assert BetaBernoulli(2, gamma=1, beta=0).keep_probability().dtype == torch.float32
