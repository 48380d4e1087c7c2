"""Budgets and widths that pruning tools get wrong: each is met, or refused with its reason.

The numbers are those of the collection of public bug reports that the nets were made from.
"""

import dataclasses
import re
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import CASES, conv_bn, difference, head, noise, seeded
from stripes import loader, resnet, same_state, snapshot, stripes, vgg
from torch import nn
from torch.utils.data import TensorDataset

from stamppruner import (
    Budget,
    ChannelPlan,
    PruneResult,
    STAMPConfig,
    STAMPPruner,
    check_equivalence,
    finetune,
    load_slim,
    summary,
    trace_channels,
)
from stamppruner.baselines import Full, Magnitude, Random
from stamppruner.baselines._base import rank_within_groups
from stamppruner.budget import Chooser
from stamppruner.errors import BudgetError
from stamppruner.models import VGG
from stamppruner.pruner import NotMetaFittedWarning

HAIR = 1 + 1e-9


def wide() -> nn.Module:
    """Groups of 64, 24 and 100 channels, and one of 4 blocks of 32."""
    return nn.Sequential(
        conv_bn(3, 64, 1), nn.ReLU(), conv_bn(64, 24, 1), nn.ReLU(), conv_bn(24, 100, 1), nn.ReLU(),
        conv_bn(100, 128, 1), nn.ReLU(), conv_bn(128, 128, 1, groups=4), nn.ReLU(), head(128),
    )  # fmt: skip


class Inverted(nn.Module):
    """x + (widen, depthwise, narrow), as in MobileNetV2."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv_bn(width, inner, 1), nn.ReLU6(), conv_bn(inner, inner, groups=inner), nn.ReLU6(),
            conv_bn(inner, width, 1),
        )  # fmt: skip

    def forward(self, x):
        return x + self.body(x)


def mobile_net() -> nn.Module:
    return nn.Sequential(
        conv_bn(3, 16), Inverted(16, 96), conv_bn(16, 24, 1), Inverted(24, 144),
        conv_bn(24, 36, 1), Inverted(36, 72), head(36, 4),
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


def pruned(method, model, data, budget):
    """By a baseline, or by a pruner that was not meta-fitted."""
    data = TensorDataset(*data)
    if isinstance(method, STAMPPruner):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NotMetaFittedWarning)
            return method.prune(data, budget, progress=False)
    return method.prune(model, data, budget)


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
    tiny = Budget(macs=chooser.least(chooser.costs["macs"]) / chooser.costs["macs"].full * HAIR)
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
    least = chooser.least(cost) / cost.full * HAIR
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
    least = chooser.least(chooser.costs["macs"])
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


# 23: widths that kernels like, and latency that is looked at


def test_23_widths_are_multiples_of_eight_by_default_where_groups_are_wide():
    model = seeded(mobile_net)
    data = stripes(8, 4)
    for method in (STAMPPruner(model), Random(), Magnitude()):
        for share in (0.5, 0.2, 0.1):
            result = pruned(method, model, data, Budget(macs=share))
            reached = result.report.reached["macs"]
            assert 0.9 * share < reached <= share
            assert check_equivalence(model, result.plan)
            for group, (kept, *_) in zip(
                result.plan.graph.groups, block_counts(result.plan), strict=True
            ):
                multiple = 8 if group.size >= 64 else 4 if group.size >= 32 else 2
                assert kept == group.size or kept % multiple == 0
            assert max(g.size for g in result.plan.graph.groups) >= 64


def test_23_narrow_groups_are_neither_starved_nor_left_whole():
    """Widths stay near those without rounding: a step is an eighth of a group at the most."""
    chooser = chooser_of(wide, round_to=8)
    fine = chooser_of(wide, round_to=1)
    scores = rank_within_groups(scores_of(chooser.graph), chooser.graph)
    sizes = np.array([group.size for group in chooser.graph.groups])
    for share in (0.8, 0.5, 0.2, 0.1):
        two = [
            c.widths(c.choose(scores, Budget(macs=share))).numpy() / sizes for c in (chooser, fine)
        ]
        assert np.abs(two[0] - two[1]).max() <= 0.2


def test_23_rounding_yields_to_a_budget_that_it_would_put_out_of_reach():
    rough, fine = chooser_of(wide, round_to=64), chooser_of(wide, round_to=1)
    macs = fine.costs["macs"]
    share = fine.least(macs) / macs.full * 1.05
    assert rough.least(macs) == fine.least(macs)
    for chooser in (rough, fine):
        widths = chooser.widths(chooser.choose(scores_of(chooser.graph), Budget(macs=share)))
        assert float(chooser.costs["macs"](widths)) <= share * chooser.costs["macs"].full


def test_23_a_multiple_of_one_rounds_nothing():
    model = seeded(mobile_net)
    config = STAMPConfig(round_to=1)
    result = pruned(STAMPPruner(model, config=config), model, stripes(8, 4), Budget(macs=0.5))
    assert any(counts[0] % 2 for counts in block_counts(result.plan))
    assert STAMPConfig.paper().round_to == 1


@pytest.mark.parametrize(("after", "warns"), [(3.0, False), (4.5, True)])
def test_23_latency_is_measured_and_a_rise_is_reported(monkeypatch, after, warns):
    monkeypatch.setattr(summary, "latencies_ms", lambda *_args, **_options: [4.0, after])
    report = pruned(Random(), vgg(), stripes(4), Budget(macs=0.5)).report
    assert (report.before["latency_ms"], report.after["latency_ms"]) == (4.0, after)
    assert report.settings["latency_batch_size"] == 32
    assert "lower quartile of forward passes of 32 samples on cpu" in " ".join(str(report).split())
    assert any("latency did not fall (4 ms before, 4.5 ms" in w for w in report.warnings) == warns


def test_23_without_a_cut_no_latency_has_to_fall(monkeypatch):
    monkeypatch.setattr(summary, "latencies_ms", lambda *_args, **_options: [4.0, 4.5])
    assert pruned(Full(), vgg(), stripes(4), None).report.warnings == ()


def test_23_latency_is_measured_by_default_in_a_moment_and_can_be_left_out():
    model, config = vgg(), STAMPConfig(measure_latency=False)
    report = pruned(Random(), model, stripes(4), Budget(macs=0.5)).report
    assert report.before["latency_ms"] > 0 < report.after["latency_ms"]
    for method in (STAMPPruner(model, config=config), Random(measure_latency=False)):
        report = pruned(method, model, stripes(4), Budget(macs=0.5)).report
        assert "latency_ms" not in report.before | report.after
        assert "latency" not in str(report)


# 24: the file of a slim net


def test_24_the_slim_net_comes_back_through_its_class(tmp_path):
    result = pruned(Random(), vgg(), stripes(4), Budget(macs=0.5))
    result.save(tmp_path / "slim.safetensors")
    with pytest.raises(RuntimeError, match="size mismatch"):  # the plain way
        vgg().load_state_dict(result.model.state_dict())
    loaded = load_slim(tmp_path / "slim.safetensors", vgg)
    images = stripes(4)[0]
    assert type(loaded) is VGG
    assert torch.equal(loaded(images), result.model.eval()(images))


# 25: ONNX


@pytest.mark.parametrize("make", [vgg, resnet, lambda: seeded(mobile_net)])
def test_25_the_exported_net_has_the_slim_shapes_and_the_same_outputs(make, tmp_path):
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    images = stripes(2, 4)[0]
    slim = pruned(Random(), make(), stripes(4, 4), Budget(macs=0.4)).model.eval()
    path = tmp_path / "slim.onnx"
    batch = torch.export.Dim("batch")
    torch.onnx.export(
        slim, (images[:2],), path, dynamo=True, verbose=False, dynamic_shapes=({0: batch},)
    )
    proto = onnx.load(path)
    kernels = sorted(tuple(t.dims) for t in proto.graph.initializer if len(t.dims) == 4)
    assert kernels == sorted(tuple(p.shape) for p in slim.parameters() if p.dim() == 4)
    held = sum(int(np.prod(t.dims)) for t in proto.graph.initializer)
    assert held <= 1.01 * sum(t.numel() for t in slim.state_dict().values()) + 64
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for count in (1, 5):
        (out,) = session.run(None, {session.get_inputs()[0].name: images[:count].numpy()})
        with torch.no_grad():
            assert difference(slim(images[:count]), torch.from_numpy(out)) < 1e-4


# 26: batch-norm statistics after the cut


def test_26_statistics_are_estimated_anew_by_default_and_accuracies_are_reported():
    model = vgg()
    finetune(model, loader(), epochs=6, lr=0.1, progress=False)
    images = stripes(16)[0]
    bare = dataclasses.replace(STAMPConfig(), fit_head=False, reconstruct=False)
    off = dataclasses.replace(bare, recalibrate=False)
    found = {}
    for name, config in {"default": STAMPConfig(), "on": bare, "off": off}.items():
        pruner = STAMPPruner(model, torch.zeros(1, 3, 8, 8), config=config)
        pruner.meta_fitted = True  # the head is the model's own
        found[name] = pruner.prune(loader(), Budget(macs=0.3), progress=False)
    metrics = {name: result.report.metrics for name, result in found.items()}
    assert metrics["off"]["target_accuracy_before"] > 0.95
    assert metrics["off"]["target_accuracy_after"] < metrics["on"]["target_accuracy_after"] - 0.2
    assert metrics["default"]["target_accuracy_after"] > 0.9
    assert "accuracy on the images pruned for, before" in str(found["on"].report)
    for name, result in found.items():
        measured = result.evaluate(loader())
        assert measured == pytest.approx(metrics[name]["target_accuracy_after"])
    for name in ("default", "on"):
        norm, seen = found[name].model.features[1], []
        handle = norm.register_forward_pre_hook(lambda _m, args, s=seen: s.append(args[0]))
        with torch.no_grad():
            found[name].model.eval()(images)
        handle.remove()
        assert torch.allclose(norm.running_mean, seen[0].mean((0, 2, 3)), atol=1e-4)


# 28: an optimizer from before


def test_28_an_optimizer_from_before_does_not_know_the_slim_net():
    model = vgg()
    old = torch.optim.SGD(model.parameters(), lr=0.1)
    result = pruned(Random(), model, stripes(4), Budget(macs=0.5))
    dense_before, before = snapshot(model), snapshot(result.model)
    storage = {p.untyped_storage().data_ptr() for p in model.parameters()}
    for p in result.model.parameters():
        assert p.is_leaf
        assert p.requires_grad
        assert p.untyped_storage().data_ptr() not in storage
    images, labels = stripes(4)
    result.model.eval()
    nn.functional.cross_entropy(result.model(images), labels).backward()
    old.step()
    assert same_state(result.model, before)
    new = torch.optim.SGD(result.model.parameters(), lr=0.1)
    new.step()
    assert not same_state(result.model, before)
    assert same_state(model, dense_before)


@pytest.mark.parametrize("thing", [PruneResult, PruneResult.finetune, finetune])
def test_28_the_documentation_says_to_build_a_new_one(thing):
    text = " ".join(thing.__doc__.split())
    assert "optimizer" in text
    assert "new" in text
