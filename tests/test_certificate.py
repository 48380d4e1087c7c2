"""Masked dense equals slim on every wiring, and the certificate notices when it does not."""

import gc
from dataclasses import replace

import numpy as np
import pytest
import torch
from nets import CASES, chunked, difference, flattened, noise, plain, residual, seeded
from torch import nn

from stamppruner import ChannelPlan, check_equivalence, mask, shrink, trace_channels
from stamppruner.calls import floating_tensors
from stamppruner.certificate import compare
from stamppruner.channels import KEPT, LayerMap
from stamppruner.errors import DataError, EquivalenceError, PlanError
from stamppruner.inputs import Inputs


def traced(make, dtype=torch.float64, shape=(3, 8, 8)):
    model = seeded(make).to(dtype)
    return model, trace_channels(model, noise(1, *shape))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["double", "single"]
)
def test_masked_dense_equals_slim(case, dtype, bound):
    model = case.model(dtype)
    graph = trace_channels(model, noise(1, *case.shapes[0]))
    for seed, keep in enumerate((0.5, 0.3, 0.01)):
        plan = ChannelPlan.random(graph, keep, seed)
        slim, dense = shrink(model, plan), mask(model, plan)
        assert type(slim) is type(model)
        assert sum(p.numel() for p in slim.parameters()) < sum(
            p.numel() for p in model.parameters()
        )
        for shape in case.shapes:
            for batch in (1, 3):
                x = noise(batch, *shape, dtype=dtype, seed=seed)
                with torch.no_grad():
                    pairs = zip(floating_tensors(dense(x)), floating_tensors(slim(x)), strict=True)
                    for a, b in pairs:
                        assert difference(a, b) < bound


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_group_alone_passes_the_check(case):
    model = case.model()
    graph = trace_channels(model, noise(1, *case.shapes[0]))
    rng = np.random.default_rng(0)
    for group in graph.groups:
        keep = np.ones(graph.num_channels, dtype=bool)
        count = max(1, group.block_size // 2 // group.multiple * group.multiple)
        for b in range(group.blocks):
            dropped = rng.permutation(group.block_size)[count:]
            keep[group.start + b * group.block_size + dropped] = False
        verdict = check_equivalence(model, ChannelPlan(graph, keep))
        assert verdict.passed, (group.name, str(verdict))


def test_slim_equals_the_slices_that_are_cut_by_hand():
    model, graph = traced(plain)
    plan = ChannelPlan.random(graph, 0.5, 3)
    slim = shrink(model, plan)
    first, second, third = (torch.tensor(plan.keep[g.channels]) for g in graph.groups)
    assert torch.equal(slim[0][0].weight, model[0][0].weight[first])
    assert torch.equal(slim[0][1].running_var, model[0][1].running_var[first])
    assert torch.equal(slim[2][0].weight, model[2][0].weight[second][:, first])
    assert torch.equal(slim[4].weight, model[4].weight[third][:, second])
    assert torch.equal(slim[5][2].weight, model[5][2].weight[:, third])


def permuted(layer, side):
    """The same layer with two channels of one side exchanged."""
    positions = getattr(layer, side).copy()
    at = np.flatnonzero(positions != KEPT)[[0, -1]]
    positions[at] = positions[at[::-1]]
    return replace(layer, **{side: positions})


def corrupted(graph, name, layer):
    return replace(graph, layers={**graph.layers, name: layer})


WRONG = [
    (plain, "2.0", "inputs"),
    (plain, "0.1", "inputs"),
    (residual, "1.body.2.0", "outputs"),
    (flattened, "3", "inputs"),
    (chunked, "b.0", "inputs"),
]


@pytest.mark.parametrize(("make", "name", "side"), WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_layer_map_is_detected(make, name, side):
    model, graph = traced(make)
    right, layer = graph.layers[name], permuted(graph.layers[name], side)
    if layer.kind == "channelwise":
        layer = replace(layer, outputs=layer.inputs)
    wrong = corrupted(graph, name, layer)
    verdicts = []
    for seed in range(8):
        plan = ChannelPlan.random(wrong, 0.5, seed)
        assert check_equivalence(model, ChannelPlan(graph, plan.keep))
        if (plan.keep[layer.inputs] != plan.keep[right.inputs]).any() or (
            plan.keep[layer.outputs] != plan.keep[right.outputs]
        ).any():
            verdicts.append(check_equivalence(model, plan))
    assert verdicts
    assert not any(verdict.passed for verdict in verdicts)
    assert all(verdict.max_rel > 1e-3 or verdict.error for verdict in verdicts)


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_map_is_detected_where_values_are_small(dtype):
    def small():
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Times(1e-8), nn.Conv2d(8, 8, 3, bias=False),
            nn.ReLU(), nn.Conv2d(8, 8, 3, bias=False), nn.Flatten(), nn.Linear(128, 4, bias=False),
        )  # fmt: skip

    model, graph = traced(small, dtype)
    wrong = corrupted(graph, "3", permuted(graph.layers["3"], "inputs"))
    for seed in range(8):
        plan = ChannelPlan.random(wrong, 0.5, seed)
        same = plan.keep[wrong.layers["3"].inputs] == plan.keep[graph.layers["3"].inputs]
        assert check_equivalence(model, ChannelPlan(graph, plan.keep))
        assert check_equivalence(model, plan).passed == bool(same.all())


def test_a_map_that_forgets_a_norm_is_detected_at_the_layer():
    model, graph = traced(plain)
    layers = {name: layer for name, layer in graph.layers.items() if name != "0.1"}
    verdict = check_equivalence(model, ChannelPlan.random(replace(graph, layers=layers)))
    assert not verdict
    assert verdict.worst_layer == "2.0"
    assert "fails before layer '2.0'" in str(verdict)


def test_a_map_that_frees_a_mixing_position_is_detected():
    model, graph = traced(residual)
    layer = graph.layers["1.body.0.0"]
    half = np.where(np.arange(len(layer.inputs)) < 4, layer.inputs, KEPT)
    wrong = corrupted(graph, layer.name, LayerMap(layer.name, "mixing", half, layer.outputs))
    assert not check_equivalence(model, ChannelPlan.random(wrong))


def test_shrink_raises_rather_than_return_a_wrong_net():
    model, graph = traced(plain)
    layers = {name: layer for name, layer in graph.layers.items() if name != "0.1"}
    plan = ChannelPlan.random(replace(graph, layers=layers))
    with pytest.raises(EquivalenceError, match=r"Sequential cut by .* protect="):
        shrink(model, plan)


def test_changed_weights_of_the_slim_net_are_detected():
    model, graph = traced(plain)
    plan = ChannelPlan.random(graph)
    slim = shrink(model, plan)
    inputs = Inputs.of(graph.example, model)
    assert compare(model, slim, plan, inputs)
    with torch.no_grad():
        slim[2][0].weight[0, 0] *= 1 + 1e-6
    verdict = compare(model, slim, plan, inputs)
    assert (verdict.passed, verdict.worst_layer, verdict.side) == (False, "2.0", "output")
    assert "DIFFERENT" in str(verdict)


def test_a_difference_behind_the_last_layer_is_detected():
    model, graph = traced(plain)
    plan = ChannelPlan.random(graph)
    slim = nn.Sequential(*shrink(model, plan), nn.Tanh())
    verdict = compare(model, slim, plan, Inputs.of(graph.example, model))
    assert not verdict
    assert verdict.worst_layer == ""
    assert verdict.max_abs > 0


def test_plans_of_another_model_are_refused():
    _, graph = traced(plain)
    other, _ = traced(residual)
    with pytest.raises(PlanError, match=r"another model|wide"):
        check_equivalence(other, ChannelPlan.random(graph))


def test_slim_models_are_not_cut_twice_by_one_plan():
    model, graph = traced(plain)
    plan = ChannelPlan.random(graph)
    with pytest.raises(PlanError, match="trace this model anew"):
        shrink(shrink(model, plan), plan)


def test_example_inputs_are_needed_and_can_be_given():
    model, graph = traced(plain)
    plan = ChannelPlan.random(replace(graph, example=None))
    with pytest.raises(DataError, match="example_inputs"):
        check_equivalence(model, plan)
    assert check_equivalence(model, plan, noise(1, 3, 11, 7))


def test_the_full_plan_changes_nothing():
    model, graph = traced(residual)
    slim = shrink(model, ChannelPlan.full(graph))
    for (name, a), (_, b) in zip(
        model.state_dict().items(), slim.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name


def test_shrinking_again_and_again():
    model = seeded(residual)
    for seed in range(6):
        graph = trace_channels(model, noise(1, 3, 8, 8))
        if not graph.groups:
            break
        model = shrink(model, ChannelPlan.random(graph, 0.7, seed))
    assert model[0][0].out_channels <= 2


def test_a_net_of_nan_proves_nothing():
    model, graph = traced(plain)
    with torch.no_grad():
        model[0][0].bias.fill_(torch.nan)
    assert not check_equivalence(model, ChannelPlan.random(graph))


def test_no_weights_are_left_to_the_garbage_collector():
    def everything():
        plan = ChannelPlan.random(trace_channels(model, torch.zeros(1, 3, 8, 8)))
        shrink(model, plan)
        mask(model, plan)

    model = seeded(residual)
    everything()  # what is imported late makes circles of its own
    gc.collect()
    gc.disable()
    try:
        everything()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        assert not [x for x in gc.garbage if isinstance(x, nn.Module | torch.Tensor)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def test_up_to_a_limit_only_what_comes_before_counts():
    model = seeded(plain)
    graph = trace_channels(model, torch.zeros(1, 3, 8, 8))
    plan = ChannelPlan.random(graph)
    slim = shrink(model, plan)
    nn.init.zeros_(slim[4].weight)
    inputs = Inputs.of(torch.zeros(1, 3, 8, 8), model)
    verdict = compare(model, slim, plan, inputs)
    assert (verdict.passed, verdict.worst_layer, verdict.agreed) == (False, "4", 5)
    assert compare(model, slim, plan, inputs, limit=5)
    assert not compare(model, slim, plan, inputs, limit=6)


def test_a_slim_model_at_hand_is_compared():
    model, graph = traced(residual)
    plan, other = (ChannelPlan.random(graph, 0.5, seed) for seed in (0, 1))
    slim = shrink(model, plan)
    assert check_equivalence(model, plan, slim=slim)
    assert not check_equivalence(model, other, slim=slim)
    assert not check_equivalence(model, plan, slim=model)
    with torch.no_grad():
        next(m for m in slim.modules() if isinstance(m, nn.Conv2d)).weight.mul_(1.01)
    assert not check_equivalence(model, plan, slim=slim)
    with pytest.raises(PlanError):
        check_equivalence(shrink(model, other), plan, slim=slim)
