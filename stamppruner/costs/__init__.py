"""What a network costs, as exact functions of how many channels each group keeps."""

from stamppruner.costs._base import Cost, LayerWidths
from stamppruner.costs.macs import Macs
from stamppruner.costs.params import Params

__all__ = ["Cost", "LayerWidths", "Macs", "Params"]
