"""Other ways to choose channels, on the same graph, surgery, heads and reports as STAMP."""

from stamppruner.baselines._base import Baseline
from stamppruner.baselines.bbdropout import BBDropout
from stamppruner.baselines.full import Full
from stamppruner.baselines.magnitude import Magnitude
from stamppruner.baselines.random import Random
from stamppruner.baselines.taylor import Taylor

__all__ = ["BBDropout", "Baseline", "Full", "Magnitude", "Random", "Taylor"]
