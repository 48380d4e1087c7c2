"""What settings of fine-tuning may be; they are checked before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from stamppruner.errors import ConfigError, shown
from stamppruner.kinds import is_real, is_whole


def _real(value: Any, holds: Callable[[float], bool]) -> bool:
    return is_real(value) and holds(float(value))


_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "epochs": (lambda v: is_whole(v, 0), "a whole number from 0"),
    "lr": (lambda v: _real(v, lambda x: 0 < x < math.inf), "a finite number above 0"),
    "momentum": (lambda v: _real(v, lambda x: 0 <= x < 1), "a number from 0, below 1"),
    "weight_decay": (lambda v: _real(v, lambda x: 0 <= x < math.inf), "a finite number from 0"),
    "warmup": (lambda v: _real(v, lambda x: 0 <= x <= 1), "a share of the steps in [0, 1]"),
    "clip": (lambda v: _real(v, lambda x: x > 0), "a norm above 0; math.inf clips nothing"),
    "label_smoothing": (lambda v: _real(v, lambda x: 0 <= x <= 1), "a number in [0, 1]"),
    "mixup": (lambda v: _real(v, lambda x: 0 <= x < math.inf), "a finite number from 0"),
    "teacher": (lambda v: v is None or isinstance(v, nn.Module), "a module, or None"),
    "distill": (lambda v: _real(v, lambda x: 0 <= x <= 1), "a number in [0, 1]"),
    "temperature": (lambda v: _real(v, lambda x: 0 < x < math.inf), "a finite number above 0"),
    "optimizer": (lambda v: v is None or callable(v), "a function, or None"),
    "schedule": (lambda v: v is None or callable(v), "a function, or None"),
    "patience": (lambda v: v is None or is_whole(v, 1), "a whole number from 1, or None"),
    "amp": (lambda v: isinstance(v, bool), "True or False"),
    "seed": (lambda v: v is None or is_whole(v, 0, 2**63 - 1), "a whole number from 0, or None"),
}


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raise unless settings of :func:`stamppruner.finetune` can be used; others are not looked at.

    Raises:
        ConfigError: one is out of range, or two do not go together; it is named.
    """
    for name, value in settings.items():
        holds, rule = _RULES.get(name, (lambda _: True, ""))
        if not holds(value):
            raise ConfigError(f"finetune({name}={shown(value)}): it must be {rule}")
    if settings.get("patience") is not None and settings.get("evaluate_on") is None:
        raise ConfigError(
            f"finetune(patience={settings['patience']}) needs evaluate_on to judge epochs by"
        )
    if settings.get("mixup") and settings.get("loss_fn") is not None:
        raise ConfigError(
            f"finetune(mixup={settings['mixup']}) mixes labels of classes: leave out loss_fn"
        )
