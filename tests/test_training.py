"""Settings of fine-tuning are checked by name, wherever they are given, before any work."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from stripes import dataset, vgg

from stamppruner import Budget, STAMPConfig, STAMPPruner, finetune, swap_test
from stamppruner.errors import ConfigError
from stamppruner.training import check_settings

BAD: list[tuple[str, Any]] = [
    *(("epochs", v) for v in (-1, 1.5, "3", None, True)),
    *(("lr", v) for v in (0, -1, math.nan, math.inf, "a", None)),
    *(("momentum", v) for v in (-0.1, 1, math.nan)),
    *(("weight_decay", v) for v in (-1, math.nan, math.inf)),
    *(("warmup", v) for v in (-0.1, 1.1, math.nan)),
    *(("clip", v) for v in (0, -1, math.nan, None, "5")),
    *(("label_smoothing", v) for v in (-0.1, 1.1, math.nan)),
    *(("mixup", v) for v in (-1, math.inf, "a")),
    *(("distill", v) for v in (-0.1, 1.1)),
    *(("temperature", v) for v in (0, math.nan)),
    *(("patience", v) for v in (0, 1.5, "a")),
    *(("seed", v) for v in (-1, 0.5, 2**64)),
    ("amp", "yes"), ("teacher", "a"), ("optimizer", 3), ("schedule", 3),
]  # fmt: skip
bad = pytest.mark.parametrize(("name", "value"), BAD)


@bad
def test_a_bad_setting_is_named_and_nothing_is_trained(name: str, value: Any) -> None:
    model = vgg()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    settings = {"epochs": 1, "evaluate_on": dataset(4)} | {name: value}
    with pytest.raises(ConfigError, match=rf"finetune\({name}="):
        finetune(model, dataset(4), **settings, progress=False)
    assert all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


@pytest.mark.parametrize(
    "settings",
    [
        {"epochs": 0, "lr": np.float32(0.1), "clip": math.inf, "seed": np.int64(3)},
        {"warmup": 1, "momentum": 0, "patience": 1, "evaluate_on": [], "label_smoothing": 1},
    ],
)
def test_settings_at_their_ends_are_fine(settings: dict[str, Any]) -> None:
    check_settings(settings)


class Untouched(STAMPPruner):
    """Fails if it is asked to do anything."""

    def prune(self, *_args: Any, **_settings: Any) -> Any:
        raise AssertionError("it was asked to prune")

    _score = prune


@pytest.mark.parametrize("settings", [{"clip": None}, {"lr": "a"}, {"bogus": 3}])
def test_swap_and_pareto_check_them_before_pruning(settings: dict[str, Any]) -> None:
    pruner = Untouched(vgg(), config=STAMPConfig())
    data = dataset(4)
    with pytest.raises(ConfigError, match=next(iter(settings))):
        swap_test(pruner, {"a": (data, data), "b": (data, data)}, Budget(macs=0.5), epochs=0,
                  **settings)  # fmt: skip
    with pytest.raises(ConfigError, match=next(iter(settings))):
        pruner.pareto(data, [0.5], finetune={"epochs": 1, **settings})


@pytest.mark.parametrize("targets", [[1, 2], {"a": dataset(4), "b": dataset(4)}])
def test_swap_names_targets_that_are_no_pairs(targets: Any) -> None:
    with pytest.raises(ConfigError, match="pair"):
        swap_test(Untouched(vgg()), targets, Budget(macs=0.5))


def test_a_model_without_anything_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="requires_grad"):
        finetune(vgg().requires_grad_(False), dataset(4), epochs=1, progress=False)


def test_an_optimizer_must_be_one() -> None:
    with pytest.raises(ConfigError, match="no torch optimizer"):
        finetune(vgg(), dataset(4), epochs=1, optimizer=lambda _: None, progress=False)
