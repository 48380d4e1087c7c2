from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nets import conv_bn
from stripes import dataset, hooks, loader, resnet, same_state, snapshot, stripes, vgg
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torch.utils.flop_counter import FlopCounterMode

from stamppruner import (
    Budget,
    PruneResult,
    STAMPConfig,
    StampError,
    STAMPPruner,
    TaskSampler,
    check_equivalence,
    finetune,
    mask,
)
from stamppruner.encoders import DeepSets
from stamppruner.errors import (
    BudgetError,
    CheckpointError,
    DataError,
    UnsupportedModelError,
)
from stamppruner.io import read_safetensors, write_safetensors
from stamppruner.posteriors import BetaBernoulli
from stamppruner.pruner import NotMetaFittedWarning, UnlikeImagesWarning
from stamppruner.pruner_file import FORMAT

SMALL = STAMPConfig(
    iterations=3, tasks_per_iteration=2, ways=3, shots=8, minibatch_size=12, set_size=64
)
BARE = {"fit_head": False, "recalibrate": False, "reconstruct": False}
IMAGES, LABELS = stripes(8)
HALF = Budget(macs=0.5)


class Tiny(nn.Module):
    """A net of the user's own, residual, without a bias in its head."""

    def __init__(self, classes: int = 6) -> None:
        super().__init__()
        self.stem, self.body = conv_bn(3, 8), conv_bn(8, 8)
        self.wide = nn.Conv2d(8, 12, 3, stride=2)
        self.out = nn.Linear(12, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.body(x)).relu()
        return self.out(self.wide(x).relu().mean((2, 3)))


def tiny(classes: int = 6) -> Tiny:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return Tiny(classes)


@pytest.fixture(scope="module")
def backbone() -> nn.Module:
    model = vgg()
    finetune(model, loader(), epochs=5, lr=0.1, progress=False)
    return model


@pytest.fixture(scope="module")
def fitted(backbone: nn.Module) -> STAMPPruner:
    return STAMPPruner(backbone, config=SMALL).meta_fit(
        TaskSampler(dataset(16), 3, 8), progress=False
    )


@pytest.fixture(scope="module")
def result(fitted: STAMPPruner) -> PruneResult:
    return fitted.prune(loader(seed=3), HALF, progress=False)


def other(pruner: STAMPPruner, **changes: Any) -> STAMPPruner:
    """The same pruner with other settings."""
    own = copy.copy(pruner)
    own.config = dataclasses.replace(pruner.config, **changes)
    return own


def macs_of(model: nn.Module, image: Tensor) -> int:
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        copy.deepcopy(model).eval()(image)
    return counter.get_total_flops() // 2


# What is promised of the user's model and of the slim one


def test_the_users_model_is_never_changed() -> None:
    model = tiny().train()
    model.body.eval()
    before, modes = snapshot(model), [m.training for m in model.modules()]
    drawn = torch.random.get_rng_state()
    pruner = STAMPPruner(model, IMAGES[:1], config=SMALL)
    pruner.meta_fit(TaskSampler(dataset(16), 3, 8), progress=False)
    target = [(IMAGES, LABELS % 4)]
    pruned = pruner.prune(target, HALF, progress=False)
    pruned.finetune(target, epochs=1, progress=False)
    assert same_state(model, before)
    assert [m.training for m in model.modules()] == modes
    assert hooks(model) == 0
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), drawn)


@pytest.mark.parametrize("make", [tiny, vgg, resnet])
def test_the_slim_model_is_plain(make: Any) -> None:
    with pytest.warns(NotMetaFittedWarning):
        pruned = STAMPPruner(make(), config=SMALL).prune(loader(), HALF, progress=False)
    slim = pruned.model
    assert type(slim) is type(make())
    assert hooks(slim) == 0
    assert all(p.is_leaf and p.requires_grad for p in slim.parameters())
    if make is tiny:
        assert b"stamppruner" not in pickle.dumps(slim)
    slim.eval()
    expected = slim(IMAGES)
    for again in (copy.deepcopy(slim), pickle.loads(pickle.dumps(slim))):
        assert torch.equal(again(IMAGES), expected)


def test_right_after_the_cut_it_is_the_masked_dense_network(fitted: STAMPPruner) -> None:
    pruner = other(fitted, **BARE, target_evidence=0.0)
    pruned = pruner.prune(loader(), HALF, progress=False)
    dense = pruner._gated().model
    verdict = check_equivalence(dense, pruned.plan)
    assert verdict, str(verdict)
    with torch.no_grad():
        slim, masked = pruned.model.eval()(IMAGES), mask(dense, pruned.plan).eval()(IMAGES)
        full = copy.deepcopy(dense).eval()(IMAGES)
    assert torch.allclose(slim, masked, atol=1e-4)
    assert not torch.allclose(slim, full, atol=1e-2)


def test_the_plan_of_the_result_is_proved(result: PruneResult, fitted: STAMPPruner) -> None:
    assert fitted._gated().model.classifier.out_features == 6
    assert check_equivalence(fitted._gated().model, result.plan)


# Budgets and reports


@pytest.mark.parametrize(
    "budget",
    [Budget(macs=0.2), Budget(macs=0.7), Budget(params=0.4), Budget(macs=0.6, params=0.3)],
)
def test_budgets_are_met_from_below_and_used(fitted: STAMPPruner, budget: Budget) -> None:
    pruned = fitted.prune(loader(), budget, progress=False)
    dense = fitted._gated().model
    shares = {
        "macs": macs_of(pruned.model, IMAGES[:1]) / macs_of(dense, IMAGES[:1]),
        "params": sum(p.numel() for p in pruned.model.parameters())
        / sum(p.numel() for p in dense.parameters()),
    }
    bounds = budget.bounds()
    assert all(shares[name] <= bound for name, bound in bounds.items())
    assert any(shares[name] > bound - 0.15 for name, bound in bounds.items())
    assert pruned.report.budget == bounds
    assert pruned.report.reached == pytest.approx({name: shares[name] for name in bounds})


@pytest.mark.parametrize("make", [tiny, vgg, resnet])
@pytest.mark.parametrize("classes", [4, 6])
def test_numbers_in_the_report_are_actual_counts(make: Any, classes: int) -> None:
    pruner = STAMPPruner(make(), config=SMALL)
    with pytest.warns(NotMetaFittedWarning):
        pruned = pruner.prune(loader(classes=classes), Budget(macs=0.4), progress=False)
    slim, report, dense = pruned.model, pruned.report, make(classes)
    for side, model in ((report.before, dense), (report.after, slim)):
        assert side["params"] == sum(p.numel() for p in model.parameters())
        assert side["macs"] == macs_of(model, IMAGES[:1])
        tensors = model.state_dict().values()
        header = side["size_bytes"] - sum(t.numel() * t.element_size() for t in tensors)
        assert 0 < header < 32_000
        assert side["latency_ms"] > 0
    assert sum(row.params_after for row in report.layers) == report.after["params"]
    assert sum(row.macs_after for row in report.layers) == report.after["macs"]
    modules = dict(slim.named_modules())
    for row in report.layers:
        weight = modules[row.name].weight
        assert row.out_after == len(weight)
        if row.kind == "mixing":
            assert row.in_after == weight.shape[1]
    assert {g.name: list(g.kept) for g in report.groups} == pruned.plan.record()
    assert report.model == type(dense).__name__
    assert report.timings.keys() >= {"choose_channels", "cut_and_prove", "fit_weights"}


def test_without_a_budget_the_threshold_decides(fitted: STAMPPruner) -> None:
    pruner = other(fitted, target_evidence=0.0, threshold=0.6)
    pruned = pruner.prune(loader(), progress=False)
    target = fitted.prune(loader(), progress=False).plan.graph
    images = stripes(16)[0]
    scores = fitted.keep_probability(images)
    kept = pruned.plan.keep
    assert 0 < kept.sum() < len(kept)
    for group in target.groups:
        chosen, values = kept[group.channels], scores[group.channels]
        wanted = max(1, int((values >= 0.6).sum()))
        assert abs(int(chosen.sum()) - wanted) <= 1  # the set image is summed in another order
        assert values[chosen].min() >= values[~chosen].max(initial=0.0) - 1e-5
    assert pruned.report.budget is None


def test_a_longer_budget_keeps_what_a_shorter_one_keeps(fitted: STAMPPruner) -> None:
    plans = [fitted.prune(loader(), Budget(macs=m), progress=False).plan for m in (0.2, 0.6)]
    assert (plans[0].keep <= plans[1].keep).all()
    assert plans[0].keep.sum() < plans[1].keep.sum()


# Heads and accuracy


@pytest.mark.parametrize("classes", [2, 4, 6])
def test_the_head_gets_the_targets_classes(fitted: STAMPPruner, classes: int) -> None:
    pruned = fitted.prune(loader(classes=classes), HALF, progress=False)
    assert pruned.model.classifier.out_features == classes
    assert pruned.model(IMAGES).shape == (len(IMAGES), classes)
    assert pruned.evaluate(loader(classes=classes, seed=9)) > 1.5 / classes
    assert fitted._gated().model.classifier.out_features == 6


def test_more_classes_than_the_head_had(fitted: STAMPPruner) -> None:
    shifted = [(IMAGES, LABELS + 3)]
    pruned = fitted.prune(shifted, HALF, progress=False)
    assert pruned.model.classifier.out_features == 9
    assert pruned.evaluate([(IMAGES, LABELS + 3)]) > 0.4


def test_a_new_head_is_fitted_even_if_old_ones_are_to_stay(fitted: STAMPPruner) -> None:
    pruner = other(fitted, fit_head=False)
    assert pruner.prune(loader(classes=3), HALF, progress=False).evaluate(loader(classes=3)) > 0.6
    kept = other(fitted, **BARE).prune(loader(), HALF, progress=False).model.classifier
    own = fitted._gated().model.classifier
    assert torch.equal(kept.bias, own.bias)


def test_fine_tuning_and_evaluation_enter_the_report(fitted: STAMPPruner) -> None:
    pruned = fitted.prune(loader(), HALF, progress=False)
    first = pruned.evaluate(loader())
    history = pruned.finetune(loader(), epochs=3, progress=False)
    second = pruned.evaluate(loader())
    assert len(history) == 3
    assert pruned.history is history
    metrics = dict(pruned.report.metrics)
    assert 0.5 < metrics.pop("target_accuracy_after") <= 1
    assert 0.5 < metrics.pop("target_accuracy_before") <= 1
    assert metrics == {"accuracy_after_cut": first, "accuracy_after_finetune": second}
    assert pruned.report.timings["finetune"] > 0
    assert second >= first - 0.05
    assert "accuracy after cut" in str(pruned.report)


# Seeds


def test_the_same_seed_gives_the_same_plan_and_weights() -> None:
    found = []
    for seed in (0, 0, 1):
        pruner = STAMPPruner(tiny(), config=dataclasses.replace(SMALL, seed=seed))
        pruner.meta_fit(TaskSampler(dataset(16), 3, 8, seed=seed), progress=False)
        found.append(pruner.prune(loader(), HALF, progress=False))
    assert found[0].plan == found[1].plan
    assert same_state(found[0].model, found[1].model.state_dict())
    assert not same_state(found[0].model, found[2].model.state_dict())


def test_pruning_does_not_wear_the_pruner_out(fitted: STAMPPruner, result: PruneResult) -> None:
    net = fitted._gated()
    before = [snapshot(m) for m in (net.model, net.posterior, net.encoder)]
    fitted.prune(loader(classes=3), Budget(macs=0.3), progress=False)
    again = fitted.prune(loader(seed=3), HALF, progress=False)
    assert again.plan == result.plan
    assert same_state(again.model, result.model.state_dict())
    for module, state in zip((net.model, net.posterior, net.encoder), before, strict=True):
        assert same_state(module, state)


def test_keep_probabilities_follow_the_set(fitted: STAMPPruner) -> None:
    first = fitted.keep_probability(IMAGES[LABELS == 0])
    second = fitted.keep_probability(IMAGES[LABELS == 4])
    assert first.shape == (fitted.graph.num_channels,)
    assert ((first >= 0) & (first <= 1)).all()
    assert np.array_equal(first, fitted.keep_probability(IMAGES[LABELS == 0]))
    assert not np.array_equal(first, second)


# Meta-fitting


def test_meta_fit_returns_itself_with_a_history(fitted: STAMPPruner) -> None:
    assert isinstance(fitted, STAMPPruner)
    assert fitted.meta_fitted
    assert fitted.history["iteration"] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["labelled data set", "list of loaders", "list of data sets"])
def test_reference_data_in_other_forms(kind: str) -> None:
    images, labels = stripes(16)
    parts = [labels < 3, labels >= 3]
    data = {
        "labelled data set": dataset(16),
        "list of loaders": [[(images[p], labels[p])] for p in parts],
        "list of data sets": [torch.utils.data.TensorDataset(images[p], labels[p]) for p in parts],
    }[kind]
    pruner = STAMPPruner(tiny(), config=SMALL).meta_fit(data, progress=False)
    assert len(pruner.history) == 3
    pruned = pruner.prune(loader(classes=4), HALF, progress=False)
    assert pruned.model.out.out_features == 4


def test_meta_fit_and_prune_are_silent(
    capfd: pytest.CaptureFixture[str], fitted: STAMPPruner
) -> None:
    seen: list[int] = []
    pruner = STAMPPruner(tiny(), config=dataclasses.replace(SMALL, prune_epochs=0.5))
    pruner.meta_fit(
        TaskSampler(dataset(16), 3, 8), progress=False, callback=lambda i, _: seen.append(i)
    )
    pruner.prune(loader(), HALF, progress=False)
    assert capfd.readouterr() == ("", "")
    assert seen == [0, 1, 2]


def test_gates_may_go_on_learning_on_the_target(fitted: STAMPPruner) -> None:
    still = other(fitted, **BARE, target_evidence=0.0)
    moving = other(still, prune_epochs=1.0, weights_lr=0.01)
    for budget in (HALF, None):
        one, two = (p.prune(loader(), budget, progress=False) for p in (still, moving))
        assert not torch.equal(one.model.classifier.weight, two.model.classifier.weight)
    again = moving.prune(loader(), HALF, progress=False)
    assert same_state(again.model, moving.prune(loader(), HALF, progress=False).model.state_dict())


def test_the_papers_settings_run() -> None:
    config = STAMPConfig.paper(
        iterations=2, tasks_per_iteration=2, ways=3, shots=8, minibatch_size=12
    )
    pruner = STAMPPruner(tiny(), config=config).meta_fit(dataset(16), progress=False)
    assert pruner.prune(loader(classes=4), progress=False).model.out.out_features == 4


def test_protected_layers_stay_whole() -> None:
    pruner = STAMPPruner(vgg(), config=SMALL, protect=["features.4"])
    with pytest.warns(NotMetaFittedWarning):
        pruned = pruner.prune(loader(), Budget(macs=0.6), progress=False)
    assert pruned.model.features[4].out_channels == 12
    assert pruned.model.features[0].out_channels < 8
    assert "features.4" in pruned.report.protected


def test_other_encoders_and_posteriors_can_be_passed() -> None:
    model = vgg()
    graph = STAMPPruner(model, IMAGES[:1]).graph
    posterior, encoder = BetaBernoulli(graph.num_channels, alpha=0.1), DeepSets(3, seed=1)
    pruner = STAMPPruner(model, config=SMALL, posterior=posterior, encoder=encoder)
    pruner.meta_fit(dataset(16), progress=False)
    assert pruner._gated().posterior is posterior
    assert pruner._gated().encoder is encoder


# Wrong input


def nan_images() -> Tensor:
    images = IMAGES.clone()
    images[3] = math.nan
    return images


BAD_TARGETS: dict[str, tuple[Any, str]] = {
    "empty": ([], "empty"),
    "negative labels": ([(IMAGES, LABELS - 1)], "span -1"),
    "float labels": ([(IMAGES, LABELS.float())], "give a tensor of integers"),
    "one class": ([(IMAGES, LABELS * 0)], "single class"),
    "NaN": ([(nan_images(), LABELS)], "NaN"),
    "grey images": ([(IMAGES[:, :1], LABELS)], "1 channels and the model reads 3"),
    "double images": ([(IMAGES.double(), LABELS)], "torch.float64"),
    "images too small": ([(IMAGES[..., :1], LABELS)], "does not take images"),
    "no loader": (7, "is no loader"),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_unusable_targets(name: str, fitted: STAMPPruner) -> None:
    data, reason = BAD_TARGETS[name]
    net = fitted._gated()
    before = [snapshot(m) for m in (net.model, net.posterior, net.encoder)]
    with pytest.raises(DataError, match=reason):
        fitted.prune(data, HALF, progress=False)
    for module, state in zip((net.model, net.posterior, net.encoder), before, strict=True):
        assert same_state(module, state)
    assert hooks(net.model) == 0


def test_a_generator_as_the_first_target() -> None:
    with pytest.raises(DataError, match="read only once"):
        STAMPPruner(tiny()).prune((b for b in [(IMAGES, LABELS)]), HALF)


BAD_REFERENCES: dict[str, tuple[Any, str]] = {
    "empty list": ([], "at least one source"),
    "number": (3, "not a source of tasks"),
    "fewer images than shots": (dataset(4), "shots is 8"),
    "one class": (dataset(16, 1), "at least two classes"),
    "NaN": (torch.utils.data.TensorDataset(IMAGES * math.nan, LABELS), "NaN"),
    "float labels": (torch.utils.data.TensorDataset(IMAGES, LABELS.float()), "integer"),
    "classes beyond the outputs": (
        torch.utils.data.TensorDataset(IMAGES, LABELS + 5 * (LABELS == 5)),
        "class 10 and the model 6 outputs",
    ),
    "another size": (dataset(16, channels=1), "does not take images"),
}


@pytest.mark.parametrize("name", BAD_REFERENCES)
def test_unusable_references(name: str) -> None:
    data, reason = BAD_REFERENCES[name]
    model = tiny()
    before = snapshot(model)
    pruner = STAMPPruner(model, IMAGES[:1], config=SMALL)
    net = pruner._gated()
    gates = snapshot(net.posterior)
    with pytest.raises(DataError, match=reason):
        pruner.meta_fit(data, progress=False)
    assert same_state(model, before)
    assert same_state(net.model, before)
    assert same_state(net.posterior, gates)
    assert not pruner.meta_fitted


def test_models_without_layers_to_cut() -> None:
    for model in (nn.Flatten(), nn.Sequential(nn.Flatten(), nn.Linear(192, 6))):
        with pytest.raises(UnsupportedModelError):
            STAMPPruner(model, IMAGES[:1])
        with pytest.raises(UnsupportedModelError):
            STAMPPruner(model).prune(loader(), HALF)


def test_models_whose_outputs_are_no_logits() -> None:
    maps = nn.Sequential(conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 6, 1))
    pruner = STAMPPruner(maps, IMAGES[:1], config=SMALL)
    with pytest.raises(UnsupportedModelError, match="no logits"):
        pruner.prune(loader(), HALF)
    with pytest.raises(UnsupportedModelError, match="no logits"):
        pruner.meta_fit(dataset(16), progress=False)


def test_a_convolution_as_the_head_needs_enough_outputs() -> None:
    model = nn.Sequential(conv_bn(3, 8), nn.ReLU(), nn.Conv2d(8, 4, 8), nn.Flatten())
    pruner = STAMPPruner(model, IMAGES[:1], config=SMALL)
    with pytest.raises(DataError, match="6 classes and Sequential 4 outputs"):
        pruner.prune(loader(), HALF)
    with pytest.warns(NotMetaFittedWarning):
        pruned = pruner.prune(loader(classes=4), HALF, progress=False)
    assert pruned.model(IMAGES).shape[1] == 4


def test_budgets_below_the_floors(fitted: STAMPPruner) -> None:
    with pytest.raises(BudgetError, match="least reachable"):
        fitted.prune(loader(), Budget(macs=1e-4), progress=False)
    with pytest.raises(BudgetError, match="least reachable"):
        other(fitted, floor=0.9).prune(loader(), Budget(params=0.3), progress=False)
    with pytest.raises(BudgetError, match=r"pass Budget\(macs"):
        fitted.prune(loader(), 0.25, progress=False)  # type: ignore[arg-type]


def test_pruning_before_meta_fit_warns_and_notes_it() -> None:
    pruner = STAMPPruner(tiny(), config=SMALL)
    with pytest.warns(NotMetaFittedWarning, match="not meta-fitted"):
        pruned = pruner.prune(loader(), HALF, progress=False)
    assert any("not meta-fitted" in text for text in pruned.report.warnings)
    assert "not meta-fitted" in str(pruned.report)


def test_no_warning_after_meta_fit(fitted: STAMPPruner) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NotMetaFittedWarning)
        pruned = other(fitted, measure_latency=False).prune(loader(), HALF, progress=False)
    assert pruned.report.warnings == ()


def test_before_it_was_traced(tmp_path: Path) -> None:
    pruner = STAMPPruner(tiny())
    for use in (lambda: pruner.graph, lambda: pruner.save(tmp_path / "p"), pruner._parts):
        with pytest.raises(StampError, match="has not been traced"):
            use()
    assert list(tmp_path.iterdir()) == []


# Files


def test_a_saved_pruner_prunes_to_the_same_plan(
    fitted: STAMPPruner, result: PruneResult, tmp_path: Path
) -> None:
    path = tmp_path / "vgg.stamp.safetensors"
    fitted.save(path)
    assert list(tmp_path.iterdir()) == [path]
    fresh = vgg(seed=7)
    before = snapshot(fresh)
    pruner = STAMPPruner.load(path, fresh)
    assert same_state(fresh, before)
    assert pruner.config == fitted.config
    assert pruner.history == fitted.history
    assert pruner.meta_fitted
    again = pruner.prune(loader(seed=3), HALF, progress=False)
    assert again.plan == result.plan
    assert same_state(again.model, result.model.state_dict())


def test_a_pruner_with_parts_of_ones_own_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    pruner = STAMPPruner(tiny(), IMAGES[:1], config=SMALL, encoder=DeepSets(3, seed=4))
    pruner.save(path)
    again = STAMPPruner.load(path, tiny(), encoder=DeepSets(3, seed=0))
    assert not again.meta_fitted
    assert np.array_equal(again.keep_probability(IMAGES), pruner.keep_probability(IMAGES))
    with pytest.raises(CheckpointError, match="does not fit the encoder"):
        STAMPPruner.load(path, tiny())


def test_protection_is_remembered(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    STAMPPruner(vgg(), IMAGES[:1], config=SMALL, protect=["features.4"]).save(path)
    again = STAMPPruner.load(path, vgg())
    assert again.protect == ("features.4",)
    assert all("features.4" not in group.name for group in again.graph.groups)


def test_another_model_is_refused(fitted: STAMPPruner, tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    fitted.save(path)
    for model in (resnet(), vgg(9), vgg(channels=1), tiny()):
        before = snapshot(model)
        with pytest.raises(CheckpointError, match="does not fit"):
            STAMPPruner.load(path, model)
        assert same_state(model, before)


def test_a_model_with_other_wiring_is_refused(tmp_path: Path) -> None:
    class Rewired(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            x = self.body(self.stem(x).relu()).relu()
            return self.out(self.wide(x).relu().mean((2, 3)))

    path = tmp_path / "p.safetensors"
    STAMPPruner(tiny(), IMAGES[:1]).save(path)
    with pytest.raises(CheckpointError, match="channel groups"):
        STAMPPruner.load(path, Rewired())


def test_damaged_foreign_and_missing_files(
    fitted: STAMPPruner, result: PruneResult, tmp_path: Path
) -> None:
    good = tmp_path / "good"
    fitted.save(good)
    blob = good.read_bytes()
    files = {
        "missing": None,
        "empty": b"",
        "truncated": blob[: len(blob) // 2],
        "damaged": blob[:-40] + bytes(40),
        "text": b"hello, this is no safetensors file at all",
    }
    for name, content in files.items():
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError):
            STAMPPruner.load(tmp_path / name, vgg())
    result.save(tmp_path / "slim")
    with pytest.raises(CheckpointError, match="not a pruner of this package"):
        STAMPPruner.load(tmp_path / "slim", vgg())
    write_safetensors(tmp_path / "foreign", {"x": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="not a pruner of this package"):
        STAMPPruner.load(tmp_path / "foreign", vgg())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "version 99"),
        ({"image_shape": None}, "damaged"),
        ({"image_shape": ["a"]}, "damaged"),
        ({"config": {"colour": 1}}, "damaged"),
        ({"config": {"ways": "x"}}, "damaged"),
        ({"groups": []}, "channel groups"),
        ({"history": 3}, "damaged"),
    ],
)
def test_records_that_do_not_hold_together(
    fitted: STAMPPruner, tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    fitted.save(good)
    tensors, metadata = read_safetensors(good)
    record = json.loads(metadata[FORMAT]) | change
    write_safetensors(bad, tensors, {FORMAT: json.dumps(record)})
    with pytest.raises(CheckpointError, match=reason):
        STAMPPruner.load(bad, vgg())


def test_paths_that_cannot_be_written(
    fitted: STAMPPruner, result: PruneResult, tmp_path: Path
) -> None:
    for path in (tmp_path / "no" / "such" / "folder", tmp_path):
        with pytest.raises(CheckpointError):
            fitted.save(path)
        with pytest.raises(CheckpointError):
            result.save(path)
    assert list(tmp_path.iterdir()) == []


class Negated(nn.Module):
    """What follows the linear layer decides about the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = vgg()

    def forward(self, x: Tensor) -> Tensor:
        return -self.net(x)


class Averaged(Negated):
    """The linear layer reads many vectors a sample."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.net.features(x).flatten(2).transpose(1, 2)
        return self.net.classifier(maps).mean(1)


@pytest.mark.parametrize("make", [Negated, Averaged])
def test_a_layer_that_is_not_the_head_is_not_replaced(make: Any) -> None:
    pruner = STAMPPruner(make(), IMAGES[:1], config=SMALL)
    with pytest.warns(NotMetaFittedWarning):
        result = pruner.prune(dataset(16, classes=3), HALF, progress=False)
    assert any("head was left as it is" in note for note in result.report.warnings)
    assert result.model.net.classifier.out_features == 6
    assert result.model(IMAGES[:2]).abs().max() > 0


def test_log_softmax_may_follow_the_head() -> None:
    model = nn.Sequential(vgg(), nn.LogSoftmax(1))
    with pytest.warns(NotMetaFittedWarning):
        result = STAMPPruner(model, config=SMALL).prune(dataset(16, classes=3), HALF)
    assert result.model(IMAGES[:2]).shape == (2, 3)
    assert result.evaluate(dataset(16, classes=3)) > 0.8


def test_outer_contexts_without_gradients_do_no_harm() -> None:
    for context in (torch.no_grad, torch.inference_mode):
        pruner = STAMPPruner(vgg(), config=SMALL)
        with context():
            pruner.meta_fit(dataset(16), progress=False)
            result = pruner.prune(dataset(16), HALF, progress=False)
            result.finetune(dataset(16), epochs=1, progress=False)
        assert result.history["loss"][-1] > 0


def test_modes_of_single_modules_survive_meta_fitting() -> None:
    model = vgg().train()
    frozen = next(name for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d))
    model.get_submodule(frozen).eval()
    pruner = STAMPPruner(model, config=SMALL).meta_fit(dataset(16), progress=False)
    result = pruner.prune(dataset(16), HALF, progress=False)
    assert not result.model.get_submodule(frozen).training
    assert result.model.training


def test_labels_that_are_ids_are_refused() -> None:
    images, labels = stripes(16, 3)
    ids = torch.utils.data.TensorDataset(images, labels * 100_000)
    with pytest.raises(DataError, match="look like ids"):
        STAMPPruner(vgg(), config=SMALL).prune(ids, HALF)


def test_images_of_another_size_are_proved_there_and_noted() -> None:
    pruner = STAMPPruner(vgg(), IMAGES[:1], config=SMALL)
    large = torch.utils.data.TensorDataset(torch.randn(24, 3, 16, 16), torch.arange(24) % 3)
    with pytest.warns(NotMetaFittedWarning):
        result = pruner.prune(large, HALF, progress=False)
    assert any("(3, 8, 8)" in note for note in result.report.warnings)


def test_numbers_of_numpy_are_numbers() -> None:
    assert Budget(macs=np.float32(0.5)) == Budget(macs=0.5)
    assert Budget(params=np.int64(5000)) == Budget(params=5000)


def test_data_sets_without_a_transform_name_the_remedy() -> None:
    sizes = [(torch.zeros(3, 8, 8), 0), (torch.zeros(3, 9, 9), 1)]

    class Ragged(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return sizes[index]

    with pytest.raises(DataError, match="of one size"):
        STAMPPruner(vgg(), IMAGES[:1], config=SMALL).prune(Ragged(), HALF)


def test_a_class_in_place_of_a_model() -> None:
    with pytest.raises(UnsupportedModelError, match="not its class"):
        STAMPPruner(nn.Linear)  # type: ignore[arg-type]


def test_images_of_another_scale_are_warned_about(fitted: STAMPPruner, tmp_path: Path) -> None:
    images, labels = stripes(8, seed=3)
    scaled = TensorDataset(images * 255, labels)
    fitted.save(tmp_path / "pruner.safetensors")
    for pruner in (fitted, STAMPPruner.load(tmp_path / "pruner.safetensors", vgg())):
        with pytest.warns(UnlikeImagesWarning, match="normalise both alike"):
            result = pruner.prune(scaled, HALF, progress=False)
        assert any("normalise both alike" in note for note in result.report.warnings)
