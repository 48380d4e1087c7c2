from __future__ import annotations

import pytest
import torch
from stripes import hooks, resnet, same_state, snapshot, stripes
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import trace_channels
from stamppruner.gates import Gates
from stamppruner.taylor import relative_to_group, taylor_scores


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, reduction="none")


def squared(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs[:, 0] - labels).square()


def test_scores_of_two_linear_layers_by_hand() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    graph = trace_channels(model, torch.zeros(1, 2))
    x, y = torch.tensor([[1.0, 2.0], [-1.0, 0.5], [0.3, -2.0]]), torch.tensor([1.0, 0.0, 2.0])
    scores = taylor_scores(model, graph, [(x[:2], y[:2]), (x[2:], y[2:])], squared)
    with torch.no_grad():
        hidden = model[0](x)
        out = model[1](hidden)[:, 0]
        # d (out - y)^2 / d m_c = 2 (out - y) w_c h_c
        by_sample = 2 * (out - y)[:, None] * model[1].weight[0] * hidden
    assert torch.allclose(scores, by_sample.square().mean(0).sqrt(), atol=1e-6)


def test_opposite_samples_do_not_cancel() -> None:
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.fill_(1.0)
        model[1].weight.fill_(1.0)
    graph = trace_channels(model, torch.zeros(1, 1))
    x, y = torch.tensor([[1.0], [1.0]]), torch.tensor([1.0, 3.0])  # gradients 2 and -2
    scores = taylor_scores(model, graph, [(x, y)], squared)
    assert scores.tolist() == pytest.approx([2.0, 2.0])


def test_scores_are_gradients_by_shared_gates_one_sample_at_a_time() -> None:
    model = resnet().double()
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    images, labels = stripes(1)
    images = images.double()
    scores = taylor_scores(model, graph, [(images, labels)], cross_entropy)
    total = torch.zeros(graph.num_channels, dtype=torch.float64)
    model.eval()
    with Gates(model, graph).injected() as gates:
        for image, label in zip(images, labels, strict=True):
            mask = torch.ones(graph.num_channels, dtype=torch.float64, requires_grad=True)
            gates.values = mask
            F.cross_entropy(model(image[None]), label[None]).backward()
            total += mask.grad.square()
    assert torch.allclose(scores.double(), (total / len(images)).sqrt(), rtol=1e-4)


def test_the_model_is_left_as_it_was() -> None:
    model = resnet().train()
    before = snapshot(model)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    with torch.no_grad():  # works here too
        scores = taylor_scores(model, graph, [stripes(1)], cross_entropy)
    assert scores.min() >= 0
    assert scores.max() > 0
    assert hooks(model) == 0
    assert same_state(model, before)
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_relative_scores_have_unit_root_mean_square_in_each_group() -> None:
    model = resnet()
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    raw = torch.rand(graph.num_channels) * torch.logspace(-3, 3, graph.num_channels)
    relative = relative_to_group(raw, graph)
    for group in graph.groups:
        assert relative[group.channels].square().mean() == pytest.approx(1, abs=1e-4)
        order = raw[group.channels].argsort()
        assert torch.equal(relative[group.channels].argsort(), order)
    assert torch.isfinite(relative_to_group(torch.zeros_like(raw), graph)).all()
