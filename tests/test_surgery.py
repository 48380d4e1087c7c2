"""Cutting: what the copy keeps of the original, and every kind of layer sliced by hand."""

import numpy as np
import pytest
import torch
from nets import CASES, difference, noise, plain, residual, seeded
from torch import nn

from stamppruner import ChannelPlan, trace_channels
from stamppruner.channels import ChannelGraph, ChannelGroup, LayerMap, TensorMap
from stamppruner.errors import PlanError
from stamppruner.surgery import cut, unsupported


def one_layer(module, inputs, outputs, keep, kind="mixing"):
    """Cut a single layer by maps that are given."""
    size = len(keep)
    graph = ChannelGraph(
        (ChannelGroup("layer", 0, size),),
        {"layer": LayerMap("layer", kind, np.array(inputs), np.array(outputs))},
    )
    holder = nn.Module()
    holder.layer = module
    return cut(holder, ChannelPlan(graph, np.array(keep, dtype=bool))).layer


FIXED = [-1] * 4


@pytest.mark.parametrize(
    ("layer", "axes"),
    [
        (nn.Conv1d(4, 4, 3), (0, 1)),
        (nn.Conv2d(4, 4, 3, bias=False), (0, 1)),
        (nn.Conv3d(4, 4, 2), (0, 1)),
        (nn.ConvTranspose1d(4, 4, 2), (1, 0)),
        (nn.ConvTranspose2d(4, 4, 2), (1, 0)),
        (nn.Linear(4, 4), (0, 1)),
    ],
    ids=lambda x: type(x).__name__,
)
def test_weights_are_sliced_along_both_axes(layer, axes):
    keep = [1, 0, 1, 0]
    out = one_layer(layer, FIXED, range(4), keep)
    into = one_layer(layer, range(4), FIXED, keep)
    index = torch.tensor([0, 2])
    assert torch.equal(out.weight, layer.weight.index_select(axes[0], index))
    assert torch.equal(into.weight, layer.weight.index_select(axes[1], index))
    if layer.bias is not None:
        assert torch.equal(out.bias, layer.bias[index])
        assert torch.equal(into.bias, layer.bias)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_grouped_weights_keep_a_pattern_of_their_own_in_every_block(kind):
    layer = kind(6, 4, 1, groups=2)
    keep = [1, 0, 1, 0, 1, 1]
    slim = one_layer(layer, range(6), FIXED, keep)
    x = noise(2, 6, 3, 3, dtype=torch.float32) * torch.tensor(keep).view(1, 6, 1, 1)
    assert (slim.in_channels, slim.groups) == (4, 2)
    kept = x[:, torch.tensor(keep, dtype=torch.bool)]
    assert difference(layer(x), slim(kept)) < 1e-6


@pytest.mark.parametrize("multiplier", [1, 3])
def test_depthwise_channels_take_their_group_along(multiplier):
    layer = nn.Conv2d(4, 4 * multiplier, 3, groups=4)
    outputs = np.repeat(range(4), multiplier)
    slim = one_layer(layer, range(4), outputs, [0, 1, 0, 1], "channelwise")
    assert (slim.in_channels, slim.out_channels, slim.groups) == (2, 2 * multiplier, 2)
    x = noise(1, 4, 5, 5, dtype=torch.float32)
    rows = torch.from_numpy(np.isin(outputs, [1, 3]))
    assert torch.equal(layer(x)[:, rows], slim(x[:, [1, 3]]))


@pytest.mark.parametrize(
    "module", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True), nn.PReLU(4)],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_channelwise_state_is_sliced(module):
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dim():
                tensor.copy_(torch.arange(4.0) + 1)
    slim = one_layer(module, range(4), range(4), [0, 1, 1, 0], "channelwise")
    for tensor in (*slim.parameters(), *slim.buffers()):
        assert tensor.dim() == 0 or tensor.tolist() == [2.0, 3.0]
    x = noise(2, 4, 3, 3, dtype=torch.float32)
    assert difference(module.eval()(x)[:, 1:3], slim.eval()(x[:, 1:3])) < 1e-6


def test_parameters_keep_all_that_the_user_set_on_them():
    model = seeded(plain).to(memory_format=torch.channels_last)
    model[2][0].weight.requires_grad_(False)
    model[2][0].weight.decay = 0.1
    model[2][1].weight.decay = 0.2
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    slim = cut(model.train(), ChannelPlan.random(graph))
    conv, norm = slim[2]
    assert not conv.weight.requires_grad
    assert conv.bias.requires_grad
    assert (conv.weight.decay, norm.weight.decay) == (0.1, 0.2)
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(module.training for module in slim.modules())


def test_hooks_and_attributes_travel_along():
    model = seeded(plain)
    model.note = {"a": 1}
    model[0].register_forward_hook(lambda *_: None)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    slim = cut(model, ChannelPlan.random(graph))
    assert slim.note == {"a": 1}
    assert slim.note is not model.note
    assert len(slim[0]._forward_hooks) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_slim_models_are_independent_and_train(case):
    model = case.model()
    graph = trace_channels(model, noise(1, *case.shapes[0]))
    slim = cut(model, ChannelPlan.random(graph)).train()
    mine = {p.data_ptr() for p in model.parameters()}
    assert not mine & {p.data_ptr() for p in slim.parameters()}
    out = slim(noise(4, *case.shapes[0]))
    sum(y.square().sum() for y in (out if isinstance(out, tuple) else (out,))).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in slim.parameters())
    again = cut(slim, ChannelPlan.full(trace_channels(slim, noise(1, *case.shapes[0]))))
    assert [p.shape for p in again.parameters()] == [p.shape for p in slim.parameters()]


def test_free_tensors_are_sliced():
    holder = nn.Module()
    holder.scale = nn.Parameter(torch.arange(12.0).reshape(1, 4, 3))
    graph = ChannelGraph(
        (ChannelGroup("scale", 0, 4),), {}, tensors=(TensorMap("scale", 1, np.arange(4)),)
    )
    slim = cut(holder, ChannelPlan(graph, np.array([True, False, False, True])))
    assert torch.equal(slim.scale, holder.scale[:, [0, 3]])
    assert isinstance(slim.scale, nn.Parameter)


def test_a_plan_of_another_model_changes_nothing():
    graph = trace_channels(seeded(plain), torch.zeros(1, 3, 8, 8))
    model = seeded(residual)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(PlanError, match=r"no layer '2\.0': the plan is of another model"):
        cut(model, ChannelPlan.random(graph))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    tensors = (TensorMap("gone", 0, np.arange(graph.num_channels)),)
    lost = ChannelGraph(graph.groups, {}, tensors=tensors)
    with pytest.raises(PlanError, match="'gone' is missing"):
        cut(model, ChannelPlan.random(lost))


def test_what_cannot_be_cut_is_named():
    named = {
        "plain": nn.Conv2d(3, 8, 1),
        "spectral": nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 1)),
        "weight_norm": nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 1)),
    }
    assert list(unsupported(named.items())) == ["spectral"]
