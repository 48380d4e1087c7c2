"""Bytes of a slim file."""

from __future__ import annotations

import json

import numpy as np
from torch import Tensor, nn

from stamppruner.channels import ChannelGraph, ChannelPlan
from stamppruner.costs._base import HERE, Setting
from stamppruner.costs._elements import Elements

_PLACE = 8
"""Bytes of the place of a channel."""

_FACTS = 4096
"""Bytes for what else a file's header says: settings, versions, digest."""


class SizeBytes(Elements):
    """What the file of :meth:`PruneResult.save` takes at most: all weights and its header.

    The header (names, shapes, kept channels) and the places that rewired layers store count as if
    nothing were removed, which is some thousand bytes too much.

    Attributes:
        header: bytes of them.
    """

    name, unit = "size_bytes", "bytes"
    header = 0

    def __init__(self, model: nn.Module, graph: ChannelGraph, setting: Setting = HERE) -> None:
        super().__init__(model, graph, setting)
        shapes = {n: [*t.shape, t.numel(), t.numel()] for n, t in model.state_dict().items()}
        kept = json.dumps(json.dumps([ChannelPlan.full(graph).record(), shapes]))
        header = len(json.dumps(shapes)) + 60 * len(shapes) + len(kept) + _FACTS
        self.header = header + _places(graph)
        self.full += self.header

    @property
    def constant(self) -> float:
        """What the graph does not list, and the header."""
        return super().constant + self.header

    def weight(self, tensor: Tensor) -> int:
        """Bytes an element."""
        return tensor.element_size()


def _places(graph: ChannelGraph) -> int:
    """Bytes of the places that rewired layers store, at most."""
    moved = np.append(graph.stays_wide, False)  # KEPT is the last
    layers = [m for m in graph.layers.values() if m.whole or moved[[*m.inputs, *m.outputs]].any()]
    return sum(_PLACE * (len(m.inputs) + len(m.outputs)) for m in layers)
