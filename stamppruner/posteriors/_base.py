"""What every posterior over keep masks has in common."""

from __future__ import annotations

import abc
import math

import torch
from torch import Tensor, nn

from stamppruner.errors import ConfigError, DataError

_LARGEST_LOG_P = -1e-12


class Posterior(nn.Module, abc.ABC):
    """Distribution of a mask ``m`` over all removable channels of a network, as a vector (M,).

    Args:
        num_channels: M, at least 1.

    Raises:
        ConfigError: ``num_channels`` is below 1.
    """

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        if num_channels < 1:
            raise ConfigError(
                f"{type(self).__name__}: num_channels={num_channels}; "
                "pass the number of removable channels, at least 1."
            )
        self.num_channels = num_channels

    @abc.abstractmethod
    def keep_probability(self, evidence: Tensor | None = None) -> Tensor:
        """Returns ``E[m]`` (M,), differentiable in the parameters and in the evidence.

        Args:
            evidence: ``o`` (M,), one value a channel; None leaves the data out.

        Raises:
            DataError: the evidence is not a real (M,) tensor.
        """

    @abc.abstractmethod
    def sample(
        self,
        evidence: Tensor | None = None,
        *,
        temperature: float,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Returns a relaxed mask (M,) in [0, 1], reparameterised.

        Args:
            evidence: as in :meth:`keep_probability`.
            temperature: of the concrete distribution, above 0; towards 0 the mask turns binary.
            generator: source of the noise, on any device; None is torch's own generator.

        Raises:
            ConfigError: the temperature is not a finite number above 0.
            DataError: the evidence is not a real (M,) tensor.
        """

    @abc.abstractmethod
    def kl(self) -> Tensor:
        """Returns the KL divergence to the prior (), in nats, summed over the channels."""

    @abc.abstractmethod
    def warm_start(self, keep: Tensor) -> None:
        """Sets the parameters so that :meth:`keep_probability` without evidence is ``keep``.

        Args:
            keep: (M,) in [0, 1]; clamped to [.02, .98], where gradients are alive.

        Raises:
            DataError: ``keep`` is not a real (M,) tensor within [0, 1].
        """

    @abc.abstractmethod
    def pi_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the optimiser group ``pi``."""

    @abc.abstractmethod
    def theta_parameters(self) -> list[nn.Parameter]:
        """Returns the parameters of the optimiser group ``theta``."""

    def _check_vector(self, name: str, value: Tensor) -> None:
        if value.shape != (self.num_channels,) or not value.is_floating_point():
            raise DataError(
                f"{type(self).__name__}: {name} is {value.dtype} of shape {tuple(value.shape)}; "
                f"pass a floating-point tensor of shape ({self.num_channels},)."
            )

    def _check_keep(self, keep: Tensor) -> None:
        self._check_vector("keep", keep)
        if not bool(((keep >= 0) & (keep <= 1)).all()):
            raise DataError(
                f"{type(self).__name__}: keep has values outside [0, 1], from "
                f"{keep.min().item():.4g} to {keep.max().item():.4g}; rescale the scores first."
            )

    def _check_temperature(self, temperature: float) -> None:
        if not (0 < temperature < math.inf):
            raise ConfigError(
                f"{type(self).__name__}: temperature={temperature}; "
                "pass a finite number above 0, for example 0.67."
            )


def widened(x: Tensor) -> Tensor:
    """Returns ``x`` in float64, where the device has it: differences of log-gammas cancel."""
    return x if x.device.type == "mps" else x.double()


def uniform(rows: int, like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Returns noise (rows, M) strictly inside (0, 1), on the device and in the dtype of ``like``.

    Drawn on the generator's device, so that a CPU generator serves a network on another.
    """
    device = like.device if generator is None else generator.device
    dtype = torch.float32 if device.type == "mps" else like.dtype
    u = torch.rand(rows, like.shape[0], generator=generator, device=device, dtype=dtype)
    edge = torch.finfo(dtype).eps
    return u.clamp(edge, 1 - edge).to(like)


def concrete(log_p: Tensor, u: Tensor, temperature: float) -> Tensor:
    """Returns a relaxed Bernoulli draw (M,) of probability ``exp(log_p)``, from uniform ``u``.

    ``sigmoid((logit(p) + logit(u)) / temperature)`` (Maddison et al. 2017, eq. 9), with ``p`` kept
    as its logarithm: a sampled ``pi`` may be far below the least number of its dtype.
    """
    log_p = log_p.clamp(max=_LARGEST_LOG_P)
    logit_p = log_p - torch.log(-torch.expm1(log_p))
    return torch.sigmoid((logit_p + torch.logit(u)) / temperature)
