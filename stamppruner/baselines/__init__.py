"""Other ways to prune, on the same graph, surgery, heads and reports as STAMP."""

from stamppruner.baselines._base import Baseline, ChannelBaseline
from stamppruner.baselines._unstructured import WeightBaseline
from stamppruner.baselines.bbdropout import BBDropout
from stamppruner.baselines.edge_popup import EdgePopup
from stamppruner.baselines.full import Full
from stamppruner.baselines.magnitude import Magnitude
from stamppruner.baselines.random import Random
from stamppruner.baselines.snip import SNIP
from stamppruner.baselines.taylor import Taylor

__all__ = [
    "SNIP",
    "BBDropout",
    "Baseline",
    "ChannelBaseline",
    "EdgePopup",
    "Full",
    "Magnitude",
    "Random",
    "Taylor",
    "WeightBaseline",
]
