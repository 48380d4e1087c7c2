"""Networks made random again."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from stripes import SIZE, loader, resnet, same_state, snapshot, vgg
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

from stamppruner import Budget, reinitialise_
from stamppruner.baselines import Magnitude
from stamppruner.errors import UnsupportedModelError
from stamppruner.zeros import held, hold_


def test_it_draws_what_fresh_layers_draw() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    model[1].running_mean.fill_(3.0)
    model[1].weight.data.fill_(2.0)
    assert reinitialise_(model, seed=5) is model
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        fresh = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 2))
    assert same_state(model, fresh.state_dict())


def test_the_seed_decides_and_the_global_state_is_left() -> None:
    one, two, three = vgg(seed=1), vgg(seed=2), vgg(seed=1)
    drawn = torch.random.get_rng_state()
    reinitialise_(one, 7), reinitialise_(two, 7), reinitialise_(three, 8)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert same_state(one, two.state_dict())
    assert not same_state(one, three.state_dict())


def test_slim_networks_are_made_random_at_their_own_widths() -> None:
    slim = Magnitude(measure_latency=False).prune(resnet(), loader(), Budget(macs=0.4)).model
    before = snapshot(slim)
    reinitialise_(slim, 1)
    for name, tensor in slim.named_parameters():
        assert tensor.shape == before[name].shape
    weight = slim.conv1.weight
    bound = 1 / math.sqrt(27)  # Kaiming uniform with a = sqrt(5) of 3 * 3 * 3 inputs
    assert 0.9 * bound < float(weight.detach().abs().max()) <= bound
    assert not torch.equal(weight, before["conv1.weight"])
    assert slim(torch.zeros(2, 3, SIZE, SIZE)).isfinite().all()


def test_attention_and_frozen_parameters_are_drawn() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    model.linear1.weight.requires_grad_(False)
    before = snapshot(model)
    reinitialise_(model)
    after = model.state_dict()
    for name in ("self_attn.in_proj_weight", "self_attn.out_proj.weight", "linear1.weight"):
        assert not torch.equal(before[name], after[name])
    assert not model.linear1.weight.requires_grad


class Scale(nn.Module):
    """A parameter that nothing draws."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((4,), 0.1))
        self.register_buffer("fixed", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gamma + self.fixed


def test_parameters_that_nothing_draws_are_named_and_the_model_is_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Scale(), nn.BatchNorm1d(4), Scale())
    model[2].running_mean.fill_(2.0)
    before = snapshot(model)
    with pytest.raises(UnsupportedModelError, match=r"1\.gamma, 3\.gamma"):
        reinitialise_(model)
    assert same_state(model, before)


def test_buffers_without_a_method_stay() -> None:
    model = Scale()
    del model.gamma
    reinitialise_(model)
    assert model.fixed.tolist() == [0, 1, 2, 3]


def test_a_method_that_fails_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vgg()
    before = snapshot(model)

    def fail() -> None:
        raise RuntimeError("cannot")

    monkeypatch.setattr(model.classifier, "reset_parameters", fail)
    with pytest.raises(RuntimeError, match="cannot"):
        reinitialise_(model)
    assert same_state(model, before)


def test_held_weights_stay_held() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    mask = torch.rand(3, 4) > 0.5
    hold_(model, {"0": mask})
    reinitialise_(model, 3)
    with torch.random.fork_rng([]):
        torch.manual_seed(3)
        fresh = nn.Linear(4, 3)
    assert torch.equal(model[0].weight, fresh.weight * mask)
    assert torch.equal(model[0].bias, fresh.bias)
    assert torch.equal(held(model)["0"], mask)


def test_parametrized_weights_are_drawn_through_their_inverse() -> None:
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)))
    before = model[0].weight.detach().clone()
    reinitialise_(model, 3)
    assert not torch.allclose(model[0].weight, before)
    assert float(model[0].weight.detach().abs().max()) <= 0.5 + 1e-6


@pytest.mark.filterwarnings("ignore")
def test_weights_that_a_hook_computes_are_named() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(4, 3)))
    before = copy.deepcopy({n: p.detach() for n, p in model.named_parameters()})
    with pytest.raises(UnsupportedModelError, match="weight_g"):
        reinitialise_(model)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
