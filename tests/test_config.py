from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest

from stamppruner import STAMPConfig, StampError
from stamppruner.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iterations", 0),
        ("iterations", 2.5),
        ("iterations", True),
        ("tasks_per_iteration", 0),
        ("ways", 1),
        ("shots", 0),
        ("shots", "many"),
        ("minibatch_size", -1),
        ("set_size", 0),
        ("round_to", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("gamma", math.inf),
        ("gamma", "a"),
        ("beta", math.nan),
        ("fit_head", "no"),
        ("amp", 1),
        ("floor", "a"),
        ("weights_lr", "a"),
        ("budget_range", (0.5,)),
        ("budget_range", ("a", 0.5)),
        ("budget_range", 0.5),
        ("weights_lr", -1e-3),
        ("pi_lr", math.nan),
        ("theta_lr", math.inf),
        ("kl_scale", -1.0),
        ("prune_epochs", -0.5),
        ("temperature", 0.0),
        ("temperature", math.inf),
        ("alpha", 0.0),
        ("budget_share", 1.5),
        ("target_evidence", -0.1),
        ("threshold", math.nan),
        ("floor", -0.01),
        ("budget_range", (0.0, 0.5)),
        ("budget_range", (0.6, 0.5)),
        ("budget_range", (0.5, 1.5)),
    ],
)
def test_values_out_of_range_are_named(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"STAMPConfig\({name}=.*must be") as found:
        STAMPConfig(**{name: value})
    assert repr(value) in str(found.value)
    assert isinstance(found.value, StampError)


@pytest.mark.parametrize(
    "settings",
    [
        {"budget_share": 0.0, "floor": 1.0, "threshold": 0.0},
        {"prune_epochs": 0.5, "kl_scale": 0.0, "weights_lr": 0.0},
        {"budget_range": (0.3, 0.3)},
        {"iterations": 1, "ways": 2, "shots": 1, "minibatch_size": 1, "set_size": 1},
    ],
)
def test_limits_themselves_are_allowed(settings: dict[str, Any]) -> None:
    config = STAMPConfig(**settings)
    assert {name: getattr(config, name) for name in settings} == settings


def test_settings_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        STAMPConfig().iterations = 3  # type: ignore[misc]
    with pytest.raises(ConfigError):
        dataclasses.replace(STAMPConfig(), iterations=0)


@pytest.mark.parametrize("config", [STAMPConfig(), STAMPConfig.paper(), STAMPConfig(ways=3)])
def test_round_trip_through_json(config: STAMPConfig) -> None:
    assert STAMPConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_settings_are_listed() -> None:
    with pytest.raises(ConfigError, match=r"\['colour', 'depth'\]"):
        STAMPConfig.from_dict({"depth": 3, "colour": 1, "ways": 4})


def test_paper_has_the_printed_values() -> None:
    paper = STAMPConfig.paper()
    assert (paper.iterations, paper.tasks_per_iteration, paper.ways, paper.shots) == (
        2000,
        10,
        10,
        64,
    )
    assert (paper.minibatch_size, paper.weights_lr, paper.pi_lr, paper.theta_lr) == (
        128,
        1e-3,
        1e-2,
        1e-3,
    )
    assert (paper.warm_start, paper.reconstruct, paper.fit_head) == (False, False, False)
    assert paper.budget_share == 0
    assert STAMPConfig.paper(iterations=3000, pi_lr=0.5).pi_lr == 0.5
    with pytest.raises(ConfigError):
        STAMPConfig.paper(pi_lr=-1)
