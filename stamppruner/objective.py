"""The objective of Eq. 2: task loss + KL of the gates, under masks of one of two kinds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.budget import Budget, Chooser
from stamppruner.config import STAMPConfig
from stamppruner.gated import GatedNet
from stamppruner.supervision import CLASSIFICATION, Supervision

_FUSED = ("cpu", "cuda")


@dataclass(frozen=True)
class Relaxed:
    """The paper's masks: concrete samples of the posterior."""

    net: GatedNet
    temperature: float
    generator: torch.Generator

    def __call__(self, images: Tensor) -> Tensor:
        """A mask ``(num_channels,)`` for the set of images."""
        return self.of(self.net.evidence(images))

    def of(self, evidence: Tensor) -> Tensor:
        """The same, for the set's evidence ``(num_channels,)``."""
        return self.net.posterior.sample(
            evidence, temperature=self.temperature, generator=self.generator
        )

    def overspend(self, evidence: Tensor) -> float:
        """No budget is exceeded."""
        return 0.0

    @torch.no_grad()
    def skip(self, number: int) -> None:
        """Move the generator on by as many masks as another rank draws."""
        for _ in range(number):
            self.net.posterior.sample(temperature=self.temperature, generator=self.generator)


@dataclass(frozen=True)
class Budgeted:
    """Hard masks that meet a budget, with the gradient of ``E[m]`` (straight-through).

    The weights learn to work in small networks and the gates learn their order; a new budget every
    task serves every budget afterwards.
    """

    net: GatedNet
    chooser: Chooser
    budget: Budget

    def __call__(self, images: Tensor) -> Tensor:
        """A mask ``(num_channels,)`` of zeros and ones for the set of images."""
        return self.of(self.net.evidence(images))

    def of(self, evidence: Tensor) -> Tensor:
        """The same, for the set's evidence ``(num_channels,)``."""
        expected = self.net.posterior.keep_probability(evidence)
        if not bool(expected.detach().isfinite().all()):
            return expected  # no order of channels; the loss will not be finite either
        plan = self.chooser.choose(expected.detach().cpu().numpy(), self.budget)
        hard = torch.from_numpy(plan.keep.astype(np.float32)).to(expected)
        return hard + expected - expected.detach()

    def overspend(self, evidence: Tensor) -> Tensor:
        """By what share the expected costs exceed the budget: the penalty of a gate's step."""
        return self.chooser.overspend(self.net.posterior.keep_probability(evidence), self.budget)

    def skip(self, number: int) -> None:
        """Nothing is drawn."""


def loss(outputs: Any, targets: Tensor, net: GatedNet, kl_weight: float) -> Tensor:
    """Task loss plus weighted KL: one minibatch's share of Eq. 2.

    Args:
        outputs: logits ``(B, ways)``, or what the task's own loss takes.
        targets: labels ``(B,)``, or likewise.
        net: whose task gives the loss, and whose posterior the KL, in nats over all channels.
        kl_weight: ``kl_scale / N``, with N the size of the data set the tasks come from.
    """
    if net.task.classifies:
        own = F.cross_entropy(outputs.float(), targets)
    else:
        own = net.task.loss(net.model, outputs, targets)
    return own + kl_weight * net.posterior.kl() if kl_weight else own


def penalty(mask: Relaxed | Budgeted, evidence: Tensor, config: STAMPConfig) -> Tensor | float:
    """Weighted share by which expected costs exceed the mask's budget, in nats."""
    return config.budget_penalty * mask.overspend(evidence) if config.budget_penalty else 0.0


def forward(
    model: nn.Module, images: Tensor, config: STAMPConfig, task: Supervision = CLASSIFICATION
) -> Any:
    """Outputs for a minibatch, under bfloat16 autocast where the settings say so."""
    with torch.autocast(images.device.type, torch.bfloat16, enabled=config.amp):
        return task.outputs(model, images)


def adam(net: GatedNet, config: STAMPConfig, rate: float = 1.0) -> torch.optim.Adam:
    """Adam with the learning rates of W, pi and theta, all times ``rate`` (paper, section A.2)."""
    groups = [
        (net.weights(), config.weights_lr),
        (net.posterior.pi_parameters(), config.pi_lr),
        (net.theta(), config.theta_lr),
    ]
    fused = can_be_fused(net.parameters())
    return torch.optim.Adam(
        [{"params": p, "lr": lr * rate, "initial_lr": lr} for p, lr in groups if p],
        foreach=not fused,
        fused=fused,
    )


def can_be_fused(parameters: Iterable[Tensor]) -> bool:
    """Whether PyTorch's optimizers have one kernel for a step with these parameters."""
    return all(p.device.type in _FUSED for p in parameters)
