"""Masks that each image draws from what it puts on the channels, while it passes the network."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner import layers
from stamppruner.channels import KEPT, ChannelGraph
from stamppruner.evidence import running_statistics
from stamppruner.gates import Gates
from stamppruner.target import Target

_BATCH = 128
_MOMENTUM = 0.1
_NORM_EPSILON = 1e-5


class Dependence(nn.Module):
    """``phi_k(x) = clamp(gamma_k (x - mu_k) / sigma_k + beta_k + eta_k e, epsilon, 1 - epsilon)``.

    With ``e ~ Normal(0, 1)``, one a channel and batch, in training; 0 else. The start and
    ``epsilon`` are those of the authors' code: ``gamma = 1``, ``beta = 1``, ``eta = 1``, ``rho^2 =
    5``. Statistics are a batch's in training, and running ones else.

    Args:
        num_channels: M.
    """

    mean: Tensor
    variance: Tensor

    def __init__(
        self, num_channels: int, *, rho: float = math.sqrt(5), epsilon: float = 1e-10
    ) -> None:
        super().__init__()
        self.rho, self.epsilon = rho, epsilon
        self.gamma = nn.Parameter(torch.ones(num_channels))
        self.beta = nn.Parameter(torch.ones(num_channels))
        self.eta_uc = nn.Parameter(torch.full((num_channels,), math.log(math.e - 1)))
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("variance", torch.ones(num_channels))

    def forward(
        self, x: Tensor, channels: Tensor, generator: torch.Generator | None = None
    ) -> Tensor:
        """``phi`` ``(B, K)`` of readings ``(B, K)`` of some channels ``(K,)``.

        Readings are constants: no gradient goes through them.
        """
        x = x.detach().to(self.gamma.dtype)
        mean, variance = self.mean[channels], self.variance[channels]
        if self.training and len(x) > 1:
            mean, variance = x.mean(0), x.var(0, unbiased=False)
            self.mean[channels] = self.mean[channels].lerp(mean, _MOMENTUM)
            fair = variance * len(x) / (len(x) - 1)
            self.variance[channels] = self.variance[channels].lerp(fair, _MOMENTUM)
        h = (x - mean) / (variance + _NORM_EPSILON).sqrt()
        h = self.gamma[channels] * h + self.beta[channels]
        if self.training:
            noise = torch.randn(len(channels), generator=generator).to(h)
            h = h + F.softplus(self.eta_uc[channels]) * noise
        return h.clamp(self.epsilon, 1 - self.epsilon)

    def kl(self) -> Tensor:
        """``KL(Normal(beta, eta^2) || Normal(0, rho^2))``, in nats, summed over the channels."""
        eta = F.softplus(self.eta_uc)
        spread = (eta.square() + self.beta.square()) / (2 * self.rho**2)
        return (torch.log(self.rho / eta) + spread - 0.5).sum()


class DependentGates:
    """Gates whose values arise during a pass: the first reader of a channel decides on it.

    Readers that come later, and norms that come before, use the same mask, or what is known of it.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph, phi: Dependence) -> None:
        self.model, self.phi, self.num_channels = model, phi, graph.num_channels
        self.gates = Gates(model, graph)
        self._open: set[int] = set()
        self._temperature: float | None = None
        self._generator: torch.Generator | None = None

    def begin(
        self,
        pi: Tensor,
        count: int,
        *,
        temperature: float | None,
        generator: torch.Generator | None = None,
    ) -> None:
        """Start a pass.

        Args:
            pi: the part of the mask that no image changes, ``(M,)``.
            count: images in the pass.
            temperature: of relaxed draws of ``phi``; None takes ``phi`` itself.
            generator: of the draws, on the CPU.
        """
        self._temperature, self._generator = temperature, generator
        self._open = set(range(self.num_channels))
        self.gates.values = pi.expand(count, -1)

    def read(self, x: Tensor, channels: Tensor) -> None:
        """Let a reader's input ``(B, K)`` decide on channels ``(K,)``, all different."""
        fresh = torch.tensor([c in self._open for c in channels.tolist()], dtype=torch.bool)
        mask = self.gates.values
        if mask is None or not fresh.any():
            return
        self._open -= set(channels[fresh].tolist())
        own = channels[fresh].to(x.device)
        phi = self.phi(x[:, fresh.to(x.device)], own, self._generator)
        if self._temperature is not None:
            u = torch.rand(phi.shape, generator=self._generator).clamp(1e-6, 1 - 1e-6).to(phi)
            phi = torch.sigmoid((torch.logit(phi, 1e-6) + torch.logit(u)) / self._temperature)
        self.gates.values = mask.index_copy(1, own, mask[:, own] * phi.to(mask.dtype))

    def expected(self, pi: Tensor, target: Target, device: torch.device) -> Tensor:
        """Mean over the target of ``E[m] = E[pi] phi(x)``, ``(M,)``, on running statistics."""
        total = torch.zeros(self.num_channels, device=device)
        training = self.phi.training
        self.phi.eval()
        try:
            with running_statistics(self.model), torch.no_grad():
                for images, _ in target.batches(_BATCH, device):
                    self.begin(pi, len(images), temperature=None)
                    self.model(images)
                    values = self.gates.values
                    assert values is not None
                    total += values.sum(0)
        finally:
            self.phi.train(training)
        return total / len(target.labels)


@contextmanager
def dependent(model: nn.Module, graph: ChannelGraph, phi: Dependence) -> Iterator[DependentGates]:
    """Gates on a model inside the block, which a pass fills after :meth:`DependentGates.begin`."""
    found = DependentGates(model, graph, phi)
    handles = []
    try:
        for layer in graph.layers.values():
            held = layer.inputs != KEPT
            if layer.kind == "mixing" and held.any():
                hook = _Reading(found, layer.inputs)
                module = model.get_submodule(layer.name)
                handles.append(module.register_forward_pre_hook(hook))
        with found.gates.injected():  # after the readings: a gate masks what was read
            yield found
    finally:
        for handle in handles:
            handle.remove()


class _Reading:
    """Forward pre-hook that averages what a layer reads of every channel and image."""

    def __init__(self, gates: DependentGates, inputs: Any) -> None:
        held = inputs != KEPT
        channels, places = np.unique(inputs[held], return_inverse=True)
        self.gates = gates
        self.positions = torch.from_numpy(np.flatnonzero(held))
        self.channels, self.places = torch.from_numpy(channels), torch.from_numpy(places)
        self.counts = torch.bincount(self.places)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0].detach()
        values = self.gates.gates.values
        if values is None:
            return
        if x.dim() > 2:
            x = x.movedim(layers.channel_axis(module, x.dim()), 1).flatten(2).mean(2)
        if len(x) != len(values):  # frames or windows of an image
            x = x.unflatten(0, (len(values), -1)).mean(1)
        x = x[:, self.positions.to(x.device)]
        sums = x.new_zeros(len(x), len(self.channels)).index_add(1, self.places.to(x.device), x)
        self.gates.read(sums / self.counts.to(x), self.channels)
