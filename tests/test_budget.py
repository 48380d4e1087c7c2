"""Budgets: met from below within a step, monotone, with floors, blocks and rounding respected."""

import itertools

import numpy as np
import pytest
import torch
from nets import CASES, depthwise, grouped, head, noise, plain, residual, seeded
from torch import nn

from stamppruner import Budget, ChannelPlan, trace_channels
from stamppruner.budget import Chooser
from stamppruner.channels import KEPT, ChannelGraph, ChannelGroup, LayerMap
from stamppruner.errors import BudgetError, PlanError

SHARES = (0.95, 0.8, 0.65, 0.5, 0.4, 0.35)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def traced(request):
    model = request.param.model(torch.float32)
    return model, trace_channels(model, noise(1, *request.param.shapes[0]))


def chooser_of(make, **settings):
    model = seeded(make)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    return Chooser(model, graph, **settings)


def scores(graph, seed=0):
    return np.random.default_rng(seed).random(graph.num_channels)


def least(chooser, name):
    """Cost of the floors alone, as a share."""
    cost = chooser.costs[name]
    plan = chooser.threshold(np.zeros(chooser.graph.num_channels), 1.0)
    return float(cost(chooser.widths(plan))) / cost.full


@pytest.mark.parametrize("bound", ["macs", "params"])
def test_met_from_below_within_one_step(traced, bound):
    """One more channel a block of any group that is not whole would not fit, for some group."""
    chooser = Chooser(*traced, floor=0.0)
    cost, graph = chooser.costs[bound], chooser.graph
    for share in SHARES:
        if share < least(chooser, bound):
            continue
        values = scores(graph)
        widths = chooser.widths(chooser.choose(values, Budget(**{bound: share})))
        assert float(cost(widths)) <= share * cost.full
        steps = torch.diag(torch.tensor([float(g.blocks) for g in graph.groups]))
        sizes = torch.tensor([float(g.size) for g in graph.groups])
        wider = [widths + step for step in steps.double() if (widths + step <= sizes).all()]
        assert any(float(cost(w)) > share * cost.full for w in wider)


def test_more_budget_keeps_a_superset(traced):
    chooser = Chooser(*traced)
    floor = least(chooser, "macs")
    kept = [
        chooser.choose(scores(chooser.graph), Budget(macs=share))
        for share in np.linspace(floor + 1e-9, 1, 12)
    ]
    for less, more in itertools.pairwise(kept):
        assert (more.keep | ~less.keep).all()
    assert kept[-1] == ChannelPlan.full(chooser.graph)


@pytest.mark.parametrize("round_to", [1, 2, 8, 16])
def test_cost_is_monotone_in_the_budget_also_when_rounded(traced, round_to):
    chooser = Chooser(*traced, round_to=round_to)
    cost = chooser.costs["params"]
    shares = np.linspace(least(chooser, "params") + 1e-9, 1, 15)
    found = [
        float(cost(chooser.widths(chooser.choose(scores(chooser.graph), Budget(params=share)))))
        for share in shares
    ]
    assert found == sorted(found)
    assert all(f <= share * cost.full for f, share in zip(found, shares, strict=True))


def test_both_bounds_hold():
    chooser = chooser_of(residual)
    budget = Budget(macs=0.6, params=0.4)
    widths = chooser.widths(chooser.choose(scores(chooser.graph), budget))
    for name, bound in budget.bounds().items():
        assert float(chooser.costs[name](widths)) <= bound * chooser.costs[name].full


def test_absolute_bounds():
    chooser = chooser_of(plain)
    cost = chooser.costs["params"]
    absolute = chooser.choose(scores(chooser.graph), Budget(params=int(cost.full / 2)))
    assert absolute == chooser.choose(scores(chooser.graph), Budget(params=0.5))


def test_the_best_are_kept():
    chooser = chooser_of(plain)
    values = scores(chooser.graph)
    plan = chooser.choose(values, Budget(macs=0.5))
    for group in chooser.graph.groups:
        kept = plan.keep[group.channels]
        inside = values[group.channels]
        if not kept.all():
            assert inside[kept].min() > inside[~kept].max()


def test_blocks_keep_equal_counts():
    chooser = chooser_of(grouped)
    plan = chooser.choose(scores(chooser.graph), Budget(macs=0.4))
    blocked = [group for group in chooser.graph.groups if group.blocks > 1]
    assert blocked
    for group in blocked:
        counts = plan.keep[group.channels].reshape(group.blocks, -1).sum(1)
        assert counts.min() == counts.max() < group.block_size


@pytest.mark.parametrize("floor", [0.0, 0.1, 0.5, 1.0])
def test_floors_hold_whatever_the_scores_say(floor):
    chooser = chooser_of(residual, floor=floor)
    values = np.zeros(chooser.graph.num_channels)
    values[chooser.graph.groups[0].channels] = 1
    share = min(1.0, least(chooser, "macs") * 1.05)
    plan = chooser.choose(values, Budget(macs=share))
    for group in chooser.graph.groups:
        assert plan.keep[group.channels].sum() >= max(1, np.ceil(floor * group.size))


def test_widths_are_rounded_where_groups_are_wide_enough():
    model = nn.Sequential(nn.Conv2d(3, 64, 1), nn.Conv2d(64, 24, 1), nn.Conv2d(24, 2, 1))
    graph = trace_channels(model, torch.zeros(1, 3, 4, 4))
    chooser = Chooser(model, graph, round_to=8)
    for share in (0.3, 0.5, 0.7):
        wide, narrow = chooser.widths(chooser.choose(scores(graph), Budget(macs=share))).tolist()
        assert wide % 8 == 0
        assert narrow > 0
    finer = [
        chooser.widths(chooser.choose(scores(graph), Budget(macs=share))).tolist()[1]
        for share in np.linspace(0.2, 1, 30)
    ]
    assert any(width % 8 for width in finer)


@pytest.mark.parametrize("make", [plain, grouped, depthwise])
def test_a_budget_below_the_floors_names_the_least_reachable(make):
    chooser = chooser_of(make)
    reachable, full = least(chooser, "macs"), chooser.costs["macs"].full
    with pytest.raises(BudgetError, match=rf"least reachable is {reachable * full:.4g} MACs"):
        chooser.choose(scores(chooser.graph), Budget(macs=reachable * 0.9))
    assert chooser.choose(scores(chooser.graph), Budget(macs=reachable * 1.001))


def test_threshold_keeps_what_reaches_it():
    chooser = chooser_of(plain, floor=0.0)
    values = scores(chooser.graph)
    kept = chooser.threshold(values, 0.5).keep
    assert (kept == (values >= 0.5)).all()
    assert chooser.threshold(values, 2.0).keep.sum() == len(chooser.graph.groups)


@pytest.mark.parametrize("bad", [np.zeros(3), np.full(26, np.nan), np.zeros((2, 13))])
def test_scores_must_be_finite_and_one_a_channel(bad):
    with pytest.raises(PlanError, match="finite numbers"):
        chooser_of(plain).choose(bad, Budget(macs=0.5))


@pytest.mark.parametrize("value", [0, -0.5, float("inf"), float("nan"), 10**400, True, "0.5"])
def test_bounds_must_be_positive_numbers(value):
    with pytest.raises(BudgetError, match="macs"):
        Budget(macs=value)


def test_a_budget_needs_a_bound():
    with pytest.raises(BudgetError, match="needs a bound"):
        Budget()


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2", 10**12])
@pytest.mark.parametrize("name", ["batch_size", "threads"])
def test_samples_and_threads_are_whole_numbers(name, value):
    with pytest.raises(BudgetError, match=rf"{name}=.*: pass a whole number from 1 to"):
        Budget(macs=0.5, **{name: value})


def test_amp_is_yes_or_no():
    with pytest.raises(BudgetError, match=r"amp='yes'\): pass True or False"):
        Budget(macs=0.5, amp="yes")


@pytest.mark.parametrize("settings", [{"floor": -0.1}, {"floor": 1.1}, {"round_to": 0}])
def test_settings_out_of_range(settings):
    with pytest.raises(BudgetError, match=r"floor=.* round_to="):
        chooser_of(plain, **settings)


def test_counts_are_multiples_where_the_code_asks_for_them() -> None:
    group = ChannelGroup("conv", 0, 24, blocks=2, multiple=3, writers=("conv",), readers=("out",))
    channels = np.arange(24)
    graph = ChannelGraph(
        groups=(group,),
        layers={
            "conv": LayerMap("conv", "mixing", np.full(3, KEPT), channels),
            "out": LayerMap("out", "mixing", channels, np.full(5, KEPT)),
        },
        spatial={"conv": 1, "out": 1},
    )
    model = nn.Module()
    model.conv, model.out = nn.Conv2d(3, 24, 1), nn.Conv2d(24, 5, 1)
    scores = np.random.default_rng(0).random(24)
    for round_to in (1, 2, 4):
        chooser = Chooser(model, graph, round_to=round_to)
        for share in (0.3, 0.5, 0.8, 1.0):
            plan = chooser.choose(scores, Budget(macs=share))
            counts = plan.keep.reshape(2, 12).sum(1)
            assert counts[0] == counts[1]
            assert counts[0] % 3 == 0


class DivisibleByFour(nn.Module):
    def forward(self, x):
        if x.shape[1] % 4:
            raise ValueError("channels must be a multiple of 4")
        return x


@pytest.mark.parametrize("round_to", [1, 3, 8])
def test_multiples_that_the_code_needs_hold(round_to):
    chooser = chooser_of(
        lambda: nn.Sequential(nn.Conv2d(3, 32, 1), DivisibleByFour(), nn.Conv2d(32, 6, 1), head(6)),
        round_to=round_to,
    )
    assert chooser.graph.groups[0].multiple == 4
    for share in (0.9, 0.5, 0.3):
        plan = chooser.choose(scores(chooser.graph), Budget(macs=share))
        assert int(plan.keep[chooser.graph.groups[0].channels].sum()) % 4 == 0


def test_what_hard_masks_cost_is_what_they_are_expected_to(traced):
    _, graph = traced
    chooser = Chooser(*traced)
    plan = ChannelPlan.random(graph, 0.5)
    keep, widths = torch.from_numpy(plan.keep.copy()), chooser.widths(plan)
    assert torch.equal(chooser.expected_widths(keep.float()), widths)
    share = float(chooser.costs["macs"](widths)) / chooser.costs["macs"].full
    over = chooser.overspend(keep.float(), Budget(macs=share / 2, params=1.0))
    assert float(over) == pytest.approx(1.0)
    assert float(chooser.overspend(keep.float(), Budget(macs=share * 1.001))) == 0


def test_expected_costs_above_the_budget_push_gates_down(traced):
    _, graph = traced
    gates = torch.full((graph.num_channels,), 0.9, requires_grad=True)
    Chooser(*traced).overspend(gates, Budget(macs=0.5, params=0.5)).backward()
    assert bool((gates.grad >= 0).all())
    assert float(gates.grad.sum()) > 0


def test_percents_are_told_from_shares():
    chooser, graph = chooser_of(plain), chooser_of(plain).graph
    with pytest.raises(BudgetError, match=r"for a share of the full network pass macs=0\.25$"):
        chooser.choose(scores(graph), Budget(macs=25))
    with pytest.raises(BudgetError) as raised:
        chooser.choose(scores(graph), Budget(macs=1e-9))
    assert "for a share" not in str(raised.value)
