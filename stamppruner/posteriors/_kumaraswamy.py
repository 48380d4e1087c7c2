"""The Kumaraswamy distribution, in logarithms: ``q(x) = a b x^(a-1) (1 - x^a)^(b-1)``."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EULER_GAMMA = 0.5772156649015329


def mean(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``E[x] = b Gamma(1 + 1/a) Gamma(b) / Gamma(1 + 1/a + b)``, shape of ``a``."""
    x = 1 + 1 / a
    return torch.exp(torch.lgamma(b + 1) + torch.lgamma(x) - torch.lgamma(x + b))


def log_sample(a: Tensor, b: Tensor, u: Tensor) -> Tensor:
    """Returns ``log x`` of ``x = (1 - u^(1/b))^(1/a)``, for ``u`` inside (0, 1)."""
    return torch.log(-torch.expm1(torch.log(u) / b)) / a


def kl_to_beta(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Returns ``KL(Kumaraswamy(a, b) || Beta(alpha, 1))``, in nats, shape of ``a``.

    Exact for every ``alpha`` (Nalisnick and Smyth 2016: their series vanishes where the prior's
    second parameter is 1). ``digamma(b + 1)`` stands for ``digamma(b) + 1/b``, which cancels.
    """
    drift = -(1 - alpha / a) * (EULER_GAMMA + torch.digamma(b + 1))
    return drift + torch.log(a) + torch.log(b) - math.log(alpha) - 1 + 1 / b
