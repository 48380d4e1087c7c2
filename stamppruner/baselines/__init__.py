"""Other ways to prune, on the same graph, surgery, heads and reports as STAMP."""

from stamppruner.baselines._base import Baseline, ChannelBaseline
from stamppruner.baselines._unstructured import WeightBaseline
from stamppruner.baselines.bbdropout import BBDropout, DependentBBDropout
from stamppruner.baselines.bn_scale import BNScale
from stamppruner.baselines.edge_popup import EdgePopup
from stamppruner.baselines.fpgm import FPGM
from stamppruner.baselines.full import Full
from stamppruner.baselines.hessian import Hessian
from stamppruner.baselines.lamp import LAMP
from stamppruner.baselines.magnitude import Magnitude
from stamppruner.baselines.meta_pruning import MetaPruning
from stamppruner.baselines.random import Random
from stamppruner.baselines.random_widths import RandomWidths
from stamppruner.baselines.snip import SNIP
from stamppruner.baselines.taylor import Taylor

BASELINES: dict[str, type[Baseline]] = {
    kind.__name__: kind
    for kind in (
        Full,
        Random,
        RandomWidths,
        Magnitude,
        FPGM,
        LAMP,
        BNScale,
        Hessian,
        Taylor,
        BBDropout,
        DependentBBDropout,
        MetaPruning,
        SNIP,
        EdgePopup,
    )
}
"""Every method, by the name of its class."""

__all__ = [
    "BASELINES",
    "FPGM",
    "LAMP",
    "SNIP",
    "BBDropout",
    "BNScale",
    "Baseline",
    "ChannelBaseline",
    "DependentBBDropout",
    "EdgePopup",
    "Full",
    "Hessian",
    "Magnitude",
    "MetaPruning",
    "Random",
    "RandomWidths",
    "Taylor",
    "WeightBaseline",
]
