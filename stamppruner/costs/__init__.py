"""What a network costs, as exact functions of how many channels each group keeps."""

from stamppruner.costs._base import HERE, Cost, LayerWidths, Setting, check_amp
from stamppruner.costs.latency import Latency, LatencyMs, TrainStepMs
from stamppruner.costs.macs import Macs
from stamppruner.costs.memory import ActivationBytes, TrainBytes
from stamppruner.costs.params import Params
from stamppruner.costs.size import SizeBytes

__all__ = [
    "HERE",
    "ActivationBytes",
    "Cost",
    "Latency",
    "LatencyMs",
    "LayerWidths",
    "Macs",
    "Params",
    "Setting",
    "SizeBytes",
    "TrainBytes",
    "TrainStepMs",
    "check_amp",
]
