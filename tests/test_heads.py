from __future__ import annotations

import numpy as np
import pytest
import torch
from nets import Net, conv_bn
from stripes import resnet, same_state, snapshot, vgg
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import trace_channels
from stamppruner.channels import KEPT
from stamppruner.heads import (
    RIDGES,
    find_head,
    fit_ridge_,
    head_inputs,
    new_head,
    set_module,
    with_classes,
)

X = torch.zeros(1, 3, 8, 8)


def features(n: int = 12, width: int = 4, classes: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    labels = torch.arange(n) % classes
    x = torch.randn(n, width, generator=generator)
    return x + F.one_hot(labels, width).float(), labels


def ridge(x: Tensor, y: Tensor, penalty: float, bias: bool) -> tuple[Tensor, Tensor]:
    """Weights (F, classes) and offset, from the normal equations; the offset has no penalty."""
    mean_x, mean_y = (x.mean(0), y.mean(0)) if bias else (x[0] * 0, y[0] * 0)
    centred = x - mean_x
    gram = centred.T @ centred + penalty * torch.eye(x.shape[1], dtype=x.dtype)
    weight = torch.linalg.solve(gram, centred.T @ (y - mean_y))
    return weight, mean_y - mean_x @ weight


@pytest.mark.parametrize("bias", [True, False])
def test_ridge_is_the_best_of_explicit_leave_one_out_refits(bias: bool) -> None:
    small, labels = features()
    x, y = small.double(), F.one_hot(labels, 3).double()
    centred = x - x.mean(0) if bias else x
    unit = float(centred.square().sum() / x.shape[1])
    errors, held_out = [], []
    for multiple in RIDGES:
        guesses = []
        for i in range(len(x)):
            rest = torch.arange(len(x)) != i
            weight, offset = ridge(x[rest], y[rest], multiple * unit, bias)
            guesses.append(x[i] @ weight + offset)
        held_out.append(torch.stack(guesses))
        errors.append(float((y - held_out[-1]).square().mean()))
    best = int(np.argmin(errors))
    assert 0 < best < len(RIDGES) - 1  # else the choice would say nothing
    prior = y.mean(0).log() if bias else torch.zeros(3, dtype=torch.float64)
    centre = y.mean(0) if bias else 0.0
    scale = min(
        (2.0**k for k in range(7)),
        key=lambda k: float(F.cross_entropy(k * (held_out[best] - centre) + prior, labels)),
    )
    weight, _ = ridge(x, y, RIDGES[best] * unit, bias)
    head = nn.Linear(4, 3, bias=bias)
    fit_ridge_(head, small, labels)
    assert torch.allclose(head.weight.double(), scale * weight.T, atol=1e-5)
    if bias:
        expected = prior - scale * x.mean(0) @ weight
        assert torch.allclose(head.bias.double(), expected, atol=1e-5)


def test_ridge_head_separates_separable_classes() -> None:
    labels = torch.arange(30) % 3
    x = 4 * F.one_hot(labels, 5).float() + 0.1 * torch.randn(30, 5)
    head = nn.Linear(5, 3)
    fit_ridge_(head, x, labels.int())
    assert (head(x).argmax(1) == labels).all()


@pytest.mark.parametrize("width", [2, 50])
def test_ridge_of_constant_features_gives_the_class_shares(width: int) -> None:
    labels = torch.tensor([0, 0, 0, 1])
    head = nn.Linear(width, 2)
    fit_ridge_(head, torch.ones(4, width), labels)
    shares = head(torch.ones(1, width)).softmax(1)
    assert torch.allclose(shares, torch.tensor([[0.75, 0.25]]), atol=1e-4)


def test_find_head_of_both_families() -> None:
    for model in (vgg(), resnet()):
        assert find_head(model, trace_channels(model, X)) == "classifier"


def test_no_head_where_a_convolution_or_two_layers_write_the_output() -> None:
    conv = nn.Sequential(conv_bn(3, 6), nn.ReLU(), nn.Conv2d(6, 4, 1), nn.AdaptiveAvgPool2d(1))
    assert find_head(conv, trace_channels(conv, X)) is None

    def wiring(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
        pooled = net.stem(x).relu().mean((2, 3))
        return net.one(pooled), net.two(pooled)

    two = Net(wiring, stem=nn.Conv2d(3, 6, 3), one=nn.Linear(6, 2), two=nn.Linear(6, 3))
    assert find_head(two, trace_channels(two, X)) is None


def test_with_classes_widens_a_copy_and_its_graph() -> None:
    model = vgg(6)
    before, graph = snapshot(model), trace_channels(model, X)
    own, widened = with_classes(model, graph, 9)
    assert own is not model
    assert same_state(model, before)
    assert own(torch.rand(2, 3, 8, 8)).shape == (2, 9)
    assert (widened.layers["classifier"].outputs == np.full(9, KEPT)).all()
    assert len(graph.layers["classifier"].outputs) == 6
    assert own.classifier.weight.abs().max() == 0


def test_with_classes_keeps_a_head_of_the_right_size_and_a_model_without_one() -> None:
    model = vgg(6)
    graph = trace_channels(model, X)
    own, same = with_classes(model, graph, 6)
    assert same is graph
    assert own is not model
    assert same_state(own, model.state_dict())
    conv = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 1))
    graph = trace_channels(conv, X)
    own, same = with_classes(conv, graph, 9)
    assert same is graph
    assert same_state(own, conv.state_dict())


@pytest.mark.parametrize("bias", [True, False])
def test_a_new_head_is_like_the_old_one(bias: bool) -> None:
    old = nn.Linear(4, 3, bias=bias, dtype=torch.float64).eval()
    head = new_head(old, 5)
    assert (head.in_features, head.out_features) == (4, 5)
    assert (head.bias is None) == (not bias)
    assert head.weight.dtype == torch.float64
    assert not head.training


def test_head_inputs_are_what_the_head_reads_and_leave_no_hook() -> None:
    model = vgg().eval()
    images = torch.rand(6, 3, 8, 8)
    read = head_inputs(model, "classifier", [images[:4], images[4:]])
    assert read is not None
    assert torch.allclose(model.classifier(read), model(images), atol=1e-5)
    assert not model.classifier._forward_pre_hooks


def test_head_inputs_of_a_head_that_reads_tokens_are_none() -> None:
    net = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))
    assert head_inputs(net, "2", [torch.rand(4, 5, 3)]) is None
    assert head_inputs(net, "2", [torch.rand(4, 3)]) is not None


def test_set_module_reaches_into_containers() -> None:
    net = nn.Sequential(nn.Sequential(nn.ReLU()), nn.ReLU())
    new = nn.Tanh()
    set_module(net, "0.0", new)
    assert net[0][0] is new
