"""BBDropout: beta-Bernoulli dropout, learned with the weights on the target."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from stamppruner.baselines._base import ChannelBaseline
from stamppruner.channels import ChannelGraph, FloatArray
from stamppruner.errors import ConfigError
from stamppruner.gates import Gates
from stamppruner.layers import first_floating
from stamppruner.posteriors import BetaBernoulli
from stamppruner.target import Target

_MILESTONES = (0.5, 0.8)
"""Shares of the steps after which learning rates are divided by ten."""


class BBDropout(ChannelBaseline):
    """Data-independent beta-Bernoulli dropout (Lee et al. 2018, "Adaptive Network Sparsification").

    Weights and the keep probabilities of all channels are learned together on the target, by
    ``cross-entropy + kl_scale / N * KL`` under relaxed masks, with Adam; rates fall to a tenth at
    50% and 80% of the steps (STAMP's section A.2). Channels are ranked by ``E[pi]``, so that a
    budget is met, where the paper cuts at a threshold.

    Args:
        epochs: passes over the sample of the target.
        weights_lr: learning rate of the weights.
        pi_lr: learning rate of the posterior.
        kl_scale: weight of the KL term next to its 1/N.
        temperature: of the relaxed masks.
        minibatch_size: images a step.
        settings: see :class:`~stamppruner.baselines.Baseline`.

    Raises:
        ConfigError: a value is outside its range.
    """

    name = "BBDropout"

    def __init__(
        self,
        *,
        epochs: int = 20,
        weights_lr: float = 1e-3,
        pi_lr: float = 1e-2,
        kl_scale: float = 1.0,
        temperature: float = 0.67,
        minibatch_size: int = 64,
        **settings: Any,
    ) -> None:
        super().__init__(**settings)
        for name, value in (("epochs", epochs), ("minibatch_size", minibatch_size)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"BBDropout({name}={value!r}): pass a whole number from 1")
        for name, rate in (("weights_lr", weights_lr), ("pi_lr", pi_lr), ("kl_scale", kl_scale)):
            if not 0 <= rate < math.inf:
                raise ConfigError(f"BBDropout({name}={rate!r}): pass a finite number from 0")
        self.epochs, self.minibatch_size = epochs, minibatch_size
        self.weights_lr, self.pi_lr = weights_lr, pi_lr
        self.kl_scale, self.temperature = kl_scale, temperature

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """``E[pi]`` after learning on a copy."""
        return self.learn_(copy.deepcopy(model), graph, target)

    @torch.enable_grad()
    def learn_(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """``E[pi]`` after learning, which changes the weights."""
        device = first_floating(model).device
        posterior = BetaBernoulli(graph.num_channels).to(device)
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(
            [
                {"params": weights, "lr": self.weights_lr},
                {"params": posterior.pi_parameters(), "lr": self.pi_lr},
            ]
        )
        count, size = len(target.labels), min(self.minibatch_size, len(target.labels))
        steps = self.epochs * math.ceil(count / size)
        schedule = torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [round(steps * share) for share in _MILESTONES]
        )
        generator = torch.Generator().manual_seed(self.seed)
        modes = [(module, module.training) for module in model.modules()]
        model.train()
        try:
            with Gates(model, graph).injected() as gates, torch.random.fork_rng([]):
                torch.manual_seed(self.seed)  # of dropout layers of the model's own
                for _ in range(steps):
                    chosen = torch.randperm(count, generator=generator)[:size]
                    x, y = target.images[chosen].to(device), target.labels[chosen].to(device)
                    gates.values = posterior.sample(
                        temperature=self.temperature, generator=generator
                    )
                    loss = F.cross_entropy(model(x).float(), y)
                    loss = loss + self.kl_scale / target.num_images * posterior.kl()
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    schedule.step()
        finally:
            for module, training in modes:
                module.training = training
        with torch.no_grad():
            return np.asarray(posterior.keep_probability().cpu().numpy())
