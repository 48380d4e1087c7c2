from __future__ import annotations

import copy
import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from stripes import dataset, loader, same_state, snapshot, stripes, vgg
from torch import nn
from torch.utils.data import DataLoader

from stamppruner import evaluate, finetune
from stamppruner.batchnorm import recalibrate_
from stamppruner.errors import ConfigError, DataError, StampError
from stamppruner.finetune import warm_cosine

IMAGES, LABELS = stripes(8)


def test_loss_falls_and_the_classes_are_learned() -> None:
    model, data = vgg(), loader()
    before = evaluate(model, data)
    history = finetune(model, data, epochs=8, lr=0.1, progress=False)
    assert len(history) == 8
    assert history["epoch"] == list(range(8))
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    assert history["accuracy"][-1] > 0.9
    assert evaluate(model, loader(seed=1)) > max(0.8, before)


def test_large_gradients_are_scaled_down() -> None:
    """A head with huge weights would throw the network off in its first steps."""
    norms: dict[float, list[float]] = {math.inf: [], 5.0: []}
    for clip, found in norms.items():
        model = vgg()
        with torch.no_grad():
            model.classifier.weight.mul_(1e3)

        def watched(parameters: Any, found: list[float] = found) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, 0.1)
            optimizer.register_step_pre_hook(
                lambda *_: found.append(
                    float(nn.utils.get_total_norm([p.grad for p in parameters]))
                )
            )
            return optimizer

        kinds = {} if clip == 5.0 else {"clip": clip}  # the default
        finetune(model, loader(), epochs=2, optimizer=watched, progress=False, **kinds)
    assert max(norms[math.inf]) > 50
    assert max(norms[5.0]) <= 5.001


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_norm_to_clip_to_is_above_zero(clip: float) -> None:
    with pytest.raises(ConfigError, match="clip="):
        finetune(vgg(), loader(), epochs=1, clip=clip)


@pytest.mark.parametrize("epochs", [1, 4])
def test_few_steps_leave_statistics_of_the_trained_network(epochs: int) -> None:
    model = vgg()
    momenta = [m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    finetune(model, loader(), epochs=epochs, progress=False)
    again = copy.deepcopy(model)
    recalibrate_(again, [images for images, _ in loader()])
    for found, wanted in zip(model.buffers(), again.buffers(), strict=True):
        assert torch.allclose(found.float(), wanted.float(), rtol=1e-4, atol=1e-5)
    assert [m.momentum for m in model.modules() if isinstance(m, nn.BatchNorm2d)] == momenta


def test_statistics_without_momentum_stay() -> None:
    model = vgg()
    norm = next(m for m in model.modules() if isinstance(m, nn.BatchNorm2d))
    norm.momentum = 0.0
    before = norm.running_mean.clone(), norm.running_var.clone()
    finetune(model, loader(), epochs=2, progress=False)
    assert torch.equal(norm.running_mean, before[0])
    assert torch.equal(norm.running_var, before[1])


def test_the_same_data_give_the_same_weights() -> None:
    one, two = vgg(), vgg()
    for model in (one, two):
        finetune(model, loader(), epochs=2, progress=False)
    assert same_state(one, two.state_dict())


def test_figures_of_an_epoch_are_averages_over_its_images() -> None:
    images, labels = stripes(8)
    uneven = [(images[:30], labels[:30]), (images[30:34], labels[30:34])]
    model = vgg().eval()
    for module in model.modules():  # the figures are those of training mode
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    model.train()
    with torch.no_grad():
        losses = [nn.functional.cross_entropy(model(x), y) for x, y in uneven]
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in uneven)
    history = finetune(model, uneven, epochs=1, lr=1e-12, weight_decay=0.0, progress=False)
    assert history["loss"][0] == pytest.approx(float(30 * losses[0] + 4 * losses[1]) / 34, rel=1e-4)
    assert history["accuracy"][0] == pytest.approx(right / 34)


@pytest.mark.parametrize("training", [True, False])
def test_modes_are_left_as_found_also_after_an_error(training: bool) -> None:
    model = vgg().train(training)
    model.features[1].train(not training)
    modes = [m.training for m in model.modules()]
    finetune(model, loader(), epochs=1, progress=False)
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(DataError):
        finetune(model, [(IMAGES, LABELS + 1)], epochs=1, progress=False)
    assert [m.training for m in model.modules()] == modes


BAD: dict[str, tuple[Any, str]] = {
    "empty": ([], "loader is empty"),
    "generator": (((IMAGES, LABELS) for _ in range(2)), "read only once"),
    "labels beyond the outputs": ([(IMAGES, LABELS + 1)], "label 6 needs 7 outputs and VGG has 6"),
    "negative": ([(IMAGES, LABELS - 1)], "span -1"),
    "float labels": ([(IMAGES, LABELS.double())], "give a tensor of integers"),
    "NaN": ([(IMAGES * math.nan, LABELS)], "NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_unusable_data_change_nothing(name: str) -> None:
    data, reason = BAD[name]
    model = vgg()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(DataError, match=reason):
        finetune(model, data, epochs=2, progress=False)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_loss_that_is_not_finite_stops_with_the_remedy() -> None:
    with pytest.raises(DataError, match="lower lr"):
        finetune(vgg(), loader(), epochs=20, lr=1e30, progress=False)


def test_models_that_give_no_logits_are_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 1))
    with pytest.raises(StampError, match="not logits"):
        finetune(model, [(IMAGES, LABELS)], epochs=1, progress=False)
    with pytest.raises(StampError, match="not logits"):
        evaluate(model, [(IMAGES, LABELS)])


def test_no_epochs_do_nothing() -> None:
    model = vgg()
    before = snapshot(model)
    assert len(finetune(model, loader(), epochs=0, progress=False)) == 0
    assert same_state(model, before)


def test_frozen_parameters_stay() -> None:
    model = vgg()
    model.features[0].weight.requires_grad_(False)
    before = snapshot(model)
    finetune(model, loader(), epochs=1, progress=False)
    assert torch.equal(model.features[0].weight, before["features.0.weight"])
    assert not torch.equal(model.classifier.weight, before["classifier.weight"])


def test_autocast_learns_and_leaves_the_weights_in_their_dtype() -> None:
    model = vgg()
    history = finetune(model, loader(), epochs=4, lr=0.1, amp=True, progress=False)
    assert history["loss"][-1] < history["loss"][0]
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    exact = vgg()
    other = finetune(exact, loader(), epochs=4, lr=0.1, progress=False)
    assert other["loss"] != history["loss"]  # it was really in bfloat16


def test_callback_and_silence(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[int, dict[str, float]]] = []
    history = finetune(
        vgg(), loader(), epochs=2, progress=False, callback=lambda *row: seen.append(row)
    )
    assert [epoch for epoch, _ in seen] == [0, 1]
    assert [figures for _, figures in seen] == history.rows
    assert capsys.readouterr() == ("", "")


def test_other_settings_change_the_outcome() -> None:
    plain = finetune(vgg(), loader(), epochs=2, progress=False)["loss"]
    for settings in (
        {"momentum": 0.0},
        {"weight_decay": 0.1},
        {"warmup": 0.5},
        {"label_smoothing": 0.1},
    ):
        assert finetune(vgg(), loader(), epochs=2, progress=False, **settings)["loss"] != plain


def test_the_rate_rises_and_then_falls_to_zero() -> None:
    rates = [warm_cosine(step / 100, 0.1) for step in range(101)]
    assert rates[0] < 0.2
    assert max(rates) == pytest.approx(1, abs=0.02)
    assert rates.index(max(rates)) == 10
    assert all(a < b for a, b in pairwise(rates[:11]))
    assert all(a > b for a, b in pairwise(rates[10:]))
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert warm_cosine(0.0, 0.0) == 1


def test_evaluate_counts_in_evaluation_mode() -> None:
    model = vgg().train()
    before = snapshot(model)
    share = evaluate(model, loader(8))
    assert model.training
    assert same_state(model, before)
    model.eval()
    with torch.no_grad():
        right = (model(IMAGES).argmax(1) == LABELS).float().mean()
    assert share == pytest.approx(float(right))
    assert evaluate(model, dataset(8)) == pytest.approx(share)
    assert evaluate(model, DataLoader(dataset(8), batch_size=7)) == pytest.approx(share)


def test_evaluate_refuses_what_it_cannot_count() -> None:
    model = vgg()
    with pytest.raises(DataError, match="empty"):
        evaluate(model, [])
    with pytest.raises(DataError, match="label 8 needs 9 outputs"):
        evaluate(model, [(IMAGES, LABELS + 3)])


def test_a_data_set_sorted_by_class_is_shuffled_every_epoch_and_repeatably() -> None:
    class Sorted(torch.utils.data.Dataset):
        def __init__(self) -> None:
            self.order: list[int] = []

        def __len__(self) -> int:
            return 100

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            self.order.append(index)
            return torch.full((3, 4, 4), float(index // 50)), index // 50

    orders = []
    for _ in range(2):
        data = Sorted()
        net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
        finetune(net, data, epochs=2, progress=False)
        orders.append(data.order)
    first, second = orders[0][:100], orders[0][100:]
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != sorted(first)
    assert first != second
    assert orders[0] == orders[1]


def test_a_last_batch_of_one_names_the_remedy() -> None:
    net = torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(12, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    )
    data = torch.utils.data.TensorDataset(torch.randn(5, 3, 2, 2), torch.arange(5) % 2)
    batches = torch.utils.data.DataLoader(data, batch_size=4)
    with pytest.raises(DataError, match="drop_last"):
        finetune(net, batches, epochs=1, progress=False)
