"""Settings of the method, with the defaults that work and the paper's own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from stamppruner.errors import ConfigError, shown
from stamppruner.kinds import is_int, is_real


@dataclass(frozen=True)
class STAMPConfig:
    """Settings of meta-fitting and pruning; immutable, change with ``dataclasses.replace``.

    ``STAMPConfig()`` holds the defaults chosen by measurement, :meth:`paper` what the paper
    prints. Where the paper is silent the choice is named here.

    Attributes:
        iterations: outer iterations of Algorithm 1 (line 2).
        tasks_per_iteration: N tasks an iteration (line 3).
        ways: classes a task; shots: images a class; B = ways * shots.
        minibatch_size: images a gradient step.
        weights_lr: learning rate of W.
        pi_lr: of the posterior's a and b.
        theta_lr: of the set encoder, gamma and beta.
        weight_steps: steps of SGD in every iteration that train W under hard masks of random tasks
            and budgets, taught by the backbone (see :mod:`~stamppruner.slimmable`); for references
            whose labels are the model's outputs. 0 leaves W to the outer loop, as in the paper.
        weight_lr: greatest learning rate of these steps; weight_batch: images in each.
        weight_parts: into so many parts the images of such a step are split, each with a mask and
            batch statistics of its own. More than 1 gives the same bits on any number of ranks;
            with 1, ranks share the batch and agree but for rounding.
        temperature: of the concrete relaxation while gates are learned.
        kl_scale: weight of the KL term next to its 1/N.
        alpha: of the sparsity prior beta(alpha, 1).
        gamma: first value of psi's scale (Eq. 12); beta: of its shift.
        warm_start: set pi from first-order Taylor scores on the reference tasks.
        budget_share: last share of the iterations, which trains under hard masks of random
            budgets with a straight-through gradient; 0 leaves the paper's relaxed masks alone.
        budget_range: least and greatest share of MACs of those budgets.
        budget_penalty: weight, in nats, of the share by which expected costs ``cost(E[widths])``
            exceed the budget, in all steps of gates that have one.
        target_evidence: weight, in [0, 1], of Taylor scores on the labelled target against the
            meta-learned pi; 0 leaves all to the set encoder, as in the paper.
        prune_epochs: K, epochs of gate learning on the target before the cut (line 8).
        threshold: without a budget, channels with E[m] of at least this are kept.
        floor: share of every group that is always kept.
        round_to: kept widths are multiples of this, which kernels like, in groups of at least
            eight times as many channels; narrower groups take half of it, a quarter, and so on,
            and so do all groups under budgets that it would put out of reach. 1 rounds nothing.
            Budgets of a time are met with a larger one where that is measured to be faster; None
            measures it for other budgets, too.
        set_size: most target images that the set encoder sees.
        fit_head: replace the head by a ridge-regression head on the target's features.
        recalibrate: re-estimate batch-norm statistics on the target after the cut.
        reconstruct: re-solve the slim network's weights by least squares on the target.
        measure_latency: time forward passes of both networks for the report.
        amp: bfloat16 autocast in the network's forward passes while learning.
        seed: of everything random.

    Raises:
        ConfigError: a value outside its range.

    Example:
        >>> import dataclasses
        >>> quick = dataclasses.replace(STAMPConfig(seed=1), iterations=10)
        >>> quick.iterations, quick.seed, STAMPConfig.paper().iterations
        (10, 1, 2000)
    """

    iterations: int = 100
    tasks_per_iteration: int = 4
    ways: int = 10
    shots: int = 16
    minibatch_size: int = 32
    weights_lr: float = 1e-4
    pi_lr: float = 1e-2
    theta_lr: float = 1e-3
    weight_steps: int = 20
    weight_lr: float = 0.02
    weight_batch: int = 128
    weight_parts: int = 1
    temperature: float = 0.67
    kl_scale: float = 1.0
    alpha: float = 1e-4
    gamma: float = 0.1
    beta: float = 0.9
    warm_start: bool = True
    budget_share: float = 0.7
    budget_range: tuple[float, float] = (0.1, 0.6)
    budget_penalty: float = 0.0
    target_evidence: float = 0.5
    prune_epochs: float = 0.0
    threshold: float = 0.5
    floor: float = 0.05
    round_to: int | None = 8
    set_size: int = 640
    fit_head: bool = True
    recalibrate: bool = True
    reconstruct: bool = True
    measure_latency: bool = True
    amp: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        least = dict.fromkeys(("iterations", "tasks_per_iteration", "shots", "minibatch_size"), 1)
        if self.round_to is not None:
            least["round_to"] = 1
        least |= {"set_size": 1, "ways": 2, "seed": 0}
        least |= {"weight_steps": 0, "weight_batch": 2, "weight_parts": 1}
        for name, low in least.items():
            value = getattr(self, name)
            self._require(name, is_int(value, low), f"a whole number of at least {low}")
        self._require("seed", self.seed < 2**63, "below 2**63")
        rates = ("weights_lr", "pi_lr", "theta_lr", "weight_lr", "kl_scale")
        for name in (*rates, "budget_penalty", "prune_epochs"):
            self._require_real(name, lambda x: x >= 0, "a finite number of at least 0")
        for name in ("temperature", "alpha"):
            self._require_real(name, lambda x: x > 0, "a finite number above 0")
        for name in ("gamma", "beta"):
            self._require_real(name, lambda _: True, "a finite number")
        for name in ("budget_share", "threshold", "floor", "target_evidence"):
            self._require_real(name, lambda x: 0 <= x <= 1, "in [0, 1]")
        switches = (
            "warm_start",
            "fit_head",
            "recalibrate",
            "reconstruct",
            "measure_latency",
            "amp",
        )
        for name in switches:
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        most = self.weight_batch // 2
        self._require("weight_parts", self.weight_parts <= most, f"at most {most}, half the batch")
        pair = self.budget_range
        two = isinstance(pair, tuple | list) and len(pair) == 2 and all(map(is_real, pair))
        rule = "two numbers, 0 < least <= greatest <= 1"
        self._require("budget_range", two and 0 < pair[0] <= pair[1] <= 1, rule)

    @classmethod
    def paper(cls, **changes: Any) -> STAMPConfig:
        """The settings that the paper prints for VGG-19 (its sections 4 and A.2).

        N = 10 tasks of 10 classes and 64 images a class, 5 minibatches of 128, 2,000 iterations,
        Adam with 1e-3, 1e-2 and 1e-3; for ResNet-18 pass ``iterations=3000, shots=50,
        pi_lr=0.5``. It prints no temperature, alpha, gamma, beta or K: 0.1 and 1e-4 are those of
        Lee et al. 2018, gamma = 1 and beta = 0 leave the activation as it is, K is 1 epoch, which
        it names as the most.
        """
        settings: dict[str, Any] = {
            "iterations": 2000,
            "tasks_per_iteration": 10,
            "ways": 10,
            "shots": 64,
            "minibatch_size": 128,
            "weights_lr": 1e-3,
            "pi_lr": 1e-2,
            "theta_lr": 1e-3,
            "weight_steps": 0,
            "kl_scale": 1.0,
            "alpha": 1e-4,
            "temperature": 0.1,
            "gamma": 1.0,
            "beta": 0.0,
            "warm_start": False,
            "budget_share": 0.0,
            "target_evidence": 0.0,
            "prune_epochs": 1.0,
            "threshold": 1e-3,
            "floor": 0.0,
            "round_to": 1,
            "fit_head": False,
            "reconstruct": False,
        }
        return cls(**(settings | changes))

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> STAMPConfig:
        """Inverse of :meth:`to_dict`.

        Raises:
            ConfigError: an unknown setting, or a value outside its range.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := set(values) - known:
            raise ConfigError(f"unknown settings {sorted(unknown)}: they are of another version")
        if "budget_range" in values:
            values = values | {"budget_range": tuple(values["budget_range"])}
        return cls(**values)

    def _require_real(self, name: str, holds: Callable[[float], bool], rule: str) -> None:
        value = getattr(self, name)
        self._require(name, is_real(value) and math.isfinite(value) and holds(value), rule)

    def _require(self, name: str, holds: bool, rule: str) -> None:
        if not holds:
            raise ConfigError(
                f"STAMPConfig({name}={shown(getattr(self, name))}): it must be {rule}"
            )
