"""Parameters and buffers outside layers that follow channels."""

import pytest
import torch
from nets import Net, conv_bn, difference, head, noise, seeded
from torch import nn

from stamppruner import ChannelPlan, mask, shrink, trace_channels

WIDTH = 8


class Holder(nn.Module):
    """Combines a convolution of its input with a tensor of its own."""

    def __init__(self, tensor, combine, buffer=False):
        super().__init__()
        self.combine, self.inner = combine, conv_bn(WIDTH, WIDTH)
        if buffer:
            self.register_buffer("own", tensor)
        else:
            self.own = nn.Parameter(tensor)

    def forward(self, x):
        return self.combine(self.inner(x), self.own)


def checked(holder):
    def make():
        return nn.Sequential(conv_bn(3, WIDTH), holder(), conv_bn(WIDTH, 6), head(6))

    model = seeded(make).double()
    x = noise(2, 3, 8, 8)
    graph = trace_channels(model, x)
    plan = ChannelPlan.random(graph)
    slim = shrink(model, plan)
    assert difference(mask(model, plan)(x), slim(x)) < 1e-10
    return graph, slim


@pytest.mark.parametrize(
    ("shape", "combine", "axis"),
    [
        ((WIDTH, 1, 1), lambda x, own: x * own, 0),
        ((1, WIDTH, 1, 1), lambda x, own: x + own, 1),
        ((WIDTH,), lambda x, own: x * own[:, None, None], 0),
        ((WIDTH, 8, 8), lambda x, own: x + own, 0),
        ((WIDTH, 2), lambda x, own: x * own[:, :1, None] + own[:, 1:, None], 0),
    ],
)
@pytest.mark.parametrize("buffer", [False, True], ids=["parameter", "buffer"])
def test_axis_that_follows_the_channels_is_found_and_cut(shape, combine, axis, buffer):
    tensor = noise(*shape, dtype=torch.float32)
    graph, slim = checked(lambda: Holder(tensor.clone(), combine, buffer))
    assert [(t.name, t.axis) for t in graph.tensors if t.axis == axis] == [("1.own", axis)]
    assert slim[1].own.shape[axis] == slim[1].inner[0].out_channels == WIDTH // 2
    assert isinstance(slim[1].own, nn.Parameter) != buffer


def test_an_order_that_is_in_the_code_rewires():
    order = [3, 1, 0, 2, 7, 6, 5, 4]
    graph, slim = checked(
        lambda: Holder(torch.arange(8.0) + 1, lambda x, own: x * own[order][:, None, None])
    )
    assert not graph.tensors  # the code fixes the order of all eight
    assert "1.inner.0" in graph.rewired
    assert slim[1].inner[0].out_channels == WIDTH // 2
    assert len(slim[1].own) == WIDTH


def test_tensors_that_follow_no_channels_stay():
    graph, slim = checked(lambda: Holder(noise(8, 8), lambda x, own: x + own))
    assert graph.tensors == ()
    assert slim[1].own.shape == (8, 8)


def test_one_scale_for_two_tensors_ties_them():
    def wiring(net, x):
        return net.head(torch.cat([net.a(x) * net.own, net.b(x) * net.own], 1))

    def make():
        net = Net(wiring, a=conv_bn(3, WIDTH), b=conv_bn(3, WIDTH), head=head(2 * WIDTH))
        net.own = nn.Parameter(torch.ones(WIDTH, 1, 1))
        return net

    graph = trace_channels(seeded(make), torch.zeros(1, 3, 8, 8))
    assert [group.writers for group in graph.groups] == [("a.0", "b.0")]
    assert [tensor.name for tensor in graph.tensors] == ["own"]
