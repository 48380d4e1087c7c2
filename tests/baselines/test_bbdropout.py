"""Beta-Bernoulli dropout on the target."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from stripes import SIZE, loader, same_state, snapshot, vgg
from torch import nn

from stamppruner import trace_channels
from stamppruner.baselines import BBDropout
from stamppruner.channels import ChannelGraph
from stamppruner.errors import ConfigError
from stamppruner.heads import with_classes
from stamppruner.posteriors import BetaBernoulli
from stamppruner.target import Target, sample_target

X = torch.zeros(1, 3, SIZE, SIZE)


@pytest.fixture
def case() -> tuple[nn.Module, ChannelGraph, Target]:
    model = vgg()
    graph = trace_channels(model, X)
    return (*with_classes(model, graph, 6), sample_target(loader(), 96))


def start() -> float:
    """``E[pi]`` of every channel before learning."""
    return float(BetaBernoulli(1).keep_probability())


def test_without_the_data_the_prior_closes_all_gates(case: Any) -> None:
    scores = BBDropout(weights_lr=0.0, kl_scale=1e4, pi_lr=0.1, epochs=100).scores(*case)
    assert (scores < 0.5 * start()).all()


def test_without_the_prior_only_channels_that_matter_are_moved(case: Any) -> None:
    """Only channel 3 of the last layer reaches the head: gradients of all others are zero."""
    model, graph, target = case
    with torch.no_grad():
        model.classifier.weight[:, [c for c in range(12) if c != 3]] = 0
    reads = graph.layers["classifier"].inputs
    scores = BBDropout(weights_lr=0.0, kl_scale=0.0, epochs=30, pi_lr=0.1).scores(
        model, graph, target
    )
    assert np.isclose(np.delete(scores[reads], 3), start(), atol=1e-6).all()
    assert abs(scores[reads][3] - start()) > 0.02


def test_weights_learn_with_the_gates_on_a_copy_or_in_place(case: Any) -> None:
    model, graph, target = case
    before, method = snapshot(model), BBDropout(epochs=2)
    scores = method.scores(model, graph, target)
    assert same_state(model, before)
    assert np.array_equal(method.learn_(model, graph, target), scores)
    assert not same_state(model, before)


def test_learning_lowers_the_loss(case: Any) -> None:
    model, graph, target = case

    def loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(model.eval()(target.images), target.labels))

    before = loss()
    BBDropout(epochs=40, kl_scale=0.1).learn_(model, graph, target)
    assert loss() < 0.8 * before


@pytest.mark.parametrize(
    "settings",
    [{"epochs": 0}, {"epochs": 1.5}, {"minibatch_size": 0}, {"pi_lr": -1}, {"kl_scale": np.inf}],
)
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        BBDropout(**settings)
