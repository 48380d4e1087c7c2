"""What every baseline promises."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import conv_bn, head
from stripes import SIZE, hooks, loader, resnet, same_state, snapshot, stripes, vgg
from torch import nn

from stamppruner import Budget, check_equivalence, load_slim, trace_channels
from stamppruner.baselines import (
    BASELINES,
    FPGM,
    LAMP,
    SNIP,
    Baseline,
    BBDropout,
    BNScale,
    ChannelBaseline,
    DependentBBDropout,
    EdgePopup,
    Full,
    Hessian,
    Magnitude,
    MetaPruning,
    Random,
    RandomWidths,
    Taylor,
    WeightBaseline,
)
from stamppruner.baselines._base import rank_within_groups
from stamppruner.errors import BudgetError, DataError, UnsupportedModelError
from stamppruner.heads import with_classes
from stamppruner.models import VGG
from stamppruner.report import Report
from stamppruner.result import fit_head_
from stamppruner.target import sample_target
from stamppruner.zeros import held, released, weights_of


class Searched(MetaPruning):
    """A search of seconds, whose network keeps the weights that were generated."""

    def __init__(self, **settings: Any) -> None:
        small = {"epochs": 3, "population": 4, "generations": 2, "reinitialise": False}
        super().__init__(**{**small, **settings})


WITHOUT_DATA = (Random, RandomWidths, Magnitude, FPGM, LAMP, BNScale)
CHANNELS = (*WITHOUT_DATA, Hessian, Taylor, BBDropout, DependentBBDropout, Searched)
WEIGHTS = (SNIP, EdgePopup)
X = torch.zeros(1, 3, SIZE, SIZE)
IMAGES, LABELS = stripes(8)
HALF = Budget(macs=0.5)


@pytest.fixture(params=CHANNELS, ids=lambda kind: kind.__name__)
def kind(request: pytest.FixtureRequest) -> type[ChannelBaseline]:
    """A method that removes channels."""
    return request.param


@pytest.fixture(params=WEIGHTS, ids=lambda kind: kind.__name__)
def sparse(request: pytest.FixtureRequest) -> type[WeightBaseline]:
    """A method that holds weights at zero."""
    return request.param


@pytest.fixture(params=(*CHANNELS, *WEIGHTS), ids=lambda kind: kind.__name__)
def method(request: pytest.FixtureRequest) -> type[Baseline]:
    """Any method."""
    return request.param


def half(method: type[Baseline]) -> Budget:
    return HALF if method.structured else Budget(params=0.5)


def test_the_suite_runs_over_all_methods() -> None:
    assert set(BASELINES.values()) == {Full, MetaPruning, *CHANNELS, *WEIGHTS} - {Searched}
    assert all(kind.__doc__ and kind.name for kind in BASELINES.values())


def unlike_norms_(model: nn.Module) -> nn.Module:
    """Batch norms that differ from channel to channel, as after training."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.copy_(torch.linspace(0.5, 1.5, len(module.weight)))
    return model


@pytest.mark.parametrize("make", [vgg, resnet])
def test_scores_are_finite_one_a_channel_and_pure(kind: type[ChannelBaseline], make: Any) -> None:
    model = unlike_norms_(make()).train()
    graph, target = trace_channels(model, X), sample_target(loader(), 100)
    dense, graph = with_classes(model, graph, 6)
    before = snapshot(dense)
    scores = kind(seed=1).scores(dense, graph, target)
    assert scores.shape == (graph.num_channels,)
    assert np.isfinite(scores).all()
    assert len(np.unique(scores)) > 1
    assert np.array_equal(scores, kind(seed=1).scores(dense, graph, target))
    assert same_state(dense, before)
    assert hooks(dense) == 0
    assert dense.training


@pytest.mark.parametrize("reconstruct", [False, True])
def test_prune_leaves_the_model_and_gives_a_plain_one(
    kind: type[ChannelBaseline], reconstruct: bool
) -> None:
    model = resnet().train()
    before = snapshot(model)
    drawn = torch.random.get_rng_state()
    result = kind(reconstruct=reconstruct).prune(model, [(IMAGES, LABELS)], HALF)
    assert same_state(model, before)
    assert model.training
    assert hooks(model) == 0
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert type(result.model) is type(model)
    assert hooks(result.model) == 0
    assert check_equivalence(model, result.plan)
    assert result.report.title == kind.name
    assert result.report.settings["reconstruct"] == reconstruct


def test_budgets_are_met_from_below(kind: type[ChannelBaseline]) -> None:
    for budget in (Budget(macs=0.3), Budget(params=0.4), Budget(macs=0.7, params=0.5)):
        reached = kind(measure_latency=False).prune(vgg(), loader(), budget).report.reached
        assert reached is not None
        assert all(reached[name] <= bound for name, bound in budget.bounds().items())
        assert any(reached[name] > bound - 0.2 for name, bound in budget.bounds().items())


def test_the_head_is_fitted_to_the_target(kind: type[ChannelBaseline]) -> None:
    result = kind(measure_latency=False).prune(vgg(), loader(classes=4), Budget(macs=0.7))
    assert result.model.classifier.out_features == 4
    assert result.evaluate(loader(classes=4, seed=5)) > 0.6


def test_the_same_call_gives_the_same_network(method: type[Baseline]) -> None:
    one, two = (
        method(seed=3, measure_latency=False).prune(vgg(), loader(), half(method)) for _ in range(2)
    )
    assert one.plan == two.plan
    assert same_state(one.model, two.model.state_dict())


def test_the_model_is_left_and_the_modes_are_kept(method: type[Baseline]) -> None:
    model = resnet().train()
    model.bn1.eval()
    before = snapshot(model)
    drawn = torch.random.get_rng_state()
    result = method(measure_latency=False).prune(model, [(IMAGES, LABELS)], half(method))
    assert same_state(model, before)
    assert model.training
    assert not model.bn1.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert hooks(model) == 0
    assert torch.equal(torch.random.get_rng_state(), drawn)
    assert type(result.model) is type(model)
    assert result.model.training
    assert not result.model.bn1.training
    assert all(p.requires_grad for p in result.model.parameters())
    assert hooks(result.model) == 0
    assert result.report.settings["seed"] == 0


class Fails(nn.Module):
    """Passes data through until it was called too often."""

    def __init__(self) -> None:
        super().__init__()
        self.left = 10**9

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= len(x)
        if self.left < 0 and torch.is_grad_enabled():
            raise RuntimeError("enough")
        return x


def test_nothing_is_left_behind_by_a_failure(method: type[Baseline]) -> None:
    """A pass that fails with gradients on, which only some methods make."""
    model = nn.Sequential(Fails(), vgg()).train()
    graph = trace_channels(model, X)
    model[0].left = 0
    before = snapshot(model)
    learns = method not in WITHOUT_DATA
    with pytest.raises(RuntimeError, match="enough") if learns else nullcontext():
        method(measure_latency=False).prune(model, loader(), half(method), graph=graph)
    assert same_state(model, before)
    assert hooks(model) == 0
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_reports_go_to_json_and_back(method: type[Baseline]) -> None:
    report = method(measure_latency=False).prune(vgg(), loader(), half(method)).report
    assert Report.from_json(report.to_json()) == report
    assert method.name in str(report)


def test_what_was_pruned_is_finetuned_and_saved(method: type[Baseline], tmp_path: Path) -> None:
    result = method(measure_latency=False).prune(vgg(), loader(), half(method))
    result.finetune(loader(), epochs=2, progress=False)
    result.save(tmp_path / "slim.safetensors")
    loaded = load_slim(tmp_path / "slim.safetensors", vgg())
    with torch.no_grad():
        assert torch.equal(loaded(IMAGES), result.model.eval()(IMAGES))
    assert loaded.state_dict().keys() == vgg().state_dict().keys()


def test_settings_of_no_one_are_refused(method: type[Baseline]) -> None:
    with pytest.raises(TypeError, match="no_such_setting"):
        method(no_such_setting=1)


def test_a_graph_traced_before_gives_the_same_plan(kind: type[ChannelBaseline]) -> None:
    model = vgg()
    graph = trace_channels(model, X)
    plans = [
        kind(measure_latency=False).prune(model, loader(), HALF, graph=g).plan
        for g in (None, graph)
    ]
    assert plans[0] == plans[1]


def test_floors_and_multiples_hold(kind: type[ChannelBaseline]) -> None:
    model = VGG(((16,), (24, 24)), 6)
    result = kind(floor=0.5, round_to=2, measure_latency=False).prune(
        model, loader(), Budget(macs=0.45)
    )
    for group in result.plan.graph.groups:
        kept = int(result.plan.keep[group.channels].sum())
        assert kept >= group.size / 2
        assert kept % 2 == 0


BAD: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "one class": ([(IMAGES, LABELS * 0)], "single class"),
    "negative labels": ([(IMAGES, LABELS - 1)], "span -1"),
    "generator": (((IMAGES, LABELS) for _ in range(2)), "read only once"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_targets(method: type[Baseline], name: str) -> None:
    data, reason = BAD[name]
    with pytest.raises(DataError, match=reason):
        method(measure_latency=False).prune(vgg(), data, half(method))


def test_images_that_do_not_fit_a_traced_model(method: type[Baseline]) -> None:
    model, graph = vgg(), trace_channels(vgg(), X)
    with pytest.raises(DataError, match="does not take images"):
        method(measure_latency=False).prune(
            model, [(IMAGES[:, :1], LABELS)], half(method), graph=graph
        )


def test_impossible_budgets_and_models(kind: type[ChannelBaseline]) -> None:
    with pytest.raises(BudgetError, match="least reachable"):
        kind(measure_latency=False).prune(vgg(), loader(), Budget(macs=1e-4))
    with pytest.raises(UnsupportedModelError, match="no channel of the model can be removed"):
        kind(measure_latency=False).prune(
            nn.Sequential(nn.Flatten(), nn.Linear(192, 6)), loader(), HALF
        )


def test_without_a_budget_nothing_is_removed(method: type[Baseline]) -> None:
    result = method(measure_latency=False).prune(vgg(), loader(classes=4), None)
    assert result.plan.keep.all()
    assert result.report.budget is None
    assert result.report.after["macs"] == result.report.before["macs"]
    assert result.report.after["params"] == result.report.before["params"]


# Methods that hold weights at zero


def test_a_share_of_all_parameters_is_met_and_costs_stay(sparse: type[WeightBaseline]) -> None:
    for share in (0.2, 0.6):
        model = resnet()
        result = sparse(measure_latency=False).prune(model, loader(), Budget(params=share))
        report = result.report
        total = sum(p.numel() for p in model.parameters())
        zeros = sum(int((m.weight == 0).sum()) for m in weights_of(released(result.model)).values())
        assert report.before["params"] == total
        assert report.after["params"] == total - zeros
        assert report.reached == {"params": (total - zeros) / total}
        assert share - 0.02 < report.reached["params"] <= share
        assert report.after["macs"] == report.before["macs"]
        assert report.after["size_bytes"] == report.before["size_bytes"]
        assert sum(row.params_after for row in report.layers) == total - zeros
        assert f"{zeros} weights are held at zero" in report.warnings[0]
        assert result.plan.keep.all()


def test_a_number_of_parameters_is_met(sparse: type[WeightBaseline]) -> None:
    report = sparse(measure_latency=False).prune(vgg(), loader(), Budget(params=900)).report
    assert report.reached == {"params": report.after["params"]}
    assert 890 < report.after["params"] <= 900


def test_finetuning_keeps_the_zeros(sparse: type[WeightBaseline]) -> None:
    result = sparse(measure_latency=False).prune(vgg(), loader(), Budget(params=0.3))
    masks = {name: mask.clone() for name, mask in held(result.model).items()}
    result.finetune(loader(), epochs=3, progress=False)
    for name, mask in masks.items():
        assert torch.equal(result.model.get_submodule(name).weight != 0, mask)
    assert result.evaluate(loader(seed=5)) > 0.4


@pytest.mark.parametrize("budget", [HALF, Budget(params=0.5, macs=0.5), Budget(size_bytes=0.5)])
def test_other_costs_cannot_be_bounded(sparse: type[WeightBaseline], budget: Budget) -> None:
    with pytest.raises(BudgetError, match=r"pass Budget\(params=\.\.\.\)"):
        sparse(measure_latency=False).prune(vgg(), loader(), budget)


def test_budgets_below_what_is_left_whole(sparse: type[WeightBaseline]) -> None:
    with pytest.raises(BudgetError, match="least reachable is"):
        sparse(measure_latency=False).prune(vgg(), loader(), Budget(params=1e-3))


def test_layers_can_be_left_whole(sparse: type[WeightBaseline]) -> None:
    model = nn.Sequential(conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 16, 1), nn.ReLU(), head(16, 6))
    for skip, left in (
        ({"skip_1x1": False, "skip_linear": False}, {"0.0", "2", "4.2"}),
        ({"skip_1x1": True, "skip_linear": False}, {"0.0", "4.2"}),
        ({"skip_1x1": False, "skip_linear": True}, {"0.0", "2"}),
    ):
        result = sparse(**skip, measure_latency=False).prune(model, loader(), Budget(params=0.6))
        assert set(held(result.model)) == left


def test_networks_without_weights_to_hold(sparse: type[WeightBaseline]) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6))
    with pytest.raises(UnsupportedModelError, match="no weight that it can hold"):
        sparse(skip_linear=True, measure_latency=False).prune(model, loader(), Budget(params=0.5))
    maps = nn.Sequential(conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 6, 1))
    with pytest.raises(UnsupportedModelError, match="no logits"):
        sparse(measure_latency=False).prune(maps, loader(), Budget(params=0.5))


# What is special to each


def test_full_is_the_whole_network_with_a_head_for_the_target() -> None:
    model = vgg()
    result = Full().prune(model, loader(classes=4))
    convolutions = {n: p for n, p in model.named_parameters() if n.startswith("features.0")}
    assert result.plan.keep.all()
    own = dict(result.model.named_parameters())
    assert all(torch.equal(own[name], p) for name, p in convolutions.items())
    assert result.model.classifier.out_features == 4
    assert result.evaluate(loader(classes=4, seed=5)) > 0.6


def test_random_follows_the_seed_and_prunes_layers_alike() -> None:
    plans = [Random(seed=s).prune(vgg(), loader(), HALF).plan for s in (0, 1)]
    assert plans[0] != plans[1]
    shares = [plans[0].keep[g.channels].mean() for g in plans[0].graph.groups]
    assert max(shares) - min(shares) < 0.2


def test_taylor_sees_the_target() -> None:
    model = vgg()
    graph = trace_channels(model, X)
    scores = []
    for pick in ((0, 2), (3, 5)):
        chosen = torch.isin(LABELS, torch.tensor(pick))
        target = sample_target([(IMAGES[chosen], (LABELS[chosen] == pick[1]).long())], 100)
        dense, own = with_classes(model, graph, 2)
        fit_head_(dense, "classifier", target)
        scores.append(Taylor().scores(dense, own, target))
    assert np.corrcoef(scores[0], scores[1])[0, 1] < 0.99


def test_taylor_needs_logits_and_the_others_do_not() -> None:
    model = nn.Sequential(conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 6, 1))
    with pytest.raises(UnsupportedModelError, match="no logits"):
        Taylor().prune(model, loader(), HALF)
    with pytest.raises(UnsupportedModelError, match="no logits"):
        Hessian().prune(model, loader(), HALF)
    for kind in WITHOUT_DATA:
        slim = kind(measure_latency=False).prune(model, loader(), HALF).model
        assert slim[0][0].out_channels < 8
        assert slim(IMAGES).shape == (len(IMAGES), 6, SIZE, SIZE)


def test_ranks_run_from_zero_to_one_in_each_group() -> None:
    graph = trace_channels(vgg(), X)
    scores = np.random.default_rng(0).random(graph.num_channels)
    ranks = rank_within_groups(scores, graph)
    for group in graph.groups:
        assert sorted(ranks[group.channels]) == pytest.approx(np.linspace(0, 1, group.size))
        assert (ranks[group.channels].argsort() == scores[group.channels].argsort()).all()


def test_the_page_on_baselines_has_all_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
    assert [name for name in BASELINES if f"| `{name}` |" not in page] == []
