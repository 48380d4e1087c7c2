"""Layers inside code that fixes widths: cut all the same, exactly, and again, and from files."""

import copy

import pytest
import torch
from nets import Net, conv_bn, head, noise, seeded
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import ChannelPlan, mask, shrink, trace_channels
from stamppruner.costs import Macs, Params
from stamppruner.errors import CheckpointError
from stamppruner.rewire import FILL, GATHER, PLACES, SCATTER, restore_
from stamppruner.slim import load_slim, save_slim

SIZE = (3, 8, 8)


def split_sizes(net, x):
    a, b = torch.split(net.first(x).relu(), [4, 12], 1)
    return net.head(torch.cat([net.a(a), net.b(b)], 1))


def odd_shuffle(net, x):
    x = net.first(x)  # 10 channels: halves of 5, shuffled and cut in halves again
    a, b = x.chunk(2, 1)
    x = torch.stack([a, net.a(b)], 2).flatten(1, 2)
    a, b = x.chunk(2, 1)
    x = torch.stack([a, net.b(b)], 2).flatten(1, 2)
    return net.head(x)


def viewed(net, x):
    x = net.first(x).view(-1, 2, 8, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
    return net.head(net.b(net.a(x)))


def residual_view(net, x):
    x = net.first(x)
    return net.head(x + net.b(net.a(x)).view(-1, 16, *x.shape[2:]))


def depthwise(net, x):
    return net.head(net.b(net.a(net.first(x)).view(-1, 16, *x.shape[2:]).relu()))


class Standardised(nn.Conv2d):
    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / w.std((1, 2, 3), keepdim=True), self.bias, padding=1)


def plain(net, x):
    return net.head(net.c(net.b(net.a(net.first(x)))))


NETS = {
    "standardised": lambda: Net(
        plain,
        first=Standardised(3, 16, 3),
        a=Standardised(16, 12, 3),
        b=Standardised(12, 8, 3),
        c=conv_bn(8, 8),
        head=head(8),
    ),
    "split": lambda: Net(
        split_sizes, first=conv_bn(3, 16), a=conv_bn(4, 8), b=conv_bn(12, 8), head=head(16)
    ),
    "shuffle": lambda: Net(
        odd_shuffle, first=conv_bn(3, 10), a=conv_bn(5, 5), b=conv_bn(5, 5), head=head(10)
    ),
    "view": lambda: Net(
        viewed, first=conv_bn(3, 16), a=conv_bn(16, 12), b=conv_bn(12, 16), head=head(16)
    ),
    "residual": lambda: Net(
        residual_view, first=conv_bn(3, 16), a=conv_bn(16, 8), b=conv_bn(8, 16), head=head(16)
    ),
    "depthwise": lambda: Net(
        depthwise,
        first=conv_bn(3, 16),
        a=nn.Conv2d(16, 16, 3, padding=1, groups=16),
        b=conv_bn(16, 8),
        head=head(8),
    ),
}


@pytest.fixture(params=NETS)
def net(request):
    return seeded(NETS[request.param]).double()


def same(a, b, x):
    with torch.no_grad():
        return torch.allclose(a(x), b(x), rtol=0, atol=1e-10 * float(a(x).abs().max()))


@pytest.mark.parametrize("keep", [0.7, 0.5, 0.2])
def test_hard_masked_dense_equals_slim(net, keep):
    graph = trace_channels(net, noise(1, *SIZE))
    assert graph.rewired or any(layer.whole for layer in graph.layers.values())
    plan = ChannelPlan.random(graph, keep)
    slim = shrink(net, plan)
    for batch in (1, 3):
        x = noise(batch, *SIZE, dtype=torch.float64)
        assert same(mask(net, plan), slim, x)
    assert not {*graph.rewired} & {*graph.protected}


def test_rewired_convolutions_are_smaller(net):
    graph = trace_channels(net, noise(1, *SIZE))
    slim = shrink(net, ChannelPlan.random(graph, 0.5))
    for name in graph.rewired:
        assert slim.get_submodule(name).weight.shape[0] < net.get_submodule(name).weight.shape[0]


def test_without_rewiring_they_are_protected(net):
    graph = trace_channels(net, noise(1, *SIZE), rewire=False)
    assert not graph.rewired
    rewired = trace_channels(net, noise(1, *SIZE))
    assert rewired.rewired.keys() <= graph.protected.keys()
    assert graph.num_channels < rewired.num_channels


def test_what_need_not_be_rewired_is_not(net):
    plain = seeded(lambda: Net(lambda n, x: n.head(n.a(x)), a=conv_bn(3, 8), head=head(8)))
    slim = shrink(plain, ChannelPlan.random(trace_channels(plain, noise(1, *SIZE)), 0.5))
    assert not any(name.endswith(PLACES) for name in slim.state_dict())
    graph = trace_channels(net, noise(1, *SIZE))
    whole = shrink(net, ChannelPlan.full(graph))
    assert whole.state_dict().keys() == net.state_dict().keys()


def test_copies_and_gradients(net):
    graph = trace_channels(net, noise(1, *SIZE))
    slim = shrink(net, ChannelPlan.random(graph, 0.5)).train()
    x = noise(2, *SIZE, dtype=torch.float64)
    assert same(slim.eval(), copy.deepcopy(slim), x)
    slim.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in slim.parameters())


def test_a_slim_net_is_pruned_again(net):
    once = shrink(net, ChannelPlan.random(trace_channels(net, noise(1, *SIZE)), 0.8))
    graph = trace_channels(once, noise(1, *SIZE))
    plan = ChannelPlan.random(graph, 0.6)
    twice = shrink(once, plan)
    assert same(mask(once, plan), twice, noise(3, *SIZE, dtype=torch.float64))
    assert sum(p.numel() for p in twice.parameters()) < sum(p.numel() for p in once.parameters())


def test_files(net, tmp_path):
    slim = shrink(net, ChannelPlan.random(trace_channels(net, noise(1, *SIZE)), 0.5))
    save_slim(tmp_path / "slim.safetensors", slim, {})
    x = noise(2, *SIZE, dtype=torch.float64)
    loaded = load_slim(tmp_path / "slim.safetensors", net)
    assert torch.equal(loaded(x), slim.eval()(x))
    assert loaded.state_dict().keys() == slim.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "places"),
    [
        (f"b.0.{GATHER}", torch.tensor([0, 1])),  # too few
        (f"b.0.{GATHER}", torch.arange(12.0)),
        (f"b.0.{SCATTER}", torch.tensor([0, 99])),
        (f"b.0.{SCATTER}", torch.tensor([-1, 0])),
        (f"b.0.{SCATTER}", torch.tensor([], dtype=torch.int64)),
        (f"b.0.{FILL}", torch.tensor([0, 1])),
        (f"b.1.{GATHER}", torch.arange(8)),  # a batch norm
        (f"nobody.{SCATTER}", torch.arange(8)),
    ],
)
def test_places_that_do_not_fit_are_refused(name, places):
    with pytest.raises(CheckpointError, match=name.rpartition(".")[0]):
        restore_(NETS["split"](), {name: places}, "slim.safetensors")


def test_macs_and_parameters_are_those_of_the_slim_net(net):
    graph = trace_channels(net, noise(1, *SIZE))
    plan = ChannelPlan.random(graph, 0.5)
    slim = shrink(net, plan)
    widths = torch.tensor([float(plan.keep[g.channels].sum()) for g in graph.groups])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        slim(noise(1, *SIZE, dtype=torch.float64))
    assert float(Macs(net, graph)(widths)) == counter.get_total_flops() / 2
    assert float(Params(net, graph)(widths)) == sum(p.numel() for p in slim.parameters())


class Block(nn.Module):
    """A convolution, and a norm over channels and a stored width if ``fixed``."""

    def __init__(self, inputs, fixed):
        super().__init__()
        self.conv, self.fixed = nn.Conv2d(inputs, 12, 3, padding=1), fixed
        self.norm = nn.GroupNorm(1, 12) if fixed else nn.Identity()

    def forward(self, x):
        x = self.norm(self.conv(x))
        return x.view(len(x), 12, *x.shape[2:]) if self.fixed else x


def test_a_norm_over_channels_protects_its_own_block_alone():
    blocks = nn.Sequential(Block(3, False), Block(12, True), Block(12, False))
    net = seeded(lambda: Net(lambda n, x: n.head(n.blocks(x)), blocks=blocks, head=head(12)))
    graph = trace_channels(net, noise(1, *SIZE))
    assert [group.name for group in graph.groups] == ["blocks.0.conv", "blocks.2.conv"]
    assert graph.protected.keys() == {"blocks.1.conv", *graph.output_layers}
    assert not graph.rewired
