"""Random nets of every wiring: what is masked is what is cut, and nothing is protected in vain."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nets import (
    ChannelsFirstNorm,
    Residual,
    SqueezeExcite,
    conv_bn,
    difference,
    head,
    noise,
    seeded,
)
from torch import nn

from stamppruner import ChannelPlan, mask, shrink, trace_channels


class Joined(nn.Module):
    """Branches of one input, joined by a function of their outputs."""

    def __init__(self, join, *branches):
        super().__init__()
        self.join, self.branches = join, nn.ModuleList(branches)

    def forward(self, x):
        return self.join(*(branch(x) for branch in self.branches))


class Halves(nn.Module):
    """Two convolutions on the halves of the input."""

    def __init__(self, width, out):
        super().__init__()
        self.a, self.b = conv_bn(width // 2, out), conv_bn(width // 2, out)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return torch.cat([self.b(b), self.a(a)], 1)


class Scaled(nn.Module):
    """A layer scale, a buffer and a convolution around the input."""

    def __init__(self, width):
        super().__init__()
        self.body = conv_bn(width, width)
        self.gamma = nn.Parameter(torch.linspace(1, 2, width)[:, None, None])
        self.register_buffer("mu", torch.linspace(-1, 1, width)[None, :, None, None])

    def forward(self, x):
        return x + self.gamma * (self.body(x) - self.mu)


class Shuffled(nn.Module):
    """Halves of the channels, interleaved."""

    def forward(self, x):
        batch, width, *size = x.shape
        return x.view(batch, 2, width // 2, *size).transpose(1, 2).reshape(x.shape)


class FixedParts(nn.Module):
    """Parts of the input at sizes in the code, one of them convolved: the width is fixed."""

    def __init__(self, width):
        super().__init__()
        self.sizes = [width // 3, width - width // 3]
        self.body = conv_bn(self.sizes[0], self.sizes[0])

    def forward(self, x):
        a, b = x.split(self.sizes, 1)
        return torch.cat([b, self.body(a)], 1)


class Standardised(nn.Conv2d):
    """Weights normalised over what an output reads."""

    def forward(self, x):
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w / w.std((1, 2, 3), keepdim=True), self.bias, padding=1)


class Skip(nn.Module):
    """Down and up again, beside the input."""

    def __init__(self, width, out):
        super().__init__()
        self.down, self.up = conv_bn(width, out), nn.ConvTranspose2d(out, out, 2, stride=2)

    def forward(self, x):
        return torch.cat([x, self.up(F.max_pool2d(self.down(x), 2))], 1)


def layer(kind, width, out):
    """A module with inputs of some width, and the width of its outputs."""
    if kind == "conv":
        return nn.Sequential(conv_bn(width, out), nn.ReLU()), out
    if kind == "residual":
        return Residual(width, out), width
    if kind == "concat":
        join = lambda *xs: torch.cat(xs, 1)  # noqa: E731
        return Joined(join, nn.Identity(), conv_bn(width, out), conv_bn(width, out, 1)), (
            width + 2 * out
        )
    if kind == "sum":
        join = lambda a, b, c: a + b * c.sigmoid()  # noqa: E731
        return Joined(join, *(conv_bn(width, out, size) for size in (1, 3, 5))), out
    if kind == "split":
        return nn.Sequential(conv_bn(width, 2 * out), Halves(2 * out, out)), 2 * out
    if kind == "grouped":
        return nn.Sequential(conv_bn(width, 16, 1), nn.SiLU(), conv_bn(16, 32, groups=4)), 32
    if kind == "depthwise":
        return nn.Sequential(nn.Conv2d(width, 2 * width, 3, groups=width, padding=1)), 2 * width
    if kind == "excite":
        return SqueezeExcite(width, out), width
    if kind == "glu":
        return nn.Sequential(conv_bn(width, 2 * out), nn.GLU(1)), out
    if kind == "layer_norm":
        return ChannelsFirstNorm(width), width
    if kind == "group_norm":
        return nn.Sequential(nn.Conv2d(width, 12, 1), nn.GroupNorm(3, 12), nn.GELU()), 12
    if kind == "scaled":
        return Scaled(width), width
    if kind == "pixels":
        return nn.Sequential(conv_bn(width, 4 * out), nn.PixelShuffle(2), nn.AvgPool2d(2)), out
    if kind == "transposed":
        return nn.Sequential(nn.ConvTranspose2d(width, out, 2, stride=2), nn.MaxPool2d(2)), out
    if kind == "shuffle":
        return nn.Sequential(conv_bn(width, 2 * out), Shuffled()), 2 * out
    if kind == "fixed_parts":
        return nn.Sequential(conv_bn(width, 2 * out), FixedParts(2 * out)), 2 * out
    if kind == "standardised":
        return nn.Sequential(Standardised(width, out, 3), nn.SiLU()), out
    if kind == "skip":
        return Skip(width, out), width + out
    raise AssertionError(kind)


KINDS = (
    "conv", "residual", "concat", "sum", "split", "grouped", "depthwise", "excite", "glu",
    "layer_norm", "group_norm", "scaled", "pixels", "transposed", "shuffle", "fixed_parts",
    "standardised", "skip",
)  # fmt: skip


class Cropped(nn.Module):
    """Keeps random nets narrow: a convolution in front of what would grow."""

    def __init__(self, width, inner):
        super().__init__()
        self.narrow, self.inner = nn.Conv2d(width, 8, 1), inner

    def forward(self, x):
        return self.inner(F.relu(self.narrow(x)))


def build(plan):
    width = 6
    modules = [conv_bn(3, width), nn.ReLU()]
    for kind, out in plan:
        if width > 24:
            inner, grown = layer(kind, 8, out)
            modules.append(Cropped(width, inner))
        else:
            inner, grown = layer(kind, width, out)
            modules.append(inner)
        width = grown
    return nn.Sequential(*modules, conv_bn(width, 5), head(5))


plans = st.lists(
    st.tuples(st.sampled_from(KINDS), st.sampled_from([4, 6, 8])), min_size=1, max_size=5
)


def check(plan, keep, seed):
    model = seeded(lambda: build(plan), seed).double()
    graph = trace_channels(model, noise(1, 3, 8, 8))
    in_vain = [why for why in graph.protected.values() if "proved" in why or "fixed" in why]
    if "layer_norm" in dict(plan):  # its statistics would count places that are left empty
        in_vain = [why for why in in_vain if "at fixed places" not in why]
    assert not in_vain
    assert graph.num_channels >= 5
    cut = ChannelPlan.random(graph, keep, seed)
    assert ChannelPlan.from_record(graph, cut.record()) == cut
    dense, slim = mask(model, cut), shrink(model, cut)
    for shape in ((3, 8, 8), (3, 12, 10)):
        for batch in (1, 3):
            x = noise(batch, *shape)
            with torch.no_grad():
                assert difference(dense(x), slim(x)) < 1e-10
    smaller = sum(p.numel() for p in slim.parameters())
    assert smaller < sum(p.numel() for p in model.parameters()) or cut.keep.all()


arguments = {
    "plan": plans,
    "keep": st.floats(0.02, 0.9),
    "seed": st.integers(0, 2**16),
}
quiet = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(**arguments)
@settings(max_examples=12, derandomize=True, database=None, **quiet)
def test_random_nets(plan, keep, seed):
    check(plan, keep, seed)


@pytest.mark.slow
@given(**arguments)
@settings(max_examples=500, **quiet)
def test_five_hundred_random_nets(plan, keep, seed):
    check(plan, keep, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_alone(kind):
    check([(kind, 8)], 0.4, 1)
