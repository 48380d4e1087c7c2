"""Weights held at zero."""

from __future__ import annotations

import copy

import pytest
import torch
from stripes import loader, same_state, vgg
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from stamppruner import finetune
from stamppruner.errors import PlanError
from stamppruner.zeros import held, hold_, num_held, release_, released, weights_of


def masks(model: nn.Module, share: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.rand(layer.weight.shape, generator=generator) < share
        for name, layer in weights_of(model).items()
    }


def held_net() -> tuple[nn.Module, dict[str, Tensor]]:
    model = vgg()
    found = masks(model)
    return hold_(model, found), found


def zeros_where(model: nn.Module, found: dict[str, Tensor]) -> bool:
    """Whether the weights are zero where they are held, and nowhere else."""
    return all(
        bool(((model.get_submodule(n).weight != 0) == mask).all()) for n, mask in found.items()
    )


def test_outputs_are_those_of_zeroed_weights() -> None:
    model, found = held_net()
    plain = vgg()
    with torch.no_grad():
        for name, mask in found.items():
            plain.get_submodule(name).weight *= mask
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(model.eval()(x), plain.eval()(x))
    assert zeros_where(model, found)
    assert num_held(model) == sum(int((~mask).sum()) for mask in found.values())


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.0}, {"weight_decay": 0.1}])
def test_training_moves_the_others_alone(settings: dict[str, float]) -> None:
    model, found = held_net()
    before = {name: model.get_submodule(name).weight.detach().clone() for name in found}
    finetune(model, loader(), epochs=2, progress=False, **settings)
    assert zeros_where(model, found)
    for name, mask in found.items():
        moved = model.get_submodule(name).weight != before[name]
        assert moved[mask].any()


def test_adam_does_not_bring_weights_back() -> None:
    model, found = held_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 3, 8, 8)).square().sum().backward()
        optimizer.step()
    assert zeros_where(model, found)


def test_copies_and_state_dicts_hold_them_too() -> None:
    model, found = held_net()
    other = copy.deepcopy(model)
    finetune(other, loader(), epochs=1, progress=False)
    assert zeros_where(other, found)
    assert not same_state(other, model.state_dict())
    third = hold_(vgg(seed=3), {n: torch.ones_like(m) for n, m in found.items()})
    third.load_state_dict(other.state_dict())
    assert zeros_where(third, found)
    assert all(torch.equal(mask, found[name]) for name, mask in held(third).items())


def test_release_gives_a_plain_network_with_the_same_outputs() -> None:
    model, found = held_net()
    plain = released(model)
    x = torch.randn(2, 3, 8, 8)
    assert torch.equal(plain.eval()(x), model.eval()(x))
    assert plain.state_dict().keys() == vgg().state_dict().keys()
    assert type(plain.features[0]) is nn.Conv2d
    assert zeros_where(plain, found)
    assert held(plain) == {}
    assert len(held(model)) == len(found)
    assert release_(model) is model
    assert held(model) == {}


def test_a_network_without_held_weights_is_released_as_it_is() -> None:
    model = vgg()
    assert released(model) is model


def test_shared_and_computed_weights_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    assert list(weights_of(model)) == ["2"]
    parametrizations.weight_norm(model[2])
    assert weights_of(model) == {}


@pytest.mark.parametrize(
    "wrong", [{"features.1": torch.ones(8)}, {"none": torch.ones(1)}, {"classifier": torch.ones(2)}]
)
def test_masks_of_another_model_are_refused(wrong: dict[str, Tensor]) -> None:
    model = vgg()
    with pytest.raises(PlanError, match="can be held at zero"):
        hold_(model, {**masks(model), **wrong})
    assert held(model) == {}


def test_weights_are_held_once() -> None:
    model, found = held_net()
    with pytest.raises(PlanError, match="release_"):
        hold_(model, found)
