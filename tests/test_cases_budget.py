"""Budgets and widths that pruning tools get wrong: each is met, or refused with its reason.

The numbers are those of the collection of public bug reports that the nets were made from.
"""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import CASES, conv_bn, head, noise, seeded
from torch import nn

from stamppruner import Budget, ChannelPlan, check_equivalence, trace_channels
from stamppruner.budget import Chooser
from stamppruner.errors import BudgetError

HAIR = 1 + 1e-9


def wide() -> nn.Module:
    """Groups of 64, 24 and 100 channels, and one of 4 blocks of 32."""
    return nn.Sequential(
        conv_bn(3, 64, 1), nn.ReLU(), conv_bn(64, 24, 1), nn.ReLU(), conv_bn(24, 100, 1), nn.ReLU(),
        conv_bn(100, 128, 1), nn.ReLU(), conv_bn(128, 128, 1, groups=4), nn.ReLU(), head(128),
    )  # fmt: skip


class NeedsFours(nn.Module):
    def forward(self, x):
        if x.shape[1] % 4:
            raise ValueError("channels must be a multiple of 4")
        return x


def fours() -> nn.Module:
    return nn.Sequential(conv_bn(3, 96, 1), NeedsFours(), conv_bn(96, 70, 1), head(70))


def chooser_of(make, protect=(), **options):
    model = seeded(make)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8), protect=protect)
    return Chooser(model, graph, **options)


def scores_of(graph, seed=0):
    return np.random.default_rng(seed).random(graph.num_channels)


def block_counts(plan):
    """Channels kept in each block, a list a group."""
    return [plan.keep[g.channels].reshape(g.blocks, -1).sum(1).tolist() for g in plan.graph.groups]


# 20: never below one channel, or the divisor of the layer


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_20_one_channel_a_block_is_the_least(case):
    model = case.model(torch.float32)
    graph = trace_channels(model, noise(1, *case.shapes[0]))
    chooser = Chooser(model, graph, floor=0.0)
    zeros = np.zeros(graph.num_channels)
    tiny = Budget(macs=chooser.least("macs") / chooser.costs["macs"].full * HAIR)
    for plan in (
        ChannelPlan.random(graph, 1e-9),
        chooser.threshold(zeros, 1.0),
        chooser.choose(zeros, tiny),
    ):
        for group, counts in zip(graph.groups, block_counts(plan), strict=True):
            assert counts == [1] * group.blocks
        assert check_equivalence(model, plan)
    with pytest.raises(BudgetError, match="least reachable"):
        chooser.choose(zeros, Budget(macs=1e-9))


def test_20_the_divisor_of_a_layer_is_the_least():
    chooser = chooser_of(fours, floor=0.0)
    graph, zeros = chooser.graph, np.zeros(166)
    assert graph.groups[0].multiple == 4
    for plan in (ChannelPlan.random(graph, 1e-9), chooser.threshold(zeros, 1.0)):
        assert block_counts(plan) == [[4], [1]]


# 21: bounds hold after rounding, and more budget is never a cheaper net


CHOOSERS = {
    (make.__name__, round_to): chooser_of(make, floor=0.0, round_to=round_to)
    for make in (wide, fours)
    for round_to in (1, 8, 16)
}


@pytest.mark.parametrize("key", CHOOSERS, ids=str)
@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=5), st.integers(0, 3), st.sampled_from("mp"))
def test_21_bounds_hold_and_cost_rises_with_the_budget(key, places, seed, which):
    chooser = CHOOSERS[key]
    name = {"m": "macs", "p": "params"}[which]
    cost, scores = chooser.costs[name], scores_of(chooser.graph, seed)
    least = chooser.least(name) / cost.full * HAIR
    shares = sorted(least + (1 - least) * place for place in places)
    found = []
    for share in shares:
        plan = chooser.choose(scores, Budget(**{name: share}))
        found.append(float(cost(chooser.widths(plan))))
        assert found[-1] <= share * cost.full
    assert found == sorted(found)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.03, 1), st.floats(0.03, 1), st.sampled_from([1, 8, 16]))
def test_21_two_bounds_hold_at_once(macs, params, round_to):
    chooser = CHOOSERS["wide", round_to]
    budget = Budget(macs=macs, params=params)
    widths = chooser.widths(chooser.choose(scores_of(chooser.graph), budget))
    for name, bound in budget.bounds().items():
        assert float(chooser.costs[name](widths)) <= bound * chooser.costs[name].full


# 22: what cannot be met is refused, with the least reachable cost and what holds it


def test_22_the_error_states_what_is_reachable_and_what_holds_it():
    chooser = chooser_of(wide, protect=["2.0", "6.0"], floor=0.1)
    cost = chooser.costs["macs"]
    least = chooser.least("macs")
    with pytest.raises(BudgetError) as caught:
        chooser.choose(scores_of(chooser.graph), Budget(macs=0.1))
    message = str(caught.value)
    assert f"least reachable is {least:.4g} MACs ({least / cost.full:.2%}" in message
    kept = torch.tensor([7.0, 10.0, 16.0])  # ceil(0.1 * size), 4 a block of 32
    assert [g.size for g in chooser.graph.groups] == [64, 100, 128]
    layer = list(chooser.graph.layers).index("6.0")
    share = float(cost.per_layer(kept.double())[layer]) / float(cost(kept))
    assert f"6.0 {share:.1%} (left whole: {chooser.graph.protected['6.0']}" in message
    assert "4.0 at its floor of 10 of 100 channels" in message
    shown = [float(x) for x in re.findall(r" ([\d.]+)% \((?:left whole|\S+ at its)", message)]
    assert len(shown) == 4
    assert shown == sorted(shown, reverse=True)
    reachable = chooser.choose(scores_of(chooser.graph), Budget(macs=least / cost.full * HAIR))
    assert float(cost(chooser.widths(reachable))) == least


def test_22_only_the_bound_that_is_missed_is_explained():
    chooser = chooser_of(wide, protect=["6.0"])
    with pytest.raises(BudgetError, match=r"What holds it: parameters: ") as caught:
        chooser.choose(scores_of(chooser.graph), Budget(macs=0.9, params=0.05))
    assert "MACs: " not in str(caught.value)


def test_22_absolute_bounds_below_the_least_are_refused_too():
    chooser = chooser_of(wide)
    with pytest.raises(BudgetError, match="least reachable"):
        chooser.choose(scores_of(chooser.graph), Budget(params=20))
