"""Beta-Bernoulli dropout whose masks depend on the image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from nets import concat, flattened
from stripes import SIZE, hooks, loader, resnet, same_state, snapshot, vgg
from torch import nn

from stamppruner import trace_channels
from stamppruner.baselines import BBDropout, DependentBBDropout
from stamppruner.baselines._dependent import Dependence, dependent
from stamppruner.errors import ConfigError
from stamppruner.gates import Gates
from stamppruner.heads import with_classes
from stamppruner.posteriors import BetaBernoulli
from stamppruner.target import Target, sample_target

X = torch.zeros(1, 3, SIZE, SIZE)


def softplus_inverse(x: float) -> float:
    return math.log(math.expm1(x))


def test_kl_of_both_forms_by_hand() -> None:
    """``KL(Kumaraswamy(a, b) || Beta(alpha, 1))`` at ``a = alpha``, and that of two Gaussians."""
    posterior = BetaBernoulli(1, alpha=0.5)
    with torch.no_grad():
        posterior.a_uc.fill_(softplus_inverse(0.5))
        posterior.b_uc.fill_(softplus_inverse(2.0))
        posterior.beta.zero_()  # of the set-based form
    # the first factor (1 - alpha / a) is 0, so log(ab / alpha) - (b - 1) / b is left
    assert float(posterior.kl()) == pytest.approx(math.log(2) - 0.5, abs=1e-6)
    phi = Dependence(2)
    with torch.no_grad():
        phi.beta.copy_(torch.tensor([1.0, 2.0]))
        phi.eta_uc.copy_(torch.tensor([softplus_inverse(1.0), softplus_inverse(0.5)]))
    first = math.log(math.sqrt(5) / 1.0) + (1.0 + 1.0) / 10 - 0.5
    second = math.log(math.sqrt(5) / 0.5) + (0.25 + 4.0) / 10 - 0.5
    assert float(phi.kl()) == pytest.approx(first + second, abs=1e-6)
    other = torch.distributions.kl_divergence(
        torch.distributions.Normal(2.0, 0.5), torch.distributions.Normal(0.0, math.sqrt(5))
    )
    assert second == pytest.approx(float(other), abs=1e-6)


def test_expected_masks_of_both_forms_by_hand() -> None:
    """``E[pi] = b B(1 + 1/a, b)``, at ``a = 1``, ``b = 3`` it is 1/4; ``phi`` is clamped."""
    posterior = BetaBernoulli(1)
    with torch.no_grad():
        posterior.a_uc.fill_(softplus_inverse(1.0))
        posterior.b_uc.fill_(softplus_inverse(3.0))
    assert float(posterior.keep_probability()) == pytest.approx(0.25, abs=1e-6)
    phi = Dependence(3).eval()
    with torch.no_grad():
        phi.gamma.copy_(torch.tensor([0.5, 2.0, 0.1]))
        phi.beta.copy_(torch.tensor([0.25, 1.0, 0.5]))
        phi.mean.copy_(torch.tensor([1.0, 0.0, 0.0]))
        phi.variance.copy_(torch.tensor([4.0, 1.0, 1.0]))
    found = phi(torch.tensor([[2.0, 3.0], [1.0, -3.0]]), torch.tensor([0, 1]))
    assert found.tolist() == [
        pytest.approx([0.5 * 0.5 + 0.25, 1], abs=1e-6),
        pytest.approx([0.25, 0], abs=1e-6),
    ]
    assert 0 < float(found.min()) < 1e-9


def test_statistics_are_those_of_a_batch_norm() -> None:
    phi, norm = Dependence(3), nn.BatchNorm1d(3)
    norm.bias.data.fill_(0.4)
    with torch.no_grad():
        phi.beta.fill_(0.4)
        phi.gamma.mul_(0.1)
        norm.weight.mul_(0.1)
        phi.eta_uc.fill_(-40.0)  # no noise
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0)) * 2 + 1
    assert torch.allclose(phi(x, torch.arange(3)), norm(x), atol=1e-6)
    assert torch.allclose(phi.mean, norm.running_mean, atol=1e-6)
    assert torch.allclose(phi.variance, norm.running_var, atol=1e-6)
    assert torch.allclose(phi.eval()(x, torch.arange(3)), norm.eval()(x), atol=1e-6)


def test_noise_has_the_deviation_of_beta() -> None:
    phi = Dependence(4000)
    with torch.no_grad():
        phi.beta.fill_(0.5)
        phi.eta_uc.fill_(softplus_inverse(0.05))
    values = phi(torch.zeros(1, 4000), torch.arange(4000), torch.Generator().manual_seed(0))
    assert float(values.detach().std()) == pytest.approx(0.05, rel=0.05)


def test_a_pass_multiplies_by_pi_and_phi_of_what_each_reader_reads() -> None:
    """Two channels, two images of one pixel: every number is known."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2, bias=False)
    ).eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1))
        model[3].weight.copy_(torch.eye(2))
    graph = trace_channels(model, torch.ones(1, 1, 1, 1))
    order = graph.layers["0"].outputs
    phi = Dependence(2).eval()
    with torch.no_grad():
        phi.gamma.fill_(0.1)
        phi.beta.fill_(0.2)
        phi.variance.fill_(1.0 - 1e-5)
    pi = torch.tensor([0.5, 0.9])[np.argsort(order)]
    with dependent(model, graph, phi) as gates, torch.no_grad():
        gates.begin(pi, 2, temperature=None)
        out = model(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1))
        mask = gates.gates.values[:, order]
    # readings are x and 2x, so phi is 0.2 + 0.1 x and 0.2 + 0.2 x
    expected = torch.tensor([[0.5 * 0.3, 0.9 * 0.4], [0.5 * 0.5, 0.9 * 0.8]])
    assert torch.allclose(mask, expected, atol=1e-6)
    assert torch.allclose(out, expected * torch.tensor([[1.0, 2.0], [3.0, 6.0]]), atol=1e-5)
    target = Target(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1), torch.tensor([0, 1]), 2, 2)
    with dependent(model, graph, phi) as gates:
        found = gates.expected(pi, target, torch.device("cpu"))[order]
    assert torch.allclose(found, expected.mean(0), atol=1e-6)


@pytest.mark.parametrize("make", [vgg, resnet, concat, flattened])
def test_every_channel_is_decided_once_and_all_readers_agree(make: Any) -> None:
    """The output is that of plain gates with the masks that came out."""
    model = make().eval()
    x = torch.randn(4, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(0))
    graph = trace_channels(model, x[:1])
    phi = Dependence(graph.num_channels).eval()
    with torch.no_grad():
        phi.gamma.fill_(0.3)
        phi.beta.fill_(0.5)
    with dependent(model, graph, phi) as gates, torch.no_grad():
        gates.begin(torch.ones(graph.num_channels), 4, temperature=None)
        out = model(x)
        mask = gates.gates.values
    assert not gates._open
    assert (mask.std(0) > 0).float().mean() > 0.5
    assert ((mask >= 0) & (mask <= 1)).all()
    with Gates(model, graph).injected() as plain, torch.no_grad():
        plain.values = mask
        assert torch.allclose(model(x), out, atol=1e-5)
    assert hooks(model) == 0


def test_relaxed_draws_have_about_the_probability() -> None:
    model = vgg().eval()
    graph = trace_channels(model, X)
    phi = Dependence(graph.num_channels).eval()
    with torch.no_grad():
        phi.gamma.zero_()
        phi.beta.fill_(0.3)
    generator = torch.Generator().manual_seed(0)
    with dependent(model, graph, phi) as gates, torch.no_grad():
        gates.begin(torch.ones(graph.num_channels), 400, temperature=0.05, generator=generator)
        model(torch.randn(400, 3, SIZE, SIZE))
        mask = gates.gates.values
    assert float(mask.mean()) == pytest.approx(0.3, abs=0.02)
    assert ((mask < 0.05) | (mask > 0.95)).float().mean() > 0.8


def test_the_second_stage_moves_phi_alone_and_the_weights() -> None:
    model = vgg()
    graph = trace_channels(model, X)
    target = sample_target(loader(), 96)
    dense, graph = with_classes(model, graph, 6)
    before = snapshot(dense)
    settings: dict[str, Any] = {"epochs": 2, "seed": 1}
    scores = DependentBBDropout(**settings, dependent_epochs=2).scores(dense, graph, target)
    independent = BBDropout(**settings).scores(dense, graph, target)
    assert same_state(dense, before)
    assert (scores <= independent + 1e-6).all()  # E[pi] phi, with phi below 1
    assert np.corrcoef(scores, independent)[0, 1] < 0.999


def test_channels_that_images_do_not_open_score_low() -> None:
    """With a strong prior on beta, ``phi`` shrinks; without one it stays where it started."""
    model = vgg()
    graph, target = trace_channels(model, X), sample_target(loader(), 96)
    low, high = (
        DependentBBDropout(
            epochs=1, dependent_epochs=25, weights_lr=0.0, pi_lr=0.1, kl_scale=scale
        ).scores(model, graph, target)
        for scale in (1e3, 0.0)
    )
    assert low.mean() < 0.8 * high.mean()


@pytest.mark.parametrize("settings", [{"dependent_epochs": 0}, {"temperature": 0.0}])
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        DependentBBDropout(**settings)
