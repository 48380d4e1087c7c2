"""The proof protects what cannot be cut, says why, and nothing else."""

import pytest
import torch
import torch.nn.functional as F
from nets import ChannelsFirstNorm, Net, conv_bn, head, seeded
from torch import nn

from stamppruner import ChannelPlan, check_equivalence, proof, rules, trace_channels
from stamppruner.comparison import compare


def traced(wiring, **layers):
    model = seeded(lambda: Net(wiring, **layers))
    return model, trace_channels(model, torch.zeros(1, 3, 8, 8), rewire=False)


def sizes(graph):
    return {group.name: group.size for group in graph.groups}


FUNCTIONS = {
    "softmax": lambda x: x.softmax(1),
    "normalize": lambda x: F.normalize(x, dim=1),
    "response": lambda x: F.local_response_norm(x, 3),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "sorted": lambda x: x.sort(1).values,
    "width": lambda x: x * x.shape[1],
    "fixed view": lambda x: x.view(-1, 8, *x.shape[2:]) + 1,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_the_code_mixes_or_fixes_is_protected_and_the_rest_is_not(name):
    def wiring(net, x):
        return net.head(net.last(FUNCTIONS[name](net.mixed(net.first(x).relu()))))

    model, graph = traced(
        wiring, first=conv_bn(3, 6), mixed=conv_bn(6, 8), last=conv_bn(8, 6), head=head(6)
    )
    assert sizes(graph) == {"first.0": 6, "last.0": 6}
    assert graph.protected["mixed.0"]
    assert check_equivalence(model, ChannelPlan.random(graph))


@pytest.mark.parametrize("multiple", [2, 3, 4, 8])
def test_multiples_that_the_code_needs(multiple):
    """A width that the code divides by three is not among those tried, and stays."""

    def wiring(net, x):
        x = net.first(x)
        assert x.shape[1] % multiple == 0
        return net.head(net.last(x))

    model, graph = traced(wiring, first=conv_bn(3, 24), last=conv_bn(24, 6), head=head(6))
    found = {group.name: group.multiple for group in graph.groups}
    if multiple == 3:
        assert found == {"last.0": 1}
    else:
        assert found == {"first.0": multiple, "last.0": 1}
    assert check_equivalence(model, ChannelPlan.random(graph, 0.4))


def test_equal_weights_do_not_hide_a_wrong_order():
    """In a net of constants every permutation looks right; the proof runs on random ones."""

    def wiring(net, x):
        return net.head(net.last(net.first(x).sort(1).values))

    model = Net(wiring, first=nn.Conv2d(3, 8, 1), last=nn.Conv2d(8, 6, 1), head=head(6)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    assert "first" in graph.protected


def test_zero_branches_are_proved_too():
    def wiring(net, x):
        x = net.first(x)
        return net.head(net.last(x + net.branch(x).sort(1).values))

    model = seeded(
        lambda: Net(
            wiring, first=conv_bn(3, 8), branch=conv_bn(8, 8), last=conv_bn(8, 6), head=head(6)
        )
    )
    nn.init.zeros_(model.branch[1].weight)
    nn.init.zeros_(model.branch[1].bias)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    assert {"first.0", "branch.0"} <= graph.protected.keys()


def test_without_proof_what_is_mixed_may_be_cut_and_the_check_notices():
    def wiring(net, x):
        x = net.first(x)
        return net.head(net.last(x * x.shape[1]))

    model = seeded(lambda: Net(wiring, first=conv_bn(3, 8), last=conv_bn(8, 6), head=head(6)))
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8), certify=False)
    assert "first.0" in sizes(graph)
    assert not check_equivalence(model, ChannelPlan.random(graph))


@pytest.mark.parametrize("width", range(6, 30, 2))
def test_equal_patterns_do_not_hide_that_halves_are_interleaved(width, monkeypatch):
    """Without the rule for shuffles, the proof alone must find that the halves need one pattern."""
    monkeypatch.setattr(rules, "interleaved", lambda *_: ())

    def wiring(net, x):
        return net.head(net.last(F.channel_shuffle(net.first(x).relu(), 2)))

    model, graph = traced(wiring, first=conv_bn(3, width), last=conv_bn(width, 6), head=head(6))
    assert all(check_equivalence(model, ChannelPlan.random(graph, 0.5, s)) for s in range(10))


class Fixed(nn.Module):
    """A norm, for which nothing can be rewired, and a width that the code may fix behind it."""

    def __init__(self, fixed):
        super().__init__()
        self.inner, self.norm, self.last = conv_bn(6, 8), ChannelsFirstNorm(8), conv_bn(8, 6)
        self.fixed = fixed

    def forward(self, x):
        x = self.norm(self.inner(x))
        return self.last(x.view(-1, 8, *x.shape[2:]) if self.fixed else x)


def protected_blocks(fixed, monkeypatch):
    """Which of some blocks are protected, and how many comparisons it took to find out."""
    made = []
    monkeypatch.setattr(proof, "compare", lambda *a, **k: made.append(1) or compare(*a, **k))
    blocks = nn.Sequential(*map(Fixed, fixed))
    model = seeded(
        lambda: Net(
            lambda net, x: net.head(net.last(net.blocks(net.first(x)))),
            first=conv_bn(3, 6), blocks=blocks, last=conv_bn(6, 6), head=head(6),
        )
    )  # fmt: skip
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    assert check_equivalence(model, ChannelPlan.random(graph))
    return [f"blocks.{b}.inner.0" in graph.protected for b in range(len(fixed))], len(made)


def test_blocks_that_fail_alike_are_protected_at_once(monkeypatch):
    few, fast = protected_blocks([True] * 3, monkeypatch)
    many, slow = protected_blocks([True] * 6, monkeypatch)
    assert all(few + many)
    assert fast == slow


def test_blocks_that_do_not_fail_alike_are_not_protected(monkeypatch):
    fixed = [True, False, False, True]
    assert protected_blocks(fixed, monkeypatch)[0] == fixed


def test_a_multiple_is_not_taken_for_what_depends_on_which_channels_stay():
    """Writing into fixed places goes wrong unless the channels before them all stay."""

    def wiring(net, x):
        x = net.first(x)
        y = net.mixed(x)
        y[:, 2:5] += x[:, :3]
        y[:, 0].mul_(2)
        return net.head(net.last(y))

    model = seeded(
        lambda: Net(
            wiring, first=conv_bn(3, 8), mixed=conv_bn(8, 8), last=conv_bn(8, 6), head=head(6)
        )
    )
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    assert {group.multiple for group in graph.groups} == {1}
    assert all(check_equivalence(model, ChannelPlan.random(graph, 0.5, s)) for s in range(10))


NORMS = {
    "instance": nn.InstanceNorm2d,
    "instance, affine": lambda c: nn.InstanceNorm2d(c, affine=True),
    "group of each": lambda c: nn.GroupNorm(c, c),
    "groups of two": lambda c: nn.GroupNorm(c // 2, c),
}


@pytest.mark.parametrize("name", NORMS)
def test_sums_that_cancel_are_no_difference(name):
    """Means of normalised places are zero but for rounding, which is not the same in both."""

    def wiring(net, x):
        return net.head(net.norm(net.last(net.first(x).relu())).mean((2, 3)))

    model, graph = traced(
        wiring,
        first=conv_bn(3, 8),
        last=nn.Conv2d(8, 8, 3),
        norm=NORMS[name](8),
        head=nn.Linear(8, 4),
    )
    assert sizes(graph) == {"first.0": 8, "last": 8}
    with torch.no_grad():
        if model.norm.weight is not None:
            model.norm.weight.fill_(1)
            model.norm.bias.zero_()
    for dtype in (torch.float32, torch.float64):
        plans = [ChannelPlan.random(graph, keep, s) for keep in (0.1, 0.5) for s in range(5)]
        verdicts = [check_equivalence(model.to(dtype), plan) for plan in plans]
        assert all(verdicts), [str(verdict) for verdict in verdicts]
