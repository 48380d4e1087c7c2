"""Tasks other than classification, teachers, mixtures, early stopping."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from stripes import dataset, loader, same_state, snapshot, stripes, vgg
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import evaluate, finetune
from stamppruner.errors import ConfigError, DataError
from stamppruner.supervision import Distillation, Mixup, Supervision

IMAGES, LABELS = stripes(8)


class TwoHeads(nn.Module):
    """A class and a brightness from a dict of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.kind, self.light = nn.Linear(8, 6), nn.Linear(8, 1)

    def forward(self, image: Tensor, scale: Tensor) -> dict[str, Tensor]:
        features = self.body(image * scale).flatten(1)
        return {"kind": self.kind(features), "light": self.light(features)[:, 0]}


def two_headed_batches() -> list[dict[str, Any]]:
    light = IMAGES.mean((1, 2, 3))
    return [
        {"image": IMAGES[i::2], "scale": torch.ones(1), "kind": LABELS[i::2], "light": light[i::2]}
        for i in range(2)
    ]


def call(model: nn.Module, batch: dict[str, Any]) -> Any:
    return model(batch["image"], scale=batch["scale"])


def both_losses(outputs: dict[str, Tensor], batch: dict[str, Any]) -> Tensor:
    kind = F.cross_entropy(outputs["kind"], batch["kind"])
    return kind + F.mse_loss(outputs["light"], batch["light"])


def test_a_net_with_two_heads_learns_from_dicts() -> None:
    torch.manual_seed(0)
    model = TwoHeads()
    history = finetune(
        model, two_headed_batches(), epochs=30, lr=0.1, loss_fn=both_losses, forward_fn=call,
        metric_fn=lambda o, b: (o["kind"].argmax(1) == b["kind"]).float().mean(), progress=False,
    )  # fmt: skip
    assert set(history.rows[0]) == {"epoch", "loss", "metric"}
    assert history["loss"][-1] < 0.5 * history["loss"][0]
    share = evaluate(
        model, two_headed_batches(), forward_fn=call,
        metric_fn=lambda o, b: (o["kind"].argmax(1) == b["kind"]).float().mean(),
    )  # fmt: skip
    assert share > 0.5


def test_multi_label_and_regression_need_no_more_than_a_loss() -> None:
    torch.manual_seed(0)
    many = F.one_hot(LABELS, 6).float()
    model = vgg()
    history = finetune(
        model, [(IMAGES, many)], epochs=40, lr=0.1, loss_fn=nn.BCEWithLogitsLoss(), progress=False
    )
    assert set(history.rows[0]) == {"epoch", "loss"}
    assert history["loss"][-1] < 0.7 * history["loss"][0]


def test_the_loss_of_uneven_batches_is_weighted_by_samples() -> None:
    uneven = [(IMAGES[:30], LABELS[:30]), (IMAGES[30:34], LABELS[30:34])]
    model = vgg().eval()
    with torch.no_grad():
        values = [float(model(x).square().mean()) for x, _ in uneven]
    found = evaluate(model, uneven, metric_fn=lambda o, _t: o.square().mean())
    assert found == pytest.approx((30 * values[0] + 4 * values[1]) / 34)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"mixup": -1.0}, "mixup=-1.0"),
        ({"patience": 0, "evaluate_on": [(IMAGES, LABELS)]}, "patience=0"),
        ({"patience": 3}, "needs evaluate_on"),
        ({"mixup": 0.2, "loss_fn": F.mse_loss}, "leave out loss_fn"),
        ({"teacher": vgg(), "distill": 1.5}, r"distill=1\.5"),
        ({"teacher": vgg(), "temperature": 0.0}, r"temperature=0\.0"),
        ({"teacher": vgg(4)}, r"teacher gives \(.*, 4\) where the model gives \(.*, 6\)"),
        ({"optimizer": "adam"}, "optimizer='adam'"),
        ({"schedule": 0.5}, r"schedule=0\.5"),
        ({"metric_fn": "accuracy"}, "metric_fn='accuracy'"),
        ({"loss_fn": lambda o, t: o.sum(1)}, "must give a tensor of one number"),
        ({"loss_fn": lambda o, t: 1.0}, "loss_fn gives float"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], reason: str) -> None:
    model = vgg()
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(ConfigError, match=reason):
        finetune(model, loader(), epochs=1, progress=False, **settings)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_a_batch_without_tensors_is_refused() -> None:
    with pytest.raises(DataError, match="without a tensor"):
        finetune(vgg(), ["ab"], epochs=1, loss_fn=F.mse_loss, progress=False)


def test_distillation_is_the_formula() -> None:
    ours = torch.tensor([[1.0, 0.0, -1.0], [0.0, 2.0, 0.0]])
    theirs = torch.tensor([[0.0, 1.0, 0.0], [3.0, 0.0, 0.0]])
    p, q = F.softmax(theirs / 2, 1), F.softmax(ours / 2, 1)
    kl = float((p * (p / q).log()).sum(1).mean())
    mixed = Distillation(nn.Identity(), weight=0.25).mixed(torch.tensor(3.0), ours, theirs)
    assert float(mixed) == pytest.approx(0.75 * 3.0 + 0.25 * 4 * kl, rel=1e-5)
    same = Distillation(nn.Identity(), weight=1.0).mixed(torch.tensor(3.0), ours, ours)
    assert float(same) == pytest.approx(0, abs=1e-6)


def test_a_teacher_teaches_and_is_left_as_it_was() -> None:
    teacher = vgg().train()
    finetune(teacher, loader(), epochs=8, lr=0.1, progress=False)
    before = snapshot(teacher)
    wrong = [(x, (y + 1) % 6) for x, y in loader()]  # the labels say otherwise
    student = vgg(seed=1)
    finetune(student, wrong, epochs=8, lr=0.1, teacher=teacher, distill=1.0, progress=False)
    assert evaluate(student, loader(seed=1)) > 0.8
    assert same_state(teacher, before)
    assert teacher.training


def test_mixing_is_of_images_and_of_losses_alike() -> None:
    x, y = torch.arange(8.0).view(4, 2), torch.arange(4)
    mixed, other, share = Mixup(0.4, seed=3)(x, y)
    assert 0 < share < 1
    assert torch.allclose(mixed, share * x + (1 - share) * x[other])
    same, none, one = Mixup(0.0, seed=3)(x, y)
    assert same is x
    assert (none, one) == (None, 1.0)
    again = Mixup(0.4, seed=3)(x, y)
    assert torch.equal(again[0], mixed)
    plain = finetune(vgg(), loader(), epochs=1, progress=False)["loss"]
    assert finetune(vgg(), loader(), epochs=1, mixup=0.4, progress=False)["loss"] != plain


def test_the_best_epoch_is_kept_and_patience_ends_the_training() -> None:
    rates = iter([1.0] * 18 + [1e3] * 1000)  # good for three epochs, then ruin
    model = vgg()
    seen: list[dict[str, Tensor]] = []
    history = finetune(
        model, loader(), epochs=40, lr=0.05, schedule=lambda _: next(rates), evaluate_on=loader(),
        patience=3, progress=False, callback=lambda *_: seen.append(snapshot(model)),
    )  # fmt: skip
    best = max(range(len(history)), key=lambda i: history["validation_accuracy"][i])
    assert len(history) == best + 4 < 40
    assert same_state(model, seen[best])
    assert not same_state(model, seen[-1])
    assert evaluate(model, loader()) == pytest.approx(history["validation_accuracy"][best])
    assert set(history.rows[0]) == {
        "epoch", "loss", "accuracy", "validation_loss", "validation_accuracy",
    }  # fmt: skip


def test_without_a_metric_the_loss_tells_the_best_epoch() -> None:
    many = F.one_hot(LABELS, 6).float()
    rates = iter([1.0, 1.0, 500.0, 500.0])
    model = vgg()
    history = finetune(
        model, [(IMAGES, many)], epochs=4, lr=0.05, loss_fn=nn.BCEWithLogitsLoss(),
        schedule=lambda _: next(rates), evaluate_on=[(IMAGES, many)], progress=False,
    )  # fmt: skip
    losses = history["validation_loss"]
    with torch.no_grad():
        now = F.binary_cross_entropy_with_logits(model.eval()(IMAGES), many)
    assert float(now) == pytest.approx(min(losses), rel=1e-4)
    assert losses[-1] > min(losses)


def test_an_optimizer_of_ones_own_follows_the_schedule() -> None:
    made: list[torch.optim.Optimizer] = []

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.AdamW(parameters, weight_decay=0.1))
        return made[0]

    model = vgg()
    shares: list[float] = []

    def falling(share: float) -> float:
        shares.append(share)
        return 1 - share

    data = loader()
    history = finetune(
        model, data, epochs=6, lr=0.01, optimizer=adamw, schedule=falling, progress=False
    )
    steps = 6 * len(data)
    assert shares == pytest.approx([i / steps for i in range(steps)])
    assert made[0].param_groups[0]["lr"] == pytest.approx(0.01 / steps)
    assert history["loss"][-1] < history["loss"][0]


def test_a_seed_repeats_dropout_and_order_and_leaves_the_global_state() -> None:
    def run(seed: int | None) -> list[float]:
        model = nn.Sequential(vgg(), nn.Dropout(0.5))
        return finetune(
            model, dataset(), epochs=2, seed=seed, mixup=0.2, progress=False
        )["loss"]  # fmt: skip

    state = torch.random.get_rng_state()
    first = run(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.rand(3)
    assert run(1) == first
    assert run(2) != first


def test_what_was_given_is_in_no_way_changed() -> None:
    data = two_headed_batches()
    before = copy.deepcopy(data)
    finetune(TwoHeads(), data, epochs=1, loss_fn=both_losses, forward_fn=call, progress=False)
    assert all(torch.equal(a[k], b[k]) for a, b in zip(data, before, strict=True) for k in a)


def test_a_pair_is_inputs_and_targets_and_anything_else_is_both() -> None:
    task = Supervision(loss_fn=F.mse_loss)
    one = {"x": IMAGES}
    (found,) = task.batches([(IMAGES, LABELS)], torch.device("cpu"))
    assert torch.equal(found[0], IMAGES)
    assert torch.equal(found[1], LABELS)
    assert found[2] == len(IMAGES)
    (found,) = task.batches([one], torch.device("cpu"))
    assert set(found[0]) == set(found[1]) == {"x"}
    assert found[2] == len(IMAGES)
