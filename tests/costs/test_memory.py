"""Peaks of memory, against what PyTorch's profiler sees allocated by nets that are really cut.

The profiler also sees what a kernel allocates for itself (workspaces of convolutions, as large as
all activations of a single small image); what is freed in the operation that allocated it is
left out here.
"""

import dataclasses
import time

import numpy as np
import pytest
import torch
import torchvision
from nets import CASES, noise
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from stamppruner import Budget, ChannelPlan, trace_channels
from stamppruner.budget import Chooser
from stamppruner.costs import ActivationBytes, Setting, TrainBytes
from stamppruner.errors import BudgetError, UnsupportedModelError
from stamppruner.models import resnet18, vgg19
from stamppruner.surgery import cut

COMPOSED = ("aten::layer_norm", "aten::group_norm", "aten::matmul")
"""Operations of several, which free what the first of them allocates."""

NETS = {
    "resnet18": lambda: resnet18(10, width=0.25),
    "vgg19": lambda: vgg19(10, width=0.25),
    "mobilenet_v2": lambda: torchvision.models.mobilenet_v2(num_classes=10),
    "densenet121": lambda: torchvision.models.densenet121(num_classes=10),
    "vit": lambda: torchvision.models.VisionTransformer(32, 8, 2, 4, 64, 128, num_classes=10),
}
SMALL = {case.name: case for case in CASES}


def traced_net(name):
    torch.manual_seed(0)
    if name in SMALL:
        model, x = SMALL[name].model(torch.float32), noise(1, *SMALL[name].shapes[0])
    else:
        model, x = NETS[name]().eval(), torch.zeros(1, 3, 32, 32)
    return model, trace_channels(model, x)


@pytest.fixture(scope="module", params=[*NETS, *SMALL])
def traced(request):
    return traced_net(request.param)


def widths(plan):
    return torch.tensor([float(plan.keep[g.channels].sum()) for g in plan.graph.groups])


def allocations(event, operation=None):
    """Time, address, bytes (negative: freed) and operation of what is below a profiled event."""
    if event.name == "[memory]":
        yield event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size, operation
    elif operation is None and event.name.startswith("aten::") and event.name not in COMPOSED:
        operation = event.id
    for child in event.children:
        yield from allocations(child, operation)


def peak(run):
    """The largest sum of what is alive at one time and gone when ``run`` is over."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    roots = seen.profiler.kineto_results.experimental_event_tree()
    born, changes = {}, []
    for moment, (_, address, size, operation) in enumerate(
        sorted((a for root in roots for a in allocations(root)), key=lambda a: a[0])
    ):
        if size > 0:
            born[address] = moment, size, operation
        elif address in born:
            start, size, owner = born.pop(address)
            if owner is None or owner != operation:
                changes += [(start, size), (moment, -size)]
    return int(np.cumsum([size for _, size in sorted(changes)]).max())


def inference_peak(model, x):
    model.eval()
    with torch.no_grad():
        return peak(lambda: x.call(model))


def training_peak(model, x):
    """Of a step whose gradients stay: they are no part of what is gone after it."""
    model.train()

    def step():
        outputs = tree_leaves(x.call(model))
        torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])

    step()
    model.zero_grad()
    persistent = 3 * sum(p.nbytes for p in model.parameters())
    return persistent + sum(b.nbytes for b in model.buffers()) + peak(step)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_activations_of_cut_nets(traced, batch_size):
    model, graph = traced
    cost = ActivationBytes(model, graph, Setting(batch_size=batch_size))
    for keep in (1, 0.5, 0.2):
        plan = ChannelPlan.random(graph, keep)
        measured = inference_peak(cut(model, plan), graph.example.repeat(batch_size))
        assert float(cost(widths(plan))) == pytest.approx(measured, rel=1e-6)


@pytest.mark.parametrize("batch_size", [2, 5])
def test_training_steps_of_cut_nets(traced, batch_size):
    model, graph = traced
    cost = TrainBytes(model, graph, Setting(batch_size=batch_size))
    for keep in (1, 0.5, 0.2):
        plan = ChannelPlan.random(graph, keep)
        measured = training_peak(cut(model, plan), graph.example.repeat(batch_size))
        assert float(cost(widths(plan))) == pytest.approx(measured, rel=0.01)


def test_channels_that_keep_their_places_count():
    torch.manual_seed(0)
    model = torchvision.models.shufflenet_v2_x1_0(num_classes=10).eval()
    graph = trace_channels(model, torch.zeros(1, 3, 32, 32))
    assert graph.rewired
    x = graph.example.repeat(4)
    for keep in (1, 0.5, 0.2):
        plan = ChannelPlan.random(graph, keep)
        slim, at = cut(model, plan), widths(plan)
        inference = float(ActivationBytes(model, graph, Setting(batch_size=4))(at))
        assert inference == pytest.approx(inference_peak(slim, x), rel=0.01)
        training = float(TrainBytes(model, graph, Setting(batch_size=4))(at))
        assert training_peak(slim, x) <= training * 1.01


@pytest.mark.parametrize("share", [0.3, 0.5])
@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v2"])
@pytest.mark.parametrize("bound", ["activation_bytes", "train_bytes"])
def test_budgets_are_met_from_below(name, bound, share):
    model, graph = traced_net(name)
    chooser = Chooser(model, graph)
    budget = Budget(**{bound: share}, batch_size=4)
    plan = chooser.choose(np.random.default_rng(0).random(graph.num_channels), budget)
    (cost,) = chooser.costs_of(budget)
    kept, limit = widths(plan), share * cost.full
    wider = kept + torch.eye(len(kept))[kept < cost._sizes]
    assert 0.92 * limit <= float(cost(kept)) <= limit < float(cost(wider).max())
    measure = inference_peak if bound == "activation_bytes" else training_peak
    x = graph.example.repeat(4)
    assert measure(cut(model, plan), x) <= share * measure(model, x) * 1.001


def test_a_budget_out_of_reach_names_the_layers_that_hold_it():
    chooser = Chooser(*traced_net("plain"))
    with pytest.raises(
        BudgetError, match=r"least reachable is .* bytes .* 0\.1 .*floor of 1 of 12"
    ):
        chooser.choose(np.zeros(chooser.graph.num_channels), Budget(activation_bytes=0.01))


def test_layers_hold_the_peak():
    """It is in the last block: the skipped input, the inner activation, a convolution, its norm."""
    model, graph = traced_net("residual")
    cost = ActivationBytes(model, graph)
    each = dict(zip(graph.layers, cost.per_layer(cost._sizes).tolist(), strict=True))
    place = 8 * 8 * 4
    held = {"1.body.2.1": 8, "2.body.0.1": 10, "2.body.2.0": 8, "2.body.2.1": 8}
    assert each == {name: held.get(name, 0) * place for name in each}
    assert cost.full == sum(each.values())


def test_layers_hold_what_is_trained():
    model, graph = traced_net("residual")
    cost = TrainBytes(model, graph)
    each = dict(zip(graph.layers, cost.per_layer(cost._sizes).tolist(), strict=True))
    assert 0.99 * cost.full < sum(each.values()) <= cost.full
    weights = model[2].body[2][0].weight
    assert each["2.body.2.0"] > 3 * weights.nbytes


@pytest.mark.parametrize("kind", [ActivationBytes, TrainBytes])
def test_the_model_stays_as_it_was(kind):
    model, graph = traced_net("aux_head")
    model.body.train()
    model.stem[0].weight.requires_grad_(False)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    state = torch.get_rng_state()
    kind(model, graph)
    assert all((before[name] == x).all() for name, x in model.state_dict().items())
    assert (torch.get_rng_state() == state).all()
    assert all(p.grad is None for p in model.parameters())
    assert not model.stem[0].weight.requires_grad
    assert model.body.training
    assert not model.training
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("kind", [ActivationBytes, TrainBytes])
def test_example_inputs_are_needed(kind):
    model, graph = traced_net("plain")
    with pytest.raises(BudgetError, match=f"{kind.name} needs a graph with example inputs"):
        kind(model, dataclasses.replace(graph, example=None))


class WantsTargets(nn.Sequential):
    def forward(self, x, targets=None):
        if self.training and targets is None:
            raise ValueError("targets are missing")
        return super().forward(x)


def test_what_cannot_be_trained_alone_is_told():
    model = WantsTargets(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)).eval()
    graph = trace_channels(model, torch.zeros(1, 3, 4, 4))
    assert ActivationBytes(model, graph).full > 0
    with pytest.raises(UnsupportedModelError, match=r"train_bytes of WantsTargets.*are missing"):
        TrainBytes(model, graph)
    assert not any(module._forward_hooks for module in model.modules())


class Mixed(nn.Module):
    """Positions mixed by a matrix that belongs to no layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 32), nn.Linear(32, 2)
        self.mixing = nn.Parameter(torch.rand(16, 16))

    def forward(self, x):
        return self.last(self.mixing @ self.first(x))


def test_matrix_products_outside_layers_count_whole():
    torch.manual_seed(0)
    model = Mixed().eval()
    graph = trace_channels(model, torch.zeros(1, 16, 3))
    plan = ChannelPlan.random(graph, 0.25)
    slim, x = cut(model, plan), graph.example.repeat(4)
    assert slim.first.out_features == 8
    found = float(ActivationBytes(model, graph, Setting(batch_size=4))(widths(plan)))
    product = 4 * 16 * 32 * 4
    assert found == inference_peak(slim, x) + 2 * 0.75 * product  # it, and a copy in order


@pytest.mark.parametrize("kind", [ActivationBytes, TrainBytes])
def test_thousands_of_evaluations_a_second(kind):
    model = torchvision.models.resnet50(num_classes=10).eval()
    graph = trace_channels(model, torch.zeros(1, 3, 32, 32))
    cost = kind(model, graph)
    rows = torch.rand(1000, len(graph.groups)) * cost._sizes
    start = time.perf_counter()
    cost(rows)
    assert time.perf_counter() - start < 0.5
