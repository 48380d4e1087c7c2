"""Posteriors over the keep masks of a network's channels."""

from stamppruner.posteriors._base import Posterior
from stamppruner.posteriors.beta_bernoulli import BetaBernoulli

__all__ = ["BetaBernoulli", "Posterior"]
