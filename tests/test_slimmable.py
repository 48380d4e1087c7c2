"""Weights that work under masks."""

import copy

import numpy as np
import pytest
import torch
from stripes import dataset, same_state, snapshot, vgg
from torch import nn
from torch.nn import functional as F

from stamppruner import Budget, STAMPConfig, STAMPPruner, TaskSampler, finetune, trace_channels
from stamppruner.batchnorm import recalibrate_
from stamppruner.budget import Chooser
from stamppruner.encoders import DeepSets
from stamppruner.errors import DataError
from stamppruner.gated import GatedNet
from stamppruner.posteriors import BetaBernoulli
from stamppruner.reading import Reader
from stamppruner.slimmable import SlimmableTraining, distillation

CONFIG = STAMPConfig(
    iterations=4, weight_steps=15, weight_batch=24, weight_lr=0.05, budget_range=(0.3, 0.5)
)


@pytest.fixture(scope="module")
def backbone():
    model = vgg()
    finetune(model, dataset(16), epochs=4, lr=0.1, progress=False)
    return model


def training(backbone, config=CONFIG):
    model = copy.deepcopy(backbone)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    net = GatedNet(model, graph, BetaBernoulli(graph.num_channels), DeepSets(3, seed=0))
    keep = torch.rand(3, graph.num_channels, generator=torch.Generator().manual_seed(0))
    source = TaskSampler(dataset(16), 3, 8)
    return SlimmableTraining(net, Reader(source, config.seed), Chooser(model, graph), keep, config)


def loss_under_masks(run):
    """Mean loss of the small networks of the three tasks, batch norms re-estimated."""
    images, labels = dataset(16, seed=5).tensors
    losses = []
    for keep in run.keep:
        model = copy.deepcopy(run.net.model)
        net = GatedNet(model, run.net.graph, run.net.posterior, run.net.encoder)
        plan = run.chooser.choose(keep, Budget(macs=0.4))
        with net.masked(torch.tensor(plan.keep).float()), torch.no_grad():
            recalibrate_(model, [images])
            losses.append(float(F.cross_entropy(model.eval()(images), labels)))
    return np.mean(losses)


def test_small_networks_get_better(backbone):
    run = training(backbone)
    before = loss_under_masks(run)
    run.run(60)
    assert loss_under_masks(run) < 0.8 * before


def test_statistics_andteacher_are_left_alone(backbone):
    run = training(backbone)
    teacher = snapshot(run.teacher)
    statistics = {n: b.clone() for n, b in run.net.model.named_buffers()}
    run.run(3)
    assert same_state(run.teacher, teacher)
    assert all(torch.equal(b, statistics[n]) for n, b in run.net.model.named_buffers())
    assert not same_state(run.net.model, teacher)
    assert all(p.grad is None for p in run.net.model.parameters())


def test_one_seed_gives_one_result(backbone):
    runs = [training(backbone) for _ in range(2)]
    assert runs[0].run(5) == runs[1].run(5)
    assert same_state(runs[0].net.model, snapshot(runs[1].net.model))


def test_masks_meet_budgets_in_the_range(backbone):
    run = training(backbone)
    cost = run.chooser.costs["macs"]
    shares = []
    for _ in range(20):
        keep = run._mask().numpy() > 0
        kept = [float(keep[group.channels].sum()) for group in run.net.graph.groups]
        shares.append(float(cost(torch.tensor(kept, dtype=torch.float64))) / cost.full)
    assert max(shares) <= 0.5
    assert max(shares) - min(shares) > 0.05


def test_divergence_is_named(backbone):
    run = training(backbone)
    nn.init.constant_(run.net.model.get_parameter("classifier.weight"), float("nan"))
    with pytest.raises(DataError, match="lower weight_lr"):
        run.run(1)


def test_distillation():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 4, generator=generator)
    p, q = (b / 2).softmax(1), (a / 2).softmax(1)
    expected = 4 * (p * (p.log() - q.log())).sum(1).mean()
    torch.testing.assert_close(distillation(a, b), expected)
    assert float(distillation(b, b).abs()) < 1e-6


@pytest.mark.parametrize("steps", [0, 2])
def test_meta_fitting_trains_under_masks_where_asked(backbone, steps):
    config = STAMPConfig(
        iterations=2, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=12,
        weight_steps=steps, weight_batch=16, weights_lr=0, pi_lr=0, theta_lr=0,
    )  # fmt: skip
    pruner = STAMPPruner(backbone, config=config).meta_fit(dataset(16), progress=False)
    weights = dict(pruner._gated().model.named_parameters())
    changed = any(not torch.equal(p, weights[n]) for n, p in backbone.named_parameters())
    assert changed == bool(steps)
    assert all(("weight_loss" in row) == bool(steps) for row in pruner.history.rows)


def test_a_frozen_backbone_stays(backbone):
    frozen = copy.deepcopy(backbone).requires_grad_(False)
    config = STAMPConfig(iterations=1, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=12)
    pruner = STAMPPruner(frozen, config=config).meta_fit(dataset(16), progress=False)
    weights = dict(pruner._gated().model.named_parameters())
    assert all(torch.equal(p, weights[n]) for n, p in frozen.named_parameters())


def test_budgets_out_of_reach_are_not_drawn(backbone):
    config = STAMPConfig(
        iterations=1, tasks_per_iteration=1, ways=3, shots=8, minibatch_size=12,
        weight_steps=8, weight_batch=16, budget_range=(0.01, 0.02),
    )  # fmt: skip
    pruner = STAMPPruner(backbone, config=config, protect=["features.0"])
    pruner.meta_fit(dataset(16), progress=False)
    assert pruner.history["weight_loss"][-1] > 0
