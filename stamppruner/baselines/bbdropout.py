"""Beta-Bernoulli dropout, learned with the weights on the target, without and with its images."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.baselines._base import ChannelBaseline
from stamppruner.baselines._dependent import Dependence, dependent
from stamppruner.baselines._learn import check_finite, draws, training
from stamppruner.channels import ChannelGraph, FloatArray
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
        epochs: passes over the sample of the target (the paper's: 200).
        weights_lr: learning rate of the weights.
        pi_lr: learning rate of the posterior.
        kl_scale: weight of the KL term next to its 1/N.
        temperature: of the relaxed masks (the authors' code: .1).
        minibatch_size: images a step (the authors' code: 100).
        settings: see :class:`~stamppruner.baselines.ChannelBaseline`.

    Raises:
        ConfigError: a value is outside its range.
    """

    name = "BBDropout"
    any_task = False

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
        self.epochs, self.minibatch_size = epochs, minibatch_size
        self.weights_lr, self.pi_lr = weights_lr, pi_lr
        self.kl_scale, self.temperature = kl_scale, temperature
        for name in ("epochs", "minibatch_size"):
            value = getattr(self, name)
            self._require(isinstance(value, int) and value >= 1, name, "a whole number from 1")
        for name in ("weights_lr", "pi_lr", "kl_scale"):
            self._require(0 <= getattr(self, name) < math.inf, name, "a finite number from 0")
        self._require(0 < temperature < math.inf, "temperature", "a finite number above 0")

    def scores(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """``E[m]`` after learning on a copy."""
        return self.learn_(copy.deepcopy(model), graph, target)

    def learn_(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """``E[pi]`` after learning, which changes the weights."""
        return _array(self.posterior_(model, graph, target).keep_probability())

    def posterior_(self, model: nn.Module, graph: ChannelGraph, target: Target) -> BetaBernoulli:
        """The posterior after learning, which changes the weights."""
        posterior = BetaBernoulli(graph.num_channels).to(first_floating(model).device)
        generator = torch.Generator().manual_seed(self.seed)
        with Gates(model, graph).injected() as gates:

            def mask(_images: Tensor) -> None:
                gates.values = posterior.sample(temperature=self.temperature, generator=generator)

            self._fit_(
                model, target, self.epochs, posterior.pi_parameters(), posterior.kl, mask, generator
            )
        return posterior

    def _fit_(
        self,
        model: nn.Module,
        target: Target,
        epochs: int,
        parameters: list[nn.Parameter],
        kl: Callable[[], Tensor],
        mask: Callable[[Tensor], None],
        generator: torch.Generator,
    ) -> None:
        """Train the weights and some parameters of the masks, which are drawn before every pass."""
        device = first_floating(model).device
        weights = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(
            [
                {"params": weights, "lr": self.weights_lr},
                {"params": parameters, "lr": self.pi_lr},
            ]
        )
        size = min(self.minibatch_size, len(target.labels))
        steps = epochs * math.ceil(len(target.labels) / size)
        schedule = torch.optim.lr_scheduler.MultiStepLR(
            optimizer, [round(steps * share) for share in _MILESTONES]
        )
        with training(model, self.seed):
            for x, y in draws(target, size, steps, generator, device):
                mask(x)
                loss = F.cross_entropy(model(x).float(), y)
                loss = loss + self.kl_scale / target.num_images * kl()
                check_finite(loss, self.name, weights_lr=self.weights_lr, pi_lr=self.pi_lr)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()


class DependentBBDropout(BBDropout):
    """Data-dependent beta-Bernoulli dropout, the second form of Lee et al. 2018 (section 3.3).

    Each image has a mask of its own: ``m_nk ~ Bernoulli(pi_k phi_k(x_nk))`` with ``phi_k(x) =
    clamp(gamma_k (x - mu_k) / sigma_k + beta_k, epsilon, 1 - epsilon)``, where ``x_nk`` is what the
    channel's first reader reads of image ``n``, averaged over its places, and ``mu``, ``sigma`` are
    statistics as of a batch norm. ``q(beta) = Normal(beta, eta^2)`` has the prior ``Normal(0,
    rho^2)``. As in the authors' code, ``pi`` and the weights are learned first, as by
    :class:`BBDropout`, and then ``gamma``, ``beta``, ``eta`` and the weights under both masks.

    Channels can be removed only for all images: they are ranked by the mean over the target of
    ``E[m_nk] = E[pi_k] phi_k(x_nk)``, and the slim network has no masks any more. In the paper the
    channels that ``pi`` leaves stay in memory, and each image skips some of them.

    Args:
        dependent_epochs: passes over the sample in the second stage (the authors' code: 200).
        settings: see :class:`BBDropout`; ``pi_lr`` is also that of ``gamma``, ``beta``, ``eta``.

    Raises:
        ConfigError: a value is outside its range.
    """

    name = "BBDropout, data-dependent"

    def __init__(self, *, dependent_epochs: int = 20, **settings: Any) -> None:
        super().__init__(**settings)
        self.dependent_epochs = dependent_epochs
        whole = isinstance(dependent_epochs, int) and dependent_epochs >= 1
        self._require(whole, "dependent_epochs", "a whole number from 1")

    def learn_(self, model: nn.Module, graph: ChannelGraph, target: Target) -> FloatArray:
        """Mean of ``E[m]`` over the target after learning, which changes the weights."""
        posterior = self.posterior_(model, graph, target).requires_grad_(False)
        device = first_floating(model).device
        phi = Dependence(graph.num_channels).to(device)
        generator = torch.Generator().manual_seed(self.seed + 1)
        with dependent(model, graph, phi) as gates:

            def mask(images: Tensor) -> None:
                pi = posterior.sample(temperature=self.temperature, generator=generator)
                gates.begin(pi, len(images), temperature=self.temperature, generator=generator)

            self._fit_(
                model, target, self.dependent_epochs, list(phi.parameters()), phi.kl, mask,
                generator,
            )  # fmt: skip
            return _array(gates.expected(posterior.keep_probability(), target, device))


def _array(values: Tensor) -> FloatArray:
    return np.asarray(values.detach().double().cpu().numpy())
