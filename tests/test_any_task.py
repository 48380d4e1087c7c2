"""Pruning for what is not classification: segmentation, regression, several labels and heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stripes import loader, same_state, snapshot, stripes, vgg
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from stamppruner import Budget, STAMPConfig, STAMPPruner, check_equivalence
from stamppruner.baselines import BASELINES, Magnitude, Taylor
from stamppruner.errors import CheckpointError, ConfigError, DataError, UnsupportedModelError
from stamppruner.tasks import SampleTasks, TaskSampler

QUICK = STAMPConfig(
    iterations=2, tasks_per_iteration=2, ways=4, shots=4, minibatch_size=8, measure_latency=False,
    round_to=1,
)  # fmt: skip
HALF = Budget(macs=0.5)


class UNet(nn.Module):
    """Two classes for every pixel, with a skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(12, 16, 3, padding=1), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 12, 2, stride=2)
        self.out = nn.Conv2d(24, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = self.down(x)
        return self.out(torch.cat([high, self.up(self.deep(high))], 1))


class TwoHeads(nn.Module):
    """A class and a brightness."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        norm = nn.BatchNorm2d(16)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.ReLU(), nn.Conv2d(16, 16, 3))
        self.kind, self.light = nn.Linear(16, 6), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x).mean((2, 3))
        return {"kind": self.kind(features), "light": self.light(features)}


def segments(seed: int = 0) -> TensorDataset:
    images, _ = stripes(6, seed=seed)
    return TensorDataset(images, (images.mean(1) > 0.5).long())


def both(seed: int = 0) -> TensorDataset:
    images, labels = stripes(6, seed=seed)
    light = images.mean((1, 2, 3))
    return TensorDataset(images, torch.stack([labels.float(), light], 1))


def loss_of_both(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    kind = F.cross_entropy(outputs["kind"], targets[:, 0].long())
    return kind + F.mse_loss(outputs["light"][:, 0], targets[:, 1])


def many_labels(seed: int = 0) -> TensorDataset:
    images, labels = stripes(6, seed=seed)
    return TensorDataset(images, F.one_hot(labels, 6).float())


def pixels_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).float().mean()


CASES: dict[str, tuple[Any, Any, Any, Any]] = {
    "segmentation": (UNet, segments, F.cross_entropy, pixels_right),
    "two heads": (TwoHeads, both, loss_of_both, None),
    "several labels": (vgg, many_labels, F.binary_cross_entropy_with_logits, None),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[Any, Any, dict[str, Any]]:
    make, data, loss, metric = CASES[request.param]
    return make().eval(), data, {"loss_fn": loss, "metric_fn": metric}


def test_the_whole_way_for_any_task(case: Any, tmp_path: Path) -> None:
    model, data, functions = case
    before = snapshot(model)
    pruner = STAMPPruner(model, config=QUICK, **functions)
    pruner.meta_fit([data(1), DataLoader(data(2), batch_size=16)], progress=False)
    assert same_state(model, before)
    assert set(pruner.history.rows[0]) >= {"loss", "macs", "live"}
    result = pruner.prune(data(), HALF, progress=False)
    assert type(result.model) is type(model)
    assert 0.3 < result.report.reached["macs"] <= 0.5
    assert check_equivalence(model, result.plan)
    first = result.evaluate(data(5))
    history = result.finetune(DataLoader(data(), batch_size=12), 15, lr=0.05, progress=False)
    assert history["loss"][-1] < history["loss"][0]
    after = result.evaluate(data(5))
    name = "metric" if functions["metric_fn"] else "loss"
    assert result.report.metrics[f"{name}_after_cut"] == first
    assert result.report.metrics[f"{name}_after_finetune"] == after
    assert (after > first) == (name == "metric")
    pruner.save(tmp_path / "own.stamp.safetensors")
    again = STAMPPruner.load(tmp_path / "own.stamp.safetensors", model, **functions)
    same = again.prune(data(), HALF, progress=False)
    assert (same.plan.keep == result.plan.keep).all()
    with pytest.raises(CheckpointError, match="pass loss_fn="):
        STAMPPruner.load(tmp_path / "own.stamp.safetensors", model)


@pytest.mark.parametrize("epochs", [1.0])
@pytest.mark.parametrize("budget", [HALF, None], ids=str)
def test_gates_are_learned_on_the_target(case: Any, epochs: float, budget: Budget | None) -> None:
    model, data, functions = case
    config = STAMPConfig(prune_epochs=epochs, measure_latency=False, round_to=1)
    pruner = STAMPPruner(model, config=config, **functions)
    with pytest.warns(UserWarning, match="not meta-fitted"):
        result = pruner.prune(data(), budget, progress=False)
    assert check_equivalence(model, result.plan)


@pytest.mark.parametrize("name", [n for n, kind in BASELINES.items() if kind.any_task])
def test_baselines_prune_for_any_task(case: Any, name: str) -> None:
    model, data, functions = case
    budget = None if name == "Full" else HALF
    result = BASELINES[name](measure_latency=False, round_to=1, **functions).prune(
        model, data(), budget
    )
    assert check_equivalence(model, result.plan)
    before = result.evaluate(data())
    result.finetune(data(), 3, lr=0.02, progress=False)
    assert result.evaluate(data()) != before


def test_taylor_scores_are_those_of_the_loss(case: Any) -> None:
    """Against the definition: gradients by a gate, sample by sample."""
    model, data, functions = case
    loss = functions["loss_fn"]
    method = Taylor(round_to=1, measure_latency=False, reconstruct=False, **functions)
    result = method.prune(model, data(), HALF)
    flipped = Taylor(
        round_to=1, measure_latency=False, loss_fn=lambda o, t: loss(o, t) * 0 + _constant(o)
    ).prune(model, data(), HALF)
    assert (result.plan.keep != flipped.plan.keep).any()


def _constant(outputs: Any) -> Tensor:
    values = outputs if isinstance(outputs, Tensor) else outputs["kind"]
    return values.reshape(len(values), -1)[:, 0].mean()


@pytest.mark.parametrize("name", [n for n, kind in BASELINES.items() if not kind.any_task])
def test_methods_that_learn_classes_say_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} learns classes: leave out loss_fn"):
        BASELINES[name](loss_fn=F.mse_loss)
    assert {"BBDropout", "MetaPruning", "SNIP"} <= {
        n for n, kind in BASELINES.items() if not kind.any_task
    }


IMAGES, LABELS = stripes(4)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ([], "empty"),
        ([IMAGES], r"yield \(images, targets\)"),
        ([(IMAGES, LABELS[:3])], r"targets are \(3,\) for 24 images"),
        ([(IMAGES, [1, 2])], "targets are list"),
        ([(IMAGES[0], LABELS)], r"give \(B, C, H, W\)"),
        ([(IMAGES[:, :2], LABELS)], "2 channels and the model reads 3"),
        ([(IMAGES, torch.zeros(24, 2)), (IMAGES, torch.zeros(24, 3))], "resize them"),
    ],
)
def test_targets_that_cannot_be_used(data: Any, reason: str) -> None:
    pruner = STAMPPruner(vgg(), IMAGES[:1], config=QUICK, loss_fn=F.mse_loss)
    with pytest.raises(DataError, match=reason):
        pruner.prune(data, HALF, progress=False)


def test_references_that_cannot_be_used() -> None:
    pruner = STAMPPruner(vgg(), IMAGES[:1], config=QUICK, loss_fn=F.mse_loss)
    sampler = TaskSampler(TensorDataset(IMAGES, LABELS), 2, 2)
    with pytest.raises(DataError, match="TaskSampler draws no targets for a loss_fn"):
        pruner.meta_fit(sampler)
    with pytest.raises(DataError, match="is empty"):
        pruner.meta_fit([[]])
    few = IMAGES[:8]
    with pytest.raises(DataError, match="cannot be put together"):
        pruner.meta_fit([[(few, torch.zeros(8, 2)), (few, torch.zeros(8, 3))]])
    with pytest.raises(ConfigError, match="call prune for every budget"):
        pruner.pareto(loader(), [0.5])


def test_a_model_that_cannot_take_the_images_is_named() -> None:
    pruner = STAMPPruner(
        vgg(), IMAGES[:1], config=QUICK, loss_fn=F.mse_loss, forward_fn=lambda m, x: m(x, 3)
    )
    with pytest.raises((DataError, UnsupportedModelError), match="does not take images"):
        pruner.prune([(IMAGES, LABELS)], HALF, progress=False)


def _place(images: Tensor, image: Tensor) -> int | None:
    where = (images == image).flatten(1).all(1).nonzero()
    return int(where[0]) if len(where) else None


def test_sample_tasks_draw_every_source_in_turn_and_resume() -> None:
    sources = [segments(seed) for seed in range(3)]
    tasks = SampleTasks(sources, size=10, seed=4)
    assert tasks.num_images == sum(map(len, sources))
    first = tasks.tasks(3)
    assert all(len(task) == 10 and task.classes == () for task in first)
    found = [
        next(i for i, s in enumerate(sources) if _place(s.tensors[0], task.images[0]) is not None)
        for task in first
    ]
    assert sorted(found) == [0, 1, 2]
    for task, which in zip(first, found, strict=True):
        images, targets = sources[which].tensors
        for image, target in zip(task.images, task.labels, strict=True):
            assert torch.equal(targets[_place(images, image)], target)
    state = tasks.state_dict()
    more = tasks.tasks(2)
    other = SampleTasks(sources, size=10, seed=4)
    other.load_state_dict(state)
    again = other.tasks(2)
    assert all(torch.equal(a.images, b.images) for a, b in zip(more, again, strict=True))
    with pytest.raises(DataError, match="size"):
        SampleTasks(sources, size=9, seed=4).load_state_dict(state)


def test_loaders_give_their_first_samples() -> None:
    data = segments()
    (task,) = SampleTasks([DataLoader(data, batch_size=8)], size=12).tasks(1)
    assert len(task) == 12
    given = {image.numpy().tobytes() for image in data.tensors[0][:12]}
    assert {image.numpy().tobytes() for image in task.images} == given
    assert np.isfinite(task.images.numpy()).all()


def test_magnitude_needs_no_loss_for_targets_that_are_classes() -> None:
    model = vgg()
    plain = Magnitude(measure_latency=False).prune(model, loader(), HALF)
    own = Magnitude(measure_latency=False, loss_fn=F.cross_entropy).prune(model, loader(), HALF)
    assert (plain.plan.keep == own.plan.keep).all()
    assert torch.equal(own.model.classifier.bias, model.classifier.bias)  # no head was fitted
    assert not torch.equal(plain.model.classifier.bias, model.classifier.bias)
