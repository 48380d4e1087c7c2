"""What a benchmark runs: the paper's settings, and smaller ones for a desk."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stamppruner.config import STAMPConfig
from stamppruner.errors import ConfigError, shown
from stamppruner.files import PathLike

NETS = ("vgg19", "resnet18")


@dataclass(frozen=True)
class Training:
    """Passes of SGD over a data set: epochs, largest learning rate, images a batch.

    Raises:
        ConfigError: one of them is too small.
    """

    epochs: int
    lr: float
    batch_size: int

    def __post_init__(self) -> None:
        if not (self.epochs >= 1 and self.lr > 0 and self.batch_size >= 1):
            raise ConfigError(f"{self}: epochs and batch_size are at least 1, lr is above 0")


@dataclass(frozen=True)
class Preset:
    """One benchmark. JSON holds the same: ``stamppruner bench NAME --show`` prints one to edit.

    Attributes:
        name: of the preset.
        net: ``"vgg19"`` or ``"resnet18"``, at a ``width`` of the paper's.
        reference: name of the data set that the backbone and the pruner are trained on.
        targets: names of the data sets to prune for.
        images: training images of a target, drawn by the seed; None takes all.
        backbone: training of the backbone; ``finetune`` of every pruned network.
        rates: learning rates of single rows in place of that of ``finetune``.
        config: settings of STAMP that differ from the default.
        paper_config: the same of ``STAMPConfig.paper()``, for a row of its own; None leaves it out.
        macs: share of the multiply-adds that structured rows keep.
        weights: share of the weights that unstructured rows keep.
        skip_1x1: unstructured rows leave 1x1 convolutions whole (paper, section A.2).
        seeds: of the draws, the order of batches, and everything random.
        budgets: shares of the multiply-adds for the picture of accuracy over parameters.
        weight_shares: of the weights, for the same picture.
        sizes: training images, for the picture of accuracy over the size of the target.
        prune_epochs, kl_scales: K and the scales of the KL term that are explored without a budget.
        amp: bfloat16 autocast.

    Raises:
        ConfigError: a value outside its range.
    """

    name: str
    net: str
    targets: tuple[str, ...]
    backbone: Training
    finetune: Training
    reference: str = "cifar100"
    width: float = 1.0
    images: int | None = None
    rates: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    paper_config: Mapping[str, Any] | None = None
    macs: float = 0.27
    weights: float = 0.0417
    skip_1x1: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)
    budgets: tuple[float, ...] = ()
    weight_shares: tuple[float, ...] = ()
    sizes: tuple[int, ...] = ()
    prune_epochs: tuple[float, ...] = ()
    kl_scales: tuple[float, ...] = ()
    amp: bool = False

    def __post_init__(self) -> None:
        if self.net not in NETS:
            raise ConfigError(f"preset {self.name!r}: net={self.net!r}, choose of {NETS}")
        if not self.targets or not self.seeds:
            raise ConfigError(f"preset {self.name!r}: give at least one target and one seed")
        shares = (self.macs, self.weights, *self.budgets, *self.weight_shares)
        if not all(0 < share <= 1 for share in shares) or not self.width > 0:
            raise ConfigError(f"preset {self.name!r}: shares are in (0, 1] and the width above 0")
        sizes = self.sizes if self.images is None else (self.images, *self.sizes)
        if any(size < 1 for size in sizes):
            raise ConfigError(f"preset {self.name!r}: images and sizes are at least 1")
        try:
            self.stamp_config()
            self.stamp_paper_config()
        except TypeError as error:
            raise ConfigError(f"preset {self.name!r}: {error}") from error

    def stamp_config(self) -> STAMPConfig:
        """The settings of STAMP."""
        return STAMPConfig(**{"amp": self.amp, "measure_latency": False, **self.config})

    def stamp_paper_config(self) -> STAMPConfig:
        """The paper's settings of it."""
        settings = {"measure_latency": False, **(self.paper_config or {})}
        return STAMPConfig.paper(**settings)

    def to_json(self) -> dict[str, Any]:
        """JSON-able form."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Preset:
        """Inverse of :meth:`to_json`.

        Raises:
            ConfigError: what is missing, unknown or out of range is named.
        """
        fields = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(record) - fields:
            raise ConfigError(f"a preset has no {', '.join(sorted(unknown))}: {sorted(fields)}")
        values = dict(record)
        try:
            for name in ("backbone", "finetune"):
                values[name] = Training(**values[name])
            for name, value in values.items():
                if isinstance(value, list):
                    values[name] = tuple(value)
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise ConfigError(f"this is no preset ({error}): {shown(dict(record))}") from error


_PAPER: dict[str, Any] = {
    "backbone": Training(200, 0.1, 128),
    "finetune": Training(200, 0.1, 128),
    "amp": True,
}
_SMALL: dict[str, Any] = {
    "width": 0.25,
    "targets": ("cifar10", "fashion_mnist"),
    "images": 1000,
    "backbone": Training(16, 0.1, 128),
    "finetune": Training(20, 0.05, 64),
    "paper_config": {"iterations": 100, "tasks_per_iteration": 4, "shots": 16, "minibatch_size": 32,
                     "amp": True},
    "seeds": (0, 1),
    "amp": True,
}  # fmt: skip
_META_FIT = {
    "iterations": 500, "tasks_per_iteration": 10, "shots": 64, "minibatch_size": 128,
    "weight_steps": 60, "weight_lr": 0.05,
}  # fmt: skip
_VGG: dict[str, Any] = _PAPER | {
    "config": _META_FIT,
    "paper_config": {},
    "budgets": (0.5, 0.1, 0.05),
    "weight_shares": (0.2, 0.1, 0.02, 0.01),
    "sizes": (1000, 5000, 10_000, 25_000),
}
_VGG_SMALL: dict[str, Any] = _SMALL | {
    "config": {"iterations": 100, "weight_steps": 40, "weight_lr": 0.05},
    "budgets": (0.5, 0.1),
    "weight_shares": (0.2, 0.1, 0.02),
    "sizes": (250, 500, 2000),
}
_RESNET: dict[str, Any] = _PAPER | {
    "weights": 0.1,
    "skip_1x1": True,
    "rates": {"SNIP": 0.01, "SNIP (P)": 0.01},
    "config": _META_FIT | {"shots": 50, "minibatch_size": 100},
    "paper_config": {"iterations": 3000, "shots": 50, "pi_lr": 0.5},
    "budgets": (0.5, 0.1, 0.05),
    "prune_epochs": (1, 5, 10),
    "kl_scales": (5, 15, 25),
}
_RESNET_SMALL: dict[str, Any] = _SMALL | {
    "weights": 0.1,
    "skip_1x1": True,
    "config": {"iterations": 60, "weight_steps": 30, "weight_lr": 0.05},
    "budgets": (0.1,),
    "prune_epochs": (1, 5),
    "kl_scales": (1, 15),
}
# The paper draws accuracies over parameters and sizes for VGG-19, over K and KL for ResNet-18.

PRESETS = {
    preset.name: preset
    for preset in (
        Preset("vgg19-cifar10", "vgg19", ("cifar10",), **_VGG),
        Preset("vgg19-svhn", "vgg19", ("svhn",), **_VGG),
        Preset("resnet18-cifar10", "resnet18", ("cifar10",), **_RESNET),
        Preset("resnet18-svhn", "resnet18", ("svhn",),
               **(_RESNET | {"finetune": Training(20, 0.1, 128)})),
        Preset("vgg19-small", "vgg19", **_VGG_SMALL),
        Preset("resnet18-small", "resnet18", **_RESNET_SMALL),
    )
}  # fmt: skip
"""By name. Those of two words are the paper's; the small ones take about an hour on two cores."""


def find_preset(name: PathLike) -> Preset:
    """The preset of this name, or of this JSON file.

    Raises:
        ConfigError: there is none, or it does not hold one.
    """
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    path = Path(name)
    if path.suffix != ".json":
        raise ConfigError(f"no preset {str(name)!r}: there are {', '.join(PRESETS)}, or FILE.json")
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path} holds {shown(record)}, no preset")
    return Preset.from_json(record)
