"""Gates: exact, reversible, one mask a sample."""

import numpy as np
import pytest
import torch
from nets import CASES, difference, noise, plain, residual, seeded
from torch import nn

from stamppruner import ChannelPlan, Gates, mask, trace_channels
from stamppruner.calls import floating_tensors
from stamppruner.errors import PlanError


def anatomy(model):
    """All that hooks and patches could leave behind on a model."""
    return [
        (name, module.training, *(sorted(map(str, vars(module).keys())),), *(
            len(vars(module)[key]) for key in sorted(vars(module)) if "hooks" in key
        ))
        for name, module in model.named_modules()
    ]  # fmt: skip


@pytest.fixture(params=CASES, ids=lambda case: case.name)
def gated(request):
    model = request.param.model()
    return model, trace_channels(model, noise(1, *request.param.shapes[0]))


def test_inject_then_eject_restores_the_model_bit_for_bit(gated):
    model, graph = gated
    x = graph.example.random(2, 0)
    before, state, rng = (
        anatomy(model),
        {k: v.clone() for k, v in model.state_dict().items()},
        (torch.get_rng_state()),
    )
    with torch.no_grad():
        expected = floating_tensors(x.call(model))
        with Gates(model, graph).injected() as gates:
            gates.values = torch.zeros(graph.num_channels, dtype=torch.float64)
            masked = floating_tensors(x.call(model))
        after = floating_tensors(x.call(model))
    assert not all(torch.equal(a, b) for a, b in zip(expected, masked, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(expected, after, strict=True))
    assert anatomy(model) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_eject_also_after_an_exception():
    model = seeded(plain)
    graph, before = trace_channels(model, torch.zeros(1, 3, 8, 8)), anatomy(model)
    with pytest.raises(RuntimeError, match="channels"), Gates(model, graph).injected():
        model(torch.zeros(1, 4, 8, 8))
    assert anatomy(model) == before


def test_inject_twice_gates_once():
    model = seeded(plain).double()
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    gates = Gates(model, graph)
    gates.values = torch.full((graph.num_channels,), 0.5, dtype=torch.float64)
    gates.inject()
    once = model(noise(1, 3, 8, 8))
    gates.inject()
    assert torch.equal(model(noise(1, 3, 8, 8)), once)
    gates.eject()
    gates.eject()
    assert not model[2][0]._forward_pre_hooks


def test_open_gates_change_nothing(gated):
    model, graph = gated
    x = graph.example.random(2, 0)
    with torch.no_grad():
        expected = floating_tensors(x.call(model))[0]
        with Gates(model, graph).injected() as gates:
            assert gates.values is None
            assert torch.equal(floating_tensors(x.call(model))[0], expected)
            gates.values = torch.ones(graph.num_channels, dtype=torch.float64)
            assert difference(floating_tensors(x.call(model))[0], expected) < 1e-12


def test_a_masked_channel_has_no_influence(gated):
    """Its parameters can be anything: the output is the same."""
    model, graph = gated
    plan = ChannelPlan.random(graph, 0.5)
    dense = mask(model, plan)
    x = graph.example.random(2, 0)
    with torch.no_grad():
        expected = [y.clone() for y in floating_tensors(x.call(dense))]
        for layer in graph.layers.values():
            module = dense.get_submodule(layer.name)
            if layer.kind == "mixing" and getattr(module, "groups", 1) == 1:
                dead = torch.from_numpy(~layer.kept_outputs(plan.keep))
                axis = 1 if isinstance(module, nn.ConvTranspose2d) else 0
                module.weight.index_fill_(axis, dead.nonzero().squeeze(1), 7.0)
        found = floating_tensors(x.call(dense))
    for a, b in zip(expected, found, strict=True):
        assert difference(a, b) < 1e-10


def test_one_mask_a_sample(gated):
    model, graph = gated
    plans = [ChannelPlan.random(graph, 0.5, seed) for seed in range(3)]
    masks = torch.tensor(np.stack([plan.keep for plan in plans]), dtype=torch.float64)
    x = graph.example.random(3, 0)
    with torch.no_grad(), Gates(model, graph).injected() as gates:
        gates.values = masks
        together = floating_tensors(x.call(model))[0]
        for i in range(3):
            gates.values = masks[i]
            assert difference(floating_tensors(x.call(model))[0][i], together[i]) < 1e-12


def test_gradients_reach_the_mask():
    model = seeded(residual)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    values = torch.full((graph.num_channels,), 0.9, requires_grad=True)
    with Gates(model, graph).injected() as gates:
        gates.values = values
        model(noise(2, 3, 8, 8, dtype=torch.float32)).square().sum().backward()
    assert values.grad.isfinite().all()
    assert (values.grad != 0).float().mean() > 0.8  # a rectifier may close a channel


def test_gates_of_another_model_are_refused():
    graph = trace_channels(seeded(plain), torch.zeros(1, 3, 8, 8))
    with pytest.raises(PlanError, match="trace this model anew"):
        Gates(seeded(residual), graph)


def test_mask_works_on_a_copy():
    model = seeded(plain)
    graph, before = trace_channels(model, torch.zeros(1, 3, 8, 8)), anatomy(model)
    dense = mask(model, ChannelPlan.random(graph))
    assert anatomy(model) == before
    assert dense is not model
    assert dense[0][0].weight.data_ptr() != model[0][0].weight.data_ptr()


def gradients(model, graph, x, *, by_weight):
    """Outputs, and gradients of the mask and of all parameters."""
    model.zero_grad()
    values = torch.linspace(0, 1, graph.num_channels, dtype=torch.float64).requires_grad_()
    with Gates(model, graph).injected(by_weight=by_weight) as gates:
        gates.values = values
        outputs = floating_tensors(x.call(model))
    sum((y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum() for y in outputs).backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [y.detach() for y in outputs], values.grad, found


def test_weights_times_the_mask_are_inputs_times_the_mask(gated):
    model, graph = gated
    model.double()
    x = graph.example.random(40, 0).to(torch.float64)
    before = anatomy(model)
    outputs, mask_gradient, found = gradients(model, graph, x, by_weight=False)
    others, other_gradient, other_found = gradients(model, graph, x, by_weight=True)
    for one, two in zip(
        [*outputs, mask_gradient, *found], [*others, other_gradient, *other_found], strict=True
    ):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)
    assert anatomy(model) == before


@pytest.mark.parametrize("fails", ["layer", "hook"])
def test_weights_are_the_parameters_again_after_an_exception(fails):
    layer = nn.Conv2d(4, 4, 1)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), layer)
    graph = trace_channels(model, torch.randn(1, 3, 5, 5))
    before = anatomy(model)
    seen = []

    def fail(*_):
        seen.append("weight" in layer.__dict__)
        raise ZeroDivisionError

    with Gates(model, graph).injected(by_weight=True) as gates:
        gates.values = torch.ones(graph.num_channels)
        if fails == "hook":
            handle = layer.register_forward_pre_hook(fail)
        else:
            layer._conv_forward = fail
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(2, 3, 5, 5))
    if fails == "hook":
        handle.remove()
    else:
        del layer._conv_forward
    assert seen == [True]
    assert anatomy(model) == before
    assert isinstance(layer.weight, nn.Parameter)
