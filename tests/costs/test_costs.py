"""Costs of real cut nets: parameters counted, multiply-adds as PyTorch's own counter sees them."""

import pytest
import torch
from nets import CASES, Case, conv_bn, head, noise
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import ChannelPlan, trace_channels
from stamppruner.costs import ActivationBytes, Macs, Params, SizeBytes, TrainBytes
from stamppruner.surgery import cut


def counted_macs(model, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        x.call(model)
    return counter.get_total_flops() / 2


def counted_params(model, _x):
    return sum(p.numel() for p in model.parameters())


def counted_bytes(model, _x):
    return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


class WeightBytes(SizeBytes):
    """Without the header, of which a test of its own knows a bound."""

    constant = property(lambda self: super().constant - self.header)


COSTS = {
    "macs": (Macs, counted_macs),
    "params": (Params, counted_params),
    "size_bytes": (WeightBytes, counted_bytes),
}
PEAKS = {"activation_bytes": ActivationBytes, "train_bytes": TrainBytes}  # against nets: own file
KINDS = {name: kind for name, (kind, _) in COSTS.items()} | PEAKS


class Scaled(nn.Module):
    """A parameter and a buffer along the channels, beside a convolution."""

    def __init__(self, width):
        super().__init__()
        self.body = conv_bn(width, width)
        self.gamma = nn.Parameter(torch.ones(width, 1, 2))
        self.register_buffer("mu", torch.ones(1, width, 1, 1))

    def forward(self, x):
        return x + (self.body(x) - self.mu) * self.gamma[..., :1] / self.gamma[..., 1:]


class Gained(nn.Conv2d):
    """A convolution with one more value an output channel."""

    def __init__(self, *args):
        super().__init__(*args)
        self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

    def forward(self, x):
        return torch.conv2d(x, self.weight * self.gain, self.bias)


def odd_parameters():
    return nn.Sequential(
        Gained(3, 8, 1), nn.PReLU(8), weight_norm(nn.Conv2d(8, 10, 1)), nn.PReLU(), Scaled(10),
        nn.LayerNorm([10, 8, 8]), nn.Conv2d(10, 20, 3, groups=10), conv_bn(20, 6), head(6),
    )  # fmt: skip


NETS = (*CASES, Case("odd_parameters", odd_parameters, ((3, 8, 8),)))


@pytest.fixture(scope="module", params=NETS, ids=lambda case: case.name)
def traced(request):
    model = request.param.model(torch.float32)
    return model, trace_channels(model, noise(1, *request.param.shapes[0]))


def widths(plan):
    return torch.tensor([float(plan.keep[g.channels].sum()) for g in plan.graph.groups])


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("keep", [1, 0.7, 0.5, 0.01])
def test_cost_is_what_is_counted_on_the_cut_net(traced, name, keep):
    model, graph = traced
    kind, counted = COSTS[name]
    for seed in range(2):
        plan = ChannelPlan.random(graph, keep, seed)
        found = float(kind(model, graph)(widths(plan)))
        assert found == pytest.approx(counted(cut(model, plan), graph.example), abs=1e-6)


@pytest.mark.parametrize("name", COSTS)
def test_full_is_the_cost_of_the_whole_net(traced, name):
    model, graph = traced
    kind, counted = COSTS[name]
    cost = kind(model, graph)
    full = cost.full - getattr(cost, "header", 0)
    assert (cost.name, full) == (name, pytest.approx(counted(model, graph.example)))
    assert cost.unit


@pytest.mark.parametrize("name", COSTS)
def test_cost_increases_in_every_width_and_is_differentiable(traced, name):
    model, graph = traced
    w = torch.tensor([g.size * 0.6 for g in graph.groups], requires_grad=True)
    COSTS[name][0](model, graph)(w).backward()
    assert (w.grad > 0).all()


@pytest.mark.parametrize("name", PEAKS)
def test_a_peak_never_falls_with_a_width_and_is_differentiable(traced, name):
    model, graph = traced
    w = torch.tensor([g.size * 0.6 for g in graph.groups], requires_grad=True)
    cost = PEAKS[name](model, graph)
    value = cost(w)
    value.backward()
    value, narrow = float(value.detach()), w.detach()
    assert (w.grad >= 0).all()
    assert w.grad.any()
    assert (cost(narrow + torch.eye(len(w))) >= value).all()


@pytest.mark.parametrize("name", PEAKS)
def test_full_is_the_peak_at_full_widths(traced, name):
    cost = PEAKS[name](*traced)
    assert cost.full == float(cost(widths(ChannelPlan.full(traced[1])))) > 0
    assert (cost.name, cost.unit, cost.of(traced[1].layers)) == (name, "bytes", 0)


@pytest.mark.parametrize("name", KINDS)
def test_batches_of_widths(traced, name):
    model, graph = traced
    cost = KINDS[name](model, graph)
    rows = torch.stack([widths(ChannelPlan.random(graph, keep)) for keep in (0.2, 0.5, 1)])
    assert cost(rows).tolist() == [pytest.approx(float(cost(row))) for row in rows]
    assert cost.per_layer(rows.double()).shape == (3, len(graph.layers))


def test_macs_are_those_of_the_traced_size():
    case = next(case for case in CASES if case.name == "residual")
    model = case.model(torch.float32)
    small, large = (trace_channels(model, noise(1, 3, s, s)) for s in (8, 16))
    head = 8 * 5
    assert Macs(model, large).full - head == 4 * (Macs(model, small).full - head)
