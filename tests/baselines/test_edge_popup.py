"""Subnetworks of random weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nets import head
from stripes import loader, resnet, same_state, snapshot, vgg
from torch import nn

from stamppruner import Budget
from stamppruner.baselines import EdgePopup
from stamppruner.baselines.edge_popup import shares, straight_through
from stamppruner.errors import ConfigError, DataError
from stamppruner.target import Target, sample_target
from stamppruner.zeros import held, weights_of


def test_the_largest_scores_are_chosen_and_gradients_pass_through() -> None:
    scores = torch.tensor([[0.5, -2.0], [1.0, -0.1]], requires_grad=True)
    mask = straight_through(scores, 2)
    assert mask.tolist() == [[0, 1], [1, 0]]
    (gradient,) = torch.autograd.grad((mask * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum(), scores)
    assert gradient.tolist() == [[1, -2], [3, -4]]  # times the sign, as |s| is what is ranked


def test_a_step_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the weights: ``s' = s - lr (sign(s) w (p_i - y_i) x_j + decay s)``."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    weight = torch.tensor([[1.0, -0.5], [2.0, 0.25]])
    start = torch.tensor([[0.3, -0.9], [0.6, 0.1]])
    with torch.no_grad():
        model[1].weight.copy_(weight)
    monkeypatch.setattr(
        "stamppruner.baselines.edge_popup._scores",
        lambda weight, generator: start.clone().requires_grad_(),
    )
    target = Target(torch.tensor([3.0, 4.0]).view(1, 2, 1, 1), torch.tensor([0]), 2, 1)
    method = EdgePopup(epochs=1, lr=0.1, weight_decay=0.01)
    found = method.learn(model, weights_of(model), target, {"1": 2})["1"]
    # used: w01 and w10, so the logits are (-0.5 * 4, 2 * 3) = (-2, 6)
    wrong = 1 / (1 + math.exp(-2 - 6))
    slope = torch.tensor([[-wrong * 3, -wrong * 4], [wrong * 3, wrong * 4]])
    expected = start - 0.1 * (start.sign() * weight * slope + 0.01 * start)
    assert torch.allclose(found, expected, atol=1e-6)
    assert torch.equal(model[1].weight, weight)


def test_the_second_step_has_momentum_and_half_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one weight a class and both used, ``dL/ds = +-w x p`` at every step."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[0.5], [-0.5]]))
    monkeypatch.setattr(
        "stamppruner.baselines.edge_popup._scores",
        lambda weight, generator: torch.tensor([[1.0], [2.0]]).requires_grad_(),
    )
    target = Target(torch.ones(1, 1, 1, 1), torch.tensor([0]), 2, 1)
    method = EdgePopup(epochs=2, lr=0.2, momentum=0.9, weight_decay=0.0)
    found = method.learn(model, weights_of(model), target, {"1": 2})["1"]
    wrong = 1 / (1 + math.exp(0.5 + 0.5))
    slope = -wrong * 0.5  # the same for both: (p0 - 1) w0 and p1 w1
    total = 0.2 * slope + 0.1 * (0.9 * slope + slope)  # cosine over two steps: 1, then 1/2
    assert found.flatten().tolist() == pytest.approx([1 - total, 2 - total], abs=1e-6)


def test_every_layer_keeps_the_same_share() -> None:
    assert shares({"a": 100, "b": 1000, "c": 1}, 552) == {"a": 50, "b": 500, "c": 1}
    assert shares({"a": 1000, "b": 1, "c": 1}, 3) == {"a": 1, "b": 1, "c": 1}
    assert shares({"a": 7, "b": 3}, 10) == {"a": 7, "b": 3}
    result = EdgePopup(epochs=1).prune(resnet(), loader(), Budget(params=0.3))
    kept = [float(mask.float().mean()) for mask in held(result.model).values()]
    assert max(kept) - min(kept) < 0.02
    assert "classifier" in held(result.model)


def test_weights_are_signed_constants_that_are_never_trained() -> None:
    model = vgg()
    method = EdgePopup(epochs=2, seed=3)
    result = method.prune(model, loader(), Budget(params=0.5))
    drawn = vgg(seed=9)
    method.draw_(drawn)
    for name, mask in held(result.model).items():
        layer = drawn.get_submodule(name)
        size = math.sqrt(2 / layer.weight[0].numel())
        assert torch.allclose(layer.weight.abs(), torch.full_like(layer.weight, size))
        assert 0.3 < float((layer.weight > 0).float().mean()) < 0.7
        assert torch.equal(result.model.get_submodule(name).weight, layer.weight * mask)
    assert not result.model.classifier.bias.any()
    assert all(
        (m.weight == 1).all() for m in result.model.modules() if isinstance(m, nn.BatchNorm2d)
    )


def test_normal_weights_and_the_scale() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 400))
    EdgePopup(weights="kaiming_normal").draw_(model)
    assert float(model[1].weight.detach().std()) == pytest.approx(math.sqrt(2 / 192), rel=0.02)
    assert len(model[1].weight.unique()) > 1000
    plain, scaled = (
        EdgePopup(epochs=1, scaled=s).prune(vgg(), loader(), Budget(params=0.25)) for s in (0, 1)
    )
    mask = held(scaled.model)["features.0"]
    ratio = scaled.model.features[0].weight.abs().max() / plain.model.features[0].weight.abs().max()
    assert float(ratio) == pytest.approx(math.sqrt(mask.numel() / int(mask.sum())), rel=1e-5)


def test_learning_finds_a_better_subnetwork_than_the_first_scores() -> None:
    target = sample_target(loader(), 96)
    losses = {}
    for epochs in (1, 30):
        result = EdgePopup(epochs=epochs).prune(vgg(), loader(), Budget(params=0.5))
        with torch.no_grad():
            logits = result.model.eval()(target.images)
        losses[epochs] = float(nn.functional.cross_entropy(logits, target.labels))
    assert losses[30] < 0.7 * losses[1]
    assert result.evaluate(loader(seed=5)) > 0.6


def test_the_search_leaves_weights_and_modes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vgg().eval()
    EdgePopup().draw_(model)
    before = snapshot(model)
    layers = weights_of(model)
    counts = dict.fromkeys(layers, 10)
    EdgePopup(epochs=1).learn(model, layers, sample_target(loader(), 32), counts)
    after = model.state_dict()
    assert all(
        torch.equal(before[n], after[n]) for n in before if "running" not in n and "num" not in n
    )
    assert not model.training
    assert not same_state(model, before)  # of batch norms, the running statistics


def test_a_search_that_diverges_is_told() -> None:
    images = torch.rand(8, 3, 8, 8) * 3e38  # sums overflow
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), head(8, 2))
    with pytest.raises(DataError, match=r"Edge-popup diverged .* lr=0\.1"):
        EdgePopup(epochs=1).prune(model, [(images, torch.arange(8) % 2)], Budget(params=0.5))


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"minibatch_size": 1.5},
        {"lr": -1.0},
        {"momentum": 1.0},
        {"weight_decay": math.nan},
        {"weights": "xavier"},
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        EdgePopup(**settings)
