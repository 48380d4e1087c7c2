"""MetaPruning: generated weights, and the search among widths."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from stripes import SIZE, hooks, loader, resnet, same_state, snapshot, vgg
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from stamppruner import Budget, ChannelPlan, evaluate, reinitialise_, trace_channels
from stamppruner.baselines import MetaPruning
from stamppruner.baselines._evolution import Evolution
from stamppruner.baselines._pruning_net import PruningNet
from stamppruner.baselines._widths import WidthSpace, keep_of
from stamppruner.baselines.meta_pruning import split, write_
from stamppruner.batchnorm import recalibrate_
from stamppruner.budget import Chooser
from stamppruner.errors import BudgetError, ConfigError
from stamppruner.gates import Gates
from stamppruner.models import VGG
from stamppruner.surgery import cut
from stamppruner.target import sample_target

X = torch.zeros(1, 3, SIZE, SIZE)
SMALL: dict[str, Any] = {
    "epochs": 4, "population": 6, "generations": 3, "measure_latency": False, "round_to": 1
}  # fmt: skip


def space_of(model: nn.Module, budget: Budget) -> WidthSpace:
    chooser = Chooser(model, trace_channels(model, X), floor=0.05)
    return WidthSpace(chooser, budget, floor=0.05, round_to=1, shares=(0.1, 1.0))


# The PruningNet


def test_weights_are_generated_from_the_shares_of_inputs_and_outputs() -> None:
    model = vgg()
    graph = trace_channels(model, X)
    net = PruningNet(model, graph, hidden=5, pretrained=False, seed=0)
    widths = {"features.0": 4, "features.4": 3, "features.7": 6}
    keep = keep_of(graph, [widths[group.name] for group in graph.groups])
    found = net(keep)
    assert set(found) == {"features.0.weight", "features.4.weight", "features.7.weight"}
    for name, maker, shares in zip(
        net.shapes, net.makers, [(1.0, 4 / 8), (4 / 8, 3 / 12), (3 / 12, 6 / 12)], strict=True
    ):
        first, _, second = maker
        hidden = (first.weight @ torch.tensor(shares) + first.bias).clamp_min(0)
        expected = (second.weight @ hidden + second.bias).view(
            model.get_submodule(name).weight.shape
        )
        assert torch.allclose(found[f"{name}.weight"], expected, atol=1e-6)


def test_gates_crop_what_is_generated() -> None:
    """Against convolutions with ``weight[:out, :in]`` written by hand."""
    model = vgg().eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.bias.copy_(torch.linspace(-1, 1, len(module.bias)))
    graph = trace_channels(model, X)
    net = PruningNet(model, graph, hidden=5, pretrained=False, seed=0)
    sizes = {"features.0": 4, "features.4": 3, "features.7": 6}
    keep = keep_of(graph, [sizes[group.name] for group in graph.groups])
    x = torch.randn(2, 3, SIZE, SIZE)
    with Gates(model, graph).injected() as gates, torch.no_grad():
        gates.values = torch.from_numpy(keep).float()
        made = net(keep)
        out = functional_call(model, made, x)
        h, before = x, 3
        for name, width in sizes.items():
            if name == "features.4":
                h = F.max_pool2d(h, 2)
            norm = model.get_submodule(f"features.{int(name.split('.')[1]) + 1}")
            h = F.conv2d(h, made[f"{name}.weight"][:width, :before], padding=1)
            values = (norm.running_mean, norm.running_var, norm.weight, norm.bias)
            h = F.batch_norm(h, *(v[:width] for v in values)).relu()
            before = width
        pooled = h.mean((2, 3))
        expected = pooled @ model.classifier.weight[:, :6].T + model.classifier.bias
    assert torch.allclose(out, expected, atol=1e-5)


def test_the_start_has_kaimings_deviation_or_the_models_weights() -> None:
    model = VGG(((32,), (48, 48)), 6)
    graph = trace_channels(model, X)
    everything = ChannelPlan.full(graph).keep
    drawn = torch.random.get_rng_state()
    fresh = PruningNet(model, graph, hidden=32, pretrained=False, seed=0)
    near = PruningNet(model, graph, hidden=32, pretrained=True, seed=0)
    assert torch.equal(torch.random.get_rng_state(), drawn)
    for name, weight in fresh(everything).items():
        assert float(weight.detach().std()) == pytest.approx(
            math.sqrt(2 / weight[0].numel()), rel=0.01
        )
        own = model.get_parameter(name).detach()
        change = near(everything)[name].detach() - own
        assert float(change.std()) == pytest.approx(0.1 * float(own.std()), rel=0.01)


def test_training_makes_weights_that_work_at_any_widths() -> None:
    target = sample_target(loader(), 96)
    held = list(sample_target(loader(seed=5), 96).batches(96))
    mean = []
    for epochs in (1, 30):
        model = vgg()
        graph = trace_channels(model, X)
        net = MetaPruning(epochs=epochs, lr=0.05).pruning_net_(model, graph, target)
        accuracies = []
        for seed in range(6):
            widths = np.random.default_rng(seed).integers(3, 9, len(graph.groups)).tolist()
            plan = ChannelPlan(graph, keep_of(graph, widths))
            write_(model, net, plan)
            slim = cut(model, plan)
            recalibrate_(slim, target.image_batches(96))
            accuracies.append(evaluate(slim, held))
        mean.append(np.mean(accuracies))
        assert hooks(model) == 0
    assert mean[1] > mean[0] + 0.15
    assert mean[1] > 0.35  # a sixth is chance


# The search


def test_evolution_beats_as_many_random_draws() -> None:
    """The fitness is the nearness to one network, which no random draw is likely to hit."""
    space = space_of(VGG(((32, 32), (32, 32), (32, 32)), 6), Budget(macs=0.3))
    aim = space.draw(np.random.default_rng(77))

    def fitness(widths: np.ndarray) -> float:
        return -float(np.abs(space.relative(widths) - space.relative(aim)).mean())

    gains = []
    for seed in range(5):
        search = Evolution(
            space, fitness, population=20, parents=5, mutation=0.2,
            random=np.random.default_rng(seed),
        )  # fmt: skip
        found = search.run(6)
        random = np.random.default_rng(seed + 100)
        drawn = max(fitness(space.draw(random)) for _ in range(sum(map(len, found.history))))
        gains.append(found.fitness - drawn)
        assert found.fitness == max(values.max() for values in found.history)
        assert fitness(found.widths) == found.fitness
        assert found.history[-1].mean() > found.history[0].mean()
    assert np.mean(gains) > 0


def test_all_candidates_are_new_and_within_the_budget() -> None:
    space = space_of(VGG(((16, 16), (16, 16)), 6), Budget(macs=0.4))
    tried: list[np.ndarray] = []

    def fitness(widths: np.ndarray) -> float:
        tried.append(widths)
        return float(widths[0])

    search = Evolution(
        space, fitness, population=8, parents=3, mutation=0.3, random=np.random.default_rng(0)
    )
    found = search.run(4)
    assert [len(values) for values in found.history] == [8] * 4
    assert space.fits(np.stack(tried)).all()
    assert len(np.unique(np.stack(tried), axis=0)) == len(tried)
    assert found.widths[0] == max(widths[0] for widths in tried)


def test_a_space_of_few_networks_ends_early() -> None:
    space = space_of(VGG(((2,), (2,)), 6), Budget(macs=0.6))
    search = Evolution(
        space, lambda _widths: 0.5, population=30, parents=3, mutation=0.1,
        random=np.random.default_rng(0),
    )  # fmt: skip
    found = search.run(3)
    assert 1 <= sum(map(len, found.history)) <= 4
    assert float(space.used(found.widths)) <= 1


def test_the_search_finds_no_worse_than_random_widths_and_reports_their_accuracy() -> None:
    model = resnet()
    space = space_of(model, Budget(macs=0.4))
    target = sample_target(loader(per_class=32), 192)
    method = MetaPruning(**SMALL)
    found = method.search_(model, space, target)
    assert found.fitness >= found.history[0].max()  # the first generation is random
    learned, held = split(target, method.held_out)
    slim = cut(model, space.plan(found.widths))  # the model has the weights of the best
    recalibrate_(slim, learned.image_batches(128))
    assert evaluate(slim, list(held.batches(128))) == pytest.approx(found.fitness, abs=0.03)
    assert hooks(model) == 0


def test_the_first_channels_of_the_best_widths_stay_and_the_budget_is_met() -> None:
    result = MetaPruning(**SMALL).prune(vgg(), loader(), Budget(macs=0.4))
    for group in result.plan.graph.groups:
        kept = result.plan.keep[group.channels]
        assert kept[: int(kept.sum())].all()
    reached = result.report.reached
    assert reached is not None
    assert 0.38 < reached["macs"] <= 0.4


def test_weights_are_random_at_the_end_as_in_the_paper_or_generated() -> None:
    budget = Budget(macs=0.4)
    fresh, made = (
        MetaPruning(**SMALL, reinitialise=again).prune(vgg(), loader(), budget)
        for again in (True, False)
    )
    assert fresh.plan == made.plan
    before = snapshot(fresh.model)
    assert same_state(reinitialise_(fresh.model, 0), before)
    assert not same_state(made.model, before)
    for result in (fresh, made):
        assert "target_accuracy_before" not in result.report.metrics
    assert made.report.metrics["target_accuracy_after"] > 0.5
    assert fresh.report.metrics["target_accuracy_after"] < 0.5


def test_it_can_start_near_the_models_weights() -> None:
    model = vgg()
    near = MetaPruning(**{**SMALL, "epochs": 1, "lr": 0.0}, pretrained=True, reinitialise=False)
    result = near.prune(model, loader(), Budget(macs=0.9))
    own = model.features[0].weight.detach()
    kept = len(result.model.features[0].weight)
    difference = result.model.features[0].weight.detach() - own[:kept]
    assert float(difference.std()) < 0.2 * float(own.std())


def test_the_sample_is_split() -> None:
    target = sample_target(loader(), 96)
    learned, held = split(target, 0.25)
    assert (len(learned.labels), len(held.labels)) == (72, 24)
    assert torch.equal(torch.cat([learned.images, held.images]), target.images)
    tiny = sample_target([(torch.randn(5, 3, 8, 8), torch.tensor([0, 1, 0, 1, 0]))], 5)
    assert [len(part.labels) for part in split(tiny, 0.01)] == [3, 2]
    assert [len(part.labels) for part in split(tiny, 0.99)] == [2, 3]


def test_times_cannot_be_bounded() -> None:
    with pytest.raises(BudgetError, match="latency_ms is not"):
        MetaPruning(**SMALL).prune(vgg(), loader(), Budget(latency_ms=0.5))


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0},
        {"population": 1.5},
        {"generations": 0},
        {"parents": 0},
        {"hidden": 0},
        {"minibatch_size": 0},
        {"mutation": 1.1},
        {"held_out": 1.0},
        {"lr": math.inf},
        {"weight_decay": -1},
        {"shares": (0.5, 0.1)},
    ],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        MetaPruning(**settings)
