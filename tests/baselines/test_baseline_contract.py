"""What every baseline promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from nets import conv_bn, head
from stripes import SIZE, hooks, loader, resnet, same_state, snapshot, stripes, vgg
from torch import nn

from stamppruner import Budget, check_equivalence, trace_channels
from stamppruner.baselines import Baseline, BBDropout, Full, Magnitude, Random, Taylor
from stamppruner.baselines._base import rank_within_groups
from stamppruner.errors import BudgetError, DataError, UnsupportedModelError
from stamppruner.heads import with_classes
from stamppruner.models import VGG
from stamppruner.result import fit_head_
from stamppruner.target import sample_target

IMPLEMENTATIONS = [pytest.param(b, id=b.__name__) for b in (Random, Magnitude, Taylor, BBDropout)]
X = torch.zeros(1, 3, SIZE, SIZE)
IMAGES, LABELS = stripes(8)
HALF = Budget(macs=0.5)


@pytest.fixture(params=IMPLEMENTATIONS)
def kind(request: pytest.FixtureRequest) -> type[Baseline]:
    return request.param


@pytest.mark.parametrize("make", [vgg, resnet])
def test_scores_are_finite_one_a_channel_and_pure(kind: type[Baseline], make: Any) -> None:
    model = make().train()
    graph, target = trace_channels(model, X), sample_target(loader(), 100)
    dense, graph = with_classes(model, graph, 6)
    before = snapshot(dense)
    scores = kind(seed=1).scores(dense, graph, target)
    assert scores.shape == (graph.num_channels,)
    assert np.isfinite(scores).all()
    assert len(np.unique(scores)) > 1
    assert np.array_equal(scores, kind(seed=1).scores(dense, graph, target))
    assert same_state(dense, before)
    assert hooks(dense) == 0
    assert dense.training


@pytest.mark.parametrize("reconstruct", [False, True])
def test_prune_leaves_the_model_and_gives_a_plain_one(
    kind: type[Baseline], reconstruct: bool
) -> None:
    model = resnet().train()
    before = snapshot(model)
    drawn = torch.random.get_rng_state()
    result = kind(reconstruct=reconstruct).prune(model, [(IMAGES, LABELS)], HALF)
    assert same_state(model, before)
    assert model.training
    assert hooks(model) == 0
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert type(result.model) is type(model)
    assert hooks(result.model) == 0
    assert check_equivalence(model, result.plan)
    assert result.report.title == kind.name
    assert result.report.settings["reconstruct"] == reconstruct


def test_budgets_are_met_from_below(kind: type[Baseline]) -> None:
    for budget in (Budget(macs=0.3), Budget(params=0.4), Budget(macs=0.7, params=0.5)):
        reached = kind().prune(vgg(), loader(), budget).report.reached
        assert reached is not None
        assert all(reached[name] <= bound for name, bound in budget.bounds().items())
        assert any(reached[name] > bound - 0.2 for name, bound in budget.bounds().items())


def test_the_head_is_fitted_to_the_target(kind: type[Baseline]) -> None:
    result = kind().prune(vgg(), loader(classes=4), Budget(macs=0.7))
    assert result.model.classifier.out_features == 4
    assert result.evaluate(loader(classes=4, seed=5)) > 0.6


def test_the_same_call_gives_the_same_network(kind: type[Baseline]) -> None:
    one, two = (kind(seed=3).prune(vgg(), loader(), HALF) for _ in range(2))
    assert one.plan == two.plan
    assert same_state(one.model, two.model.state_dict())


def test_a_graph_traced_before_gives_the_same_plan(kind: type[Baseline]) -> None:
    model = vgg()
    graph = trace_channels(model, X)
    plans = [kind().prune(model, loader(), HALF, graph=g).plan for g in (None, graph)]
    assert plans[0] == plans[1]


def test_floors_and_multiples_hold(kind: type[Baseline]) -> None:
    model = VGG(((16,), (24, 24)), 6)
    result = kind(floor=0.5, round_to=2).prune(model, loader(), Budget(macs=0.45))
    for group in result.plan.graph.groups:
        kept = int(result.plan.keep[group.channels].sum())
        assert kept >= group.size / 2
        assert kept % 2 == 0


BAD: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "one class": ([(IMAGES, LABELS * 0)], "single class"),
    "negative labels": ([(IMAGES, LABELS - 1)], "span -1"),
    "generator": (((IMAGES, LABELS) for _ in range(2)), "read only once"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_targets(kind: type[Baseline], name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(DataError, match=reason):
        kind().prune(vgg(), data, HALF)


def test_images_that_do_not_fit_a_traced_model(kind: type[Baseline]) -> None:
    model = vgg()
    with pytest.raises(DataError, match="does not take images"):
        kind().prune(model, [(IMAGES[:, :1], LABELS)], HALF, graph=trace_channels(model, X))


def test_impossible_budgets_and_models(kind: type[Baseline]) -> None:
    with pytest.raises(BudgetError, match="least reachable"):
        kind().prune(vgg(), loader(), Budget(macs=1e-4))
    with pytest.raises(UnsupportedModelError, match="no channel of the model can be removed"):
        kind().prune(nn.Sequential(nn.Flatten(), nn.Linear(192, 6)), loader(), HALF)


def test_without_a_budget_nothing_is_removed(kind: type[Baseline]) -> None:
    result = kind().prune(vgg(), loader(classes=4), None)
    assert result.plan.keep.all()
    assert result.report.budget is None
    assert result.report.after["macs"] == result.report.before["macs"]


# What is special to each


def test_full_is_the_whole_network_with_a_head_for_the_target() -> None:
    model = vgg()
    result = Full().prune(model, loader(classes=4))
    convolutions = {n: p for n, p in model.named_parameters() if n.startswith("features.0")}
    assert result.plan.keep.all()
    own = dict(result.model.named_parameters())
    assert all(torch.equal(own[name], p) for name, p in convolutions.items())
    assert result.model.classifier.out_features == 4
    assert result.evaluate(loader(classes=4, seed=5)) > 0.6


def target_of(model: nn.Module) -> tuple[Any, Any, nn.Module]:
    graph, target = trace_channels(model, X), sample_target(loader(), 100)
    dense, graph = with_classes(model, graph, 6)
    return graph, target, dense


def test_magnitude_ranks_by_the_norm_of_filters() -> None:
    model = nn.Sequential(conv_bn(3, 5), nn.ReLU(), head(5, 6))
    with torch.no_grad():
        for i, norm in enumerate([3.0, 1.0, 5.0, 2.0, 4.0]):
            model[0][0].weight[i] = norm * torch.tensor([1.0, -1.0, 1.0])[:, None, None]
    graph, target, dense = target_of(model)
    scores = Magnitude().scores(dense, graph, target)
    order = [int(c) for c in graph.layers["0.0"].outputs]
    assert scores[order].tolist() == [0.5, 0.0, 1.0, 0.25, 0.75]


def test_magnitude_of_transposed_convolutions_runs_over_their_outputs() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2, bias=False), nn.ReLU(), head(4, 6))
    with torch.no_grad():
        for i, norm in enumerate([2.0, 8.0, 1.0, 4.0]):
            model[0].weight[:, i] = norm
    graph, target, dense = target_of(model)
    scores = Magnitude().scores(dense, graph, target)
    assert scores[graph.layers["0"].outputs] == pytest.approx([1 / 3, 1, 0, 2 / 3])


def test_random_follows_the_seed_and_prunes_layers_alike() -> None:
    plans = [Random(seed=s).prune(vgg(), loader(), HALF).plan for s in (0, 1)]
    assert plans[0] != plans[1]
    shares = [plans[0].keep[g.channels].mean() for g in plans[0].graph.groups]
    assert max(shares) - min(shares) < 0.2


def test_taylor_sees_the_target() -> None:
    model = vgg()
    graph = trace_channels(model, X)
    scores = []
    for pick in ((0, 2), (3, 5)):
        chosen = torch.isin(LABELS, torch.tensor(pick))
        target = sample_target([(IMAGES[chosen], (LABELS[chosen] == pick[1]).long())], 100)
        dense, own = with_classes(model, graph, 2)
        fit_head_(dense, "classifier", target)
        scores.append(Taylor().scores(dense, own, target))
    assert np.corrcoef(scores[0], scores[1])[0, 1] < 0.99


def test_taylor_needs_logits_and_the_others_do_not() -> None:
    model = nn.Sequential(conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 6, 1))
    with pytest.raises(UnsupportedModelError, match="no logits"):
        Taylor().prune(model, loader(), HALF)
    for kind in (Random, Magnitude):
        slim = kind().prune(model, loader(), HALF).model
        assert slim[0][0].out_channels < 8
        assert slim(IMAGES).shape == (len(IMAGES), 6, SIZE, SIZE)


def test_ranks_run_from_zero_to_one_in_each_group() -> None:
    graph = trace_channels(vgg(), X)
    scores = np.random.default_rng(0).random(graph.num_channels)
    ranks = rank_within_groups(scores, graph)
    for group in graph.groups:
        assert sorted(ranks[group.channels]) == pytest.approx(np.linspace(0, 1, group.size))
        assert (ranks[group.channels].argsort() == scores[group.channels].argsort()).all()
