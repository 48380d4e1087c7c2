"""Scores of channels that follow from formulas, by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from nets import conv_bn, head
from stripes import SIZE, loader, resnet, vgg
from torch import nn

from stamppruner import Budget, trace_channels
from stamppruner.baselines import FPGM, LAMP, BNScale, Hessian, Magnitude
from stamppruner.baselines._filters import rows
from stamppruner.baselines.lamp import lamp
from stamppruner.channels import ChannelGraph
from stamppruner.errors import ConfigError, UnsupportedModelError
from stamppruner.heads import with_classes
from stamppruner.target import Target, sample_target

X = torch.zeros(1, 3, SIZE, SIZE)


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


def net(filters: list[list[float]]) -> tuple[nn.Module, ChannelGraph, Target, list[int]]:
    """One 1x1 convolution of three inputs with these filters, and where its channels are."""
    model = nn.Sequential(
        nn.Conv2d(3, len(filters), 1, bias=False), nn.ReLU(), head(len(filters), 6)
    )
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor(filters)[:, :, None, None])
    graph, target, dense = target_of(model)
    return dense, graph, target, [int(c) for c in graph.layers["0"].outputs]


def test_fpgm_by_hand() -> None:
    """Points 0, 3, 4 and -8 on a line: sums of distances 15, 16, 17 + ... in the order given."""
    model, graph, target, order = net([[0, 0, 0], [3, 0, 0], [0, 4, 0], [-8, 0, 0]])
    # distances: 0-1: 3, 0-2: 4, 0-3: 8, 1-2: 5, 1-3: 11, 2-3: sqrt(80)
    sums = [3 + 4 + 8, 3 + 5 + 11, 4 + 5 + math.sqrt(80), 8 + 11 + math.sqrt(80)]
    assert np.argsort(sums).tolist() == [0, 2, 1, 3]
    scores = FPGM().scores(model, graph, target)[order]
    assert scores == pytest.approx([0, 2 / 3, 1 / 3, 1])


def test_fpgm_sees_what_norms_do_not() -> None:
    """A large filter that has a twin is nearer to the others than a small one without."""
    model, graph, target, order = net([[5, 0, 0], [5, 0, 0], [5, 0, 0], [0, 1, 0]])
    assert FPGM().scores(model, graph, target)[order].argmax() == 3
    assert Magnitude().scores(model, graph, target)[order].argmin() == 3


def test_lamp_by_hand() -> None:
    """Mean squares 3, 12, 1 (a third of 9, 36, 3), so 3/15, 12/12 and 1/16."""
    model, graph, target, order = net([[3, 0, 0], [4, 4, 2], [1, 1, -1]])
    scores = LAMP().scores(model, graph, target)[order]
    assert scores == pytest.approx([3 / 15, 1, 1 / 16])


def test_lamp_of_equal_and_of_zero_values() -> None:
    assert lamp(np.array([1.0, 1.0])).tolist() == [0.5, 1.0]
    assert lamp(np.zeros(2)).tolist() == [0, 0]


def test_lamp_does_not_care_for_the_scale_of_a_layer() -> None:
    model = resnet()
    graph, target, dense = target_of(model)
    before = LAMP().scores(dense, graph, target)
    with torch.no_grad():
        dense.stages[1][0].conv1.weight *= 1000
    assert LAMP().scores(dense, graph, target) == pytest.approx(before)


def test_bn_scale_is_the_mean_of_gammas_over_the_norms_that_a_channel_passes() -> None:
    model = resnet()
    with torch.no_grad():
        model.bn1.weight.copy_(torch.arange(8.0) - 4)
        model.stages[0][0].bn2.weight.fill_(2.0)  # joins bn1's channels by the residual sum
        model.stages[0][0].bn1.weight.copy_(-torch.arange(8.0))
    graph, target, dense = target_of(model)
    scores = BNScale().scores(dense, graph, target)
    joined = scores[graph.layers["bn1"].outputs]
    assert joined == pytest.approx([(abs(i - 4) + 2) / 2 for i in range(8)])
    assert scores[graph.layers["stages.0.0.bn1"].outputs] == pytest.approx(range(8))


def test_bn_scale_of_channels_without_a_norm_lies_among_the_others() -> None:
    model = nn.Sequential(conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU(), head(8, 6))
    with torch.no_grad():
        model[0][1].weight.copy_(torch.linspace(1, 2, 8))
    graph, target, dense = target_of(model)
    other = BNScale().scores(dense, graph, target)[graph.layers["2"].outputs]
    assert other.min() >= 1
    assert other.max() <= 2
    assert other.mean() == pytest.approx(1.5, abs=0.05)
    bare = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), head(8, 6))
    with pytest.raises(UnsupportedModelError, match="rank its channels by Magnitude"):
        BNScale().prune(bare, loader(), Budget(macs=0.5))


def test_hessian_by_hand() -> None:
    """Two channels of one 1x1 weight each, images of one pixel, two classes.

    Logits ``z_k = sum_c v_kc w_c x`` (all positive), ``dL/dw_c = sum_k (p_k - y_k) v_kc x``;
    damage ``w_c^2`` times its mean square over the two images.
    """
    model = nn.Sequential(
        nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), nn.Flatten(), nn.Linear(2, 2, bias=False)
    )
    w, v = np.array([2.0, 0.5]), np.array([[1.0, -1.0], [0.5, 3.0]])
    with torch.no_grad():
        model[0].weight.copy_(torch.from_numpy(w).view(2, 1, 1, 1))
        model[3].weight.copy_(torch.from_numpy(v))
    x, y = [1.0, 3.0], [0, 1]
    target = Target(torch.tensor(x).view(2, 1, 1, 1), torch.tensor(y), 2, 2)
    graph = trace_channels(model, torch.ones(1, 1, 1, 1))
    expected = np.zeros(2)
    for value, label in zip(x, y, strict=True):
        z = v @ (w * value)
        p = np.exp(z) / np.exp(z).sum()
        expected += (w * (v.T @ (p - np.eye(2)[label])) * value) ** 2 / 2
    found = Hessian().raw_scores(model, graph, target)[graph.layers["0"].outputs]
    assert found == pytest.approx(expected, rel=1e-5)
    relative = Hessian().scores(model, graph, target)[graph.layers["0"].outputs]
    assert relative == pytest.approx(expected / math.sqrt((expected**2).mean()), rel=1e-5)


def test_hessian_sums_over_the_filter_and_takes_the_images_asked_for() -> None:
    model = vgg()
    graph, target, dense = target_of(model)
    first = Target(target.images[:3], target.labels[:3], 6, 3)
    few = Hessian(images=3).raw_scores(dense, graph, target)
    assert np.array_equal(few, Hessian().raw_scores(dense, graph, first))
    ones = [
        Hessian().raw_scores(
            dense, graph, Target(target.images[i : i + 1], target.labels[i : i + 1], 6, 1)
        )
        for i in range(3)
    ]
    assert few == pytest.approx(np.mean(ones, axis=0), rel=1e-4)  # all samples count, not the last


@pytest.mark.parametrize("images", [0, 2.5])
def test_values_out_of_range_are_refused(images: Any) -> None:
    with pytest.raises(ConfigError, match="images"):
        Hessian(images=images)


def test_rows_of_grouped_and_transposed_layers_are_what_writes_each_output() -> None:
    """Against the response to one output at a time: a row of zeros writes nothing but the bias."""
    for layer in (
        nn.Conv2d(4, 6, 3, groups=2, bias=False),
        nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False),
        nn.Linear(4, 6, bias=False),
    ):
        norms = rows(layer).abs().sum(1)
        assert norms.shape == (6,)
        x = torch.randn(2, 4) if isinstance(layer, nn.Linear) else torch.randn(2, 4, 5, 5)
        (gradient,) = torch.autograd.grad(layer(x)[:, 4].square().sum(), layer.weight)
        assert (rows(layer, gradient).abs().sum(1) > 0).tolist() == [False] * 4 + [True, False]
