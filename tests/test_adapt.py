from __future__ import annotations

import pytest
import torch
from stripes import hooks, loader, same_state, snapshot, vgg
from torch import nn

from stamppruner import Budget, STAMPConfig, trace_channels
from stamppruner.adapt import adapt_
from stamppruner.budget import Chooser
from stamppruner.encoders import DeepSets
from stamppruner.gated import GatedNet
from stamppruner.posteriors import BetaBernoulli
from stamppruner.target import Target, sample_target

HALF, TENTH = Budget(macs=0.5), Budget(macs=0.1)


def made() -> tuple[GatedNet, Chooser, Target]:
    model = vgg()
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    net = GatedNet(model, graph, BetaBernoulli(graph.num_channels), DeepSets(3, seed=0))
    return net, Chooser(model, graph), sample_target(loader(), 1000)


def losses(net: GatedNet, chooser: Chooser, target: Target) -> float:
    """Of the network under the hard mask of the budget."""
    with torch.no_grad():
        scores = net.keep_probability(target.images)
        keep = torch.from_numpy(chooser.choose(scores.numpy(), HALF).keep).float()
        net.model.train()
        with net.masked(keep) as model:
            loss = nn.functional.cross_entropy(model(target.images), target.labels)
    return float(loss)


@pytest.mark.parametrize("budget", [HALF, None])
def test_everything_learns_and_statistics_and_modes_stay(budget: Budget | None) -> None:
    net, chooser, target = made()
    net.model.eval()
    net.model.features[1].running_mean += 0.5
    before = [p.detach().clone() for p in net.parameters()]
    statistics = {n: b.clone() for n, b in net.model.named_buffers()}
    config = STAMPConfig(prune_epochs=1.0, minibatch_size=16, weights_lr=0.01)
    adapt_(net, chooser, target, budget, config, progress=False)
    moved = [not torch.equal(p, old) for p, old in zip(net.parameters(), before, strict=True)]
    assert all(moved)
    assert all(torch.equal(b, statistics[n]) for n, b in net.model.named_buffers())
    assert not net.model.training
    assert hooks(net.model) == 0


def test_the_loss_under_the_budget_falls() -> None:
    net, chooser, target = made()
    config = STAMPConfig(prune_epochs=8.0, minibatch_size=16, weights_lr=0.01)
    before = losses(net, chooser, target)
    adapt_(net, chooser, target, HALF, config, progress=False)
    assert losses(net, chooser, target) < 0.8 * before


def test_the_number_of_steps_is_rounded_up() -> None:
    net, chooser, target = made()
    steps = []
    net.model.register_forward_pre_hook(
        lambda module, args: steps.append(len(args[0])) if module.training else None
    )
    config = STAMPConfig(prune_epochs=0.3, minibatch_size=16)
    adapt_(net, chooser, target, HALF, config, progress=False)
    assert steps == [16, 16]  # of 96 images, 0.3 epochs are 28.8


def test_the_seed_decides() -> None:
    states = []
    for seed in (0, 0, 1):
        net, chooser, target = made()
        config = STAMPConfig(prune_epochs=0.5, minibatch_size=16, seed=seed)
        adapt_(net, chooser, target, None, config, progress=False)
        states.append(snapshot(net.model))
    net, *_ = made()
    net.model.load_state_dict(states[0])
    assert same_state(net.model, states[1])
    assert not same_state(net.model, states[2])


def test_a_penalty_brings_the_expected_cost_to_the_budget() -> None:
    found = []
    for penalty in (0.0, 1.0):
        net, chooser, target = made()
        config = STAMPConfig(
            prune_epochs=15.0, minibatch_size=16, pi_lr=0.05, kl_scale=0.0, budget_penalty=penalty
        )
        adapt_(net, chooser, target, TENTH, config, progress=False)
        with torch.no_grad():
            found.append(float(chooser.overspend(net.keep_probability(target.images), TENTH)))
    assert found[1] < 0.2 < found[0]
