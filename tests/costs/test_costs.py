"""Costs of real cut nets: parameters counted, multiply-adds as PyTorch's own counter sees them."""

import pytest
import torch
from nets import CASES, noise
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import ChannelPlan, trace_channels
from stamppruner.costs import Macs, Params
from stamppruner.surgery import cut


def counted_macs(model, x):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        x.call(model)
    return counter.get_total_flops() / 2


def counted_params(model, _x):
    return sum(p.numel() for p in model.parameters())


COSTS = {"macs": (Macs, counted_macs), "params": (Params, counted_params)}


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
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
    assert (cost.name, cost.full) == (name, pytest.approx(counted(model, graph.example)))
    assert cost.unit


@pytest.mark.parametrize("name", COSTS)
def test_cost_increases_in_every_width_and_is_differentiable(traced, name):
    model, graph = traced
    w = torch.tensor([g.size * 0.6 for g in graph.groups], requires_grad=True)
    COSTS[name][0](model, graph)(w).backward()
    assert (w.grad > 0).all()


@pytest.mark.parametrize("name", COSTS)
def test_batches_of_widths(traced, name):
    model, graph = traced
    cost = COSTS[name][0](model, graph)
    rows = torch.stack([widths(ChannelPlan.random(graph, keep)) for keep in (0.2, 0.5, 1)])
    assert cost(rows).tolist() == [pytest.approx(float(cost(row))) for row in rows]
    assert cost.per_layer(rows.double()).shape == (3, len(graph.layers))


def test_macs_are_those_of_the_traced_size():
    case = next(case for case in CASES if case.name == "residual")
    model = case.model(torch.float32)
    small, large = (trace_channels(model, noise(1, 3, s, s)) for s in (8, 16))
    head = 8 * 5
    assert Macs(model, large).full - head == 4 * (Macs(model, small).full - head)
