"""The paper's posterior: beta-Bernoulli dropout whose probability the set's evidence scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from stamppruner.errors import ConfigError
from stamppruner.posteriors import _kumaraswamy as kumaraswamy
from stamppruner.posteriors._base import Posterior, concrete, uniform, widened

_LEAST_UNCONSTRAINED = -10.0  # softplus = 4.5e-5; below it 1/a and 1/b overflow
_LEAST_KEEP, _LARGEST_KEEP = 0.02, 0.98


class BetaBernoulli(Posterior):
    """Set-based beta-Bernoulli dropout (paper's eqs. ``bbdrop`` and ``set-bbdrop``).

    ``m_c ~ Bernoulli(pi_c psi(gamma_c o_c + beta_c))``, ``pi_c ~ Kumaraswamy(a_c, b_c)``,
    ``psi(x) = min(1 - epsilon, max(epsilon, x))``, prior ``pi_c ~ Beta(alpha, 1)`` and
    ``beta_c ~ Normal(0, beta_variance)``. ``a`` and ``b`` are softplus of the parameters ``a_uc``
    and ``b_uc`` (M,); both these and ``psi`` have no gradient where they are clamped. Without
    evidence ``psi = 1``: the data-independent dropout of Lee et al. 2018.

    Where the paper is silent: ``epsilon``, the start of ``gamma`` and ``beta`` (with both 1 most
    channels are clamped, for evidence standardised to mean 0 and deviation 1), and their
    optimiser group, which is ``theta`` (at the rate of ``pi`` all gates collapse).

    Args:
        num_channels: M, at least 1.
        alpha: of the prior, above 0; small values favour few channels.
        epsilon: in (0, 0.5), distance of ``psi`` from 0 and 1.
        gamma: start of the scale of the evidence.
        beta: start of the shift of the evidence.
        beta_variance: of the prior of ``beta``, above 0 (``b`` in the paper).
        initial_keep: ``E[pi]`` of every channel at the start, in [.02, .98].

    Raises:
        ConfigError: a value is outside its range.
    """

    def __init__(
        self,
        num_channels: int,
        *,
        alpha: float = 1e-4,
        epsilon: float = 1e-3,
        gamma: float = 0.1,
        beta: float = 0.9,
        beta_variance: float = 5.0,
        initial_keep: float = 0.8,
    ) -> None:
        super().__init__(num_channels)
        _require(alpha > 0, "alpha", alpha, "above 0")
        _require(0 < epsilon < 0.5, "epsilon", epsilon, "in (0, 0.5)")
        _require(beta_variance > 0, "beta_variance", beta_variance, "above 0")
        _require(
            _LEAST_KEEP <= initial_keep <= _LARGEST_KEEP,
            "initial_keep",
            initial_keep,
            "in [.02, .98]",
        )
        self.alpha = alpha
        self.epsilon = epsilon
        self.beta_variance = beta_variance
        self.a_uc = nn.Parameter(torch.empty(num_channels))
        self.b_uc = nn.Parameter(torch.empty(num_channels))
        self.gamma = nn.Parameter(torch.full((num_channels,), float(gamma)))
        self.beta = nn.Parameter(torch.full((num_channels,), float(beta)))
        self.warm_start(torch.full((num_channels,), initial_keep))

    def keep_probability(self, evidence: Tensor | None = None) -> Tensor:
        """Returns ``E[m] = E[pi] psi(gamma o + beta)`` (M,), eq. ``set-bbdrop-approx``.

        See :meth:`Posterior.keep_probability` for the argument and errors.
        """
        expected_pi = kumaraswamy.mean(*self._a_b()).to(self.a_uc.dtype)
        return expected_pi if evidence is None else expected_pi * self._psi(evidence)

    def sample(
        self,
        evidence: Tensor | None = None,
        *,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns a relaxed draw (M,) of ``m``, after a draw of ``pi`` (eq. ``set-bbdrop``).

        See :meth:`Posterior.sample` for the arguments and errors.
        """
        self._check_temperature(temperature)
        a, b = self._a_b()
        u_pi, u_m = uniform(2, a, generator)
        log_p = kumaraswamy.log_sample(a, b, u_pi)
        if evidence is not None:
            log_p = log_p + torch.log(widened(self._psi(evidence)))
        return concrete(log_p, u_m, temperature).to(self.a_uc.dtype)

    def kl(self) -> Tensor:
        """Returns the KL of ``pi`` plus ``sum beta^2 / (2 beta_variance)`` (), in nats.

        Eq. ``set-bbdrop-kl``; its second term leaves out the constants of a point estimate.
        """
        pi_term = kumaraswamy.kl_to_beta(*self._a_b(), self.alpha).sum()
        beta_term = widened(self.beta).square().sum() / (2 * self.beta_variance)
        return (pi_term + beta_term).to(self.a_uc.dtype)

    @torch.no_grad()
    def warm_start(self, keep: Tensor) -> None:
        """Sets ``b = 1`` and ``a = keep / (1 - keep)``, so that ``E[pi] = a / (a + 1) = keep``.

        ``gamma`` and ``beta`` stay. See :meth:`Posterior.warm_start` for the argument and errors.
        """
        self._check_keep(keep)
        keep = widened(keep.detach()).clamp(_LEAST_KEEP, _LARGEST_KEEP)
        self.a_uc.copy_(_inverse_softplus(keep / (1 - keep)))
        self.b_uc.copy_(_inverse_softplus(torch.ones_like(keep)))

    def pi_parameters(self) -> list[nn.Parameter]:
        """Returns ``a_uc`` and ``b_uc``."""
        return [self.a_uc, self.b_uc]

    def theta_parameters(self) -> list[nn.Parameter]:
        """Returns ``gamma`` and ``beta``."""
        return [self.gamma, self.beta]

    def _a_b(self) -> tuple[Tensor, Tensor]:
        a_uc, b_uc = (widened(uc).clamp(min=_LEAST_UNCONSTRAINED) for uc in (self.a_uc, self.b_uc))
        return F.softplus(a_uc), F.softplus(b_uc)

    def _psi(self, evidence: Tensor) -> Tensor:
        self._check_vector("evidence", evidence)
        score = self.gamma * evidence.to(self.gamma.dtype) + self.beta
        return score.clamp(self.epsilon, 1 - self.epsilon)


def _inverse_softplus(x: Tensor) -> Tensor:
    return x + torch.log(-torch.expm1(-x))


def _require(holds: bool, name: str, value: float, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"BetaBernoulli: {name}={value}; pass a value {allowed}.")
