"""Nets that break pruning tools: each is cut right, or says why it is not.

The numbers are those of the collection of public bug reports that the nets were made from.
"""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from nets import Net, conv_bn, difference, head, noise, seeded
from torch import nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torchvision.ops import FrozenBatchNorm2d

from stamppruner import ChannelPlan, mask, shrink, trace_channels
from stamppruner.calls import floating_tensors
from stamppruner.channels import KEPT
from stamppruner.errors import PlanError, UnsupportedModelError

SHAPES = ((3, 8, 8), (3, 12, 16))


def checked(make, shapes=SHAPES, keeps=(0.5, 0.3, 0.01), example=None, rewire=True):
    """Trace, cut and compare in both precisions; the graph and the last slim net."""
    for dtype, bound in ((torch.float32, 1e-5), (torch.float64, 1e-10)):
        model = seeded(make).to(dtype)
        graph = trace_channels(model, noise(1, *(example or shapes[0])), rewire=rewire)
        for seed, keep in enumerate(keeps):
            plan = ChannelPlan.random(graph, keep, seed)
            dense, slim = mask(model, plan), shrink(model, plan)
            for shape in shapes:
                for batch in (1, 3):
                    x = noise(batch, *shape, dtype=dtype)
                    with torch.no_grad():
                        a, b = floating_tensors(dense(x)), floating_tensors(slim(x))
                    assert len(a) == len(b) > 0
                    assert all(difference(p, q) < bound for p, q in zip(a, b, strict=True))
    return graph, slim


def sizes(graph):
    return {group.name: group.size for group in graph.groups}


def test_01_pixel_shuffle_keeps_whole_blocks():
    def make():
        return nn.Sequential(conv_bn(3, 32), nn.PixelShuffle(2), nn.Conv2d(8, 6, 3), head(6))

    graph, slim = checked(make)
    assert sizes(graph) == {"0.0": 8, "2": 6}
    assert slim[0][0].out_channels == 4 * slim[2].in_channels


class Shuffle(nn.Module):
    def forward(self, x):
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).reshape(b, c, h, w)


def test_02_channel_shuffle_removes_equally_per_half():
    graph, slim = checked(
        lambda: nn.Sequential(conv_bn(3, 16), Shuffle(), nn.Conv2d(16, 6, 3), head(6))
    )
    assert sizes(graph) == {"0.0": 8, "2": 6}
    assert slim[0][0].out_channels % 2 == 0


def test_02_shufflenet_v2():
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=4).eval()
    graph = trace_channels(model, torch.zeros(1, 3, 64, 64))
    assert graph.num_channels > 1000
    assert shrink(model, ChannelPlan.random(graph))(torch.zeros(2, 3, 64, 64)).shape == (2, 4)
    assert all(graph.protected.values())


def test_03_chunk_keeps_equal_halves():
    def wiring(net, x):
        a, b = net.split(x).chunk(2, 1)
        b = net.inner(b).relu()
        return net.head(net.last(torch.cat([b, a, net.inner2(b)], 1)))

    def make():
        return Net(
            wiring,
            split=conv_bn(3, 16),
            inner=conv_bn(8, 8),
            inner2=conv_bn(8, 6),
            last=conv_bn(22, 8),
            head=head(8),
        )

    graph, slim = checked(make)
    assert graph.groups[0].name == "split.0"
    assert (graph.groups[0].size, graph.groups[0].blocks) == (16, 2)
    assert slim.split[0].out_channels == 2 * slim.inner[0].in_channels


def test_04_broadcast_is_not_coupling():
    def wiring(net, x):
        h = net.stem(x).relu()
        return net.head(torch.sigmoid(net.gate(h)) * net.wide(h))

    graph, _ = checked(
        lambda: Net(
            wiring, stem=conv_bn(3, 8), gate=nn.Conv2d(8, 1, 1), wide=conv_bn(8, 32), head=head(32)
        )
    )
    assert sizes(graph) == {"stem.0": 8, "wide.0": 32}
    assert graph.protected["gate"] == "has a single channel"


def test_05_frozen_parameters():
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 8), head(8)))
    model.requires_grad_(False)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    slim = shrink(model, ChannelPlan.random(graph))
    assert sizes(graph) == {"0.0": 8, "2.0": 8}
    assert not any(p.requires_grad for p in slim.parameters())
    model[2][0].weight.requires_grad_(True)
    slim = shrink(model, ChannelPlan.random(graph))
    assert [n for n, p in slim.named_parameters() if p.requires_grad] == ["2.0.weight"]


class Tagged(torch.Tensor):
    pass


def test_06_tensor_subclass_inputs():
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 8), head(8)))
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8).as_subclass(Tagged))
    assert graph.num_channels == 16
    assert type(graph.example.args[0]) is torch.Tensor


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_07_recurrent_layers_are_protected_and_named(kind):
    def wiring(net, x):
        x = net.body(net.stem(x).relu()).mean(2).transpose(1, 2)
        return net.last(net.memory(x)[0][:, -1])

    graph, _ = checked(
        lambda: Net(
            wiring,
            stem=conv_bn(3, 8),
            body=conv_bn(8, 6),
            memory=kind(6, 5, batch_first=True),
            last=nn.Linear(5, 2),
        ),
    )
    assert sizes(graph) == {"stem.0": 8}
    assert graph.protected["body.0"] == f"is read by 'memory' ({kind.__name__}), which is not cut"


def test_08_grouped_convolutions_remove_equally_per_group():
    graph, slim = checked(
        lambda: nn.Sequential(
            conv_bn(3, 32, 1),
            nn.ReLU(),
            conv_bn(32, 32, groups=4),
            nn.ReLU(),
            conv_bn(32, 8, 1),
            conv_bn(8, 8, groups=8),
            conv_bn(8, 6, 1),
            head(6),
        )
    )
    assert {g.name: g.blocks for g in graph.groups} == {"0.0": 4, "2.0": 4, "4.0": 1, "6.0": 1}
    assert slim[2][0].groups == 4
    assert slim[5][0].groups == slim[5][0].in_channels == slim[4][0].out_channels


def test_08_grouped_convolution_on_a_residual_sum():
    def wiring(net, x):
        x = net.stem(x).relu()
        return net.head(x + net.grouped(x))

    graph, _ = checked(
        lambda: Net(wiring, stem=conv_bn(3, 16), grouped=conv_bn(16, 16, groups=4), head=head(16))
    )
    assert graph.num_channels == 16


def test_09_one_output_channel_is_no_depthwise_convolution():
    graph, _ = checked(
        lambda: nn.Sequential(conv_bn(3, 8), nn.Conv2d(8, 1, 3), nn.Conv2d(1, 6, 1), head(6))
    )
    assert sizes(graph) == {"0.0": 8, "2": 6}
    assert graph.layers["2"].kind == "mixing"


def test_10_a_tensor_beside_itself_six_rounds():
    def wiring(net, x):
        x = net.stem(x).relu()
        return net.head(net.last(torch.cat([x, x], 1)))

    model = seeded(
        lambda: Net(wiring, stem=conv_bn(3, 64), last=conv_bn(128, 8), head=head(8))
    ).double()
    x = noise(2, 3, 8, 8)
    for seed in range(6):
        graph = trace_channels(model, x, protect=["last.0"])
        plan = ChannelPlan.random(graph, 0.7, seed)
        slim = shrink(model, plan)
        assert difference(mask(model, plan)(x).detach(), slim(x).detach()) < 1e-10
        assert slim.last[0].in_channels == 2 * slim.stem[0].out_channels
        model = slim
    assert model.stem[0].out_channels < 10


class ChannelsLastFlat(nn.Module):
    def forward(self, x):
        return x.permute(0, 2, 3, 1).flatten(1)


def test_11_interleaved_flatten():
    graph, _ = checked(
        lambda: nn.Sequential(conv_bn(3, 6), ChannelsLastFlat(), nn.Linear(6 * 64, 4)),
        shapes=((3, 8, 8),),
    )
    assert graph.layers["2"].inputs.tolist() == list(range(6)) * 64


def test_12_shortcut_that_pads_channels():
    def wiring(net, x):
        x = net.stem(x).relu()
        x = (x + net.first(x)).relu()
        short = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 4, 4))
        x = (short + net.down(x)).relu()
        return net.head(x + net.second(x))

    def make():
        return Net(
            wiring,
            stem=conv_bn(3, 8),
            first=conv_bn(8, 8),
            second=conv_bn(16, 16),
            head=head(16),
            down=conv_bn(8, 16, stride=2),
        )

    graph, _ = checked(make)
    assert all(graph.protected.values())


def test_13_grouped_transposed_convolution():
    graph, _ = checked(
        lambda: nn.Sequential(
            conv_bn(3, 32),
            nn.ConvTranspose2d(32, 16, 2, stride=2, groups=4),
            nn.Conv2d(16, 6, 1),
            head(6),
        )
    )
    assert {g.name: (g.size, g.blocks) for g in graph.groups} == {
        "0.0": (32, 4),
        "1": (16, 4),
        "2": (6, 1),
    }


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_14_depthwise_multiplier(kind):
    graph, slim = checked(
        lambda: nn.Sequential(conv_bn(3, 16), kind(16, 32, 3, groups=16), conv_bn(32, 6), head(6))
    )
    assert sizes(graph) == {"0.0": 16, "2.0": 6}
    assert slim[1].out_channels == 2 * slim[1].in_channels == 2 * slim[0][0].out_channels


def test_15_gated_linear_unit():
    graph, slim = checked(lambda: nn.Sequential(conv_bn(3, 16), nn.GLU(1), conv_bn(8, 6), head(6)))
    assert sizes(graph) == {"0.0": 8, "2.0": 6}
    assert slim[0][0].out_channels == 2 * slim[2][0].in_channels


def test_16_weight_norm_is_cut_through():
    def make():
        return nn.Sequential(
            weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), weight_norm(nn.Conv2d(8, 6, 3)), head(6)
        )

    graph, slim = checked(make)
    assert sizes(graph) == {"0": 8, "2": 6}
    slim(noise(1, 3, 8, 8)).sum().backward()
    assert slim[2].parametrizations.weight.original1.grad.shape == slim[2].weight.shape


@pytest.mark.parametrize("wrap", [spectral_norm, orthogonal])
def test_16_other_parametrizations_are_protected(wrap):
    graph, _ = checked(
        lambda: nn.Sequential(conv_bn(3, 8), wrap(nn.Conv2d(8, 8, 3)), conv_bn(8, 6), head(6))
    )
    assert sizes(graph) == {"2.0": 6}
    assert "parametrization" in graph.protected["1"]


def test_16_weights_made_by_hooks_are_refused_or_protected():
    model = nn.Sequential(nn.utils.weight_norm(nn.Conv2d(3, 8, 3)), nn.Conv2d(8, 8, 3), head(8))
    model(torch.zeros(1, 3, 8, 8))
    with pytest.raises(UnsupportedModelError, match="parametrizations"):
        trace_channels(model, torch.zeros(1, 3, 8, 8))


class DivisibleByFour(nn.Module):
    def forward(self, x):
        if x.shape[1] % 4:
            raise ValueError("channels must be a multiple of 4")
        return x


def test_17_divisors_are_found_and_kept():
    graph, slim = checked(
        lambda: nn.Sequential(conv_bn(3, 32), DivisibleByFour(), conv_bn(32, 6), head(6))
    )
    assert [(g.name, g.multiple) for g in graph.groups] == [("0.0", 4), ("2.0", 1)]
    assert slim[0][0].out_channels == 4
    keep = np.ones(graph.num_channels, dtype=bool)
    keep[:2] = False
    with pytest.raises(PlanError, match="multiple of 4"):
        ChannelPlan(graph, keep)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_18_inside_no_grad_and_inference_mode(context):
    def make():
        return nn.Sequential(conv_bn(3, 8), nn.ReLU(), weight_norm(nn.Conv2d(8, 8, 3)), head(8))

    with context():
        graph, slim = checked(make)
        assert sizes(graph) == {"0.0": 8, "2": 8}
    assert next(slim.parameters()).requires_grad


def test_19_frozen_batch_norm():
    graph, slim = checked(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3),
            FrozenBatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 6, 3),
            FrozenBatchNorm2d(6),
            head(6),
        )
    )
    assert sizes(graph) == {"0": 8, "3": 6}
    assert len(slim[1].running_var) == slim[0].out_channels


def test_29_a_deep_dense_net_in_seconds():
    model = torchvision.models.densenet121(num_classes=4).eval()
    graph = trace_channels(model, torch.zeros(1, 3, 64, 64))
    assert list(graph.protected) == ["classifier"]
    assert len(graph.groups) == 120


Pair = namedtuple("Pair", "one two")


@dataclass
class Answer:
    scores: torch.Tensor
    extra: dict


@pytest.mark.parametrize(
    "inputs",
    [
        (torch.zeros(1, 3, 8, 8), [torch.zeros(1, 3, 8, 8)], {"scale": 2.0}),
        {"x": torch.zeros(1, 3, 8, 8), "more": [torch.zeros(1, 3, 8, 8)], "options": {"scale": 3}},
    ],
    ids=["positional", "keywords"],
)
@pytest.mark.parametrize(
    "answer",
    [lambda y: {"a": [y, y.sum()]}, lambda y: Pair(y, None), lambda y: Answer(y, {"n": y + 1})],
    ids=["dict", "namedtuple", "dataclass"],
)
def test_30_any_inputs_and_outputs(inputs, answer):
    def wiring(net, x, more, options):
        return answer(net.head(net.left(x) + net.right(more[0]) * options["scale"]))

    model = seeded(lambda: Net(wiring, left=conv_bn(3, 8), right=conv_bn(3, 8), head=head(8)))
    graph = trace_channels(model, inputs)
    slim = shrink(model, ChannelPlan.random(graph))
    assert sizes(graph) == {"left.0": 8}
    assert graph.output_layers == ("head.2",)
    assert slim.right[0].out_channels == 4


def test_31_a_buffer_filled_by_slices():
    def wiring(net, x):
        a, b = net.a(x), net.b(x)
        out = torch.zeros(len(x), a.shape[1] + b.shape[1], *x.shape[2:], dtype=x.dtype)
        out[:, : a.shape[1]], out[:, a.shape[1] :] = a, b
        return net.head(net.last(out))

    def fixed(net, x):
        out = torch.zeros(len(x), 10, *x.shape[2:], dtype=x.dtype)
        out[:, :6], out[:, 6:] = net.a(x), net.b(x)
        return net.head(net.last(out))

    parts = {"a": (3, 6), "b": (3, 4), "last": (10, 8)}

    def net(how):
        return Net(how, **{n: conv_bn(*w) for n, w in parts.items()}, head=head(8))

    graph, _ = checked(lambda: net(wiring))
    assert sizes(graph) == {"a.0": 6, "b.0": 4, "last.0": 8}
    assert graph.layers["last.0"].inputs[6] == graph.groups[1].start
    graph, _ = checked(lambda: net(fixed))
    assert graph.rewired.keys() == {"a.0", "b.0"}
    graph, _ = checked(lambda: net(fixed), rewire=False)
    assert sizes(graph) == {"last.0": 8}
    assert graph.protected["a.0"]


def test_32_flatten_behind_concat():
    def wiring(net, x):
        return net.last(torch.cat([net.a(x), net.b(x)], 1).flatten(1))

    graph, _ = checked(
        lambda: Net(wiring, a=conv_bn(3, 4), b=conv_bn(3, 6), last=nn.Linear(160, 4)),
        shapes=((3, 4, 4),),
    )
    assert graph.layers["last"].inputs.tolist() == np.repeat(range(10), 16).tolist()


class Mlp(nn.Module):
    """A ConvNeXt block, with a layer scale."""

    def __init__(self, width):
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width, 1, 1))

    def forward(self, x):
        y = self.norm(self.spatial(x).permute(0, 2, 3, 1))
        return x + self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2) * self.scale


def test_33_channels_last_layer_norm_with_layer_scale():
    graph, slim = checked(lambda: nn.Sequential(nn.Conv2d(3, 8, 2, 2), Mlp(8), Mlp(8), head(8)))
    assert sizes(graph) == {"0": 8, "1.up": 32, "2.up": 32}
    assert graph.layers["1.norm"].kind == "norm"
    assert [tensor.name for tensor in graph.tensors] == ["1.scale", "2.scale"]
    assert slim[1].norm.normalized_shape == (slim[0].out_channels,)
    assert slim[1].scale.shape == (slim[0].out_channels, 1, 1)


def test_33_layer_norm_over_everything():
    graph, slim = checked(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.LayerNorm([8, 6, 6]), nn.Conv2d(8, 6, 1), head(6)
        ),
        shapes=((3, 8, 8),),
    )
    assert sizes(graph) == {"0": 8, "2": 6}
    assert slim[1].weight.shape == (slim[0].out_channels, 6, 6)


class OwnNorm(nn.Module):
    """Layer norm over axis 1, written by hand."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = 1e-3

    def forward(self, x):
        mean, var = x.mean(1, keepdim=True), x.var(1, keepdim=True, unbiased=False)
        y = (x - mean) / torch.sqrt(var + self.eps)
        return self.weight[:, None, None] * y + self.bias[:, None, None]


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (lambda: OwnNorm(12), "norm"),
        (lambda: nn.GroupNorm(3, 12), "norm"),
        (lambda: nn.GroupNorm(1, 12), "norm"),
        (lambda: nn.GroupNorm(12, 12), "channelwise"),
        (lambda: nn.InstanceNorm2d(12, affine=True), "channelwise"),
    ],
    ids=["own", "group", "one_group", "group_a_channel", "instance"],
)
def test_33_other_norms(norm, kind):
    graph, _ = checked(
        lambda: nn.Sequential(nn.Conv2d(3, 12, 3), norm(), nn.Conv2d(12, 6, 1), head(6))
    )
    assert sizes(graph) == {"0": 12, "2": 6}
    assert graph.layers["1"].kind == kind


def test_34_split_sizes_in_the_code():
    def wiring(net, x):
        a, b = torch.split(net.first(x), [4, 12], 1)
        return net.head(torch.cat([net.a(a), net.b(b)], 1))

    def make():
        return Net(wiring, first=conv_bn(3, 16), a=conv_bn(4, 8), b=conv_bn(12, 8), head=head(16))

    graph, _ = checked(make)
    assert "apart at fixed places" in graph.rewired["first.0"]
    graph, _ = checked(make, rewire=False)
    assert sizes(graph) == {"a.0": 8, "b.0": 8}
    assert "apart at fixed places" in graph.protected["first.0"]


def test_34_equal_split_sizes_in_the_code():
    def wiring(net, x):
        a, b = torch.split(net.first(x), [8, 8], 1)
        return net.head(torch.cat([net.a(a), net.b(b)], 1))

    def make():
        return Net(wiring, first=conv_bn(3, 16), a=conv_bn(8, 8), b=conv_bn(8, 8), head=head(16))

    graph, _ = checked(make)
    assert graph.rewired.keys() == {"first.0"}
    graph, _ = checked(make, rewire=False)
    assert sizes(graph) == {"a.0": 8, "b.0": 8}
    assert graph.protected["first.0"]


def test_35_selective_kernel():
    def wiring(net, x):
        both = torch.stack([net.a(x), net.b(x)], 1)
        z = net.squeeze(both.sum(1).mean((2, 3))).relu()
        weight = torch.stack([net.wa(z), net.wb(z)], 1).softmax(1)
        return net.head(net.last((both * weight[..., None, None]).sum(1)))

    def make():
        return Net(
            wiring,
            a=conv_bn(3, 8),
            b=conv_bn(3, 8, 5),
            squeeze=nn.Linear(8, 4),
            wa=nn.Linear(4, 8),
            wb=nn.Linear(4, 8),
            last=conv_bn(8, 6),
            head=head(6),
        )

    graph, slim = checked(make)
    assert sizes(graph) == {"a.0": 8, "squeeze": 4, "last.0": 6}
    assert graph.groups[0].writers == ("a.0", "b.0", "wa", "wb")
    assert slim.wb.out_features == slim.a[0].out_channels


class Centred(nn.Module):
    def __init__(self, width, shape):
        super().__init__()
        self.inner = conv_bn(width, width)
        self.register_buffer("mu", torch.arange(float(width)).view(shape))

    def forward(self, x):
        return self.inner(x) - self.mu


def test_36_a_buffer_along_the_channels():
    graph, _ = checked(
        lambda: nn.Sequential(conv_bn(3, 8), Centred(8, (1, 8, 1, 1)), conv_bn(8, 6), head(6))
    )
    assert sizes(graph) == {"0.0": 8, "1.inner.0": 8, "2.0": 6}
    (tensor,) = graph.tensors
    assert (tensor.name, tensor.axis) == ("1.mu", 1)
    plan = ChannelPlan.random(graph, 0.5, 9)
    model = seeded(
        lambda: nn.Sequential(conv_bn(3, 8), Centred(8, (1, 8, 1, 1)), conv_bn(8, 6), head(6))
    )
    expected = np.flatnonzero(plan.keep[graph.groups[1].channels]).tolist()
    assert shrink(model, plan)[1].mu.flatten().tolist() == expected


class Blur(nn.Module):
    """A fixed filter, with its number of channels beside it."""

    def __init__(self, channels):
        super().__init__()
        self.channels = channels
        self.register_buffer("filter", torch.rand(channels, 1, 3, 3))

    def forward(self, x):
        return F.conv2d(x, self.filter, stride=2, padding=1, groups=self.channels)


def test_36_a_fixed_blur_filter():
    graph, slim = checked(lambda: nn.Sequential(conv_bn(3, 8), Blur(8), conv_bn(8, 6), head(6)))
    assert sizes(graph) == {"0.0": 8, "2.0": 6}
    assert slim[1].channels == len(slim[1].filter) == slim[0][0].out_channels


def test_a_gain_beside_the_weight():
    class Gained(nn.Conv2d):
        def __init__(self, *args):
            super().__init__(*args)
            self.gain = nn.Parameter(torch.ones(self.out_channels, 1, 1, 1))

        def forward(self, x):
            return F.conv2d(x, self.weight * self.gain, self.bias)

    graph, slim = checked(
        lambda: nn.Sequential(Gained(3, 8, 3), nn.ReLU(), Gained(8, 6, 3), head(6))
    )
    assert sizes(graph) == {"0": 8, "2": 6}
    assert len(slim[0].gain) == slim[0].out_channels


def test_a_weight_used_as_a_whole_keeps_its_inputs():
    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            w = (w - w.mean((1, 2, 3), keepdim=True)) / w.std((1, 2, 3), keepdim=True)
            return F.conv2d(x, w, self.bias)

    def make():
        return nn.Sequential(conv_bn(3, 8), Standardised(8, 8, 3), conv_bn(8, 6), head(6))

    graph, slim = checked(make)
    assert sizes(graph) == {"0.0": 8, "1": 8, "2.0": 6}
    assert slim[1].in_channels == 8
    assert slim[1].out_channels < 8
    graph, _ = checked(make, rewire=False)
    assert sizes(graph) == {"1": 8, "2.0": 6}
    assert "could not be proved" in graph.protected["0.0"]


def test_auxiliary_heads_are_cut_with_what_they_read():
    model = torchvision.models.googlenet(num_classes=4, aux_logits=True, init_weights=False)
    graph = trace_channels(model, torch.zeros(1, 3, 64, 64))
    slim = shrink(model, ChannelPlan.random(graph))
    assert graph.layers["aux1.conv.conv"].inputs.min() > KEPT
    assert set(graph.output_layers) == {"fc", "aux1.fc2", "aux2.fc2"}
    assert graph.spatial["aux1.fc1"] == 0
    assert model.training
    out = slim.train()(torch.randn(2, 3, 64, 64))
    assert [len(y) for y in out] == [2, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(dtype):
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 8), head(8)))
    model = model.to(dtype)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    slim = shrink(model, ChannelPlan.random(graph))
    assert graph.num_channels == 16
    assert {p.dtype for p in slim.parameters()} == {dtype}


def test_layout_attributes_hooks_and_modes_survive():
    model = seeded(lambda: nn.Sequential(conv_bn(3, 8), nn.ReLU(), conv_bn(8, 8), head(8)))
    model = model.to(memory_format=torch.channels_last)
    model[2][0].weight.tag = "mine"
    model[0].train()
    seen = []
    model[2].register_forward_hook(lambda *_: seen.append(1))
    slim = shrink(model, ChannelPlan.random(trace_channels(model, torch.zeros(1, 3, 8, 8))))
    assert slim[2][0].weight.is_contiguous(memory_format=torch.channels_last)
    assert slim[2][0].weight.tag == "mine"
    assert [m.training for m in slim.modules()] == [m.training for m in model.modules()]
    seen.clear()
    slim(torch.zeros(2, 3, 8, 8))
    assert seen == [1]


def test_errors_name_the_model_and_the_remedy():
    x = torch.zeros(1, 3, 8, 8)
    with pytest.raises(UnsupportedModelError, match="no convolution and no linear layer"):
        trace_channels(nn.Sequential(nn.ReLU()), x)
    with pytest.raises(UnsupportedModelError, match="TorchScript"):
        trace_channels(torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3))), x)
    with pytest.raises(UnsupportedModelError, match=r"Sequential fails on .*\(1, 3, 8, 8\)"):
        trace_channels(nn.Sequential(nn.Linear(5, 5)), x)
