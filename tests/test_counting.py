"""Multiply-adds of whole passes, and budgets of networks that do more than their layers."""

import pytest
import torch
import torch.nn.functional as F
from nets import CASES, seeded
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import Budget, ChannelPlan, STAMPPruner, shrink, trace_channels
from stamppruner.costs import Macs
from stamppruner.counting import macs_of_pass
from stamppruner.errors import BudgetError
from stamppruner.inputs import Inputs


def counted(model, *args):
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(*args)
    return counter.get_total_flops() / 2


def one(*shape):
    return Inputs((torch.randn(*shape),), {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_convolutions_and_products_as_pytorch_counts_them(case):
    model = case.model(torch.float32).eval()
    inputs = one(2, *case.shapes[0])
    assert macs_of_pass(model, inputs) == counted(model, inputs.args[0][:1]) > 0


@pytest.mark.parametrize(
    ("kind", "gates"), [(nn.RNN, 1), (nn.GRU, 3), (nn.LSTM, 4)], ids=lambda x: str(x)
)
@pytest.mark.parametrize("directions", [1, 2])
def test_recurrent_layers(kind, gates, directions):
    model = kind(6, 5, num_layers=2, batch_first=True, bidirectional=directions == 2)
    widths = [6, 5 * directions]
    each = sum(gates * 5 * (width + 5) * directions for width in widths)
    assert macs_of_pass(model, one(1, 7, 6)) == 7 * each


class Attention(nn.Module):
    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel
        self.whole = nn.MultiheadAttention(12, 3, batch_first=True)

    def forward(self, x):
        if not self.kernel:
            return self.whole(x, x, x, need_weights=False)[0]
        heads = F.linear(x, self.whole.in_proj_weight).unflatten(2, (3, 3, 4)).movedim(2, 0)
        q, k, v = (part.transpose(1, 2) for part in heads)
        return self.whole.out_proj(F.scaled_dot_product_attention(q, k, v).movedim(1, 2).flatten(2))


@pytest.mark.parametrize("kernel", [False, True])
@pytest.mark.parametrize("grads", [False, True])
def test_attention(kernel, grads):
    model = Attention(kernel).requires_grad_(grads)
    before = torch.backends.mha.get_fastpath_enabled()
    assert macs_of_pass(model, one(1, 7, 12)) == 7 * 12 * 4 * 12 + 2 * 7 * 7 * 12
    assert torch.backends.mha.get_fastpath_enabled() == before
    assert model.training


class Attending(nn.Module):
    """Products of activations that shrink with the channels, and some that do not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 12, 3), nn.Conv2d(12, 16, 3)
        self.steps, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(16, 4)

    def forward(self, x):
        tokens = self.last(self.first(x).relu()).flatten(2)
        shares = (tokens.transpose(1, 2) @ tokens).softmax(-1)
        read = self.steps(x.mean(3).transpose(1, 2))[0].mean((1, 2))
        return self.head((tokens @ shares).mean(2)) + read[:, None]


@pytest.fixture(scope="module")
def attending():
    torch.manual_seed(0)
    return seeded(Attending).eval(), torch.randn(1, 3, 10, 10)


def test_costs_are_upper_bounds_and_reports_exact(attending):
    model, x = attending
    graph = trace_channels(model, x)
    cost = Macs(model, graph)
    gru = 10 * 3 * 8 * (3 + 8)
    assert cost.full == counted(model, x) == macs_of_pass(model, Inputs((x,), {}))
    assert cost.constant == gru + 2 * 36 * 36 * 16
    for seed in range(5):
        plan = ChannelPlan.random(graph, 0.5, seed)
        widths = torch.tensor([float(plan.keep[g.channels].sum()) for g in graph.groups])
        assert counted(shrink(model, plan), x) <= float(cost(widths)) < cost.full
    images, labels = torch.randn(24, 3, 10, 10), torch.arange(24) % 4
    pruner = STAMPPruner(model, x)
    result = pruner.prune([(images, labels)], Budget(macs=0.8), progress=False)
    before, after = (counted(net, x) for net in (model, result.model))
    assert result.report.before["macs"] == before
    assert result.report.after["macs"] == after <= 0.8 * before
    assert result.report.reached["macs"] == after / before


def test_what_holds_a_budget_is_named(attending):
    model, x = attending
    images, labels = torch.randn(8, 3, 10, 10), torch.arange(8) % 4
    with pytest.raises(BudgetError, match=r"outside of layers \d\d\.\d%"):
        STAMPPruner(model, x).prune([(images, labels)], Budget(macs=0.2), progress=False)


def test_what_cannot_be_counted_is_traced_all_the_same(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("There was no rule registered for HigherOrderOperator cond")

    monkeypatch.setattr("stamppruner.trace.macs_of_pass", refuse)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3))
    graph = trace_channels(net, torch.zeros(1, 3, 9, 9))
    assert graph.num_channels == 8
    assert graph.macs == 0
    cost = Macs(net, graph)
    assert cost.full == 49 * 27 * 8 + 25 * 72 * 4
    assert cost.constant == 0
