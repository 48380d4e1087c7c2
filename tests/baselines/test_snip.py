"""Connection sensitivity."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from stripes import SIZE, loader, resnet, same_state, snapshot, vgg
from torch import nn

from stamppruner import Budget, project_shortcuts, reinitialise_
from stamppruner.baselines import SNIP
from stamppruner.baselines._unstructured import top
from stamppruner.errors import ConfigError
from stamppruner.heads import with_classes
from stamppruner.result import fit_head_
from stamppruner.target import Target, sample_target
from stamppruner.trace import trace_channels
from stamppruner.zeros import held, num_held, weights_of


def tiny(frozen: bool = False) -> tuple[nn.Module, Target]:
    """Two inputs, two classes, one image: the gradients are known."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, -0.5], [2.0, 0.25]]))
    model.requires_grad_(not frozen)
    images = torch.tensor([3.0, 4.0]).view(1, 2, 1, 1)
    return model, Target(images, torch.tensor([0]), 2, 1)


@pytest.mark.parametrize("frozen", [False, True])
def test_saliencies_by_hand(frozen: bool) -> None:
    """Logits (1, 7): ``dL/dw_ij = (p_i - y_i) x_j``, and ``s = |w dL/dw|`` over its sum."""
    model, target = tiny(frozen)
    found = SNIP().saliencies(model, weights_of(model), target)["1"]
    wrong = 1 / (1 + math.exp(1 - 7))  # probability of class 1
    terms = torch.tensor([[1.0 * wrong * 3, 0.5 * wrong * 4], [2.0 * wrong * 3, 0.25 * wrong * 4]])
    assert torch.allclose(found, terms / terms.sum(), atol=1e-6)
    assert found.tolist() == [pytest.approx([0.25, 2 / 12]), pytest.approx([0.5, 1 / 12])]
    assert model[1].weight.requires_grad is not frozen


def test_saliencies_are_derivatives_by_factors_of_the_weights() -> None:
    """Against finite differences of the loss by ``c_j``, where the weight is ``c_j w_j``."""
    model = resnet().double()
    target = sample_target(loader(), 40)
    target = Target(target.images.double(), target.labels, 6, 40)
    found = SNIP(batch_size=16).saliencies(model, weights_of(model), target)
    x, y = target.images[:16], target.labels[:16]
    slopes = []
    for name in ("conv1", "stages.1.0.conv2", "classifier"):
        weight = model.get_submodule(name).weight
        at = int(found[name].flatten().argmax())
        losses = []
        with torch.no_grad():
            old = float(weight.view(-1)[at])
            for factor in (1 + 1e-5, 1 - 1e-5):
                weight.view(-1)[at] = old * factor
                losses.append(float(nn.functional.cross_entropy(model.train()(x), y)))
            weight.view(-1)[at] = old
        slopes.append(abs(losses[0] - losses[1]) / 2e-5 / float(found[name].flatten()[at]))
    assert slopes == pytest.approx([slopes[0]] * 3, rel=1e-4)  # one common factor: the sum


def test_the_batch_is_of_its_size_and_normalises_itself() -> None:
    model = vgg()
    before = snapshot(model)
    target = sample_target(loader(), 96)
    few = Target(target.images[:8], target.labels[:8], 6, 8)
    one = SNIP(batch_size=8).saliencies(model, weights_of(model), target)
    two = SNIP(batch_size=128).saliencies(model, weights_of(model), few)
    assert all(torch.equal(one[n], two[n]) for n in one)
    assert sum(float(s.sum()) for s in one.values()) == pytest.approx(1, abs=1e-5)
    assert same_state(model, before)


def test_the_largest_of_all_layers_stay() -> None:
    scores = {"a": torch.tensor([[0.3, 0.1]]), "b": torch.tensor([0.2, 0.3, 0.05])}
    masks = top(scores, 3)
    assert masks["a"].tolist() == [[True, False]]
    assert masks["b"].tolist() == [True, True, False]
    assert top(scores, 1)["a"].tolist() == [[True, False]]  # of equal ones, the first
    assert not top(scores, 1)["b"].any()


def test_from_random_weights_by_default() -> None:
    result = SNIP(seed=4).prune(vgg(), loader(), Budget(params=0.4))
    fresh = reinitialise_(vgg(), 4)
    for name, mask in held(result.model).items():
        weight = result.model.get_submodule(name).weight
        assert torch.equal(weight, fresh.get_submodule(name).weight * mask)
    assert torch.equal(result.model.classifier.weight, fresh.classifier.weight)
    target = sample_target(loader(), 96, seed=4)
    expected = SNIP(seed=4).saliencies(
        fresh, {n: fresh.get_submodule(n) for n in held(result.model)}, target
    )
    kept = torch.cat([m.flatten() for m in held(result.model).values()])
    values = torch.cat([s.flatten() for s in expected.values()])
    assert values[kept].min() >= values[~kept].max()


def test_from_the_weights_of_the_model() -> None:
    model = vgg()
    result = SNIP(pretrained=True).prune(model, loader(classes=4), Budget(params=0.4))
    assert result.report.title == "SNIP (P)"
    for name, mask in held(result.model).items():
        weight = result.model.get_submodule(name).weight
        assert torch.equal(weight, model.get_submodule(name).weight * mask)
    assert result.model.classifier.out_features == 4
    assert result.evaluate(loader(classes=4, seed=5)) > 0.5


def test_a_masked_head_is_fitted_before_it_is_masked() -> None:
    model = vgg()
    method = SNIP(pretrained=True, skip_linear=False)
    result = method.prune(model, loader(), Budget(params=0.5))
    target = sample_target(loader(), 96)
    dense, _ = with_classes(model, trace_channels(model, target.images[:1]), 6)
    fit_head_(dense, "classifier", target)
    mask = held(result.model)["classifier"]
    assert not mask.all()
    assert torch.allclose(result.model.classifier.weight, dense.classifier.weight * mask)


def test_projected_shortcuts_count_as_what_they_add() -> None:
    """A share is of the network as it was given, and the layers that were added are used up."""
    model = resnet()
    projected = project_shortcuts(model, torch.zeros(1, 3, SIZE, SIZE))
    full = sum(p.numel() for p in model.parameters())
    assert sum(p.numel() for p in projected.parameters()) > full
    result = SNIP().prune(projected, loader(), Budget(params=0.5))
    left = sum(p.numel() for p in projected.parameters()) - num_held(result.model)
    assert result.report.before["params"] == full
    assert result.report.after["params"] == left
    assert 0.49 * full < left <= 0.5 * full


def test_the_papers_settings_leave_shortcuts_whole() -> None:
    result = SNIP(skip_1x1=True).prune(resnet(), loader(), Budget(params=0.4))
    names = set(held(result.model))
    assert "conv1" in names
    assert not any("shortcut" in name or name == "classifier" for name in names)


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"batch_size": 1.5}])
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        SNIP(**settings)
