"""Tracing leaves no trace on the model, takes inputs of any structure, and says what it refuses."""

import collections
import copy

import pytest
import torch
from nets import CASES, Net, conv_bn, difference, head, noise, plain, residual, seeded
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from stamppruner import (
    ChannelPlan,
    check_equivalence,
    mask,
    progress,
    shrink,
    trace,
    trace_channels,
)
from stamppruner.channels import KEPT
from stamppruner.errors import ConfigError, DataError, UnsupportedModelError


def fingerprint(model):
    return (
        {name: (value.data_ptr(), value.clone()) for name, value in model.state_dict().items()},
        [sorted(vars(module)) for module in model.modules()],
        [module.training for module in model.modules()],
        [len(module._forward_hooks) for module in model.modules()],
        [len(module._forward_pre_hooks) for module in model.modules()],
        [(p.requires_grad, p.grad is None) for p in model.parameters()],
        torch.get_rng_state(),
    )


def same(before, after):
    for name, (pointer, value) in before[0].items():
        assert after[0][name][0] == pointer, name
        assert torch.equal(after[0][name][1], value), name
    assert before[1:-1] == after[1:-1]
    assert torch.equal(before[-1], after[-1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tracing_and_cutting_leave_no_trace(case):
    model = case.model(torch.float32)
    model.train()
    next(model.children()).eval()
    next(model.parameters()).requires_grad_(False)
    model.register_forward_hook(lambda *_: None)
    before = fingerprint(model)
    graph = trace_channels(model, noise(1, *case.shapes[0]))
    plan = ChannelPlan.random(graph)
    slim = shrink(model, plan)
    check_equivalence(model, plan)
    same(before, fingerprint(model))
    assert [m.training for m in slim.modules()] == [m.training for m in model.modules()]
    for (name, a), (_, b) in zip(model.named_parameters(), slim.named_parameters(), strict=True):
        assert a.requires_grad == b.requires_grad, name


def test_no_trace_after_a_failing_forward():
    def wiring(net, x):
        raise RuntimeError("no such luck")

    model = Net(wiring, a=conv_bn(3, 8))
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match=r"\(1, 3, 8, 8\).*no such luck"):
        trace_channels(model, torch.zeros(1, 3, 8, 8))
    same(before, fingerprint(model))


def test_interrupts_are_not_swallowed():
    def wiring(net, x):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trace_channels(Net(wiring, a=conv_bn(3, 8)), torch.zeros(1, 3, 8, 8))


def test_a_model_without_layers_is_refused():
    with pytest.raises(UnsupportedModelError, match="nothing to prune"):
        trace_channels(nn.Sequential(nn.ReLU(), nn.BatchNorm2d(3)), torch.zeros(1, 3, 8, 8))


def test_a_scripted_model_is_refused():
    scripted = torch.jit.trace(seeded(plain), torch.zeros(1, 3, 8, 8))
    with pytest.raises(UnsupportedModelError, match="TorchScript"):
        trace_channels(scripted, torch.zeros(1, 3, 8, 8))


def jit_traced(module):
    return torch.jit.trace(module, torch.zeros(1, 8, 6, 6))


@pytest.mark.parametrize("compiled", [torch.jit.script, jit_traced])
def test_a_scripted_part_is_named(compiled):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), compiled(nn.Conv2d(8, 8, 3)), nn.Conv2d(8, 4, 3))
    with pytest.raises(UnsupportedModelError, match="'1' is a TorchScript module"):
        trace_channels(model, torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize("kind", ["buffer", "parameter"])
def test_sparse_values_are_named(kind):
    model = seeded(plain)
    sparse = torch.eye(8).to_sparse()
    if kind == "buffer":
        model[0].register_buffer("graph", sparse)
    else:
        model[0].graph = nn.Parameter(sparse)
    with pytest.raises(UnsupportedModelError, match=r"'0\.graph' is a sparse_coo tensor.*to_dense"):
        trace_channels(model, torch.zeros(1, 3, 8, 8))


class Same(nn.Sequential):
    """Its copy is itself."""

    def __deepcopy__(self, memo):
        return self


class Alike(nn.Sequential):
    """Its copy is another module of the same layers."""

    def __deepcopy__(self, memo):
        return nn.Sequential(*self)


class Buffers(nn.BatchNorm2d):
    """Its copy has the same buffers."""

    def __deepcopy__(self, memo):
        made = nn.BatchNorm2d(self.num_features)
        made.running_var = self.running_var
        return made


def buffers(inner):
    return Buffers(inner.num_features)


@pytest.mark.parametrize("kind", [Same, Alike, buffers])
def test_a_part_whose_copy_shares_it_is_named_and_not_changed(kind):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), kind(nn.BatchNorm2d(8)), nn.Conv2d(8, 4, 3))
    before = fingerprint(model)
    with pytest.raises(UnsupportedModelError, match=r"'1.*' is not copied.*__deepcopy__"):
        trace_channels(model, torch.zeros(1, 3, 8, 8))
    same(before, fingerprint(model))


class Single(nn.ReLU):
    """There is one of it."""

    def __deepcopy__(self, memo):
        return self


def test_a_part_without_values_may_be_shared_by_copies():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Single(), nn.Conv2d(8, 4, 3)).train()
    assert len(trace_channels(model, torch.zeros(1, 3, 8, 8)).groups) == 1
    assert model[1].training


def test_a_model_that_cannot_be_copied_is_refused():
    model = seeded(plain)
    model.kept = model[0][0].weight * 2  # not a leaf
    with pytest.raises(UnsupportedModelError, match="cannot be copied"):
        trace_channels(model, torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize(
    "nothing", [(), {}, ("a", 3), torch.tensor(1.0), [torch.zeros(0, 3, 8, 8)]]
)
def test_inputs_without_a_sample_are_refused(nothing):
    with pytest.raises(DataError, match="no tensor with a batch axis"):
        trace_channels(seeded(plain), nothing)


@pytest.mark.parametrize("wrong", [None, 3, "image"])
def test_inputs_of_other_types_are_refused(wrong):
    with pytest.raises(DataError, match="pass a tensor, a tuple"):
        trace_channels(seeded(plain), wrong)


def test_no_groups_left_is_a_graph_with_reasons():
    graph = trace_channels(nn.Sequential(nn.Conv2d(3, 4, 3)), torch.zeros(1, 3, 8, 8))
    assert graph.groups == ()
    assert graph.protected == {"0": "writes the model's output"}
    assert check_equivalence(
        nn.Sequential(nn.Conv2d(3, 4, 3)), ChannelPlan.full(graph), torch.zeros(1, 3, 8, 8)
    )


Out = collections.namedtuple("Out", "logits extra")


def structured(net, images, *, scale=1.0, more=None):
    x = net.stem(images["left"]) + net.other(images["right"][0])
    x = net.body(x.relu() * scale)
    return Out(net.head(x), {"features": [x.mean()], "note": more})


def test_inputs_and_outputs_of_any_structure():
    model = Net(
        structured, stem=conv_bn(3, 8), other=conv_bn(2, 8), body=conv_bn(8, 6), head=head(6)
    )
    image = {"left": noise(2, 3, 8, 8), "right": [noise(2, 2, 8, 8), "text"]}
    for inputs in ((image,), {"images": image, "scale": 0.5, "more": "x"}, [image]):
        graph = trace_channels(model.eval(), inputs)
        assert "stem.0" in {group.name for group in graph.groups}
        plan = ChannelPlan.random(graph)
        assert check_equivalence(model, plan)
        assert check_equivalence(model, plan, inputs)


def test_integer_inputs_keep_their_values():
    def wiring(net, x, rows):
        return net.head(net.last(net.stem(x)[torch.arange(len(x)), :] + 0 * rows.sum()))

    model = Net(wiring, stem=conv_bn(3, 8), last=conv_bn(8, 4), head=head(4)).eval()
    graph = trace_channels(model, (noise(2, 3, 8, 8), torch.tensor([1, 0])))
    assert check_equivalence(model, ChannelPlan.random(graph))


def test_float_and_half_models_keep_their_dtype():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        model = seeded(residual).to(dtype)
        graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
        slim = shrink(model, ChannelPlan.random(graph))
        assert {p.dtype for p in slim.parameters()} == {dtype}


def test_training_mode_is_not_used_for_tracing():
    def wiring(net, x):
        assert not net.training
        return net.head(net.b(net.a(x)))

    model = Net(wiring, a=conv_bn(3, 8), b=conv_bn(8, 6), head=head(6)).train()
    assert trace_channels(model, torch.zeros(1, 3, 8, 8)).groups
    assert model.training


def test_large_images_are_traced_at_a_small_size_with_the_same_result():
    small = trace_channels(seeded(residual), torch.zeros(1, 3, 48, 48))
    large = trace_channels(seeded(residual), torch.zeros(1, 3, 320, 320))
    assert small.groups == large.groups
    assert large.spatial["0.0"] == 320 * 320


def test_parametrized_layers():
    model = nn.Sequential(
        weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), weight_norm(nn.Conv2d(8, 6, 3)), head(6)
    ).eval()
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    assert {group.name for group in graph.groups} == {"0", "2"}
    plan = ChannelPlan.random(graph)
    assert shrink(model, plan)[0].weight.shape == (4, 3, 3, 3)


def test_a_deep_copy_has_the_same_graph():
    model = seeded(residual)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    assert check_equivalence(copy.deepcopy(model), ChannelPlan.random(graph))


def test_without_certificate_the_graph_is_the_same_on_an_ordinary_net():
    model = seeded(residual)
    x = torch.zeros(1, 3, 8, 8)
    assert trace_channels(model, x, certify=False).groups == trace_channels(model, x).groups


@pytest.mark.parametrize("pattern", ["nope", "0.[1", 3])
def test_a_pattern_that_protects_nothing_is_refused(pattern) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
    for which in ("protect", "protect_inputs"):
        with pytest.raises(ConfigError, match="matches no module"):
            trace_channels(net, torch.zeros(1, 3, 8, 8), **{which: [pattern]})


class Attention(nn.Module):
    """Single-head attention over the positions of a map."""

    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 8, stride=64)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, 5)

    def forward(self, x):
        q, k, v = self.qkv(self.stem(x).flatten(2).transpose(1, 2)).chunk(3, -1)
        return self.proj(F.scaled_dot_product_attention(q, k, v).mean(1))


def test_sizes_at_which_a_map_shrinks_to_one_token_are_not_probed():
    """With one token, attention does not read its queries and keys."""
    model = seeded(lambda: Attention(8))
    graph = trace_channels(model, torch.zeros(1, 3, 256, 256))
    qkv = graph.layers["qkv"].outputs
    assert (qkv[:16] == KEPT).all()
    plan = ChannelPlan.random(graph, 0.5)
    assert check_equivalence(model, plan)


def test_progress_counts_passes_where_the_output_is_a_terminal(monkeypatch):
    made = []

    def noted(**settings):
        made.append((settings, progress.bar(**settings)))
        return made[-1][1]

    monkeypatch.setattr(trace, "bar", noted)
    model = seeded(plain)
    trace_channels(model, noise(1, 3, 16, 16))
    trace_channels(model, noise(1, 3, 16, 16), progress=False)
    assert [settings["shown"] for settings, _ in made] == [True, False]
    assert all(settings["delay"] == 2.0 for settings, _ in made)
    assert all(bar.disable for _, bar in made)  # no terminal here


def test_a_layer_whose_weight_goes_to_a_function_is_whole_and_named():
    def wiring(net, x):
        x = F.conv2d(net.first(x).relu(), net.used.weight, net.used.bias, padding=1)
        return net.head(net.inner(x).relu() + x)

    def make():
        return Net(wiring, first=conv_bn(3, 8), used=nn.Conv2d(8, 6, 3, padding=1),
                   inner=nn.Sequential(conv_bn(6, 8), nn.ReLU(), conv_bn(8, 6)),
                   head=head(6))  # fmt: skip

    model = seeded(make).double()
    x = noise(2, 3, 8, 8)
    graph = trace_channels(model, x)
    assert "used" in graph.protected["first.0"]
    assert [group.name for group in graph.groups] == ["inner.0.0"]
    plan = ChannelPlan.random(graph)
    assert difference(mask(model, plan)(x), shrink(model, plan)(x)) < 1e-10


def test_a_layer_over_a_table_without_a_batch():
    """Swin V2 makes its position bias of a constant table."""

    def wiring(net, x):
        bias = net.up(net.down(net.table).relu())  # (1, 4, 4, 6)
        return net.head((net.body(x) + bias.permute(0, 3, 1, 2)).relu())

    def make():
        net = Net(wiring, body=conv_bn(3, 6), down=nn.Linear(2, 8), up=nn.Linear(8, 6),
                  head=head(6))  # fmt: skip
        net.register_buffer("table", torch.linspace(-1, 1, 32).view(1, 4, 4, 2))
        return net

    model = seeded(make).double()
    x = noise(2, 3, 4, 4)
    graph = trace_channels(model, x)
    assert [group.name for group in graph.groups] == ["down", "up"]  # body.0 with up
    plan = ChannelPlan.random(graph)
    assert difference(mask(model, plan)(x), shrink(model, plan)(x)) < 1e-10
