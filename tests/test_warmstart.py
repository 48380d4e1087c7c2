from __future__ import annotations

import copy

import pytest
import torch
from stripes import CLASSES, dataset, hooks, same_state, snapshot, stripes, vgg
from torch import Tensor
from torch.nn import functional as F

from stamppruner import trace_channels
from stamppruner.encoders import DeepSets
from stamppruner.gated import GatedNet
from stamppruner.posteriors import BetaBernoulli
from stamppruner.tasks import TaskSampler
from stamppruner.taylor import relative_to_group, taylor_scores
from stamppruner.warmstart import blend_target, task_scores, warm_start_on_tasks

IMAGES, LABELS = stripes(4)


@pytest.fixture
def net() -> GatedNet:
    model = vgg()
    graph = trace_channels(model, IMAGES[:1])
    return GatedNet(model, graph, BetaBernoulli(graph.num_channels), DeepSets(3, seed=0))


def keep(net: GatedNet) -> Tensor:
    return net.posterior.keep_probability().detach()


def on_target(net: GatedNet) -> Tensor:
    scores = taylor_scores(
        net.model,
        net.graph,
        [(IMAGES, LABELS)],
        lambda logits, labels: F.cross_entropy(logits, labels, reduction="none"),
    )
    return relative_to_group(scores, net.graph)


def test_keep_probabilities_rise_evenly_with_the_rank_of_scores(net: GatedNet) -> None:
    blend_target(net, [(IMAGES, LABELS)], 1.0)
    order = on_target(net).argsort()
    wanted = torch.linspace(0.02, 0.98, net.graph.num_channels)
    assert torch.allclose(keep(net)[order], wanted, atol=1e-3)


@pytest.mark.parametrize("weight", [0.0, 0.3])
def test_the_target_is_averaged_with_what_was_known(net: GatedNet, weight: float) -> None:
    known = torch.linspace(0.1, 0.9, net.graph.num_channels)
    net.posterior.warm_start(known)
    pure = copy.deepcopy(net)
    blend_target(pure, [(IMAGES, LABELS)], 1.0)
    blend_target(net, [(IMAGES, LABELS)], weight)
    assert torch.allclose(keep(net), (1 - weight) * known + weight * keep(pure), atol=2e-3)


def test_tasks_use_the_rows_of_their_classes_and_are_averaged(net: GatedNet) -> None:
    tasks = TaskSampler(dataset(8), 3, 8).tasks(2)
    squares = []
    for task in tasks:
        rows = list(task.classes)
        assert max(rows) < CLASSES
        scores = taylor_scores(
            net.model,
            net.graph,
            [(task.images, task.labels)],
            lambda logits, labels, rows=rows: F.cross_entropy(
                logits[:, rows], labels, reduction="none"
            ),
        )
        squares.append(scores.square())
    expected = relative_to_group(torch.stack(squares).mean(0).sqrt(), net.graph)
    before = snapshot(net.model)
    warm_start_on_tasks(net, task_scores(net, tasks))
    found = keep(net)
    assert (found[expected.argsort()].diff() > 0).all()
    assert found.min() == pytest.approx(0.02, abs=1e-3)
    assert found.max() == pytest.approx(0.98, abs=1e-3)
    assert same_state(net.model, before)
    assert hooks(net.model) == 0


def test_gamma_and_beta_stay(net: GatedNet) -> None:
    before = [p.detach().clone() for p in net.posterior.theta_parameters()]
    blend_target(net, [(IMAGES, LABELS)], 0.5)
    after = net.posterior.theta_parameters()
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
