"""Encoders of a set of images into pseudo images."""

from stamppruner.encoders._base import SetEncoder
from stamppruner.encoders.deep_sets import DeepSets
from stamppruner.encoders.set_transformer import SetTransformer

__all__ = ["DeepSets", "SetEncoder", "SetTransformer"]
